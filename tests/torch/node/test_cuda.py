"""Gradients on the GPUs of a node, combined by NCCL before its daemon has them."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import HorovodInternalError
from tests.harness import Job, on_ranks
from tests.torch.node.test_reduction import in_node, reduced
from tests.torch.training import assert_same, everybodys_batch, loss_of, make_model, my_batch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that torch can use")
NCCL = {"FUSION_NODE_REDUCTION": "nccl", "HOROVOD_FUSION_THRESHOLD": "4KiB", "HOROVOD_START_TIMEOUT": "120"}


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((2,), NCCL) as running:
        yield running


@pytest.mark.parametrize("overlap", ["none", "forward"])
@on_ranks
def test_training_is_that_of_one_process(overlap: str) -> None:
    torch.cuda.set_device(hvd.local_rank())
    model = make_model().cuda()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), overlap=overlap)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for net, chosen, batch in ((model, optimizer, my_batch(step)), (reference, plain, everybodys_batch(step))):
            chosen.zero_grad()
            loss_of(net, (batch[0].cuda(), batch[1].cuda())).backward()
            chosen.step()
        assert in_node(optimizer) == (step > 0)
    if overlap != "none":
        hvd.synchronize_parameters()
    assert_same(model.cpu(), reference.cpu())
    assert not torch.distributed.is_initialized()
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@on_ranks
def test_gradients_are_those_of_the_daemons_way(dtype: torch.dtype) -> None:
    torch.cuda.set_device(hvd.local_rank())
    found, expected = (reduced(way, dtype, where="cuda")[0] for way in ("nccl", "daemon"))
    for mine, others in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def a_rank_dies(dies: int) -> str:
    torch.cuda.set_device(hvd.local_rank())
    parameters = [torch.nn.Parameter(torch.zeros(5000, device="cuda")) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))

    def step() -> None:
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    if hvd.rank() == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(HorovodInternalError) as raised:
        step()
    torch.cuda.synchronize()  # nothing waits on the device any more
    return str(raised.value)


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_is_named_to_the_others(dies: int) -> None:
    with Job((2,), NCCL) as job:
        job.start(a_rank_dies, dies)
        job.workers[dies].wait(120)
        (told,) = [answer for answer in job.results(ranks=[1 - dies]) if isinstance(answer, str)]
        assert f"rank {dies}" in told
