"""Optimizers of shards: torch's steps, whatever the groups; what is refused; and their state."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
import torch

from fusion_rt import wire
from fusiond.algorithms.shard_optimizer import PlainSGD, ShardOptimizerError, TorchOptimizer, is_plain, make
from tests.for_each import for_each

SHAPES = [(3, 4), (), (5,)]
STARTS = [0, 16, 32]
GROUPS = [0, 1, 0]
NUMEL = 48
BUCKET = wire.Bucket(
    0,
    "float32",
    NUMEL,
    0,
    tuple(
        wire.PlannedTensor(f"w{i}", start, int(np.prod(shape)), shape, group)
        for i, (start, shape, group) in enumerate(zip(STARTS, SHAPES, GROUPS, strict=True))
    ),
)
RATES = (0.1, 0.02)


def spec(name: str, *groups: dict[str, Any]) -> wire.OptimizerSpec:
    return wire.OptimizerSpec(name, tuple(json.dumps(group) for group in groups))


def start() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)


def gradient(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([1, step]).standard_normal(NUMEL).astype(np.float32)


def reference(kind: Any, groups: list[dict[str, Any]], steps: int) -> list[np.ndarray[Any, Any]]:
    """Torch's own steps on tensors of their own."""
    value = start()
    parameters = [
        torch.nn.Parameter(torch.tensor(value[a : a + int(np.prod(s))].reshape(s)))
        for a, s in zip(STARTS, SHAPES, strict=True)
    ]
    optimizer = kind([{"params": [p for p, g in zip(parameters, GROUPS, strict=True) if g == number],
                       "lr": RATES[number], **arguments} for number, arguments in enumerate(groups)])  # fmt: skip
    for step in range(steps):
        whole = gradient(step)
        for parameter, a in zip(parameters, STARTS, strict=True):
            parameter.grad = torch.tensor(whole[a : a + parameter.numel()]).view(parameter.shape)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def check(value: np.ndarray[Any, Any], expected: list[np.ndarray[Any, Any]]) -> None:
    for a, shape, wanted in zip(STARTS, SHAPES, expected, strict=True):
        np.testing.assert_allclose(value[a : a + int(np.prod(shape))].reshape(shape), wanted, rtol=2e-6, atol=1e-7)


CASES: list[tuple[str, list[dict[str, Any]]]] = [
    ("SGD", [{}, {}]),
    ("SGD", [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}]),
    ("Adam", [{}, {"betas": (0.5, 0.6)}]),
    ("AdamW", [{"weight_decay": 0.2}, {}]),
    ("RMSprop", [{"momentum": 0.3}, {"centered": True}]),
    ("Adagrad", [{}, {}]),
    ("Adamax", [{}, {}]),
    ("ASGD", [{}, {}]),
    ("Rprop", [{}, {}]),
]


