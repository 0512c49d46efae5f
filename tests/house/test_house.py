"""The product gets no larger and no harder to read: its figures are within their limits, which are only lowered."""

from __future__ import annotations

import ast

import pytest

from tests.house import figures, limits
from tests.house.steady_step import steady_step


def test_no_figure_of_the_source_is_above_its_limit() -> None:
    wrong = limits.above(figures.figures(), limits.limits())
    assert not wrong, "\n".join([*wrong, "make the product simpler in another place: `python -m tests.house`"])


@pytest.mark.multiprocess
def test_what_runs_in_a_step_is_counted_in_workers_and_daemons() -> None:
    found = steady_step("allreduce")
    assert found["lines"] > found["functions"] > found["files"] > 10


def test_a_limit_that_is_reached_is_not_exceeded_and_one_that_is_missing_is_named() -> None:
    assert limits.above({"a": 3, "b": 4, "c": 0}, {"a": 3, "b": 3.5}) == [
        "b: 4, and the limit is 3.5",
        "c has no limit",
    ]


def test_limits_are_lowered_and_never_raised() -> None:
    assert limits.lowered({"a": 2, "b": 9, "new": 5}, {"a": 3, "b": 4, "gone": 1}) == {"a": 2, "b": 4, "new": 5}


def test_lines_of_code_are_those_with_neither_blanks_nor_comments_nor_docstrings() -> None:
    source = '"""A module.\n\nIn three lines."""\n\n# a comment\nx = 1  # and one more\ny = """of\ntwo lines"""\n'
    texts = list(figures.docstrings(ast.parse(source)))
    assert figures.code_lines(source, texts) == {6, 7, 8}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("f = lambda: 0", {"lambdas": 1}),
        ("def f(a, b, c, d, e, *, g, h, i): ...", {"functions of 8 arguments or more": 1}),
        ("class A:\n def f(self, b, c, d, e, g, h, i): ...", {}),
        ("class A:\n def __init__(self, f: Callable[[], None], g: int): ...", {"callbacks to constructors": 1}),
        ("def f(a: Callable[[], None]): ...", {}),
        ("class A:\n" + "\n".join(f" a{n}: int" for n in range(11)), {"classes of more than 10 attributes": 1}),
        ("class A:\n def f(self):\n" + "\n".join(f"  self.a{n % 10} = 0" for n in range(20)), {}),
    ],
)
def test_what_is_counted(source: str, expected: dict[str, int]) -> None:
    assert figures.counted(ast.parse(source)) == expected
