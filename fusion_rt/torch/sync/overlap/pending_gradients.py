"""Gradients that are pending: between `step()` and their application; and guards, which are in `p.grad` while gradients
are under way before that, between `backward()` and `step()`.

Until pending gradients have been received, nothing else may be written to their bucket's place in the arena. A touch of
a guard (by `clip_grad_norm_`, a `GradScaler`, a log of norms) waits for the reduction, and works on the result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fusion_rt.client import Operation
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core import device
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.slots import Slot, memory_order

# Sums of bits take two passes over the memory of all parameters: 12 ms of a step with 25 million, half of the cost of
# overlap where ranks share a host. A script that changes parameters itself does so from its first steps on.
_FULL_STEPS = 8  # of an optimizer, in which all its parameters are summed
_EVERY = 16  # afterwards each parameter is, in one of so many steps


class PendingGradients:
    """Gradients of some parameters between `step()` and their application.

    Args:
        parameters: these.
        bucket, operation: in which they are being reduced.
        gradients: if they are not: they have been already.

    Attributes:
        failure: why they cannot be had, if so.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        bucket: Bucket | None = None,
        operation: Operation | None = None,
        gradients: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.parameters = parameters
        self.bucket = bucket
        self.operation = operation
        self.gradients = list(gradients)
        self.failure: HorovodInternalError | None = None
        self._turn = 0
        self._marks: list[tuple[int, int]] = []

    def receive(self) -> None:
        """Waits for the gradients. Those that have come since for the next step are left alone.

        Raises:
            HorovodInternalError: the reduction failed, on all ranks.
        """
        if self.failure is not None:
            raise self.failure
        if self.bucket is None or self.operation is None:
            return
        slots = self.bucket.slots
        if all(slot.direct and not slot.sparse for slot in slots):
            self.bucket.land(self.operation)
            self.gradients = [slot.view for slot in slots]
        else:
            self.gradients = self._landed(self.bucket, self.operation)
        self.operation = None

    def await_end(self) -> None:
        """Waits until they have been reduced. Raises `HorovodInternalError` if that failed, on all ranks."""
        if self.failure is not None:
            raise self.failure
        if self.bucket is not None and self.operation is not None:
            self.bucket.await_end(self.operation)

    def mark(self, finish: Callable[[], None], turn: int) -> None:
        """Marks the parameters, which the script must not change from now on. A copy or pickle of one calls `finish`
        first.

        Args:
            turn: number of the optimizer's steps in which its parameters were marked before.
        """
        self._turn = turn
        self._marks = self._marks_now()
        for parameter in self.parameters:
            parameter.__dict__["__deepcopy__"] = partial(_copied, parameter, finish)
            parameter.__dict__["__reduce_ex__"] = partial(_reduced, parameter, finish)

    def touched(self) -> Iterator[torch.Tensor]:
        """Yields the parameters that have changed since `mark`."""
        for parameter, before, now in zip(self.parameters, self._marks, self._marks_now(), strict=True):
            if now != before:
                yield parameter

    def _marks_now(self) -> list[tuple[int, int]]:
        """Returns the version of each parameter, and the sum of its bits if that is taken in this turn, or 0."""
        full = self._turn < _FULL_STEPS
        return [
            (parameter._version, _sum_of_bits(parameter) if full or (self._turn + number) % _EVERY == 0 else 0)
            for number, parameter in enumerate(self.parameters)
        ]

    def unmark(self) -> None:
        """Removes the hooks for copying from the parameters."""
        for parameter in self.parameters:
            for name in ("__deepcopy__", "__reduce_ex__"):
                parameter.__dict__.pop(name, None)

    def leave_arena(self) -> None:
        """Moves the gradients, or the reason why there are none, out of the arena."""
        try:
            self.receive()
        except HorovodInternalError as error:
            self.failure = error
        self.bucket = self.operation = None
        self.gradients = [gradient if gradient is None else gradient.clone() for gradient in self.gradients]

    def _landed(self, bucket: Bucket, operation: Operation) -> list[torch.Tensor | None]:
        """Returns the gradients, which `land` leaves with the parameters, in memory of their own."""
        kept = [slot.parameter.grad for slot in bucket.slots]
        try:
            for slot in bucket.slots:
                slot.parameter.grad = slot.view if slot.direct else None
            bucket.land(operation)
            return [slot.parameter.grad for slot in bucket.slots]
        finally:
            for slot, gradient in zip(bucket.slots, kept, strict=True):
                slot.parameter.grad = gradient


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


def _copied(parameter: torch.Tensor, finish: Callable[[], None], memo: Any) -> Any:
    """Copies a parameter that has an update to come, as `copy.deepcopy`, after that update."""
    finish()
    return copy.deepcopy(parameter, memo)


def _reduced(parameter: torch.Tensor, finish: Callable[[], None], protocol: Any) -> Any:
    """Pickles a parameter that has an update to come, as `object.__reduce_ex__`, after that update."""
    finish()
    reduce: Any = parameter.__reduce_ex__
    return reduce(protocol)


def _sum_of_bits(parameter: torch.Tensor) -> int:
    """Returns the sum of a parameter's bits, read as integers. It changes with an element also where that is written
    through `p.data`, which the parameter's version does not tell. It is 0 on a device, where it would have to be waited
    for."""
    if not device.layer.is_host(parameter):
        return 0
    in_order = parameter.detach().resolve_conj().resolve_neg().permute(memory_order(parameter))
    octets = in_order.reshape(-1).contiguous().view(torch.uint8).numpy()
    whole = len(octets) // 8 * 8
    return int(octets[:whole].view(np.uint64).sum()) + int(octets[whole:].sum())


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
