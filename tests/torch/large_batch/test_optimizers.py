"""LARS and LAMB in one process: against the papers' rules in numpy, and on tensors that are split in two."""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fusion_rt.torch.large_batch import LAMB, LARS, split_over
from tests.for_each import for_each
from tests.torch.large_batch.reference import Lamb, Lars

STEPS = 20
SHAPES = ((6, 5), (5,), (3, 2, 4), ())
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lars": functools.partial(LARS, lr=2.0, momentum=0.9, weight_decay=1e-2),
    "lamb": functools.partial(LAMB, lr=0.02, weight_decay=1e-2),
}


def parameters_of(seed: int, dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def gradients_of(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def take(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, gradients_of(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def assert_close(actual: list[Any], expected: list[Any]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.detach(), torch.as_tensor(other).detach(), rtol=1e-11, atol=1e-13)


def follows_the_paper(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], rules: list[Any], exclude_1d: bool
) -> None:
    expected = [parameter.detach().numpy().copy() for parameter in parameters]
    for step in range(STEPS):
        take(optimizer, parameters, range(step, step + 1))
        for i, (rule, gradient) in enumerate(zip(rules, gradients_of(step), strict=True)):
            adapted = len(SHAPES[i]) > 1 or not exclude_1d
            expected[i] = rule.step(expected[i], gradient.numpy(), adapted)
        assert_close(parameters, [np.asarray(e) for e in expected])


@for_each("exclude_1d", [True, False])
@for_each("nesterov", [True, False])
def test_lars_follows_the_paper_with_two_groups(exclude_1d: bool, nesterov: bool) -> None:
    parameters = parameters_of(0)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 5.0, "weight_decay": 0.1, "momentum": 0.5}]
    optimizer = LARS(groups, lr=2.0, weight_decay=1e-2, nesterov=nesterov, exclude_1d=exclude_1d, eps=1e-3)
    rules = [Lars(2.0, 0.9, 1e-2, 0.001, 1e-3, nesterov) for _ in range(2)]
    rules += [Lars(5.0, 0.5, 0.1, 0.001, 1e-3, nesterov) for _ in range(2)]
    follows_the_paper(optimizer, parameters, rules, exclude_1d)


@for_each("exclude_1d", [True, False])
@for_each("corrected", [True, False])
@for_each("clip", [None, (0.5, 2.0)])
def test_lamb_follows_the_paper_with_two_groups(exclude_1d: bool, corrected: bool, clip: Any) -> None:
    parameters = parameters_of(0)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1, "weight_decay": 0.2, "eps": 1e-2}]
    optimizer = LAMB(groups, lr=0.02, bias_correction=corrected, clip=clip, exclude_1d=exclude_1d)
    rules = [Lamb(0.02, (0.9, 0.999), 1e-6, 0.01, corrected, clip) for _ in range(2)]
    rules += [Lamb(0.1, (0.9, 0.999), 1e-2, 0.2, corrected, clip) for _ in range(2)]
    follows_the_paper(optimizer, parameters, rules, exclude_1d)


@pytest.mark.parametrize("kind", KINDS)
def test_without_weights_or_gradients_the_ratio_is_one(kind: str) -> None:
    zero, still = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.ones(2, 3))
    optimizer = KINDS[kind]([zero, still], weight_decay=0.0)
    zero.grad, still.grad = torch.ones(2, 3), torch.zeros(2, 3)
    optimizer.step()
    torch.testing.assert_close(zero.detach(), torch.full((2, 3), -2.0 if kind == "lars" else -0.02))
    assert torch.equal(still.detach(), torch.ones(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_says_what_is_excluded(kind: str) -> None:
    parameters, others = parameters_of(0), parameters_of(0)
    take(KINDS[kind](parameters, exclude_1d=lambda p: p.dim() <= 1), parameters, range(3))
    take(KINDS[kind](others, exclude_1d=True), others, range(3))
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))


class InLockstep:
    """`norms` of two optimizers on two threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=30)
        self.given: list[Any] = [None, None]
        self.calls = 0

    def of(self, side: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def norms(squares: torch.Tensor) -> torch.Tensor:
            self.given[side] = squares
            self.calls += 1
            self.barrier.wait()
            total: torch.Tensor = self.given[0] + self.given[1]
            self.barrier.wait()
            return total

        return norms


def halves_of(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What two ranks hold: rows of a matrix; the 0-D one and the vector whole on one of them; the rest flat, split."""
    matrix, vector, cube, single = (tensor.detach() for tensor in tensors)
    nothing = matrix.new_empty(0)
    flat = cube.reshape(-1)
    return [[matrix[:2], vector, flat[:7], nothing], [matrix[2:], nothing, flat[7:], single]]


