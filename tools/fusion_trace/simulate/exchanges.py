"""One node's all-reduces: the daemon's own exchanges and flow control, on arrays without contents."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from fusion_rt import wire
from fusion_rt.codecs import BucketCodec
from fusion_trace.simulate.daemons import Answered, Host
from fusion_trace.simulate.ghost_codecs import open_codec
from fusion_trace.simulate.ghosts import GhostReducer, values
from fusion_trace.simulate.model import Bucket, Cluster
from fusiond import algorithms
from fusiond.algorithms.base import Work
from fusiond.collectives.base import Exchange
from fusiond.collectives.cost import CostModel
from fusiond.operations.thread_work import INLINE_WORK
from fusiond.transport.flow_control import BORROW_FROM, FlowPort

_Key = tuple[int, int]  # bucket, clock


class _Run:
    """One all-reduce of one bucket on one node."""

    def __init__(self, ranks: int) -> None:
        self.missing = ranks
        self.exchange: Exchange | None = None
        self.port: FlowPort | None = None
        self.started = False
        self.early: deque[tuple[int, wire.Chunk, Any]] = deque()


class Exchanges:
    """All all-reduces of one node.

    Args:
        peers: those of all nodes, by number.
        answered: called when a worker has its answer.
        watch: called with (source, target, chunk, bytes of payload) of each chunk that is sent.
    """

    def __init__(
        self,
        host: Host,
        peers: Sequence[Exchanges],
        buckets: Sequence[Bucket],
        codec: str,
        answered: Answered,
        watch: Any = None,
    ) -> None:
        self._host, self._peers, self._buckets, self._codec = host, peers, buckets, codec
        self._answered, self._watch = answered, watch
        self._algorithm = algorithms.AllReduce()
        self._codecs: dict[int, BucketCodec] = {}
        self._runs: dict[_Key, _Run] = {}
        self.cost = cost_model(host.cluster)
        self._chunk_bytes = self.cost.chunk_bytes(host.cluster.chunk_bytes)

    def submit(self, rank: int, bucket: int, clock: int) -> None:
        """A local worker's part is in the arena, and its message was sent now."""
        host = self._host
        host.simulator.after(host.costs.local / 2, host.loop.post, host.costs.local / 2, self._ready, (bucket, clock))

    def _ready(self, key: _Key) -> None:
        run = self._run(key)
        run.missing -= 1
        if not run.missing:
            self._start(key, run)

    def _run(self, key: _Key) -> _Run:
        return self._runs.setdefault(key, _Run(self._host.cluster.workers))

    def _start(self, key: _Key, run: _Run) -> None:
        host, cluster, bucket = self._host, self._host.cluster, self._buckets[key[0]]
        spend = host.simulator.spend
        if key[0] not in self._codecs:
            self._codecs[key[0]] = open_codec(self._codec, bucket, host.costs, spend)
        run.port = FlowPort(
            wire.OpKey(0, 1, str(key[0]), key[1]),
            0,
            range(cluster.nodes),
            host.node,
            self._chunk_bytes,
            cluster.window_bytes,
            partial(self._send, key),
            lambda node, chunks: host.tell(node, self._peers[node].credit, key, host.node, chunks),
            partial(self._finished, key),
        )
        sources = [values(bucket.elements, spend, host.costs) for _ in range(cluster.workers)]
        work = Work(
            run.port, GhostReducer(spend, host.costs, cluster.ranks), self._codecs[key[0]], self.cost, sources, sources,
            [(0, bucket.elements)], cluster.sparse_route,
        )  # fmt: skip
        run.exchange = self._algorithm.exchange(work)
        run.port.lends = run.exchange.lends
        small = run.exchange.local_nbytes <= INLINE_WORK
        jobs = run.exchange.jobs(1 if small else host.costs.threads)
        then = partial(self._begin, run)
        if not jobs or small:
            for job in jobs:
                job()
            then()
            return
        missing = len(jobs)

        def done() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                then()

        for job in jobs:
            host.work(job, done)

    def _begin(self, run: _Run) -> None:
        assert run.exchange is not None
        run.started = True
        run.exchange.start()
        while run.early:
            self._take(run, *run.early.popleft())

    # --- between nodes ------------------------------------------------------------------------------------------------

    def _send(self, key: _Key, node: int, chunk: wire.Chunk, payload: Any) -> bool:
        if self._watch is not None:
            self._watch(self._host.node, node, chunk, len(payload))
        self._host.send(node, len(payload), key[0], self._peers[node].receive, key, self._host.node, chunk, payload)
        return len(payload) >= BORROW_FROM

    def receive(self, key: _Key, position: int, chunk: wire.Chunk, payload: Any) -> None:
        """A chunk of a peer."""
        run = self._run(key)
        if run.started:
            self._take(run, position, chunk, payload)
        else:
            run.early.append((position, chunk, payload))

    def _take(self, run: _Run, position: int, chunk: wire.Chunk, payload: Any) -> None:
        assert run.exchange is not None
        assert run.port is not None
        run.exchange.receive(position, chunk, payload)
        run.port.consumed(position, len(payload))

    def credit(self, key: _Key, position: int, chunks: int) -> None:
        """A peer has consumed so many chunks. It comes before the last of them has counted, or when all is over."""
        run = self._runs.get(key)
        if run is not None and run.port is not None:
            run.port.credit(position, chunks)

    def _finished(self, key: _Key) -> None:
        host = self._host
        del self._runs[key]
        for local in range(host.cluster.workers):
            host.simulator.spend(host.costs.local / 2)
            rank = host.node * host.cluster.workers + local
            host.simulator.at(host.simulator.time + host.costs.local / 2, self._answered, rank, key[0])


def cost_model(cluster: Cluster) -> CostModel:
    """What the daemons measure when they come up: the worst of all links, there and back."""
    costs = cluster.costs
    message = costs.send + costs.receive
    byte = max(link.byte for link in cluster.links) + costs.io_send + costs.io_receive
    return CostModel(max(link.latency for link in cluster.links) + message, max(byte, 1e-12))
