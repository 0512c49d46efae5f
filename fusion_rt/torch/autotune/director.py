"""Applies settings to a running job and measures them: the one way of `--autotune` and `--auto`, which judge."""

from __future__ import annotations

import logging
import math
import statistics
import sys
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec import structs

from fusion_rt import wire
from fusion_rt.choice.candidates import Setting
from fusion_rt.choice.codec_costs import ALLREDUCE
from fusion_rt.core.cost import CostModel
from fusion_rt.core.dtypes import DTYPES

UNMEASURED = 2  # steps of a plan that say nothing: in the first nothing overlaps, in the second memory is new
_MOST_WORDS = 4096  # characters of a reason in a plan
_log = logging.getLogger("fusion_rt.autotune")


def tell(text: str) -> None:
    """Tells people, on rank 0: through logging, where that is set up for it, else on standard error."""
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info("%s", text)
    else:
        print(f"fusion_rt: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Circumstances:
    """The hosts that reduce gradients, and these gradients.

    Attributes:
        slots: number of ranks on each node that takes part.
        latency, seconds_per_byte: of the worst link between nodes (s); 0 where there is none.
        threshold: bytes of the largest bucket, by the settings.
        group: name of the plans.
        reduction: how gradients are combined.
        tensors: in the order in which they arrived; with their element types.
        may_be_late: updates can be applied one step late.
        may_step_locally: the job can go on by another algorithm, by which ranks take local steps.
        ring: see `prediction.Conditions`.
    """

    slots: tuple[int, ...]
    latency: float
    seconds_per_byte: float
    threshold: int
    group: str
    reduction: wire.Reduction
    tensors: tuple[wire.TensorSpec, ...]
    may_be_late: bool = False
    may_step_locally: bool = False
    ring: CostModel | None = None


class Step(NamedTuple):
    """The time that a step took, from the end of one to the end of the next (s).

    Attributes:
        seconds: in all.
        waited: for which the script was kept waiting for gradients.
        reducing: from the first bucket that was sent to the last one that came back; 0 where that cannot be said.
    """

    seconds: float
    waited: float
    reducing: float


class Sample:
    """The last `count` steps of a plan, without the first `unmeasured`."""

    def __init__(self, count: int, unmeasured: int = UNMEASURED) -> None:
        self.steps = unmeasured + count
        self._left = unmeasured
        self._count = count
        self._found: deque[Step] = deque(maxlen=count)

    def add(self, step: Step) -> None:
        """One has been taken."""
        if self._left > 0:
            self._left -= 1
        else:
            self._found.append(step)

    @property
    def is_complete(self) -> bool:
        """Tells whether there are enough steps; there are not when ranks have joined meanwhile."""
        return len(self._found) == self._count

    @property
    def median(self) -> Step:
        """The median of each figure (s)."""
        return Step(*map(statistics.median, zip(*self._found, strict=True)))

    @property
    def computing(self) -> float:
        """The median of the time that was not waited (s)."""
        return statistics.median(step.seconds - step.waited for step in self._found)


class Trial(NamedTuple):
    """A setting that is to hold for the next plan.

    Attributes:
        setting: how its buckets are made and travel.
        why: it was chosen, for people.
        unmeasured: steps before those that count.
        is_last: nothing is tried after it.
    """

    setting: Setting
    why: str
    unmeasured: int = UNMEASURED
    is_last: bool = False


class Judge(Protocol):
    """Chooses settings: by measuring them, or by predicting first."""

    def first(self) -> Trial:
        """The setting to begin with."""

    def measured(self, sample: Sample) -> Trial:
        """The setting after the one before has been measured."""


class Director:
    """Applies one setting after the other to a running job, and measures each; on the lowest rank of a group only.

    Args:
        judge: chooses the settings.
        count: steps that are measured of each.
    """

    def __init__(self, judge: Judge, count: int) -> None:
        self._judge = judge
        self._count = count
        self._trial: Trial | None = None
        self._before: Setting | None = None  # that was measured last
        self._passes_on = False  # to another algorithm, after the present plan
        self._sample = Sample(count)

    def next(self, algorithm: str = ALLREDUCE) -> wire.Tuning:
        """The tuning of the plan that is about to be made, of this algorithm. Where the setting to be measured has
        another one, this plan is as the one before, lasts for one exchange, and says by which ranks go on then."""
        if self._trial is None:
            self._trial = self._judge.first()
        elif self._trial.is_last or self._passes_on:
            pass
        elif self._sample.is_complete:
            self._before, self._trial = self._trial.setting, self._judge.measured(self._sample)
        else:  # cut short: ranks have joined meanwhile
            self._trial = self._trial._replace(unmeasured=UNMEASURED)
        trial, period, why = self._trial, self._trial.setting.period, self._trial.why[:_MOST_WORDS]
        self._sample = Sample(-(-self._count // period), -(-trial.unmeasured // period))
        self._passes_on = trial.setting.algorithm != algorithm
        if self._passes_on:
            assert self._before is not None
            return structs.replace(self._before.tuning(1, why), then=trial.setting.algorithm)
        return trial.setting.tuning(0 if trial.is_last else self._sample.steps, why)

    def stepped(self, step: Step) -> None:
        """A step has been taken by that plan; the first one is the one in which it was made."""
        self._sample.add(step)


def nbytes_of(tensors: tuple[wire.TensorSpec, ...]) -> list[int]:
    """Bytes of each tensor that is not sparse."""
    return [math.prod(one.shape) * DTYPES[one.dtype].itemsize for one in tensors if not one.sparse]
