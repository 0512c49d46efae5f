"""What the engine makes happen: messages to workers and nodes, timers, and work on threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fusion_rt import wire
from fusion_rt.dtypes import DType
from fusion_rt.kernels import cpu
from fusiond.host.file_work import FileWork
from fusiond.host.loop import EventLoop
from fusiond.transport.mesh import Mesh
from fusiond.workers.stack_reader import StackReader

if TYPE_CHECKING:
    from fusiond.collectives.base import Job, Result
    from fusiond.host.thread_pool import KernelPool
    from fusiond.workers.connections import WorkerLink, Workers

_log = logging.getLogger("fusiond")
_OF_PARCELS = 1  # urgency: a loss that is averaged does not wait behind them


class Acting:
    """One daemon's `Outside`.

    Args:
        loop, mesh, stacks: the daemon's; no mesh in a job of one node.
        links: the connections of the local workers, by rank.
        first_done: called when the first operation is done.

    Attributes:
        workers, pool: the daemon's, once it runs.
        files: runs what waits for file systems.
    """

    def __init__(
        self,
        loop: EventLoop,
        mesh: Mesh | None,
        stacks: StackReader,
        links: Mapping[int, WorkerLink],
        first_done: Callable[[], None],
    ) -> None:
        self.workers: Workers
        self.pool: KernelPool
        self.files = FileWork(loop)
        self._loop = loop
        self._mesh = mesh
        self._stacks = stacks
        self._links = links
        self._first_done: Callable[[], None] | None = first_done

    def to_worker(self, rank: int, message: wire.DaemonMessage, result: Result | None = None) -> None:
        if self._first_done is not None and isinstance(message, wire.Done):
            self._first_done()
            self._first_done = None
        link = self._links.get(rank)
        if link is not None:
            segment = None if result is None else result.segment
            self.workers.send(link, message, -1 if segment is None else os.dup(segment.fd))

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        assert self._mesh is not None
        self._mesh.send(node, message)

    def send_chunk(self, node: int, chunk: wire.Chunk, payload: bytes | memoryview, urgency: int) -> bool:
        assert self._mesh is not None
        return self._mesh.send_payload(node, chunk, payload, urgency)

    def send_piece(self, node: int, piece: wire.Piece, payload: memoryview) -> None:
        assert self._mesh is not None
        self._mesh.send_payload(node, piece, payload, _OF_PARCELS)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        return self._loop.call_later(seconds, callback)

    def run_jobs(self, jobs: Sequence[Job], then: Callable[[BaseException | None], None]) -> None:
        self.pool.run(jobs, then)

    def has_kernels(self, dtype: DType) -> bool:
        return cpu.is_ready(dtype)

    def run_on_files(self, job: Job, then: Callable[[BaseException | None], None]) -> None:
        self.files.run(job, then)

    def locate(self, ranks: Sequence[int], then: Callable[[list[wire.Whereabouts]], None]) -> None:
        links = {rank: self._links.get(rank) for rank in ranks}
        self._stacks.locate({rank: None if link is None else link.stacks for rank, link in links.items()}, then)

    def warn(self, text: str) -> None:
        _log.warning("%s", text)

    def clock(self) -> float:
        return self._loop.clock()
