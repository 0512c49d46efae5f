"""Training algorithms, as a person chooses them: by class, or as text in a setting: `ssp(staleness=4)`.

What each does is in `fusiond.algorithms`, on the side of the daemon. Here is what both sides have to know: what a
worker posts, where a bucket's authoritative copy (its home) is, and the arguments. A choice is frozen, compares equal
to its like, and has a canonical text, so that it can be part of a plan, about which all ranks agree.
"""

from __future__ import annotations

import enum
from abc import ABC
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from fusion_rt.codecs import CODECS, Codec
from fusion_rt.codecs.topk import TopK
from fusion_rt.core import mixing, spec_parser
from fusion_rt.core.errors import FusionError
from fusion_rt.core.plugins import Registry


class AlgorithmError(FusionError, ValueError):
    """An algorithm does not exist, has arguments that cannot be used, or makes no sense with what else was chosen."""


class Signal(enum.Enum):
    """The kind of values that a worker posts."""

    GRADIENT = "gradients"
    PARAMETER = "parameters"
    DELTA = "changes of parameters"
    CONSENSUS = "changes of parameters, and what they are counted from"


class Apply(enum.Enum):
    """The use that a worker makes of an answer."""

    OPTIMIZER = "the script's optimizer steps with it, as with a gradient"
    PARAMETERS = "it becomes the parameters, or is added to them"
    OUTER = "an outer optimizer steps with it, from where the last one came to"
    PAIR = "an outer optimizer steps with it, which is a change towards another rank's"
    ADOPTED = "changes are counted from it, and parameters mixed with it"


