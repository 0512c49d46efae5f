"""A home on this node, with the contributions that wait for it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from fusion_rt import wire
from fusion_rt.codecs import BucketCodec
from fusion_rt.core import scratch
from fusion_rt.core.errors import WireError
from fusion_rt.local.saved_state import State, counts
from fusiond.algorithms.home import Home, HomeAlgorithm
from fusiond.buckets.plans import PlanState
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution
from fusiond.operations.thread_work import Act
from fusiond.shards.messages import copied, open_codec
from fusiond.shards.mirrors import ShardHistory, ToMirror, begin
from fusiond.shards.node import Reservation

NEIGHBOURS = -1
"""In the place of a rank's position: all ranks that a replica mixes with."""
_MAX_WAITING = 64  # parts that may wait at a home, besides 16 of each rank
_OF_CODECS = ("codec/", "answers/")  # what the entries of a home's codecs begin with, in a saved state
_ADDRESSEES = re.compile(r"answers/(-1|\d{1,9})/(added|whole)", re.ASCII)


@dataclass(slots=True, eq=False)
class WaitingPart:
    """A part that waits at a home.

    Attributes:
        part: what has come.
        room: for what may be sent when it is taken in.
        message: in which it came, if it is from another node.
    """

    part: Contribution
    room: Reservation
    message: wire.Piece | None = None


