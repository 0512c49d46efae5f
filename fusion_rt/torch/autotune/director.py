"""What decides about the next plan: the interface, and what all that do so measure with."""

from __future__ import annotations

import logging
import statistics
import sys
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from fusion_rt import wire

UNMEASURED = 2  # steps of a plan that say nothing: in the first nothing overlaps, in the second memory is new
_log = logging.getLogger("fusion_rt.autotune")


def tell(text: str) -> None:
    """Tells people, on rank 0: through logging, where that is set up for it, else on standard error."""
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info("%s", text)
    else:
        print(f"fusion_rt: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Circumstances:
    """Where gradients are reduced, and which.

    Attributes:
        slots: number of ranks on each node that takes part.
        latency, seconds_per_byte: of the worst link between nodes (s); 0 where there is none.
        threshold: bytes of the largest bucket, by the settings.
        group: name of the plans.
        reduction: how gradients are combined.
        tensors: in the order in which they arrived; with their element types.
        may_be_late: updates can be applied one step late.
    """

    slots: tuple[int, ...]
    latency: float
    seconds_per_byte: float
    threshold: int
    group: str
    reduction: wire.Reduction
    tensors: tuple[wire.TensorSpec, ...]
    may_be_late: bool = False


class Step(NamedTuple):
    """How long a step took, from the end of one to the end of the next (s).

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
    def complete(self) -> bool:
        """Whether there are enough; there are not when ranks have joined meanwhile."""
        return len(self._found) == self._count

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(step.seconds for step in self._found)

    @property
    def computing(self) -> float:
        """The median of what was not waited."""
        return statistics.median(step.seconds - step.waited for step in self._found)

    @property
    def waited(self) -> float:
        """The median."""
        return statistics.median(step.waited for step in self._found)

    @property
    def reducing(self) -> float:
        """The median."""
        return statistics.median(step.reducing for step in self._found)


class Director(ABC):
    """Says what plans are to be, one after the other; on the lowest rank of a group only."""

    @abstractmethod
    def next(self) -> wire.Tuning:
        """What the plan is to be that is about to be made."""

    @abstractmethod
    def stepped(self, step: Step) -> None:
        """A step has been taken by that plan; the first one is the one in which it was made."""


def nbytes_of(tensors: tuple[wire.TensorSpec, ...]) -> list[int]:
    """Bytes of each that is not sparse."""
    from fusion_rt.dtypes import DTYPES

    found = []
    for tensor in tensors:
        if not tensor.sparse:
            elements = 1
            for length in tensor.shape:
                elements *= length
            found.append(elements * DTYPES[tensor.dtype].itemsize)
    return found
