"""Sets of spans, and spans between records, one after the other in plain Python: the reference of those in columns.

A set is sorted and disjoint; a span is half-open, in integer nanoseconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from fusion_rt.tracing.format import Kind
from fusion_trace.read.job import Process
from fusion_trace.read.operations import SCRIPT, Step
from fusion_trace.read.span_columns import Span


def union(spans: Iterable[tuple[int, int]]) -> tuple[Span, ...]:
    """Returns what is in any of them. The spans may overlap and be in any order; empty ones are left out."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if joined and begin <= joined[-1].end:
            joined[-1] = Span(joined[-1].begin, max(end, joined[-1].end))
        else:
            joined.append(Span(begin, end))
    return tuple(joined)


def intersection(first: Sequence[Span], second: Sequence[Span]) -> tuple[Span, ...]:
    """Returns what is in both of two sets."""
    found = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i].begin, second[j].begin), min(first[i].end, second[j].end)
        if begin < end:
            found.append(Span(begin, end))
        if first[i].end <= second[j].end:
            i += 1
        else:
            j += 1
    return tuple(found)


def difference(first: Sequence[Span], second: Sequence[Span]) -> tuple[Span, ...]:
    """Returns what is in the first set and not in the second."""
    found = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j].end <= begin:
            j += 1
        at, k = begin, j
        while k < len(second) and second[k].begin < end:
            if at < second[k].begin:
                found.append(Span(at, second[k].begin))
            at = max(at, second[k].end)
            k += 1
        if at < end:
            found.append(Span(at, end))
    return tuple(found)


def total(spans: Iterable[Span]) -> int:
    """Returns how long a set is, ns."""
    return sum(span.end - span.begin for span in spans)


def within(steps: Sequence[Step], spans: Sequence[Span]) -> list[int]:
    """Returns how much of a set is in each step, ns. Steps in order of time."""
    lengths = []
    first = 0
    for step in steps:
        while first < len(spans) and spans[first].end <= step.begin:
            first += 1
        ns, place = 0, first
        while place < len(spans) and spans[place].begin < step.end:
            ns += min(spans[place].end, step.end) - max(spans[place].begin, step.begin)
            place += 1
        lengths.append(ns)
    return lengths


def pairs(process: Process, begin: Kind, end: Kind) -> tuple[Span, ...]:
    """Returns the spans from each `begin` to the `end` that belongs to it (the same name, plan and clock), by time.

    A begin without an end, or the other way round, is left out.
    """
    records = process.of(begin, end)
    opened: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)
    spans = []
    for name, plan, clock, kind, time in zip(
        *(records[field].tolist() for field in ("name", "plan", "clock", "kind", "time")), strict=True
    ):
        if kind == begin:
            opened[name, plan, clock].append(time)
        elif opened[name, plan, clock]:
            spans.append(Span(opened[name, plan, clock].popleft(), time))
    return tuple(sorted(spans))


def phases(process: Process, begin: Kind, end: Kind) -> tuple[Span, ...]:
    """Returns spans, as `pairs` does, of things that do not overlap and are about nothing in particular."""
    found = process.of(begin, end)
    spans, opened = [], -1
    for kind, time in zip(found["kind"].tolist(), found["time"].tolist(), strict=True):
        if kind == begin:
            opened = time if opened < 0 else opened  # modules within modules: the outer one counts
        elif opened >= 0:
            spans.append(Span(opened, time))
            opened = -1
    return tuple(spans)


def script(worker: Process) -> dict[str, tuple[Span, ...]]:
    """Returns when a worker's script was in each of its phases: `forward`, `backward` and `step()`."""
    return {name: phases(worker, *kinds) for name, kinds in SCRIPT.items()}
