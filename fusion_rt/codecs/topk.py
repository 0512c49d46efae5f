"""`topk`: exactly the k elements of the largest magnitude; of equal ones the first.

A sample tells a threshold that is a little too low. One pass over memory adds the gradient and puts elements that reach
the threshold aside, a fifth more than is wanted, of which the largest are then found exactly. Where the sample was
wrong (too few, or more than there is room for), the threshold is found digit by digit over all elements, which takes
three more passes and works for any data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from fusion_rt.codecs.base import Array, Layout
from fusion_rt.codecs.selecting import Selecting, SelectingBucketCodec
from fusion_rt.codecs.tensor_rules import TensorRules
from fusion_rt.kernels.selection import (
    Cut,
    Found,
    Memory,
    Range,
    at_most,
    collect,
    collect_shares,
    largest,
    prepare_chunks,
    sample,
    share,
    take_found,
    take_of_chunks,
)
from fusion_rt.kernels.team import ALONE, Team

_RUN = 32  # elements that are sampled together: two cache lines
_HITS = 400  # elements above the threshold that a sample should have
_LEAST_SAMPLE = 1 << 14
_UNSAMPLED = 1 << 12  # smaller groups are compared as a whole
_DEVIATIONS = 4  # by which the sample may be wrong


class TopKBucket(SelectingBucketCodec):
    codec: TopK

    def __init__(self, layout: Layout, codec: TopK, team: Team = ALONE) -> None:
        super().__init__(layout, codec, team)
        if codec.chunk:
            prepare_chunks()

    def _select(self, memory: Memory, group: int, k: int, team: Team) -> tuple[Array, Array]:
        chosen = self._groups[group]
        if chosen.chunk:
            return take_of_chunks(memory, *chosen.chunks(self.step, self.codec.warmup), team)
        return take_largest(memory, chosen.ranges, k, team)[:2]


@dataclass(frozen=True)
class TopK(Selecting):
    """The k largest.

    Args:
        chunk: the largest of each so many consecutive elements of a tensor; 0: of the whole `scope`.
    """

    name = "topk"
    bucket = TopKBucket
    takes_largest = True

    chunk: int = 0

    @property
    def selects_in_workers(self) -> bool:
        return super().selects_in_workers and not self.chunk

    @property
    def rules(self) -> TensorRules:
        return replace(super().rules, chunk=self.chunk)


def take_largest(memory: Memory, ranges: tuple[Range, ...], k: int, team: Team) -> tuple[Array, Array, int]:
    """Adds to the elements of some ranges, and takes the k largest out of the residual.

    Returns: indices (int32, ascending) and values (float32) of k elements, or of all that are not zero, and the
        magnitude of the smallest.
    """
    shares = share(ranges, team.threads)
    threshold, capacity = _guess(memory, ranges, k)
    found = collect_shares(memory, shares, threshold, capacity, team)
    total = sum(each.count for each in found)
    if any(each.overflowed for each in found) or (total < k and threshold > 1):
        cut = largest([[memory.residual[low:high] for low, high in part] for part in shares], k, team)
        found = _collect_cut(memory.residual, shares, cut, team)
    else:
        cut = at_most(found, k)
    return *take_found(memory.residual, found, cut, team), cut.threshold


def _collect_cut(residual: Array, shares: list[list[Range]], cut: Cut, team: Team) -> list[Found]:
    memory, found = Memory(residual), [Found(count) for count in cut.counts]
    team.run(
        [
            partial(collect, memory, part, cut.threshold, each, quota)
            for part, each, quota in zip(shares, found, cut.quotas, strict=True)
        ]
    )
    return found


def _guess(memory: Memory, ranges: tuple[Range, ...], k: int) -> tuple[int, int]:
    """A magnitude that somewhat more than k elements reach, never 0, and how many to be ready for."""
    size = sum(high - low for low, high in ranges)
    starts = _sample_starts(ranges, size, k)
    sampled = len(starts) * _RUN
    hits = k * sampled / size
    rank = math.ceil(hits + _DEVIATIONS * math.sqrt(hits) + _DEVIATIONS)
    if rank >= sampled:
        return 1, size
    threshold = largest([[sample(memory, starts, _RUN)]], rank).threshold
    return max(1, threshold), size if threshold == 0 else rank * size * 3 // (2 * sampled)


@lru_cache(maxsize=1024)
def _sample_starts(ranges: tuple[Range, ...], size: int, k: int) -> Array:
    """The starts of runs of `_RUN` elements that are sampled, at the same distances but for some disorder, so that a
    pattern in the data does not matter. None in a small group."""
    wanted = min(max(_HITS * size / k, _LEAST_SAMPLE), size / 8)
    if size < _UNSAMPLED:
        return np.empty(0, np.int64)
    rng = np.random.default_rng(size)
    starts = [np.empty(0, np.int64)]
    for low, high in ranges:
        runs = math.ceil(wanted * (high - low) / size / _RUN)
        room = (high - low) / runs  # at least 8 runs, unless the range itself is small
        if room > _RUN:
            starts.append((low + room * np.arange(runs) + rng.random(runs) * (room - _RUN)).astype(np.int64))
    return np.concatenate(starts)
