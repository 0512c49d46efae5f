"""The node's own part of a reduction: its workers' arenas, block by block, on several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion_rt import wire
from fusion_rt.kernels import cpu
from fusion_rt.kernels.ordinary import Operand
from fusiond.collectives.base import Array, Exchange, ExchangeError, Job, Port, Reducer


def local_jobs(reducer: Reducer, sources: Sequence[Operand], target: Array, threads: int) -> Sequence[Job]:
    """Returns jobs that leave this node's contribution in `target`; none when it is there already."""
    if len(sources) == 1 and sources[0] is target and reducer.prescale == 1.0:
        return ()
    if threads == 1:
        return [lambda: reducer.local(sources, target)]
    return split_jobs(
        lambda low, high: reducer.local([source[low:high] for source in sources], target[low:high]),
        len(target),
        threads,
        reducer.dtype.itemsize,
    )


def split_jobs(work: Callable[[int, int], None], length: int, threads: int, itemsize: int) -> list[Job]:
    """Returns jobs that call `work(low, high)` for ranges that together are all of `length` elements."""

    def job(low: int, high: int) -> Job:
        return lambda: work(low, high)

    return [job(low, high) for low, high in cpu.split(length, threads, itemsize)]


def shared_jobs(pieces: Sequence[tuple[Callable[[int, int], None], int, int]], threads: int) -> list[Job]:
    """Returns at most `threads` jobs, each of which does a part of every piece of work.

    Args:
        pieces: functions to be called with ranges, the length that these add up to, and the bytes of an element.
    """
    shares: list[list[Job]] = [[] for _ in range(threads)]
    for work, length, itemsize in pieces:
        for share, job in zip(shares, split_jobs(work, length, threads, itemsize), strict=False):
            share.append(job)

    def all_of(share: Sequence[Job]) -> Job:
        def do() -> None:
            for job in share:
                job()

        return do

    return [all_of(share) for share in shares if share]


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
