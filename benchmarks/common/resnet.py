"""The parameters of ResNet-50, and a module with them whose backward pass takes hardly any time."""

from __future__ import annotations

from typing import Any

LR = 1e-3


def shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of ResNet-50's parameters in the order of their use: 161 tensors, 25,557,032 elements."""
    found: list[tuple[int, ...]] = []

    def convolution(inputs: int, outputs: int, size: int) -> None:
        found.extend([(outputs, inputs, size, size), (outputs,), (outputs,)])  # with its batch norm's scale and shift

    convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    found.extend([(1000, 2048), (1000,)])
    return found


def silent_model(device: Any = "cpu") -> Any:
    """Makes a module with the parameters on a device; its forward pass returns a number, its backward pass gives
    gradients."""
    import torch

    class Touch(torch.autograd.Function):
        """Passes a number on, as if it depended on the parameter, whose gradient is made in `memory`."""

        @staticmethod
        def forward(context: Any, value: Any, parameter: Any, memory: Any) -> Any:
            context.memory = memory
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            context.memory.fill_(1e-3)
            return gradient, context.memory.view_as(context.memory), None

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = [torch.zeros(shape, device=device) for shape in shapes()]
            self.layers = torch.nn.ParameterList(map(torch.nn.Parameter, made))
            self.memory = [torch.zeros_like(parameter) for parameter in made]

        def forward(self) -> Any:
            value = torch.zeros((), device=device)
            for parameter, memory in zip(self.layers, self.memory, strict=True):
                value = Touch.apply(value, parameter, memory)  # type: ignore[no-untyped-call]
            return value

    return Model()
