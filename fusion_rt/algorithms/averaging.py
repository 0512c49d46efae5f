"""Algorithms of elastic averaging: parameters of ranks and a home draw each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusion_rt.algorithms.algorithm import Algorithm, AlgorithmError, Signal, not_negative, positive


@dataclass(frozen=True)
class EASGD(Algorithm):
    """Elastic averaging (Zhang, Choromanska and LeCun, arXiv 1412.6651): every `steps` steps d = alpha (x_i - x); x_i
    -= d; x += d. With a momentum in the worker's optimizer it is EAMSGD.

    `alpha`: 0 stands for .9 / ranks. `synchronous_home`: all ranks' differences are added at once, as in its eq. 4.
    """

    name = "easgd"
    signal = Signal.PARAMETER
    is_replicable = True
    steps: int = 10
    alpha: float = 0.0
    synchronous_home: bool = False

    def __post_init__(self) -> None:
        positive(self, "steps")
        not_negative(self, "alpha")

    @cached_property
    def period(self) -> int:
        return self.steps

    @cached_property
    def lag(self) -> int:
        return 1

    @cached_property
    def lockstep(self) -> bool:
        return self.synchronous_home


@dataclass(frozen=True)
class EAWild(EASGD):
    """EASGD whose home is updated by several threads without a lock ("Rethinking the Value of Asynchronous Solvers",
    2020)."""

    name = "ea_wild"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.synchronous_home:
            raise AlgorithmError("ea_wild is asynchronous; use easgd(synchronous_home=True)")
