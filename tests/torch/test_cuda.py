"""Tensors and parameters on a GPU, which go through the host's memory."""

from __future__ import annotations

import copy
import importlib.util
import os
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import runtime
from tests.harness import on_ranks, run_workers
from tests.torch.core.test_device import results_on
from tests.torch.training import assert_same, everybodys_batch, loss_of, make_model, my_batch, selecting_buckets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


@on_ranks
def test_every_operation_on_a_gpu() -> None:
    for number, (result, expected) in enumerate(results_on(torch.Tensor.cuda)):
        assert result.is_cuda, number
        assert torch.equal(result.cpu(), expected), number
    assert any(segment.on_close for segment in runtime().client.arena._segments.values()), "nothing was pinned"


def test_copies_to_the_host_have_what_was_computed_before_and_go_on_beside_what_comes_after() -> None:
    x = torch.ones(2048, 2048, device="cuda")
    place = torch.zeros(2048, 2048).pin_memory()
    y = (x @ x) / 2048
    copying = device.Layer().copy([place], [y])
    with torch.cuda.device(y.device):
        later = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for _ in range(200):
            x = (x @ x) / 2048
        later.record()
    copying.wait()
    assert not later.query(), "the copy waited for what was computed after it"  # type: ignore[no-untyped-call]
    assert place.eq(1).all()


@on_ranks
def test_small_tensors_of_a_gpu() -> None:
    tensor = torch.full((3,), hvd.rank() + 1.0, device="cuda")
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [3.0] * 3
    assert hvd.allgather(tensor).is_cuda
    x = tensor.requires_grad_()
    hvd.allreduce(x).sum().backward()
    assert x.grad is not None
    assert x.grad.is_cuda


@on_ranks
def test_training_on_a_gpu_is_that_of_one_process() -> None:
    model = make_model().cuda()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for net, chosen, batch in ((model, optimizer, my_batch(step)), (reference, plain, everybodys_batch(step))):
            chosen.zero_grad()
            loss_of(net, (batch[0].cuda(), batch[1].cuda())).backward()
            chosen.step()
    assert_same(model.cpu(), reference.cpu())


def _selected_on_a_gpu(setting: str) -> tuple[list[bool], list[torch.Tensor], list[torch.Tensor]]:
    """Which buckets' gradients were selected from on the GPU; the parameters after some steps; and the residuals."""
    os.environ["FUSION_GPU_SELECTION"] = setting
    model = make_model().cuda()
    codec = hvd.Compression.topk(0.05, minimum=100, momentum=0.9)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=codec)
    for step in range(6):
        batch = my_batch(step)
        optimizer.zero_grad()
        loss_of(model, (batch[0].cuda(), batch[1].cuda())).backward()
        optimizer.step()
    state = optimizer.state_dict()["fusion_rt"]["state"]
    kept = [value for key, value in sorted(state.items()) if ":residual/" in key or ":velocity/" in key]
    on_gpu = selecting_buckets(optimizer)
    return on_gpu, [parameter.detach().cpu() for parameter in model.parameters()], kept


def _both_ways() -> None:
    plain, selected = _selected_on_a_gpu("off"), _selected_on_a_gpu("auto")
    assert not any(plain[0])
    assert any(selected[0])
    for ours, theirs in ((selected[1], plain[1]), (selected[2], plain[2])):
        for mine, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, expected)


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="needs numba-cuda")
def test_training_is_the_same_where_the_gpu_selects() -> None:
    run_workers(_both_ways, ranks=2, nodes=2, environment={"HOROVOD_START_TIMEOUT": "120"})
