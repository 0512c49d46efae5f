"""Selection on a GPU, as `gpu_selection` uses it: by `kernels.cuda`, on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fusion_rt.codecs.base import Array
from fusion_rt.kernels.cuda.side import SideSelector, TorchLayer
from fusion_rt.kernels.selection import Range
from fusion_rt.torch.core.sides import Selector


class PinnedLayer(TorchLayer):
    """A layer that copies to memory of the host that is pinned already, as a part of the arena."""

    def pin(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def unpin(self, pinned: torch.Tensor) -> None:
        return


class CudaSide:
    """One GPU, which selects on a stream of its own.

    Args:
        index: its number.
    """

    def __init__(self, index: int) -> None:
        self._layer = PinnedLayer(torch, index)

    def beside(self) -> AbstractContextManager[Any]:
        return self._layer.beside()

    def follow(self) -> None:
        self._layer.follow()

    def zeros(self, n: int) -> torch.Tensor:
        made: torch.Tensor = self._layer.zeros(n, "float32")
        return made

    def selector(
        self,
        memory: tuple[torch.Tensor, torch.Tensor | None],
        groups: Sequence[Sequence[Range]],
        out: Array,
        rooms: Sequence[int],
        momentum: float,
        nesterov: bool,
    ) -> Selector:
        elements = len(memory[0])
        selector: Any = SideSelector(self._layer, elements, groups, out, rooms, momentum, nesterov, memory=memory)
        return selector  # type: ignore[no-any-return]
