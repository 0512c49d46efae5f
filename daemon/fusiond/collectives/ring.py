"""Ring all-reduce: reduce-scatter, then all-gather, in a pipeline of chunks; sends 2 n (N - 1) / N whatever N is.

The bucket is divided into N segments. Segment s starts at place s of the ring and travels to the right: at each of the
next N - 1 nodes that node's part is added (hops 0 to N - 2). The last of them owns the segment: it computes the final
value, once, and the segment goes round again as it is (hops N - 1 to 2 N - 3). So all ranks get the same bits, and the
order in which parts are added depends on the topology alone. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009.

Each chunk goes on as soon as it has come, without a barrier between the steps. The reduction is in place in the first
local worker's part of the arena. That is safe by causality: a chunk is overwritten with its final value only after
the final value has come, which contains the values sent from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_rt import wire
from fusion_rt.codecs.base import BucketCodec
from fusion_rt.core import scratch
from fusiond.collectives.base import (
    Array,
    Exchange,
    ExchangeError,
    Job,
    Once,
    Port,
    Reducer,
    chunk_starts,
    local_jobs,
    of_partials,
)


class Ring(Exchange):
    """All-reduce of equal arrays on every node.

    Args:
        port: N nodes, N >= 2.
        reducer: how to combine.
        codec: of chunks on the wire.
        sources, outputs: n elements each, of the local members; an output may be a source.
        order: positions in the order in which the ring visits them, the same on all nodes; none: as they are. The order
            in which parts are added follows it.
    """

    def __init__(
        self,
        port: Port,
        reducer: Reducer,
        codec: BucketCodec,
        sources: Sequence[Array],
        outputs: Sequence[Array],
        order: Sequence[int] = (),
    ) -> None:
        super().__init__(port)
        self._reducer = reducer
        self._codec = codec
        self._sources = sources
        self._outputs = outputs
        self._mine = scratch.empty(len(outputs[0]), reducer.partial.storage) if reducer.widens else outputs[0]
        self._partials = of_partials(reducer, codec)
        self.lanes = codec.is_pure
        n, nodes = len(self._mine), port.nodes
        self.local_nbytes = n * reducer.dtype.itemsize * len(sources)
        self._bounds = [n * i // nodes for i in range(nodes + 1)]
        self._step = max(1, port.chunk_bytes // reducer.partial.itemsize)
        order = order or range(nodes)
        self._place = order.index(port.position)
        self._right = order[(self._place + 1) % nodes]
        self._left = order[self._place - 1]
        counts = [len(chunk_starts(self._length(s), self._step)) for s in range(nodes)]
        owned = (self._place + 1) % nodes
        self._sent_nbytes = 0
        self._once = Once(2 * sum(counts) - counts[self._place] - counts[owned])

    def jobs(self, threads: int) -> Sequence[Job]:
        return local_jobs(self._reducer, self._sources, self._mine, threads)

    def start(self) -> None:
        segment = self._place
        encoded: list[tuple[int, memoryview]] = []

        def encode() -> None:
            for start in chunk_starts(self._length(segment), self._step):
                low, high = self._range(segment, start)
                encoded.append((start, self._partials.encode(low, self._mine[low:high])))

        def send() -> None:
            for start, payload in encoded:
                self._send(segment, start, 0, payload)
            if self._once.complete:  # nothing to come: fewer elements than nodes, or none
                self._end()

        # Elements as they are need no pass over memory.
        nbytes = 0 if self._partials.lossless else self._length(segment) * self._reducer.partial.itemsize
        self.port.work(nbytes, encode, send)

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        nodes, hop = self.port.nodes, chunk.hop
        travelled = (self._place - chunk.part - 1) % nodes  # hops before it came here for the first time
        gathering = hop >= nodes - 1
        if (
            position != self._left
            or chunk.part >= nodes
            or hop > 2 * nodes - 3
            or chunk.start % self._step
            or chunk.start >= self._length(chunk.part)
            or hop != (travelled + nodes if gathering and travelled < nodes - 1 else travelled)
        ):
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} does not belong to this ring")
        self._once.came(chunk)
        low, high = self._range(chunk.part, chunk.start)
        passed_on = payload

        def take() -> None:
            nonlocal passed_on
            if gathering:
                values = self._codec.decoded(low, payload, high - low)
                for output in self._outputs:
                    output[low:high] = values
            elif hop < nodes - 2:
                mine = self._mine[low:high]
                self._reducer.combine(self._partials.decoded(low, payload, high - low), mine, mine)
                passed_on = self._partials.encode(low, mine)
            else:
                passed_on = self._finalize(low, high, payload)

        def go_on() -> None:
            self._once.taken += 1
            if hop < 2 * nodes - 3:
                self._send(chunk.part, chunk.start, hop + 1, passed_on)
            if self._once.complete:
                self._end()

        # No other chunk has these elements before this one has been passed on.
        self.port.beside(take, go_on)

    def _end(self) -> None:
        dense = 2 * len(self._mine) * self._reducer.dtype.itemsize * (self.port.nodes - 1) // self.port.nodes
        self._codec.note_sent(self._sent_nbytes, dense)
        self.port.finish()

    def _finalize(self, low: int, high: int, payload: memoryview) -> memoryview:
        """Computes the final value of an owned chunk, here and as it will be everywhere else."""
        parts = [self._partials.decoded(low, payload, high - low), self._mine[low:high]]
        outputs = [output[low:high] for output in self._outputs]
        self._reducer.final(parts, outputs)
        packed = self._codec.encode(low, outputs[0])
        if not self._codec.lossless:
            values = self._codec.decoded(low, memoryview(packed), high - low)
            for output in outputs:
                output[:] = values
        return packed

    def _send(self, segment: int, start: int, hop: int, payload: memoryview | bytes) -> None:
        self._sent_nbytes += len(payload)
        self.port.send(self._right, segment, start, hop, payload)

    def _length(self, segment: int) -> int:
        return self._bounds[segment + 1] - self._bounds[segment]

    def _range(self, segment: int, start: int) -> tuple[int, int]:
        """Elements of the bucket in the chunk at `start` of a segment."""
        low = self._bounds[segment] + start
        return low, min(low + self._step, self._bounds[segment + 1])
