"""LARS, LAMB and LinearScaling on two ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch import large_batch
from fusion_rt.torch.large_batch import LAMB, LARS, LinearScaling, split_over
from tests.harness import on_ranks
from tests.torch.training import assert_same, everybodys_batch, loss_of, make_model, train, train_reference

KINDS: dict[str, Any] = {
    "lars": functools.partial(LARS, lr=2.0, weight_decay=1e-3),
    "lamb": functools.partial(LAMB, lr=0.01),
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_training_is_that_of_one_process_on_the_joint_batch(kind: str) -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(KINDS[kind](model.parameters()), named_parameters=model.named_parameters())
    plain = KINDS[kind](reference.parameters())
    train(model, optimizer, range(8))
    train_reference(reference, plain, range(8))
    assert_same(model, reference)
    resumed = KINDS[kind](model.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    optimizer = hvd.DistributedOptimizer(resumed, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(8, 10))
    train_reference(reference, plain, range(8, 10))
    assert_same(model, reference)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_parts_of_tensors_are_stepped_like_whole_ones(kind: str) -> None:
    reference = make_model()
    plain = KINDS[kind](reference.parameters())
    whole = list(reference.parameters())

    def part_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1).tensor_split([5])[hvd.rank()].clone()  # of unequal size

    parts = [torch.nn.Parameter(part_of(tensor)) for tensor in whole]
    vectors = {part for part, tensor in zip(parts, whole, strict=True) if tensor.dim() == 1}
    optimizer = KINDS[kind](parts, exclude_1d=lambda part: part in vectors, norms=split_over(hvd.global_process_set))
    calls: list[Any] = []
    allreduce = large_batch.allreduce

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args)
        return allreduce(*args, **options)

    large_batch.allreduce = counted
    try:
        for step in range(6):
            plain.zero_grad()
            loss_of(reference, everybodys_batch(step)).backward()
            for part, tensor in zip(parts, whole, strict=True):
                assert tensor.grad is not None
                part.grad = part_of(tensor.grad)
            plain.step()
            optimizer.step()
    finally:
        large_batch.allreduce = allreduce
    assert len(calls) == 6, "one message a step"
    for part, tensor in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.detach(), part_of(tensor), rtol=1e-11, atol=1e-13)


@on_ranks
def test_the_scale_is_asked_of_the_job_and_of_the_optimizer() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(LARS(model.parameters(), lr=0.5), backward_passes_per_step=3)
    scheduler = LinearScaling(optimizer, 8, base_batch=16, steps_per_epoch=2, warmup_epochs=1, rewarm_steps=2)
    assert scheduler.effective_batch == 8 * 3 * hvd.size()
    rates = []
    for passes in (3, 3, 3, 1, 1):
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for step in range(passes):
            (loss_of(model, everybodys_batch(step)) / passes).backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0, 1.5, 1.5, 1.0, 0.5])
