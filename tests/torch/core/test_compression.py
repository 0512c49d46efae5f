"""`hvd.Compression`: a function for each codec, made of the registry. Without a job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.codecs import CODECS, CodecError, parse
from fusion_rt.torch.core.compressors import codec_of
from fusion_rt.torch.optimizer import check_codec
from tests.for_each import for_each


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


@for_each(
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
    with pytest.raises(AttributeError, match=r"there is no compression 'topkk'$"):
        hvd.Compression.topkk(0.1)


def test_statistics_need_a_job() -> None:
    with pytest.raises(ValueError, match="init"):
        hvd.compression_stats()


@pytest.mark.parametrize(
    ("optimizer", "asked"),
    [
        (torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9), "momentum=0"),
        (torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()), r"betas=\(0, ...\)"),
    ],
    ids=["SGD", "AdamW"],
)
def test_a_codec_with_momentum_beside_the_optimizers_own_is_warned_of(
    optimizer: torch.optim.Optimizer, asked: str
) -> None:
    with pytest.warns(UserWarning, match=f"the update would have both; give the optimizer {asked}"):
        check_codec(optimizer, "topk(density=0.1, momentum=0.9)", "average")


def test_a_codec_with_momentum_beside_an_optimizer_without_is_not(recwarn: pytest.WarningsRecorder) -> None:
    parameters = [*torch.nn.Linear(2, 2).parameters()]
    for optimizer in (torch.optim.SGD(parameters, lr=0.1), torch.optim.Adam(parameters, betas=(0.0, 0.99))):
        check_codec(optimizer, "topk(density=0.1, momentum=0.9)", "average")
        check_codec(optimizer, "topk(density=0.1)", "average")
    assert not recwarn.list
