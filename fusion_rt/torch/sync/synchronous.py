"""The optimizer whose gradients are reduced when `backward()` returns, over all ranks.

Nothing is left to be reduced by `synchronize()` and `step()` then, which Horovod's scripts call, except on a rank that
has computed no gradient since the last step: there they take part in the reduction of the others with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusion_rt.torch import ops
from fusion_rt.torch.core.compressors import Compression
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.sync.parameters import takes_part
from fusion_rt.torch.sync.wrapping import Wrapped


class Distributed(Wrapped):
    """What is put in front of the script's optimizer class.

    Attributes:
        op, gradient_predivide_factor, sparse_as_dense, process_set: as they were given.
    """

    op: Any
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _skipping = False  # inside skip_synchronize()

    def synchronize(self) -> None:
        """Sees to it that every `p.grad` is reduced, which it is after `backward()`: that leaves backward passes that
        `backward_passes_per_step` still waits for, and ranks without one, whose gradients count as zeros.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        if not self._exchange.reduced or not self._exchange.idle:
            self._exchange.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside this context `step` does not call `synchronize`, as scripts for Horovod have it::

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        """
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the script's optimizer's step, after `synchronize()`, unless that is skipped.

        With a closure, the loss that it returns is reduced as gradients are: an optimizer that decides by the loss
        (L-BFGS) has to decide the same on all ranks.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        exchange = self._exchange
        exchange.steps.begin()
        if not self._skipping:
            if closure is not None:
                closure = self._reducing(closure)
            if closure is None or not exchange.idle:
                self.synchronize()
        result = self._step(closure)
        exchange.reduced = 0
        exchange.steps.end()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            self._exchange.reduced = 0
            loss = closure()
            self.synchronize()
            return self._reduced_loss(loss) if takes_part(self.process_set) else loss

        return reduced

    def _reduced_loss(self, loss: Any) -> Any:
        if isinstance(loss, torch.Tensor):
            factor = self.gradient_predivide_factor
            return ops.allreduce(
                loss.detach(), None, None, Compression.none, self.op, 1.0 / factor, factor, self.process_set
            )
        if isinstance(loss, float):
            return float(self._reduced_loss(torch.tensor(loss, dtype=torch.float64)))
        return loss
