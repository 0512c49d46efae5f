"""Algorithms whose ranks send gradients to parameter shards, which do not wait for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusion_rt.algorithms.algorithm import Algorithm, AlgorithmError, fraction, not_negative, positive


@dataclass(frozen=True)
class ASP(Algorithm):
    """Asynchronous SGD: w -= rate * g on arrival. `aware`: divided by the staleness (Zhang et al., arXiv
    1511.05950)."""

    name = "asp"
    is_replicable = True
    aware: bool = False


@dataclass(frozen=True)
class SSP(Algorithm):
    """Asynchronous SGD with bounded staleness (Ho et al., NIPS 2013): a rank waits while it is more than `staleness`
    steps ahead of the slowest."""

    name = "ssp"
    is_replicable = True
    staleness: int = 4
    aware: bool = False

    def __post_init__(self) -> None:
        not_negative(self, "staleness")


@dataclass(frozen=True)
class Softsync(Algorithm):
    """Asynchronous SGD that applies the mean of `contributions` gradients at once, each divided by its staleness (Zhang
    et al., arXiv 1511.05950)."""

    name = "softsync"
    is_replicable = True
    contributions: int = 2
    aware: bool = True

    def __post_init__(self) -> None:
        positive(self, "contributions")

    def home_copies(self, ranks: int) -> float:
        return 2.0  # with the sum of contributions

    def check(self, ranks: int) -> None:
        if self.contributions > ranks:
            raise AlgorithmError(
                f"{self} waits for {self.contributions} contributions, and there are {ranks} ranks; use fewer "
                "contributions, or more ranks"
            )


@dataclass(frozen=True)
class DCASGD(Algorithm):
    """Asynchronous SGD with compensated delay (Zheng et al., arXiv 1609.08326, eqs. 10 and 14): g + rate * g * g * (w -
    w of the worker). `adaptive`: divided by the root of the mean square of g, whose average decays by `decay`."""

    name = "dc_asgd"
    is_replicable = True
    variance: float = 0.04
    adaptive: bool = False
    decay: float = 0.95

    def __post_init__(self) -> None:
        not_negative(self, "variance")
        fraction(self, "decay")

    def home_copies(self, ranks: int) -> float:
        return 1.0 + ranks + self.adaptive  # with each rank's values, and the mean square


@dataclass(frozen=True)
class Hogwild(Algorithm):
    """Asynchronous SGD whose home is updated by several threads without a lock (Niu et al., arXiv 1106.5730)."""

    name = "hogwild"
    is_replicable = True


@dataclass(frozen=True)
class Partial(Algorithm):
    """Partial synchronisation, with backup workers (Chen et al., arXiv 1604.00981): the home goes on without the last
    `backup` contributions, which count in the next update instead. A rank that waits in another operation is a backup;
    if these are more, all of them are.

    `deadline`: it also goes on when median + `deadline` * MAD of the usual arrival times have passed since the first
    contribution; 0: there is none.
    """

    name = "partial"
    is_replicable = True
    backup: int = 1
    deadline: float = 0.0

    def __post_init__(self) -> None:
        not_negative(self, "backup", "deadline")

    @cached_property
    def lockstep(self) -> bool:
        return True

    def home_copies(self, ranks: int) -> float:
        return 1.0 + self.backup  # with contributions that came late, and count in the next update

    def check(self, ranks: int) -> None:
        if self.backup >= ranks:
            raise AlgorithmError(
                f"{self} would wait for no rank: there are {ranks} ranks, and {self.backup} are backups; use "
                "fewer backups, or more ranks"
            )


@dataclass(frozen=True)
class Collaborative(Algorithm):
    """Collaborative training of unequal workers (Diskin et al., arXiv 2106.10207): an update is due when `samples`
    samples have come from any ranks, and is the mean over samples."""

    name = "collaborative"
    is_replicable = True
    anywhere = True
    samples: int = 256

    def __post_init__(self) -> None:
        positive(self, "samples")

    def home_copies(self, ranks: int) -> float:
        return 2.0  # with the sum of contributions
