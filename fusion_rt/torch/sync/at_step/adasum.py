"""The family of `op=Adasum`: steps that ranks have taken by themselves are combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from fusion_rt import wire
from fusion_rt.torch.sync import backward
from fusion_rt.torch.sync.at_step.local_steps import LocalSteps
from fusion_rt.torch.sync.at_step.outer_optimizer import FromStart, anchor
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.step_schedule import TOO_MANY, Schedule


class CombinedSteps(FromStart):
    """x = s - Adasum(s - x), where s is the parameter before this step, which all ranks have alike."""

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        for slot, result in zip(slots, results, strict=True):
            assert slot.start is not None
            slot.parameter.detach().copy_(slot.start.sub_(result))
            slot.start = None


class AdasumAtStep(LocalSteps):
    """Combines steps that ranks have taken by themselves, with `op=Adasum`: the changes of their parameters.

    Horovod does so parameter by parameter within the backward pass, and has the parameters half-changed while it runs;
    here they change in `step`, all at once, which also suits an optimizer that looks at several of them. All ranks have
    to take every step: it is not to be used with a `GradScaler`, which skips it where gradients overflow, and here that
    is decided by each rank's own.
    """

    own_gradients = local = False

    def __init__(self, options: Options, trained: Trained, passes: int) -> None:
        super().__init__(options, trained, passes)
        self.survives = False  # the steps of this rank are not taken back

    def arrived(self, slot: Slot) -> None:
        super().arrived(slot)
        if self.backward is None or self.backward() is None:
            if self.passes_left <= 0:
                raise AssertionError(TOO_MANY)
            backward.running().add(self)
        if slot.bucket is None:
            self.sync.arrivals.append(slot)

    def set_passes(self, passes: int) -> None:
        self.passes = self.passes_left = passes

    def skip_synchronize(self) -> NoReturn:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def zeroed(self) -> None:
        self.ended()

    def ended(self) -> None:
        self.passes_left = self.passes
        self.backward = None

    def own_state(self) -> dict[str, Any] | None:
        return None

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        return Schedule.terms(self, slots)

    @property
    def _leaves_out_joined(self) -> bool:
        return False

    def _begin_local_step(self) -> None:
        super()._begin_local_step()
        anchor(self.sync.slots, anew=True)
