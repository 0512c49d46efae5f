"""Tensors and parameters on a GPU, which go through the host's memory."""

from __future__ import annotations

import copy

import pytest
import torch

import fusion_rt.torch as hvd
from tests.harness import on_ranks
from tests.torch.training import assert_same, everybodys_batch, loss_of, make_model, my_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


@on_ranks
def test_operations_on_a_gpu() -> None:
    for numel in (3, 5000):
        tensor = torch.full((numel,), hvd.rank() + 1.0, device="cuda")
        for result in (
            hvd.allreduce(tensor, op=hvd.Sum),
            hvd.allreduce_(tensor.clone(), op=hvd.Sum),
            hvd.synchronize(hvd.allreduce_async_(tensor[::2].clone(), op=hvd.Sum)),
        ):
            assert result.is_cuda
            assert result.eq(3).all()
        assert hvd.broadcast(tensor, 1).eq(2).all()
        gathered = hvd.allgather(tensor)
        assert gathered.is_cuda
        assert gathered.sum().item() == 3 * numel


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
