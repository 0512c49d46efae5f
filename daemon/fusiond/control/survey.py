"""Who waits for whom in the whole job, and where these are: what stall reports and `fusion-trace hang` tell. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from fusion_rt import wire
from fusion_rt.topology import Topology
from fusiond.control.questions import Questions
from fusiond.control.waiting import Stall, describe_ranks, describe_silent, merge
from fusiond.operations.context import Context


@dataclass(frozen=True)
class Survey:
    """What the nodes have told.

    Attributes:
        stalls: what waits, the longest first.
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


def survey(context: Context, questions: Questions, everyone: bool, then: Callable[[Survey], None]) -> None:
    """Asks all nodes what is under way, and then where those are that are waited for.

    Args:
        everyone: also where all other ranks are.
    """
    topology = context.topology

    def waiting(told: Mapping[int, wire.WaitingHere]) -> None:
        entries = {node: answer.waiting for node, answer in told.items()}
        stalls = merge(entries, topology, {})
        missing = {rank for stall in stalls for rank in stall.missing}
        wanted = set(range(topology.size)) if everyone else missing
        keys = [stall.key for stall in stalls if stall.kind == "operation" and stall.missing]

        def located(where: Mapping[int, wire.Located]) -> None:
            asked = {topology.node_of(rank) for rank in wanted}
            silent = (set(range(len(topology.hosts))) - set(told)) | (asked - set(where))
            then(
                Survey(
                    merge(entries, topology, {node: answer.over for node, answer in where.items()}),
                    {found.rank: found for answer in where.values() for found in answer.found},
                    {node: answer.pid for node, answer in told.items()},
                    tuple(sorted(silent)),
                    sum(answer.more for answer in told.values()),
                )
            )

        questions.locate(wanted, keys, located)

    questions.waiting(waiting)


def whereabouts(context: Context, questions: Questions, ranks: Iterable[int], then: Callable[[str], None]) -> None:
    """Tells where these ranks are, as lines to go after a sentence."""
    topology = context.topology
    wanted = set(ranks)

    def located(where: Mapping[int, wire.Located]) -> None:
        found = [one for answer in where.values() for one in answer.found]
        silent = sorted({topology.node_of(rank) for rank in wanted} - set(where))
        then(describe_ranks(found, topology) + describe_silent(silent, topology))

    questions.locate(wanted, (), located)


def document(result: Survey, topology: Topology) -> dict[str, Any]:
    """A survey as JSON types."""
    return {
        "hosts": topology.hosts,
        "ranks_of_nodes": topology.ranks,
        "waiting": [_stall(stall, topology) for stall in result.stalls],
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


def _stall(stall: Stall, topology: Topology) -> dict[str, Any]:
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
