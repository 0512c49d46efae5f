"""Random numbers that every node draws alike."""

from __future__ import annotations

import numpy as np

from fusion_rt.kernels import random_bits
from tests.for_each import for_each


@for_each("seed", range(5))
def test_numbers_are_spread_evenly_from_minus_one_to_one(seed: int) -> None:
    numbers = random_bits.uniform(random_bits.key(seed), 100_000)
    assert numbers.dtype == np.float32
    assert -1 <= numbers.min() < -0.999
    assert 0.999 < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(-1, 1))
    assert abs(counts - 5000).max() < 350  # five deviations of a binomial distribution
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_each_word_decides_the_numbers() -> None:
    keys = {random_bits.key(*words) for words in [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**63,)]}
    assert len(keys) == 6
    assert (random_bits.uniform(7, 50)[:20] == random_bits.uniform(7, 20)).all()
