"""The optimizer that combines the ranks' steps by Adasum, against the published formula in one process."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from tests.harness import on_ranks
from tests.torch.training import MakeOptimizer, assert_equal_on_all_ranks, assert_same, batch_of, loss_of, make_model

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
}


def adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of two vectors: formula of Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020."""
    dot, norm_a, norm_b = (a * b).sum(), a.square().sum(), b.square().sum()
    return (1 - dot / (2 * norm_a) if norm_a else 1) * a + (1 - dot / (2 * norm_b) if norm_b else 1) * b


def adasum_of_all(values: list[torch.Tensor]) -> torch.Tensor:
    """In the order of the tests' jobs: two ranks of a node; or three of one, the third with the first, and another."""
    if len(values) == 2:
        return adasum(*values)
    first, second, third, other = values
    return adasum(adasum(adasum(first, third), second), other)


class Reference:
    """Everybody's optimizers in this process, each with its own state; what their steps come to together."""

    def __init__(self, model: torch.nn.Module, make: MakeOptimizer) -> None:
        self.model = copy.deepcopy(model)
        self._models = [copy.deepcopy(model) for _ in range(hvd.size())]
        self._optimizers = [make(each.parameters()) for each in self._models]

    def step(self, batches: list[int]) -> None:
        for rank, (each, optimizer) in enumerate(zip(self._models, self._optimizers, strict=True)):
            each.load_state_dict(self.model.state_dict())
            optimizer.zero_grad()
            for batch in batches:
                loss_of(each, batch_of(rank, batch)).backward()
            optimizer.step()
        with torch.no_grad():
            for start, *after in zip(self.model.parameters(), *(m.parameters() for m in self._models), strict=True):
                start += adasum_of_all([value - start for value in after])


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks
def test_steps_are_combined_by_the_formula(name: str) -> None:
    model = make_model()
    reference = Reference(model, OPTIMIZERS[name])
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](model.parameters()), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        own = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.synchronize()  # does nothing
        optimizer.step()
        reference.step([step])
        assert_same(model, reference.model)
        assert all(torch.equal(parameter.grad, g) for parameter, g in zip(model.parameters(), own, strict=True))
    assert type(optimizer).__name__ == type(OPTIMIZERS[name](model.parameters())).__name__
    assert optimizer.statistics().steps == 4


@on_ranks
def test_several_backward_passes_and_a_closure() -> None:
    make, model = OPTIMIZERS["sgd"], make_model()
    reference = Reference(model, make)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), op=hvd.Adasum, backward_passes_per_step=2)

    def closure(first: int) -> torch.Tensor:
        optimizer.zero_grad()
        losses = [loss_of(model, batch_of(hvd.rank(), step)) for step in (first, first + 1)]
        for loss in losses:
            loss.backward()
        return losses[0]

    for step in (0, 2, 4):
        loss = optimizer.step(functools.partial(closure, step))
        assert loss.item() == pytest.approx(loss_of(reference.model, batch_of(hvd.rank(), step)).item())
        reference.step([step, step + 1])
        assert_same(model, reference.model)


class Doubling:
    """A script's own compressor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double().view(-1) * 2, tensor.shape

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor / 2).view(ctx)


@on_ranks
def test_compressed_steps() -> None:
    for compression in (Doubling, hvd.Compression.fp16):
        model = make_model()
        reference = Reference(model, OPTIMIZERS["sgd"])
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()), op=hvd.Adasum, compression=compression
        )
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            optimizer.step()
            reference.step([step])
        if compression is Doubling:
            assert_same(model, reference.model)
        else:
            assert_equal_on_all_ranks(model)
            for parameter, expected in zip(model.parameters(), reference.model.parameters(), strict=True):
                torch.testing.assert_close(parameter, expected, rtol=1e-2, atol=1e-3)


@on_ranks
def test_parameters_without_gradient_stay() -> None:
    used, unused, odd = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    model = torch.nn.ModuleList([used, unused, odd]).double()
    before = copy.deepcopy(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    inputs = torch.ones(1, 3, dtype=torch.float64)
    (used(inputs).sum() + (odd(inputs).sum() if hvd.rank() == 1 else 0)).backward()
    optimizer.step()
    assert_equal_on_all_ranks(model)
    assert torch.equal(unused.weight, before[1].weight)
    for changed, old in (
        (used, before[0]),
        (odd, before[2]),
    ):  # parallel steps are averaged; with zeros, nothing is lost
        torch.testing.assert_close(changed.weight, old.weight - 0.1)


@on_ranks
def test_what_is_refused() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op=hvd.Adasum)
    with pytest.raises(AssertionError, match="Skipping synchronization is not supported when using Adasum"):
        optimizer.skip_synchronize()
    loss_of(model, batch_of(0, 0)).backward()
    optimizer.zero_grad()  # this rank's own gradients, which nobody has seen
    loss_of(model, batch_of(0, 0)).backward()
    with pytest.raises(AssertionError, match="Increase backward_passes_per_step"):
        loss_of(model, batch_of(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    some = hvd.add_process_set([0])
    with pytest.raises(NotImplementedError, match="does not support non-global process sets"):
        hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op=hvd.Adasum, process_set=some)
    hvd.remove_process_set(some)
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported with op != Average"):
        hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op=hvd.Adasum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="Adasum combines floating-point tensors"):
        hvd.allreduce(torch.ones(3, dtype=torch.int64), op=hvd.Adasum)
