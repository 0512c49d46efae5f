"""Mirrors of shards of other nodes, which take the same steps.

A shard whose plan says that it survives (`wire.Reduction.survives`) tells its mirror what it begins with, and each
change that it makes (`HomeAlgorithm.change`), as it is and in that order. The mirror has the same algorithm make the
same changes; so it has all that the shard has, to the bit where both nodes compute alike. The shard answers
contributions when the mirror has the change that they count in: what a worker has been told outlives either of the two
nodes.

The mirror leaves the last change open until the next one comes. When the formation ends it can be said whether that one
counts: shards and mirrors are kept until the workers have taken them to the next formation (`Keeper.recall`). A step
that was under way ends the same for all shards: workers agree about the last clock that counts, of which one of them or
none has all answers, and ask for the state of shards then. A home has its last update and its state before that; its
mirror can still leave the last update out. No home takes in a clock before all workers have the answers to the one
before, so two states are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from fusion_rt import wire
from fusion_rt.algorithms import Signal
from fusion_rt.core import scratch
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import WireError
from fusion_rt.local import array_codec
from fusion_rt.local.saved_state import State
from fusiond.algorithms import shard_optimizer
from fusiond.algorithms.home import Home
from fusiond.buckets.plans import PlanState
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution
from fusiond.shards.messages import joined
from fusiond.shards.node import ThisNode

_MAX_EARLY = 1024  # messages of a shard that may come before others


def begin(home: Home, state: PlanState, bucket: wire.Bucket, value: Array) -> None:
    """Gives a bucket's home, or its mirror, a value, and an optimizer, if it has one. Raises `ShardOptimizerError`."""
    if state.spec.signal is Signal.GRADIENT:
        home.optimizer = shard_optimizer.make(state.plan.reduction.optimizer, bucket, value)
    home.value = value


def mirror_of(state: PlanState, node: int) -> int | None:
    """Returns the node with the mirrors of a node's shards: the next one that has ranks of the plan; None if there is
    none, or the shards need not survive."""
    if not state.plan.reduction.survives:
        return None
    others = [other for other in state.members.nodes if other != node]
    return min((other for other in others if other > node), default=min(others, default=None))


class ToMirror(NamedTuple):
    """A message to a mirror: all that its shard has, or a change (`HomeAlgorithm.change`).

    Attributes:
        clock: `Home.clock` after it.
        payloads: the image, or the values of the change, in pieces, until they are joined.
        rates, samples, rank: of the change.
    """

    kind: Literal["image", "update"]
    clock: int
    payloads: list[memoryview]
    rates: tuple[float, ...] = ()
    samples: int = 1
    rank: int = 0


class ShardHistory:
    """Notes the changes of a shard, each before it is made. One thread at a time uses it, or several if the shard's
    algorithm lets several threads at it.

    Args:
        home: the shard.
        keeps_before: what the shard was before the last change is wanted.
        outbox: for the mirror; None if there is none.
    """

    def __init__(self, home: Home, keeps_before: bool, outbox: deque[ToMirror] | None) -> None:
        self.home, self._keeps_before, self._outbox = home, keeps_before, outbox
        self._before: tuple[int, State] | None = None

    def note(self, part: Contribution) -> None:
        """Notes a change that is about to be made."""
        home = self.home
        if self._keeps_before:
            value = None if self._before is None else self._before[1]["value"]
            self._before = home.clock, home.saved(value)
        if self._outbox is not None:
            # A mean is owned here; a worker's values lie in its arena, or in a message.
            values = part.values if part.values.flags.owndata else scratch.copied(part.values)
            payload = values.view(np.uint8).data if part.samples else memoryview(b"")
            self._outbox.append(ToMirror("update", part.clock + 1, [payload], part.rates, part.samples, part.rank))

    def tell_all(self) -> None:
        """Has the mirror told all that the shard has, which was set to something else than the last change's result."""
        self._before = None
        if self._outbox is not None:
            self._outbox.append(ToMirror("image", self.home.clock, [_image_of(self.home)]))

    def state_at(self, clock: int) -> State | None:
        """Returns copies of what the shard had when all contributions before a clock counted, and no other ones; None
        if that is not known any more. Keys are those of `Home.saved`."""
        if self.home.clock <= clock:
            return self.home.saved()
        if self._before is None or self._before[0] > clock:
            return None
        return {key: value.copy() for key, value in self._before[1].items()}


def _image_of(home: Home) -> memoryview:
    """Returns a home's lasting state as bytes."""
    state = home.saved()
    image = np.empty(array_codec.nbytes_of(state), np.uint8)
    array_codec.write(state, image)
    return image.data


