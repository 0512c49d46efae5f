"""One method's training on this rank, as it is timed and tested."""

from __future__ import annotations

import time
from typing import Any

import torch

import fusion_rt.torch as hvd
from benchmarks.common.training import Task


class Contestant:
    """A task, and the optimizer that learns it in one way.

    Args:
        task: with this rank's data.
        optimizer: of the task's model; wrapped, or of this rank alone.
    """

    def __init__(self, task: Task, optimizer: Any) -> None:
        self.task = task
        self.optimizer = optimizer
        self._own = 0.0  # seconds of forward and backward pass

    def step(self, at_least: float = 0.0, scaler: Any = None, overflows: bool = False) -> None:
        """Takes a step, in which it computes for so long (s), or for longer: it sleeps what forward and backward pass
        of the step before have left of that.

        Args:
            scaler: a `GradScaler`, which scales the loss.
            overflows: so that it does not have the step taken.
        """
        time.sleep(max(0.0, at_least - self._own))
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.task.loss(self.task.model)
        if scaler is not None:
            loss = scaler.scale(loss * torch.inf if overflows else loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self._own = time.perf_counter() - began
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def drain(self) -> None:
        """Waits until no communication is under way."""
        if hasattr(self.optimizer, "drain"):
            self.optimizer.drain()

    def loss(self) -> float:
        """Returns the loss of the mean of all ranks' models over held-out text; each rank tests a part."""
        with hvd.averaged(self.optimizer, model=self.task.model):
            mine = self.task.test()[0]
        return float(hvd.allreduce(torch.tensor(mine, dtype=torch.float64)))
