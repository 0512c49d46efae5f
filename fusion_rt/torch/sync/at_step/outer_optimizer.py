"""The family of outer optimizers: ranks take local steps, and then an outer step by how much they have moved.

DiLoCo, SparseLoCo and Decoupled DiLoCo, NoLoCo; and local SGD with a codec that rounds, whose outer step is the mean.
In the equations x is a rank's parameter, and s (`slot.start`) its value after the last exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusion_rt.algorithms import Algorithm, NoLoCo
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.sync.at_step.local_steps import LocalSteps
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.update_rule import UpdateRule


class FromStart(UpdateRule):
    """Sends s - x, by how much this rank has moved since the last exchange."""

    def value(self, slot: Slot) -> torch.Tensor | None:
        if slot.start is None:
            return None
        difference = slot.start - slot.parameter.detach()
        return difference if slot.moved is None else difference.sub_(slot.moved)


class OuterStep(FromStart):
    """A step of SGD with Nesterov momentum, by the mean d of s - x over all ranks::

        v = momentum v + d
        s = s - rate (d + momentum v)
        x = mixing x + (1 - mixing) s

    Source: DiLoCo (arXiv 2311.08105, algorithm 1); `mixing` is of Streaming DiLoCo (arXiv 2501.18512). With rate 1, and
    no momentum, s becomes the mean of x, without that a codec rounds the parameters themselves.

    Args:
        rate, momentum, mixing: of these equations.
    """

    def __init__(self, rate: float, momentum: float, mixing: float) -> None:
        self._rate, self._momentum, self._mixing = rate, momentum, mixing

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        for slot, result in zip(slots, results, strict=True):
            assert slot.start is not None
            if self._momentum:
                velocity = velocity_of(slot).mul_(self._momentum).add_(result)
                result = result + self._momentum * velocity
            slot.start.sub_(result, alpha=self._rate)
            mix(slot, self._mixing)


class PairStep(FromStart):
    """A step by the mean change of a pair of ranks, whose momentum also draws them to each other::

        v = momentum v + rate mean(x - s) + consensus (mean(s) - s)
        s = s + v
        x = s

    Each rank sends rate (x - s) + consensus s. The answer is the mean of both minus its own, which added to its own
    rate (x - s) is all of v but the momentum. Source: NoLoCo (arXiv 2506.10911).

    Args:
        rate, momentum, consensus: of these equations.
    """

    def __init__(self, rate: float, momentum: float, consensus: float) -> None:
        self._rate, self._momentum, self._consensus = rate, momentum, consensus

    def value(self, slot: Slot) -> torch.Tensor | None:
        if slot.start is None:
            return None
        return (slot.parameter.detach() * self._rate).add_(slot.start, alpha=self._consensus - self._rate)

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        for slot, result in zip(slots, results, strict=True):
            assert slot.start is not None
            assert added
            change = slot.parameter.detach() - slot.start
            velocity = velocity_of(slot).mul_(self._momentum).add_(change, alpha=self._rate).add_(result)
            slot.start.add_(velocity)
            mix(slot, 0.0)


class StepAtHome(FromStart):
    """The home has taken the outer step, and its s is the answer, or the change of it since the last answer. With p,
    the parameter as it was when its change was sent::

        x = mixing p + (1 - mixing) s + (x - p)

    So steps since then stay, and are sent next. Source: Decoupled DiLoCo (arXiv 2604.21428).

    Args:
        mixing: of this equation.
    """

    def __init__(self, mixing: float) -> None:
        self._mixing = mixing

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        for slot, result in zip(slots, results, strict=True):
            assert slot.start is not None
            if added:
                slot.start.add_(result)
            else:
                slot.start.copy_(result)
            if slot.posted is None:
                mix(slot, self._mixing)
            else:
                since = slot.parameter.detach() - slot.posted
                slot.parameter.detach().copy_(slot.posted)
                mix(slot, self._mixing)
                slot.parameter.detach().add_(since)
            slot.moved = slot.posted = None


class OuterOptimizer(LocalSteps):
    """Takes local steps, and every so many of them an outer step, which goes on from where the last one came to."""

    def _begin_local_step(self) -> None:
        if self._agreed and self.sync.is_of(runtime()) and self._weights.changed():
            anchor(self.sync.slots, anew=True)  # set where all ranks have the same, and so alike on all of them
        else:
            super()._begin_local_step()
        anchor(self.sync.slots)

    def _begin_anew(self) -> None:
        for slot in self.sync.slots:
            slot.velocity = None
        anchor(self.sync.slots, anew=True)
        super()._begin_anew()

    def settled(self) -> None:
        anchor(self.sync.slots, anew=True)
        super().settled()

    def alike(self) -> Mapping[str, torch.Tensor]:
        """Returns the parameters after an exchange that makes them alike; or the start of the next outer steps, which
        is the same for every rank."""
        if self._agreed or self._algorithm.agrees:
            return super().alike()
        return {slot.name: slot.start for slot in self.sync.slots if slot.start is not None}

    def own_state(self) -> dict[str, Any] | None:
        """Returns besides, of each parameter, its value after the last exchange, and its outer momentum, if any."""
        own = super().own_state() or {}
        outer = {slot.name: _state_of(slot) for slot in self.sync.slots if slot.start is not None}
        return {**own, "outer": outer} if outer else own

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        super().load_own_state(own)
        for slot in self.sync.slots:
            if slot.name in own.get("outer", {}):
                start, *velocity = own["outer"][slot.name]
                slot.start, slot.moved, slot.posted = start.to(slot.parameter, copy=True), None, None
                slot.velocity = velocity[0].to(slot.parameter, copy=True) if velocity else None


class OuterOptimizerAtHomes(OuterOptimizer):
    """The same where homes take the outer steps, while ranks go on."""

    def _begin_post(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            note_sent(bucket.slots)

    def note_left_out(self) -> None:
        super().note_left_out()
        leave_out(self.sync.slots)

    def agree(self) -> None:
        """Takes the homes' copy. This rank's moves since its last exchange still count in the next one, if
        it gets its own parameters back."""
        starts = [(slot, slot.start.clone(), slot.moved) for slot in self.sync.slots if slot.start is not None]
        super().agree()
        for slot, before, moved in starts:
            assert slot.start is not None
            slot.moved = slot.start - before if moved is None else slot.start - before + moved
            slot.parameter.detach().copy_(slot.start)


def chosen_outer_optimizer(spec: Algorithm) -> tuple[type[OuterOptimizer], UpdateRule]:
    """Returns the schedule and the rule of an algorithm with outer steps, also of local SGD with a codec that rounds.

    A change is answered by the mean of all ranks' changes, with which each takes the outer step; at a home, which takes
    it, by where that has come to.
    """
    if isinstance(spec, NoLoCo):
        return OuterOptimizer, PairStep(*spec.outer, spec.consensus)
    if spec.at_homes:
        return OuterOptimizerAtHomes, StepAtHome(spec.mixing)
    return OuterOptimizer, OuterStep(*spec.outer, spec.mixing)


def anchor(slots: Iterable[Slot], anew: bool = False) -> None:
    """Sets the start of the next local step to the present parameters, which are the same on all ranks.

    Args:
        anew: even for slots that have a start already.
    """
    for slot in slots:
        if slot.start is None or anew:
            slot.start, slot.moved, slot.posted = slot.parameter.detach().clone(), None, None


def note_sent(slots: Iterable[Slot]) -> None:
    """Notes the parameters whose changes are about to be sent, because this rank goes on before they are answered."""
    for slot in slots:
        slot.posted = slot.parameter.detach().clone()


def leave_out(slots: Iterable[Slot]) -> None:
    """Leaves changes that were sent, and never answered, out of the next ones: they count already, or never will."""
    for slot in slots:
        if slot.posted is not None and slot.start is not None:
            slot.moved = slot.start - slot.posted
        slot.posted = None


def velocity_of(slot: Slot) -> torch.Tensor:
    """Returns the outer momentum of a slot, of zeros if it has none yet."""
    if slot.velocity is None:
        slot.velocity = torch.zeros_like(slot.parameter)
    return slot.velocity


def mix(slot: Slot, mixing: float) -> None:
    """Sets a parameter to its start, or to a mean of both in which its own value has the weight `mixing`."""
    assert slot.start is not None
    if mixing:
        slot.parameter.detach().lerp_(slot.start, 1.0 - mixing)
    else:
        slot.parameter.detach().copy_(slot.start)


def _state_of(slot: Slot) -> tuple[torch.Tensor, ...]:
    assert slot.start is not None
    start = slot.start.clone() if slot.moved is None else slot.start - slot.moved
    return (start, *(() if slot.velocity is None else (slot.velocity.clone(),)))
