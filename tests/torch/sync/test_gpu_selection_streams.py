"""Selection on a GPU that is made up, whose streams run as late, and in any order, as CUDA allows (`cuda_fake`): the
bits of daemons that select."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.sync.gpu_selection import BucketSelector
from tests.harness import Job, on_ranks
from tests.torch.cuda_fake.sides import selecting
from tests.torch.cuda_fake.streams import FakeStream
from tests.torch.cuda_fake.tensors import fake_cuda, on_gpu, value_of
from tests.torch.training import selecting_buckets

SCHEDULES = range(6)
LENGTHS = (601, 40, 350)  # the second one is always sent
CODECS = [
    "topk(density=0.05, minimum=100)",
    "topk(density=0.05, minimum=100, scope='tensor', value='int8', momentum=0.9, warmup=3)",
    "topk(density=0.1, minimum=100, momentum=0.9, nesterov=True, clip=1.0)",
]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two nodes with one rank each; two buckets."""
    variables = {
        "FUSION_GPU_SELECTION": "auto",
        "HOROVOD_FUSION_THRESHOLD": "2KiB",
        "HOROVOD_START_TIMEOUT": "120",
        "FUSION_CHECK_PARAMETERS": "0",
    }
    with Job((1, 1), variables) as running:
        yield running


def slope(number: int, step: int) -> torch.Tensor:
    chosen = torch.Generator().manual_seed(1000 * step + 10 * number + hvd.rank())
    return torch.randn(LENGTHS[number], generator=chosen)


def make(where: Any, codec: str) -> tuple[list[torch.nn.Parameter], Any]:
    parameters = [torch.nn.Parameter(where(torch.zeros(n))) for n in LENGTHS]
    plain = torch.optim.SGD(parameters, lr=0.1)
    named = [(f"p{n}", parameter) for n, parameter in enumerate(parameters)]
    return parameters, hvd.DistributedOptimizer(plain, named, compression=codec)


def step_of(where: Any, parameters: list[torch.nn.Parameter], step: int, bad: bool = False) -> None:
    given = [where(slope(number, step) * (float("inf") if bad else 1.0)) for number in range(len(parameters))]
    torch.autograd.backward([(parameter * g).sum() for parameter, g in zip(parameters, given, strict=True)])


def trained(where: Any, codec: str, bad: int = -1) -> list[torch.Tensor]:
    """Returns the parameters after some steps, with gradients that are not finite in one of them."""
    parameters, optimizer = make(where, codec)
    for step in range(8):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        step_of(where, parameters, step, step == bad and hvd.rank() == 0)
        if step == bad:
            optimizer.synchronize()
        else:
            optimizer.step()
    if where is on_gpu:
        assert selecting_buckets(optimizer) == [True, True]
        return [value_of(parameter) for parameter in parameters]
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("codec", CODECS)
@on_ranks
def test_training_is_that_of_daemons_that_select(codec: str) -> None:
    expected = trained(torch.clone, codec)
    for seed in SCHEDULES:
        with fake_cuda(seed) as gpus, selecting():
            with gpus.stream(FakeStream()):
                found = trained(on_gpu, codec)
            assert gpus.graphs, "no step was queued by one call"
            for ours, others in zip(found, expected, strict=True):
                if "clip" in codec:  # norms are added up in another order
                    torch.testing.assert_close(ours, others)
                else:
                    assert torch.equal(ours, others), seed


@pytest.mark.parametrize("codec", CODECS[1:])
@on_ranks
def test_a_step_that_is_undone_reads_its_gradient_before_the_next_one_is_there(codec: str) -> None:
    """Also where the next one is there as soon as it can be."""
    queue, found = BucketSelector._queue, []

    def soon(*given: Any) -> Any:
        FakeStream.gpus.current_stream().synchronize()
        return queue(*given)

    for seed in SCHEDULES:
        with fake_cuda(seed), selecting(), pytest.MonkeyPatch.context() as patch:
            if seed % 2:
                patch.setattr(BucketSelector, "_queue", soon)
            found.append(trained(on_gpu, codec, bad=4))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@on_ranks
def test_memory_stays_registered_until_the_gpu_has_selected() -> None:
    pending = 0
    for seed in SCHEDULES:
        with fake_cuda(seed) as gpus, selecting():
            parameters, optimizer = make(on_gpu, CODECS[0])
            for step in range(3):
                optimizer.zero_grad()
                step_of(on_gpu, parameters, step)
                optimizer.step()
            optimizer.zero_grad()
            optimizer._sync.begin()
            for bucket in optimizer._sync.plan.buckets:
                bucket.send()
            pending += len(gpus.transfers)
            del optimizer, bucket
            gc.collect()
            hvd.allreduce(torch.zeros(1))
            optimizer = make(on_gpu, CODECS[0])[1]
            optimizer.step()
            assert not gpus.faults, seed
    assert pending, "no schedule had copies under way"
