"""What an all-reduce takes among thousands of nodes: the messages of `patterns`, by the times of `stages`.

Nodes are equal, and have one worker each. What is under way at the same time, buckets and chunks of them, goes on in
the order in which it is ready at the median node.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fusion_rt import codecs
from fusion_trace.simulate.exchanges import cost_model
from fusion_trace.simulate.ghost_codecs import SummingCodec, factors, open_codec
from fusion_trace.simulate.model import Bucket, Cluster, CodecCosts
from fusion_trace.simulate.patterns import doubling_rounds, pieces
from fusion_trace.simulate.stages import Stages, Times
from fusiond.operations.thread_work import INLINE_WORK


@dataclass(frozen=True)
class _Together:
    """Tasks to be done side by side, from `ready` on, before who asks for it goes on."""

    tasks: list[Task]
    ready: Times


Task: TypeAlias = Generator["Times | _Together", Times, Times]
"""Yields what it waits for, by node, and is sent it when the median node is there; returns when each node is done."""
_Over: TypeAlias = Callable[[Times], None]


class Exchanging:
    """All-reduces of a cluster of equal nodes.

    Attributes:
        stages: what nodes are busy with.
    """

    def __init__(self, cluster: Cluster, codec: str) -> None:
        self._cluster, self._codec = cluster, codec
        self._model = cost_model(cluster)
        self._chunk = self._model.chunk_bytes(cluster.chunk_bytes)
        self._costs = cluster.costs
        self._coding = cluster.costs.codec(codec)
        self._chosen = codecs.parse(codec)
        self._added_up = {"chunks": self._dense_bucket, "owners": self._summed, "factors": self._low_rank}[
            self._chosen.bucket.exchange
        ]
        self.stages = Stages(cluster.nodes, cluster.links[0], cluster.costs, self._chunk, cluster.window_bytes)
        self._queue: list[tuple[float, int, Times, Task, _Over]] = []
        self._serial = 0

    def run(self, buckets: list[Bucket], submitted: list[Times]) -> list[Times]:
        """When each node's worker has the answer of each bucket, given when it has submitted it (s)."""
        ended: dict[int, Times] = {}

        def over(index: int) -> _Over:
            return lambda times: ended.__setitem__(index, times)

        for index, (bucket, times) in enumerate(zip(buckets, submitted, strict=True)):
            self._resume(self._whole(bucket, times), None, over(index))
        while self._queue:
            _, _, ready, task, then = heapq.heappop(self._queue)
            self._resume(task, ready, then)
        return [ended[index] for index in range(len(buckets))]

    def _resume(self, task: Task, ready: Times | None, over: _Over) -> None:
        try:
            wanted = next(task) if ready is None else task.send(ready)
        except StopIteration as stop:
            over(stop.value)
            return
        if isinstance(wanted, _Together):
            self._fork(wanted, lambda times: self._push(times, task, over))
        else:
            self._push(wanted, task, over)

    def _push(self, ready: Times, task: Task, over: _Over) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (float(np.median(ready)), self._serial, ready, task, over))

    def _fork(self, together: _Together, over: _Over) -> None:
        ended, missing = together.ready.copy(), len(together.tasks)

        def one(times: Times) -> None:
            nonlocal missing
            missing -= 1
            np.maximum(ended, times, out=ended)
            if not missing:
                over(ended)

        if not missing:
            over(ended)
        for task in together.tasks:
            self._resume(task, None, one)

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def _whole(self, bucket: Bucket, submitted: Times) -> Task:
        """From the worker's message to its answer."""
        costs = self._costs
        ready = yield submitted + costs.local / 2
        ready = self._handled(ready, costs.local / 2)
        if self._chosen.stateful:  # of others one worker's part is where it has to be
            seconds = bucket.nbytes * self._coding.contribute
            if 4 * bucket.nbytes <= INLINE_WORK:
                ready = self._handled(ready, seconds)
            else:
                half = costs.job / 2
                done = yield self.stages.worked(self.stages.everyone, ready, seconds, True)
                ready = self._handled(done, half)
        ready = yield from self._added_up(bucket, ready)
        return self._handled(ready, costs.local / 2) + costs.local / 2

    def _handled(self, ready: Times, seconds: float | Times) -> Times:
        return self.stages.handled(self.stages.everyone, ready, seconds, True)

    def _dense_bucket(self, bucket: Bucket, ready: Times) -> Task:
        return self._dense(bucket.nbytes, ready, self._coding)

    def _dense(self, nbytes: int, ready: Times, coding: CodecCosts) -> Task:
        """A ring or a doubling."""
        nodes = self._cluster.nodes
        if self._model.prefers_doubling(nbytes, nodes, self._chunk):
            return (yield from self._doubling(nbytes, ready, coding))
        step = max(4, self._chunk // 4 * 4)
        segment = 4 * math.ceil(nbytes / 4 / nodes)
        starts = range(0, segment, step)
        return (yield _Together([self._ring(min(step, segment - at), ready, coding) for at in starts], ready))

    def _ring(self, dense: int, ready: Times, coding: CodecCosts) -> Task:
        """A chunk of each segment, twice around."""
        stages, costs, nodes = self.stages, self._costs, self._cluster.nodes
        everyone, wire = stages.everyone, dense * coding.ratio
        for hop in range(2 * nodes - 1):
            if hop == 0:
                work = wire * coding.pack
            else:
                work = costs.receive + stages.credit + wire * coding.unpack
                work += dense * costs.copy if hop >= nodes else dense * costs.reduce + wire * coding.pack
                if hop == nodes - 1 and coding.ratio != 1:
                    work += wire * coding.unpack + dense * costs.copy
            if hop == 2 * nodes - 2:
                break
            handled = self._handled(ready, work + costs.send)
            ready = yield stages.transfer(everyone, (everyone + 1) % nodes, handled, wire, True)
        return self._handled(ready, work)

    def _doubling(self, nbytes: int, ready: Times, coding: CodecCosts) -> Task:
        stages, costs, wire = self.stages, self._costs, nbytes * coding.ratio
        work = costs.receive + stages.credit + wire * coding.unpack + nbytes * costs.reduce
        for rounds in doubling_rounds(self._cluster.nodes):
            pairs = np.array([(source, target) for source, target, _ in rounds])
            source, target = pairs[:, 0], pairs[:, 1]
            issued = stages.handled(source, ready[source], costs.send + wire * coding.pack, True)
            came = yield stages.transfer(source, target, issued, wire, True)
            ready = ready.copy()
            ready[source] = issued
            ready[target] = stages.handled(target, np.maximum(came, ready[target]), work, True)
        return ready

    def _low_rank(self, bucket: Bucket, ready: Times) -> Task:
        """The sums of factors travel dense, and it takes no time to add them up."""
        first, second = factors(bucket, self._chosen)
        if first:
            ready = yield from self._dense(4 * first, ready, CodecCosts())
        ready = self._handled(ready, bucket.nbytes * self._coding.add)
        if second:
            ready = yield from self._dense(4 * second, ready, CodecCosts())
        return self._handled(ready, bucket.nbytes * self._coding.write)

    def _summed(self, bucket: Bucket, ready: Times) -> Task:
        """Through owners, or everything to everybody."""
        codec = open_codec(self._codec, bucket, self._costs, lambda seconds: None)
        assert isinstance(codec, SummingCodec)
        nodes, coding, route = self._cluster.nodes, self._coding, self._cluster.sparse_route
        gathers = route == "gather" or (
            route == "auto" and codec.adapts and self._model.prefers_gathering(codec.wanted() * 4, nodes)
        )
        share = codec.nbytes if gathers else codec.nbytes / nodes
        dense = bucket.nbytes if gathers else bucket.nbytes / nodes
        sums = np.minimum(share * np.arange(2, nodes + 1), dense) if codec.adapts else np.full(nodes - 1, share)
        adding = np.concatenate([[0.0], np.cumsum(sums)]) * coding.add  # the first so many, in order of the nodes
        whole = share + 12  # heads of the selection and of the exchange
        if gathers:
            ready = yield from self._to_all(ready, whole, whole * coding.pack, whole * coding.unpack, None, True)
            seconds = float(adding[-1]) + min(codec.nbytes * nodes, bucket.nbytes) * coding.write
            return self._handled(ready, seconds)
        ready = yield from self._to_all(ready, whole, whole * coding.pack, whole * coding.unpack, adding, False)
        kept = share + 12
        seconds = float(sums[-1]) * coding.conclude + kept * (coding.pack + coding.unpack + coding.write)
        ready = self._handled(ready, seconds)
        return (yield from self._to_all(ready, kept, 0.0, kept * (coding.unpack + coding.write), None, False))

    def _to_all(
        self, ready: Times, nbytes: float, packing: float, taking: float, adding: Times | None, once: bool
    ) -> Task:
        """Every node sends all others a payload, the next node first; when each has handled what it got.

        Args:
            packing, taking: seconds for each payload; of one that is the same for all, packing is done `once`.
            adding: what it takes to add up the first so many contributions, in the order of the nodes.
        """
        stages, costs, nodes = self.stages, self._costs, self._cluster.nodes
        everyone = stages.everyone
        parts = [length for _, length in pieces(round(nbytes), self._chunk)]
        came: list[tuple[int, bool, Times]] = []
        issued = ready
        for distance in range(1, nodes):
            target = (everyone + distance) % nodes
            for number, length in enumerate(parts):
                packs = number == 0 and (distance == 1 or not once)
                issued = self._handled(issued, costs.send + (packing if packs else 0.0))
                times = stages.transfer(everyone, target, issued, float(length), True)
                came.append((distance, number == len(parts) - 1, times))
        ended = issued
        for distance, whole, times in came:
            work = np.full(nodes, costs.receive + stages.credit + (taking if whole else 0.0))
            if adding is not None and whole:
                # Contributions are added up in the order of the nodes: when node 0's has come, those up to the own one.
                work += np.where((everyone - distance) % nodes == 0, adding[everyone], 0.0)
                if distance == nodes - 1:
                    work += adding[-1] - adding[everyone]
            ready = yield times
            ended = self._handled(ready, work)
        return ended
