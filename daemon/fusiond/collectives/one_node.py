"""All-reduce between the workers of one node: their arenas, block by block, on several threads."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_rt import wire
from fusion_rt.kernels.ordinary import Operand
from fusiond.collectives.base import Exchange, ExchangeError, Job, Port, Reducer, split_jobs


class OneNode(Exchange):
    """All-reduce of a process set whose members share a node: one pass over the arenas, and nothing to send."""

    def __init__(self, port: Port, reducer: Reducer, sources: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        super().__init__(port)
        self._reducer = reducer
        self._sources = sources
        self._outputs = outputs
        self.local_nbytes = len(sources[0]) * reducer.dtype.itemsize * len(sources)

    def jobs(self, threads: int) -> Sequence[Job]:
        def work(low: int, high: int) -> None:
            sources = [source[low:high] for source in self._sources]
            self._reducer.whole(sources, [output[low:high] for output in self._outputs])

        if threads == 1:
            return [lambda: self._reducer.whole(self._sources, self._outputs)]
        return split_jobs(work, len(self._sources[0]), threads, self._reducer.dtype.itemsize)

    def start(self) -> None:
        self.port.finish()

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        raise ExchangeError(f"node {position} sent a chunk of {chunk.key.name!r}, which concerns one node only")
