"""Resources of a process that may not grow: how far they rose after a warm-up."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

WARM_UP_S = 300.0
WINDOWS = 10  # of the time after it, whose medians are compared

Samples = Sequence[Mapping[str, float]]


def warm_up(seconds: float) -> float:
    """Returns the seconds of a long job in which its resources may still grow."""
    return min(WARM_UP_S, seconds / 4)


def medians(samples: Samples, began: float, seconds: float) -> list[dict[str, float]]:
    """Returns the medians of a process's resources in each tenth of the time after the warm-up; nothing of those in
    which nobody looked at it.

    Args:
        samples: what it held, and `at` when.
        began: when the job did.
        seconds: for which it lived.
    """
    width = (seconds - warm_up(seconds)) / WINDOWS
    windows: defaultdict[int, list[Mapping[str, float]]] = defaultdict(list)
    for sample in samples:
        windows[int((sample["at"] - began - warm_up(seconds)) // width)].append(sample)
    return [
        {what: statistics.median(each[what] for each in windows[part]) for what in windows[part][0]}
        for part in range(WINDOWS)
        if part in windows
    ]


def rise(held: Sequence[Mapping[str, float]], what: str) -> float:
    """Returns how far a resource rose above what it was in the first part of the time."""
    return max(each[what] for each in held) - held[0][what]
