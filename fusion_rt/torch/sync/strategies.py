"""Strategies that an algorithm names: the signal that an optimizer posts, and how the answer is applied. (The third
strategy decides when that is done: `in_backward.py`, `later.py`, `at_step.py`.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch

from fusion_rt.algorithms import Algorithm, Apply, Signal
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
        return None if slot.start is None else slot.start - slot.parameter.detach()

    def anchor(self, slots: Iterable[Slot], anew: bool) -> None:
        for slot in slots:
            if slot.start is None or anew:
                slot.start = slot.parameter.detach().clone()


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
            slot.parameter.grad = result.to_sparse(slot.sparse) if slot.sparse else result


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
        remembers: where parameters have come to counts in the next exchange, too.
    """

    def __init__(self, rate: float, momentum: float, remembers: bool = True) -> None:
        self._rate, self._momentum, self.outer = rate, momentum, remembers

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        for slot, result in zip(slots, results, strict=True):
            assert slot.start is not None
            if self.outer:
                if slot.velocity is None:
                    slot.velocity = torch.zeros_like(slot.parameter)
                slot.velocity.mul_(self._momentum).add_(result)
                result = result + self._momentum * slot.velocity
            slot.start.sub_(result, alpha=self._rate)
            slot.parameter.detach().copy_(slot.start)
            if not self.outer:
                slot.start = None


def posted(algorithm: Algorithm) -> Posted:
    """Returns the signal of an algorithm."""
    return _POSTED[algorithm.signal]()


def applied(algorithm: Algorithm) -> Applied:
    """Returns the way in which an algorithm applies answers."""
    return OuterStep(*algorithm.outer) if algorithm.apply is Apply.OUTER else _APPLIED[algorithm.apply]()


_POSTED: dict[Signal, Callable[[], Posted]] = {
    Signal.GRADIENT: Gradients,
    Signal.PARAMETER: Parameters,
    Signal.DELTA: Differences,
}
_APPLIED: dict[Apply, Callable[[], Applied]] = {Apply.OPTIMIZER: ToOptimizer, Apply.PARAMETERS: ToParameters}
