"""`gaussiank`: about k elements, above a threshold that would be right if they were normally distributed.

Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (2019): the threshold is the mean plus as
many deviations as a share `density` of a normal distribution is above; it is halved where fewer than 2/3 k elements
reach it, and multiplied by 1.5 where more than 4/3 k do, and at most three are tried. Residuals are not normally
distributed, so the third may still be wrong. Then, unlike there, no more than k are sent: the largest; and where the
numbers do not even have a deviation, most are alike, or the last threshold was too high, selection is exact: a residual
of which none reaches it would wait until other gradients come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusion_rt.codecs.base import Array
from fusion_rt.codecs.selecting import Selecting, SelectingBucketCodec
from fusion_rt.codecs.topk import take_largest
from fusion_rt.kernels.selection import (
    NOTHING,
    Found,
    Memory,
    at_most,
    collect_shares,
    magnitude,
    moments,
    share,
    take_found,
)
from fusion_rt.kernels.team import Team

_TRIES = 3
_ROOM = 8  # times k, that are kept to find the largest among


class GaussianKBucket(SelectingBucketCodec):
    def _select(self, memory: Memory, group: int, k: int, team: Team) -> tuple[Array, Array]:
        ranges = self._groups[group].ranges
        shares = share(ranges, team.threads)
        added, size = Memory(memory.residual), self._groups[group].size
        collect_shares(memory, shares, NOTHING, 0, team)
        threshold = _normal_threshold(*moments(memory.residual, ranges, team), size, k)
        if threshold is None:
            return take_largest(added, ranges, k, team)[:2]
        found, total = list[Found](), 0
        for _ in range(_TRIES):
            found = collect_shares(added, shares, max(1, magnitude(threshold)), _ROOM * k, team)
            total = sum(each.count for each in found)
            if total < 2 * k / 3:
                threshold *= 0.5
            elif total > 4 * k / 3:
                threshold *= 1.5
            else:
                break
        if total < 2 * k / 3 or any(each.overflowed for each in found):
            return take_largest(added, ranges, k, team)[:2]
        return take_found(memory.residual, found, at_most(found, k), team)


@dataclass(frozen=True)
class GaussianK(Selecting):
    """About k of the largest."""

    name = "gaussiank"
    bucket = GaussianKBucket
    takes_largest = True


def _normal_threshold(plain: float, squared: float, n: int, k: int) -> float | None:
    """Returns the magnitude that k of n normally distributed numbers with these sums would reach; None where that is
    not a number above zero."""
    from statistics import NormalDist  # a megabyte that other codecs do not need

    mean = plain / n
    variance = (squared - plain * mean) / max(1, n - 1)
    if not 0 < variance < math.inf or k == n:
        return None
    threshold = mean - NormalDist().inv_cdf(k / n / 2) * math.sqrt(variance)
    return threshold if threshold > 0 else None
