"""The places of a membership epoch: hosts in the order of nodes, their slots, and the ranks of these."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TypeAlias

from fusion_rt.core.errors import SettingError
from fusion_rt.core.topology import Topology
from fusion_rt.runner.decisions.host_list import Host, parse_host

_SHARD_HOSTS = "--shard-hosts (FUSION_SHARD_HOSTS)"
Place: TypeAlias = tuple[str, int]  # a host's name and a slot there


@dataclass(frozen=True)
class Places:
    """The places of one epoch.

    Attributes:
        hosts: by node.
        slots: those in use, by node and local_rank.
        topology: the ranks.
        absent: nodes that are not in the epoch: hosts of the job that are lost, gone, or not back yet.
    """

    hosts: tuple[Host, ...]
    slots: tuple[tuple[int, ...], ...]
    topology: Topology
    absent: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.topology.size

    @cached_property
    def ranks(self) -> dict[Place, int]:
        """The rank of each place."""
        return {
            (host.name, slot): rank
            for host, slots, ranks in zip(self.hosts, self.slots, self.topology.ranks, strict=True)
            for slot, rank in zip(slots, ranks, strict=True)
        }

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the hosts that are in the epoch, in the order of their lowest ranks; last those without any."""
        by_node = [host.name for node, host in enumerate(self.hosts) if node not in self.absent]
        of_ranks = [name for (name, _), _ in sorted(self.ranks.items(), key=itemgetter(1))]
        return tuple(dict.fromkeys(of_ranks + by_node))

    @cached_property
    def _nodes(self) -> dict[str, int]:
        return {name: node for node, name in enumerate(self.topology.hosts)}

    def count(self, host: str) -> int:
        """The number of places on a host."""
        node = self._nodes.get(host)
        return 0 if node is None else len(self.slots[node])

    def node_of(self, host: str) -> int:
        return self._nodes[host]

    def has(self, host: str) -> bool:
        """Tells whether a host is in the epoch."""
        return host in self._nodes and self._nodes[host] not in self.absent


def assign(
    hosts: Sequence[Host],
    staying: Sequence[Place],
    most: int | None = None,
    joining: Sequence[Place] | None = None,
    without: Collection[Place] = (),
    nodes: Sequence[str] = (),
) -> Places | None:
    """The places of an epoch.

    Workers keep their slots, and so, as a rule, their local_rank, by which they chose a GPU. Hosts of those who stay
    come first, in the order of `staying`, then the others; rank 0, which brings the state to the others, is one who
    stays: on each node those who stay have lower ranks than those who are new.

    Args:
        hosts: that can take part, with their slots.
        staying: workers that have the state, in the order of their ranks before; those on other hosts are ignored.
        most: workers at most, if there is a limit; staying ones get places first.
        joining: workers that are new, in the order in which they get places; None: one for each slot that is free.
        without: slots that are to stay free then.
        nodes: hosts that have a node's number already, by that number; the others get the next ones, in the order of
            ranks.

    Returns:
        None if there is no place at all.
    """
    by_name = {host.name: host for host in hosts}
    kept = [place for place in staying if place[0] in by_name][:most]
    names = list(dict.fromkeys([name for name, _ in kept] + list(by_name)))
    old: dict[str, list[int]] = {name: [] for name in names}
    for name, slot in kept:
        old[name].append(slot)
    old = {name: sorted(slots)[: by_name[name].slots] for name, slots in old.items()}
    if joining is None:
        free = [(name, slot) for name in names for slot in range(by_name[name].slots) if slot not in old[name]]
        joining = [place for place in free if place not in without]
    total = sum(host.slots for host in hosts) if most is None else most
    room = total - sum(map(len, old.values()))
    new: dict[str, list[int]] = {name: [] for name in names}
    for name, slot in joining:
        if name in by_name and room > 0 and len(old[name]) + len(new[name]) < by_name[name].slots:
            new[name].append(slot)
            room -= 1
    ranks: dict[str, dict[int, int]] = {}  # by host, the rank of each slot
    first = 0
    for name in names:
        if slots := [*old[name], *sorted(new[name])]:
            ranks[name] = {slot: first + position for position, slot in enumerate(slots)}
            first += len(slots)
    if not ranks:
        return None
    numbered = tuple(dict.fromkeys([*nodes, *ranks]))
    slots_by_node = tuple(tuple(sorted(ranks.get(name, ()))) for name in numbered)
    return Places(
        tuple(by_name.get(name, Host(name)) for name in numbered),
        slots_by_node,
        Topology(
            numbered,
            tuple(
                tuple(ranks[name][slot] for slot in slots) if slots else ()
                for name, slots in zip(numbered, slots_by_node, strict=True)
            ),
        ),
        tuple(node for node, name in enumerate(numbered) if name not in ranks),
    )


def fill(hosts: Sequence[Host], num_proc: int) -> Places:
    """Fills the hosts with ranks in their order.

    Raises:
        SettingError: there are fewer slots than processes.
    """
    slots = sum(host.slots for host in hosts)
    places = assign(hosts, (), num_proc)
    if num_proc > slots or places is None:
        raise SettingError(
            f"-np {num_proc} asks for more processes than the {slots} slots of "
            f"{', '.join(f'{host.name}:{host.slots}' for host in hosts)}; name more hosts or more slots"
        )
    return places


def add_shard_hosts(text: str, wanted: Sequence[Host], places: Places) -> Places:
    """Adds nodes without workers for the hosts of `--shard-hosts` that have none.

    Args:
        text: `[user@]name,...`; "": nothing is added.
        wanted: all hosts that were named for workers; how one of them is reached need not be said again.
        places: those of the workers.

    Returns:
        The places with the added nodes at the end, since node 0 must have workers.

    Raises:
        SettingError: an entry is not a host, has slots, is named twice, or is to be reached as two users.
    """
    known = {host.name: host for host in wanted}
    added: dict[str, Host] = {}
    named: set[str] = set()
    for entry in text.split(",") if text.strip() else ():
        try:
            host = parse_host(entry.strip(), 0)
        except SettingError as error:
            raise SettingError(f"{_SHARD_HOSTS}: {error}") from None
        if host.slots:
            raise SettingError(
                f"{_SHARD_HOSTS}: {entry.strip()!r} has slots, which are for workers; if it is to run some, name it "
                "with them in -H, and without them here"
            )
        if host.name in named:
            raise SettingError(f"{_SHARD_HOSTS}: host {host.name} is named twice; name it once")
        named.add(host.name)
        same = known.get(host.name)
        if same is not None and host.user not in ("", same.user):
            raise SettingError(
                f"{_SHARD_HOSTS}: host {host.name} is named as {host.target!r} and for workers as {same.target!r}; "
                "name one user"
            )
        if host.name not in places.topology.hosts:
            added[host.name] = host if same is None else same
    none: tuple[tuple[int, ...], ...] = ((),) * len(added)
    topology = Topology((*places.topology.hosts, *added), places.topology.ranks + none)
    return Places((*places.hosts, *added.values()), places.slots + none, topology)


def shard_host_names(text: str) -> str:
    """The names of the hosts of `--shard-hosts` that `add_shard_hosts` has accepted, without their users."""
    return ",".join(parse_host(entry.strip(), 0).name for entry in text.split(",")) if text.strip() else ""
