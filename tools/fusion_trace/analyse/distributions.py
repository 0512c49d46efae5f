"""Compares two series of steps as distributions: median, mean, 95 %, and spikes, each with an interval.

| row | of both series | interval of the difference |
| --- | --- | --- |
| median, 95 % | a quantile | from order statistics, which need no shape of the noise |
| mean | of all steps | a bootstrap of blocks of steps that follow each other (Künsch, 1989) |
| spikes | how long they are, the mean | Welch's, by Student's t |
| spikes, share | how many of the steps are spikes | Wilson's |

Two intervals become that of a difference by the part that each adds on its side (Newcombe, 1998; Zou and Donner, 2008).
Neighbours resemble each other, so that n steps count as fewer. A spike is a step that is longer than the median by
`FAR` standard deviations of the steps around it, and by a tenth: a few long steps are invisible in a median, and lost
in the noise of a mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

ROWS = ("median", "mean", "95 %", "spikes", "spikes, share")
SHARE = "spikes, share"
FAR = 5.0
_LEAST_SPIKE = 0.1  # of the median
LEAST_SPIKES = 5  # of each series, to compare how long they are
_TO_SIGMA = 1.4826
_RESAMPLES = 4000
Series = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """One figure of two series. ns, but for shares of steps.

    Attributes:
        measure: the figure, in words.
        before, after: its values; None: there is none.
        low, high: interval of the difference; infinite on a side that so few steps say nothing about.
        changed: 0 is not in it.
    """

    measure: str
    before: float | None
    after: float | None
    low: float
    high: float

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def changed(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def known(self) -> bool:
        """Says whether there is an interval that ends on both sides."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def relative(self, change: float | None) -> float | None:
        """Returns a change as a part of the figure before."""
        return change / self.before if self.before and change is not None else None


def compare(before: Series, after: Series, level: float, generator: np.random.Generator) -> tuple[Comparison, ...]:
    """Returns the rows of `ROWS`.

    Args:
        before, after: of at least 2 steps each, in order of time.
        level: confidence of each interval, for itself.
        generator: for the bootstrap.
    """
    sides = before, after
    long = [series[spikes(series)] for series in sides]
    tail = [_quantile(series, 0.95) for series in sides]
    lasts = [float(its.mean()) if len(its) else None for its in long]
    shares = [len(its) / len(series) for its, series in zip(long, sides, strict=True)]
    return (
        compare_medians("median", before, after, level),
        Comparison("mean", float(before.mean()), float(after.mean()), *_mean_interval(before, after, level, generator)),
        Comparison("95 %", tail[0], tail[1], *_quantile_interval(before, after, 0.95, level)),
        Comparison("spikes", lasts[0], lasts[1], *_welch(long[0], long[1], level)),
        Comparison(SHARE, shares[0], shares[1], *_share_interval(before, after, level)),
    )


def compare_medians(measure: str, before: Series, after: Series, level: float) -> Comparison:
    """Returns a row of medians; `level` as in `compare`."""
    return Comparison(measure, _median(before), _median(after), *_quantile_interval(before, after, 0.5, level))


def spikes(series: Series) -> NDArray[np.bool_]:
    """Says of each step whether it is a spike."""
    middle = _median(series)
    around = np.median(np.abs(series - middle)) * _TO_SIGMA
    found: NDArray[np.bool_] = series > middle + max(FAR * around, _LEAST_SPIKE * middle)
    return found


def _median(series: Series) -> float:
    return float(np.median(series))


def _quantile(series: Series, share: float) -> float:
    return float(np.quantile(series, share))


def _quantile_interval(before: Series, after: Series, share: float, level: float) -> tuple[float, float]:
    """Returns the interval of the difference of a quantile."""
    sides = [(_quantile(series, share), *_order_statistics(series, share, level)) for series in (before, after)]
    return _of_difference(*sides)


