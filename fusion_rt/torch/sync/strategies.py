"""Strategies that an algorithm names: the signal that an optimizer posts, and how the answer is applied. (The third
strategy decides when that is done: `in_backward.py`, `overlap/later.py`, `at_step/`.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch

from fusion_rt.algorithms import Algorithm, Apply, NoLoCo, Signal
from fusion_rt.codecs import Codec
from fusion_rt.torch.sync.slots import Slot


class Posted(ABC):
    """A signal: the value that is posted for each parameter."""

    @abstractmethod
    def value(self, slot: Slot) -> torch.Tensor | None:
        """Returns the value to post for a slot; None means zeros."""

    def anchor(self, slots: Iterable[Slot], anew: bool) -> None:
        """Sets the start of the next local step to the present parameters, which are the same on all ranks.

        Args:
            anew: even for slots that have a start already.
        """
        return

    def note(self, slots: Iterable[Slot]) -> None:
        """Notes what is about to be posted, while this rank goes on, and may never hear what became of it."""
        return

    def leave_out(self, slots: Iterable[Slot]) -> None:
        """Has what was noted, and not answered since, be no part of what is posted next: it counts already, or never
        will."""
        return


class Gradients(Posted):
    """This rank's gradients, as they are in `p.grad`."""

    def value(self, slot: Slot) -> torch.Tensor | None:
        return slot.parameter.grad


class Parameters(Posted):
    """This rank's parameters."""

    def value(self, slot: Slot) -> torch.Tensor | None:
        return slot.parameter.detach()


class Differences(Posted):
    """Differences between the parameters after the last exchange and this rank's present ones."""

    def value(self, slot: Slot) -> torch.Tensor | None:
        if slot.start is None:
            return None
        difference = slot.start - slot.parameter.detach()
        return difference if slot.moved is None else difference.sub_(slot.moved)

    def anchor(self, slots: Iterable[Slot], anew: bool) -> None:
        for slot in slots:
            if slot.start is None or anew:
                slot.start, slot.moved, slot.posted = slot.parameter.detach().clone(), None, None

    def note(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            slot.posted = slot.parameter.detach().clone()

    def leave_out(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot.posted is not None and slot.start is not None:
                slot.moved = slot.start - slot.posted
            slot.posted = None


class Positions(Differences):
    """This rank's part of the mean change and of the mean start: rate * (parameter - start) + consensus * start, of
    which a mean of ranks is all that NoLoCo needs to know of them."""

    def __init__(self, rate: float, consensus: float) -> None:
        self._rate, self._consensus = rate, consensus

    def value(self, slot: Slot) -> torch.Tensor | None:
        if slot.start is None:
            return None
        return (slot.parameter.detach() * self._rate).add_(slot.start, alpha=self._consensus - self._rate)


class Applied(ABC):
    """A way to apply the answer.

    Attributes:
        to_gradients: it becomes `p.grad`, which may be its place in the arena.
        outer: an outer optimizer, whose state belongs into checkpoints, goes on from it.
    """

    to_gradients = outer = False

    @abstractmethod
    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        """Puts results, each in its parameter's shape and on its device, where they belong.

        Args:
            added: they are changes, and not values.
        """


class ToOptimizer(Applied):
    """Results are gradients, with which the script's optimizer steps."""

    to_gradients = True

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        for slot, result in zip(slots, results, strict=True):
            slot.take(result.to_sparse(slot.sparse) if slot.sparse else result)


class ToParameters(Applied):
    """Results are parameters, or changes of them."""

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        parameters = [slot.parameter.detach() for slot in slots]
        if added:
            torch._foreach_add_(parameters, list(results))
        else:
            torch._foreach_copy_(parameters, list(results))


class OuterStep(Applied):
    """Results are differences; parameters go on from where they were after the last exchange by a step of SGD with
    Nesterov momentum (arXiv 2311.08105, algorithm 1).

    Args:
        rate, momentum: of this step.
        mixing: the weight of the parameters as they are now, in place of those that the step comes to.
        remembers: where parameters have come to counts in the next exchange, too.
    """

    def __init__(self, rate: float, momentum: float, mixing: float = 0.0, remembers: bool = True) -> None:
        self._rate, self._momentum, self._mixing, self.outer = rate, momentum, mixing, remembers

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        for slot, result in zip(slots, results, strict=True):
            assert slot.start is not None
            if self._momentum:
                velocity = velocity_of(slot).mul_(self._momentum).add_(result)
                result = result + self._momentum * velocity
            slot.start.sub_(result, alpha=self._rate)
            mix(slot, self._mixing)
            if not self.outer:
                slot.start = None


class PairStep(Applied):
    """Results are changes to what `Positions` posted, towards the pair's mean; parameters go on from an outer step
    whose momentum has both the mean change and the pull of the ranks towards each other (arXiv 2506.10911).

    Args:
        rate, momentum: of this step.
    """

    outer = True

    def __init__(self, rate: float, momentum: float) -> None:
        self._rate, self._momentum = rate, momentum

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        for slot, result in zip(slots, results, strict=True):
            assert slot.start is not None
            assert added
            change = slot.parameter.detach() - slot.start
            velocity = velocity_of(slot).mul_(self._momentum).add_(change, alpha=self._rate).add_(result)
            slot.start.add_(velocity)
            mix(slot, 0.0)


class Adopted(Applied):
    """Results are where an outer step elsewhere has come to, or changes of that since the last one: in place of where
    the parameters were when they were posted. What they have moved by since stays, and counts in the next post.

    Args:
        mixing: the weight of the parameters as they were posted.
    """

    outer = True

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


def strategies(algorithm: Algorithm, codec: Codec) -> tuple[Posted, Applied]:
    """Returns the signal of an algorithm, and the way in which it applies answers.

    Where all ranks take the mean of their parameters, and a codec rounds, it is their differences to the last mean that
    travel: the parameters themselves are not rounded then, and a step that is small beside them is not lost.
    """
    if algorithm.signal is Signal.PARAMETER and not algorithm.at_homes and not codec.lossless:
        return Differences(), OuterStep(1.0, 0.0)
    return _POSTED[algorithm.signal](algorithm), _APPLIED[algorithm.apply](algorithm)


def _positions(algorithm: Algorithm) -> Posted:
    assert isinstance(algorithm, NoLoCo)
    return Positions(algorithm.outer_rate, algorithm.consensus)


_POSTED: dict[Signal, Callable[[Algorithm], Posted]] = {
    Signal.GRADIENT: lambda algorithm: Gradients(),
    Signal.PARAMETER: lambda algorithm: Parameters(),
    Signal.DELTA: lambda algorithm: Differences(),
    Signal.CONSENSUS: _positions,
}
_APPLIED: dict[Apply, Callable[[Algorithm], Applied]] = {
    Apply.OPTIMIZER: lambda algorithm: ToOptimizer(),
    Apply.PARAMETERS: lambda algorithm: ToParameters(),
    Apply.OUTER: lambda algorithm: OuterStep(*algorithm.outer, algorithm.mixing),
    Apply.PAIR: lambda algorithm: PairStep(*algorithm.outer),
    Apply.ADOPTED: lambda algorithm: Adopted(algorithm.mixing),
}
