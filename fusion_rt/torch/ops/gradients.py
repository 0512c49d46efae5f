"""Operations through which autograd goes: each with the operation that its gradients take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fusion_rt import wire
from fusion_rt.torch.ops.signatures import check_tensor

_Result = TypeVar("_Result")


def differentiable(
    kind: wire.Kind,
    run: Callable[..., _Result],
    back: Callable[..., Sequence[torch.Tensor]],
    *tensors: torch.Tensor,
) -> _Result:
    """Runs an operation, differentiably if any of its tensors needs a gradient.

    Args:
        kind: of the operation.
        run: the operation on these tensors; returns a tensor, or a tuple of them.
        back: called with the gradients of the results of `run`; returns those of the tensors.

    Raises:
        ValueError: one of the tensors is something else.
    """
    for tensor in tensors:
        check_tensor(tensor, kind)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Operation.apply(run, back, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    return run(*tensors)


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], back: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.back = back
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.back(*gradients)
