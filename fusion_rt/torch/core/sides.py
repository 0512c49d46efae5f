"""Interfaces of selection from gradients on their device, for `kernels.cuda` and for tests without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fusion_rt.codecs.base import Array
from fusion_rt.kernels.selection import Range


class Selector(Protocol):
    """Selects from groups of elements of a bucket, step by step, as `kernels.cuda.side.SideSelector` does."""

    def start(self, gradient: torch.Tensor, ks: Sequence[int], *, at_once: bool = False) -> None:
        """Queues a step: adds the gradient to the residual where the sum is finite, takes the k largest of each group
        out, and copies them to the host, with whether all of it could be added.

        Args:
            at_once: work queued next may change the residual; otherwise `finish` may have to finish the step.
        """

    def ready(self) -> bool:
        """Tells whether the step is done."""

    def finish(self) -> object:
        """Waits for the end of the step."""


class Side(Protocol):
    """A device that selects beside training."""

    def beside(self) -> AbstractContextManager[Any]:
        """A context in which work on tensors is queued where selections are."""

    def follow(self) -> None:
        """Orders later work there after the work queued for training."""

    def zeros(self, n: int) -> torch.Tensor:
        """Makes a tensor of zeros, float32 [n], which are written there."""

    def selector(
        self,
        memory: tuple[torch.Tensor, torch.Tensor | None],
        groups: Sequence[Sequence[Range]],
        out: Array,
        rooms: Sequence[int],
        momentum: float,
        nesterov: bool,
    ) -> Selector:
        """Makes a selector from groups of ranges of a residual, with or without a velocity.

        Args:
            out: int32, pinned: the words of `codecs.worker_selection` for all groups.
            rooms: the most that can be selected of each.
        """
