"""The interface of an algorithm whose buckets have homes, and the home itself.

A home is one bucket's authoritative copy: a shard, which all ranks contribute to, or one rank's replica, which mixes
with its neighbours'. Contributions come to it one at a time; the algorithm yields `Step`s: answers to
workers, messages to homes. It does no I/O and has no clock; `fusiond.shards` carries its steps out.

Ranks are named by their *position* among the ranks of the process set, 0 to n - 1.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import numpy as np

from fusion_rt import algorithms, wire
from fusion_rt.codecs.base import BucketCodec
from fusion_rt.core import scratch
from fusion_rt.core.dtypes import DType
from fusion_rt.core.errors import WireError
from fusion_rt.kernels import cpu
from fusion_rt.local.saved_state import State
from fusiond.algorithms.shard_optimizer import ShardOptimizer
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution


@dataclass(slots=True)
class Answer:
    """The worker that posted `part` gets `values`, in place of its own or, if `added`, in addition to them. `weight`:
    the weight of its values in a mean of all ranks."""

    part: Contribution
    values: Array
    added: bool = False
    weight: float = 1.0


@dataclass(slots=True)
class Send:
    """The homes of these ranks get `values`; `payload` is the same, encoded, if the algorithm encodes it itself."""

    ranks: Sequence[int]
    kind: Literal["mix", "whole", "mean", "pass", "want"]
    values: Array
    clock: int = 0
    weight: float = 1.0
    payload: memoryview | None = None


@dataclass(slots=True)
class Refuse:
    """The worker that posted `part` is told that it fails, and why."""

    part: Contribution
    why: str


@dataclass(slots=True)
class Wake:
    """The home is to be looked at again, by `elapsed`, at that time (s)."""

    at: float


@dataclass(slots=True)
class Passed:
    """The clock is over that the rank of this home has passed with `part`."""

    part: Contribution


@dataclass(slots=True)
class Tell:
    """The homes of the plan's other buckets are told these numbers (int64), as a part of kind `told` and this clock."""

    numbers: Array
    clock: int


Step: TypeAlias = Answer | Send | Refuse | Wake | Passed | Tell