class Place(enum.Enum):
    """The place of a bucket's home."""

    NOWHERE = "nowhere"
    """Ranks combine what they post, and all get the same."""
    SHARD = "shard"
    """On one node, chosen when the plan is made."""
    REPLICA = "replica"
    """Each rank's node has one, for that rank's own copy."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """A way in which the ranks' work becomes one model. The fields of a subclass are the arguments in its text.

    Attributes:
        name: in the text: `name` or `name(argument=value, ...)`.
        signal: what a worker posts.
        apply: what a worker does with the answer.
        place: where the home of a bucket is.
        synchronous: every rank waits for every rank in each exchange.
        anywhere: workers may be anywhere, so that a node's share of the homes is what its link carries.
        encodes: homes encode themselves what they send, also to homes on the same node.
        waits_for_answers: a worker waits for an answer that is due; else it takes it when it is there, and posts
            nothing more of that bucket until then.

    Raises:
        AlgorithmError: an argument is out of range (from a subclass's `__post_init__`).
    """

    name: ClassVar[str]
    signal: ClassVar[Signal] = Signal.GRADIENT
    apply: ClassVar[Apply] = Apply.PARAMETERS
    place: ClassVar[Place] = Place.SHARD
    synchronous: ClassVar[bool] = False
    anywhere: ClassVar[bool] = False
    encodes: ClassVar[bool] = False
    waits_for_answers: ClassVar[bool] = True

    @property
    def codec(self) -> str:
        """The text of the codec that it is made for, which is taken where none is chosen; empty if there is none."""
        return ""

    @property
    def at_homes(self) -> bool:
        """Says whether buckets have homes, to which contributions go."""
        return self.place is not Place.NOWHERE

    @property
    def sums_gradients(self) -> bool:
        """Says whether every step all-reduces gradients, and nothing is kept at homes."""
        return not self.at_homes and self.signal is Signal.GRADIENT

    @property
    def at_shards(self) -> bool:
        """Says whether each parameter has a home, on one of the nodes."""
        return self.place is Place.SHARD

    @property
    def steps_at_home(self) -> bool:
        """Says whether homes take the steps of the script's optimizer, by gradients."""
        return self.at_homes and self.signal is Signal.GRADIENT

    @property
    def outer(self) -> tuple[float, float]:
        """Rate and momentum of an outer step, where there is one."""
        return 1.0, 0.0

    @property
    def mixing(self) -> float:
        """The weight of a worker's own parameters, where it mixes them with those of an outer step."""
        return 0.0

    @property
    def remembers_weights(self) -> bool:
        """Says whether a home, or the next difference, depends on parameters as a worker has left them."""
        return self.at_shards or self.signal in (Signal.DELTA, Signal.CONSENSUS)

    @property
    def stale(self) -> bool:
        """Says whether most gradients are of older parameters than those that they change."""
        return self.steps_at_home and not self.lockstep

    def due(self, steps: int) -> list[int]:
        """Returns the fragments that a worker exchanges when it has taken so many local steps. Each has its own offset
        within the period, so that they are spread evenly over it, and the last one is due at its end."""
        period, count = self.period, self.pieces
        return [piece for piece in range(count) if steps % period == period * (piece + 1) // count % period]

    @property
    def period(self) -> int:
        """Local steps from one exchange of a fragment to the next."""
        return 1

    @property
    def pieces(self) -> int:
        """The number of fragments: bucket i is in fragment i modulo this."""
        return 1

    @property
    def lag(self) -> int:
        """Local steps that a worker takes before it has to have the answer to what it posted; 0: it waits at once."""
        return 0

    @property
    def overlaps(self) -> bool:
        """Says whether the worker takes its next steps while an exchange is under way."""
        return self.lag > 0

    @property
    def agrees(self) -> bool:
        """Says whether all ranks have the same parameters right after each exchange."""
        return self.synchronous and self.pieces == 1 and not self.overlaps and not self.mixing

    @property
    def lockstep(self) -> bool:
        """Says whether a home answers (nearly) all ranks at once, when (nearly) all of them have contributed."""
        return self.synchronous

    def check(self, ranks: int) -> None:
        """Raises `AlgorithmError`, or `MixingError`, when so many ranks cannot do this."""
        del ranks

    def implementation(self) -> Any:
        """Returns the class that does it in the daemon, a subclass of `fusiond.algorithms.HomeAlgorithm`; it is called
        with this choice and the number of ranks. Nobody asks where the `place` is nowhere: ranks all-reduce what they
        post. An algorithm of another package imports it here, because only daemons need it; of those that are built in,
        the daemon knows."""
        raise NotImplementedError(f"the algorithm {self.name} does not say what a daemon does")

    def __str__(self) -> str:
        """The canonical text."""
        return spec_parser.write(self.name, self)


# --- every rank waits for every rank ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Synchronous SGD by all-reduce: every rank applies the mean of all gradients."""

    name = "allreduce"
    apply = Apply.OPTIMIZER
    place = Place.NOWHERE
    synchronous = True


@dataclass(frozen=True)
class BSP(Algorithm):
    """Synchronous SGD by parameter shards (bulk synchronous parallel): w -= rate * mean(g) at the home."""

    name = "bsp"
    synchronous = True


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
        _positive(self, "steps")
        _not_negative(self, "after")

    @property
    def period(self) -> int:
        return self.steps

    def due(self, steps: int) -> list[int]:
        return [0] if steps <= self.after else super().due(steps)


@dataclass(frozen=True)
class _OuterSteps(Algorithm):
    """Ranks take local steps, and each fragment of the model an outer step of SGD with Nesterov momentum, by how much
    ranks have moved."""

    signal = Signal.DELTA
    steps: int = 500
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        _positive(self, "steps", "outer_rate", "fragments")
        _fraction(self, "outer_momentum", "mix")
        _not_negative(self, "delay")
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

    @property
    def outer(self) -> tuple[float, float]:
        return self.outer_rate, self.outer_momentum

    @property
    def period(self) -> int:
        return self.steps

    @property
    def pieces(self) -> int:
        return self.fragments

    @property
    def lag(self) -> int:
        return self.delay

    @property
    def mixing(self) -> float:
        return self.mix


@dataclass(frozen=True)
class DiLoCo(_OuterSteps):
    """DiLoCo (Douillard et al., arXiv 2311.08105): every `steps` local steps, an outer step of SGD with Nesterov
    momentum on the mean of the ranks' changes, at `outer_rate` and `outer_momentum`.

    Streaming DiLoCo (Douillard et al., arXiv 2501.18512): the model goes in `fragments`, each every `steps` steps, but
    at times of their own; local steps go on for `delay` steps until a fragment's outer step is taken; and then a rank
    keeps `mix` of its own parameters, and has 1 - `mix` of those of the outer step.
    """

    name = "diloco"
    apply = Apply.OUTER
    place = Place.NOWHERE
    synchronous = True


@dataclass(frozen=True)
class SparseLoCo(DiLoCo):
    """SparseLoCo (Sarfi et al., arXiv 2508.15706): DiLoCo with error feedback in place of an outer momentum. Of what
    waits, which decays by `decay`, the share `density` of each chunk of 4,096 elements is sent, in two bits."""

    name = "sparseloco"
    steps: int = 30
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    density: float = 64 / 4096
    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "density", "decay")
        for field in ("density", "decay"):
            if getattr(self, field) > 1:
                raise AlgorithmError(f"{field} of {self.name} is a share of at most 1, not {getattr(self, field)!r}")

    @property
    def codec(self) -> str:
        return str(
            TopK(density=self.density, chunk=4096, value="int2", decay=self.decay, minimum=0, exclude="")
        )  # the paper's tensors are all alike


# --- gradients to shards ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ASP(Algorithm):
    """Asynchronous SGD: w -= rate * g on arrival. `aware`: divided by the staleness (Zhang et al., arXiv
    1511.05950)."""

    name = "asp"
    aware: bool = False


@dataclass(frozen=True)
class SSP(Algorithm):
    """Asynchronous SGD with bounded staleness (Ho et al., NIPS 2013): a rank waits while it is more than `staleness`
    steps ahead of the slowest."""

    name = "ssp"
    staleness: int = 4
    aware: bool = False

    def __post_init__(self) -> None:
        _not_negative(self, "staleness")


@dataclass(frozen=True)
class Softsync(Algorithm):
    """Asynchronous SGD that applies the mean of `contributions` gradients at once, each divided by its staleness (Zhang
    et al., arXiv 1511.05950)."""

    name = "softsync"
    contributions: int = 2
    aware: bool = True

    def __post_init__(self) -> None:
        _positive(self, "contributions")

    def check(self, ranks: int) -> None:
        if self.contributions > ranks:
            raise AlgorithmError(f"{self} waits for {self.contributions} contributions, and there are {ranks} ranks")


@dataclass(frozen=True)
class DCASGD(Algorithm):
    """Asynchronous SGD with compensated delay (Zheng et al., arXiv 1609.08326, eqs. 10 and 14): g + rate * g * g * (w -
    w of the worker). `adaptive`: divided by the root of the mean square of g, whose average decays by `decay`."""

    name = "dc_asgd"
    variance: float = 0.04
    adaptive: bool = False
    decay: float = 0.95

    def __post_init__(self) -> None:
        _not_negative(self, "variance")
        _fraction(self, "decay")


@dataclass(frozen=True)
class Hogwild(Algorithm):
    """Asynchronous SGD whose home is updated by several threads without a lock (Niu et al., arXiv 1106.5730)."""

    name = "hogwild"


@dataclass(frozen=True)
class Partial(Algorithm):
    """Partial synchronisation, with backup workers (Chen et al., arXiv 1604.00981): the home goes on without the last
    `backup` contributions, which count in the next update instead. A rank that waits in another operation is a backup;
    if these are more, all of them are.

    `deadline`: it also goes on when median + `deadline` * MAD of the usual arrival times have passed since the first
    contribution; 0: there is none.
    """

    name = "partial"
    backup: int = 1
    deadline: float = 0.0

    def __post_init__(self) -> None:
        _not_negative(self, "backup", "deadline")

    @property
    def lockstep(self) -> bool:
        return True

    def check(self, ranks: int) -> None:
        if self.backup >= ranks:
            raise AlgorithmError(
                f"{self} would wait for nobody: there are {ranks} ranks, and {self.backup} are backups"
            )


@dataclass(frozen=True)
class Collaborative(Algorithm):
    """Collaborative training of unequal workers (Diskin et al., arXiv 2106.10207): an update is due when `samples`
    samples have come, and is the mean over samples, whoever they came from."""

    name = "collaborative"
    anywhere = True
    samples: int = 256

    def __post_init__(self) -> None:
        _positive(self, "samples")


# --- outer steps that wait for nobody ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoupled(_OuterSteps):
    """Decoupled DiLoCo (Douillard et al., arXiv 2604.21428): learners post how much they have moved, and go on; the
    home of each bucket takes an outer step when `quorum` of them have posted, with the mean weighted by samples and by
    samples a step, and a learner takes what comes of it when it is there.

    `quorum`: 0 stands for more than half of the ranks. `grace`: the home then waits for the others, for this share of
    the usual time between two outer steps.
    """

    name = "decoupled"
    apply = Apply.ADOPTED
    waits_for_answers = False
    steps: int = 100
    delay: int = 1
    quorum: int = 0
    grace: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "delay")
        _not_negative(self, "quorum", "grace")

    def check(self, ranks: int) -> None:
        if self.quorum > ranks:
            raise AlgorithmError(f"{self} waits for {self.quorum} learners, and there are {ranks} ranks")