def _order_statistics(series: Series, share: float, level: float) -> tuple[float, float]:
    """Returns the interval of a quantile: as many steps lie below it as a binomial distribution has it."""
    number, z = len(series), _z(level)
    deviation = z * math.sqrt(share * (1 - share) / _effective(series > _quantile(series, share)))
    low, high = math.floor(number * (share - deviation)), math.ceil(number * (share + deviation))
    ordered = np.sort(series)
    return (
        float(ordered[low - 1]) if low >= 1 else -math.inf,
        float(ordered[high]) if high < number else math.inf,
    )


def _share_interval(before: Series, after: Series, level: float) -> tuple[float, float]:
    return _of_difference(*(_wilson(spikes(series), level) for series in (before, after)))


def _wilson(found: NDArray[np.bool_], level: float) -> tuple[float, float, float]:
    """Returns a share with its interval."""
    z, number, share = _z(level), _effective(found), float(found.mean())
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z * math.sqrt(share * (1 - share) / number + (z / (2 * number)) ** 2) / (1 + z * z / number)
    return share, max(middle - half, 0.0), min(middle + half, 1.0)


def _effective(marked: NDArray[np.bool_]) -> float:
    """Returns how many independent steps tell as much: fewer, where marked ones come one after the other."""
    centred = marked - marked.mean()
    power = float((centred * centred).mean())
    alike = float((centred[1:] * centred[:-1]).mean()) / power if power else 0.0
    alike = min(max(alike, 0.0), 0.9)
    return len(marked) * (1 - alike) / (1 + alike)


def _of_difference(before: tuple[float, float, float], after: tuple[float, float, float]) -> tuple[float, float]:
    """Joins two values with their intervals (value, low, high) into the interval of their difference."""
    difference = after[0] - before[0]
    return (
        difference - math.hypot(after[0] - after[1], before[2] - before[0]),
        difference + math.hypot(after[2] - after[0], before[0] - before[1]),
    )


def _welch(before: Series, after: Series, level: float) -> tuple[float, float]:
    """Returns the interval of the difference of two means; open where there are too few values."""
    if min(len(before), len(after)) < LEAST_SPIKES:
        return -math.inf, math.inf
    parts = [float(each.var(ddof=1)) / len(each) for each in (before, after)]
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (before, after), strict=True)
    ) if error else math.inf  # fmt: skip
    difference, half = float(after.mean() - before.mean()), _t(level, freedom) * error
    return difference - half, difference + half


def _z(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)


def _t(level: float, freedom: float) -> float:
    """Returns the quantile of Student's t, by Cornish and Fisher's expansion; within 2 % from 5 degrees of freedom
    on."""
    z = _z(level)
    return z + (
        (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


# --- means ------------------------------------------------------------------------------------------------------------


def _mean_interval(before: Series, after: Series, level: float, generator: np.random.Generator) -> tuple[float, float]:
    """Returns the interval of the difference of the means: the basic bootstrap, widened as Student's t is for few
    blocks."""
    difference = float(after.mean() - before.mean())
    drawn = _means(after, generator) - _means(before, generator) - difference
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    fewest = min(len(before), len(after))
    wider = math.sqrt(fewest / (fewest - 1)) * _t(level, fewest / _block(fewest)) / _z(level)
    return difference - float(high) * wider, difference - float(low) * wider


def _block(number: int) -> int:
    """Returns how many steps a block has."""
    return max(1, int(number ** (1 / 3) + 0.5))


def _means(values: Series, generator: np.random.Generator) -> Series:
    """Returns the means of resamples, which are made of blocks of steps that follow each other, around the end too."""
    number = len(values)
    length = _block(number)
    blocks = -(-number // length)
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[:length]]))])
    begins = generator.integers(0, number, (_RESAMPLES, blocks))
    drawn: Series = (sums[begins + length] - sums[begins]).sum(axis=1) / (blocks * length)
    return drawn