@for_each(
    "make",
    [*KINDS.values(), functools.partial(LAMB, lr=0.02, clip=(0.5, 4.0)), functools.partial(LARS, lr=2.0, eps=0.1)],
)
def test_split_tensors_are_stepped_like_whole_ones(make: Callable[..., torch.optim.Optimizer]) -> None:
    def unused(step: int) -> bool:  # the last tensor then has no gradient on the rank that has none of it
        return step % 2 == 0

    whole, sums = parameters_of(0), InLockstep()
    optimizer = make([{"params": whole[:2]}, {"params": whole[2:], "lr": 0.5}], exclude_1d=False)
    parts = [[torch.nn.Parameter(part.clone()) for part in half] for half in halves_of(list(whole))]

    def on_rank(side: int) -> None:
        mine = parts[side]
        groups = [{"params": mine[:2]}, {"params": mine[2:], "lr": 0.5}]
        of_half = make(groups, exclude_1d=False, norms=sums.of(side))
        for step in range(STEPS):
            for parameter, gradient in zip(mine, halves_of(gradients_of(step))[side], strict=True):
                missing = not gradient.numel() and unused(step)
                parameter.grad = None if missing else gradient.clone()
            of_half.step()

    threads = [threading.Thread(target=on_rank, args=(side,)) for side in range(2)]
    for thread in threads:
        thread.start()
    take(optimizer, whole, range(STEPS))
    for thread in threads:
        thread.join(60)
    assert sums.calls == 2 * STEPS, "one message a step"
    assert sums.given[0].shape == (2 * len(SHAPES),)
    for half, expected in zip(parts, halves_of(list(whole)), strict=True):
        assert_close(half, expected)


def test_norms_are_pairs_of_a_tensor_without_those_excluded() -> None:
    parameters = parameters_of(0)
    seen: list[torch.Tensor] = []

    def norms(squares: torch.Tensor) -> torch.Tensor:
        seen.append(squares)
        return squares

    optimizer = LARS(parameters, lr=1.0, norms=norms)
    parameters[0].grad = torch.full((6, 5), 2.0, dtype=torch.float64)
    before = [float(parameters[i].detach().square().sum()) for i in (0, 2)]
    optimizer.step()
    torch.testing.assert_close(seen[0], torch.tensor([before[0], 120.0, before[1], 0.0], dtype=torch.float64))


def test_norms_of_another_shape_are_an_error() -> None:
    parameters = parameters_of(0)
    optimizer = LARS(parameters, lr=1.0, norms=lambda squares: squares[:1])
    with pytest.raises(ValueError, match=r"given \[4\] squared norms and returned \[1\]"):
        take(optimizer, parameters, range(1))


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_saved_state(kind: str) -> None:
    parameters = parameters_of(0)
    optimizer = KINDS[kind](parameters)
    take(optimizer, parameters, range(4))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = KINDS[kind](again, lr=77.0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    take(optimizer, parameters, range(4, 8))
    take(resumed, again, range(4, 8))
    assert all(torch.equal(one, other) for one, other in zip(parameters, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_keeps_what_is_excluded_and_how_norms_are_summed(kind: str) -> None:
    optimizer: Any = KINDS[kind](parameters_of(0), exclude_1d=False, norms=split_over())
    for clone in (copy.deepcopy(optimizer), copy.copy(optimizer)):
        assert clone._exclude is False
        assert type(clone.norms) is type(split_over())


@pytest.mark.parametrize("kind", KINDS)
def test_closures_and_schedulers(kind: str) -> None:
    parameters, others = parameters_of(0), parameters_of(0)
    optimizer, plain = KINDS[kind](parameters), KINDS[kind](others)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    rate = plain.param_groups[0]["lr"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p.square() * p.sum()).sum() for p in parameters)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    for step in range(5):
        loss = optimizer.step(closure)
        assert loss.requires_grad
        scheduler.step()
        for p in others:
            p.grad = None
            (p.square() * p.sum()).sum().backward()
        plain.param_groups[0]["lr"] = rate * 0.5 ** (step // 2)
        plain.step()
        assert_close(parameters, others)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_may_be_a_tensor(kind: str) -> None:
    parameters, others = parameters_of(0), parameters_of(0)
    take(KINDS[kind](parameters, lr=torch.tensor(0.25)), parameters, range(3))
    take(KINDS[kind](others, lr=0.25), others, range(3))
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_16_bits_do_not_overflow(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.full((64, 64), 2000.0, dtype=torch.float16))  # ‖w‖ = 128,000
    parameter.grad = torch.ones_like(parameter)
    KINDS[kind]([parameter], lr=1.0 if kind == "lars" else 0.001, weight_decay=0.0).step()
    expected = 1998.0  # 0.001 · 128,000 / 64 · 1
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_several_dtypes_in_one_group(kind: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    parameters = parameters_of(0)
    mixed = [torch.nn.Parameter(p.detach().to(d)) for p, d in zip(parameters, dtypes, strict=True)]
    take(KINDS[kind](parameters), parameters, range(3))
    take(KINDS[kind](mixed), mixed, range(3))
    for one, other in zip(mixed, parameters, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.05, atol=0.05)


def test_step_hooks_run_and_nothing_to_do_is_no_error() -> None:
    optimizer, calls = LAMB(parameters_of(0)), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_and_complex_gradients_are_refused(kind: str) -> None:
    table = torch.nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients: a parameter of shape \[4, 3\]"):
        KINDS[kind](table.parameters()).step()
    wave = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    wave.grad = torch.ones_like(wave)
    with pytest.raises(RuntimeError, match="complex gradients"):
        KINDS[kind]([wave]).step()


@for_each(
    ("make", "message"),
    [
        (lambda p: LARS(p, lr=-1.0), "LARS: lr is -1.0"),
        (lambda p: LARS(p, lr=1.0, weight_decay=float("nan")), "LARS: weight_decay is nan"),
        (lambda p: LARS(p, lr=1.0, momentum=0.0, nesterov=True), "nesterov needs a momentum"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), r"LAMB: betas are \(0.9, 1.0\)"),
        (lambda p: LAMB(p, clip=(2.0, 1.0)), r"LAMB: clip is \(2.0, 1.0\)"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters_of(0))
