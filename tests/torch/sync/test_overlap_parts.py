"""What overlap is made of, without a job: steps that are taken in parts, and who uses which parameter."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion_rt.torch.sync.overlap.updates import Update
from fusion_rt.torch.sync.overlap.uses import Uses

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd, foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adam, fused": functools.partial(torch.optim.Adam, lr=0.01, fused=True),
    "adamw, amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    **({"adafactor": torch.optim.Adafactor} if hasattr(torch.optim, "Adafactor") else {}),  # since torch 2.5
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
}


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3 + i, 4, generator=generator).requires_grad_() for i in range(5)]


def give_gradients(tensors: list[torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)


def wrapped(optimizer: torch.optim.Optimizer) -> Any:
    """As far as an update looks at a distributed optimizer."""
    optimizer._script_class = type(optimizer)  # type: ignore[attr-defined]
    optimizer._step = optimizer.step  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_parts_is_that_step_to_the_bit(name: str) -> None:
    """In any order of the parts, and with the hyperparameters that were in force when it was asked for."""
    whole, parts = parameters(), parameters()
    groups = [{"params": parts[:2], "lr": 0.02}, {"params": parts[2:]}]
    plain = OPTIMIZERS[name]([{"params": whole[:2], "lr": 0.02}, {"params": whole[2:]}])
    optimizer = wrapped(OPTIMIZERS[name](groups))
    for step in range(5):
        give_gradients(whole, step)
        give_gradients(parts, step)
        plain.step()
        update = Update(optimizer)
        assert not update.whole
        for group in (*plain.param_groups, *optimizer.param_groups):
            group["lr"] *= 0.8  # a scheduler, before the update has been applied
        for part in ([4, 1], [0], [3, 2]):
            update.apply([parts[i] for i in part])
        for one, other in zip(whole, parts, strict=True):
            assert torch.equal(one, other)
    assert plain.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_what_a_scaler_says_is_remembered() -> None:
    tensors, plain = parameters(), parameters()
    optimizer = wrapped(torch.optim.Adam(tensors, fused=True))
    reference = torch.optim.Adam(plain, fused=True)
    for number, infinite in enumerate((0.0, 1.0, 0.0)):
        scale, found = torch.tensor(4.0), torch.tensor(infinite)
        give_gradients(tensors, number)
        give_gradients(plain, number)
        reference.grad_scale, reference.found_inf = scale.clone(), found.clone()
        reference.step()
        optimizer.grad_scale, optimizer.found_inf = scale, found
        update = Update(optimizer)
        del optimizer.grad_scale, optimizer.found_inf
        scale.mul_(2)
        found.fill_(1)
        update.apply(tensors[:3])
        update.apply(tensors[3:])
        for one, other in zip(tensors, plain, strict=True):
            assert torch.equal(one, other)


def test_state_that_is_made_within_inference_mode_and_autocast_is_that_of_outside() -> None:
    tensors = parameters()
    optimizer = wrapped(torch.optim.AdamW(tensors))
    give_gradients(tensors, 0)
    with torch.inference_mode(), torch.autocast("cpu"):
        Update(optimizer).apply(tensors)
    assert not any(state["exp_avg"].is_inference() for state in optimizer.state.values())
    give_gradients(tensors, 1)
    Update(optimizer).apply(tensors)


def test_lbfgs_hooks_and_unknown_classes_are_not_split() -> None:
    class Own(torch.optim.SGD):
        pass

    assert Update(wrapped(Own(parameters(), lr=0.1))).whole
    assert Update(wrapped(torch.optim.LBFGS(parameters()))).whole
    hooked = wrapped(torch.optim.SGD(parameters(), lr=0.1))
    assert not Update(hooked).whole
    hooked.register_step_post_hook(lambda *_: None)
    assert Update(hooked).whole


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        self.bare = torch.nn.Parameter(torch.zeros(2))
        self.listed = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2))])


def test_a_parameter_belongs_to_the_innermost_module_that_runs() -> None:
    model = Nested()
    first, second = model.inner[0], model.inner[1]
    outside = torch.nn.Parameter(torch.zeros(1))
    uses = Uses()
    for module in (model, model.inner, first):  # the second layer's parameters are used by the container
        uses.called(module)
    uses.conclude([*model.parameters(), outside])
    assert not uses.recording
    assert set(uses.beneath(model.inner)) == {id(second.weight), id(second.bias)}
    assert uses.beneath(model) == (id(model.listed[0]),)
    assert uses.beneath(first) == ()
    assert uses.unseen == {id(outside)}
    assert id(outside) not in uses.needed_at
    uses.release()
    assert not any(module._state_dict_pre_hooks for module in model.modules())


def test_the_order_of_need_is_that_of_forward_passes_and_not_of_names() -> None:
    a, b, c, tied = (torch.nn.Linear(2, 2, bias=False) for _ in range(4))
    tied.weight = b.weight
    uses = Uses()
    for module in (c, b, a, tied, c):
        uses.called(module)
    uses.conclude([a.weight, b.weight, c.weight])
    at = uses.needed_at
    assert at[id(c.weight)] < at[id(b.weight)] < at[id(a.weight)]


def test_a_scripted_module_takes_no_hooks_and_its_parameters_are_not_put_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that scripting is deprecated
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(scripted, torch.nn.Linear(2, 2))
    uses = Uses()
    for module in (model, *model):
        uses.called(module)
    uses.conclude(list(model.parameters()))
    assert uses.unseen == {id(parameter) for parameter in scripted.parameters()}


def test_parameters_that_are_added_are_not_overlapped_before_a_forward_was_seen() -> None:
    model = Nested()
    uses = Uses()
    for module in model.modules():
        uses.called(module)
    uses.conclude(list(model.inner.parameters()))
    assert not uses.unseen
    uses.restart()
    assert uses.recording
    uses.conclude(list(model.parameters()))
    assert uses.unseen == {id(parameter) for parameter in model.parameters()}
    for module in (model, model.inner, *model.inner):
        uses.called(module)
    uses.conclude(list(model.parameters()))
    assert not uses.unseen
    assert not uses.recording