# --- elastic averaging ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EASGD(Algorithm):
    """Elastic averaging (Zhang, Choromanska and LeCun, arXiv 1412.6651): every `steps` steps d = alpha (x_i - x); x_i
    -= d; x += d. With a momentum in the worker's optimizer it is EAMSGD.

    `alpha`: 0 stands for .9 / ranks. `synchronous_home`: all ranks' differences are added at once, as in its eq. 4.
    """

    name = "easgd"
    signal = Signal.PARAMETER
    steps: int = 10
    alpha: float = 0.0
    synchronous_home: bool = False

    def __post_init__(self) -> None:
        _positive(self, "steps")
        _not_negative(self, "alpha")

    @property
    def period(self) -> int:
        return self.steps

    @property
    def lag(self) -> int:
        return 1

    @property
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


# --- gossip -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gossip(Algorithm):
    """Ranks mix their parameters with their neighbours' in a graph (`fusion_rt.core.mixing`)."""

    signal = Signal.PARAMETER
    place = Place.REPLICA
    topology: str = "ring"

    @property
    def lag(self) -> int:
        return 1


@dataclass(frozen=True)
class DPSGD(_Gossip):
    """D-PSGD (Lian et al., arXiv 1705.09056): x_i = sum_j W_ij x_j - rate * g(x_i); the mixing overlaps the
    gradient."""

    name = "dpsgd"

    def check(self, ranks: int) -> None:
        mixing.check_dpsgd(mixing.parse(self.topology, ranks))


