"""`hvd.Compression`: a function for each codec, made of the registry. Without a job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.codecs import CODECS, CodecError, parse
from fusion_rt.torch.core.compressors import codec_of


def test_every_codec_has_a_function() -> None:
    assert set(dir(hvd.Compression)) == {"none", *CODECS}
    for name in CODECS:
        made = getattr(hvd.Compression, name)
        assert codec_of(made() if name not in ("fp16", "bf16") else made) == name


def test_arguments_are_those_of_the_text() -> None:
    assert hvd.Compression.topk(0.02, value="fp32") == parse("topk(density=0.02, value='fp32')")
    assert hvd.Compression.topk(1) == parse("topk(density=1.0)")
    assert hvd.Compression.topk(np.float64(0.5)) == hvd.Compression.topk(torch.tensor(0.5))
    assert codec_of(hvd.Compression.powersgd(rank=2)) == "powersgd(rank=2)"


@pytest.mark.parametrize(
    ("args", "arguments", "why"),
    [
        ((0,), {}, "above 0 and at most 1"),
        ((1.5,), {}, "above 0 and at most 1"),
        ((), {"densty": 0.1}, "did you mean 'density'"),
        ((0.1,), {"density": 0.1}, "was given density twice"),
        ((0.1,) * 30, {}, "and 30 were given"),
        (("much",), {}, "density of the codec topk is of type float"),
    ],
)
def test_arguments_that_cannot_be_used(args: tuple[Any, ...], arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(CodecError, match=why):
        hvd.Compression.topk(*args, **arguments)


def test_a_codec_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="there is no compression 'topkk'; did you mean 'topk'"):
        hvd.Compression.topkk(0.1)


def test_statistics_need_a_job() -> None:
    with pytest.raises(ValueError, match="init"):
        hvd.compression_stats()
