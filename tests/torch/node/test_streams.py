"""Gradients that ranks of a node combine on GPUs that are made up, by an NCCL that is made up: their streams run as
late, and in any order, as CUDA allows (`cuda_fake`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusion_rt.torch as hvd
from fusion_rt.torch.node.groups import Nccl, NcclGroup
from fusion_rt.torch.node.reduction import NodeWay
from fusion_rt.torch.sync import active_plan
from tests.harness import Job, on_ranks
from tests.torch.cuda_fake.nccl import MadeUpNccl
from tests.torch.cuda_fake.streams import FakeStream
from tests.torch.cuda_fake.tensors import Factories, fake_cuda, on_gpu, value_of
from tests.torch.sync.test_cuda_streams import backward, gradient, make, trained

SCHEDULES = range(6)
LENGTHS = (301, 40, 77, 1)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two nodes with two ranks each, and several buckets, of which one has one element."""
    variables = {
        "FUSION_NODE_REDUCTION": "nccl",
        "HOROVOD_FUSION_THRESHOLD": "1KiB",
        "HOROVOD_START_TIMEOUT": "120",
        "FUSION_CHECK_PARAMETERS": "0",
    }
    with Job((2, 2), variables) as running:
        yield running


@contextmanager
def nccl(gathers: bool = True) -> Iterator[None]:
    def connect(*given: Any) -> NcclGroup:
        with Factories():  # this is a thread of its own
            return NcclGroup(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nccl, "connect", staticmethod(connect))
        patch.setattr(dist, "ProcessGroupNCCL", MadeUpNccl, raising=False)
        patch.setattr(Nccl, "device_of", lambda *_: f"GPU {hvd.rank()}")
        if not gathers:  # as with overlap, which needs a tensor class of its own
            patch.setattr(active_plan, "NodeWay", lambda parts, _: NodeWay(parts, False))
        yield


def in_node(optimizer: Any) -> bool:
    node = optimizer._sync.plan.node
    return node is not None and bool(node.reduces)


@pytest.mark.parametrize("gathers", [True, False])
@on_ranks
def test_steps_on_several_streams(gathers: bool) -> None:
    for seed in SCHEDULES:
        with nccl(gathers), fake_cuda(seed):
            parameters, optimizer = make(LENGTHS)
            streams = [FakeStream() for _ in parameters] if seed % 2 else []
            for step in range(4):
                optimizer.zero_grad(set_to_none=bool(seed % 3))
                backward(parameters, step, streams)
                optimizer.step()
                assert in_node(optimizer) == (step > 0)
            for number, parameter in enumerate(parameters):
                assert torch.equal(value_of(parameter), trained(number, range(4), len(parameter))), (seed, number)
            optimizer._sync.plan.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks
def test_halves(dtype: torch.dtype) -> None:
    """Results have memory of their own then, which the last step's may still be read from."""
    for seed in SCHEDULES:
        with nccl(), fake_cuda(seed):
            parameters = [torch.nn.Parameter(on_gpu(torch.zeros(length, dtype=dtype))) for length in LENGTHS]
            optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
            total = [torch.zeros(length) for length in LENGTHS]
            for step in range(4):
                optimizer.zero_grad()
                given = [on_gpu(gradient(n, step, hvd.rank(), length).to(dtype)) for n, length in enumerate(LENGTHS)]
                torch.autograd.backward([(p * g).sum() for p, g in zip(parameters, given, strict=True)])
                optimizer.step()
                for n, length in enumerate(LENGTHS):
                    total[n] -= sum(gradient(n, step, rank, length) for rank in range(hvd.size()))
            assert in_node(optimizer)
            for parameter, expected in zip(parameters, total, strict=True):
                assert torch.equal(value_of(parameter).float(), expected), seed
            optimizer._sync.plan.close()
