"""Algorithms whose ranks take local steps, and then an outer step by how much they have moved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusion_rt.algorithms.algorithm import (
    Algorithm,
    AlgorithmError,
    Place,
    Signal,
    fraction,
    not_negative,
    positive,
)
from fusion_rt.codecs import Codec
from fusion_rt.codecs.topk import TopK


@dataclass(frozen=True)
class OuterSteps(Algorithm):
    """Ranks take `steps` local steps, and then an outer step of SGD at `outer_rate`, with Nesterov momentum
    `outer_momentum`."""

    steps: int = 500
    outer_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        positive(self, "steps", "outer_rate")
        fraction(self, "outer_momentum")

    @cached_property
    def outer(self) -> tuple[float, float]:
        return self.outer_rate, self.outer_momentum

    @cached_property
    def period(self) -> int:
        return self.steps

    def worker_copies(self, codec: Codec) -> float:
        return 2.0 if self.outer_momentum else 1.0


@dataclass(frozen=True)
class OuterFragments(OuterSteps):
    """Each of the model's fragments takes outer steps of its own, by how much ranks have moved."""

    signal = Signal.DELTA
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "fragments")
        fraction(self, "mix")
        not_negative(self, "delay")
        if self.fragments > self.steps:
            raise AlgorithmError(
                f"{self.name} sends one of its fragments in a step, and {self.fragments} fragments do not fit into "
                f"{self.steps} steps"
            )
        if self.delay > self.steps:
            raise AlgorithmError(
                f"delay of {self.name} cannot be above its {self.steps} steps, since a fragment has to be back before "
                f"it is sent again, and {self.delay} is"
            )

    @cached_property
    def pieces(self) -> int:
        return self.fragments

    @cached_property
    def lag(self) -> int:
        return self.delay

    @cached_property
    def mixing(self) -> float:
        return self.mix


@dataclass(frozen=True)
class DiLoCo(OuterFragments):
    """DiLoCo (Douillard et al., arXiv 2311.08105): every `steps` local steps, an outer step of SGD with Nesterov
    momentum on the mean of the ranks' changes, at `outer_rate` and `outer_momentum`.

    Streaming DiLoCo (Douillard et al., arXiv 2501.18512): the model goes in `fragments`, each every `steps` steps, but
    at times of their own; local steps go on for `delay` steps until a fragment's outer step is taken; and then a rank
    keeps `mix` of its own parameters, and has 1 - `mix` of those of the outer step.
    """

    name = "diloco"
    place = Place.NOWHERE
    synchronous = True


@dataclass(frozen=True)
class SparseLoCo(DiLoCo):
    """SparseLoCo (Sarfi et al., arXiv 2508.15706): DiLoCo with error feedback in place of an outer momentum. Each chunk
    of 4,096 elements sends the share `density` of its residual, in two bits; the rest decays by `decay`."""

    name = "sparseloco"
    steps: int = 30
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    density: float = 64 / 4096
    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "density", "decay")
        for field in ("density", "decay"):
            if getattr(self, field) > 1:
                raise AlgorithmError(f"{field} of {self.name} is a share of at most 1, not {getattr(self, field)!r}")

    @cached_property
    def codec(self) -> str:
        return str(
            TopK(density=self.density, chunk=4096, value="int2", decay=self.decay, minimum=0, exclude="")
        )  # the paper's tensors are all alike


@dataclass(frozen=True)
class Decoupled(OuterFragments):
    """Decoupled DiLoCo (Douillard et al., arXiv 2604.21428): learners post how much they have moved, and go on; the
    home of each bucket takes an outer step when `quorum` of them have posted, with the mean weighted by samples and by
    samples a step, times their share of all learners; and a learner takes what comes of it when it is there.

    What is posted is old when it counts, by an outer step and more. So `outer_momentum` is smaller than that of DiLoCo,
    with which a quadratic loss diverges: all in all the home moves by outer_rate / (1 - outer_momentum), which is 1, of
    what the learners do.

    `quorum`: 0 stands for more than half of the ranks. `grace`: the home then waits for the others, for this share of
    the usual time between two outer steps.
    """

    name = "decoupled"
    is_replicable = True
    waits_for_answers = False
    steps: int = 100
    outer_momentum: float = 0.3
    delay: int = 1
    quorum: int = 0
    grace: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "delay")
        not_negative(self, "quorum", "grace")

    def worker_copies(self, codec: Codec) -> float:
        return 2.0  # the start, and the post, until it is answered

    def home_copies(self, ranks: int) -> float:
        return 2.0  # with the outer momentum

    def check(self, ranks: int) -> None:
        if self.quorum > ranks:
            raise AlgorithmError(
                f"{self} waits for {self.quorum} learners, and there are {ranks} ranks; use a smaller quorum, or more "
                "ranks"
            )
