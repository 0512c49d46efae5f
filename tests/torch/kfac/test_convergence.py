"""What K-FAC is for: fewer steps where the problem is badly conditioned. Everything is seeded, in double precision."""

from __future__ import annotations

import pytest
import torch

from fusion_rt.torch.kfac import KFAC

RATES = (0.1, 0.3, 1.0)  # more diverges, less is slower yet


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [256, 20] whose features have sizes from 1 to 0.01 and all matter alike; targets [256, 3]."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(0, -2, 20, dtype=torch.float64)
    inputs = torch.randn(256, 20, generator=generator, dtype=torch.float64) * sizes
    weights = torch.randn(20, 3, generator=generator, dtype=torch.float64) / sizes[:, None]
    products = inputs @ weights
    targets = products + 0.5 * torch.tanh(products)
    return inputs, targets / targets.std()


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        return torch.nn.Linear(20, 3).double()
    return torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)).double()


def steps_to(goal: float, kind: str, lr: float, preconditioned: bool, limit: int) -> int:
    """Steps of SGD with momentum until the loss is below the goal; the limit if it does not get there."""
    inputs, targets = problem()
    model = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    kfac = KFAC(model, lr=lr) if preconditioned else None
    for step in range(limit):
        loss = (model(inputs) - targets).square().sum(1).mean() / 2
        if loss < goal:
            return step
        if not loss.isfinite():
            break
        optimizer.zero_grad()
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
    return limit


@pytest.mark.parametrize(
    ("kind", "goal"),
    [("linear", 0.15), pytest.param("mlp", 0.05, marks=pytest.mark.long)],
)
def test_it_takes_less_than_half_the_steps_of_sgd_at_its_best_rate(kind: str, goal: float) -> None:
    limit = 300
    sgd = min(steps_to(goal, kind, lr, False, limit) for lr in RATES)
    kfac = steps_to(goal, kind, 0.3, True, limit)
    assert sgd < limit
    assert kfac < sgd / 2
