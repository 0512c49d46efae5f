"""Sets of points in time, in columns: for processes with millions of records. Everything here is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import Records
from fusion_trace.read.job import Process

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Times = NDArray[Any]
"""ns: int64, or float64."""


class Span(NamedTuple):
    """From `begin` up to, but without, `end`; ns on the axis of the job."""

    begin: int
    end: int

    @property
    def ns(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class SpanSet:
    """Sorted, disjoint, half-open intervals, both of shape (n,)."""

    begin: Times
    end: Times

    def within(self, begin: Times, end: Times) -> Times:
        """Returns how much of the set is in each of these spans."""
        return self._before(end) - self._before(begin)

    def _before(self, time: Times) -> Times:
        """Returns how much of the set is before each time."""
        if not len(self.begin):
            return np.zeros(len(time), np.int64)
        lengths = self.end - self.begin
        sums = np.concatenate([[0], np.cumsum(lengths)])
        place = np.searchsorted(self.begin, time, "right") - 1
        inside = np.minimum(time - self.begin[np.maximum(place, 0)], lengths[np.maximum(place, 0)])
        found: Times = np.where(place < 0, 0, sums[np.maximum(place, 0)] + inside)
        return found


def union_of(begin: Times, end: Times) -> SpanSet:
    """Returns the union of these spans. They may overlap and be in any order; empty ones are left out."""
    kept = end > begin
    begin, end = begin[kept], end[kept]
    order = np.argsort(begin, kind="stable")
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    if not len(begin):
        return SpanSet(begin, reached)
    first = np.flatnonzero(np.r_[True, begin[1:] > reached[:-1]])
    return SpanSet(begin[first], reached[np.r_[first[1:] - 1, len(begin) - 1]])


def joined(sets: Sequence[tuple[Ints, Ints]]) -> SpanSet:
    """Returns the union of several lists of spans, at least one."""
    return union_of(np.concatenate([each[0] for each in sets]), np.concatenate([each[1] for each in sets]))


def common(first: SpanSet, second: SpanSet) -> SpanSet:
    """Returns the intersection of two sets."""
    return _combined(first, second, both=True)


def without(first: SpanSet, second: SpanSet) -> SpanSet:
    """Returns the first set without the second."""
    return _combined(first, second, both=False)


def _combined(first: SpanSet, second: SpanSet, both: bool) -> SpanSet:
    at = np.unique(np.concatenate([first.begin, first.end, second.begin, second.end]))
    inside = [
        np.searchsorted(each.begin, at, "right") > np.searchsorted(each.end, at, "right") for each in (first, second)
    ]
    kept = inside[0] & (inside[1] == both)
    opens = np.flatnonzero(kept & ~np.r_[False, kept[:-1]])
    closes = np.flatnonzero(~kept & np.r_[False, kept[:-1]])
    return SpanSet(at[opens], at[closes])


def matched(group: Ints, opens: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Pairs begins with ends: each end belongs to the earliest begin of its group before it that has none yet.

    Args:
        group: of each event, in order of time; opens: whether it is a begin.

    Returns: the places of the begins and of their ends, by group and time; those without a partner are left out.
    """
    order = np.argsort(group, kind="stable")
    group, opens = group[order], opens[order]
    if not len(group):
        return order, order
    change = np.where(opens, 1, -1)
    new = np.r_[True, group[1:] != group[:-1]]
    walked = np.cumsum(change)
    base = np.maximum.accumulate(np.where(new, np.arange(len(group)), 0))
    walked -= (walked - change)[base]  # how many are open, ends without a begin counted as well
    far = 2 * len(group) * np.cumsum(new)  # the walk of each group lies below the one before
    lowest = np.minimum.accumulate(np.minimum(walked, 0) - far)
    earlier = np.where(new, -far, np.r_[0, lowest[:-1]])
    alone = ~opens & (lowest < earlier)
    ends = ~opens & ~alone
    number: Ints = np.cumsum(opens) - opens  # of begins; of ends below
    first: Ints = number[base]
    begins = np.flatnonzero(opens)
    of_end: Ints = np.cumsum(ends) - ends
    partner: Ints = (first + of_end - of_end[base])[ends]
    return order[begins[partner]], order[np.flatnonzero(ends)]


def covered_by_group(group: Ints, begin: Times, end: Times) -> tuple[Ints, Times]:
    """Returns the groups that have spans, in order, and how long the union of each one's spans is; spans as in
    `union_of`, but a group with nothing but empty ones has a length, 0."""
    order = np.lexsort((begin, group))
    group, begin, end = group[order], begin[order], np.maximum(end, begin)[order]
    numbers, first = np.unique(group, return_index=True)
    if not len(group):
        return numbers, begin
    # Groups follow each other on one axis without touching, so that one running maximum will do for all of them.
    apart = np.repeat(np.cumsum(np.r_[0, _width(begin, end, first)[:-1]]), np.diff(np.r_[first, len(group)]))
    base = np.repeat(begin[first], np.diff(np.r_[first, len(group)]))
    begin, end = begin - base + apart, end - base + apart
    reached = np.maximum.accumulate(end)
    before = np.r_[begin[0], reached[:-1]]
    new = np.maximum(reached - np.maximum(begin, before), 0)
    return numbers, np.add.reduceat(new, first)


def _width(begin: Times, end: Times, first: Ints) -> Times:
    """Returns from where to where the spans of each group go, and a bit more."""
    found: Times = np.maximum.reduceat(end, first) - begin[first] + 1
    return found


def pair_columns(process: Process, begin: Kind, end: Kind) -> tuple[Ints, Ints]:
    """Returns begins and ends of the spans from each `begin` to the `end` that belongs to it (the same name, plan and
    clock), in no order.

    A begin without an end, or the other way round, is left out: its partner is lost, or has not come yet.
    """
    records = process.of(begin, end)
    opened, closed = matched(groups_of(records), records["kind"] == begin)
    return records["time"][opened], records["time"][closed]


def groups_of(records: Records) -> Ints:
    """Returns a number for each record, equal where name, plan and clock are."""
    about = (records["name"].astype(np.uint64) << np.uint64(32)) | records["plan"]
    _, about = np.unique(about, return_inverse=True)
    clocks, clock = np.unique(records["clock"], return_inverse=True)
    found: Ints = about.astype(np.int64) * max(1, len(clocks)) + clock
    return found


def phase_columns(process: Process, begin: Kind, end: Kind) -> tuple[Ints, Ints]:
    """Returns begins and ends of the spans, as `pair_columns` does, of things that do not overlap and are about nothing
    in particular, by time. Of modules within modules the outer one counts."""
    records = process.of(begin, end)
    if not len(records):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    opens = records["kind"] == begin
    closing = np.flatnonzero(~opens & np.r_[False, opens[:-1]])
    first = np.flatnonzero(opens & np.r_[True, ~opens[:-1]])[: len(closing)]
    return records["time"][first], records["time"][closing]


def run(kept: NDArray[np.bool_]) -> slice | Ints:
    """Returns the places that are kept: as a slice, which copies nothing, where they follow each other."""
    places = np.flatnonzero(kept)
    if len(places) and places[-1] - places[0] + 1 == len(places):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def distinct(values: Ints) -> bool:
    """Says whether no value comes twice; most that is asked about is in order, for which nothing is sorted."""
    return bool((np.diff(values) > 0).all()) or len(np.unique(values)) == len(values)
