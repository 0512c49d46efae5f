"""Gradients that the GPUs of a node combine, and that its first rank selects from. Both are made up, GPUs and NCCL, and
their streams run as late, and in any order, as CUDA allows (`cuda_fake`). Bits are those of daemons that do both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from tests.harness import Job, on_ranks
from tests.torch.cuda_fake.sides import selecting
from tests.torch.cuda_fake.streams import FakeStream
from tests.torch.cuda_fake.tensors import fake_cuda, on_gpu, value_of
from tests.torch.node.test_streams import in_node, nccl
from tests.torch.sync.test_gpu_selection import residuals
from tests.torch.sync.test_gpu_selection_streams import CODECS, LENGTHS, make, step_of
from tests.torch.training import selecting_buckets

SCHEDULES = range(4)
STEPS = range(6)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A node with two ranks, and one with a single rank; two buckets."""
    variables = {
        "FUSION_GPU_SELECTION": "auto",
        "FUSION_NODE_REDUCTION": "nccl",
        "HOROVOD_FUSION_THRESHOLD": "2KiB",
        "HOROVOD_START_TIMEOUT": "120",
        "FUSION_CHECK_PARAMETERS": "0",
    }
    with Job((2, 1), variables) as running:
        yield running


def train(where: Any, parameters: list[torch.nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=bool(step % 2))
        step_of(where, parameters, step)
        optimizer.step()


def by_daemons(codec: str) -> list[torch.Tensor]:
    parameters, optimizer = make(torch.clone, codec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no NCCL for tensors of the host
        train(torch.clone, parameters, optimizer, STEPS)
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("codec", CODECS[1:2])
@on_ranks
def test_training_is_that_of_daemons_that_combine_and_select(codec: str) -> None:
    expected = by_daemons(codec)
    for seed in SCHEDULES:
        with nccl(), fake_cuda(seed) as gpus, selecting():
            with gpus.stream(FakeStream()):
                parameters, optimizer = make(on_gpu, codec)
                train(on_gpu, parameters, optimizer, STEPS)
            assert hvd.local_size() == 1 or in_node(optimizer)
            chosen = selecting_buckets(optimizer)
            assert chosen == [hvd.local_rank() == 0] * 2, seed
            for parameter, value in zip(parameters, expected, strict=True):
                assert torch.equal(value_of(parameter), value), seed
            optimizer._sync.plan.close()


@pytest.mark.parametrize("codec", CODECS[1:2])
@on_ranks
def test_a_reduction_that_fails_while_it_is_selected_from_is_taken_back(codec: str) -> None:
    """By the rank that selects, if it has noticed: what was under way on its GPU ends then, and is no sum. Where the
    other rank has, the first one may have had the sum. From then on daemons combine and select."""
    for seed in SCHEDULES:
        notices = seed % 2
        with nccl(), fake_cuda(seed) as gpus, selecting(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # who notices it says so
            with gpus.stream(FakeStream()):
                parameters, optimizer = make(on_gpu, codec)
                train(on_gpu, parameters, optimizer, range(4))
                before = residuals(optimizer)
                node = optimizer._sync.plan.node
                if hvd.rank() == notices:
                    reduce = node.reduce

                    def fail(*given: Any, node: Any = node, reduce: Any = reduce) -> Any:
                        combining = reduce(*given)
                        node.failed(RuntimeError("a reduction was lost"))
                        return combining

                    node.reduce = fail
                with pytest.raises(hvd.HorovodInternalError, match="could not"):
                    train(on_gpu, parameters, optimizer, range(4, 5))
                after = residuals(optimizer)
                for key in before if hvd.rank() == notices == 0 else ():  # the other node has added its gradient
                    torch.testing.assert_close(after[key], before[key], rtol=0, atol=1e-4, msg=f"{key}, {seed}")
                train(on_gpu, parameters, optimizer, range(5, 8))
            everywhere = hvd.allgather_object([value_of(parameter) for parameter in parameters])
            for number in range(len(LENGTHS)):
                assert all(torch.equal(one[number], everywhere[0][number]) for one in everywhere), (seed, number)
            optimizer._sync.plan.close()
