"""This worker's membership of a job: one `Runtime`, from `init` to `shutdown`.

It owns everything that belongs to the membership: the connection to the daemon, the daemon itself when this worker
started it, and the operations whose handles the script holds.

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
import weakref
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError
from fusion_rt.host.daemon_start import StartedDaemon
from fusion_rt.launchers import environment
from fusion_rt.torch.core import device, recording
from fusion_rt.tracing.recorder import NULL, Instrument

_LAST_TO_LEAVE = 10.0  # seconds that a worker which is alone waits for its daemon to end


class Runtime:
    """This worker's membership of a job.

    Attributes:
        client: the connection to the daemon; in a forked child, something that refuses every use.
        pending: operations whose handles the script holds, by handle.
        allocating: held by whoever allocates in the arena or collects.
        retired: arena segments of plans that are not used any more; noted by finalizers, released by `collect`.
        where: this worker's place, from its environment.
        daemon: the one that this worker started, if it did.
        in_node: reductions with other ranks of this node, which have to tell them when this one leaves.
        ruled: process sets whose ranks a rule gives, in the order in which they were registered.
        trace: records this worker's work.
    """

    def __init__(
        self,
        where: environment.Environment,
        client: Client,
        daemon: StartedDaemon | None,
        trace: Instrument = NULL,
    ) -> None:
        topology = client.topology
        self.client = client
        self.trace = client.trace = trace
        self.rank = where.rank
        self.size = topology.size
        self.local_rank = topology.local_rank(where.rank)
        self.local_size = topology.local_size(where.rank)
        self.cross_rank = topology.cross_rank(where.rank)
        self.cross_size = topology.cross_size(where.rank)
        self.pending: dict[int, Any] = {}
        self.retired: deque[int] = deque()
        self.in_node: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ruled: list[Any] = []
        self.allocating = threading.Lock()
        client.settle = self._settle
        self._groups: Counter[int | None] = Counter()  # by process set
        self._alike: Counter[tuple[int | None, str]] = Counter()  # groups of the same parameters
        self.where = where
        self.daemon = daemon
        self._finalizer = multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)
        _hook()

    def next_group(self, process_set: int | None, parameters: str) -> tuple[str, str]:
        """Returns a name for an optimizer's plans, the same on all members that make optimizers in the same order; and
        its identity, by which those are noticed that do not. `parameters`: a digest of their names and shapes."""
        self._groups[process_set] += 1
        self._alike[process_set, parameters] += 1
        return f"optimizer.{self._groups[process_set]}", f"{parameters}.{self._alike[process_set, parameters]}"

    def collect(self) -> None:
        """Releases memory that is not used any more: of plans, of tensors that were adopted, and where results were."""
        device.layer.sweep()
        self.client.adoptions.sweep()
        while self.retired:
            self.client.arena.drop_segment(self.retired.popleft())

    def _settle(self) -> None:
        for held in list(self.pending.values()):
            held.settle(self)

    def leave(self, error: str) -> bool:
        """Leaves the job; `error` is this worker's unhandled exception, if that is why.

        Returns: whether a client that has this one's as `previous` may come back.

        Raises:
            RuntimeError: a device has failed, and nothing else is why; the others are told.
        """
        _unhook()
        if error:  # a device may wait for ranks of this node that wait for no device any more
            for reduction in list(self.in_node):
                reduction.give_up(f"rank {self.rank} has left the job: {error.strip().splitlines()[-1]}")
        failed: RuntimeError | None = None
        try:
            device.layer.wait()
        except RuntimeError as raised:  # after its first error, a device fails at every call: that is no cause then
            if not error:
                failed, error = raised, f"{type(raised).__name__}: {raised}"
        returnable = self.client.leave(error)
        self.client.settle = None
        for reduction in list(self.in_node):
            reduction.leave()
        if failed is not None:
            raise failed
        return returnable

    def close(self, error: str = "") -> None:
        """Leaves the job, if it has not yet, for good. Raises as `leave`."""
        try:
            self.leave(error)
        finally:
            self.forget()
            self.client.close()
            recording.forget(self.trace)
            self.trace.close()
            if self.daemon is not None and self.size == 1:
                self.daemon.wait(_LAST_TO_LEAVE)

    def forget(self) -> None:
        """Cancels the work at exit: another has taken over the connection, or it is closed."""
        self._finalizer.cancel()

    def after_fork(self) -> None:
        """Leaves the connection to the parent, in a forked child."""
        self.client.abandon()
        self.in_node.clear()
        self.daemon = None
        sentence = (
            f"this process (pid {os.getpid()}) was forked from rank {self.rank} and has no connection to the daemon; "
            "only the rank itself can communicate"
        )
        self.client = _NoClient(sentence)  # type: ignore[assignment]


class _NoClient:
    """Substitutes for the client in a forked child."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def leave(self, error: str) -> bool:
        """Leaves nothing, since the parent is still there."""
        return False

    def close(self) -> None:
        """Closes nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        raise FusionError(self._sentence)


# Told by whoever keeps something from one operation to the next: optimizers.
before_join: list[Callable[[Runtime], object]] = []
"""Called when this worker is about to join (`hvd.join`), so that no rank waits for its pending work."""
after_join: list[Callable[[int], object]] = []
"""Called when all ranks have joined, with the last one."""
before_leaving: list[Callable[[], object]] = []
"""Called when this worker is about to leave the job by `hvd.shutdown`."""
at_the_end: list[Callable[[], object]] = []
"""Called when this worker has done its work, by `hvd.shutdown` or the end of the script; they exchange nothing."""

_runtime: Runtime | None = None
_left: Runtime | None = None  # by `shutdown`, with its connection, over which `init` may come back


def is_initialized() -> bool:
    """Tells whether this worker is in a job: between `init` and `shutdown`."""
    return _runtime is not None


def runtime() -> Runtime:
    """Returns this worker's membership.

    Raises:
        ValueError: `init` has not been called.
    """
    if _runtime is None:
        raise ValueError("fusion_rt has not been initialized; use hvd.init().")
    return _runtime


def rank() -> int:
    """Returns this worker's rank among all. Raises `ValueError` before `init`, as all of these do."""
    return runtime().rank


