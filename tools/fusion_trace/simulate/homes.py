"""One node's homes of buckets: the daemon's own training algorithms, on arrays of one element.

A home takes one contribution at a time, on a thread of the pool, and what the algorithm says is carried out as in
`fusiond.shards`: answers to workers, parcels to other homes, waking up later. Parcels are as large as those of the
bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from fusion_rt import algorithms as chosen
from fusion_rt import codecs
from fusion_rt.codecs.base import Layout
from fusion_rt.codecs.dense import Dense
from fusion_trace.simulate.daemons import Answered, Host, SimulationError
from fusion_trace.simulate.ghost_codecs import wire_nbytes
from fusion_trace.simulate.ghosts import F32
from fusion_trace.simulate.model import Bucket
from fusiond import algorithms
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Refuse, Send, Tell
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution

_ORDER_NBYTES = 64


class _Optimizer:
    """A substitute for a shard's optimizer, whose module may import torch."""

    def step(self, gradient: Array, rates: Sequence[float]) -> None:
        """Takes a step, of which there is nothing to see."""


class _Home(Home):
    """A home whose arithmetic is of one element."""

    def mean(self, values: Sequence[Array], divisor: int) -> Array:
        total: Array = np.zeros(self.elements, self.dtype.storage)
        for each in values:
            total = total + each
        mean: Array = total / np.float32(divisor)
        return mean


class _Box:
    """A home, and what waits for it."""

    def __init__(self, home: Home, bucket: int, threads: int) -> None:
        self.home, self.bucket, self.free = home, bucket, threads
        self.waiting: deque[Contribution] = deque()


