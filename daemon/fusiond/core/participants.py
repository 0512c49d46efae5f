"""Participants of operations: the process sets, and the ranks that have left or joined. No I/O.

A rank that has *joined* has no data left, but the others may go on: until every rank has joined it contributes nothing
to their all-reduces in the global set, and takes part in nothing else.

A rank that is *lost* will not come back: operations without data go on without it, all others that it belongs to fail.

A *group* is a process set that only its members know, each node of them as soon as one of its ranks has opened it. What
joins is no business of a group, and none of its operations goes on without a lost rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import GLOBAL_SET, ProcessSet, Topology


@dataclass(frozen=True)
class Members:
    """A process set as a node sees it: its nodes, ascending, and its local members in order of local_rank. Nodes and
    ranks that are lost are only in `set`."""

    set: ProcessSet
    nodes: tuple[int, ...]
    local: tuple[int, ...]


@dataclass
class Group:
    """The state of a group on a node.

    Attributes:
        opened, closed: the local ranks that have opened and closed it.
        broken: why nothing can be right in it any more; empty if it can.
    """

    key: str
    opened: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    broken: str = ""


class Participants:
    """The process sets of a job, and the ranks that are away. Every node has the same, in the same order.

    Attributes:
        topology: of this membership epoch.
        departed: ranks that have left, in good order or not.
        lost: why, by rank, of those that did not.
        lost_nodes: those that were declared lost, or took no part from the beginning.
        joined: ranks that have joined, in the order in which this node heard of them.
        joins: how many times all ranks had joined, and went on together.
        groups: those that a local rank has opened, by id; also closed ones, whose keys are not used again.
    """

    def __init__(self, topology: Topology, node: int, absent: Collection[int] = ()) -> None:
        self.topology = topology
        self.departed: set[int] = set()
        self.lost: dict[int, str] = {}
        self.lost_nodes = set(absent)
        self.joined: list[int] = []
        self.joins = 0
        self.groups: dict[int, Group] = {}
        self._node = node
        self._members: dict[int, Members] = {}
        self._next = GLOBAL_SET
        self.add(range(topology.size))

    def __contains__(self, process_set: int) -> bool:
        return process_set in self._members

    def members(self, process_set: int) -> Members:
        """Returns the members of a process set. Raises `FusionError` when there is no such set."""
        try:
            return self._members[process_set]
        except KeyError:
            group = self.groups.get(process_set)
            raise FusionError(
                f"group {group.key!r} has been closed" if group else f"there is no process set {process_set}"
            ) from None

    def is_over(self, process_set: int) -> bool:
        """Returns whether there was such a process set, and it has been removed.

        A group that is not here is over, since it is not used before all of its members have opened it.
        """
        return (process_set < self._next or wire.is_group(process_set)) and process_set not in self._members

    def find(self, ranks: Sequence[int]) -> int | None:
        """Returns the id of the process set of these ranks (ascending); None if there is none."""
        wanted = tuple(ranks)
        return next((id for id, ranks in self.sets().items() if ranks == wanted), None)

    def add(self, ranks: Sequence[int]) -> int:
        """Adds the process set of these ranks (ascending) and returns its id."""
        added = ProcessSet(self._next, tuple(ranks))
        self._members[added.id] = self._seen(added)
        self._next += 1
        return added.id

    def open_group(self, key: str, ranks: Sequence[int], rank: int) -> None:
        """A local rank opens the group of these ranks (ascending).

        Raises:
            FusionError: it has been opened by that rank, the key is that of other ranks, or its id of another key.
        """
        id = wire.group_id(key)
        group = self.groups.get(id)
        if rank not in ranks or list(ranks) != sorted(set(ranks)) or ranks[-1] >= self.topology.size:
            raise FusionError(
                f"rank {rank} opened group {key!r} of ranks {list(ranks)}; a group has different ranks of 0 to "
                f"{self.topology.size - 1}, and its opener is one of them"
            )
        if group is None:
            group = self.groups[id] = Group(key)
            self._members[id] = self._seen(ProcessSet(id, tuple(ranks)))
        if group.key != key:
            raise FusionError(f"the keys {key!r} and {group.key!r} of two groups have one id, {id}; choose another key")
        if rank in group.opened or id not in self._members:
            raise FusionError(f"rank {rank} opened group {key!r} a second time; a key is used once, choose another one")
        if self._members[id].set.ranks != tuple(ranks):
            raise FusionError(
                f"rank {rank} opened group {key!r} of ranks {list(ranks)}, and "
                f"{self.topology.describe(group.opened)} opened it of ranks {list(self._members[id].set.ranks)}"
            )
        group.opened.add(rank)

    def why_closed(self, id: int) -> str:
        """Returns why nothing may be submitted in a group, as a sentence; empty if it may."""
        group = self.groups.get(id)
        if group is None:
            return f"no rank here has opened group {id}"
        return f"{self.topology.describe(group.closed)} closed the group" if group.closed else group.broken

    def _seen(self, process_set: ProcessSet) -> Members:
        nodes, local = process_set.nodes(self.topology), process_set.local(self.topology, self._node)
        if self.lost:
            nodes = tuple(n for n in nodes if any(r not in self.lost for r in process_set.local(self.topology, n)))
            local = tuple(rank for rank in local if rank not in self.lost)
        return Members(process_set, nodes, local)

    def lose(self, ranks: Mapping[int, str]) -> None:
        """Marks ranks as lost; `ranks`: the reason for each."""
        self.lost.update(ranks)
        self.departed.update(ranks)
        self.joined[:] = [rank for rank in self.joined if rank not in self.lost]
        self._members = {id: self._seen(members.set) for id, members in self._members.items()}

    @property
    def everyone(self) -> Members:
        """The members of the set of all ranks."""
        return self._members[GLOBAL_SET]

    @property
    def next_set(self) -> int:
        """The id that the next process set gets."""
        return self._next

    @next_set.setter
    def next_set(self, next_set: int) -> None:
        self._next = max(self._next, next_set)

    def sets(self) -> dict[int, tuple[int, ...]]:
        """Returns the ranks of each process set that all ranks know, by id."""
        return {id: members.set.ranks for id, members in self._members.items() if not wire.is_group(id)}

    def remove(self, process_set: int) -> None:
        """Removes a process set."""
        del self._members[process_set]

    def away(self, members: Members) -> Collection[int]:
        """Returns the ranks without which operations of these members go on."""
        return self.joined if members.set.id == GLOBAL_SET else ()

    def awaited(self, members: Members) -> tuple[int, ...]:
        """Returns the ranks of these members without which their operations do not go on."""
        away = {*self.lost, *self.away(members)}
        return members.set.ranks if not away else tuple(rank for rank in members.set.ranks if rank not in away)

    def awaited_nodes(self, members: Members) -> tuple[int, ...]:
        """Returns the nodes that have a member which is not away."""
        away = set(self.away(members))
        if not away:
            return members.nodes
        return tuple(
            n for n in members.nodes if any(r not in away and r not in self.lost for r in self.topology.ranks[n])
        )

    def why_not_since(self, what: str, members: Members, carries: bool = True) -> str:
        """Returns why an operation or an algorithm cannot run since ranks are lost, as a sentence; empty when it can.

        Args:
            what: the kind, or the algorithm.
            carries: it has data.
        """
        lost = sorted(rank for rank in self.lost if rank in members.set)
        group = self.groups.get(members.set.id)
        if not lost or (not carries and group is None):
            return ""
        whose = "all ranks" if members.set.id == GLOBAL_SET else f"all ranks of process set {members.set.id}"
        add = "add a process set"
        if group is not None:
            whose, add = f"all ranks of group {group.key!r}", "open a group"
        return (
            f"{what} needs {whose}, and {self.topology.describe(lost)} is lost ({self.lost[lost[0]]}); {add} of those "
            "that are left"
        )

    def why_not(self, kind: wire.Kind, members: Members, present: Collection[int]) -> str:
        """Returns why an operation cannot run since ranks have joined, as a sentence; empty when it can.

        Args:
            present: ranks that submitted it, maybe before they joined.
        """
        absent = [rank for rank in self.joined if rank in members.set and rank not in present]
        if not absent or kind == "join" or wire.is_group(members.set.id):
            return ""
        who = self.topology.describe(absent)
        if members.set.id != GLOBAL_SET:
            return f"{who} cannot take part in process set {members.set.id} after join(), until every rank has joined"
        if not wire.KINDS[kind].joinable:
            sparse = " (sparse gradients are gathered, unless DistributedOptimizer has sparse_as_dense=True)"
            hint = sparse if kind == "allgather" else ""
            possible = " and ".join(other for other, its in wire.KINDS.items() if its.joinable and its.carries)
            return f"{kind} is not possible while some ranks have joined: {who}; use {possible} until all have{hint}"
        return ""

    def statistics(self) -> dict[str, object]:
        """Returns the ranks of each process set by id, and of each group by key, and those that have `joined`."""
        sets = {str(id): list(ranks) for id, ranks in self.sets().items()}
        groups = {g.key: list(self._members[id].set.ranks) for id, g in self.groups.items() if id in self._members}
        return {"sets": sets, "joined": list(self.joined), "groups": groups}
