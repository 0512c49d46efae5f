"""Sets of points in time: sorted, disjoint, half-open intervals of integer nanoseconds. Everything here is exact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """From `begin` up to, but without, `end`; ns on the axis of the job."""

    begin: int
    end: int

    @property
    def ns(self) -> int:
        return self.end - self.begin


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
