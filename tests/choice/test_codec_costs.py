"""Tests of the measured costs of codecs: bytes as each codec makes them, whatever its family."""

from __future__ import annotations

import pytest

from fusion_rt import codecs
from fusion_rt.choice.codec_costs import measured
from fusion_rt.codecs.base import Layout, Span
from fusion_rt.core.dtypes import DTYPES

LAYOUT = Layout(DTYPES["float32"], 160 * 128, (Span("w", 0, 160 * 128, (160, 128)),))


@pytest.mark.parametrize(
    ("codec", "nbytes"),
    [
        ("dense", 4 * 160 * 128),
        ("fp16", 2 * 160 * 128),
        ("powersgd(rank=4)", 4 * 4 * (160 + 128)),
    ],
)
def test_bytes_are_those_of_the_codecs_own_formula(codec: str, nbytes: int) -> None:
    assert measured(codecs.parse(codec), LAYOUT, 1).nbytes == nbytes


@pytest.mark.parametrize(
    "codec", ["int8", "int2", "onebit", "topk(density=0.1)", "randomk", "demo", "gaussiank", "bf16"]
)
def test_every_family_can_be_measured(codec: str) -> None:
    chosen = codecs.parse(codec)
    found = measured(chosen, LAYOUT, 1)
    assert 0 < found.nbytes < 4 * LAYOUT.elements
    assert found.exchange == chosen.bucket.exchange


def test_nothing_is_encoded_without_a_codec() -> None:
    assert measured(codecs.parse("dense"), LAYOUT, 1).seconds == 0.0