@dataclass(slots=True)
class HostedHome:
    """A home on this node, with the contributions that wait for it.

    Attributes:
        busy: how many threads are at work on it.
        later: calls to be made when there is none; until then nothing is taken in.
        closed: it is being restored, or waits for what it is to begin with.
        turning: waiting parts are being handed to threads.
        staleness: of the contribution of each rank that is not answered yet.
        told: the value that each rank on another node has, as it was told or has said itself, to which differences are
            sent.
        encoders: the codecs of what is sent to each rank, or to all `NEIGHBOURS`, and whether that is added there.
        joins: how often all ranks have joined, or have set their replicas, while this home was there; clients begin new
            clocks each time.
        since: the clock from which on anything counts.
        mirror: the node that has its mirror, which is told of each update; None if there is none.
        history: of its changes, once it has begun; None if it need not outlive its formation.
        outbox: what threads have done and the mirror is to be told.
        sent, mirrored: numbers of the last message to the mirror, and of the last one that it has.
        held: calls that wait until the mirror has the message of this number.
        ranks: of the process set, in order of their positions; `nodes`: theirs.
        algorithm: the plan's.
        decoder: of messages to this home. Several threads may use it.
        nbytes: of the home's value.
        most_waiting: a limit that parts in order never reach: a rank is ahead of others by a few clocks for each.
    """

    plan: PlanState
    bucket: wire.Bucket
    home: Home
    nodes: tuple[int, ...]
    waiting: deque[WaitingPart] = field(default_factory=deque)
    busy: int = 0
    later: deque[Act] = field(default_factory=deque)
    closed: bool = False
    turning: bool = False
    staleness: dict[int, wire.Staleness] = field(default_factory=dict)
    told: dict[int, Array] = field(default_factory=dict)
    encoders: dict[tuple[int, bool], BucketCodec] = field(default_factory=dict)
    joins: int = 0
    since: int = 0
    mirror: int | None = None
    history: ShardHistory | None = None
    outbox: deque[ToMirror] = field(default_factory=deque)
    _copies: WeakValueDictionary[int, Array] = field(default_factory=WeakValueDictionary)  # of the value, by version
    sent: int = 0
    mirrored: int = 0
    held: deque[tuple[int, list[Act]]] = field(default_factory=deque)
    ranks: tuple[int, ...] = field(init=False)
    algorithm: HomeAlgorithm[Any] = field(init=False)
    decoder: BucketCodec = field(init=False)
    nbytes: int = field(init=False)
    most_waiting: int = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = self.plan.members.set.ranks
        self.algorithm = self.plan.home_algorithm
        self.decoder = self.plan.buckets[self.bucket.index].decoder
        self.nbytes = self.home.elements * self.home.dtype.itemsize
        self.most_waiting = _MAX_WAITING + 16 * self.home.ranks

    @property
    def seeded(self) -> bool:
        """True if contributions can be taken in."""
        return self.home.value is not None or not self.algorithm.keeps_value

    def may_begin(self) -> bool:
        """Returns whether a thread may take in a part."""
        if not self.waiting or self.later or self.closed:
            return False
        return not self.busy or (not self.algorithm.exclusive and self.seeded)

    def next(self) -> WaitingPart | None:
        """Takes the first part for which there is room from the queue, before all others the seed; None if there is
        none. The parts of each rank stay in order, since they wait for the same room."""
        seeded = self.seeded
        one = next((one for one in self.waiting if one.room.granted and (seeded or one.part.kind == "seed")), None)
        if one is not None:
            self.waiting.remove(one)
        return one

    def begin(self, value: Array) -> None:
        """Gives the home its first value."""
        if not self.algorithm.keeps_value:
            return
        begin(self.home, self.plan, self.bucket, value)
        self.algorithm.begun(self.home)
        if self.plan.plan.reduction.survives:
            outbox = None if self.mirror is None else self.outbox
            self.history = ShardHistory(self.home, self.plan.spec.synchronous, outbox)
            self.home.before_change = self.history.note

    def reseed(self, part: Contribution) -> None:
        """Sets the home to values that all ranks have set; its optimizer keeps its state."""
        if self.home.value is not None:
            np.copyto(self.home.value, part.values)
        self.algorithm.reseeded(self.home)
        self.told.clear()
        self.encoders.clear()
        if not self.home.is_shard:
            self.since = part.clock
            self.joins += 1
        self.was_set()

    def copy_of(self, values: Array) -> memoryview:
        """Returns the bytes of what the home answers, in memory of their own. Ranks that are told the same version of
        its value share them."""
        if values is not self.home.value:
            return copied(values)
        copy = self._copies.get(self.home.version)
        if copy is None:
            self._copies[self.home.version] = copy = scratch.copied(values.view(np.uint8))
        return copy.data

    def was_set(self) -> None:
        """Notes that the home has another value, or its optimizer another state, than its last update has left."""
        self._copies.clear()
        if self.history is not None:
            self.history.tell_all()

    # --- saved, and restored ------------------------------------------------------------------------------------------

    def saved(self) -> State:
        """Returns its state: that of `Home.saved`, `version` and `done`; `codec/KEY` is of its own codec,
        `answers/RANK/added/KEY` (or `whole`) of those of what it sends. What ranks have been told is not in it: a rank
        that goes on from a checkpoint says what it has."""
        home = self.home
        state: State = {
            "version": np.array([home.version], np.int64),
            "done": np.array([home.done[rank] for rank in range(home.ranks)], np.int64),
        }
        if home.codec is not None:
            state |= {f"codec/{key}": value for key, value in _remembered(home.codec)}
        for (position, added), codec in self.encoders.items():
            prefix = f"answers/{position}/{'added' if added else 'whole'}"
            state |= {f"{prefix}/{key}": value for key, value in _remembered(codec)}
        return state | home.saved()

    def check(self, entries: Mapping[str, Array]) -> None:
        """Raises `WireError` unless it can go on from these, but for what codecs make of theirs."""
        of, lasting = f"the home of bucket {self.bucket.index}", dict(entries)
        counts(lasting.pop("version", None), 1, of)
        counts(lasting.pop("done", None), self.home.ranks, of)
        for key in [key for key in lasting if key.startswith(_OF_CODECS) and lasting[key].dtype.kind in "iuf"]:
            del lasting[key]
        self.home.check(lasting, of)

    def opened(self, entries: Mapping[str, Array]) -> RestoredCodecs:
        """Opens codecs that go on from these, on a thread. Raises `FusionError`.

        What is left out of them is zeros: see `saved`.
        """
        taken: dict[str, State] = {}
        for key, value in entries.items():
            if key.startswith(_OF_CODECS):
                *whose, name = key.split("/", 1 if key.startswith("codec/") else 3)
                taken.setdefault("/".join(whose), {})[name] = value
        found, home = RestoredCodecs(), self.home
        for owner, state in taken.items():
            if owner == "codec" and home.codec is not None:
                found.own = codec = open_codec(self.plan, self.bucket, home.rank, remembers=False)
            elif (to := _ADDRESSEES.fullmatch(owner)) and int(to[1]) < home.ranks:
                codec = open_codec(self.plan, self.bucket, home.ranks, remembers=to[2] == "added")
                found.answers[int(to[1]), to[2] == "added"] = codec
            else:
                raise WireError(
                    f"the saved state has the codec {owner[:200]!r} of bucket {self.bucket.index}, which has none"
                )
            codec.load_state_dict(codec.state_dict() | state)
        return found

    def restore(self, entries: Mapping[str, Array], codecs: RestoredCodecs) -> None:
        """Goes on from checked entries, and from the codecs that were `opened` for them; the arrays become its own.
        Raises `ShardOptimizerError`."""
        home, value = self.home, entries.get("value")
        if value is not None:
            value = value.astype(home.dtype.storage)
            if home.is_shard:
                self.begin(value)
            else:
                home.value = value
        home.version = int(entries["version"][0])
        home.done = dict(enumerate(int(count) for count in entries["done"]))
        home.scratch.clear()
        home.load(entries)
        home.codec = codecs.own or home.codec
        self.encoders = codecs.answers
        self.was_set()


@dataclass
class RestoredCodecs:
    """Codecs of a home, as they are restored: its `own`, and of its `answers`, as `HostedHome.encoders`."""

    own: BucketCodec | None = None
    answers: dict[tuple[int, bool], BucketCodec] = field(default_factory=dict)


def _remembered(codec: BucketCodec) -> Iterator[tuple[str, Array]]:
    """Yields what a codec remembers, but for zeros: the residuals of one that has none."""
    return ((key, value) for key, value in codec.state_dict().items() if value.any())
