"""The family of parameter servers: gradients go to homes, which take the steps.

BSP, ASP, SSP, softsync, DC-ASGD, hogwild, partial and collaborative training. All of them send g, a rank's gradients,
and the answer is w, the home's parameters, or a change of them. Homes compute w = w - rate f(g, ...), where
fusion_rt/algorithms defines f: the mean of all, each one on arrival, divided by its staleness, and so on.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from fusion_rt import wire
from fusion_rt.client import terms
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.sync.at_step.at_step import AtStep
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.parameters import Trained, arguments_of, optimizer_spec
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.step_schedule import Closure, Outcome
from fusion_rt.torch.sync.update_rule import ToParameters
from fusion_rt.torch.sync.weights import not_finite


class OfGradients(ToParameters):
    """Sends g, and takes the answer as the parameter, or adds it."""

    def value(self, slot: Slot) -> torch.Tensor | None:
        return slot.parameter.grad


class AtHomes(AtStep):
    """Posts gradients to homes, which take the steps, and takes the parameters that come back. The script's optimizer
    only says how: its class, its arguments, and its learning rates, which go along with each gradient."""

    def __init__(self, options: Options, trained: Trained, passes: int) -> None:
        super().__init__(options, trained, passes)
        self._arguments: list[dict[str, Any]] = []  # of the optimizer's groups, as homes have them

    def step(self, optimizer: Any, closure: Closure | None) -> Any:
        """Posts the gradients as the script has left them, and waits for the parameters. A rank of which a gradient is
        not finite contributes nothing, and takes the parameters; that is warned of, unless a `GradScaler` knows it.
        Raises `ValueError` if the script has set a parameter, or an argument that the homes have, since the last step.
        """
        return torch.optim.Optimizer.profile_hook_step(self._take)(optimizer, closure)  # with the script's hooks

    def _take(self, optimizer: Any, closure: Closure | None) -> Any:
        sync, loss = self.sync, None
        sync.steps.begin()
        self._follow()
        self._check_weights()
        self._check_arguments()
        self._check_state(optimizer)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        overflowed = optimizer._overflowed()
        if not overflowed and (name := not_finite(sync.slots)):
            overflowed = True
            self._warn_of(name)
        if exchanges.survive is None:
            self._exchange_now(not overflowed)
        else:
            exchanges.run([self], partial(self._exchange_now, not overflowed))
        self.note_weights()
        optimizer._note_step()
        sync.steps.end()
        return loss

    def _warn_of(self, name: str) -> None:
        """Warns of a parameter whose gradient is not finite."""
        warnings.warn(
            f"the gradient of {name!r} is not finite on this rank, which therefore contributes nothing to this step of "
            f"{self._algorithm}",
            stacklevel=6,
        )

    def _exchange_now(self, values: bool, pieces: Sequence[int] = (0,)) -> None:
        super()._exchange_now(values, pieces)
        self._clock = self._clock._replace(clock=self._clock.clock + 1)

    def joined(self) -> None:
        self._clock = self._clock._replace(clock=wire.first_clock_after_join(self._clock.clock))

    def note_known(self, outcome: Outcome) -> None:
        self._clock = self._clock._replace(clock=self._clock.recalled)

    def _check_arguments(self) -> None:
        """Raises `ValueError` if the script has changed an argument that homes have, since there has been a plan."""
        optimizer = self.sync.trained.optimizer()
        if self.sync.is_of(runtime()) and arguments_of(optimizer)[: len(self._arguments)] != self._arguments:
            raise ValueError(
                f"an argument of the optimizer other than its learning rate has changed, and with {self._algorithm} "
                "the shards keep its value from the time when the buckets were planned; do not change it (as with "
                "cycle_momentum=False of schedulers), or use an algorithm whose ranks take their own steps"
            )

    def _check_state(self, optimizer: Any) -> None:
        """Raises `ValueError` if the script has given the optimizer a state since there has been a plan."""
        if optimizer.state and self.sync.is_of(runtime()) and any(optimizer.state.values()):
            raise ValueError(
                "the optimizer was given a state (momenta and the like) after its first step, and with "
                f"{self._algorithm} the shards have their own; load the state before the optimizer's first step, on "
                "all ranks, or one that this optimizer's state_dict() has returned"
            )

    def _contribution(self, values: bool) -> wire.Ready:
        return terms(samples=self.samples if values else 0, rates=tuple(self.sync.trained.group_rates()))

    def drain(self) -> None:
        self._check_weights()  # nothing is under way after a step

    def reduction(self) -> wire.Reduction:
        optimizer = self.sync.trained.optimizer()
        self._arguments = arguments_of(optimizer)
        return msgspec.structs.replace(super().reduction(), optimizer=optimizer_spec(optimizer))

    def agreed(self, plan: wire.Plan) -> None:
        state = self.sync.trained.optimizer().state
        self.sync.checkpoint.begin_homes(state)
        state.clear()  # homes have it from now on

    def homes_are_loaded(self) -> None:
        super().homes_are_loaded()
        self.sync.trained.optimizer().state.clear()

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        if self._said.kind == "post" and self.sync.checkpoint.converts:
            self._said.rescale = self.sync.checkpoint.units.factors(slots)
        return self._said
