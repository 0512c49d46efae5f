"""Models that sleep for the time for which others compute: two cores are then enough for many workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = tuple[int, ...]


class _Touch(torch.autograd.Function):
    """Passes a number on, as if it depended on the parameters, whose gradients are made in memory that is there."""

    @staticmethod
    def forward(context: Any, value: Any, layer: Any, *parameters: Any) -> Any:
        context.layer = layer
        time.sleep(layer.seconds / 3)
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        layer = context.layer
        time.sleep(layer.seconds * 2 / 3)
        for memory in layer.memory:
            layer.fill(memory)
        return gradient, None, *(memory.view_as(memory) for memory in layer.memory)


class _Layer(torch.nn.Module):
    def __init__(self, shapes: Sequence[Shape], seconds: float, fill: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(shape)))
        self.memory = [torch.zeros(shape) for shape in shapes]  # used again in each step
        self.seconds = seconds
        self.fill = fill

    def forward(self, value: Any) -> Any:
        return _Touch.apply(value, self, *self.parameters())  # type: ignore[no-untyped-call]


class SleepingModel(torch.nn.Module):
    """A model of layers that make gradients of their parameters, and compute nothing.

    Args:
        layers: shapes of the parameters of each layer.
        compute: seconds that a step takes, a third of them forward; every layer takes as long.
        fill: puts numbers into a gradient.

    Called without an argument, it returns a number that can be differentiated.
    """

    def __init__(self, layers: Sequence[Sequence[Shape]], compute: float, fill: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(_Layer(shapes, compute / len(layers), fill) for shapes in layers))

    def forward(self) -> Any:
        return self.layers(torch.zeros(()))
