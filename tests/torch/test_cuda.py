"""Tensors and parameters on a GPU, which go through the host's memory."""

from __future__ import annotations

import copy

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch import device
from fusion_rt.torch.runtime import runtime
from tests.harness import on_ranks
from tests.torch.test_device import results_on
from tests.torch.training import assert_same, everybodys_batch, loss_of, make_model, my_batch

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
