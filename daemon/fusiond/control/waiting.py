"""The whole picture of waits between ranks, from each node's part of it; and its sentences. No I/O."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.local import stack_text
from fusion_rt.wire import OpKey

MOST_SHOWN = 8  # ranks whose stacks go into a warning or an error
_VERBS = {"operation": ("submit", "submitting", "submitted"), "plan": ("propose", "proposing", "proposed")}
_SILENT = 1.0  # seconds that a link has to be silent to be told of: chunks are always on their way

Kind: TypeAlias = Literal["operation", "plan", "home", "message"]
Subject: TypeAlias = tuple[Kind, OpKey]  # kind and key of a `wire.Waiting`


@dataclass(frozen=True)
class Straggler:
    """A link on which an operation's data is late, or does not come at all.

    Attributes:
        sender, receiver: nodes.
        chunks: that are under way, or wait.
        seconds: since something came from the sender to the receiver.
        unread: they have not been sent, because the receiver does not take those that it has.
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
        notes: further remarks.
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


@dataclass(frozen=True)
class Survey:
    """Answers of all nodes of a job.

    Attributes:
        stalls: waits, the longest first.
        found: where ranks are, by rank.
        pids: of the daemons that have answered, by node.
        silent: nodes that have not answered everything.
        more: how much more is under way than was told.
    """

    stalls: list[Stall]
    found: dict[int, wire.Whereabouts]
    pids: dict[int, int]
    silent: tuple[int, ...]
    more: int


def merge(waiting: Iterable[tuple[int, Sequence[wire.Waiting]]], topology: Topology) -> list[Stall]:
    """Puts together the waits in the job, the longest first.

    Args:
        waiting: nodes, and their answers.
    """
    by_subject: defaultdict[Subject, list[tuple[int, wire.Waiting]]] = defaultdict(list)
    for node, entries in waiting:
        for entry in entries:
            by_subject[entry.kind, entry.key].append((node, entry))
    stalls = [_stall(told, topology) for told in by_subject.values() if any(entry.submitted for _, entry in told)]
    return sorted(stalls, key=lambda stall: -stall.seconds)


def _stall(told: Sequence[tuple[int, wire.Waiting]], topology: Topology) -> Stall:
    """Puts together the nodes' answers about one operation."""
    entries = [entry for _, entry in told]
    first = next(entry for entry in entries if entry.submitted)  # a node that has submitted it knows it best
    submitted = {rank for entry in entries for rank in entry.submitted}
    awaits = {rank for entry in entries for rank in entry.awaits}
    traffic = {node: entry.traffic for node, entry in told if entry.traffic}
    missing = sorted(awaits if first.kind in ("home", "message") else awaits - submitted)
    late = () if missing else stragglers(traffic)
    idle: tuple[int, ...] = ()
    if traffic and not missing and not late:
        over = {node for node, entry in told if entry.note}
        idle = tuple(sorted({topology.node_of(rank) for rank in submitted} - set(traffic) - over))
    return Stall(
        first.kind,
        first.key,
        first.what,
        max(entry.seconds for entry in entries),
        tuple(sorted(submitted & awaits if first.kind == "operation" else submitted)),
        tuple(missing),
        late,
        idle,
        tuple(dict.fromkeys(entry.note for entry in entries if entry.note)),
    )


