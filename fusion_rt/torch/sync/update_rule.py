"""The rule by which an optimizer's parameters change together with those of other ranks.

Each family of algorithms has its rules beside its schedule: `in_backward.py` (all-reduce), `handed.py`, and in
`at_step/` `at_homes.py` (parameter servers), `local_steps.py` (means and gossip), `outer_optimizer.py` and `adasum.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from fusion_rt.torch.sync.slots import Slot


class UpdateRule(ABC):
    """The value that a rank sends of each parameter, and the use of the answer.

    Attributes:
        to_gradients: the answer becomes `p.grad`, which may be its place in the arena.
    """

    to_gradients = False

    @abstractmethod
    def value(self, slot: Slot) -> torch.Tensor | None:
        """Returns the value to send of a slot, in its parameter's shape; None means zeros."""

    @abstractmethod
    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        """Puts answers, each in its parameter's shape and on its device, where they belong.

        Args:
            added: they are changes, and not values.
        """


class ToParameters(UpdateRule):
    """Answers are parameters, or changes of them."""

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        parameters = [slot.parameter.detach() for slot in slots]
        if added:
            torch._foreach_add_(parameters, list(results))
        else:
            torch._foreach_copy_(parameters, list(results))
