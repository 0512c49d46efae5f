"""What a script has set between steps is noticed, without a copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.weights import Weights


def slot_of(name: str, parameter: torch.nn.Parameter) -> Slot:
    """Returns what these checks know of a slot."""
    return cast(Slot, SimpleNamespace(name=name, parameter=parameter))


@pytest.fixture
def slots() -> list[Slot]:
    torch.manual_seed(0)
    return [slot_of(name, torch.nn.Parameter(torch.randn(512, 512))) for name in "ab"]


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data[3, 4].add_(1e-6),
        lambda p: p.data.mul_(2.0),
        lambda p: p.data.zero_(),
        lambda p: p.data.neg_(),
        lambda p: p.data.copy_(p.data.flip(0)),
        lambda p: p.data.copy_(p.data.t().clone()),
        lambda p: p.data[1:3].copy_(p.data[1:3].flip(0)),
        lambda p: p.data[3, 1:4:2].neg_(),
        lambda p: p.data.__setitem__((0, 0), float("nan")),
        lambda p: setattr(p, "data", p.data[:256]),
        lambda p: setattr(p, "data", p.data.double()),
    ],
)
def test_a_parameter_that_was_set_is_named(slots: list[Slot], change: Callable[[torch.Tensor], object]) -> None:
    weights = Weights()
    weights.note(slots)
    assert weights.changed() == ""
    change(slots[1].parameter)
    assert weights.changed() == "b"
    weights.note(slots)
    assert weights.changed() == ""
    weights.forget()
    slots[0].parameter.data.zero_()
    assert weights.changed() == ""


def test_what_is_noted_of_parameters_takes_little_memory(slots: list[Slot]) -> None:
    weights = Weights()
    with torch.profiler.profile(profile_memory=True) as profile:
        weights.note(slots)
        weights.changed()
    held = sum(event.self_cpu_memory_usage for event in profile.events())
    assert held <= 2 * 9 * 1024  # of 2 MiB
