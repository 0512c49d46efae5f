"""What mixing keeps, on real daemons and workers: four ranks on two nodes (`tests/fusiond` has more, in virtual time).

Parameters move by what the test says, with a learning rate of 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from tests.harness import Job, on_ranks

DIM = 40
GOSSIP = (
    ("dpsgd", "dense"), ("dpsgd(topology='exponential')", "fp16"), ("sgp", "bf16"), ("choco", "fp16"),
    ("choco", "topk(density=0.1, minimum=0)"), ("adpsgd", "dense"), ("noloco(steps=1, outer_momentum=0.0)", "dense"),
)  # fmt: skip


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((2, 2), {"HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


def trained(text: str, codec: str, start: float) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.full((DIM,), start))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    return parameter, hvd.DistributedOptimizer(sgd, [("w", parameter)], algorithm=text, compression=codec)


def move(parameter: torch.nn.Parameter, optimizer: Any, by: float, steps: int = 1) -> None:
    for _ in range(steps):
        parameter.grad = torch.full((DIM,), -by)
        optimizer.step()


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "text", ["local_sgd(steps=2)", "diloco(steps=2, outer_rate=1.0, outer_momentum=0.0)", "dpsgd", "sgp", "choco"]
)
@on_ranks
def test_a_hundred_small_steps_are_not_rounded_away(text: str, codec: str) -> None:
    parameter, optimizer = trained(text, codec, 1.0)
    move(parameter, optimizer, -0.001, steps=100)
    hvd.consensus(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.full((DIM,), 0.9), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("text", "codec"), GOSSIP)
@on_ranks
def test_what_all_ranks_set_is_the_new_start_after_uneven_steps(text: str, codec: str) -> None:
    parameter, optimizer = trained(text, codec, float(hvd.rank()))
    move(parameter, optimizer, 0.5 * hvd.rank(), steps=3 + 2 * (hvd.rank() % 2))
    hvd.barrier()
    parameter.detach().fill_(5.0)
    optimizer.reseed()
    move(parameter, optimizer, 0.0, steps=6)
    torch.testing.assert_close(parameter.detach(), torch.full((DIM,), 5.0), rtol=0, atol=1e-5)
    hvd.consensus(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.full((DIM,), 5.0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("allreduce", "topk(density=0.1, minimum=0)"), ("bsp", "topk(density=0.1, minimum=0)"),
        ("asp", "onebit(minimum=0)"),
        ("softsync(contributions=3)", "int2(minimum=0)"), ("noloco(steps=1)", "dense"),
        ("diloco(steps=1)", "powersgd(rank=1, minimum=0)"), ("sparseloco(steps=1, density=0.1)", ""),
        ("diloco(steps=2, fragments=2, delay=1, mix=0.25)", "dense"),
        ("decoupled(steps=1, quorum=2)", "topk(density=0.1, minimum=0)"),
    ],
)  # fmt: skip
@on_ranks
def test_what_all_ranks_set_is_the_new_start_whatever_was_not_sent_or_had_momentum(text: str, codec: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(8, 5)), torch.nn.Parameter(torch.ones(DIM))]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1), [("a", parameters[0]), ("b", parameters[1])],
        algorithm=text, **({"compression": codec} if codec else {}),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(hvd.rank())
    for step in range(11):
        if step == 5:
            hvd.barrier()
            for parameter in parameters:
                parameter.detach().fill_(5.0)
            optimizer.reseed()
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw) * (step < 5)
        optimizer.step()
        if step >= 5:
            for parameter in parameters:
                torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 5.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "codec"), [("bsp", "topk(density=0.1, minimum=0)"), ("collaborative(samples=9)", "dense")]
)
@on_ranks
def test_what_all_ranks_set_after_they_loaded_a_checkpoint_is_the_new_start(text: str, codec: str) -> None:
    parameter, optimizer = trained(text, codec, 1.0)
    for step in range(5):
        parameter.grad = torch.linspace(-1, 1, DIM) * (step + 1 + hvd.rank())
        optimizer.step()
    hvd.consensus(optimizer)
    saved = optimizer.state_dict()
    parameter, optimizer = trained(text, codec, 1.0)
    optimizer.load_state_dict(saved)
    parameter.detach().fill_(5.0)
    optimizer.reseed()
    move(parameter, optimizer, 0.0, steps=6)
    torch.testing.assert_close(parameter.detach(), torch.full((DIM,), 5.0), rtol=0, atol=1e-6)


@on_ranks
def test_consensus_of_push_sum_is_the_weighted_mean_and_a_start(tmp_path: Path) -> None:
    """Columns of the matrix sum to 1, and rows do not: omega is .5 to 1.7 after some steps."""
    path = f"{tmp_path}/w{hvd.rank()}"
    kept = 1 / (np.arange(4) + 2)
    np.savetxt(path, np.diag(kept) + np.roll(np.diag(1 - kept), 1, axis=0), "%.17g")
    path = hvd.broadcast_object(path, 0)
    parameter, optimizer = trained(f"sgp(topology='file:{path}')", "dense", 0.0)
    move(parameter, optimizer, float(hvd.rank()))
    move(parameter, optimizer, 0.0, steps=2)  # the ranks are not together yet, and the sum of their steps is 6
    with hvd.averaged(optimizer):
        torch.testing.assert_close(parameter.detach(), torch.full((DIM,), 1.5), rtol=0, atol=1e-5)
    hvd.consensus(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.full((DIM,), 1.5), rtol=0, atol=1e-5)
    move(parameter, optimizer, 0.0, steps=3)
    torch.testing.assert_close(parameter.detach(), torch.full((DIM,), 1.5), rtol=0, atol=1e-5)
    parameter.detach().add_(1.0)
    with pytest.raises(ValueError, match=r"'w' was set since the last step, and sgp.*reseed\(\)"):
        move(parameter, optimizer, 0.0)
    optimizer.reseed()
    move(parameter, optimizer, 0.0, steps=3)
    torch.testing.assert_close(parameter.detach(), torch.full((DIM,), 2.5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", ["local_sgd(steps=1)", "diloco(steps=1)", "dpsgd", "easgd(steps=1)"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks
def test_parameters_in_half_precision_are_refused(text: str, dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.zeros(DIM, dtype=dtype))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("w", parameter)], algorithm=text)
    parameter.grad = torch.ones_like(parameter)
    name = text.partition("(")[0]
    with pytest.raises(hvd.HorovodInternalError, match=rf"{name}.* is for float32 and float64, and 'w' is"):
        optimizer.step()
