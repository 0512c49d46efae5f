"""Spans of time in columns, by group: as `read.span_columns` has them for one set, for all operations of a job."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion_trace.read.span_columns import covered_by_group

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def run(kept: NDArray[np.bool_]) -> slice | Ints:
    """Returns the places that are kept: as a slice, which copies nothing, where they follow each other."""
    places = np.flatnonzero(kept)
    if len(places) and places[-1] - places[0] + 1 == len(places):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def distinct(values: Ints) -> bool:
    """Says whether no value comes twice; most that is asked about is in order, for which nothing is sorted."""
    return bool((np.diff(values) > 0).all()) or len(np.unique(values)) == len(values)


def order_in_group(group: Ints) -> Ints:
    """Returns, for sorted group numbers, the place of each element within its group, from 0."""
    places = np.arange(len(group))
    if not len(group):
        return places
    first = np.r_[True, group[1:] != group[:-1]]
    return places - np.maximum.accumulate(np.where(first, places, 0))


def paired(group: Ints, begin: Floats, other: Ints, end: Floats) -> tuple[Ints, Floats, Floats]:
    """Pairs the first begin of each group with its first end, and so on; those without a partner are left out.

    Args:
        group, begin: of each begin; other, end: of each end. In any order.

    Returns: the groups, begins and ends of the pairs.
    """
    if not len(group) or not len(other):
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    a, b = np.lexsort((begin, group)), np.lexsort((end, other))
    group, begin, other, end = group[a], begin[a], other[b], end[b]
    most = int(max(order_in_group(group).max(), order_in_group(other).max())) + 1
    _, left, right = np.intersect1d(
        group * most + order_in_group(group), other * most + order_in_group(other), assume_unique=True,
        return_indices=True,
    )  # fmt: skip
    return group[left], begin[left], end[right]


def covered(group: Ints, begin: Floats, end: Floats, groups: int) -> Floats:
    """Returns how long the union of each group's spans is; float64, of length `groups`."""
    found = np.zeros(groups)
    kept = end > begin
    numbers, lengths = covered_by_group(group[kept], begin[kept], end[kept])
    found[numbers] = lengths
    return found


class Carried:
    """How much spans have carried, as a function of time: each carries its weight evenly from its begin to its end."""

    def __init__(self, begin: Floats, end: Floats, weight: Floats) -> None:
        slope = weight / np.maximum(end - begin, 1)
        at = np.concatenate([begin, np.maximum(end, begin + 1)])
        order = np.argsort(at, kind="stable")
        self._at = at[order]
        speed = np.cumsum(np.concatenate([slope, -slope])[order])
        self._sum = np.concatenate([[0.0], np.cumsum(speed[:-1] * np.diff(self._at))]) if len(at) else np.zeros(0)

    def within(self, begin: Floats, end: Floats) -> Floats:
        """Returns how much of it was carried in each span from `begin` to `end`."""
        if not len(self._at):
            return np.zeros(len(begin))
        found: Floats = np.interp(end, self._at, self._sum) - np.interp(begin, self._at, self._sum)
        return found


def lower_middle_of_others(values: NDArray[Any], together: int = 1) -> Floats:
    """Returns the usual value of the others, by the rule of `fusiond.live.rates`, for each element of rows of
    shape (n, q); NaN if q is 1.

    Args:
        together: how many may be slow for one reason.
    """
    count = values.shape[1]
    if count < 2:
        return np.full(values.shape, np.nan)
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, 1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(count), values.shape), 1)
    k = max(0, min((count - 2) // 2, count - 1 - together))
    return np.where(place > k, ordered[:, k : k + 1], ordered[:, k + 1 : k + 2])
