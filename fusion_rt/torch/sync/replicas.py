"""The distributed optimizer whose ranks have models of their own: they take local steps, and post parameters.

With an algorithm that overlaps, what was posted after one step is answered after the next: by then the worker has
moved, so it gets a change, which is added. All others wait for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusion_rt import algorithms
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.sync.own_gradients import OwnGradients
from fusion_rt.torch.sync.sharded import ShardExchange, WeightSlot

_KEY = "fusion_rt_local"
"""Of a `state_dict`: the steps taken, and, of DiLoCo, the outer optimizer."""


class ParameterSlot(WeightSlot):
    """A parameter that is posted itself."""

    __slots__ = ()
    _exchange: ShardExchange

    def value(self) -> torch.Tensor | None:
        return self.parameter.detach()

    def assign(self, reduced: torch.Tensor) -> None:
        super().assign(self._mean(reduced))

    def anchor(self, anew: bool = False) -> None:
        """The next step is taken from where the parameter is now, which is the same on all ranks; `anew`: even if that
        had been said before."""

    def _mean(self, reduced: torch.Tensor) -> torch.Tensor:
        """Over the ranks that have contributed."""
        share = self._exchange.share
        return reduced if share == 1.0 else reduced * share


class OuterSlot(ParameterSlot):
    """A parameter whose change since the last exchange is posted; the mean of the changes moves it from there by a step
    of SGD with Nesterov momentum (arXiv 2311.08105, algorithm 1).

    Attributes:
        start: where it was after the last exchange; None before the first step.
        velocity: of the outer momentum.
        rate, momentum: of the outer step.
    """

    __slots__ = ("momentum", "rate", "start", "velocity")

    def _take_over(self) -> None:
        super()._take_over()
        spec = self._exchange.spec
        assert isinstance(spec, algorithms.DiLoCo)
        self.start: torch.Tensor | None = None
        self.velocity = torch.zeros_like(self.parameter)
        self.rate, self.momentum = spec.outer_rate, spec.outer_momentum

    def anchor(self, anew: bool = False) -> None:
        if self.start is None or anew:
            self.start = self.parameter.detach().clone()

    def value(self) -> torch.Tensor | None:
        assert self.start is not None
        return self.start - self.parameter.detach()

    def assign(self, reduced: torch.Tensor) -> None:
        assert self.start is not None
        reduced = self._mean(reduced)
        self.velocity.mul_(self.momentum).add_(reduced)
        self.start.sub_(reduced + self.momentum * self.velocity, alpha=self.rate)
        self.parameter.detach().copy_(self.start)


class DistributedReplicas(OwnGradients):
    """What is put in front of the script's optimizer class when ranks have models of their own."""

    _spec: algorithms.Algorithm
    _taken = 0  # steps that the script has called for, also those that a `GradScaler` skips
    _exchanged = False  # the last one ended with an exchange that all ranks waited for

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the script's optimizer's step, unless a `GradScaler` found that this rank's gradients are not finite,
        and exchanges parameters, if it is time to.

        Raises:
            HorovodInternalError: the exchange failed.
            ValueError: the script has set a parameter since the last step, where that cannot be taken over.
        """
        exchange, spec = self._exchange, self._spec
        exchange.steps.begin()
        exchange.follow()
        if self._exchanged and exchange.is_of(runtime()) and exchange.weights.changed():
            self.anchor(anew=True)  # set where all ranks have the same, and so alike on all of them
        else:
            self._check_weights()
        self.anchor()
        loss = None if self._overflowed() else self._step(closure)
        exchange.collect()
        self._taken += 1
        period = 1 if self._taken <= getattr(spec, "after", 0) else spec.period
        self._exchanged = self._taken % period == 0 and not spec.overlaps
        if self._taken % period == 0:
            exchange.post()
            if not spec.overlaps:
                exchange.collect()
        self._note_weights()
        exchange.steps.end()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already

    def drain(self) -> None:
        """Takes the answer to what is under way."""
        if self._exchange.under_way:
            self._check_weights()
            self._exchange.collect()
            self._note_weights()

    def anchor(self, anew: bool = False) -> None:
        """All ranks have the same parameters now; see `ParameterSlot.anchor`."""
        for slot in self._exchange.slots:
            assert isinstance(slot, ParameterSlot)
            slot.anchor(anew)

    def _settled(self) -> None:
        self.anchor(anew=True)
        super()._settled()

    def agree(self) -> None:
        """Takes the homes' copy, if there is one. To be called on all ranks, between two barriers."""
        if self._spec.place is algorithms.Place.SHARD:
            self._exchange.pull()

    def state_dict(self) -> dict[str, Any]:
        """As the script's optimizer's, with the number of steps. What is under way is waited for and taken, so save the
        model after this."""
        own = self.own_state()
        return {**super().state_dict(), _KEY: own}

    def own_state(self) -> dict[str, Any]:
        """The number of steps and, of DiLoCo, the outer optimizer; the same on all ranks. As for `state_dict`."""
        self.drain()
        own: dict[str, Any] = {"taken": self._taken}
        outer = {
            slot.name: (slot.start.clone(), slot.velocity.clone())
            for slot in self._exchange.slots
            if isinstance(slot, OuterSlot) and slot.start is not None
        }
        if outer:
            own["outer"] = outer
        return own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = state_dict.get(_KEY)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})
        if own is not None:
            self.load_own_state(own)

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        """Goes on from an `own_state`, and the parameters that belong to it."""
        self._taken, self._exchanged = int(own["taken"]), False
        self._exchange.weights.forget()
        for slot in self._exchange.slots:
            if isinstance(slot, OuterSlot) and slot.name in own.get("outer", {}):
                start, velocity = own["outer"][slot.name]
                slot.start = start.to(slot.parameter, copy=True)
                slot.velocity.copy_(velocity)


def slot_of(spec: algorithms.Algorithm) -> type[ParameterSlot]:
    """What is exchanged of a parameter."""
    return OuterSlot if isinstance(spec, algorithms.DiLoCo) else ParameterSlot
