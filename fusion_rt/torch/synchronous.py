"""The optimizer whose step waits until gradients have been reduced over all ranks, and when that is.

A step may be taken in several ways, and gradients are reduced once in each: `step()`; `synchronize()`, something that
looks at the gradients, and `step()` under `skip_synchronize()`; `step(closure)`; and `GradScaler.step`. The last one
unscales gradients before it calls `step()`, and nothing tells the optimizer, except that it reads `param_groups` to
find them. Hence that is a property here: whoever reads it while gradients are complete but not reduced has them
reduced first. (One who is not interested in gradients, and logs the learning rate between `backward()` and `step()`,
say, has the reduction done a little early.) Rejected: patching `GradScaler`, which other libraries subclass, and
`_step_supports_amp_scaling`, whose contract has changed twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusion_rt.torch import ops
from fusion_rt.torch.compression import Compression
from fusion_rt.torch.parameters import takes_part
from fusion_rt.torch.process_sets import ProcessSet
from fusion_rt.torch.wrapping import Wrapped

SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


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
    _synchronized = False  # synchronize() was called, and no step() since
    _reduced_early = False  # gradients were reduced because somebody read param_groups, and no step() since

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. Gradients that are complete are reduced first: whoever reads this may change them."""
        exchange = self.__dict__.get("_exchange")
        if exchange is not None and exchange.complete() and not _in_backward():
            exchange.synchronize()
            self._reduced_early = True
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def synchronize(self) -> None:
        """Reduces the gradients and waits for it: afterwards every `p.grad` is the same on all ranks.

        A parameter that took no part in the backward passes contributes zeros. To be used with `skip_synchronize`.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        self._exchange.synchronize()
        self._synchronized = True
        self._reduced_early = False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside this context `step` does not reduce gradients::

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
        """Reduces the gradients, unless that has been done, and takes the script's optimizer's step.

        With a closure, gradients are reduced after each of its evaluations, and the loss that it returns is reduced as
        they are: an optimizer that decides by the loss (L-BFGS) has to decide the same on all ranks.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        self._exchange.steps.begin()
        if not self._skipping:
            if self._synchronized:
                warnings.warn(SYNCHRONIZED_TWICE, stacklevel=2)
            if closure is None:
                if not (self._reduced_early and self._exchange.idle):
                    self.synchronize()
            else:
                if not self._exchange.idle:
                    self.synchronize()
                closure = self._reducing(closure)
        self._synchronized = self._reduced_early = False
        result = self._step(closure)
        self._exchange.steps.end()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._reduced_early = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._synchronized = self._reduced_early = False

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self._exchange.synchronize()
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


def _in_backward() -> bool:
    """Whether autograd is running on this thread, and gradients are still to come."""
    return bool(torch._C._current_graph_task_id() != -1)
