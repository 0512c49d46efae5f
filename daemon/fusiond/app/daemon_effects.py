"""The daemon's implementation of an engine's `Effects`: most of it calls a part of the daemon directly."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

from fusion_rt import wire
from fusion_rt.kernels import cpu
from fusiond.host.file_work import FileWork
from fusiond.host.loop import EventLoop, Timer
from fusiond.transport.mesh import Mesh
from fusiond.workers.stack_reader import StackReader

if TYPE_CHECKING:
    from fusiond.core.result import Result
    from fusiond.host.thread_pool import KernelPool
    from fusiond.operations.thread_work import RunJobs
    from fusiond.workers.connections import WorkerLink, Workers

_log = logging.getLogger("fusiond")
_OF_PARCELS = 1  # urgency: a loss that is averaged does not wait behind them


class FirstDone(Protocol):
    """A formation, which hears when its first operation is done."""

    def first_done(self) -> None:
        """An operation is done."""


class DaemonEffects:
    """The `Effects` of one daemon, in one formation.

    Args:
        loop, mesh, stacks: the daemon's; no mesh in a job of one node.
        links: the connections of the local workers, by rank.
        files: runs work that waits for file systems.
        formation: hears when the first operation is done.

    Attributes:
        workers: the daemon's, once it runs.
    """

    def __init__(
        self,
        loop: EventLoop,
        mesh: Mesh | None,
        stacks: StackReader,
        links: Mapping[int, WorkerLink],
        files: FileWork,
        formation: FirstDone,
    ) -> None:
        self.workers: Workers
        self.run_jobs: RunJobs
        self.job_failed: Callable[[str], None]
        self.to_worker: Callable[..., None] = self._first_to_worker
        self._stacks = stacks
        self._links = links
        self._formation = formation
        self._loop = loop
        self._timers: weakref.WeakSet[Timer] = weakref.WeakSet()
        self.clock = loop.clock
        self.has_kernels = cpu.is_ready
        self.run_on_files = files.run
        self.warn: Callable[[str], None] = partial(_log.warning, "%s")
        send_payload: Callable[..., bool] = _no_peers if mesh is None else mesh.send_payload
        self.to_node: Callable[[int, wire.PeerMessage], None] = _no_peers if mesh is None else mesh.send
        self.traffic: Callable[[], tuple[int, int]] = (lambda: (0, 0)) if mesh is None else mesh.traffic
        self.when_received: Callable[[Callable[[], None]], None] = _call if mesh is None else mesh.when_received
        self.send_chunk = send_payload
        self.send_piece = partial(send_payload, urgency=_OF_PARCELS)

    def begin(self, workers: Workers, pool: KernelPool, job_failed: Callable[[str], None]) -> None:
        """The daemon runs: its workers can be answered, and jobs given to its threads."""
        self.workers = workers
        self.run_jobs = pool.run
        self.job_failed = job_failed

    def end(self) -> None:
        """Makes nothing happen from now on, whatever an engine whose time is over still wants."""
        for timer in list(self._timers):
            timer.cancel()
        self.to_node = lambda node, message: None
        self.send_chunk = _not_sent
        self.send_piece = partial(_not_sent, urgency=_OF_PARCELS)
        self.to_worker = lambda rank, message, result=None: None
        self._links = {}

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = self._loop.call_later(seconds, callback)
        self._timers.add(timer)
        return timer

    def _first_to_worker(self, rank: int, message: wire.DaemonMessage, result: Result | None = None) -> None:
        """Sends a worker a message while no operation is done yet."""
        answer = partial(self.workers.answer, self._links)
        if isinstance(message, wire.Done):
            self._formation.first_done()
            self.to_worker = answer
        answer(rank, message, result)

    def locate(self, ranks: Sequence[int], then: Callable[[list[wire.Whereabouts]], None]) -> None:
        links = {rank: self._links.get(rank) for rank in ranks}
        self._stacks.locate({rank: None if link is None else link.stacks for rank, link in links.items()}, then)


def _call(then: Callable[[], None]) -> None:
    then()


def _not_sent(*_: object, **__: object) -> bool:
    return False


def _no_peers(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a job of one node has no peers to send anything to")
