"""Sampling and statistics of benchmarks: alternating turns, medians, intervals.

A machine that is busy, or warms up, changes times by more than most improvements do. So contenders take turns in one
run, and are compared turn by turn: conditions that slow both down cancel. A *sample* is one number a turn (itself a
median or mean over the turn). Of the samples the median is reported, with its quartiles; and of a ratio of two
contenders the median of the turns' ratios, with its 95 % confidence interval by the percentile bootstrap (Efron, 1979,
doi 10.1214/aos/1176344552).

An interval covers chance *within* this run. Another run, with other memory and other load, may differ by more;
`benchmarks.common.compare` therefore has a tolerance, too.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 20200  # so that the same samples always give the same interval, in tables that are compared as text


class Estimate(NamedTuple):
    """A number, and its interval."""

    value: float
    low: float
    high: float


def alternate(
    turns: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    warm_up: int = 1,
    first: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Lets contenders take turns; every other round goes backwards, so that none always follows the same one.

    Args:
        turns: functions that take a turn of each contender and return its sample.
        rounds: samples of each.
        warm_up: rounds before these that do not count.
        first: called before each turn, for example a barrier.

    On several ranks all have the same order. Returns the samples in the order of rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(-warm_up, rounds):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            if first is not None:
                first()
            sample = turns[name]()
            if number >= 0:
                samples[name].append(sample)
    return samples


def median(samples: Sequence[float]) -> float:
    """Returns the median. Raises `statistics.StatisticsError` if there are no samples."""
    return float(statistics.median(samples))


def quartiles(samples: Sequence[float]) -> Estimate:
    """Returns the median, with the quartiles as its interval."""
    if len(samples) == 1:
        return Estimate(samples[0], samples[0], samples[0])
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Estimate(middle, low, high)


def ratio(over: Sequence[float], under: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Returns the median of `over` / `under`, turn by turn, and its interval.

    Raises:
        ValueError: they were not taken in the same turns.
    """
    return estimate(ratios(over, under), confidence)


def estimate(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Returns the median and its interval."""
    generator = random.Random(SEED)
    found = [_resampled(samples, generator) for _ in range(RESAMPLES)]
    return _between(median(samples), found, confidence)


def change(old: Sequence[float], new: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Returns the median of `new` over that of `old`, which were taken in different runs, and its interval."""
    generator = random.Random(SEED)
    found = [_resampled(new, generator) / _resampled(old, generator) for _ in range(RESAMPLES)]
    return _between(median(new) / median(old), found, confidence)


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Returns the ratio in each turn.

    Raises:
        ValueError: they were not taken in the same turns.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} samples cannot be compared turn by turn with {len(under)}.")
    return [a / b for a, b in zip(over, under, strict=True)]


def _resampled(samples: Sequence[float], generator: random.Random) -> float:
    return median(generator.choices(samples, k=len(samples)))


def _between(value: float, found: list[float], confidence: float) -> Estimate:
    found.sort()
    outside = (1 - confidence) / 2
    low, high = (found[min(len(found) - 1, int(share * len(found)))] for share in (outside, 1 - outside))
    return Estimate(value, low, high)
