"""All-reduce of a low-rank approximation (PowerSGD, Vogels et al., 2019): two dense ones, of its factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion_rt import wire
from fusion_rt.codecs.base import BucketCodec, Layout
from fusion_rt.codecs.dense import Dense
from fusion_rt.codecs.error_feedback import F32
from fusion_rt.codecs.factoring import FactoringBucketCodec
from fusiond.collectives.base import Array, Exchange, ExchangeError, Job, Port, Reducer, local_jobs, spoil

_PARTS = 1 << 20  # more than an all-reduce has; those of the second begin here
MakeExchange = Callable[[Port, Reducer, BucketCodec, Array], Exchange]
_Early = tuple[int, wire.Chunk, bytes]


class _Stage:
    """The port of one of the two all-reduces: its parts are numbered apart, and its end is not that of the exchange."""

    def __init__(self, port: Port, number: int, then: Callable[[], None]) -> None:
        self.position, self.nodes, self.chunk_bytes = port.position, port.nodes, port.chunk_bytes
        self._port, self._number, self._then = port, number, then
        self.nbytes = 0

    def send(self, position: int, part: int, start: int, hop: int, payload: memoryview | bytes) -> None:
        self.nbytes += len(payload)
        self._port.send(position, self._number * _PARTS + part, start, hop, payload)

    def work(self, nbytes: int, job: Job, then: Callable[[], None]) -> None:
        self._port.work(nbytes, job, then)

    def beside(self, job: Job, then: Callable[[], None]) -> None:
        self._port.beside(job, then)

    def finish(self) -> None:
        self._then()


class LowRank(Exchange):
    """Sums this node's factors P over all nodes, and then its factors Q.

    Args:
        port: N nodes, N >= 2.
        reducer: a sum, or an average.
        codec: the bucket's, with its residual.
        sources, outputs: all elements of the bucket each, of the local members; an output may be a source.
        all_reduce: makes the exchange that adds up an array of float32 in place.
    """

    def __init__(
        self,
        port: Port,
        reducer: Reducer,
        codec: FactoringBucketCodec,
        sources: Sequence[Array],
        outputs: Sequence[Array],
        all_reduce: MakeExchange,
    ) -> None:
        super().__init__(port)
        self._reducer, self._scale = reducer, reducer.postscale * codec.loss_scale
        self._codec = codec
        self._sources, self._outputs = sources, outputs
        self._all_reduce = all_reduce
        self._values: Array = outputs[0]
        self._factors: list[Array] = []
        self._stages: list[_Stage] = []
        self._exchange: Exchange | None = None
        self._early: list[_Early] = []
        self._is_applied = False
        self.local_nbytes = len(outputs[0]) * reducer.dtype.itemsize * (len(sources) + 3)  # the inputs of the products

    def jobs(self, threads: int) -> Sequence[Job]:
        return [self._first]

    def _first(self) -> None:
        values = self._outputs[0]
        if len(self._sources) == 1 and self._reducer.prescale == 1.0:
            values = self._sources[0]
        for job in local_jobs(self._reducer, self._sources, values, 1):
            job()
        self._values = values
        self._codec.keep()
        self._factors.append(self._codec.start(values))

    def abandon(self) -> None:
        """No rank takes this step: the residual is that of before."""
        if self._factors and self._codec.go_back is not None:
            self._codec.go_back()
        elif self._factors and not self._is_applied:  # else the result is where the gradient was
            self._codec.undo(self._values)
            self._codec.step -= 1  # which nodes that had not begun have not counted
        self._factors = []

    def start(self) -> None:
        self._sum(self._first_summed)

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        assert self._exchange is not None
        number, current = chunk.part // _PARTS, len(self._stages) - 1
        if number > current and number < 2:  # a peer is ahead, by no more than its credit
            self._early.append((position, chunk, bytes(payload)))
            return
        if number != current:
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} does not belong to this exchange")
        part = wire.Chunk(chunk.key, chunk.digest, chunk.part % _PARTS, chunk.start, chunk.hop)
        self._exchange.receive(position, part, payload)

    def _first_summed(self) -> None:
        self._work(self._second, self._begin_second)

    def _second(self) -> None:
        if self._codec.usable(self._factors[0]):
            self._factors.append(self._codec.second(self._factors[0]))
        else:
            self._undo()

    def _begin_second(self) -> None:
        if not self._factors:
            self._finish()
            return
        self._sum(self._second_summed)
        early, self._early = self._early, []
        for position, chunk, payload in early:
            self.receive(position, chunk, memoryview(payload))

    def _second_summed(self) -> None:
        self._work(self._apply, self._finish)

    def _apply(self) -> None:
        if self._codec.usable(self._factors[1]):
            self._is_applied = True
            self._codec.finish(self._factors[1], self._outputs, self._scale, self._reducer.divisor)
        else:
            self._undo()

    def _undo(self) -> None:
        """Undoes the step: the gradient of some node is not finite. All nodes have the same sum, and so all do this."""
        self._codec.undo(self._values)
        spoil(self._outputs, self._codec.layout)
        self._factors = []

    def _work(self, job: Job, then: Callable[[], None]) -> None:
        self.port.work(self.local_nbytes, job, then)

    def _finish(self) -> None:
        nodes = self.port.nodes
        dense = 2 * len(self._outputs[0]) * self._reducer.dtype.itemsize * (nodes - 1) // nodes
        self._codec.note_sent(sum(stage.nbytes for stage in self._stages), dense)
        self._stages, self._exchange = [], None  # which call back into this exchange: else a cycle would hold it
        self.port.finish()

    def _sum(self, then: Callable[[], None]) -> None:
        """Starts to add up the last factors over all nodes."""
        factors = self._factors[-1]
        stage = _Stage(self.port, len(self._stages), then)
        self._stages.append(stage)
        self._exchange = self._all_reduce(stage, Reducer("sum", F32), Dense().open(Layout(F32, len(factors))), factors)
        self._exchange.start()
