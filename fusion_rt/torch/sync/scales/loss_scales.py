"""The scale of the loss whose gradients a backward pass computes, as a `GradScaler` has it.

A script scales its loss, calls `backward()`, in which gradients leave, and hands optimizers to the scaler afterwards
only. So the one moment at which a scale can be learnt in time is `GradScaler.scale(loss)`, which is watched, also in
the classes derived from it (`ShardedGradScaler`). That it was called says nothing about the backward pass that runs: a
script may have several scalers, and losses that are not scaled. Hence the scaled tensor gets a hook, which autograd
calls first of all in the pass that goes through it.

A loss that is scaled otherwise (`loss * 1024`, Apex, DeepSpeed) looks like any other: the script says its scale itself
(`loss_scale` of the optimizer, or of the hook).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.amp import GradScaler

from fusion_rt.torch.core import device

_WATCHED = "_fusion_rt_watches"


class Scaled(NamedTuple):
    """A loss that has been scaled.

    Attributes:
        scaler: a reference to the `GradScaler`.
        scale: returns the factor.
    """

    scaler: weakref.ref[Any]
    scale: Callable[[], float]


class _Pass:
    """A backward pass through a scaled loss. Only autograd keeps it, until the pass has ended, or failed."""

    def __init__(self, loss: Scaled) -> None:
        self.loss = loss

    def __call__(self) -> None:
        """Called when autograd has run the whole graph."""


class _Reading:
    """A scaler's scale, on its way from the device.

    Attributes:
        tensor: the scaler's.
        version: how often that had been changed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not device.layer.is_host(tensor))
        self._copying = device.layer.copy([self._value], [tensor.detach()])

    def __call__(self) -> float:
        self._copying.wait()
        return float(self._value)


_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()  # by graph task, in their order
_readings: weakref.WeakKeyDictionary[Any, _Reading] = weakref.WeakKeyDictionary()  # the last one of each scaler


def watch() -> None:
    """Watches all classes of scalers that there are from now on."""
    for kind in _with_subclasses(GradScaler):
        for name, watched in (("scale", _watched_scale), ("update", _watched_update)):
            method = vars(kind).get(name)
            if method is not None and not hasattr(method, _WATCHED):
                setattr(kind, name, watched(method))


def of_this_pass() -> Scaled | None:
    """Returns the scaled loss of the backward pass that calls this from a hook or at its end, or within which that one
    runs; None if its loss is not scaled, or none runs."""
    found = _passes.get(torch._C._current_graph_task_id()) if _passes else None
    if found is None and _passes:
        found = max(_passes.items(), key=lambda pair: pair[0])[1]
    return None if found is None else found.loss


def in_backward() -> bool:
    """Tells whether a backward pass calls this from a hook."""
    return torch._C._current_graph_task_id() != -1


def now(scaler: Any) -> float:
    """Returns the scale by which a scaler would scale a loss now."""
    return _reading(scaler)() if scaler.is_enabled() and scaler._scale is not None else 1.0


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    derived: type[Any]
    for derived in kind.__subclasses__():
        yield from _with_subclasses(derived)


def _watched_scale(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = method(self, outputs)
        if self.is_enabled():
            loss = Scaled(weakref.ref(self), _reading(self))
            for tensor in _tensors(scaled):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(_begins, loss))  # type: ignore[no-untyped-call]
        return scaled

    setattr(scale, _WATCHED, True)
    return scale


def _watched_update(method: Callable[..., Any]) -> Callable[..., Any]:
    """Has the scale copied from its device as soon as it is known: in the next backward pass that copy would have to
    wait for the whole forward pass before it."""

    @functools.wraps(method)
    def update(self: Any, *arguments: Any, **options: Any) -> Any:
        result = method(self, *arguments, **options)
        if self.is_enabled():
            _reading(self)
        return result

    setattr(update, _WATCHED, True)
    return update


def _reading(scaler: Any) -> _Reading:
    tensor, found = scaler._scale, _readings.get(scaler)
    if found is None or found.tensor is not tensor or found.version != tensor._version:
        found = _readings[scaler] = _Reading(tensor)
    return found


def _begins(loss: Scaled, gradient: torch.Tensor) -> None:
    """Called by autograd at the beginning of a backward pass through a scaled loss."""
    task = torch._C._current_graph_task_id()
    found = _passes.get(task)
    if found is not None:
        found.loss = loss
    elif task != -1:
        found = _passes[task] = _Pass(loss)
        torch.autograd.Variable._execution_engine.queue_callback(found)


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """Returns the tensors in a scaler's result: one, or iterables of such."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from _tensors(each)
    elif isinstance(outputs, Mapping):
        for each in outputs.values():
            yield from _tensors(each)
