"""LARS: Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", arXiv 1708.03888."""

from __future__ import annotations

from typing import Any

import torch

from fusion_rt.torch.contrib.large_batch.adaptive import Exclude, LayerAdaptive, Norms, checked, scaled_


class LARS(LayerAdaptive):
    """Momentum SGD whose learning rate is fitted to each tensor (algorithm 1; the trust ratio λ is equation 6)::

        λ = c ‖w‖ / (‖g‖ + β ‖w‖ + eps)
        v ← m v + lr λ (g + β w)
        w ← w − v                               (nesterov: w − m v − lr λ (g + β w))

    λ is 1 where ‖w‖ or ‖g‖ is 0, as in the authors' implementation. As in the paper, and unlike in `torch.optim.SGD`,
    v holds the rates of the steps that it comes from, so a new rate counts for new gradients only.

    Args:
        params: as of any `torch.optim.Optimizer`.
        lr: the global rate; 1 to 30 for thousands of samples a step, since c makes it small.
        momentum: m. Without it there is no v.
        weight_decay: β, within λ.
        nesterov: looks ahead by the momentum; not in the paper.
        trust_coefficient: c.
        eps: keeps λ finite.
        exclude_1d, norms: see `LayerAdaptive`. What is excluded has λ = 1 and β = 0.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 1e-9,
        exclude_1d: Exclude = True,
        norms: Norms | None = None,
    ) -> None:
        numbers = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient,
            "eps": eps,
        }  # fmt: skip
        checked("LARS", numbers)
        if nesterov and not momentum:
            raise ValueError("LARS: nesterov needs a momentum above 0")
        super().__init__(params, {**numbers, "nesterov": nesterov}, exclude_1d, norms)

    def _updates(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _trust(self, group: dict[str, Any], weights: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        denominator = updates + group["weight_decay"] * weights + group["eps"]
        ratios = group["trust_coefficient"] * weights / denominator
        return torch.where((weights == 0) | (updates == 0), 1.0, ratios)

    def _apply(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        updates: list[torch.Tensor],
        ratios: list[torch.Tensor] | None,
    ) -> None:
        steps = list(torch._foreach_add(updates, parameters, alpha=group["weight_decay"]))
        scaled_(steps, float(group["lr"]), ratios)
        momentum = group["momentum"]
        if momentum:
            for parameter in parameters:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            velocities = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, steps)
            if group["nesterov"]:
                torch._foreach_add_(steps, velocities, alpha=momentum)
            else:
                steps = velocities
        torch._foreach_sub_(parameters, steps)
