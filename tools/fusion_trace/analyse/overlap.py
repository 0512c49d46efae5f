"""`fusion-trace overlap` says how much of each step a rank computes, communicates, and waits.

Every nanosecond of a step is in exactly one of five parts, so that they add up to the step:

| part | the script | and meanwhile |
| --- | --- | --- |
| compute | runs | nothing is communicated for this rank |
| overlapped | runs | communication is under way: it costs nothing |
| exposed | waits | communication is under way: what a faster network, or better overlap, would save |
| waiting | waits | ... for other ranks that are not there yet, or for its turn to read an answer |
| idle | does neither: outside of forward, backward and `step()` | nothing is communicated (loading data, most often) |

Communication of an operation is under way for a rank from when the last rank has handed its part over until this rank's
daemon has answered it; of an operation with homes, from when this rank has handed over its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import chain

from fusion_rt.tracing.format import Kind
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import Operation, Step, all_steps, operations, pairs, script, within
from fusion_trace.read.spans import Span, difference, intersection, union

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
    """Medians over steps, ns; `hidden`: of all communication, how much was overlapped, or None if there was none."""

    steps: int
    ns: int
    compute: int
    overlapped: int
    exposed: int
    waiting: int
    idle: int
    hidden: float | None


@lru_cache(maxsize=2)  # as `operations`
def partitions(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> tuple[Partition, ...]:
    """Returns all whole steps of all ranks, by rank and number."""
    every = operations(trace)
    result: list[Partition] = []
    for rank, steps in all_steps(trace).items():
        kept = [step for step in steps if step.number in chosen]
        result += _of_rank(trace.workers[rank], kept, under_way(rank, trace.node_of[rank], every.values()))
    return tuple(result)


def under_way(rank: int, node: int, found: Iterable[Operation]) -> tuple[Span, ...]:
    """Returns when communication is under way for a rank; see above."""
    return union(span for operation in found if (span := _flight(operation, rank, node)) is not None)


def _flight(operation: Operation, rank: int, node: int) -> Span | None:
    mine = operation.workers.get(rank)
    if mine is None or mine.submitted is None:
        return None
    begin = mine.submitted
    if not operation.asynchronous:
        begin = max(part.submitted for part in operation.workers.values() if part.submitted is not None)
    daemon = operation.daemons.get(node)
    ends = [daemon.answered.get(rank), daemon.run_end] if daemon is not None else []
    end = next((time for time in [*ends, mine.done] if time is not None), None)
    return Span(begin, end) if end is not None and end > begin else None


def _of_rank(worker: Process, steps: Sequence[Step], flights: Sequence[Span]) -> list[Partition]:
    waits = union(pairs(worker, Kind.WAIT_BEGIN, Kind.WAIT_END))
    working = union(
        [
            *chain(*script(worker).values()),
            *pairs(worker, Kind.COPY_BEGIN, Kind.COPY_END),
            *pairs(worker, Kind.APPLY_BEGIN, Kind.APPLY_END),
        ]
    )
    exposed = within(steps, intersection(waits, flights))
    waiting = within(steps, difference(waits, flights))
    overlapped = within(steps, difference(flights, waits))
    compute = within(steps, difference(difference(working, waits), flights))
    return [
        Partition(
            rank=step.rank,
            number=step.number,
            begin=step.begin,
            end=step.end,
            compute=compute[place],
            overlapped=overlapped[place],
            exposed=exposed[place],
            waiting=waiting[place],
            idle=step.ns - compute[place] - overlapped[place] - exposed[place] - waiting[place],
        )
        for place, step in enumerate(steps)
    ]


def operations_of_steps(found: Iterable[Operation], parts: Sequence[Partition]) -> dict[int, list[Operation]]:
    """Returns, by number of the step, the operations that were handed over in it; by the lowest rank that has whole
    steps."""
    steps_of_rank = by_rank(parts)
    result: dict[int, list[Operation]] = defaultdict(list)
    for operation in found:
        for rank, steps in steps_of_rank.items():
            mine = operation.workers.get(rank)
            if mine is not None and mine.submitted is not None:
                number = _containing(steps, mine.submitted)
                if number is not None:
                    result[number].append(operation)
                    break
    return result


def _containing(steps: Sequence[Partition], time: int) -> int | None:
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        if steps[middle].end < time:  # what was handed over at its very end belongs to it
            low = middle + 1
        else:
            high = middle
    return steps[low].number if low < len(steps) and steps[low].begin < time else None


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
    return Overview(steps=len(found), hidden=hidden, **middle)


def median(values: Iterable[int]) -> int:
    """Returns the middle one of at least one value, or the mean of the two in the middle, rounded down."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


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
