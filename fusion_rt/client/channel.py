"""The worker's end of the connection to the daemon: messages, operations under way, their clocks, and their ends.

There is no thread: a thread that waits reads the socket, for itself and for every other one that waits. A message that
completes an operation costs one `recv`, and a worker that computes costs nothing.

The socket has time-outs, so that a thread that waits checks twice a second whether the channel has failed meanwhile,
and whether the daemon is silent for too long. A silent daemon is asked (`wire.Ping`), and its answer counts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from fusion_rt import wire
from fusion_rt.client import joining
from fusion_rt.client.operation_clocks import Clocks
from fusion_rt.core.errors import FusionError, HorovodInternalError, failure_of
from fusion_rt.host.arena import Segment
from fusion_rt.local import packets
from fusion_rt.tracing.format import Flush, Kind
from fusion_rt.tracing.recorder import NULL, Instrument

# As plain integers: asking an enumeration for a member, and packing it, costs as much as recording a number.
_DONTWAIT = int(socket.MSG_DONTWAIT)
_LOOK = 0.5  # seconds
_TIMEVAL = struct.pack("ll", 0, int(_LOOK * 1e6))
_SUBMITTED, _DONE = int(Kind.SUBMITTED), int(Kind.DONE)
_WAIT_BEGIN, _WAIT_END = int(Kind.WAIT_BEGIN), int(Kind.WAIT_END)

_NEVER_FREED: list[object] = []
"""Memory of operations whose end nobody has told: freed, it could be somebody else's when the daemon writes into it."""

terms = partial(wire.Ready, 0, 0, 0, 0)
"""Makes the message about a worker's part of a planned bucket; `Channel.ready` sets the fields that say which."""


class Operation:
    """An operation under way.

    Attributes:
        name: the tensor's name, for messages to people.
        done: whether it has ended, with a result or an error.
        error: why it failed, or None.
        inline: the result, when it is small.
        output: private copy-on-write mapping of the result, when the daemon has sent one (allgather, alltoall).
        sizes: rows received from each rank (allgather, alltoall), or the answer of an operation without data.
        missing: of one whose time was up: the ranks that had not submitted it.
        plan: the answer to a proposal.
        release: called when it ends, by the thread that reads its answer, when all but `done` is set.
        keeps: owns memory that the daemon reads and writes until it has ended.
        lent: bytes of the arena that it has, and that go back there when it has ended.
        about: the name, clock and plan under which it is recorded.
    """

    done = False
    error: str | None = None
    inline: bytes | None = None
    output: Segment | None = None
    sizes: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    plan: wire.Plan | None = None
    release: Callable[[Operation], None] | None = None
    keeps: object = None
    lent = 0

    def __init__(self, handle: int, name: str, about: tuple[str, int, int]) -> None:
        self.handle, self.name, self.about = handle, name, about


class Completion(NamedTuple):
    """The time that an operation has, and its end.

    Attributes:
        seconds: after which it fails unless it has ended; 0: as long as any operation may wait.
        release: see `Operation`.
        keeps: owner of memory that is given by address, which the daemon reads and writes: kept until it has ended.
        lent: see `Operation`.
    """

    seconds: float = 0.0
    release: Callable[[Operation], None] | None = None
    keeps: object = None
    lent: int = 0


NO_LIMIT = Completion()


class Awaited(Protocol):
    """Something that a thread waits for."""

    @property
    def done(self) -> bool:
        """True once it has come about."""


