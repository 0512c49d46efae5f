"""Which hosts are left out, and how long."""

from __future__ import annotations

import random

import pytest

from fusion_rt.runner.decisions.blacklist import Blacklist


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_host_is_left_out_twice_as_long_each_time_up_to_the_most() -> None:
    clock = Clock()
    times = [Blacklist(10, 300, clock, random.Random(seed)) for seed in range(20)]
    for failure in range(7):
        seconds = [blacklist.add("a") for blacklist in times]
        least = min(10 * 2**failure, 300)
        assert all(least <= value <= min(1.5 * least, 300) for value in seconds)
        if least < 200:
            assert len(set(seconds)) == len(seconds), "hosts that failed together come back at different times"
    assert seconds == [300] * 20


def test_a_host_comes_back_when_its_time_is_over() -> None:
    clock = Clock()
    blacklist = Blacklist(10, 300, clock, random.Random(0))
    seconds = blacklist.add("a")
    assert "a" in blacklist
    assert "b" not in blacklist
    clock.now += seconds - 0.001
    assert "a" in blacklist
    clock.now += 0.002
    assert "a" not in blacklist


def test_the_times_follow_from_the_seed() -> None:
    clock = Clock()
    first, second = (Blacklist(1, 100, clock, random.Random("job")) for _ in range(2))
    assert [first.add("a") for _ in range(5)] == pytest.approx([second.add("a") for _ in range(5)])
