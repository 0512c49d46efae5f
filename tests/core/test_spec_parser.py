"""Choices written as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core import spec_parser
from fusion_rt.core.plugins import Registry
from tests.for_each import for_each


@dataclass(frozen=True)
class Plain:
    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Tuned:
    name: ClassVar[str] = "tuned"
    rate: float = 0.5
    steps: int = 4
    fast: bool = False
    where: str = "here"


@dataclass(frozen=True)
class Needy:
    name: ClassVar[str] = "needy"
    size: int
    more: int = 1


def known(kind: str) -> Registry[object]:
    return Registry(kind, "tests.nothing", object, [Plain, Tuned, Needy])


def parse(text: str) -> object:
    return spec_parser.parse(text, known("thing"))


@for_each(
    ("text", "chosen"),
    [
        ("plain", Plain()),
        (" plain ", Plain()),
        ("plain()", Plain()),
        ("tuned", Tuned()),
        ("tuned(rate=1)", Tuned(rate=1.0)),
        ("tuned(where='a, b', fast=True)", Tuned(where="a, b", fast=True)),
        ("tuned(rate=-1e-3)", Tuned(rate=-0.001)),
        ("needy(size=2)", Needy(2)),
    ],
)
def test_a_choice_is_read(text: str, chosen: object) -> None:
    assert parse(text) == chosen


@given(
    st.builds(
        Tuned,
        rate=st.floats(allow_nan=False, allow_infinity=False),
        steps=st.integers(-(10**9), 10**9),
        fast=st.booleans(),
        where=st.text("abc ()=,'\"\\é", max_size=20),
    )
)
def test_what_is_written_is_read_again(chosen: Tuned) -> None:
    assert parse(spec_parser.write("tuned", chosen)) == chosen


def test_defaults_are_not_written() -> None:
    assert spec_parser.write("tuned", Tuned()) == "tuned"
    assert spec_parser.write("tuned", Tuned(steps=5)) == "tuned(steps=5)"
    assert spec_parser.write("tuned", parse("tuned(steps=4)")) == "tuned"


@for_each(
    ("text", "why"),
    [
        ("plane", "there is no thing 'plane'; did you mean 'plain'?"),
        ("tuned(step=4)", "the thing tuned has no argument 'step'; did you mean 'steps'?"),
        ("plain(x=1)", "the thing plain has no arguments; write 'plain' instead of 'plain(x=1)'"),
        ("tuned(steps=1.5)", "steps of the thing tuned is of type int, which 1.5 is not"),
        ("tuned(steps=True)", "which True is not"),
        ("tuned(rate='x')", "rate of the thing tuned is of type float, which 'x' is not"),
        ("tuned(fast=1)", "which 1 is not"),
        ("tuned(where=None)", "which None is not"),
        ("needy", "the thing needy needs size; write needy(size=...)"),
        ("tuned(4)", "each argument of a thing has its name, tuned(argument=value), unlike 'tuned(4)'"),
        ("tuned(rate=1, rate=2)", "a thing is written as"),
        ("tuned(rate=1+1)", "a thing is written as"),
        ("tuned(rate=__import__('os'))", "a thing is written as"),
        ("a.b", "a thing is written as"),
        ("a b", "a thing is written as"),
        ("", "a thing is written as"),
        ("tuned(", "a thing is written as"),
        ("\0", "a thing is written as"),
        ("x" * 201, "a thing is written as"),
        ("(" * 190, "a thing is written as"),
    ],
)
def test_what_is_no_choice_is_refused_with_a_sentence(text: str, why: str) -> None:
    with pytest.raises(spec_parser.SpecError) as error:
        parse(text)
    assert why in str(error.value)


@given(st.text(max_size=250))
def test_no_text_does_anything_but_be_refused(text: str) -> None:
    try:
        chosen = parse(text)
    except spec_parser.SpecError:
        return
    assert isinstance(chosen, (Plain, Tuned, Needy))


def test_the_article_follows_the_kind() -> None:
    with pytest.raises(spec_parser.SpecError, match=r"^an algorithm is written as"):
        spec_parser.parse("", known("algorithm"))
