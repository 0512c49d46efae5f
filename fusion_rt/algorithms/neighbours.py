"""Algorithms of gossip: ranks mix their parameters with those of their neighbours in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusion_rt.algorithms.algorithm import Algorithm, AlgorithmError, Place, Signal, not_negative
from fusion_rt.algorithms.outer_steps import OuterSteps
from fusion_rt.codecs import Codec
from fusion_rt.core import mixing


@dataclass(frozen=True)
class OnGraph(Algorithm):
    """Ranks mix their parameters with their neighbours' in a graph (`fusion_rt.core.mixing`)."""

    signal = Signal.PARAMETER
    place = Place.REPLICA
    topology: str = "ring"

    @cached_property
    def lag(self) -> int:
        return 1

    def graph(self, ranks: int) -> mixing.Mixing:
        """Returns the graph of so many ranks, the same on all. A subclass may have one that no text stands for.

        Raises:
            MixingError: there is none.
        """
        return mixing.parse(self.topology, ranks)

    def receivers(self, ranks: int) -> int:
        if ranks <= mixing.MAX_RANKS:
            graph = self.graph(ranks)
        else:
            graph = mixing.Mixing(self.topology, ranks, *mixing.GRAPHS[self.topology](ranks))
        return max(len(graph.incoming(rank, clock)) for rank in range(ranks) for clock in range(graph.period))


@dataclass(frozen=True)
class DPSGD(OnGraph):
    """D-PSGD (Lian et al., arXiv 1705.09056): x_i = sum_j W_ij x_j - rate * g(x_i); the mixing overlaps the
    gradient."""

    name = "dpsgd"

    def home_copies(self, ranks: int) -> float:
        return 0.0 if self.graph(ranks).symmetric else 1.0  # else it is push-sum

    def check(self, ranks: int) -> None:
        mixing.check_dpsgd(self.graph(ranks))


@dataclass(frozen=True)
class ADPSGD(OnGraph):
    """AD-PSGD (Lian et al., arXiv 1710.06952): odd ranks average with an even neighbour, atomically, while both
    compute."""

    name = "adpsgd"

    def home_copies(self, ranks: int) -> float:
        return 2.0  # with the changes that the worker has not got

    def check(self, ranks: int) -> None:
        mixing.check_pairwise(self.graph(ranks))


@dataclass(frozen=True)
class SGP(OnGraph):
    """Stochastic gradient push (Assran et al., arXiv 1811.10792): mixing by any column-stochastic matrix, with push-sum
    weights that undo its bias."""

    name = "sgp"
    topology: str = "exponential"

    def check(self, ranks: int) -> None:
        mixing.check_push_sum(self.graph(ranks))


@dataclass(frozen=True)
class Choco(OnGraph):
    """CHOCO-SGD (Koloskova et al., arXiv 1902.00340, algorithm 2): neighbours get the encoded difference to their copy;
    `gamma` is the step towards their mean; 0 stands for the one that suits the codec and the graph (`step`)."""

    name = "choco"
    selects = True
    gamma: float = 0.0

    def __post_init__(self) -> None:
        not_negative(self, "gamma")

    def check(self, ranks: int) -> None:
        graph = self.graph(ranks)
        mixing.check_dpsgd(graph)
        if graph.period != 1:
            raise AlgorithmError(f"{self} needs a graph that stays as it is, which {self.topology} does not")
        mixing.check_symmetric(graph, "CHOCO-SGD")

    def home_copies(self, ranks: int) -> float:
        neighbours = len(self.graph(ranks).incoming(0, 0))
        return 2.0 + neighbours  # its value; the copy that others have of it, and those that it has of them

    def check_codec(self, codec: Codec, ranks: int) -> None:
        contraction = codec.contraction()
        if not contraction > 0:
            raise AlgorithmError(
                f"{self} needs a codec of which every message takes away a share of the difference, and {codec} does "
                "not say that it does; use the codec topk, for example, or the algorithm dpsgd"
            )
        most = 2 * self.step(contraction, self.graph(ranks))
        if self.gamma > most:
            raise AlgorithmError(
                f"gamma={self.gamma:.6g} of choco is too much for the codec {codec} on the topology {self.topology} of "
                f"{ranks} ranks, where ranks can move apart from {most:.3g} on; leave gamma out, which gives "
                f"{most / 2:.3g}, or use a codec that sends more"
            )

    def step(self, contraction: float, graph: mixing.Mixing) -> float:
        """Returns the gamma that suits a codec: contraction / |I - W|_2.

        The copies follow the parameters as if each was told anew every 1 / contraction steps. Between two such times a
        rank moves by gamma / contraction x |I - W|_2 for each unit that it is apart from others: with 1 it just gets
        there, and from 2 on it overshoots by more than it was apart. Theorem 2 of arXiv 1902.00340 proves convergence
        for any codec and any start with a gamma that is smaller by a factor of about 16 / gap^2.

        Args:
            contraction: see `Codec.contraction`.
            graph: that of the ranks.
        """
        return contraction / (graph.beta or 1.0)


@dataclass(frozen=True)
class NoLoCo(OuterSteps, OnGraph):
    """NoLoCo (Kolehmainen et al., arXiv 2506.10911): every `steps` local steps, an outer step with the mean change of a
    pair of ranks, another pair each time, whose momentum also draws them to each other by `consensus`."""

    name = "noloco"
    signal = Signal.CONSENSUS
    topology: str = "random-pairs"
    steps: int = 100
    outer_momentum: float = 0.5
    consensus: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outer_momentum < self.consensus < 2 + self.outer_momentum:
            raise AlgorithmError(
                f"consensus of noloco has to be between outer_momentum and outer_momentum + 2 for ranks to stay "
                f"together (arXiv 2506.10911), and {self.consensus!r} is not"
            )

    def check(self, ranks: int) -> None:
        graph = self.graph(ranks)
        mixing.check_dpsgd(graph)
        mixing.check_symmetric(graph, "NoLoCo")

    @cached_property
    def lag(self) -> int:
        return 0

    def worker_copies(self, codec: Codec) -> float:
        return 2.0

    def home_copies(self, ranks: int) -> float:
        return 0.0
