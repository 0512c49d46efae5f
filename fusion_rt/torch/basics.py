"""Joining and leaving the job, and who this worker is in it.

One `Runtime` owns everything that belongs to one membership of a job: the connection to the daemon, the daemon itself
when this worker started it, and the operations whose handles the script holds. `init` makes it, `shutdown` ends it.

A script that ends with an unhandled exception takes its traceback along when it leaves, so that the other ranks raise
the true cause. A forked child (a DataLoader worker, say) still knows its ranks, but has no connection: it would read
the answers that its parent waits for.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import threading
import traceback
from collections import deque
from types import TracebackType
from typing import Any, NoReturn

from fusion_rt import autostart, environment
from fusion_rt.client import Client
from fusion_rt.errors import FusionError
from fusion_rt.settings import Settings
from fusion_rt.topology import GLOBAL_SET

_LAST_TO_LEAVE = 10.0  # seconds that a worker which is alone waits for its daemon to end


class ProcessSet:
    """A set of ranks that take part in an operation. There is one for now: `global_process_set`, all ranks.

    Attributes:
        process_set_id: what it is called in messages.
    """

    def __init__(self, process_set_id: int) -> None:
        self.process_set_id = process_set_id

    @property
    def ranks(self) -> list[int]:
        """Its members, ascending. Raises `ValueError` before `init`."""
        return list(runtime().client.process_sets[self.process_set_id].ranks)

    def size(self) -> int | None:
        """Number of its members; None before `init`."""
        return len(self.ranks) if is_initialized() else None

    def rank(self) -> int | None:
        """This worker's position among its members; None before `init`, -1 for a worker that is not a member."""
        if not is_initialized():
            return None
        return self.ranks.index(rank()) if self.included() else -1

    def included(self) -> bool | None:
        """Whether this worker is a member; None before `init`."""
        return rank() in self.ranks if is_initialized() else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id})"


global_process_set = ProcessSet(GLOBAL_SET)


class Runtime:
    """This worker's membership of a job.

    Attributes:
        client: the connection to the daemon; in a forked child, something that refuses every use.
        pending: operations whose handles the script holds, by handle.
        retired: arena segments of plans that nobody uses any more; noted by finalizers, given up by `allocating`.
    """

    def __init__(self, where: environment.Environment, client: Client, daemon: autostart.StartedDaemon | None) -> None:
        topology = client.topology
        self.client = client
        self.rank = where.rank
        self.size = topology.size
        self.local_rank = topology.local_rank(where.rank)
        self.local_size = topology.local_size(where.rank)
        self.cross_rank = topology.cross_rank(where.rank)
        self.cross_size = topology.cross_size(where.rank)
        self.pending: dict[int, Any] = {}
        self.retired: deque[int] = deque()
        self.allocating = threading.Lock()
        self._groups = 0
        self._daemon = daemon
        self._finalizer = multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)
        self._previous_hook = sys.excepthook
        sys.excepthook = _excepthook

    def next_group(self) -> str:
        """A name for a group of tensors to plan, the same on all ranks that make their optimizers in one order."""
        self._groups += 1
        return f"optimizer.{self._groups}"

    def collect(self) -> None:
        """Gives up the segments of plans that nobody uses any more."""
        while self.retired:
            self.client.arena.drop_segment(self.retired.popleft())

    def close(self, error: str) -> None:
        """Leaves the job; `error` is this worker's unhandled exception, if that is why."""
        self._finalizer.cancel()
        if sys.excepthook is _excepthook:
            sys.excepthook = self._previous_hook
        self.client.close(error)
        if self._daemon is not None and self.local_size == 1:
            self._daemon.wait(_LAST_TO_LEAVE)

    def previous_hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """What handled unhandled exceptions before `init`."""
        self._previous_hook(kind, error, trace)

    def after_fork(self) -> None:
        """In a forked child: leaves the connection to the parent."""
        self.client.abandon()
        self._daemon = None
        sentence = (
            f"this process (pid {os.getpid()}) was forked from rank {self.rank} and has no connection to the daemon; "
            "only the rank itself can communicate"
        )
        self.client = _NoClient(sentence)  # type: ignore[assignment]


class _NoClient:
    """Stands in for the client in a forked child."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def close(self, error: str) -> None:
        """Leaves nothing, since the parent is still there."""

    def __getattr__(self, name: str) -> NoReturn:
        raise FusionError(self._sentence)


_runtime: Runtime | None = None


def init(comm: None = None, process_sets: None = None) -> None:
    """Joins the job, and returns when every rank has. Does nothing when this worker is in it already.

    `fusionrun` has started the daemon of this node; under `torchrun` on one host, or alone, local rank 0 starts it.

    Args:
        comm, process_sets: Horovod's; a job has all its ranks and the one process set for now, so leave them out.

    Raises:
        FusionError: the environment is inconsistent, or the daemon or another rank did not come up in time.
        ValueError: `comm` or `process_sets` was given.
    """
    global _runtime
    if _runtime is not None:
        return
    if comm or process_sets:
        raise ValueError("init() of a part of the ranks (comm) or with process sets is not supported; leave them out")
    where = environment.detect()
    settings = Settings.from_env()
    path = autostart.path_of_socket(where, settings)
    daemon = autostart.start(where, settings) if not where.socket and where.local_rank == 0 else None
    client = Client(path, where.job, where.rank, settings.start_timeout)
    if client.topology.size != where.size:
        client.close()
        raise FusionError(f"this worker was started as one of {where.size}, but the daemon at {path} belongs to a job "
                          f"of {client.topology.size}")  # fmt: skip
    _runtime = Runtime(where, client, daemon)


def shutdown() -> None:
    """Leaves the job. Operations under way fail; other ranks' operations that still need this rank fail, too."""
    _leave("")


def is_initialized() -> bool:
    """Whether this worker is in a job: between `init` and `shutdown`."""
    return _runtime is not None


def runtime() -> Runtime:
    """This worker's membership.

    Raises:
        ValueError: `init` has not been called.
    """
    if _runtime is None:
        raise ValueError("fusion_rt has not been initialized; use hvd.init().")
    return _runtime


def rank() -> int:
    """This worker's rank among all. Raises `ValueError` before `init`, as all of these do."""
    return runtime().rank


def size() -> int:
    """Number of workers."""
    return runtime().size


def local_rank() -> int:
    """This worker's rank among those of its node."""
    return runtime().local_rank


def local_size() -> int:
    """Number of workers on this node."""
    return runtime().local_size


def cross_rank() -> int:
    """Position of this node among those that have a worker of this local rank."""
    return runtime().cross_rank


def cross_size() -> int:
    """Number of nodes that have a worker of this local rank."""
    return runtime().cross_size


def _leave(error: str) -> None:
    global _runtime
    if _runtime is not None:
        leaving, _runtime = _runtime, None
        leaving.close(error)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    current = _runtime
    _leave("".join(traceback.format_exception(kind, error, trace)))
    if current is not None:
        current.previous_hook(kind, error, trace)


def _at_exit() -> None:
    """At the end of the interpreter; or of a process of `multiprocessing`, which runs no `atexit` handlers, but this,
    and while the exception that ends it is on its way."""
    error = sys.exc_info()[1]
    _leave("".join(traceback.format_exception(error)) if isinstance(error, Exception) else "")


def _after_fork() -> None:
    if _runtime is not None:
        _runtime.after_fork()


os.register_at_fork(after_in_child=_after_fork)