class Homes:
    """The homes on one node, and the way of its workers to homes anywhere.

    Args:
        peers: those of all nodes.
        places: for algorithms with shards, the node of each bucket's home.
        answered: called when a worker has its answer.
    """

    def __init__(
        self,
        host: Host,
        peers: Sequence[Homes],
        buckets: Sequence[Bucket],
        codec: str,
        spec: chosen.Algorithm,
        places: Sequence[int],
        answered: Answered,
    ) -> None:
        self._host, self._peers, self._buckets, self._codec = host, peers, buckets, codec
        self._spec, self._places, self._answered = spec, places, answered
        self._cost = host.costs.codec(codec)
        spec.check(host.cluster.ranks)
        self._algorithm = cast("HomeAlgorithm[Any]", algorithms.make(str(spec), host.cluster.ranks))
        self._wire = [wire_nbytes(codec, bucket, host.costs) for bucket in buckets]
        self._versions: dict[tuple[int, int], int] = {}
        self._boxes: dict[tuple[int, int], _Box] = {}
        for index in range(len(buckets)):
            if spec.place is chosen.Place.REPLICA:
                for local in range(host.cluster.workers):
                    self._open(index, host.node * host.cluster.workers + local)
            elif places[index] == host.node:
                self._open(index, -1)

    def _open(self, bucket: int, rank: int) -> None:
        home = _Home(rank, self._host.cluster.ranks, F32, 1, ((0, 1, 0),), bucket == 0)
        home.optimizer = cast("Any", _Optimizer())
        home.value = np.zeros(1, np.float32)
        home.codec = Dense().open(Layout(F32, 1))
        self._algorithm.begun(home)
        exclusive = self._algorithm.exclusive
        self._boxes[bucket, rank] = _Box(home, bucket, 1 if exclusive else self._host.costs.threads)

    # --- workers ------------------------------------------------------------------------------------------------------

    def submit(self, rank: int, bucket: int, clock: int) -> None:
        """Posts a local worker's contribution to its home; see `Exchanges.submit`."""
        self._host.hear(self._posted, rank, bucket, clock)

    def _posted(self, rank: int, bucket: int, clock: int) -> None:
        version = self._versions.get((rank, bucket), 0)
        part = Contribution(rank, np.zeros(1, np.float32), clock=clock, version=version, rates=(0.1,))
        shard = self._spec.at_shards
        node = self._places[bucket] if shard else self._host.node
        if node == self._host.node:
            self.arrived(bucket, -1 if shard else rank, part)
            return
        self._host.work(lambda: self._encode(bucket), lambda: self._post(node, bucket, -1, part, self._wire[bucket]))

    def _encode(self, bucket: int) -> None:
        nbytes = self._buckets[bucket].nbytes
        copied = nbytes * self._host.costs.copy if codecs.parse(self._codec).lossless else 0.0
        self._host.simulator.spend(nbytes * self._cost.contribute + self._wire[bucket] * self._cost.pack + copied)

    def _decode(self, bucket: int) -> None:
        nbytes = self._buckets[bucket].nbytes
        self._host.simulator.spend(self._wire[bucket] * self._cost.unpack + nbytes * self._host.costs.copy)

    def _post(self, node: int, bucket: int, home: int, part: Contribution, nbytes: int) -> None:
        """Sends a part to a home elsewhere."""
        self._send(node, bucket, nbytes, self._peers[node].arrived, bucket, home, part)

    def _send(self, node: int, bucket: int, nbytes: int, then: Callable[..., None], *arguments: Any) -> None:
        """Sends so many bytes in pieces; the other node does `then` when it has received the last of them."""
        largest = self._host.cluster.chunk_bytes
        for start in range(0, max(nbytes, 1), largest):
            last = start + largest >= nbytes
            self._host.send(node, min(largest, nbytes - start), bucket, then if last else _nothing, *arguments)

    # --- homes --------------------------------------------------------------------------------------------------------

    def arrived(self, bucket: int, home: int, part: Contribution) -> None:
        """Receives a part for a home here."""
        part.arrived = self._host.simulator.time
        box = self._boxes[bucket, home]
        box.waiting.append(part)
        self._turn(box)

    def _turn(self, box: _Box) -> None:
        while box.free and box.waiting:
            self._ask(box, partial(self._take_in, box, box.waiting.popleft()))

    def left(self, rank: int) -> None:
        """Hears that a rank has ended, and been answered: shards do not wait for it any more."""
        for box in self._boxes.values():
            if box.home.rank < 0 and self._algorithm.waits:
                box.home.present = box.home.present - {rank}
                self._ask(box, partial(self._algorithm.without, box.home, rank))

    def _ask(self, box: _Box, steps: Callable[[], Iterable[Any]]) -> None:
        """Has a thread of the pool ask the algorithm for its steps, and then the loop carry them out."""
        box.free -= 1
        found: list[Any] = []
        self._host.work(lambda: found.extend(self._prepared(box, steps())), lambda: self._carry_out(box, found))

    def _take_in(self, box: _Box, part: Contribution) -> Iterable[Any]:
        """Hands a part to the algorithm; on a thread of the pool."""
        home = box.home
        if part.kind != "told":
            if self._host.cluster.node_of(part.rank) != self._host.node:
                self._decode(box.bucket)
            self._host.simulator.spend(self._buckets[box.bucket].nbytes * self._host.costs.apply)
        if part.kind == "post":
            home.done[part.rank] += 1
        return self._algorithm.received(home, part)

    def _prepared(self, box: _Box, steps: Iterable[Any]) -> list[Any]:
        found = []
        encoded = False
        for step in steps:
            if isinstance(step, Refuse):
                raise SimulationError(step.why)
            away = [step.part.rank] if isinstance(step, Answer) else step.ranks if isinstance(step, Send) else ()
            if any(self._host.cluster.node_of(rank) != self._host.node for rank in away):
                if isinstance(step, Answer) or not encoded:
                    self._encode(box.bucket)
                encoded = True
            elif away:
                self._host.simulator.spend(self._buckets[box.bucket].nbytes * self._host.costs.copy)
            found.append(step)
        return found

    def _carry_out(self, box: _Box, steps: Iterable[Any]) -> None:
        box.free += 1
        for step in steps:
            self._act(box, step)
        self._turn(box)

    def _act(self, box: _Box, step: Any) -> None:
        host, node_of = self._host, self._host.cluster.node_of
        if isinstance(step, Answer):
            node, version = node_of(step.part.rank), box.home.version
            if node == host.node:
                self._answer(step.part.rank, box.bucket, version)
                return
            peer, rank = self._peers[node], step.part.rank
            self._send(node, box.bucket, self._wire[box.bucket], peer.answer_came, rank, box.bucket, version)
        elif isinstance(step, Send):
            if step.kind == "want":
                return  # an empty message, and here no rank is ever occupied
            for rank in step.ranks:
                part = Contribution(
                    box.home.rank, step.values, kind=step.kind, clock=step.clock, version=box.home.version,
                    weight=step.weight,
                )  # fmt: skip
                if node_of(rank) == host.node:
                    self.arrived(box.bucket, rank, part)
                else:
                    self._post(node_of(rank), box.bucket, rank, part, self._wire[box.bucket])
        elif isinstance(step, Tell):
            for bucket, node in enumerate(self._places):
                part = Contribution(0, step.numbers, kind="told", clock=step.clock)
                if bucket == box.bucket:
                    continue
                if node == host.node:
                    self.arrived(bucket, -1, part)
                else:
                    self._post(node, bucket, -1, part, _ORDER_NBYTES)
        else:
            host.simulator.at(max(step.at, host.simulator.time), self._wake, box)

    def _wake(self, box: _Box) -> None:
        self._ask(box, partial(self._algorithm.elapsed, box.home, self._host.simulator.now))

    def answer_came(self, rank: int, bucket: int, version: int) -> None:
        """Receives the answer to a local worker."""
        self._host.work(lambda: self._decode(bucket), lambda: self._answer(rank, bucket, version))

    def _answer(self, rank: int, bucket: int, version: int) -> None:
        self._versions[rank, bucket] = version
        self._host.answer(self._answered, rank, bucket)


def _nothing(*arguments: object) -> None:
    """Receives a piece that is not the last."""
