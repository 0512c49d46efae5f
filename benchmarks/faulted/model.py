"""The model that is trained under faults: its parameters, and the time that a step computes."""

from __future__ import annotations

import time

import torch

WIDTH = 700  # of two layers: about a million parameters
BATCH = 8


class Training:
    """A model with an optimizer, and steps whose computation is mostly waiting, as if a GPU did it.

    Args:
        compute: seconds that the backward pass of a step takes, beside the small model's own.
    """

    def __init__(self, compute: float) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self.forward: torch.nn.Module = self.model  # or a wrapper of it
        self._compute = compute

    def loss(self, step: int, rank: int) -> torch.Tensor:
        """Computes the loss of a step's batch."""
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        data = torch.randn(BATCH, WIDTH, generator=generator)
        time.sleep(self._compute)
        found: torch.Tensor = (self.forward(data) - data.roll(1, 1)).square().mean()
        return found

    def warm_up(self) -> None:
        """Takes a forward and a backward pass that change nothing: the first ones of a process take longer, and others
        would wait for a newcomer's.
        """
        self.loss(0, 0).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()

    def fingerprint(self) -> int:
        """Returns a number that each step which counts changes, equal where parameters are equal bit by bit."""
        return sum(int(parameter.detach().view(torch.int32).sum()) for parameter in self.model.parameters())
