"""One node's all-reduces: the daemon's own exchanges and flow control, on arrays without contents."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.codecs import BucketCodec
from fusion_trace.simulate.daemons import Answered, Host, SimulationError
from fusion_trace.simulate.ghost_codecs import open_codec
from fusion_trace.simulate.ghosts import GhostReducer, values
from fusion_trace.simulate.model import Bucket, Cluster
from fusiond import algorithms
from fusiond.algorithms.exchange import Work
from fusiond.collectives.base import Exchange, ExchangeError
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


class _Outlet:
    """The way of one all-reduce to the other nodes."""

    def __init__(self, exchanges: Exchanges, key: _Key) -> None:
        self._exchanges, self._key = exchanges, key

    def send_chunk(self, node: int, chunk: wire.Chunk, payload: Any, urgency: int) -> bool:
        return self._exchanges.send(self._key, node, chunk, payload)

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        assert isinstance(message, wire.Credit)
        self._exchanges.tell(self._key, node, message.chunks)


class Exchanges:
    """All all-reduces of one node.

    Args:
        peers: those of all nodes, by number.
        answered: called when a worker has its answer.
    """

    def __init__(
        self, host: Host, peers: Sequence[Exchanges], buckets: Sequence[Bucket], codec: str, answered: Answered
    ) -> None:
        self._host, self._peers, self._buckets, self._codec = host, peers, buckets, codec
        self._answered = answered
        self._algorithm = algorithms.AllReduce()
        self._codecs: dict[int, BucketCodec] = {}
        self._runs: dict[_Key, _Run] = {}
        self.cost = cost_model(host.cluster)
        self._chunk_bytes = self.cost.chunk_bytes(host.cluster.chunk_bytes)

    def submit(self, rank: int, bucket: int, clock: int) -> None:
        """Submits a local worker's part, which is in the arena; its message is sent now."""
        self._host.hear(self._ready, (bucket, clock))

    def left(self, rank: int) -> None:
        """Hears that a rank has ended, and with it all others, since they wait for each other."""

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
            _Outlet(self, key),
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
        self._end_if_over(run)
        while run.early:
            self._take(run, *run.early.popleft())

    # --- between nodes ------------------------------------------------------------------------------------------------

    def send(self, key: _Key, node: int, chunk: wire.Chunk, payload: Any) -> bool:
        """Sends a chunk; returns whether it is borrowed."""
        self._host.send(node, len(payload), key[0], self._peers[node].receive, key, self._host.node, chunk, payload)
        return len(payload) >= BORROW_FROM

    def tell(self, key: _Key, node: int, chunks: int) -> None:
        """Sends credit."""
        self._host.tell(node, self._peers[node].credit, key, self._host.node, chunks)

    def receive(self, key: _Key, position: int, chunk: wire.Chunk, payload: Any) -> None:
        """Receives a chunk of a peer."""
        run = self._run(key)
        if run.started:
            self._take(run, position, chunk, payload)
        else:
            run.early.append((position, chunk, payload))

    def _take(self, run: _Run, position: int, chunk: wire.Chunk, payload: Any) -> None:
        assert run.exchange is not None
        assert run.port is not None
        run.exchange.receive(position, chunk, payload)
        self._end_if_over(run)
        run.port.consumed(position, len(payload))

    def credit(self, key: _Key, position: int, chunks: int) -> None:
        """Hears that a peer has consumed so many chunks: before the last of them has counted, or when all is over."""
        run = self._runs.get(key)
        if run is not None and run.port is not None:
            run.port.credit(position, chunks)
            self._end_if_over(run)

    def _end_if_over(self, run: _Run) -> None:
        assert run.port is not None
        key = int(run.port.key.name), run.port.key.clock
        if not run.port.is_over or self._runs.pop(key, None) is None:
            return
        host = self._host
        for local in range(host.cluster.workers):
            host.answer(self._answered, host.node * host.cluster.workers + local, key[0])


class Alike(Exchanges):
    """All-reduces of nodes that all do the same at the same time, of which one stands for all.

    What a node sends to the n-th node after it, it gets from the n-th before it at the same time; in exchanges of
    pairs, from the node that it sends to. A part that is numbered by nodes has the number of the node before then. What
    of that is so, the exchange says, which refuses a chunk that does not belong to it.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sends_to: dict[int, int] = {}  # by node that chunks come from

    def send(self, key: _Key, node: int, chunk: wire.Chunk, payload: Any) -> bool:
        """Sends a chunk; returns whether it is borrowed."""
        self._host.send(node, len(payload), key[0], self.receive, key, node, chunk, payload)
        return len(payload) >= BORROW_FROM

    def tell(self, key: _Key, node: int, chunks: int) -> None:
        """Sends credit."""
        self._host.tell(node, self.credit, key, self._sends_to[node], chunks)

    def _take(self, run: _Run, target: int, chunk: wire.Chunk, payload: Any) -> None:
        nodes, part = self._host.cluster.nodes, chunk.part
        before = -target % nodes
        for position, number in ((before, part), (before, part - 1), (before, part + nodes - 1), (target, part)):
            self._sends_to[position] = target
            try:
                super()._take(run, position, replace(chunk, part=number), payload)
                return
            except ExchangeError:
                continue
        raise SimulationError(f"{nodes} nodes do not all do the same in {type(run.exchange).__name__}")


def cost_model(cluster: Cluster) -> CostModel:
    """Returns what daemons measure when they come up: the worst of all links, there and back."""
    costs = cluster.costs
    message = costs.send + costs.receive
    byte = max(link.byte for link in cluster.links) + costs.io_send + costs.io_receive
    return CostModel(max(link.latency for link in cluster.links) + message, max(byte, 1e-12))