@dataclass
class Home:
    """A bucket's home.

    Attributes:
        rank: the position of the rank whose replica it is, or `wire.SHARD`.
        leads: it is that of the plan's first bucket, which decides where the homes of all buckets have to agree.
        present: ranks that take part; those that have left or joined are not in it.
        joined: ranks that have joined, and so come back when all have.
        occupied: of ranks that wait in another operation, one more than the clock of their last contribution.
        heard: of each rank, one more than the clock of the last contribution that has come.
        value: the authoritative copy, from the home's seed on.
        version: how many updates it has seen.
        clock: one more than the latest clock of a contribution in the last update.
        done: how many contributions of each rank have come.
        slots: parts that wait for others, by slot and sender.
        waiting: parts that count already, whose senders may not go on yet.
        orders: orders of the first home that are not carried out, with their clocks.
        aux: other state of the algorithm, by name; saved with the value.
        scratch: state of updates under way, by name; not saved.
        optimizer: applies gradients to the value.
        codec: of parameters, where that takes something away; the algorithm encodes by it, or counts with what is left.
        noticed: sums over contributions: `late` ones of each rank, as (name, rank).
        before_change: called before each change of a shard, with the part that makes it; None if there is no mirror.
    """

    rank: int
    ranks: int
    dtype: DType
    elements: int
    spans: tuple[tuple[int, int, int], ...]
    leads: bool = True
    codec: BucketCodec | None = None
    optimizer: ShardOptimizer | None = None
    value: Array | None = None
    version: int = 0
    clock: int = 0
    present: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    occupied: dict[int, int] = field(default_factory=dict)
    heard: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    slots: dict[int, dict[int, Contribution]] = field(default_factory=dict)
    waiting: list[Contribution] = field(default_factory=list)
    orders: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    aux: dict[str, Array] = field(default_factory=dict)
    scratch: dict[str, Array] = field(default_factory=dict)
    noticed: Counter[tuple[str, int]] = field(default_factory=Counter)
    before_change: Callable[[Contribution], None] | None = None

    def __post_init__(self) -> None:
        self.present = self.present or set(range(self.ranks))
        self.done = self.done or dict.fromkeys(range(self.ranks), 0)
        self._counting = threading.Lock()

    @property
    def is_shard(self) -> bool:
        """True if all ranks contribute to it; else it is the replica of one."""
        return self.rank == wire.SHARD

    def step(self, gradient: Array, rates: Sequence[float]) -> None:
        """Takes a step of its optimizer, which makes a new version."""
        assert self.optimizer is not None
        self.optimizer.step(gradient, rates)
        self.updated()

    def updated(self) -> None:
        """Counts an update. Several threads may do so, where they work on the value without a lock."""
        with self._counting:
            self.version += 1

    @property
    def expected(self) -> set[int]:
        """Ranks whose next contribution may be waited for: those that take part and do not wait in another operation.
        Of those that do, all that they had contributed before has to be here."""
        if not self.occupied:
            return self.present
        return self.present - {rank for rank, clock in self.occupied.items() if clock == self.heard.get(rank, 0)}

    @property
    def slowest(self) -> int:
        """The fewest contributions of a rank that is expected."""
        return min((self.done[rank] for rank in self.expected), default=0)

    def tell(self, values: Array) -> tuple[memoryview | None, Array]:
        """Returns parameters, or a change of them, as others will have them, on this node and elsewhere; and what the
        codec has made of them, if it takes something away."""
        return (None, values) if self.codec is None else self.codec.tell(values)

    def saved(self, place: Array | None = None) -> State:
        """Returns copies of its lasting state, by the names of its entries: what `HomeAlgorithm.change` changes.

        Args:
            place: memory for the value (elements,); by default it is new.
        """
        state: State = {f"aux/{key}": entry.copy() for key, entry in self.aux.items()}
        if self.value is not None:
            state["value"] = np.empty_like(self.value) if place is None else place
            np.copyto(state["value"], self.value)
        if self.optimizer is not None:
            state |= {f"optimizer/{key}": entry for key, entry in self.optimizer.state().items()}
        return state

    def check(self, entries: Mapping[str, Array], of: str) -> None:
        """Raises `WireError` unless it can `load` these. `of`: words for it."""
        value = entries.get("value")
        if value is not None and value.shape != (self.elements,):
            raise WireError(f"{of} has {self.elements} elements, and {value.size} were saved")
        for key, array in entries.items():
            kind, _, name = key.partition("/")
            if not (key == "value" or (name and kind in ("aux", "optimizer"))) or array.dtype.kind not in "iuf":
                raise WireError(
                    f"{key[:200]!r} of {of} cannot be in a saved state; it is damaged, or of another program"
                )

    def load(self, entries: Mapping[str, Array]) -> None:
        """Goes on from what `saved` has returned, but for the value. The arrays become its own. Raises
        `ShardOptimizerError`."""
        self.aux = {key.removeprefix("aux/"): value for key, value in entries.items() if key.startswith("aux/")}
        if self.optimizer is not None:
            prefix = "optimizer/"
            self.optimizer.load({k.removeprefix(prefix): v for k, v in entries.items() if k.startswith(prefix)})

    def copy(self, values: Array) -> Array:
        """Returns a copy of values, in the type of the home, to be kept."""
        kept: Array = np.array(values, self.dtype.storage)
        return kept

    def empty(self) -> Array:
        """Returns scratch memory for as many elements as the home has."""
        return scratch.empty(self.elements, self.dtype.storage)

    def zeros(self) -> Array:
        """Returns as many zeros as the home has elements, in scratch memory."""
        return scratch.zeros(self.elements, self.dtype.storage)

    def scaled(self, values: Array, factor: float) -> Array:
        """Returns values times a factor, which is rounded to their type first, in scratch memory."""
        scaled: Array = np.multiply(values, self.dtype.storage.type(factor), out=self.empty())
        return scaled

    def mean(self, values: Sequence[Array], divisor: int) -> Array:
        """Returns the sum of values, in this order, divided."""
        total = self.empty()
        cpu.reduce("sum", self.dtype, values, [total], divisor=divisor)
        return total


Spec = TypeVar("Spec", bound=algorithms.Algorithm)


