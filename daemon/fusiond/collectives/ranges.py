"""The ranges of a bucket that nodes own, so that all have the same work.

All nodes come to the same ranges without a message about them: they follow from the codec, and from what the owners
say with their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from fusion_rt.codecs.base import Array
from fusion_rt.codecs.summing import SummingBucketCodec

BINS = 32
"""Into so many parts of equal length an owner divides its range when it says where the values are."""

_Masses: TypeAlias = Sequence[tuple[int, int, float]]  # of disjoint ascending ranges: begin, end, mass


def expected(codec: SummingBucketCodec, nodes: int) -> tuple[int, ...]:
    """Returns N + 1 bounds of ranges for the first steps."""
    return _divided(codec, nodes, [[(low, high, (high - low) * weight) for low, high, weight in codec.weights()]])


def adapted(codec: SummingBucketCodec, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns N + 1 bounds of ranges that would have had the same number of values.

    Args:
        counts: the number of selected values in each bin of the range that each node owns, by `codec.bounds`. Within a
            bin they are taken to be spread evenly.
    """
    edges = [edge for low, high in pairwise(codec.bounds) for edge in pairwise(bins(low, high))]
    found = [count for owner in counts for count in owner]
    selected = [(low, high, count) for (low, high), count in zip(edges, found, strict=True)]
    return _divided(codec, len(counts), [selected, [(low, high, high - low) for low, high in codec.always]])


def bins(low: int, high: int) -> list[int]:
    """Returns the BINS + 1 edges of the bins of a range."""
    return [low + (high - low) * i // BINS for i in range(BINS + 1)]


def _divided(codec: SummingBucketCodec, nodes: int, masses: Sequence[_Masses]) -> tuple[int, ...]:
    """Returns bounds between which there is the same mass."""
    elements, step = codec.layout.elements, codec.alignment
    # Not `np.unique`, which imports masked arrays at its first use.
    edges = np.array(sorted({0, elements, *(edge for part in masses for low, high, _ in part for edge in (low, high))}))
    total = sum((_cumulative(part, edges) for part in masses), np.zeros(len(edges)))
    if total[-1] == 0:
        total = edges.astype(np.float64)
    inner = np.interp(total[-1] * np.arange(1, nodes) / nodes, total, edges)
    return (0, *(int(bound) // step * step for bound in inner), elements)


def _cumulative(masses: _Masses, at: Array) -> Array:
    """Returns the mass before each of these elements."""
    if not masses:
        return np.zeros(len(at))
    edges = [edge for low, high, _ in masses for edge in (low, high)]
    heights: Array = np.interp(at, edges, np.cumsum([mass for *_, mass in masses for mass in (0, mass)]))
    return heights