@pytest.mark.parametrize(("name", "groups"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_steps_are_those_of_torch_with_the_rates_and_arguments_of_each_group(
    name: str, groups: list[dict[str, Any]]
) -> None:
    value = start()
    optimizer = make(spec(name, *groups), BUCKET, value)
    for step in range(4):
        mine = gradient(step)
        mine.flags.writeable = False  # as it comes from another node
        optimizer.step(mine, RATES)
    check(value, reference(getattr(torch.optim, name), groups, 4))


def test_plain_sgd_is_done_without_torch() -> None:
    assert is_plain(spec("SGD", {}))
    assert is_plain(spec("SGD", {"momentum": 0, "weight_decay": 0.0, "nesterov": False}))
    assert not is_plain(spec("SGD", {}, {"momentum": 0.5}))
    assert not is_plain(spec("SGD", {"maximize": True}))
    assert not is_plain(spec("Adam", {}))
    assert isinstance(make(spec("SGD", {}, {}), BUCKET, start()), PlainSGD)


def test_a_rate_of_all_groups_is_applied_to_the_whole_bucket() -> None:
    value = start()
    make(spec("SGD", {}, {}), BUCKET, value).step(gradient(0), (0.5, 0.5))
    np.testing.assert_array_equal(value, start() - np.float32(0.5) * gradient(0))


def test_rates_change_from_step_to_step() -> None:
    value, other = start(), start()
    optimizer = make(spec("SGD", {"momentum": 1e-30}, {}), BUCKET, value)
    plain = make(spec("SGD", {}, {}), BUCKET, other)
    for step, rate in enumerate((0.1, 0.0, 0.3)):
        optimizer.step(gradient(step), (rate, rate))
        plain.step(gradient(step), (rate, rate))
    for a, shape in zip(STARTS, SHAPES, strict=True):
        end = a + int(np.prod(shape))
        np.testing.assert_allclose(value[a:end], other[a:end], rtol=1e-6)


@for_each(
    ("wanted", "why"),
    [
        (None, "needs to know by which optimizer"),
        (spec("LBFGS", {}, {}), "cannot have the optimizer LBFGS; it can those of torch.optim, but for LBFGS"),
        (spec("SparseAdam", {}, {}), "cannot have the optimizer SparseAdam"),
        (spec("Optimizer", {}, {}), "cannot have the optimizer Optimizer"),
        (spec("lr_scheduler", {}, {}), "cannot have the optimizer lr_scheduler"),
        (spec("NoSuch", {}, {}), "cannot have the optimizer NoSuch"),
        (spec("Adam", {"betas": [2.0, 0.9]}, {}), "cannot have the optimizer Adam"),
        (spec("Adam", {"eps": "x"}, {}), "cannot have the optimizer Adam"),
        (spec("Adam", {"capturable": True}, {}), "cannot have the optimizer Adam: If capturable=True, params"),
        (spec("Adam", {"lr": 0.1}, {}), "are not the arguments of a parameter group"),
        (spec("Adam", {"params": []}, {}), "are not the arguments of a parameter group"),
        (wire.OptimizerSpec("Adam", ("[]", "{}")), "are not the arguments"),
        (wire.OptimizerSpec("Adam", ("{", "{}")), "are not the arguments"),
        (wire.OptimizerSpec("SGD", ("x",)), "'x' are not the arguments"),
        (spec("Adam", {}), "has 1 parameter groups, and a tensor is in number 1"),
        (spec("Adam"), "has 0 parameter groups"),
    ],
)
def test_what_no_shard_can_have_is_refused(wanted: wire.OptimizerSpec | None, why: str) -> None:
    with pytest.raises(ShardOptimizerError, match=why):
        make(wanted, BUCKET, start())


def test_an_optimizer_that_torch_has_not_is_refused() -> None:
    with pytest.raises(ShardOptimizerError, match="cannot have the optimizer NoSuch"):
        make(spec("NoSuch", {}), BUCKET, start())


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adagrad", "ASGD"])
def test_an_optimizer_goes_on_from_its_state_bit_by_bit(name: str) -> None:
    first_value = start()
    first = make(spec(name, {}, {}), BUCKET, first_value)
    for step in range(3):
        first.step(gradient(step), RATES)
    state = first.state()
    second_value = first_value.copy()
    second = make(spec(name, {}, {}), BUCKET, second_value)
    second.load(state)
    for step in range(3, 6):
        first.step(gradient(step), RATES)
        second.step(gradient(step), RATES)
    np.testing.assert_array_equal(first_value, second_value)
    again = second.state()
    assert again.keys() == state.keys()
    assert not any(np.shares_memory(again[key], second.state()[key]) for key in again)  # copies
    assert all(array.dtype.kind == "f" for array in again.values())


def test_a_state_of_another_optimizer_is_refused() -> None:
    adam = make(spec("Adam", {}, {}), BUCKET, start())
    adam.step(gradient(0), RATES)
    state = adam.state()
    for other in (spec("SGD", {}, {}), spec("SGD", {"momentum": 0.9}, {}), spec("RMSprop", {}, {})):
        with pytest.raises(ShardOptimizerError, match=r"of another optimizer|no state of its optimizer"):
            make(other, BUCKET, start()).load(state)


@for_each("entry", ["7/exp_avg", "x/exp_avg", "exp_avg", "0/odd", "0/exp_avg"])
def test_a_state_of_other_tensors_is_refused(entry: str) -> None:
    with pytest.raises(ShardOptimizerError, match="the saved state of a shard has"):
        make(spec("Adam", {}, {}), BUCKET, start()).load({entry: np.zeros((2, 2), np.float32)})


def test_threads_that_step_at_the_same_time_lose_no_gradient() -> None:
    value = np.zeros(NUMEL, np.float32)
    optimizer = make(spec("SGD", {"momentum": 1e-30}, {}), BUCKET, value)
    assert isinstance(optimizer, TorchOptimizer)
    ones = np.ones(NUMEL, np.float32)
    threads = [
        threading.Thread(target=lambda: [optimizer.step(ones, (1.0, 1.0)) for _ in range(100)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, shape in zip(STARTS, SHAPES, strict=True):
        assert (value[a : a + int(np.prod(shape))] == -400).all()
