"""The distributed optimizer for Adasum, which combines what the ranks' optimizers would do rather than gradients.

Every rank takes the script's optimizer's step with its own gradients; the change of each parameter is reduced by Adasum
and applied in its place. Horovod does so parameter by parameter within the backward pass, and has the parameters
half-changed while it runs; here they change in `step`, all at once, which also suits an optimizer that looks at several
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fusion_rt.torch.sync.slots import Named, Slot
from fusion_rt.torch.sync.synchroniser import GradientExchange
from fusion_rt.torch.sync.wrapping import Wrapped


class DeltaSlot(Slot):
    """A parameter whose change is reduced.

    Attributes:
        start: its value before the step; None outside of it.
    """

    __slots__ = ("start",)

    def __init__(self, exchange: GradientExchange, named: Named) -> None:
        super().__init__(exchange, named)
        self.start: torch.Tensor | None = None

    def value(self) -> torch.Tensor | None:
        return None if self.start is None else self.parameter.detach() - self.start

    def assign(self, reduced: torch.Tensor) -> None:
        assert self.start is not None
        torch.add(self.start, reduced, out=self.parameter.detach())
        self.start = None

    def _is_direct(self) -> bool:
        return False

    def _buffer(self) -> torch.Tensor:
        return torch.empty_like(self.parameter)


class DistributedAdasum(Wrapped):
    """What is put in front of the script's optimizer class for `op=Adasum`.

    All ranks have to take every step: not to be used with a `GradScaler`, which skips it where gradients overflow, and
    here that is decided by each rank's own.
    """

    def synchronize(self) -> None:
        """Does nothing, as in Horovod: gradients stay each rank's own."""

    def skip_synchronize(self) -> NoReturn:
        """Raises `AssertionError`, as in Horovod."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the script's optimizer's step on this rank's gradients, and replaces what came of it by the Adasum of
        all ranks'. A closure is evaluated once, before.

        Raises:
            HorovodInternalError: the reduction failed, on all ranks.
        """
        exchange = self._exchange
        exchange.steps.begin()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if exchange.idle:
            exchange.begin()
        for slot in exchange.slots:
            assert isinstance(slot, DeltaSlot)
            slot.start = slot.parameter.detach().clone()
        self._step()
        exchange.synchronize()
        exchange.steps.end()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already
