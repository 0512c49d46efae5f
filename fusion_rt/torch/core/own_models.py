"""Models that a rank trains by steps of its own: a warning where no other rank ever had a part in one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from fusion_rt.algorithms import Algorithm
from fusion_rt.torch.core.runtime import at_the_end, runtime


@dataclass
class OwnModel:
    """The record of an optimizer with local steps; it is kept when that is gone, as it is at the end of a `main()`.

    Attributes:
        algorithm: its text.
        period: local steps between its exchanges.
        steps: that this rank has taken.
        shared: something has been exchanged, or all ranks have agreed upon a model.
    """

    algorithm: str
    period: int
    steps: int = 0
    shared: bool = False
    all: ClassVar[list[OwnModel]] = []

    @classmethod
    def of(cls, algorithm: Algorithm) -> OwnModel:
        """Makes the record of a new optimizer."""
        cls.all.append(cls(str(algorithm), algorithm.period))
        return cls.all[-1]


def warn() -> None:
    """Warns, on rank 0, of models of which no other rank has had a part, and forgets all."""
    alone = [own for own in OwnModel.all if own.steps and not own.shared]
    OwnModel.all.clear()
    for own in alone if runtime().rank == 0 else []:
        warnings.warn(
            f"{own.algorithm} exchanges every {own.period} steps, and has exchanged nothing in the {own.steps} that "
            "were taken: each rank has trained a model of its own; choose fewer steps between exchanges, or call "
            "hvd.consensus() on all ranks when training ends",
            stacklevel=2,
        )


at_the_end.append(warn)
