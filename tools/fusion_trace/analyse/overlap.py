"""`fusion-trace overlap` says how much of each step a rank computes, communicates, and waits.

Every nanosecond of a step is in exactly one of five parts, so that they add up to the step:

| part | the script | and meanwhile |
| --- | --- | --- |
| compute | runs | nothing is communicated for this rank |
| overlapped | runs | communication is under way: it costs nothing |
| exposed | waits | communication is under way: a faster network, or better overlap, would save it |
| waiting | waits | ... for other ranks that are not there yet |
| idle | does neither: outside of forward, backward and `step()` | nothing is communicated (loading data, most often) |

A script that is still in a wait which its daemon has answered, while nothing is communicated, waits for no other
process: it was stopped, or has no processor. That is idle, too.

Communication of an operation is under way for a rank from when the last rank has handed its part over until this rank's
daemon has answered it; of an operation with homes, from when this rank has handed over its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from fusion_rt.tracing.format import Kind
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import SCRIPT, Operations, Step, all_steps, bounds_of, operations
from fusion_trace.read.rows import NEVER, Ints
from fusion_trace.read.span_columns import (
    SpanSet,
    common,
    joined,
    pair_columns,
    phase_columns,
    union_of,
    without,
)

_DIFFERS = 0.1  # of a step
PARTS = ("compute", "overlapped", "exposed", "waiting", "idle")


@dataclass(frozen=True)
class Partition:
    """A step of a rank, in parts that add up to `ns`. All in ns."""

    rank: int
    number: int
    begin: int
    end: int
    compute: int
    overlapped: int
    exposed: int
    waiting: int
    idle: int

    @property
    def ns(self) -> int:
        return self.end - self.begin

    @property
    def blocked(self) -> int:
        """Time for which the script waits, for other ranks or for communication."""
        return self.exposed + self.waiting

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in PARTS}


@dataclass(frozen=True)
class Overview:
    """Medians over steps, ns, each of its own, so that they need not add up.

    Attributes:
        hidden: of all communication, how much was overlapped, or None if there was none.
        mean: by part, the means, ns, which add up to the mean of a step.
    """

    steps: int
    ns: int
    compute: int
    overlapped: int
    exposed: int
    waiting: int
    idle: int
    hidden: float | None
    mean: Mapping[str, float]

    @property
    def differs(self) -> bool:
        """True if medians say little of where the time goes: few steps, or some ranks, have much more of a part."""
        whole = sum(self.mean.values())
        return any(abs(self.mean[name] - getattr(self, name)) > _DIFFERS * whole for name in PARTS)


@lru_cache(maxsize=2)  # as `operations`
def partitions(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> tuple[Partition, ...]:
    """Returns all whole steps of all ranks, by rank and number."""
    every = operations(trace)
    handed = every.submitted()
    last = np.max([*handed.values()], 0) if handed else np.zeros(0, np.int64)
    homes = np.zeros(len(every), bool)
    for rows in every.daemons.values():
        homes |= rows.first(Kind.APPLIED) != NEVER
    result: list[Partition] = []
    for rank, steps in all_steps(trace).items():
        kept = [step for step in steps if step.number in chosen]
        begin, end = np.where(homes, handed[rank], last), _answered(every, rank, trace.node_of[rank])
        flown = (every.workers[rank].first(Kind.SUBMITTED) != NEVER) & (end != NEVER)
        flights, late = union_of(begin[flown], end[flown]), _late(every, rank, end)
        result += _of_rank(trace.workers[rank], kept, flights, late)
    return tuple(result)


def _answered(every: Operations, rank: int, node: int) -> Ints:
    """Returns when a rank's daemon has answered it, by operation."""
    found = np.full(len(every.name), NEVER)
    daemon = every.daemons.get(node)
    ends = [daemon.last_of_peer(Kind.ANSWERED, rank), daemon.first(Kind.RUN_END)] if daemon is not None else []
    for each in (*ends, every.workers[rank].first(Kind.DONE)):
        found = np.where(found == NEVER, each, found)
    return found


