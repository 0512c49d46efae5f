"""Contributions of a layer: its inputs and the gradients of its outputs as Kronecker factors, and its gradient.

For one example a layer does s_t = W a_t at locations t = 1 ... T: T = 1 for a `Linear` of a matrix, the positions of
the kernel for a `Conv2d`, whose a_t are the patches, and what lies in between for a `Linear` of [N, ..., features].
The block of the Fisher matrix is approximated as A ⊗ G, with g_t the gradient of the example's loss by s_t:

    A = mean over examples and locations of a_t a_t^T,      G = mean over examples of sum over locations of g_t g_t^T

R. Grosse, J. Martens (1602.01407, theorem 1) write the factor T, which comes from locations that are uncorrelated and
alike, with A instead; only the product counts. A bias is the weight of a further input that is always 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch.nn.parameter import is_lazy


class Layer:
    """A layer whose gradient is preconditioned.

    Attributes:
        name: its name in the model.
        module: the layer.
        weight, bias: its parameters; `bias` is None where there is none, or none that is trained.
        a_size, g_size: numbers of rows of A, with the bias's input, and of G.
        dtype: of the factors: the weight's, but single precision at least.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        self.name = name
        self.module = module
        self.weight = weight
        self.bias = bias if bias is not None and bias.requires_grad else None
        self.g_size = weight.shape[0]
        self.a_size = weight[0].numel() + (self.bias is not None)
        self.dtype = torch.promote_types(weight.dtype, torch.float32)

    def factors(
        self, inputs: torch.Tensor, gradient: torch.Tensor, loss_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns A [a_size, a_size] and G [g_size, g_size] of one batch; None if it is empty.

        Args:
            inputs: of the layer.
            gradient: of the loss, by the layer's outputs. The loss is the mean over the batch, the first dimension, so
                that the gradients of the single examples' losses are larger by the size of the batch.
            loss_scale: the factor by which the loss has been multiplied besides.
        """
        with torch.autocast(inputs.device.type, enabled=False):
            rows, gradients = self._input_rows(inputs.to(self.dtype)), self._gradient_rows(gradient.to(self.dtype))
            examples, locations, _ = rows.shape
            if not examples * locations:
                return None
            rows, gradients = rows.flatten(0, 1), gradients.flatten(0, 1)
            if self.bias is not None:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            of_inputs = (rows.T @ rows).div_(examples * locations)
            of_gradients = (gradients.T @ gradients).mul_(examples / loss_scale**2)
        return of_inputs, of_gradients

    def gradient(self) -> torch.Tensor | None:
        """Returns the gradient of weight and bias as one matrix [g_size, a_size]; None if the layer took no part."""
        weight = self.weight.grad
        if weight is None or (self.bias is not None and self.bias.grad is None):
            return None
        matrix = weight.reshape(self.g_size, -1).to(self.dtype)
        if self.bias is not None:
            assert self.bias.grad is not None
            matrix = torch.cat([matrix, self.bias.grad.view(-1, 1).to(self.dtype)], dim=1)
        return matrix

    def assign(self, matrix: torch.Tensor) -> None:
        """Writes a matrix [g_size, a_size] into the gradients of weight and bias, in place."""
        assert self.weight.grad is not None
        if self.bias is not None:
            assert self.bias.grad is not None
            self.bias.grad.copy_(matrix[:, -1])
            matrix = matrix[:, :-1]
        self.weight.grad.copy_(matrix.reshape(self.weight.shape))

    def _input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        """[examples, locations, inputs of the layer without the bias's]."""
        raise NotImplementedError

    def _gradient_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """[examples, locations, g_size]."""
        raise NotImplementedError


class LinearLayer(Layer):
    """`torch.nn.Linear`, of [features], [N, features] or [N, ..., features]."""

    def _input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        return _by_example(inputs)

    def _gradient_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        return _by_example(gradient)


class Conv2dLayer(Layer):
    """`torch.nn.Conv2d` without groups, of [N, C, height, width] or [C, height, width]; with any padding and stride."""

    module: torch.nn.Conv2d

    def _input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        conv = self.module
        images = inputs if inputs.dim() == 4 else inputs.unsqueeze(0)
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        if images.numel():
            images = torch.nn.functional.pad(images, self._padding(), mode=mode)
        else:
            return images.new_empty(0, 0, self.weight[0].numel())
        patches = torch.nn.functional.unfold(images, conv.kernel_size, conv.dilation, 0, conv.stride)
        return patches.transpose(1, 2)

    def _gradient_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        images = gradient if gradient.dim() == 4 else gradient.unsqueeze(0)
        return images.flatten(2).transpose(1, 2)

    def _padding(self) -> list[int]:
        """Columns to the left and to the right, rows above and below."""
        conv = self.module
        sides = []
        for dim in (1, 0):
            if conv.padding == "same":
                both = conv.dilation[dim] * (conv.kernel_size[dim] - 1)
                sides += [both // 2, both - both // 2]
            elif conv.padding == "valid":
                sides += [0, 0]
            else:
                sides += [int(conv.padding[dim])] * 2
        return sides


def find_layers(model: torch.nn.Module, skip: Iterable[str] = ()) -> tuple[list[Layer], list[str]]:
    """Returns the layers of a model that can be preconditioned, and what else it has with parameters that are trained.

    Args:
        model: whose parameters have their shapes (it has run once, if it has lazy modules).
        skip: names of modules, with all that is in them, and of classes, which are to be left alone.

    Returns:
        Layers in the order of the model; and sentences about those left alone that `skip` does not name.

    Raises:
        ValueError: a layer has no shape yet.
    """
    skipped = tuple(skip)
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    layers: list[Layer] = []
    left_alone = []
    for name, module in model.named_modules():
        trained = [p for p in module._parameters.values() if p is not None and p.requires_grad]
        if not trained or _is_named(name, module, skipped):
            continue
        if any(is_lazy(parameter) for parameter in trained):
            raise ValueError(f"layer {name!r} has no shape yet; run the model on a batch before K-FAC is made for it")
        reason = _reason_against(module, users)
        if reason:
            left_alone.append(f"{name or 'the model itself'} ({type(module).__name__}: {reason})")
        elif isinstance(module, torch.nn.Linear):
            layers.append(LinearLayer(name, module))
        else:
            layers.append(Conv2dLayer(name, module))
    return layers, left_alone


def _reason_against(module: torch.nn.Module, users: Counter[int]) -> str:
    """Returns why a module with parameters cannot be preconditioned; empty if it can."""
    if not isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
        return "neither Linear nor Conv2d"
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None:
        return "its weight is computed from other parameters"
    if not weight.requires_grad:
        return "its weight is not trained"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if any(p is not None and users[id(p)] > 1 for p in (weight, bias)):
        return "it shares a parameter with another module"
    if isinstance(module, torch.nn.Conv2d) and module.groups != 1:
        return f"{module.groups} groups"
    return ""


def _is_named(name: str, module: torch.nn.Module, names: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") or type(module).__name__ == one for one in names)


def _by_example(tensor: torch.Tensor) -> torch.Tensor:
    """Reshapes [features], [N, features] or [N, ..., features] to [N, locations, features]."""
    if tensor.dim() == 1:
        return tensor.view(1, 1, -1)
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)