@dataclass(frozen=True)
class ADPSGD(_Gossip):
    """AD-PSGD (Lian et al., arXiv 1710.06952): odd ranks average with an even neighbour, atomically, while both
    compute."""

    name = "adpsgd"

    def check(self, ranks: int) -> None:
        mixing.check_pairwise(mixing.parse(self.topology, ranks))


@dataclass(frozen=True)
class SGP(_Gossip):
    """Stochastic gradient push (Assran et al., arXiv 1811.10792): mixing by any column-stochastic matrix, with push-sum
    weights that undo its bias."""

    name = "sgp"
    topology: str = "exponential"

    def check(self, ranks: int) -> None:
        mixing.check_push_sum(mixing.parse(self.topology, ranks))


@dataclass(frozen=True)
class Choco(_Gossip):
    """CHOCO-SGD (Koloskova et al., arXiv 1902.00340, algorithm 2): neighbours get what a codec makes of the difference
    to what they know; `gamma` is the step towards their mean."""

    name = "choco"
    encodes = True
    gamma: float = 0.5

    def __post_init__(self) -> None:
        _positive(self, "gamma")

    def check(self, ranks: int) -> None:
        graph = mixing.parse(self.topology, ranks)
        mixing.check_dpsgd(graph)
        if graph.period != 1:
            raise AlgorithmError(f"{self} needs a graph that stays as it is, which {self.topology} does not")


@dataclass(frozen=True)
class NoLoCo(_Gossip):
    """NoLoCo (Kolehmainen et al., arXiv 2506.10911): every `steps` local steps, an outer step with the mean change of a
    pair of ranks, another pair each time, whose momentum also draws them to each other by `consensus`."""

    name = "noloco"
    signal = Signal.CONSENSUS
    apply = Apply.PAIR
    topology: str = "random-pairs"
    steps: int = 100
    outer_rate: float = 0.7
    outer_momentum: float = 0.5
    consensus: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "steps", "outer_rate")
        _fraction(self, "outer_momentum")
        if not self.outer_momentum < self.consensus < 2 + self.outer_momentum:
            raise AlgorithmError(
                f"consensus of noloco has to be between outer_momentum and outer_momentum + 2 for ranks to stay "
                f"together (arXiv 2506.10911), and {self.consensus!r} is not"
            )

    def check(self, ranks: int) -> None:
        mixing.check_dpsgd(mixing.parse(self.topology, ranks))

    @property
    def outer(self) -> tuple[float, float]:
        return self.outer_rate, self.outer_momentum

    @property
    def period(self) -> int:
        return self.steps

    @property
    def lag(self) -> int:
        return 0


