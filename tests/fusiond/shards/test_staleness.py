"""Histograms of staleness: what is counted, and that they stay small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion_rt import wire
from fusiond.shards.staleness import Histogram, Meters


def test_small_numbers_are_counted_each_and_large_ones_in_classes() -> None:
    histogram = Histogram()
    for value in (0, 0, 1, 2, 3, 4, 5, 6, 7, 17, 4096, 4097, 8192, 8193):
        histogram.note(value)
    told = histogram.statistics()
    assert told["histogram"] == {
        "0": 2, "1": 1, "2": 1, "3": 1, "4": 1, "6": 2, "8": 1, "24": 1, "4096": 1, "8192": 2, "16384": 1,
    }  # fmt: skip
    assert told["count"] == 14
    assert told["max"] == 8193


def test_nothing_has_been_noted() -> None:
    assert Histogram().statistics() == {"count": 0, "mean": 0.0, "max": 0, "histogram": {}}


@given(st.lists(st.integers(0, 2**48 - 1), min_size=1, max_size=200))
def test_every_number_is_in_the_class_that_is_named_by_its_largest(values: list[int]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.note(value)
    told = histogram.statistics()
    counts: dict[str, int] = told["histogram"]  # type: ignore[assignment]
    bounds = [int(bound) for bound in counts]
    assert bounds == sorted(bounds)
    assert sum(counts.values()) == told["count"] == len(values)
    done = 0
    for bound in bounds:  # up to each bound there are as many as there are numbers
        done += counts[str(bound)]
        assert done == sum(value <= bound for value in values)
    assert told["mean"] == round(sum(values) / len(values), 4)
    assert told["max"] == max(values)


def test_a_histogram_stays_small_whatever_is_noted() -> None:
    histogram = Histogram()
    for value in range(0, 2_000_000, 7):
        histogram.note(value)
    assert len(histogram._counts) < 40


def test_meters_note_contributions() -> None:
    meters = Meters()
    meters.note(wire.Staleness(3, 1, 20))
    meters.note(wire.Staleness())
    told = meters.statistics()
    assert [told[name]["max"] for name in ("version_lag", "clock_gap", "age_ms")] == [3, 1, 20]  # type: ignore[index]
    assert [told[name]["count"] for name in ("version_lag", "clock_gap", "age_ms")] == [2, 2, 2]  # type: ignore[index]