class Mirror:
    """The mirror of one shard.

    Attributes:
        bucket: the shard's.
        received: number of the last message that has come, with all before it.
        early: messages that have come before others.
        queue: those that have come and were not taken in yet.
        busy: a thread is at work on it.
    """

    def __init__(self, state: PlanState, bucket: wire.Bucket) -> None:
        self.bucket = bucket
        self.received = 0
        self.early: dict[int, tuple[wire.Piece, ToMirror]] = {}
        self.queue: deque[tuple[wire.Piece, ToMirror]] = deque()
        self.busy = False
        self._plan = state
        self._home = Home(wire.SHARD, len(state.members.set.ranks), DTYPES[bucket.dtype], bucket.numel, ())
        self._open: ToMirror | None = None  # the last change, which is not made
        self._is_whole = False  # no message was left in the middle

    @property
    def nbytes(self) -> int:
        """Bytes of its value."""
        return self._home.elements * self._home.dtype.itemsize

    def position(self, rank: int) -> int:
        """Returns the position of a rank among those of the plan."""
        return self._plan.members.set.ranks.index(rank)

    def take(self, told: ToMirror) -> None:
        """Takes a message in. Raises `FusionError` if it makes no sense. One thread at a time."""
        was_whole, self._is_whole = self._is_whole, False
        if told.kind == "image":
            self._begin(told)
        elif was_whole:
            self._change()
            self._open = told
        else:
            raise WireError(f"a change of bucket {self.bucket.index} came to its mirror before the bucket itself")
        self._is_whole = True

    def state_at(self, clock: int) -> State | None:
        """Returns what `ShardHistory.state_at` does, when no thread is at work on it any more."""
        while self.queue:
            self.take(self.queue.popleft()[1])
        if not self._is_whole:
            return None
        if self._open is not None and self._open.clock <= clock:
            self._change()
        return self._home.saved() if self._home.clock <= clock else None

    def _change(self) -> None:
        told, self._open = self._open, None
        if told is not None:
            values = np.require(np.frombuffer(joined(told.payloads), self._home.dtype.storage), requirements="A")
            part = Contribution(told.rank, values, rates=told.rates, samples=told.samples)
            self._plan.home_algorithm.change(self._home, part)
            self._home.clock = told.clock

    def _begin(self, told: ToMirror) -> None:
        home, of = self._home, f"bucket {self.bucket.index}"
        image = np.frombuffer(joined(told.payloads), np.uint8)
        entries = {key: value.copy() for key, value in array_codec.read(image).items()}
        home.check(entries, of)
        value = entries.pop("value", None)
        if value is None or value.dtype != home.dtype.storage:
            raise WireError(f"the image of {of} does not have its {home.elements} elements")
        begin(home, self._plan, self.bucket, value)
        home.load(entries)
        home.clock, self._open = told.clock, None


class Mirrors:
    """All mirrors on one node. Args: `here`: the node."""

    def __init__(self, here: ThisNode) -> None:
        self._here = here
        self._mirrors: dict[tuple[int, int], Mirror] = {}  # by plan and bucket

    def open(self, state: PlanState) -> None:
        """A plan becomes active: makes the mirrors that this node has."""
        for bucket, home in zip(state.plan.buckets, state.plan.homes, strict=False):
            if mirror_of(state, home) == self._here.node:
                self._mirrors[state.plan.id, bucket.index] = Mirror(state, bucket)

    def of(self, plan: int) -> Iterator[Mirror]:
        """Yields the mirrors of a plan's shards."""
        return (mirror for (whose, _), mirror in self._mirrors.items() if whose == plan)

    def drop(self, plan: int) -> None:
        """The plan is no longer active."""
        self._mirrors = {key: mirror for key, mirror in self._mirrors.items() if key[0] != plan}

    def clear(self) -> None:
        """The job cannot go on."""
        self._mirrors.clear()

    def came(self, node: int, message: wire.Piece, payloads: list[memoryview]) -> None:
        """A message of a shard on another node has come, in pieces. Raises `WireError` if no shard would send it."""
        mirror = self._mirrors[message.plan, message.bucket]
        number = message.clock
        if not mirror.received < number <= mirror.received + _MAX_EARLY or number in mirror.early:
            raise WireError(
                f"message {number} of bucket {message.bucket} came to its mirror, which has {mirror.received}"
            )
        rank = mirror.position(message.rank)
        kind: Literal["image", "update"] = "image" if message.kind == "image" else "update"
        told = ToMirror(kind, message.version, payloads, message.rates, message.samples, rank)
        mirror.early[number] = message, told
        while (following := mirror.early.pop(mirror.received + 1, None)) is not None:
            mirror.received += 1
            mirror.queue.append(following)
        self._turn(node, mirror)

    def _turn(self, node: int, mirror: Mirror) -> None:
        """Hands the messages that wait to threads, one after the other."""
        while mirror.queue and not mirror.busy and not self._here.failure:
            message, told = mirror.queue.popleft()
            # What it begins with makes an optimizer, which may have to be imported.
            nbytes = mirror.nbytes if told.kind == "update" else float("inf")
            mirror.busy = True
            taken = partial(self._taken, node, mirror, message)
            self._here.do(message.plan, partial(mirror.take, told), nbytes, taken)

    def _taken(self, node: int, mirror: Mirror, message: wire.Piece) -> None:
        mirror.busy = False
        self._here.took(node, message, message.nbytes)
        self._turn(node, mirror)
