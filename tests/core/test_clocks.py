"""Clocks of two hosts are compared by timestamps that go there and back."""

from __future__ import annotations

import random

import pytest

from fusion_rt.core.clocks import MOST_DRIFT, ClockFilter, Measurement, measure

MS = 1_000_000
SECOND = 1_000 * MS


def test_the_offset_is_exact_where_both_ways_take_equally_long() -> None:
    # Sent at 1000 here, which is 501000 there; 300 each way, 50 in between.
    assert measure(1000, 501_300, 501_350, 1650) == Measurement(1650, 500_000, 600)


@pytest.mark.parametrize(
    "times",
    [(1000, 2000, 1999, 1500), (1000, 1100, 2200, 2000), (1000, 0, 1 << 61, 2000), (2000, 1, 1, 1000)],
    ids=["the answer left before it came", "longer there than away", "absurd", "back before it left"],
)
def test_what_cannot_be_is_no_measurement(times: tuple[int, int, int, int]) -> None:
    found = measure(*times)
    assert found is None or found.round_trip <= times[3] - times[0]
    assert times == (1000, 2000, 1999, 1500) or found is None


def test_nothing_is_known_before_the_first_exchange() -> None:
    assert ClockFilter().estimate(0) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_truth_lies_within_the_error(seed: int) -> None:
    """Ways that take unequally long, now and then very much so, and clocks that drift apart."""
    draws = random.Random(seed)
    offset, drift = draws.uniform(-1e15, 1e15), draws.uniform(-0.5, 0.5) * MOST_DRIFT

    def there(now: float) -> int:
        return round(now + offset + drift * now)

    clocks = ClockFilter()
    now = 0.0
    for _ in range(200):
        now += SECOND
        t1, away = now, draws.uniform(0.05, 0.2) * MS + draws.choice([0, 0, 0, draws.uniform(0, 50)]) * MS
        back = draws.uniform(0.05, 0.2) * MS + draws.choice([0, 0, 0, draws.uniform(0, 50)]) * MS
        t2 = there(t1 + away)
        t3, t4 = t2 + 1000, t1 + away + 1000 + back
        found = measure(round(t1), t2, t3, round(t4))
        assert found is not None
        clocks.add(found)
        told = clocks.estimate(round(t4))
        assert told is not None
        assert abs(told.offset - (there(t4) - t4)) <= told.error + 1000
    assert told is not None
    assert told.error < 1 * MS
    assert abs(told.drift - drift) < 0.1 * MOST_DRIFT
