"""Mirrors of shards of other nodes, which take the same steps.

A shard whose plan says that it survives (`wire.Reduction.survives`) tells its mirror what it begins with, and each
change that it makes (`HomeAlgorithm.change`), as it is and in that order. The mirror has the same algorithm make the
same changes; so it has all that the shard has, to the bit where both nodes compute alike. The shard answers
contributions when the mirror has the change that they count in: what a worker has been told outlives either of the two
nodes.

The mirror leaves the last change open until the next one comes. When the formation ends it can be said whether that
one counts (`kept_shards.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Literal

import numpy as np

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import WireError
from fusion_rt.local import array_codec
from fusiond.algorithms.home import Home
from fusiond.buckets.plans import PlanState
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution
from fusiond.shards.history import ToMirror, state_of
from fusiond.shards.hosted_home import begin
from fusiond.shards.messages import joined
from fusiond.shards.node import ThisNode

_MAX_EARLY = 1024  # messages of a shard that may come before others


def mirror_of(state: PlanState, node: int) -> int | None:
    """Returns the node with the mirrors of a node's shards: the next one that has ranks of the plan; None if there is
    none, or the shards need not survive."""
    if not state.plan.reduction.survives:
        return None
    others = [other for other in state.members.nodes if other != node]
    return min((other for other in others if other > node), default=min(others, default=None))


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
        self.early: dict[int, ToMirror] = {}
        self.queue: deque[ToMirror] = deque()
        self.busy = False
        self._plan = state
        self._home = Home(-1, len(state.members.set.ranks), DTYPES[bucket.dtype], bucket.numel, ())
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

    def state_at(self, clock: int) -> dict[str, Array] | None:
        """Returns what `ShardHistory.state_at` does, when no thread is at work on it any more."""
        while self.queue:
            self.take(self.queue.popleft())
        if not self._is_whole:
            return None
        if self._open is not None and self._open.clock <= clock:
            self._change()
        return state_of(self._home) if self._home.clock <= clock else None

    def _change(self) -> None:
        told, self._open = self._open, None
        if told is not None:
            values = np.require(np.frombuffer(joined(told.payloads), self._home.dtype.storage), requirements="A")
            part = Contribution(told.rank, values, rates=told.rates, samples=told.samples)
            self._plan.home_algorithm.change(self._home, part)
            self._home.clock = told.clock

    def _begin(self, told: ToMirror) -> None:
        of = f"the image of bucket {self.bucket.index}"
        image = np.frombuffer(joined(told.payloads), np.uint8)
        state = {key: value.copy() for key, value in array_codec.read(image).items()}
        value = state.pop("value", None)
        if value is None or value.shape != (self._home.elements,) or value.dtype != self._home.dtype.storage:
            raise WireError(f"{of} does not have its {self._home.elements} elements")
        parts: dict[str, dict[str, Array]] = {"aux": {}, "optimizer": {}}
        for key, entry in state.items():
            kind, _, name = key.partition("/")
            if kind not in parts:
                raise WireError(f"{of} has {key!r}, which is neither its algorithm's nor its optimizer's")
            parts[kind][name] = entry
        begin(self._home, self._plan, self.bucket, value)
        if self._home.optimizer is not None:
            self._home.optimizer.load(parts["optimizer"])
        self._home.aux, self._home.clock, self._open = parts["aux"], told.clock, None


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
        mirror.early[number] = told
        before = mirror.received
        while (following := mirror.early.pop(mirror.received + 1, None)) is not None:
            mirror.received += 1
            mirror.queue.append(following)
        if mirror.received > before:
            self._here.outside.to_node(node, wire.Mirrored(message.plan, message.bucket, mirror.received))
            self._turn(message.plan, mirror)

    def _turn(self, plan: int, mirror: Mirror) -> None:
        """Hands the messages that wait to threads, one after the other."""
        while mirror.queue and not mirror.busy and not self._here.failure:
            told = mirror.queue.popleft()
            # What it begins with makes an optimizer, which may have to be imported.
            nbytes = mirror.nbytes if told.kind == "update" else float("inf")
            mirror.busy = True
            self._here.do(plan, partial(mirror.take, told), nbytes, partial(self._taken, plan, mirror))

    def _taken(self, plan: int, mirror: Mirror) -> None:
        mirror.busy = False
        self._turn(plan, mirror)
