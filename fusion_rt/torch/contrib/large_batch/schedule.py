"""The learning rate for a large batch: P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
arXiv 1706.02677, sections 2.1 (linear scaling) and 2.2 (gradual warm-up)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch

from fusion_rt.torch.core import runtime

Scaling: TypeAlias = Literal["linear", "sqrt", "none"]

_SCALINGS: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda _: 1.0}
_SAVED = ("base_lrs", "last_epoch", "_step_count", "_last_lr", "_ranks", "_batch", "_ramp", "_epochs")


class LinearScaling(torch.optim.lr_scheduler.LRScheduler):
    """Scales the rates with the batch of all ranks, after a gradual warm-up; to be stepped after each optimizer step.

    The effective batch is batch_per_rank · `hvd.size()` · `backward_passes_per_step`, and the scale is k = effective
    batch / base_batch for "linear", √k for "sqrt", 1 for "none". With e the epochs done so far, a group that was given
    the rate lr has::

        lr (1 + (scale − 1) e / warmup_epochs)    while e < warmup_epochs
        lr · scale · after(e)                     from then on

    The batch is asked for in every step. When it has changed, because ranks have come or gone, or with
    `set_backward_passes_per_step`, the scale moves to its new value linearly within the next `rewarm_steps` steps, and
    from then on an epoch of `dataset_size` has another number of steps. Epochs done stay done.

    Args:
        optimizer: the script's; the rates of its groups are those for base_batch. Give it the `DistributedOptimizer`
            where there is one, since the optimizer in it does not know its backward passes, and make it after `init`.
            With several passes the loss has to be divided by their number, as gradients are summed.
        batch_per_rank: samples in a backward pass of one rank.
        base_batch: samples in a step for which the rates were chosen.
        dataset_size: samples in an epoch of all ranks together; an epoch's steps follow, rounded up.
        steps_per_epoch: instead of it, and whatever the batch is.
        warmup_epochs: epochs of warm-up; may be a fraction, and 0 for none.
        scaling: how the rates follow the batch. "linear" is for SGD and LARS, "sqrt" for LAMB and other adaptive ones,
            "none" for `hvd.Adasum`, which adapts by itself.
        after: a factor for the rates after the warm-up, from the epochs or steps done since the start of training. It
            is not part of the state.
        after_by: which of both `after` is given: "epoch" (float, with fractions) or "step" (int).
        rewarm_steps: steps within which the scale moves after a change; 0 for at once.
        last_epoch: steps done before, as of any scheduler; -1 to begin.

    Raises:
        ValueError: an argument is out of range, or both or none of dataset_size and steps_per_epoch are given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        batch_per_rank: int,
        base_batch: int = 256,
        dataset_size: int | None = None,
        steps_per_epoch: int | None = None,
        warmup_epochs: float = 5.0,
        scaling: Scaling = "linear",
        after: Callable[[Any], float] | None = None,
        after_by: Literal["epoch", "step"] = "epoch",
        rewarm_steps: int = 100,
        last_epoch: int = -1,
    ) -> None:
        if (dataset_size is None) == (steps_per_epoch is None):
            raise ValueError(
                "LinearScaling: give one of dataset_size and steps_per_epoch, to tell how long an epoch is"
            )
        positive = {"batch_per_rank": batch_per_rank, "base_batch": base_batch, "dataset_size": dataset_size,
                    "steps_per_epoch": steps_per_epoch}  # fmt: skip
        for name, number in positive.items():
            if number is not None and number <= 0:
                raise ValueError(f"LinearScaling: {name} is {number}; it has to be above 0")
        for name, length in (("warmup_epochs", warmup_epochs), ("rewarm_steps", rewarm_steps)):
            if not length >= 0:
                raise ValueError(f"LinearScaling: {name} is {length}; it has to be 0 or more")
        if scaling not in _SCALINGS:
            raise ValueError(f"LinearScaling: scaling is {scaling!r}; it has to be one of {', '.join(_SCALINGS)}")
        if after_by not in ("epoch", "step"):
            raise ValueError(f"LinearScaling: after_by is {after_by!r}; it has to be epoch or step")
        self.batch_per_rank, self.base_batch = batch_per_rank, base_batch
        self.dataset_size, self.steps_per_epoch = dataset_size, steps_per_epoch
        self.warmup_epochs, self.rewarm_steps, self.scaling = warmup_epochs, rewarm_steps, scaling
        self.after, self.after_by = after, after_by
        self.optimizer = optimizer  # torch does so too, but what follows needs it already
        self._ranks = 1  # as it was known last
        self._batch = self._current_batch()
        self._ramp = (0, self._target(), 0)  # step at which the scale begins to move, from where, within how many steps
        self._epochs = (0, 0.0)  # a step, and the epochs that had been done by then
        super().__init__(optimizer, last_epoch)

    @property
    def effective_batch(self) -> int:
        """Samples in a step of all ranks, as of the last `step`."""
        return self._batch

    @property
    def scale(self) -> float:
        """Factor of the rates after the warm-up."""
        begin, start, steps = self._ramp
        done = self.last_epoch - begin
        return self._target() if done >= steps else start + (self._target() - start) * done / steps

    @property
    def epochs_done(self) -> float:
        """Epochs that are done, with fractions."""
        step, epochs = self._epochs
        return epochs + (self.last_epoch - step) / self._steps_in_epoch()

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the groups' rates for the next step. It is called by `step`."""
        self._follow()
        epochs, scale = self.epochs_done, self.scale
        if epochs < self.warmup_epochs:
            factor = 1.0 + (scale - 1.0) * epochs / self.warmup_epochs
        elif self.after is None:
            factor = scale
        else:
            factor = scale * self.after(epochs if self.after_by == "epoch" else self.last_epoch)
        return [float(rate) * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of training. The scheduler's arguments are not in it, so that a job with another batch
        can resume from it: it moves to its own rates within `rewarm_steps`."""
        return {name: self.__dict__[name] for name in _SAVED}

    def _follow(self) -> None:
        """Notes a change of the batch."""
        batch = self._current_batch()
        if batch == self._batch:
            return
        self.last_epoch -= 1  # the step that was just taken is the first with the new batch
        self._epochs = (self.last_epoch, self.epochs_done)
        self._ramp = (self.last_epoch, self.scale, self.rewarm_steps)
        self._batch = batch
        self.last_epoch += 1

    def _current_batch(self) -> int:
        if runtime.is_initialized():  # between leaving and coming back, the last number counts
            self._ranks = runtime.size()
        passes: int = getattr(self.optimizer, "backward_passes_per_step", 1)
        return self.batch_per_rank * self._ranks * passes

    def _target(self) -> float:
        return _SCALINGS[self.scaling](self._batch / self.base_batch)

    def _steps_in_epoch(self) -> int:
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch
        assert self.dataset_size is not None
        return math.ceil(self.dataset_size / self._batch)
