"""What waits for whom, put together from what each node knows of it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fusion_rt import stack_text, wire
from fusion_rt.topology import Topology
from fusion_rt.wire import OpKey

MOST_SHOWN = 8  # ranks whose stacks go into a warning or an error
_SILENT = 1.0  # seconds that a link has to be silent to be told of: chunks are always on their way


@dataclass(frozen=True)
class Straggler:
    """A link on which an operation's data is late, or does not come at all.

    Attributes:
        sender, receiver: nodes.
        chunks: that are under way, or wait.
        seconds: since something came from the sender to the receiver.
        unread: they have not been sent, because the receiver does not take what it has.
    """

    sender: int
    receiver: int
    chunks: int
    seconds: float
    unread: bool = False

    def describe(self, topology: Topology) -> str:
        sender, receiver = (f"host {topology.hosts[node]} (node {node})" for node in (self.sender, self.receiver))
        if self.unread:
            return (
                f"{receiver} takes nothing from {sender}, which has {self.chunks} more chunks for it, since "
                f"{self.seconds:.0f} s"
            )
        return (
            f"{self.chunks} chunks from {sender} to {receiver} are under way, and nothing has come there for "
            f"{self.seconds:.0f} s: that link is the straggler"
        )


@dataclass(frozen=True)
class Stall:
    """Something that waits.

    Attributes:
        kind, key, what: as in `wire.Waiting`.
        seconds: for how long.
        submitted: ranks that have submitted it; `missing`: those that are waited for.
        stragglers: links that are waited for.
        idle: nodes that have all they need to begin, and have not.
        notes: what else is known.
    """

    kind: str
    key: OpKey
    what: str
    seconds: float
    submitted: tuple[int, ...]
    missing: tuple[int, ...]
    stragglers: tuple[Straggler, ...] = ()
    idle: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Merged:
    first: wire.Waiting
    seconds: float = 0.0
    submitted: set[int] = field(default_factory=set)
    awaits: set[int] = field(default_factory=set)
    traffic: dict[int, tuple[wire.Traffic, ...]] = field(default_factory=dict)  # by node
    notes: list[str] = field(default_factory=list)
    over: set[int] = field(default_factory=set)  # nodes


def merge(
    waiting: Mapping[int, Sequence[wire.Waiting]], topology: Topology, over: Mapping[int, Iterable[OpKey]]
) -> list[Stall]:
    """What waits in the job, the longest first.

    Args:
        waiting: what each node has told.
        over: operations that are over on a node, where they were asked about.
    """
    merged: dict[tuple[str, OpKey], _Merged] = {}
    for node, entries in waiting.items():
        for entry in entries:
            one = merged.setdefault((entry.kind, entry.key), _Merged(entry))
            if entry.submitted and not one.submitted:
                one.first = entry  # who has submitted it knows best what it is
            one.seconds = max(one.seconds, entry.seconds)
            one.submitted.update(entry.submitted)
            one.awaits.update(entry.awaits)
            if entry.traffic:
                one.traffic[node] = entry.traffic
            if entry.note and entry.note not in one.notes:
                one.notes.append(entry.note)
    for node, keys in over.items():
        for key in keys:
            if (found := merged.get(("operation", key))) is not None:
                found.submitted.update(topology.ranks[node])
                found.over.add(node)
                found.notes.append(f"it is over on host {topology.hosts[node]} (node {node})")
    stalls = [_stall(one, topology) for one in merged.values() if one.submitted]
    return sorted(stalls, key=lambda stall: -stall.seconds)


def _stall(one: _Merged, topology: Topology) -> Stall:
    missing = sorted(one.awaits - one.submitted if one.first.kind != "home" else one.awaits)
    submitted = sorted(one.submitted & one.awaits if one.first.kind == "operation" else one.submitted)
    late = () if missing else stragglers(one.traffic)
    idle: tuple[int, ...] = ()
    if one.traffic and not missing and not late:
        nodes = {topology.node_of(rank) for rank in one.submitted}
        idle = tuple(sorted(nodes - set(one.traffic) - one.over))
    return Stall(
        one.first.kind,
        one.first.key,
        one.first.what,
        one.seconds,
        tuple(submitted),
        tuple(missing),
        late,
        idle,
        tuple(one.notes),
    )


def stragglers(traffic: Mapping[int, Sequence[wire.Traffic]]) -> tuple[Straggler, ...]:
    """The links on which an operation's data is late, the longest first.

    Args:
        traffic: by node, what has gone between it and its peers, as it sees it.
    """
    seen = {(node, peer.node): peer for node, peers in traffic.items() for peer in peers}
    found = []
    for (sender, receiver), sent in seen.items():
        received = seen.get((receiver, sender))
        if received is None or received.silent < _SILENT:
            continue
        if sent.sent > received.received:
            found.append(Straggler(sender, receiver, sent.sent - received.received, received.silent))
        elif sent.unsent:
            found.append(Straggler(sender, receiver, sent.unsent, received.silent, unread=True))
    return tuple(sorted(found, key=lambda straggler: -straggler.seconds))


def describe_ranks(found: Iterable[wire.Whereabouts], topology: Topology) -> str:
    """Where ranks are, as lines to go after a sentence; begins with a line's end, empty when there are none."""
    shown = sorted(found, key=lambda one: one.rank)
    lines = [line for one in shown[:MOST_SHOWN] for line in stack_text.describe(one, _host(one, topology))]
    if shown[MOST_SHOWN:]:
        lines.append(f"and {len(shown) - MOST_SHOWN} more ranks")
    return "".join(f"\n{line}" for line in lines)


def describe_silent(nodes: Iterable[int], topology: Topology) -> str:
    """A line for each node that has not answered."""
    return "".join(f"\nhost {topology.hosts[node]} (node {node}) did not say where its ranks are" for node in nodes)


def _host(found: wire.Whereabouts, topology: Topology) -> str:
    return topology.hosts[topology.node_of(found.rank)]