class Channel:
    """A worker's end of its connection to the daemon.

    Args:
        sock: the connection.
        rank: this worker's.
        is_elastic: ranks may come and go, and another membership of the job follows one that has failed.

    Attributes:
        socket: the connection.
        is_elastic: as given.
        clocks: of this worker's operations.
        failure: why the job is over for this worker, or None.
        told: the daemon has told that; else it is gone, or silent.
        reading: a thread reads the socket.
        patience: seconds without an answer after which the daemon is taken for stuck; 0: never.
        trace: records the events of this channel.
    """

    def __init__(self, sock: socket.socket, rank: int, is_elastic: bool = False) -> None:
        self.socket = sock
        self.is_elastic = is_elastic
        self.clocks = Clocks(0)
        self.failure: str | None = None
        self.told = False
        self.reading = False
        self.patience = 0.0
        self.trace: Instrument = NULL
        self._rank = rank
        self._operations: dict[int, Operation] = {}
        self._handles = itertools.count(1)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for the one that reads
        self._silent = 0.0  # seconds of waiting during which nothing has come
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, limit, _TIMEVAL)

    @property
    def under_way(self) -> int:
        """Number of operations that have not ended."""
        return len(self._operations)

    def lent(self) -> list[int]:
        """Returns the bytes of the arena that each operation under way gives back when it ends, of those that do."""
        return [operation.lent for operation in list(self._operations.values()) if operation.lent]

    def begin(self, name: str, about: tuple[str, int, int] | None = None) -> Operation:
        """Registers a new operation, which the caller is about to submit. `about`: see `Operation`.

        Raises:
            HorovodInternalError: the job has failed.
        """
        if self.failure is not None:
            raise HorovodInternalError(self.failure)
        operation = Operation(next(self._handles), name, about or (name, 0, 0))
        self._operations[operation.handle] = operation
        return operation

    def ready(
        self, name: str, plan: int, bucket: int, message: wire.Ready, nbytes: int = 0, flush: Flush = Flush.STEP
    ) -> Operation:
        """Submits this worker's part of a planned bucket, which is in the arena.

        Args:
            name: of the bucket, for messages to people.
            plan, bucket: ids of the plan and of the bucket in it.
            message: made by `terms`; sent with the number of its part.
            nbytes, flush: its size, and why it is submitted now; only recorded.

        Raises:
            HorovodInternalError: the job has failed.
        """
        # A home begins with its seed, which is not counted: the first contribution has the same clock.
        clock = (self.clocks.next if message.kind == "seed" else self.clocks.count)(plan, bucket)
        label = f"bucket {bucket}"
        operation = self.begin(name, (label, clock, plan))
        message.handle, message.plan, message.bucket, message.clock = operation.handle, plan, bucket, clock
        self.trace.record(_SUBMITTED, label, nbytes, clock, plan, flush)
        self.send(wire.encode(message))
        return operation

    def send(self, message: bytes, fd: int = -1) -> None:
        """Sends a message and the descriptor that goes along, if any, which is closed; threads may send concurrently,
        since a packet is sent as a whole.

        Raises:
            HorovodInternalError: the daemon is gone, or takes nothing any more.
        """
        if fd < 0 and len(message) <= wire.MAX_PACKET:
            try:
                self.socket.send(message)
            except (BlockingIOError, ConnectionError):
                pass  # the next attempt waits, or tells why not
            else:
                return
        self._send_packet(packets.Packet(message, fd))

    def _send_packet(self, packet: packets.Packet) -> None:
        """Sends a message that is long, or could not be sent at once. Raises as `send`."""
        waited = 0.0
        while True:
            try:
                packet.send(self.socket)
            except BlockingIOError:  # it has not read the messages before
                waited += _LOOK
                if self.failure is None and not (self.patience and waited >= self.patience):
                    continue
                packet.close()
                self._fail_as_silent()
            except ConnectionError:
                packet.close()
                self.read_available()  # the daemon's last message may have the reason
                self.fail(joining.lost(self._rank))
            else:
                return
            raise HorovodInternalError(self.failure) from None

    def poll(self, operation: Operation) -> bool:
        """Returns whether the operation has ended; reads arrived messages, without waiting."""
        if not operation.done:
            self.read_available()
        return operation.done

    def wait(self, operation: Operation) -> Operation:
        """Waits until the operation has ended.

        Raises:
            HorovodInternalError: it failed, on all ranks.
        """
        if not operation.done:
            name, clock, plan = operation.about
            self.trace.record(_WAIT_BEGIN, name, 0, clock, plan)
            self._read_until(operation)
            self.trace.record(_WAIT_END, name, 0, clock, plan)
        if operation.error is not None:
            raise failure_of(operation.error)
        return operation

    def read_until(
        self, awaited: Awaited, seconds: float | None = None, about: tuple[str, int, int] | None = None
    ) -> bool:
        """Waits until something is done, which reading a message may bring about, but no longer than `seconds`.

        Args:
            awaited: it.
            seconds: at most so long; None: as long as it takes.
            about: name, clock and plan under which the script's wait is recorded; None: it is not the script that
                waits.

        Returns: whether it is done.
        """
        if awaited.done:
            return True
        if about is not None:
            name, clock, plan = about
            self.trace.record(_WAIT_BEGIN, name, 0, clock, plan)
        self._read_until(awaited, None if seconds is None else time.monotonic() + seconds)
        if about is not None:
            self.trace.record(_WAIT_END, name, 0, clock, plan)
        return awaited.done

    def read_available(self) -> None:
        """Reads arrived messages, unless another thread reads already."""
        with self._lock:
            if self.reading:
                return
            self.reading = True
        try:
            while self._read_one(_DONTWAIT):
                pass
        finally:
            self._stop_reading()

    def fail(self, message: str, daemon_goes_on: bool = False) -> None:
        """Ends the job for this worker: all operations, under way and later, fail with the first reason given.

        Args:
            message: the reason.
            daemon_goes_on: the daemon has not said that they have ended, and may still write into their memory.
        """
        if self.failure is None:
            self.failure = message
        for operation in list(self._operations.values()):
            if daemon_goes_on and operation.keeps is not None:
                _NEVER_FREED.append(operation.keeps)
            operation.keeps = None
            operation.error = self.failure
            if operation.release is not None:
                operation.release(operation)
            operation.done = True
        self._operations.clear()
        self._wake()

    def leave(self, message: str) -> None:
        """Fails with this message, and waits for a while until no thread reads the socket."""
        self.fail(message, daemon_goes_on=True)
        self.await_reader(2 * _LOOK)  # not for ever: this may be a signal's handler, and the thread that reads

    def await_reader(self, seconds: float) -> bool:
        """Waits, at most so long, until no thread reads the socket, which can be used again then. Returns whether none
        does."""
        if not self._lock.acquire(timeout=_LOOK):
            return False
        self._waiting += 1
        is_free = self._changed.wait_for(lambda: not self.reading, seconds)
        self._waiting -= 1
        self._lock.release()
        return is_free

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):  # gone already
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads; close would not
            # Unread messages would reset the connection, and the daemon would not get to read `Bye`.
            while self.socket.recv(1, _DONTWAIT):
                pass
        self.socket.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read_until(self, awaited: Awaited, deadline: float | None = None) -> None:
        """Reads messages until something is done, or waits for the thread that is reading already; no longer than until
        the deadline, if there is one."""
        while not awaited.done and (deadline is None or time.monotonic() < deadline):
            with self._lock:
                if self.reading:
                    self._await_reader(awaited, deadline)
                    continue
                self.reading = True
            try:
                if deadline is not None:
                    self._read_before(awaited, deadline)
                while not awaited.done and deadline is None:
                    if not self._read_one(0):
                        self._heard_nothing()
            finally:
                self._stop_reading()

    def _await_reader(self, awaited: Awaited, deadline: float | None) -> None:
        """Waits until the thread that reads has completed something, or stops reading; called with the lock."""
        self._waiting += 1  # before the check: a thread that completes an operation looks at it afterwards
        if not awaited.done:
            self._changed.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        self._waiting -= 1

    def _read_before(self, awaited: Awaited, deadline: float) -> None:
        """Reads messages until something is done, or the deadline has come."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while not awaited.done and (left := deadline - time.monotonic()) > 0:
            if poll.poll(1000 * min(left, _LOOK)):
                self._read_one(_DONTWAIT)
            elif left > _LOOK:
                self._heard_nothing()

    def _stop_reading(self) -> None:
        with self._lock:
            self.reading = False
            if self._waiting:
                self._changed.notify_all()

    def _heard_nothing(self) -> None:
        """Counts another `_LOOK` seconds of silence: pings the daemon after a third of the patience, fails after it."""
        if not self.patience:
            return
        before, self._silent = self._silent, self._silent + _LOOK
        if self._silent >= self.patience:
            self._fail_as_silent()
        elif before < self.patience / 3 <= self._silent:
            with contextlib.suppress(OSError):  # full, or gone: then nothing will come
                self.socket.send(wire.encode(wire.Ping()), _DONTWAIT)

    def _fail_as_silent(self) -> None:
        silent = joining.silent(self._rank, packets.peer_credentials(self.socket)[0], self.patience)
        self.fail(silent, daemon_goes_on=True)

    def _wake(self) -> None:
        """Wakes all threads that wait, to check whether their operations have ended."""
        if self._lock.acquire(timeout=_LOOK):  # not for ever, as in `leave`
            self._changed.notify_all()
            self._lock.release()

    def _read_one(self, flags: int) -> bool:
        try:
            data, fd = packets.receive(self.socket, flags)
        except BlockingIOError:
            return False
        except OSError:
            data, fd = b"", -1
        self._silent = 0.0
        if not data:
            self.fail(joining.lost(self._rank))
            return False
        self._handle(wire.decode_daemon_message(data), fd)
        return True

    def _handle(self, message: wire.DaemonMessage, fd: int) -> None:
        if not isinstance(message, (wire.Done, wire.Planned, wire.Failed)):
            self._handle_unasked(message)
            return
        operation = self._operations.pop(message.handle, None)
        if operation is None:
            self._handle_late(message.handle, fd)
            return
        operation.keeps = None
        if isinstance(message, wire.Done):
            operation.inline, operation.sizes = message.inline, message.sizes
            if message.nbytes:
                operation.output = _mapped(fd, message.nbytes)
        elif isinstance(message, wire.Planned):
            operation.plan = message.plan
        else:
            operation.error, operation.missing = message.message, message.missing
        if operation.release is not None:
            operation.release(operation)
        name, clock, plan = operation.about
        self.trace.record(_DONE, name, 0, clock, plan)
        operation.done = True
        if self._waiting:
            with self._lock:
                self._changed.notify_all()

    def _handle_late(self, handle: int, fd: int) -> None:
        """Drops the answer of an operation that has failed meanwhile."""
        if fd >= 0:
            os.close(fd)
        if self.failure is None:
            raise FusionError(f"the daemon answered operation {handle}, which is not under way")

    def _handle_unasked(self, message: wire.Pong | wire.JobFailed | wire.Welcome | wire.Status) -> None:
        if isinstance(message, wire.JobFailed):
            self.told = self.failure is None
            self.fail(message.message)
        elif not isinstance(message, wire.Pong):
            raise FusionError(f"the daemon sent {type(message).__name__}, which was not asked for")


def _mapped(fd: int, nbytes: int) -> Segment:
    """Maps a result that came as a memfd, and closes the descriptor."""
    output = Segment.open(fd, nbytes, private=True)
    output.close_fd()
    return output
