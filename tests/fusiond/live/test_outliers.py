"""Who stands out among several."""

from __future__ import annotations

import random

import numpy as np

from fusion_trace.analyse.stragglers import lower_middle_of_others
from fusiond.live.rates import usual_of_others


def test_the_lower_median_of_the_others_is_usual() -> None:
    assert usual_of_others([1.0, 9.0, 2.0]) == [2.0, 1.0, 1.0]
    assert usual_of_others([1.0, 9.0, 2.0, 9.0]) == [9.0, 2.0, 9.0, 2.0]
    assert usual_of_others([5.0]) == [None]
    assert usual_of_others([]) == []


def test_of_links_of_which_most_are_slow_the_faster_ones_are_the_measure() -> None:
    """All links of one of three hosts: 4 of 6."""
    assert usual_of_others([9.0, 9.0, 9.0, 9.0, 1.0, 1.0], 4)[0] == 1.0


def test_traces_are_judged_by_the_same_rule() -> None:
    generator = random.Random(0)
    for count in range(2, 9):
        for together in range(1, count + 1):
            values = [float(generator.randrange(5)) for _ in range(count)]
            assert lower_middle_of_others(np.array([values]), together)[0].tolist() == usual_of_others(values, together)