def stragglers(traffic: Mapping[int, Sequence[wire.Traffic]]) -> tuple[Straggler, ...]:
    """The links on which an operation's data is late, the longest first.

    Args:
        traffic: by node, chunks between it and its peers, as it sees them.
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


def describe_ranks(found: Iterable[wire.Whereabouts], silent: Iterable[int], topology: Topology) -> str:
    """Describes where ranks are, as lines to go after a sentence; begins with a line's end, empty when there are none.

    Args:
        silent: nodes that have not answered.
    """
    shown = sorted(found, key=lambda one: one.rank)
    lines = [line for one in shown[:MOST_SHOWN] for line in stack_text.describe(one, _host(one, topology))]
    if shown[MOST_SHOWN:]:
        lines.append(f"and {len(shown) - MOST_SHOWN} more ranks")
    lines += [f"host {topology.hosts[node]} (node {node}) did not report where its ranks are" for node in silent]
    return "".join(f"\n{line}" for line in lines)


def _host(found: wire.Whereabouts, topology: Topology) -> str:
    return topology.hosts[topology.node_of(found.rank)]


# --- words ------------------------------------------------------------------------------------------------------------


def plan_in_words(group: str) -> str:
    """Names a plan in sentences."""
    return f"the plan of {group!r}"


def explain(
    subject: Subject,
    submitted: Mapping[int, wire.Signature | None],
    awaited: Sequence[int],
    topology: Topology,
    departed: Collection[int],
    waited: float,
) -> str:
    """Explains why an operation or a plan fails: the ranks' submissions under its name, or the ranks without one.

    Args:
        submitted: ranks that have, with the signatures of an operation.
        awaited: the ranks without which it cannot be.
        waited: seconds, or 0 while its time is not up.
        verb: for the ranks' act, in present and past.

    Returns: a sentence; empty when nothing is wrong, as far as that tells.
    """
    kind, key = subject
    what = plan_in_words(key.name) if kind == "plan" else key.in_words
    do, doing, done = _VERBS[kind]
    signatures = {rank: signature for rank, signature in sorted(submitted.items()) if signature is not None}
    by_signature: dict[wire.Signature, list[int]] = {}
    for rank, signature in signatures.items():
        by_signature.setdefault(signature.common(), []).append(rank)
    if len(by_signature) > 1:
        shown = "; ".join(
            f"{topology.describe(ranks)}: {describe(signatures[ranks[0]])}" for ranks in by_signature.values()
        )
        return f"the ranks do not agree about {what}: {shown}. Every rank has to submit the same operation"
    missing = [rank for rank in awaited if rank not in submitted]
    gone = [rank for rank in missing if rank in departed]
    if gone:
        return f"{what} waits for {topology.describe(gone)}, which left the job without {doing} it"
    if not waited:
        return ""
    if missing:
        return (
            f"{what} waited {_seconds(waited)} for {topology.describe(missing)}, which did not {do} it "
            f"({done} by {topology.describe(submitted)})"
        )
    return f"{what} made no progress for {_seconds(waited)} although every rank has {done} it"


def explain_order(submitted: Mapping[OpKey, Mapping[int, wire.Signature]], topology: Topology) -> str:
    """Explains that ranks have submitted operations without a name in different orders.

    Args:
        submitted: those that should be one, with the ranks that have submitted them here, or none if it is others.
    """
    said = []
    for key, signatures in submitted.items():
        rank = min(signatures, default=None)
        who = "other ranks" if rank is None else topology.describe(sorted(signatures))
        said.append(f"{who}: {key.name.removesuffix(wire.UNNAMED) if rank is None else describe(signatures[rank])}")
    number = next(iter(submitted)).clock % wire.CLOCKS_OF_AN_EPOCH
    return (
        f"the ranks do not agree about operation {number} without a name: {'; '.join(said)}. Such operations are "
        "paired in the order in which each rank submits them; give them names, or submit them in one order"
    )


def _seconds(waited: float) -> str:
    return f"{waited:.0f} s" if waited >= 1 else f"{waited:.2g} s"


def explain_contribution(
    rank: int, waited: float, bucket: int, group: str, node: int | None, stall: Stall | None, topology: Topology
) -> str:
    """Explains the wait of a rank that contributed to a bucket.

    Args:
        waited: seconds.
        node: where the bucket's home is; None: it is the rank's own.
        stall: the state of the home.
    """
    text = f"rank {rank} has waited {waited:.0f} s for the home of bucket {bucket} of {group!r}"
    if node is not None:
        text += f", which is on {topology.describe_node(node)}"
    if stall is not None and stall.notes:
        return f"{text}; {stall.notes[0]}"
    return f"{text}; it waits for {topology.describe(stall.missing)}" if stall is not None and stall.missing else text


def describe(signature: wire.Signature) -> str:
    """A signature in words: `allreduce sum float32 [4, 2]`."""
    words: list[str] = [signature.kind]
    traits = wire.KINDS[signature.kind]
    if traits.reduces:
        words.append(signature.op)
    if traits.root:
        words.append(f"{traits.root} root {signature.root}")
    if signature.ranks:
        words.append(f"of the ranks {list(signature.ranks)}")
    if signature.parts:
        words.append(f"of {len(signature.parts)} tensors {[list(shape) for shape in signature.parts[:8]]}")
    if signature.dtype:
        words.append(f"{signature.dtype} {list(signature.shape)}")
    if signature.rows:
        words.append(f"in parts of {list(signature.rows[:8])} rows")
    if (signature.prescale, signature.postscale) != (1.0, 1.0):
        words.append(f"scaled by {signature.prescale:g} before and {signature.postscale:g} after")
    if signature.codec != "dense":
        words.append(f"with {signature.codec}")
    return " ".join(words)


def document(result: Survey, topology: Topology) -> dict[str, Any]:
    """A survey as JSON types."""
    return {
        "hosts": topology.hosts,
        "ranks_of_nodes": topology.ranks,
        "waiting": [_as_json(stall, topology) for stall in result.stalls],
        "more": result.more,
        "ranks": [
            {"host": topology.hosts[topology.node_of(rank)], "node": topology.node_of(rank), **_fields(found)}
            for rank, found in sorted(result.found.items())
        ],
        "daemons": [
            {"node": node, "host": host, "pid": result.pids.get(node), "answered": node not in result.silent}
            for node, host in enumerate(topology.hosts)
        ],
    }


def fitting(told: dict[str, Any], most: int = wire.MAX_TEXT) -> str:
    """It as JSON of at most so many characters: the stacks of the last ranks, and what has waited least, are left out
    of what is longer."""
    text = json.dumps(told)
    while len(text) > most and (told["waiting"] or told["ranks"]):
        long = [rank for rank in told["ranks"] if rank["stack"]["frames"]]
        if long:
            for rank in long[len(long) // 2 :]:
                rank.update(stack={"frames": [], "more": 0}, why_not="there are too many stacks to show")
        else:
            half = len(told["waiting"]) // 2
            told["more"] += len(told["waiting"]) - half
            told["waiting"], told["ranks"] = told["waiting"][:half], told["ranks"][: len(told["ranks"]) // 2]
        text = json.dumps(told)
    return text


def _as_json(stall: Stall, topology: Topology) -> dict[str, Any]:
    found = asdict(stall)
    found["key"] = stall.key._asdict()
    found["seconds"] = round(stall.seconds, 3)
    for told, straggler in zip(found["stragglers"], stall.stragglers, strict=True):
        told["text"] = straggler.describe(topology)
    return found


def _fields(found: wire.Whereabouts) -> dict[str, Any]:
    """By name, where the message has them by position."""
    fields: dict[str, Any] = msgspec.structs.asdict(found)
    fields["stack"] = {"frames": [msgspec.structs.asdict(f) for f in found.stack.frames], "more": found.stack.more}
    return fields
