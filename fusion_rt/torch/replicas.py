"""The distributed optimizer whose ranks have models of their own: they take local steps, and post parameters.

With an algorithm that overlaps, what was posted after one step is answered after the next: by then the worker has
moved, so it gets a change, which is added. All others wait for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusion_rt import algorithms
from fusion_rt.torch.exchange import GradientExchange
from fusion_rt.torch.sharded import ShardExchange, WeightSlot
from fusion_rt.torch.wrapping import Wrapped

_KEY = "fusion_rt_local"
"""Of a `state_dict`: the steps taken, and, of DiLoCo, the outer optimizer."""


class ParameterSlot(WeightSlot):
    """A parameter that is posted itself."""

    __slots__ = ()

    def arrived(self, parameter: torch.Tensor) -> None:
        """A gradient is this rank's own affair."""

    def value(self) -> torch.Tensor | None:
        return self.parameter.detach()

    def anchor(self, anew: bool = False) -> None:
        """The next step is taken from where the parameter is now, which is the same on all ranks; `anew`: even if that
        had been said before."""


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
        self.start: torch.Tensor | None = None
        self.velocity = torch.zeros_like(self.parameter)
        self.rate, self.momentum = 0.7, 0.9

    def anchor(self, anew: bool = False) -> None:
        if self.start is None or anew:
            self.start = self.parameter.detach().clone()

    def value(self) -> torch.Tensor | None:
        assert self.start is not None
        return self.start - self.parameter.detach()

    def assign(self, reduced: torch.Tensor) -> None:
        assert self.start is not None
        self.velocity.mul_(self.momentum).add_(reduced)
        self.start.sub_(reduced + self.momentum * self.velocity, alpha=self.rate)
        self.parameter.detach().copy_(self.start)


class ReplicaExchange(ShardExchange):
    """Parameters out; parameters, or changes of them, in.

    Attributes:
        under_way: something has been posted and not been collected.
    """

    under_way = False

    def _make_plan(self) -> None:
        if self._spec().place is algorithms.Place.SHARD:
            super()._make_plan()
        else:
            GradientExchange._make_plan(self)

    def discard(self) -> None:
        """Forgets what is under way, and its answer."""
        if self.under_way:
            self.under_way, self.idle = False, False
        super().discard()

    def _spec(self) -> algorithms.Algorithm:
        return algorithms.parse(self._manner.reduction.algorithm)

    def post(self) -> None:
        """Posts all parameters as they are now."""
        self.begin()
        self.idle = True  # gradients have nothing to do with it
        if self._buckets is None:
            self._make_plan()
        for bucket in self._buckets or []:
            self._send(bucket)
        while self.copying:
            self.copying.popleft().post(wait=True)
        self.under_way = True

    def collect(self) -> None:
        """Waits for the answers to what is under way, and takes them."""
        if self.under_way:
            self.under_way = False
            try:
                for bucket in self._buckets or []:
                    bucket.receive()
                self._steps += 1
            finally:
                self._end_step()


class DistributedReplicas(Wrapped):
    """What is put in front of the script's optimizer class when ranks have models of their own."""

    _exchange: ReplicaExchange
    _spec: algorithms.Algorithm
    _taken = 0  # steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the script's optimizer's step, and exchanges parameters, if it is time to.

        Raises:
            HorovodInternalError: the exchange failed.
        """
        exchange, spec = self._exchange, self._spec
        exchange.steps.begin()
        self.anchor()
        loss = self._step(closure)
        exchange.collect()
        self._taken += 1
        period = 1 if self._taken <= getattr(spec, "after", 0) else spec.period
        if self._taken % period == 0:
            exchange.post()
            if not spec.overlaps:
                exchange.collect()
        exchange.steps.end()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already

    def synchronize(self) -> None:
        """Does nothing: gradients stay each rank's own, and may be clipped."""

    def drain(self) -> None:
        """Takes the answer to what is under way."""
        self._exchange.collect()

    def anchor(self, anew: bool = False) -> None:
        """All ranks have the same parameters now; see `ParameterSlot.anchor`."""
        for slot in self._exchange.slots:
            assert isinstance(slot, ParameterSlot)
            slot.anchor(anew)

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
        """Goes on from an `own_state`."""
        self._taken = int(own["taken"])
        for slot in self._exchange.slots:
            if isinstance(slot, OuterSlot) and slot.name in own.get("outer", {}):
                start, velocity = own["outer"][slot.name]
                slot.start = start.to(slot.parameter, copy=True)
                slot.velocity.copy_(velocity)


def slot_of(spec: algorithms.Algorithm) -> type[ParameterSlot]:
    """What is exchanged of a parameter."""
    return OuterSlot if isinstance(spec, algorithms.DiLoCo) else ParameterSlot
