"""The daemon's implementation of an engine's `Effects`: most of it calls a part of the daemon directly."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from fusion_rt import wire
from fusion_rt.kernels import cpu
from fusiond.host.file_work import FileWork
from fusiond.host.loop import EventLoop, Timer
from fusiond.transport.mesh import Mesh
from fusiond.workers.stack_reader import StackReader

if TYPE_CHECKING:
    from fusiond.core.result import Result
    from fusiond.core.tracing import Job
    from fusiond.host.thread_pool import KernelPool
    from fusiond.workers.connections import WorkerLink, Workers

_log = logging.getLogger("fusiond")
_OF_PARCELS = 1  # urgency: a loss that is averaged does not wait behind them


class DaemonEffects:
    """The `Effects` of one daemon, in one formation.

    Args:
        loop, mesh, stacks: the daemon's; no mesh in a job of one node.
        links: the connections of the local workers, by rank.
        files: runs what waits for file systems.
        first_done: called when the first operation is done.

    Attributes:
        workers, pool: the daemon's, once it runs.
    """

    def __init__(
        self,
        loop: EventLoop,
        mesh: Mesh | None,
        stacks: StackReader,
        links: Mapping[int, WorkerLink],
        files: FileWork,
        first_done: Callable[[], None],
    ) -> None:
        self.workers: Workers
        self.pool: KernelPool
        self._stacks = stacks
        self._links = links
        self._first_done: Callable[[], None] | None = first_done
        self._loop = loop
        self._timers: weakref.WeakSet[Timer] = weakref.WeakSet()
        self.clock = loop.clock
        self.has_kernels = cpu.is_ready
        self.run_on_files = files.run
        self.warn: Callable[[str], None] = partial(_log.warning, "%s")
        send_payload: Callable[..., bool] = _no_peers if mesh is None else mesh.send_payload
        self.to_node: Callable[[int, wire.PeerMessage], None] = _no_peers if mesh is None else mesh.send
        self.traffic: Callable[[], tuple[int, int]] = (lambda: (0, 0)) if mesh is None else mesh.traffic
        self.send_chunk = send_payload
        self.send_piece = partial(send_payload, urgency=_OF_PARCELS)

    def end(self) -> None:
        """Makes nothing happen from now on, whatever an engine whose time is over still wants."""
        for timer in list(self._timers):
            timer.cancel()
        self.to_node = lambda node, message: None
        self.send_chunk = _not_sent
        self.send_piece = partial(_not_sent, urgency=_OF_PARCELS)
        self._links = {}

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = self._loop.call_later(seconds, callback)
        self._timers.add(timer)
        return timer

    def to_worker(self, rank: int, message: wire.DaemonMessage, result: Result | None = None) -> None:
        if self._first_done is not None and isinstance(message, wire.Done):
            self._first_done()
            self._first_done = None
        link = self._links.get(rank)
        if link is not None:
            segment = None if result is None else result.segment
            self.workers.send(link, message, -1 if segment is None else os.dup(segment.fd))

    def run_jobs(self, jobs: Sequence[Job], then: Callable[[BaseException | None], None]) -> None:
        self.pool.run(jobs, then)

    def locate(self, ranks: Sequence[int], then: Callable[[list[wire.Whereabouts]], None]) -> None:
        links = {rank: self._links.get(rank) for rank in ranks}
        self._stacks.locate({rank: None if link is None else link.stacks for rank, link in links.items()}, then)


def _not_sent(*_: object, **__: object) -> bool:
    return False


def _no_peers(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a job of one node has no peers to send anything to")
