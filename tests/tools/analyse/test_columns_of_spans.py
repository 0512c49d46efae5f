"""Columns of spans: places that are kept, and values that do not come twice."""

from __future__ import annotations

import numpy as np

from fusion_trace.analyse.columns_of_spans import distinct, run
from tests.for_each import for_each


@for_each("seed", range(20))
def test_what_is_kept_by_its_run_is_what_is_kept_by_a_mask(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(0, 9, random.integers(0, 9))
    kept = values > random.integers(0, 9)
    assert values[run(kept)].tolist() == values[kept].tolist()


def test_places_that_follow_each_other_are_a_slice() -> None:
    assert run(np.array([False, True, True, False])) == slice(1, 3)
    assert isinstance(run(np.array([True, False, True])), np.ndarray)


@for_each(("values", "expected"), [([], True), ([3], True), ([1, 2, 5], True), ([5, 1, 2], True), ([1, 2, 1], False)])
def test_values_are_distinct_in_any_order(values: list[int], expected: bool) -> None:
    assert distinct(np.array(values, np.int64)) is expected
