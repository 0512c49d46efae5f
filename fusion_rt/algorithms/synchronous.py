"""Algorithms in which all ranks wait for all ranks, and combine gradients or parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusion_rt.algorithms.algorithm import Algorithm, Place, Signal, not_negative, positive
from fusion_rt.codecs import Codec


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Synchronous SGD by all-reduce: every rank applies the mean of all gradients."""

    name = "allreduce"
    place = Place.NOWHERE
    synchronous = True


@dataclass(frozen=True)
class BSP(Algorithm):
    """Synchronous SGD by parameter shards (bulk synchronous parallel): w -= rate * mean(g) at the home."""

    name = "bsp"
    synchronous = True
    is_replicable = True


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Local SGD (Stich, arXiv 1805.09767): `steps` local steps, then all ranks take the mean of their parameters.

    `after`: post-local SGD (Lin et al., arXiv 1808.07217): an exchange in every step until so many have been taken.
    """

    name = "local_sgd"
    signal = Signal.PARAMETER
    place = Place.NOWHERE
    synchronous = True
    steps: int = 16
    after: int = 0

    def __post_init__(self) -> None:
        positive(self, "steps")
        not_negative(self, "after")

    @cached_property
    def period(self) -> int:
        return self.steps

    def worker_copies(self, codec: Codec) -> float:
        return 0.0 if codec.lossless else 1.0  # else it is the change since the last exchange that travels

    def due(self, steps: int) -> list[int]:
        return [0] if steps <= self.after else super().due(steps)
