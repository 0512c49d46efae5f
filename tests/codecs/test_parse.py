"""Codecs as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt import codecs
from fusion_rt.codecs import BucketCodec, Codec, CodecError, Layout, parse
from fusion_rt.codecs.dense import Dense
from fusion_rt.codecs.half import Bf16, Fp16
from fusion_rt.codecs.integers import Int4, Int8
from fusion_rt.codecs.onebit import OneBit
from fusion_rt.codecs.powersgd import PowerSGD
from fusion_rt.core.dtypes import DType
from tests.for_each import for_each


@dataclass(frozen=True)
class Picky(Codec):
    """A codec with arguments, as later ones will be."""

    name = "picky"
    lossless = False
    selecting = True

    k: int
    density: float = 0.01
    value: str = "fp16"
    exact: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise CodecError(f"density of the codec picky is a share above 0 and at most 1, not {self.density}")

    def applies_to(self, dtype: DType) -> bool:
        return False

    def open(self, layout: Layout) -> BucketCodec:
        return Dense().open(layout)


@pytest.fixture(autouse=True, scope="module")
def _picky() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(codecs.CODECS, "picky", Picky)
        yield


@pytest.mark.parametrize(("text", "codec"), [("dense", Dense()), ("fp16", Fp16()), ("bf16", Bf16())])
def test_a_name_alone_is_a_codec(text: str, codec: Codec) -> None:
    assert parse(text) == codec
    assert parse(f" {text}() ") == codec
    assert str(codec) == text


@for_each(
    ("text", "codec"),
    [
        ("int8", Int8()),
        ("int8(block=64, feedback=False, seed=3)", Int8(block=64, feedback=False, seed=3)),
        ("int4(decay=0.95, rounding='random')", Int4(decay=0.95, rounding="random")),
        ("onebit(block=1024)", OneBit()),
        ("onebit(momentum=0.9, nesterov=True)", OneBit(momentum=0.9, nesterov=True)),
        ("powersgd(rank=4)", PowerSGD()),
        ("powersgd(rank=1, warm_start=False, exclude='')", PowerSGD(1, warm_start=False, exclude="")),
    ],
)
def test_codecs_that_send_less_of_every_element_have_arguments(text: str, codec: Codec) -> None:
    assert parse(text) == codec
    assert parse(str(codec)) == codec


def test_arguments_have_names_and_defaults() -> None:
    assert parse("picky(k=3)") == Picky(3)
    assert parse('picky(value="int8", k=3, density=1, exact=False)') == Picky(3, 1.0, "int8", False)


@given(
    k=st.integers(),
    density=st.floats(0, 1, exclude_min=True),
    value=st.text(st.characters(codec="ascii"), max_size=20),
    exact=st.booleans(),
)
def test_the_canonical_text_of_a_codec_parses_to_it(k: int, density: float, value: str, exact: bool) -> None:
    codec = Picky(k % 10**9, density, value, exact)
    assert parse(str(codec)) == codec
    assert str(parse(str(codec))) == str(codec)


@for_each(
    ("text", "share"),
    [
        ("dense", 1.0),
        ("fp16", 1.0),
        ("int4", 1.0),
        ("powersgd", 1.0),
        ("topk(density=0.25)", 0.25),
        ("demo(density=0.5)", 0.5),
    ],
)
def test_a_contribution_has_the_share_of_the_elements_that_a_codec_says(text: str, share: float) -> None:
    assert parse(text).share() == share


def test_equal_codecs_have_the_same_text() -> None:
    texts = ["picky(k=3)", "picky(density=0.01, k=3)", "picky( k = 3, exact=True, density=1e-2,)"]
    assert {str(parse(text)) for text in texts} == {"picky(k=3)"}


@for_each(
    ("text", "said"),
    [
        ("fp61", "no codec 'fp61'; did you mean 'fp16'"),
        ("Dense", "no codec 'Dense'; did you mean 'dense'"),
        ("zzz", "no codec 'zzz'; did you mean"),
        ("fp16(density=1)", "fp16 has no arguments"),
        ("topk(0.01)", r"each argument of a codec has its name, topk\(argument=value\), unlike 'topk\(0.01\)'"),
        ("picky(k=3, densty=0.1)", "no argument 'densty'; did you mean 'density'"),
        ("picky", r"picky needs k; write picky\(k=...\)"),
        ("picky(k=3, density='a lot')", "density of the codec picky is of type float, which 'a lot' is not"),
        ("picky(k=True)", "k of the codec picky is of type int, which True is not"),
        ("picky(k=3, exact=1)", "exact of the codec picky is of type bool"),
        ("picky(k=3, density=0.0)", "above 0 and at most 1, not 0.0"),
        ("picky(k=3, k=4)", "a codec is written as"),
        ("picky(3)", "each argument of a codec has its name"),
        ("picky(k=print)", "a codec is written as"),
        ("picky(k=__import__('os'))", "a codec is written as"),
        ("picky(k=3", "a codec is written as"),
        ("", "a codec is written as"),
        ("dense\0", "a codec is written as"),
        ("(" * 150, "a codec is written as"),
        ("-" * 199 + "1", "a codec is written as"),
        ("dense" + " " * 200, "a codec is written as"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text: str, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        parse(text)


@given(st.text(max_size=40) | st.text("picky(k=3,)de nse*[]{}'\"-.", max_size=60))
def test_any_text_is_a_codec_or_a_codec_error(text: str) -> None:
    try:
        codec = parse(text)
    except CodecError:
        return
    assert parse(str(codec)) == codec