def size() -> int:
    """Returns the number of workers."""
    return runtime().size


def local_rank() -> int:
    """Returns this worker's rank among those of its node."""
    return runtime().local_rank


def local_size() -> int:
    """Returns the number of workers on this node."""
    return runtime().local_size


def cross_rank() -> int:
    """Returns the position of this node among those that have a worker of this local rank."""
    return runtime().cross_rank


def cross_size() -> int:
    """Returns the number of nodes that have a worker of this local rank."""
    return runtime().cross_size


def enter(entered: Runtime) -> None:
    """Sets this worker's membership of the job that it has joined."""
    global _runtime
    _runtime = entered


def leave(error: str = "") -> None:
    """Leaves the job for good, if this worker is or was in one; `error` is its unhandled exception, if that is why."""
    global _runtime, _left
    leaving = [runtime for runtime in (_runtime, _left) if runtime is not None]
    if _runtime is not None and not error:
        _end_work()
    _runtime = _left = None
    for one in leaving:
        one.close(error)


def _end_work() -> None:
    for told in at_the_end:
        told()


def step_out() -> None:
    """Leaves the job, if this worker is in one, so that `init` can come back."""
    global _runtime, _left
    if _runtime is not None:
        _end_work()
        leaving, _runtime = _runtime, None
        if leaving.leave(""):
            _left = leaving
        else:
            leaving.close()


def returning(where: environment.Environment) -> Runtime | None:
    """Returns the membership that `step_out` left, if its daemon is that of this place; its caller has to make use of
    it."""
    global _left
    found, _left = _left, None
    if found is not None and not where.has_daemon_of(found.where):
        found.close()
        found = None
    if found is not None:
        found.forget()
    return found


_previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = None


def _hook() -> None:
    """Has `sys.excepthook` leave the job first, unless it does already, under another hook that was put around it."""
    global _previous_hook
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _excepthook


def _unhook() -> None:
    """Restores the `sys.excepthook` of before, unless another one was put around it (`torch.distributed` does that)."""
    global _previous_hook
    if sys.excepthook is _excepthook and _previous_hook is not None:
        sys.excepthook, _previous_hook = _previous_hook, None


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    previous = _previous_hook or sys.__excepthook__
    leave("".join(traceback.format_exception(kind, error, trace)))
    previous(kind, error, trace)


def _at_exit() -> None:
    """Leaves the job at the end of the interpreter, or of a process of `multiprocessing`, which runs no `atexit`
    handlers, but this, and while the exception that ends it is on its way."""
    error = sys.exc_info()[1]
    leave("".join(traceback.format_exception(error)) if isinstance(error, Exception) else "")


def _after_fork() -> None:
    for one in (_runtime, _left):
        if one is not None:
            one.after_fork()


os.register_at_fork(after_in_child=_after_fork)