def _late(every: Operations, rank: int, answered: Ints) -> SpanSet:
    """Returns when a script was in waits that its daemon had answered already."""
    of, begin, end = every.workers[rank].spans(Kind.WAIT_BEGIN, Kind.WAIT_END)
    there = answered[of]
    begin = np.maximum(begin, there)
    late = (there != NEVER) & (begin < end)
    return union_of(begin[late], end[late])


def _of_rank(worker: Process, steps: Sequence[Step], flights: SpanSet, late: SpanSet) -> list[Partition]:
    waits = joined([pair_columns(worker, Kind.WAIT_BEGIN, Kind.WAIT_END)])
    phases = [phase_columns(worker, *kinds) for kinds in SCRIPT.values()]
    copies = pair_columns(worker, Kind.COPY_BEGIN, Kind.COPY_END)
    working = joined([*phases, copies, pair_columns(worker, Kind.APPLY_BEGIN, Kind.APPLY_END)])
    sets = {
        "compute": without(without(working, waits), flights),
        "overlapped": without(flights, waits),
        "exposed": common(waits, flights),
        "waiting": without(without(waits, late), flights),
    }
    begin, end = bounds_of(steps)
    columns = {name: its.within(begin, end) for name, its in sets.items()}
    columns["idle"] = end - begin - sum(columns.values())
    parts = zip(*(columns[name].tolist() for name in PARTS), strict=True)
    return [
        Partition(step.rank, step.number, step.begin, step.end, *its) for step, its in zip(steps, parts, strict=True)
    ]


def steps_of_operations(every: Operations, parts: Sequence[Partition]) -> Ints:
    """Returns the number of the step in which each operation was handed over, by its number; -1: in none.

    The lowest rank that has whole steps says it.
    """
    found = np.full(len(every), -1)
    for rank, steps in by_rank(parts).items():
        begin, end, number = (np.array([getattr(step, of) for step in steps]) for of in ("begin", "end", "number"))
        time = every.workers[rank].first(Kind.SUBMITTED)
        place = np.searchsorted(end, time)  # a submission at its very end belongs to it
        inside = np.minimum(place, len(steps) - 1)
        its = (found < 0) & (time != NEVER) & (place < len(steps)) & (begin[inside] < time)
        found[its] = number[inside][its]
    return found


def by_rank(parts: Iterable[Partition]) -> dict[int, list[Partition]]:
    """Returns the steps of each rank."""
    return _grouped(parts, lambda part: part.rank)


def by_step(parts: Iterable[Partition]) -> dict[int, list[Partition]]:
    """Returns the ranks' partitions of each step, by its number, in order."""
    return dict(sorted(_grouped(parts, lambda part: part.number).items()))


def _grouped(parts: Iterable[Partition], key: Callable[[Partition], int]) -> dict[int, list[Partition]]:
    groups: dict[int, list[Partition]] = defaultdict(list)
    for part in parts:
        groups[key(part)].append(part)
    return groups


def overview(found: Sequence[Partition]) -> Overview:
    """Returns the medians of at least one step, of one or more ranks."""
    middle = {name: median([getattr(each, name) for each in found]) for name in ("ns", *PARTS)}
    overlapped, exposed = sum(each.overlapped for each in found), sum(each.exposed for each in found)
    hidden = overlapped / (overlapped + exposed) if overlapped + exposed else None
    mean = {name: sum(getattr(each, name) for each in found) / len(found) for name in PARTS}
    return Overview(steps=len(found), hidden=hidden, mean=mean, **middle)


def median(values: Sequence[int] | Ints) -> int:
    """Returns the middle one of at least one value, or the mean of the two in the middle, rounded down."""
    return math.floor(np.median(values))


def document(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> dict[str, object]:
    """Returns what `--json` shows; all times in ns."""
    found = partitions(trace, chosen)
    return {
        "job": trace.job,
        "ranks": [{"rank": rank, **_as_dict(overview(steps))} for rank, steps in by_rank(found).items()],
        "all": _as_dict(overview(found)) if found else None,
        "steps": [_as_dict(each) for each in found],
        "problems": list(trace.problems),
    }


def _as_dict(of: Overview | Partition) -> dict[str, object]:
    return {field.name: getattr(of, field.name) for field in fields(of)}
