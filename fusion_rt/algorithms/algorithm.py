"""The choice of an algorithm, as everybody asks it, and checks of its arguments.

A choice never changes, and is asked in every step: values that follow from its arguments are found once
(`cached_property`).
"""

from __future__ import annotations

import enum
from abc import ABC
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fusion_rt.codecs import Codec
from fusion_rt.core import spec_parser
from fusion_rt.core.errors import FusionError


class AlgorithmError(FusionError, ValueError):
    """An algorithm does not exist, has arguments that cannot be used, or makes no sense with the other choices."""


class Signal(enum.Enum):
    """The kind of values that a worker posts."""

    GRADIENT = "gradients"
    PARAMETER = "parameters"
    DELTA = "changes of parameters"
    CONSENSUS = "changes of parameters, and their origin"


class Place(enum.Enum):
    """The place of a bucket's home."""

    NOWHERE = "nowhere"
    """Ranks combine their contributions, and all get the same result."""
    SHARD = "shard"
    """On one node, chosen when the plan is made."""
    REPLICA = "replica"
    """Each rank's node has one, for that rank's own copy."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """A way in which the ranks' work becomes one model. The fields of a subclass are the arguments in its text.

    Attributes:
        name: in the text: `name` or `name(argument=value, ...)`.
        signal: the values that a worker posts.
        place: where the home of a bucket is.
        synchronous: every rank waits for every rank in each exchange.
        anywhere: workers may be anywhere, so that a node's share of the homes is that which its link carries.
        selects: differences are sent by a codec that leaves out a part of each.
        waits_for_answers: a worker waits for an answer that is due; else it takes it when it is there, and posts
            nothing more of that bucket until then.
        is_replicable: shards change by `fusiond.algorithms.HomeAlgorithm.change` alone: who begins with the same, and
            makes the same changes, has the same.

    Raises:
        AlgorithmError: an argument is out of range (from a subclass's `__post_init__`).
    """

    name: ClassVar[str]
    signal: ClassVar[Signal] = Signal.GRADIENT
    place: ClassVar[Place] = Place.SHARD
    synchronous: ClassVar[bool] = False
    anywhere: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    waits_for_answers: ClassVar[bool] = True
    is_replicable: ClassVar[bool] = False

    @cached_property
    def codec(self) -> str:
        """The text of the codec that it is made for, which is taken where none is chosen; empty if there is none."""
        return ""

    @cached_property
    def at_homes(self) -> bool:
        """Says whether buckets have homes, to which contributions go."""
        return self.place is not Place.NOWHERE

    @cached_property
    def sums_gradients(self) -> bool:
        """Says whether every step all-reduces gradients, and nothing is kept at homes."""
        return not self.at_homes and self.signal is Signal.GRADIENT

    @cached_property
    def at_shards(self) -> bool:
        """Says whether each parameter has a home, on one of the nodes."""
        return self.place is Place.SHARD

    @cached_property
    def encodes(self) -> bool:
        """Says whether homes encode what they send themselves, also to homes on the same node, since they count with
        the values as the codec has changed them."""
        return self.at_homes and self.signal in (Signal.PARAMETER, Signal.CONSENSUS)

    @cached_property
    def steps_at_home(self) -> bool:
        """Says whether homes take the steps of the script's optimizer, by gradients."""
        return self.at_homes and self.signal is Signal.GRADIENT

    @cached_property
    def outer(self) -> tuple[float, float]:
        """Rate and momentum of an outer step, where there is one."""
        return 1.0, 0.0

    @cached_property
    def mixing(self) -> float:
        """The weight of a worker's own parameters, where it mixes them with those of an outer step."""
        return 0.0

    @cached_property
    def remembers_weights(self) -> bool:
        """Says whether a home, or the next difference, depends on parameters as a worker has left them."""
        return self.at_shards or self.signal in (Signal.DELTA, Signal.CONSENSUS)

    def worker_copies(self, codec: Codec) -> float:
        """Returns how many copies of the model a worker keeps for the algorithm's equations, besides parameters and
        gradients: where parameters were after the last exchange, an outer momentum."""
        del codec
        return 0.0

    def home_copies(self, ranks: int) -> float:
        """Returns how many copies of its values the home of a bucket keeps, besides the optimizer's state."""
        del ranks
        return 1.0 if self.at_homes else 0.0

    def receivers(self, ranks: int) -> int:
        """Returns to how many others the replica of one of so many ranks sends in an exchange, the most at any time;
        of an algorithm whose homes are replicas, for predictions."""
        del ranks
        return 1

    @cached_property
    def stale(self) -> bool:
        """Says whether most gradients are of older parameters than those that they change."""
        return self.steps_at_home and not self.lockstep

    def due(self, steps: int) -> list[int]:
        """Returns the fragments that a worker exchanges when it has taken so many local steps. Each has its own offset
        within the period, so that they are spread evenly over it, and the last one is due at its end."""
        period, count = self.period, self.pieces
        return [piece for piece in range(count) if steps % period == period * (piece + 1) // count % period]

    @cached_property
    def period(self) -> int:
        """Local steps from one exchange of a fragment to the next."""
        return 1

    @cached_property
    def pieces(self) -> int:
        """The number of fragments: bucket i is in fragment i modulo this."""
        return 1

    @cached_property
    def lag(self) -> int:
        """Local steps that a worker takes before it has to have the answer to its post; 0: it waits at once."""
        return 0

    @cached_property
    def overlaps(self) -> bool:
        """Says whether the worker takes its next steps while an exchange is under way."""
        return self.lag > 0

    @cached_property
    def agrees(self) -> bool:
        """Says whether all ranks have the same parameters right after each exchange."""
        return self.synchronous and self.pieces == 1 and not self.overlaps and not self.mixing

    @cached_property
    def apart(self) -> str:
        """Says why there is no moment at which ranks have the same; empty if there is one."""
        if self.synchronous:
            return ""
        if self.place is Place.REPLICA:
            return "each rank mixes with its neighbours, and has parameters of its own at any time"
        return "ranks do not wait for each other, and have different parameters at any time"

    @cached_property
    def lockstep(self) -> bool:
        """Says whether a home answers (nearly) all ranks at once, when (nearly) all of them have contributed."""
        return self.synchronous

    def check(self, ranks: int) -> None:
        """Raises `AlgorithmError`, or `MixingError`, when so many ranks cannot do this."""
        del ranks

    def check_codec(self, codec: Codec, ranks: int) -> None:
        """Raises `AlgorithmError` when so many ranks cannot do this with the part of a difference that a codec
        sends."""
        del codec, ranks

    def implementation(self) -> Any:
        """Returns the class that does it in the daemon, a subclass of `fusiond.algorithms.HomeAlgorithm`; it is called
        with this choice and the number of ranks. Nobody asks where the `place` is nowhere: ranks all-reduce what they
        post. An algorithm of another package imports it here, because only daemons need it; of those that are built in,
        the daemon knows."""
        raise NotImplementedError(f"the algorithm {self.name} does not say what a daemon does")

    def __str__(self) -> str:
        """The canonical text."""
        return spec_parser.write(self.name, self)


def positive(algorithm: Algorithm, *fields: str) -> None:
    for field in fields:
        if not getattr(algorithm, field) > 0:
            raise AlgorithmError(
                f"{field} of {algorithm.name} has to be above 0, and {getattr(algorithm, field)!r} is not"
            )


def not_negative(algorithm: Algorithm, *fields: str) -> None:
    for field in fields:
        if not getattr(algorithm, field) >= 0:
            raise AlgorithmError(
                f"{field} of {algorithm.name} cannot be {getattr(algorithm, field)!r}: it is 0 or more"
            )


def fraction(algorithm: Algorithm, *fields: str) -> None:
    for field in fields:
        if not 0 <= getattr(algorithm, field) < 1:
            raise AlgorithmError(
                f"{field} of {algorithm.name} is from 0 up to 1, and not {getattr(algorithm, field)!r}"
            )
