"""When a silent peer is given up, on virtual time."""

from __future__ import annotations

import random
from statistics import NormalDist

import pytest

from fusiond.transport.peers import INTERVALS, PHI, AwakeClock, Suspicion
from tests.for_each import for_each

INTERVAL, MOST = 0.1, 10.0


def beaten(times: list[float], interval: float = INTERVAL, most: float = MOST) -> tuple[Suspicion, float]:
    """A peer whose heartbeats came with these times between them, and when the last one came."""
    suspicion = Suspicion(interval, most, 0.0)
    now = 0.0
    suspicion.beat(now)
    for seconds in times:
        now += seconds
        suspicion.heard(now)
        suspicion.beat(now)
    return suspicion, now


def test_until_enough_is_known_the_limit_is_the_setting() -> None:
    assert beaten([INTERVAL] * 9)[0].limit == MOST
    assert beaten([INTERVAL] * 10)[0].limit < MOST


@for_each(("interval", "most", "least"), [(0.1, 10, 5), (1.0, 10, 5), (1.0, 6, 5), (1.0, 3, 3)])
def test_a_regular_peer_gets_half_the_setting_and_some_heartbeats(interval: float, most: float, least: float) -> None:
    assert beaten([interval] * 50, interval, most)[0].limit == pytest.approx(least)
    assert least >= min(most, INTERVALS * interval)


def test_an_irregular_peer_gets_as_long_as_phi_says() -> None:
    chooser = random.Random(1)
    times = [chooser.gauss(3.0, 0.5) for _ in range(100)]
    mean = sum(times) / 100
    deviation = (sum((seconds - mean) ** 2 for seconds in times) / 100) ** 0.5
    limit = beaten(times)[0].limit
    late = 1 - NormalDist(mean, deviation).cdf(limit)
    assert late == pytest.approx(10**-PHI, rel=0.01)
    assert 5 < limit < MOST


def test_nobody_gets_more_than_the_setting() -> None:
    assert beaten([0.1, 9.0] * 20)[0].limit == MOST


def test_what_was_long_ago_is_forgotten() -> None:
    assert beaten([5.0] * 20 + [INTERVAL] * 100)[0].limit == pytest.approx(MOST / 2)


def test_silence_counts_from_whatever_was_heard_last_and_the_longest_is_remembered() -> None:
    suspicion, now = beaten([INTERVAL] * 10)
    suspicion.heard(now + 3)
    suspicion.heard(now + 4)
    assert suspicion.silence(now + 4.5) == pytest.approx(0.5)
    assert suspicion.longest == pytest.approx(3)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_in_which_our_own_loop_stood_still_does_not_count() -> None:
    clock = Clock()
    awake = AwakeClock(clock, 0.25)
    suspicion = Suspicion(1.0, MOST, awake())
    for _ in range(20):  # it runs, and hears nothing
        clock.now += 0.25
        awake()
    assert suspicion.silence(awake()) == pytest.approx(5)
    clock.now += 3600  # it was stopped
    assert suspicion.silence(awake()) == pytest.approx(5.25)
    assert awake.paused == pytest.approx(3599.75)
    clock.now += 0.25
    assert suspicion.silence(awake()) == pytest.approx(5.5)


def test_what_was_received_first_after_a_pause_counts_as_of_then() -> None:
    clock = Clock()
    awake = AwakeClock(clock, 0.25)
    suspicion = Suspicion(1.0, MOST, awake())
    clock.now += 60
    suspicion.heard(awake())  # before any timer has run
    for seconds in range(1, 5):
        for _ in range(4):
            clock.now += 0.25
            awake()
        assert suspicion.silence(awake()) == pytest.approx(seconds)


def test_a_loop_that_is_a_little_late_is_no_pause() -> None:
    clock = Clock()
    awake = AwakeClock(clock, 0.25)
    for seconds in (0.3, 0.5, 0.4):
        clock.now += seconds
        awake()
    assert awake.paused == 0


@for_each("seed", range(5))
def test_a_peer_that_is_cut_off_is_noticed_in_time_and_one_that_is_only_late_is_not_given_up(seed: int) -> None:
    chooser = random.Random(seed)
    suspicion, now = beaten([chooser.uniform(0.05, 0.6) for _ in range(200)])
    for _ in range(1000):  # as irregular as it was
        gap = chooser.uniform(0.05, 0.6)
        assert suspicion.silence(now + gap) < suspicion.limit
        now += gap
        suspicion.heard(now)
        suspicion.beat(now)
    noticed = next(t for t in (now + 0.25 * n for n in range(1000)) if suspicion.silence(t) > suspicion.limit)
    assert noticed - now <= MOST + 0.25
