"""A test that goes through its values by itself says at which of them it failed, and leaves none out."""

from __future__ import annotations

import inspect

import pytest

from tests.for_each import for_each


def test_all_combinations_are_run_and_the_test_needs_no_other_arguments() -> None:
    seen = []

    @for_each("first", [1, pytest.param(2, id="two")])
    @for_each(("left", "right"), [("a", "b"), ("c", "d")])
    def body(first: int, left: str, right: str) -> None:
        seen.append((first, left, right))

    assert not inspect.signature(body).parameters
    body()
    assert seen == [(1, "a", "b"), (1, "c", "d"), (2, "a", "b"), (2, "c", "d")]


def test_a_failure_names_the_values_and_stays_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    @for_each("seed", range(40))
    def body(seed: int) -> None:
        assert seed != 17, "not this one"

    with pytest.raises(AssertionError, match="not this one"):
        body()
    assert capsys.readouterr().out == "with seed=17\n"


def test_values_without_a_meaning_are_left_out_and_a_test_without_any_is_skipped() -> None:
    seen = []

    def body(seed: int) -> None:
        if seed % 2:
            pytest.skip("odd")
        seen.append(seed)

    for_each("seed", range(5))(body)()
    assert seen == [0, 2, 4]
    with pytest.raises(pytest.skip.Exception, match="odd"):
        for_each("seed", [1, 3])(body)()