AsynchronousDecentralized = ADPSGD

_ALL: tuple[type[Algorithm], ...] = (
    AllReduce, BSP, LocalSGD, DiLoCo, SparseLoCo, ASP, SSP, Softsync, DCASGD, Hogwild, Partial, Collaborative, EASGD,
    EAWild, DPSGD, ADPSGD, SGP, Choco, NoLoCo, Decoupled,
)  # fmt: skip
ALGORITHMS: Registry[Algorithm] = Registry("algorithm", "fusion_rt.algorithms", Algorithm, _ALL)


@lru_cache(maxsize=256)
def parse(text: str) -> Algorithm:
    """The algorithm that is written as `text`.

    Raises:
        AlgorithmError: there is none; the sentence has the nearest one, or says which argument is wrong.
    """
    try:
        return spec_parser.parse(text, ALGORITHMS)
    except spec_parser.SpecError as error:
        raise AlgorithmError(str(error)) from error


def packages(algorithm: Algorithm, codec: Codec) -> tuple[str, ...]:
    """The packages that bring them, with versions; without what is built in."""
    return tuple(sorted({ALGORITHMS.package(algorithm.name), CODECS.package(codec.name)} - {""}))


def check_use(algorithm: Algorithm, codec: Codec, op: str, ranks: int) -> None:
    """Raises `AlgorithmError`, or `MixingError`, where a combination makes no sense, with the reason.

    Args:
        codec: of the buckets.
        op: how gradients are combined.
        ranks: how many there are.
    """
    algorithm.check(ranks)
    if algorithm.sums_gradients:
        return
    if op != "average":
        raise AlgorithmError(f"{algorithm} takes means, and cannot combine by {op}; use op=Average, or allreduce")
    if codec.signs:
        raise AlgorithmError(
            f"the codec {codec} makes signs of a sum of gradients, and {algorithm} adds up {algorithm.signal.value} "
            "otherwise; use allreduce, or leave out signed"
        )
    if codec.only_all_reduced and algorithm.at_homes:
        raise AlgorithmError(f"the codec {codec} {codec.only_all_reduced}, which {algorithm} does not; use topk, say")
    if algorithm.encodes:
        if not codec.stateful:
            raise AlgorithmError(
                f"{algorithm.name} sends what a codec selects of a difference, and {codec} leaves nothing out; use "
                "topk, or dpsgd"
            )
    elif codec.stateful and algorithm.signal in (Signal.PARAMETER, Signal.CONSENSUS):
        raise AlgorithmError(
            f"{algorithm} posts parameters, of which the codec {codec} would leave out most; use fp16 or bf16, or "
            "choco, which is made for it, or diloco, whose ranks post changes (with outer_rate=1 and outer_momentum=0 "
            "it is local SGD)"
        )


def _positive(algorithm: Algorithm, *fields: str) -> None:
    for field in fields:
        if not getattr(algorithm, field) > 0:
            raise AlgorithmError(
                f"{field} of {algorithm.name} has to be above 0, and {getattr(algorithm, field)!r} is not"
            )


def _not_negative(algorithm: Algorithm, *fields: str) -> None:
    for field in fields:
        if not getattr(algorithm, field) >= 0:
            raise AlgorithmError(
                f"{field} of {algorithm.name} cannot be {getattr(algorithm, field)!r}: it is 0 or more"
            )


def _fraction(algorithm: Algorithm, *fields: str) -> None:
    for field in fields:
        if not 0 <= getattr(algorithm, field) < 1:
            raise AlgorithmError(
                f"{field} of {algorithm.name} is from 0 up to 1, and not {getattr(algorithm, field)!r}"
            )
