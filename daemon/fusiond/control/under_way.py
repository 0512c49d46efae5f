"""What is under way on this node, as it is told to whoever asks what waits. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.control.inquiries import describe
from fusiond.operations.context import Context
from fusiond.operations.executor import Run


def operations(context: Context) -> list[wire.Waiting]:
    """The operations, and planned buckets, that have begun here in any way."""
    now = context.outside.clock()
    return [_operation(context, run, now) for run in context.runs.values()]


def _operation(context: Context, run: Run, now: float) -> wire.Waiting:
    away = () if run.kind == "join" else context.participants.away(run.members)
    signature = None if run.recipe is None else run.recipe.signature
    what = run.what if signature is None else f"{run.what} ({describe(signature)})"
    return wire.Waiting(
        "operation",
        run.key,
        what[: wire.MAX_LINE],
        max(now - run.since, 0.0),
        tuple(sorted(run.parts)),
        tuple(rank for rank in run.members.set.ranks if rank not in away),
        run.traffic(context.node, now),
    )


def proposals(context: Context, waiting: Mapping[tuple[int, str, int], Mapping[int, object]]) -> list[wire.Waiting]:
    """The proposals of plans that local ranks wait for.

    Args:
        waiting: by process set, group and clock: what is known of each rank.
    """
    found = []
    for (process_set, group, clock), ranks in waiting.items():
        members = context.participants.members(process_set)
        awaited = tuple(rank for rank in members.set.ranks if context.participants.is_awaited(rank, members))
        key = OpKey(process_set, 0, group, clock)
        found.append(wire.Waiting("plan", key, f"the plan of {group!r}"[: wire.MAX_LINE], 0.0, tuple(ranks), awaited))
    return found
