"""Guards that are in `p.grad` between `backward()` and `step()` with overlap, while the gradient itself is reduced.

Whoever touches a guard (`clip_grad_norm_`, a `GradScaler`, a log of norms) waits for the reduction, and works on the
result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion_rt.torch.sync.slots import Slot


class GradientUnderWay(torch.Tensor):
    """A tensor that substitutes for a gradient, and has its shape, but none of its elements.

    Attributes:
        slot: of the gradient.
        wait: waits for it, if it is under way.
    """

    slot: Slot
    wait: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_awaited(args), **_awaited(kwargs or {}))


def make_guard(slot: Slot, wait: Callable[[], None]) -> GradientUnderWay:
    """Makes a guard for a slot's gradient: of one element in memory, which is NaN."""
    parameter = slot.parameter
    element = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
    guard: Any = element.expand(parameter.shape).as_subclass(GradientUnderWay)
    guard.slot, guard.wait = slot, wait
    return guard  # type: ignore[no-any-return]


def _awaited(value: Any) -> Any:
    if isinstance(value, GradientUnderWay):
        return _gradient(value)
    if isinstance(value, (list, tuple)):
        awaited = [_awaited(one) for one in value]
        return awaited if isinstance(value, list) else tuple(awaited)
    if isinstance(value, dict):
        return {key: _awaited(one) for key, one in value.items()}
    return value


def _gradient(guard: GradientUnderWay) -> torch.Tensor:
    guard.wait()
    gradient = guard.slot.parameter.grad
    if gradient is None or isinstance(gradient, GradientUnderWay):
        raise RuntimeError(f"the gradient of {guard.slot.name!r} was asked for before step(), which has it now; with "
                           "overlap, read and change gradients between backward() and step()")  # fmt: skip
    return gradient
