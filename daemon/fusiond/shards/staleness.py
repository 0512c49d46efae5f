"""Meters of how stale contributions have been: histograms that cost next to nothing to keep."""

from __future__ import annotations

from collections import Counter

from fusion_rt import wire

_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)


class Histogram:
    """Counts of whole numbers from 0 on; from 5 on in classes, named by their largest number, which beyond 4096 is a
    power of two."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0
        self._sum = 0
        self._largest = 0

    def note(self, value: int) -> None:
        largest = next((bound for bound in _BOUNDS if value <= bound), 1 << (value - 1).bit_length())
        self._counts[largest] += 1
        self._total += 1
        self._sum += value
        self._largest = max(self._largest, value)

    @property
    def count(self) -> int:
        """The number of numbers noted."""
        return self._total

    @property
    def mean(self) -> float:
        """The mean of the numbers; 0 where there are none."""
        return self._sum / self._total if self._total else 0.0

    def statistics(self) -> dict[str, object]:
        """`count`, `mean`, `max`, and the `histogram`: how many up to each number, and above the one before."""
        counts = {str(bound): self._counts[bound] for bound in sorted(self._counts)}
        return {"count": self._total, "mean": round(self.mean, 4), "max": self._largest, "histogram": counts}


class Meters:
    """The staleness of the contributions of one node's workers: a histogram for each attribute of `wire.Staleness`."""

    def __init__(self) -> None:
        self.version_lag, self.clock_gap, self.age_ms = Histogram(), Histogram(), Histogram()

    def note(self, staleness: wire.Staleness) -> None:
        """One contribution has been answered."""
        self.version_lag.note(staleness.version_lag)
        self.clock_gap.note(staleness.clock_gap)
        self.age_ms.note(staleness.age_ms)

    def statistics(self) -> dict[str, object]:
        """Returns the statistics of each histogram, by its name."""
        return {name: histogram.statistics() for name, histogram in vars(self).items()}
