"""The topology of a job (nodes, their hosts and the ranks of their workers), and sets of ranks.

A `Topology` is one membership epoch's fixed assignment. Ranks fill nodes in order in jobs that `fusionrun` starts,
but nothing here relies on it; nodes may have different numbers of workers, or none: such a node only keeps parameter
shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec

from fusion_rt.core.errors import FusionError, SettingError

GLOBAL_SET = 0  # id of the process set that holds every rank


class Topology(msgspec.Struct, frozen=True, dict=True):
    """The nodes of a job and the ranks of their workers.

    Attributes:
        hosts: name of each node's host, by node index.
        ranks: ranks of each node's workers in order of local_rank, by node index; () for a node without workers.
    """

    hosts: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        everyone = sorted(rank for node in self.ranks for rank in node)
        if len(self.hosts) != len(self.ranks) or not everyone or everyone != list(range(len(everyone))):
            raise ValueError(f"hosts {self.hosts} and ranks {self.ranks} are not a topology: one tuple of ranks "
                             "per host and every rank from 0 exactly once are needed")  # fmt: skip

    @cached_property
    def _nodes_of_ranks(self) -> dict[int, int]:
        return {rank: node for node, ranks in enumerate(self.ranks) for rank in ranks}

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._nodes_of_ranks)

    def node_of(self, rank: int) -> int:
        """Returns the index of the node on which `rank` runs.

        Raises:
            FusionError: there is no such rank.
        """
        node = self._nodes_of_ranks.get(rank)
        if node is None:
            raise FusionError(f"there is no rank {rank} in a job of {self.size} ranks")
        return node

    def local_rank(self, rank: int) -> int:
        return self.ranks[self.node_of(rank)].index(rank)

    def local_size(self, rank: int) -> int:
        return len(self.ranks[self.node_of(rank)])

    def cross_rank(self, rank: int) -> int:
        """Returns the position of the rank's node among the nodes that have a worker of the same local_rank."""
        local_rank, node = self.local_rank(rank), self.node_of(rank)
        return sum(1 for ranks in self.ranks[:node] if len(ranks) > local_rank)

    def cross_size(self, rank: int) -> int:
        """Returns the number of nodes that have a worker of the rank's local_rank."""
        local_rank = self.local_rank(rank)
        return sum(1 for ranks in self.ranks if len(ranks) > local_rank)

    def describe(self, ranks: Iterable[int]) -> str:
        """Formats ranks with their hosts, for error messages: `ranks 0-2 (host a), rank 3 (host b)`."""
        wanted = set(ranks)
        parts = []
        for host, node_ranks in zip(self.hosts, self.ranks, strict=True):
            here = sorted(wanted.intersection(node_ranks))
            if here:
                parts.append(f"rank{'s' if len(here) > 1 else ''} {_spans(here)} (host {host})")
        return ", ".join(parts)

    def describe_node(self, node: int) -> str:
        """Formats a node by its workers, for error messages: `ranks 0-1 (host a)`, or `host c (no workers)`."""
        return self.describe(self.ranks[node]) or f"host {self.hosts[node]} (no workers)"

    def homes(self, shard_hosts: str) -> tuple[int, ...]:
        """Returns the indices, ascending, of the nodes that may be homes of parameter shards.

        Args:
            shard_hosts: names of their hosts, separated by commas; "": every node that has workers.

        Raises:
            SettingError: a name is not that of a host of this job, or is given twice.
        """
        if not shard_hosts.strip():
            return tuple(node for node, ranks in enumerate(self.ranks) if ranks)
        names = [name.strip() for name in shard_hosts.split(",")]
        for name in names:
            if name not in self.hosts:
                raise SettingError(
                    f"shard host {name!r} (FUSION_SHARD_HOSTS) is no host of this job, whose hosts are "
                    f"{', '.join(dict.fromkeys(self.hosts))}; name some of these"
                )
            if names.count(name) > 1:
                raise SettingError(f"shard host {name!r} (FUSION_SHARD_HOSTS) is named twice; name it once")
        return tuple(node for node, host in enumerate(self.hosts) if host in names)


class ProcessSet(msgspec.Struct, frozen=True, dict=True):
    """A named subset of the ranks, in rank order, within which a collective runs."""

    id: int
    ranks: tuple[int, ...]

    @cached_property
    def _members(self) -> frozenset[int]:
        return frozenset(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self._members

    def nodes(self, topology: Topology) -> tuple[int, ...]:
        """Returns the indices of the nodes that have a member, ascending."""
        return tuple(n for n, ranks in enumerate(topology.ranks) if not self._members.isdisjoint(ranks))

    def local(self, topology: Topology, node: int) -> tuple[int, ...]:
        """Returns the members on one node, in order of local_rank."""
        return tuple(rank for rank in topology.ranks[node] if rank in self._members)


def _spans(numbers: list[int]) -> str:
    """Formats sorted numbers as spans: `0-2,5` for [0, 1, 2, 5]."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
