"""How samples are taken and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common import sampling


def test_contenders_take_turns_and_none_always_follows_the_same_one() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = sampling.alternate({"a": lambda: turn("a"), "b": lambda: turn("b")}, 3, first=lambda: order.append("-"))
    assert "".join(order) == "-b-a" + "-a-b" + "-b-a" + "-a-b"
    assert {name: len(samples) for name, samples in found.items()} == {"a": 3, "b": 3}, "the first round was warm-up"
    assert found["a"] == sorted(found["a"])


def test_a_ratio_is_that_of_turns_so_that_what_slowed_both_down_cancels() -> None:
    load = np.random.default_rng(0).lognormal(0.0, 1.0, 15)
    estimate = sampling.ratio(list(2 * load), list(load))
    assert estimate == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="3 samples cannot be compared turn by turn with 2"):
        sampling.ratio([1.0, 2.0, 3.0], [1.0, 2.0])


def test_intervals_contain_the_truth_about_as_often_as_they_say() -> None:
    """Of medians of 9 samples, the percentile bootstrap's 95 % are a bit too few or too many, but not far off."""
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        estimate = sampling.estimate(list(random.lognormal(0.0, 0.3, 9)))
        assert estimate.low <= estimate.value <= estimate.high
        hits += estimate.low <= 1.0 <= estimate.high
    assert 85 <= hits <= 100


def test_the_same_samples_always_give_the_same_interval() -> None:
    samples = [1.0, 1.5, 1.2, 0.9, 1.1]
    assert sampling.estimate(samples) == sampling.estimate(samples)
    assert sampling.change(samples, samples) == sampling.change(samples, samples)


def test_quartiles_are_numpys() -> None:
    samples = [3.0, 1.0, 7.0, 4.0, 9.0, 2.0]
    assert sampling.quartiles(samples) == pytest.approx(tuple(np.percentile(samples, (50, 25, 75))))
    assert sampling.quartiles([5.0]) == (5.0, 5.0, 5.0)
