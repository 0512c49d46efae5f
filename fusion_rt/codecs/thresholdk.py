"""`thresholdk`: about k elements, above a threshold that is kept from step to step.

Li and Hoefler, "Near-Optimal Sparse Allreduce" (Ok-Topk, 2022): selection is exact every `every` steps, and the
smallest value sent then is the threshold of the steps after it, in which selecting takes one pass. It is lowered by
2.5 % where fewer than .8 k elements reach it. Unlike there, no more than k are sent, the largest; and where more than
1.25 k reach it, the smallest of those is the next threshold. Selection is exact again at once when the threshold turns
out to be far off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fusion_rt.codecs.base import Array, CodecError, Layout
from fusion_rt.codecs.selecting import Selecting, SelectingBucketCodec
from fusion_rt.codecs.topk import take_largest
from fusion_rt.kernels.selection import Memory, at_most, collect_shares, magnitude, share, take_found, value_of
from fusion_rt.kernels.team import ALONE, Team

_LOW, _HIGH = 0.8, 1.25
_LOWER = 1.025
_FAR = 0.5  # below this share of k the next step is exact
_ROOM = 4  # times k, that are kept to find the largest among


class ThresholdKBucket(SelectingBucketCodec):
    codec: ThresholdK

    def __init__(self, layout: Layout, codec: ThresholdK, team: Team = ALONE) -> None:
        super().__init__(layout, codec, team)
        self._thresholds = np.zeros(len(self._groups), np.int64)  # magnitudes; 0 where the next selection is exact

    def _select(self, memory: Memory, group: int, k: int, team: Team) -> tuple[Array, Array]:
        ranges = self._groups[group].ranges
        threshold = int(self._thresholds[group])
        if threshold == 0 or self.step % self.codec.every == 0:
            indices, values, self._thresholds[group] = take_largest(memory, ranges, k, team)
            return indices, values
        found = collect_shares(memory, share(ranges, team.threads), threshold, _ROOM * k, team)
        if any(each.overflowed for each in found):
            indices, values, self._thresholds[group] = take_largest(Memory(memory.residual), ranges, k, team)
            return indices, values
        total, cut = sum(each.count for each in found), at_most(found, k)
        if total > _HIGH * k:
            threshold = cut.threshold
        elif total < _FAR * k:
            threshold = 0
        elif total < _LOW * k:
            threshold = magnitude(value_of(threshold) / _LOWER)
        self._thresholds[group] = threshold
        return take_found(memory.residual, found, cut, team)

    def _own_state(self) -> dict[str, Array]:
        return {"thresholds": self._thresholds.copy()}

    def _load_own_state(self, state: Mapping[str, Array], partial: bool) -> None:
        saved = None if partial else state.get("thresholds")
        self._thresholds[:] = 0 if saved is None or saved.shape != self._thresholds.shape else saved


@dataclass(frozen=True)
class ThresholdK(Selecting):
    """About k of the largest.

    Args:
        every: steps from one exact selection to the next.
    """

    name = "thresholdk"
    bucket = ThresholdKBucket
    takes_largest = True

    every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise CodecError(f"every is a number of steps from 1 on, not {self.every}")
