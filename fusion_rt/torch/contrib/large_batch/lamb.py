"""LAMB: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962."""

from __future__ import annotations

from typing import Any

import torch

from fusion_rt.torch.contrib.large_batch.adaptive import Exclude, LayerAdaptive, Norms, checked, scaled_


class LAMB(LayerAdaptive):
    """Adam whose step is as long as the tensor it changes, times the rate (algorithm 2)::

        m ← β₁ m + (1 − β₁) g          v ← β₂ v + (1 − β₂) g²
        r = m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + eps)
        w ← w − lr φ(‖w‖) / ‖r + λ w‖ (r + λ w)

    The ratio is 1 where φ(‖w‖) or ‖r + λ w‖ is 0, as in the authors' implementation.

    Args:
        params: as of any `torch.optim.Optimizer`.
        lr: the rate.
        betas: β₁ and β₂, from 0 to below 1.
        eps: keeps r finite.
        weight_decay: λ.
        bias_correction: whether m and v are divided by 1 − βᵗ, as in the algorithm.
        clip: γ_l and γ_u of φ(z) = min(max(z, γ_l), γ_u); None for φ(z) = z.
        exclude_1d, norms: see `LayerAdaptive`. What is excluded takes Adam's step: its ratio is 1, and λ = 0.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        clip: tuple[float, float] | None = None,
        exclude_1d: Exclude = True,
        norms: Norms | None = None,
    ) -> None:
        checked("LAMB", {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"LAMB: betas are {betas}; both have to be from 0 to below 1")
        if clip is not None and not 0.0 <= clip[0] <= clip[1]:
            raise ValueError(f"LAMB: clip is {clip}; it has to be a lower and an upper bound, 0 or more")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "clip": clip,
        }  # fmt: skip
        super().__init__(params, defaults, exclude_1d, norms)

    def _updates(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        states = [self._state_of(parameter) for parameter in parameters]
        for state in states:
            state["step"] += 1
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        first, second = group["betas"]
        means, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        roots, updates = list(torch._foreach_sqrt(squares)), means
        if group["bias_correction"]:
            torch._foreach_div_(roots, [(1 - second ** state["step"]) ** 0.5 for state in states])
            updates = list(torch._foreach_div(means, [1 - first ** state["step"] for state in states]))
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(updates, roots))
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        return updates

    def _trust(self, group: dict[str, Any], weights: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        lengths = weights if group["clip"] is None else weights.clamp(*group["clip"])
        return torch.where((lengths == 0) | (updates == 0), 1.0, lengths / updates)

    def _apply(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        updates: list[torch.Tensor],
        ratios: list[torch.Tensor] | None,
    ) -> None:
        scaled_(updates, float(group["lr"]), ratios)
        torch._foreach_sub_(parameters, updates)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0  # a number: its powers are needed in full precision, on the host
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