class HomeAlgorithm(ABC, Generic[Spec]):
    """The behaviour of one algorithm at the homes of one plan. It holds no state of a single home.

    Args:
        spec: the chosen one.
        ranks: how many take part.

    Attributes:
        exclusive: a home is at one part at a time; else several threads may be at work on it.
        waits: a worker may have to wait for other ranks, and so has to hear that they wait in another operation.
        tells: the home of the first bucket gives the others orders.
        carries: a part that comes to `change` without rates is kept for a later step.
        answers_all: a part may be followed by answers to all ranks; else only to the one that posted it.
        keeps_value: homes keep a value; a seed is needed before anything else.
    """

    exclusive: ClassVar[bool] = True
    waits: ClassVar[bool] = False
    tells: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    answers_all: ClassVar[bool] = False
    keeps_value: ClassVar[bool] = True

    def __init__(self, spec: Spec, ranks: int) -> None:
        self.spec = spec
        self.ranks = ranks

    @abstractmethod
    def received(self, home: Home, part: Contribution) -> Iterable[Step]:
        """A part has come. `home.done` counts it already, if it is a worker's."""

    def begun(self, home: Home) -> None:
        """A home begins with its value."""
        del home

    def reseeded(self, home: Home) -> None:
        """All ranks have set their parameters, and a home its value, to the same: what was remembered of other ones
        goes, outer momentum, too. The state of the script's optimizer stays."""
        del home

    def returned(self, home: Home) -> None:
        """All ranks have joined, and go on together."""
        del home

    def change(self, home: Home, part: Contribution) -> None:
        """Changes the lasting state of a shard: `value`, `optimizer`, `aux` (but for what it has learned of its node's
        clock), and the count of its updates.

        That may depend on these, but for the count, and on a part's `values`, `rates`, `samples` and `rank`, and on
        nothing else. So homes that begin with the same, and make the same changes in the same order, have the same: a
        shard's mirror. Where several threads change a shard, any order is as good as any other.

        Args:
            part: has `samples` = 0 if it has no values. It need not be a worker's, but can be made for this: `apply`.
        """
        raise NotImplementedError(f"shards of {self.spec} are not changed by single parts")

    def apply(self, home: Home, part: Contribution) -> None:
        """Makes a `change`, and has whoever keeps a shard's history note it before."""
        if home.before_change is not None:
            home.before_change(part)
        home.clock = part.clock + 1
        self.change(home, part)

    def nothing(self, home: Home, part: Contribution) -> Iterable[Step]:
        """A worker took a step without a gradient, since its own was not finite: that is no mean, and no update,
        but workers that wait for its clock may go on. `home.done` counts it already."""
        yield self.asked(home, part)

    def told(self, home: Home, part: Contribution, values: Array) -> None:
        """The sender of a part has other values than the home had when it was answered: a codec has left some of them
        out, or it has said what it has. For an algorithm that reckons with what each rank has.

        Args:
            values: its own (elements,); valid during the call.
        """

    def elapsed(self, home: Home, now: float) -> Iterable[Step]:
        """Time that was asked for with `Wake` has passed."""
        del home, now
        return ()

    def without(self, home: Home, rank: int) -> Iterable[Step]:
        """A rank has left or joined, or waits in another operation, and is not in `home.expected` any more: what waits
        only for it goes on. It is refused where a rank that has left for good cannot be done without."""
        del home, rank
        return ()

    def addressees(self, home: Home, part: Contribution | None) -> Collection[int]:
        """Returns the ranks that may be sent values when a part is taken in; None: when `elapsed` or `without` is
        called. A home takes a part in when there is room for that (`fusiond.shards.node`)."""
        posted = set() if part is None else {part.rank}
        return posted | home.present if self.answers_all else posted

    def answer(self, home: Home, part: Contribution) -> Answer:
        """Returns the answer to a sender that may go on: the home as it is now."""
        assert home.value is not None
        return Answer(part, home.value)

    def asked(self, home: Home, part: Contribution) -> Answer:
        """A worker contributes nothing, and is told what the home has; that of its own replica, which changes it has
        not got."""
        return self.answer(home, part)

    def awaited(self, home: Home) -> list[int]:
        """Returns the ranks that a home waits for, as far as can be told: those missing in its oldest slot, or else the
        slowest."""
        if home.slots:
            missing = [rank for rank in sorted(home.expected) if rank not in home.slots[min(home.slots)]]
            if missing:
                return missing
        return [rank for rank in sorted(home.expected) if home.done[rank] == home.slowest]


def refuse_without(home: Home, why: str) -> Iterator[Step]:
    """Refuses parts that wait for a rank that does not take part any more, in slots that need all ranks."""
    for number, slot in list(home.slots.items()):
        if not slot.keys() | home.present | home.joined >= set(range(home.ranks)):
            del home.slots[number]
            for part in slot.values():
                yield Refuse(part, why)


def begin_anew(algorithm: HomeAlgorithm[Any], home: Home) -> None:
    """Forgets all that a replica has but its value."""
    home.aux.clear()
    home.scratch.clear()
    home.slots.clear()
    algorithm.begun(home)


def combined(parts: Sequence[Contribution], values: Array, samples: int = 1) -> Contribution:
    """Returns the sum of parts, as one that changes a shard: with the rates of the last one."""
    last = parts[-1]
    if values is last.values and samples == last.samples:
        return last
    clock = max(part.clock for part in parts)
    return Contribution(last.rank, values, clock=clock, rates=last.rates, samples=samples)


class ShardAlgorithm(HomeAlgorithm[Spec]):
    """A shard takes a step with each gradient that comes to it, and its sender goes on; subclasses add to that."""

    def change(self, home: Home, part: Contribution) -> None:
        home.step(part.values, part.rates)

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        self.apply(home, part)
        yield self.answer(home, part)
