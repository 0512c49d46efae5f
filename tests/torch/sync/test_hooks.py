"""What a script does to gradients in hooks and between backward passes, on two ranks of two nodes: it comes before the
mean, whenever the hook was made, and what `p.grad` shows is what counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from tests.harness import Job, on_ranks
from tests.torch.training import assert_equal_on_all_ranks, assert_same, batch_of, loss_of, make_model

RATE, RANKS, MOST = 0.1, 2, 0.01


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((1, 1), {"HOROVOD_FUSION_THRESHOLD": "4KiB", "HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def distributed(model: torch.nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def clamp(parameter: torch.Tensor) -> None:
    parameter.grad.clamp_(-MOST, MOST)


def replace(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad.clamp(-MOST, MOST)


def hook(model: torch.nn.Module, act: Callable[[torch.Tensor], None], on_node: bool) -> list[Any]:
    """Has all parameters' gradients changed when autograd has added to them. Returns what has to live as long."""
    kept = []
    for parameter in model.parameters():
        if on_node:
            node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            kept.append((node, node.register_hook(lambda *_, parameter=parameter: act(parameter))))
        else:
            parameter.register_post_accumulate_grad_hook(act)
    return kept


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("on_node", [False, True])
@on_ranks
def test_hooks_come_before_the_mean_whenever_they_were_made(overlap: str, on_node: bool) -> None:
    for act in (clamp, replace):
        for made_first in (True, False):
            model, reference = make_model(), make_model()
            kept = hook(model, act, on_node) if made_first else []
            optimizer, plain = distributed(model, overlap=overlap), sgd(reference)
            if not made_first:
                kept = hook(model, act, on_node)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, batch_of(hvd.rank(), step)).backward()
                optimizer.step()
            optimizer.synchronize_parameters() if overlap != "none" else None
            for step in range(4):
                found = [
                    torch.autograd.grad(loss_of(reference, batch_of(rank, step)), list(reference.parameters()))
                    for rank in range(RANKS)
                ]
                for parameter, *each in zip(reference.parameters(), *found, strict=True):
                    parameter.grad = torch.stack([gradient.clamp(-MOST, MOST) for gradient in each]).mean(0)
                plain.step()
            assert_same(model, reference)
            assert len(kept) == len(list(model.parameters())) * on_node


@on_ranks
def test_gradients_of_a_converted_model_are_reduced_in_its_first_backward_pass() -> None:
    model = make_model()
    optimizer = distributed(model)
    for step, convert in enumerate((model.float, model.double, model.bfloat16)):
        convert()
        for _ in range(2):
            optimizer.zero_grad()
            inputs, labels = batch_of(hvd.rank(), step)
            loss_of(model, (inputs.to(model[0].weight.dtype), labels)).backward()
            gathered = hvd.allgather(model[0].weight.grad.unsqueeze(0))
            assert torch.equal(gathered[0], gathered[1])
            optimizer.step()
            assert_equal_on_all_ranks(model)


@pytest.mark.parametrize("resets", [True, False])
@on_ranks
def test_a_step_in_a_hook_is_taken_with_the_mean(resets: bool) -> None:
    """An optimizer for each parameter steps as soon as autograd has its gradient, which can be given up at once."""
    model, reference = make_model(), make_model()
    plain = sgd(reference)
    for name, parameter in model.named_parameters():
        own = torch.optim.SGD([parameter], lr=RATE, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(own, [(name, parameter)])

        def step_at_once(_: torch.Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad() if resets else None

        parameter.register_post_accumulate_grad_hook(step_at_once)
    for step in range(4):
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        plain.zero_grad() if resets else None
        (sum(loss_of(reference, batch_of(rank, step)) for rank in range(RANKS)) / RANKS).backward()
        plain.step()
    assert_same(model, reference)


@on_ranks
def test_a_gradient_that_a_hook_drops_counts_as_zeros() -> None:
    model = make_model()
    optimizer = distributed(model)

    def drop(parameter: torch.Tensor) -> None:
        if hvd.rank() == 1:
            parameter.grad = None

    model[2].weight.register_post_accumulate_grad_hook(drop)
    for step in range(3):
        optimizer.zero_grad()
        expected = torch.autograd.grad(loss_of(model, batch_of(0, step)), model[2].weight)[0] / 2
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        torch.testing.assert_close(model[2].weight.grad, expected)
        optimizer.step()


# --- between backward passes ------------------------------------------------------------------------------------------


def reset(model: torch.nn.Module, optimizer: torch.optim.Optimizer, way: str) -> None:
    """Throws gradients away."""
    if way == "model":
        model.zero_grad()
    elif way == "in place":
        model.zero_grad(set_to_none=False)
    elif way == "None":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        optimizer.zero_grad()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("way", ["model", "in place", "None", "optimizer"])
@on_ranks
def test_gradients_that_were_thrown_away_do_not_come_back(way: str, passes: int, op: Any) -> None:
    """As in torch's DCGAN example: one more backward pass comes between a step and the reset before the next one."""
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model, backward_passes_per_step=passes, op=op), sgd(reference)
    for step in range(4):
        reset(model, optimizer, way)
        plain.zero_grad()
        for number in range(passes):
            loss_of(model, batch_of(hvd.rank(), 10 * step + number)).backward()
            for rank in range(RANKS):
                (
                    loss_of(reference, batch_of(rank, 10 * step + number)) / (RANKS if op == hvd.Average else 1)
                ).backward()
        optimizer.step()
        plain.step()
        loss_of(model, batch_of(hvd.rank(), 10 * step + 9)).backward()
    assert_same(model, reference)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("passes", [1, 2, 3])
@on_ranks
def test_gradients_that_are_never_reset_add_up(passes: int, op: Any) -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model, backward_passes_per_step=passes, op=op), sgd(reference)
    for step in range(4):
        for number in range(passes + step % 2):
            loss_of(model, batch_of(hvd.rank(), 10 * step + number)).backward()
            for rank in range(RANKS):
                (
                    loss_of(reference, batch_of(rank, 10 * step + number)) / (RANKS if op == hvd.Average else 1)
                ).backward()
        optimizer.step()
        plain.step()
    assert_same(model, reference)


@on_ranks
def test_a_script_sees_the_whole_gradient_between_backward_passes() -> None:
    """Its own, and what has been reduced before."""
    model = make_model()
    optimizer = distributed(model, backward_passes_per_step=2)
    for number in range(2):
        loss_of(model, batch_of(hvd.rank(), number)).backward()
    reduced = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    more = torch.autograd.grad(loss_of(model, batch_of(hvd.rank(), 2)), list(model.parameters()))
    loss_of(model, batch_of(hvd.rank(), 2)).backward()
    for parameter, before, new in zip(model.parameters(), reduced, more, strict=True):
        torch.testing.assert_close(parameter.grad, before + new)


@on_ranks
def test_gradients_that_change_places_stay_what_they_are() -> None:
    """Of two layers of the same shape, in different buckets, whose gradients are set to zero in place."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(24, 24) for _ in range(5)]).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    weights = [layer.weight for layer in model]
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        if step % 2:
            weights[0].grad, weights[4].grad = weights[4].grad, weights[0].grad
        used = [(weight, factor) for factor, weight in enumerate(weights) if step < 4 or factor != 4]
        sum((weight * (factor + 10 * hvd.rank())).sum() for weight, factor in used).backward()
        optimizer.step()
        for factor, weight in enumerate(weights):
            expected = factor + 5 if step < 4 or factor != 4 else 0
            assert torch.equal(weight.grad, torch.full_like(weight, expected)), (step, factor)
