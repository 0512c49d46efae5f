"""The distributed optimizer whose `step()` returns before gradients have been reduced, and which may have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion_rt import algorithms
from fusion_rt.settings import Settings
from fusion_rt.torch.sync.overlap.exchange import OverlapExchange
from fusion_rt.torch.sync.synchronous import Distributed

WAYS = ("none", "forward", "stale")


class Overlapped(Distributed):
    """What is put in front of the script's optimizer class with `overlap="forward"` or "stale"."""

    _exchange: OverlapExchange

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Asks for the script's optimizer's step, and returns; it is taken as docs/overlap.md says. Afterwards `p.grad`
        is None, as after `zero_grad`.

        Raises:
            HorovodInternalError: the reduction of an earlier step failed, on all ranks.
            ValueError: there is a closure, which would have to see the parameters at once.
        """
        if closure is not None:
            raise ValueError("step(closure) evaluates the model while the step is being taken, so that nothing can "
                             "overlap; use overlap='none' for this optimizer")  # fmt: skip
        exchange = self._exchange
        exchange.steps.begin()
        self._script_optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._skipping or (exchange.reduced and exchange.idle):
            exchange.hold(self)
        else:
            exchange.launch(self)
        exchange.reduced = 0
        exchange.steps.end()
        return None

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already

    def synchronize(self) -> None:
        """After a backward pass: reduces the gradients and waits for it, so that they can be looked at and changed; to
        be used with `skip_synchronize`. Between `step()` and the next forward pass: applies the update, as
        `synchronize_parameters` does anywhere.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        if self._exchange.idle and self._exchange.stepped:
            self._exchange.finish()
        else:
            super().synchronize()

    def synchronize_parameters(self) -> None:
        """Applies the update that waits, if there is one. Raises `HorovodInternalError`."""
        self._exchange.finish()

    def plain_state_dict(self) -> dict[str, Any]:
        """The `state_dict` of the script's optimizer, after the update that waits."""
        self._exchange.finish()
        return super().plain_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._exchange.finish_or_drop()
        super().load_state_dict(state_dict)

    def __reduce__(self) -> Any:
        self._exchange.finish()
        return super().__reduce__()


def chosen_overlap(
    asked: str | None, optimizer: torch.optim.Optimizer, spec: algorithms.Algorithm, adasum: bool
) -> str:
    """Which of `WAYS` an optimizer is to have; None: what FUSION_OVERLAP says.

    Raises:
        ValueError: there is no such way, or it makes no sense with the rest.
    """
    way = Settings.from_env().overlap if asked is None else asked
    if way not in WAYS:
        raise ValueError(f"overlap={way!r} is not one of {', '.join(WAYS)}")
    if way == "none":
        return way
    source = f"overlap={way!r}" + (" (of FUSION_OVERLAP)" if asked is None else "")
    if not isinstance(spec, algorithms.AllReduce):
        raise ValueError(
            f"{source} cannot be used with the algorithm {spec}, whose updates come from elsewhere, and when they are "
            "there; overlap is for allreduce"
        )
    if adasum:
        raise ValueError(f"{source} cannot be used with op=Adasum, which combines steps that have been taken already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{source} cannot be used with L-BFGS, which evaluates the model while it takes a step; "
                         "use overlap='none'")  # fmt: skip
    return way
