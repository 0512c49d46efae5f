"""Mirrors of shards of other nodes, which take the same steps.

A shard whose plan says that it survives (`wire.Reduction.survives`) tells its mirror what it begins with, and each
change that it makes (`HomeAlgorithm.change`), as it is and in that order. The mirror has the same algorithm make the
same changes; so it has all that the shard has, to the bit where both nodes compute alike. The shard answers
contributions when the mirror has the change that they count in: what a worker has been told outlives either of the two
nodes.

The mirror leaves the last change open until the next one comes. When the formation ends it can be said whether that
one counts: shards and mirrors are kept until the workers have taken them to the next formation (`KeptShards`). A step
that was under way ends the same for all shards: workers agree about the last clock that counts, of which one of them or
none has all answers, and ask for the state of shards then. A home has its last update and its state before that; its
mirror can still leave the last update out. No home takes in a clock before all workers have the answers to the one
before, so two states are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from fusiond.operations.thread_work import Act, ThreadWork
from fusiond.shards.history import ShardHistory, ToMirror, state_of
from fusiond.shards.hosted_home import begin
from fusiond.shards.messages import joined
from fusiond.shards.node import ThisNode
from fusiond.shards.push_pull import PushPullClient

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
        self.early: dict[int, tuple[wire.Piece, ToMirror]] = {}
        self.queue: deque[tuple[wire.Piece, ToMirror]] = deque()
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
            self.take(self.queue.popleft()[1])
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


@dataclass(frozen=True)
class KeptPlan:
    """The shards of one plan on one node, and its mirrors of others.

    Attributes:
        epoch, plan: of which membership epoch, and which plan.
        homes: by bucket; those that had begun.
        mirrors: of homes on another node.
        clients: of local workers, with what their codecs have not sent.
        work: the threads that may still be at work on them.
    """

    epoch: int
    plan: int
    homes: Sequence[tuple[int, ShardHistory]]
    mirrors: Sequence[Mirror]
    clients: Sequence[PushPullClient]
    work: ThreadWork


class KeptShards:
    """All that a daemon has kept, by process set and group."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, str], KeptPlan] = {}

    def keep(self, group: tuple[int, str], kept: KeptPlan) -> None:
        """Keeps shards of a formation that has ended."""
        self._plans[group] = kept
        kept.work.when_all_quiet(lambda: _let_go(kept))

    def drop(self, group: tuple[int, str]) -> None:
        """Drops what was kept of a group, which has another plan."""
        self._plans.pop(group, None)

    def when_quiet(self, group: tuple[int, str], then: Act) -> None:
        """Calls `then` when no thread is at work on what is kept of a group: at once, or later."""
        kept = self._plans.get(group)
        if kept is None:
            then()
        else:
            kept.work.when_all_quiet(then)

    def recall(self, group: tuple[int, str], epoch: int, plan: int, clock: int) -> dict[str, Array]:
        """Returns what shards, mirrors and the codecs of workers had when all contributions before a clock counted, and
        no other ones: `home:BUCKET:-1:KEY`, `mirror:BUCKET:-1:KEY` and `sender:BUCKET:RANK:codec/KEY`. Those of which
        that is not known are left out.

        Args:
            epoch, plan: of which it is; else nothing is returned.
        """
        kept = self._plans.get(group)
        if kept is None or (kept.epoch, kept.plan) != (epoch, plan):
            return {}
        states: list[tuple[str, dict[str, Array] | None]] = []
        states += [(f"home:{bucket}:-1", history.state_at(clock)) for bucket, history in kept.homes]
        states += [(f"mirror:{mirror.bucket.index}:-1", mirror.state_at(clock)) for mirror in kept.mirrors]
        found = {f"{prefix}:{key}": value for prefix, state in states for key, value in (state or {}).items()}
        for client in kept.clients:
            prefix = f"sender:{client.bucket.index}:{client.rank}:codec"
            found |= {f"{prefix}/{key}": value for key, value in client.remembered_at(clock).items()}
        return found


def _let_go(kept: KeptPlan) -> None:
    """Drops contributions, which are in the arenas of workers, when no thread works on them any more."""
    for _, history in kept.homes:
        history.home.slots.clear()
        history.home.waiting.clear()
