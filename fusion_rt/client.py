"""A worker's side of the local channel: submits operations to the node's daemon and waits for them. Knows no torch.

There is no thread: whoever waits reads the socket, for itself and for every other thread that waits. A message that
completes an operation costs one `recv`, and a worker that computes costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusion_rt import local, named_arrays, stacks, wire
from fusion_rt.arena import Arena, Region, Segment
from fusion_rt.dtypes import DTYPES
from fusion_rt.errors import FusionError, HorovodInternalError
from fusion_rt.topology import GLOBAL_SET, ProcessSet, Topology
from fusion_rt.trace import NULL, Instrument
from fusion_rt.trace_format import Flush, Kind

_DONTWAIT = int(socket.MSG_DONTWAIT)
_CLOCKS_OF_A_JOIN = 1 << 24  # clocks between one join and the next


class Terms(NamedTuple):
    """What is said about a worker's part of a planned bucket.

    Attributes:
        rescale: what the residual of each tensor is multiplied by first, if learning rates have changed.
        rates: learning rate of each parameter group, where a home takes the steps.
        samples: how many samples it comes from; 0: it is nothing, and the home is only asked for what it has.
        seed: it is what the bucket's home begins with.
        urgency: the less, the sooner it is needed.
    """

    rescale: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    samples: int = 1
    seed: bool = False
    urgency: int = 0


class Operation:
    """An operation under way.

    Attributes:
        name: the tensor's name, for messages to people.
        done: whether it has ended, well or not.
        error: why it failed, or None.
        inline: the result, when it is small.
        output: private copy-on-write mapping of the result, when the daemon made one (allgather, alltoall).
        sizes: rows received from each rank (allgather, alltoall), or the answer of an operation without data.
        plan: the answer to a proposal.
        about: the name, clock and plan under which it is recorded.
    """

    __slots__ = ("about", "done", "error", "handle", "inline", "name", "output", "plan", "release", "sizes")

    def __init__(self, handle: int, name: str) -> None:
        self.handle = handle
        self.name = name
        self.done = False
        self.error: str | None = None
        self.inline: bytes | None = None
        self.output: Segment | None = None
        self.sizes: tuple[int, ...] = ()
        self.plan: wire.Plan | None = None
        self.release: Callable[[], None] | None = None
        self.about = (name, 0, 0)


class Client:
    """A connection to the node's daemon, and the worker's arena.

    Args:
        path: the daemon's socket.
        job: id of the job.
        rank: this worker's rank.
        timeout: seconds for every process of the job to come up.
        previous: a client of the same job that has left; its connection is used again.
        listened: the daemon has listened already, so that there is no waiting for it if it does not.

    Attributes:
        trace: what is done here is recorded there.

    Raises:
        FusionError: the daemon cannot be reached, refuses this worker, or the job does not come up in time.
    """

    def __init__(
        self,
        path: str,
        job: str,
        rank: int,
        timeout: float,
        previous: Client | None = None,
        listened: bool = False,
    ) -> None:
        self.job = job
        self.rank = rank
        self._pid = os.getpid()
        self._socket: socket.socket = _connect(path, timeout, listened) if previous is None else previous._socket
        self._operations: dict[int, Operation] = {}
        self._next_handle = 0
        self._clocks: dict[tuple[int, str | int], int] = {}  # of a name in a process set, of a bucket in a plan (< 0)
        self._first_clock = 0
        self.joins = 0  # all ranks have joined so many times
        self._in_flight: set[tuple[int, str]] = set()
        self._failure: str | None = None
        self._reading = False
        self._changed = threading.Condition()
        self.trace: Instrument = NULL
        self._sending = threading.Lock()
        self.arena = Arena(self._offer, self._drop)
        stacks_fd, stack_signal = stacks.offer()
        hello = wire.Hello(wire.PROTOCOL_VERSION, job, rank, os.getpid(), stack_signal)
        try:
            self._send(local.Packet(wire.encode(hello), stacks_fd))
            self.welcome = self._await_welcome(timeout, previous is not None)
        except BaseException:
            self._socket.close()
            raise
        self.topology: Topology = self.welcome.topology
        self._first_clock = self.welcome.epoch * wire.CLOCKS_OF_AN_EPOCH
        self.process_sets = {GLOBAL_SET: ProcessSet(GLOBAL_SET, tuple(range(self.topology.size)))}

    # --- operations -------------------------------------------------------------------------------------------------

    def submit(
        self,
        name: str | None,
        signature: wire.Signature,
        *,
        inline: bytes | None = None,
        place: tuple[int, int] | None = None,
        splits: tuple[int, ...] = (),
    ) -> Operation:
        """Submits one operation on a tensor that is `inline` or lies at `place` (segment id, offset) in the arena.

        An operation without a name is paired with those of other ranks by kind and order; several may be under way.

        Raises:
            HorovodInternalError: the job has failed.
            ValueError: an operation of this name is still under way here.
        """
        unnamed = name is None
        if name is None:
            name = f"{signature.kind}.noname"
        identity = (signature.process_set, name)
        if identity in self._in_flight:
            self._read_available()  # it may have ended, and nobody has looked
        if identity in self._in_flight:
            raise ValueError(
                f"an operation named {name!r} was submitted on rank {self.rank} while an earlier one of that name was "
                "still under way; wait for it with synchronize(), or give each its own name"
            )
        operation = self._begin(name)
        clock = self._clocks.get(identity, self._first_clock)
        message = wire.Submit(
            operation.handle,
            name,
            clock,
            signature,
            None if place is None else wire.Place(*place),
            inline,
            splits,
        )
        packet = local.Packet(wire.encode(message))
        self._clocks[identity] = clock + 1
        if not unnamed:
            self._in_flight.add(identity)
            operation.release = lambda: self._in_flight.discard(identity)
        operation.about = (name, clock, 0)
        nbytes = _nbytes_of(signature) if inline is None else len(inline)
        self.trace.record(Kind.SUBMITTED, name, nbytes, clock, 0, Flush.ALONE)
        self._send(packet)
        return operation

    def propose(self, proposal: wire.Proposal) -> Operation:
        """Asks for a plan; the answer is the operation's `plan`."""
        operation = self._begin(proposal.group)
        self._send(local.Packet(wire.encode(wire.Propose(operation.handle, proposal))))
        return operation

    def join(self) -> int:
        """Waits until every rank has joined; until then this one contributes nothing to the others' all-reduces.

        Returns: the last rank that joined.

        Raises:
            HorovodInternalError: it failed, on all ranks.
        """
        last = self.wait(self.submit("join", wire.Signature("join"))).sizes[0]
        # Ranks have not taken the same number of steps. From here on they count alike again.
        self.joins += 1
        self._first_clock += _CLOCKS_OF_A_JOIN
        self._clocks.clear()
        return last

    def add_process_set(self, ranks: Sequence[int]) -> ProcessSet:
        """Makes a new process set of these ranks; every rank of the job has to ask for it.

        Raises:
            HorovodInternalError: the ranks do not agree, or there is no such set; on all ranks.
        """
        members = tuple(sorted(ranks))
        operation = self.wait(self.submit("process_set", wire.Signature("add_process_set", ranks=members)))
        added = ProcessSet(operation.sizes[0], members)
        self.process_sets[added.id] = added
        return added

    def remove_process_set(self, process_set: int) -> None:
        """Removes a process set; every rank of the job has to ask for it.

        Raises:
            HorovodInternalError: the ranks do not agree; on all ranks.
        """
        members = self.process_sets[process_set].ranks
        self.wait(self.submit("process_set", wire.Signature("remove_process_set", ranks=members)))
        del self.process_sets[process_set]

    def save_state(self, process_set: int, group: str, common: bool = False) -> dict[str, Any]:
        """What the codecs of a group of tensors remember on this node, by name; arrays that may be written to.

        Args:
            common: only what is the same on all nodes, which is small.

        Raises:
            HorovodInternalError: they are at work.
        """
        operation = self._begin(group)
        self._send(local.Packet(wire.encode(wire.SaveState(operation.handle, process_set, group, common))))
        output = self.wait(operation).output
        data = bytearray(operation.inline or b"") if output is None else output.view
        return named_arrays.read(np.frombuffer(data, np.uint8))

    def load_state(self, process_set: int, group: str, state: Mapping[str, Any], common: bool = False) -> None:
        """Gives that back.

        Args:
            common: it has no residuals; does nothing where as many steps have been taken.

        Raises:
            HorovodInternalError: it is not of the plan in force, or the codecs are at work.
        """
        nbytes = named_arrays.nbytes_of(state)
        region = self.allocate(nbytes)
        named_arrays.write(state, np.frombuffer(region.view, np.uint8)[:nbytes])
        operation = self._begin(group)
        place = wire.Place(region.segment, region.offset)
        message = wire.LoadState(operation.handle, process_set, group, place, nbytes, common)
        self._send(local.Packet(wire.encode(message)))
        try:
            self.wait(operation)
        finally:
            self.arena.free(region)

    def start_timeline(self, path: str, mark_cycles: bool) -> str:
        """Asks for a timeline in the file at an absolute path. Returns why there is none, or nothing."""
        operation = self._begin("timeline")
        self._send(local.Packet(wire.encode(wire.StartTimeline(operation.handle, path, mark_cycles))))
        return (self.wait(operation).inline or b"").decode()

    def stop_timeline(self) -> None:
        """Waits until the timeline's file is complete; there may be none."""
        operation = self._begin("timeline")
        self._send(local.Packet(wire.encode(wire.StopTimeline(operation.handle))))
        self.wait(operation)

    def compression(self) -> dict[str, dict[str, float]]:
        """What compression has saved and cost on this node, by group and in "total"."""
        operation = self._begin("compression")
        self._send(local.Packet(wire.encode(wire.CompressionRequest(operation.handle))))
        told: dict[str, dict[str, float]] = json.loads(self.wait(operation).inline or b"{}")
        return told

    def ready(
        self,
        name: str,
        plan: int,
        bucket: int,
        terms: Terms | None = None,
        nbytes: int = 0,
        flush: Flush = Flush.STEP,
    ) -> Operation:
        """Says that this worker's part of a planned bucket is in the arena; `terms` go with it. `nbytes`: its size, and
        `flush`: why now; these are only recorded."""
        terms = terms or Terms()
        identity = (-plan, bucket)
        clock = self._clocks.get(identity, self._first_clock)
        if not terms.seed:
            self._clocks[identity] = clock + 1
        operation = self._begin(name)
        about = operation.about = (f"bucket {bucket}", clock, plan)
        self.trace.record(Kind.SUBMITTED, about[0], nbytes, clock, plan, flush)
        message = wire.Ready(operation.handle, plan, bucket, clock, *terms)
        self._send(local.Packet(wire.encode(message)))
        return operation

    def next_clock(self, plan: int, bucket: int) -> int:
        """The clock of the next `ready` of a planned bucket."""
        return self._clocks.get((-plan, bucket), self._first_clock)

    def staleness(self) -> dict[str, Any]:
        """How stale the contributions of this node's workers have been, and what its homes have seen."""
        operation = self._begin("staleness")
        self._send(local.Packet(wire.encode(wire.StalenessRequest(operation.handle))))
        told: dict[str, Any] = json.loads(self.wait(operation).inline or b"{}")
        return told

    def plan_segment(self, plan: wire.Plan) -> tuple[int, Segment]:
        """A new segment of the arena for the plan's buckets."""
        return self.arena.new_segment(max(plan.nbytes, 1), plan.id)

    def poll(self, operation: Operation) -> bool:
        """Whether the operation has ended; reads what has arrived, without waiting."""
        if not operation.done:
            self._read_available()
        return operation.done

    def wait(self, operation: Operation) -> Operation:
        """Waits until the operation has ended.

        Raises:
            HorovodInternalError: it failed, on all ranks.
        """
        if not operation.done:
            name, clock, plan = operation.about
            self.trace.record(Kind.WAIT_BEGIN, name, 0, clock, plan)
            self._read_until(operation)
            self.trace.record(Kind.WAIT_END, name, 0, clock, plan)
        if operation.error is not None:
            raise HorovodInternalError(operation.error)
        return operation

    def allocate(self, nbytes: int) -> Region:
        """A region of the arena; give it back with `arena.free`."""
        return self.arena.allocate(nbytes)

    def leave(self, error: str = "") -> bool:
        """Leaves the job; `error` is this worker's unhandled exception, if that is why it leaves.

        Returns: whether it may come back with a client that has this one as `previous`.
        """
        if self._pid != os.getpid():  # in a forked child: the connection is the parent's to end
            return False
        returnable = self._failure is None
        if returnable:
            try:
                self._send(local.Packet(wire.encode(wire.Bye(error))))
            except (HorovodInternalError, OSError):
                returnable = False  # the daemon is gone already, and so there is nobody to tell
        self._fail("fusion_rt has been shut down on this rank")
        self.arena.close()
        return returnable

    def close(self, error: str = "") -> None:
        """Leaves the job, if it has not yet, for good."""
        self.leave(error)
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):  # gone already
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads; close would not
                # What nobody has read would reset the connection, and the daemon would not get to read `Bye`.
                while self._socket.recv(1, _DONTWAIT):
                    pass
        self._socket.close()

    def abandon(self) -> None:
        """In a forked child: closes its copy of the connection, which goes on being the parent's.

        Without this the daemon would not notice the parent's death before the child's.
        """
        self._failure = "the connection belongs to the parent of this forked process"
        self._socket.close()

    # --- the channel ------------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> Operation:
        if self._failure is not None:
            raise HorovodInternalError(self._failure)
        with self._sending:
            self._next_handle += 1
            operation = Operation(self._next_handle, name)
            self._operations[operation.handle] = operation
        return operation

    def _send(self, packet: local.Packet) -> None:
        try:
            with self._sending:
                packet.send(self._socket)
        except (BrokenPipeError, ConnectionError):
            packet.close()
            self._read_available()  # the reason may stand in what the daemon sent last
            self._fail(self._lost())
            raise HorovodInternalError(self._failure) from None

    def _offer(self, segment_id: int, segment: Segment, plan: int) -> None:
        fd = segment.fd
        segment.fd = -1  # the packet owns the descriptor now; the mapping does not need it
        message = wire.AddSegment(segment_id, segment.nbytes, plan)
        self._send(local.Packet(wire.encode(message), fd))

    def _drop(self, segment_id: int) -> None:
        if self._failure is None:
            self._send(local.Packet(wire.encode(wire.DropSegment(segment_id))))

    def _read_until(self, operation: Operation) -> None:
        """Reads messages until the operation has ended, or waits for the thread that is reading already."""
        while True:
            with self._changed:
                if operation.done:  # asked with the lock held: nothing wakes a thread that waits after the last news
                    return
                if self._reading:
                    self._changed.wait()
                    continue
                self._reading = True
            try:
                while not operation.done:
                    self._read_one(0)
            finally:
                with self._changed:
                    self._reading = False
                    self._changed.notify_all()

    def _read_available(self) -> None:
        with self._changed:
            if self._reading:
                return
            self._reading = True
        try:
            while self._read_one(_DONTWAIT):
                pass
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()

    def _read_one(self, flags: int) -> bool:
        try:
            data, fd = local.receive(self._socket, flags)
        except BlockingIOError:
            return False
        except OSError:
            data, fd = b"", -1
        if not data:
            self._fail(self._lost())
            return False
        self._handle(wire.decode_daemon_message(data), fd)
        return True

    def _handle(self, message: wire.DaemonMessage, fd: int) -> None:
        if isinstance(message, wire.JobFailed):
            self._fail(message.message)
            return
        if isinstance(message, (wire.Welcome, wire.Status)):
            raise FusionError(f"the daemon sent {type(message).__name__}, which nobody asked for")
        operation = self._operations.pop(message.handle)
        if operation.release is not None:
            operation.release()
        if isinstance(message, wire.Done):
            operation.inline = message.inline
            operation.sizes = message.sizes
            if message.nbytes:
                operation.output = Segment.open(fd, message.nbytes, private=True)
                operation.output.close_fd()
        elif isinstance(message, wire.Planned):
            operation.plan = message.plan
        else:
            operation.error = message.message
        name, clock, plan = operation.about
        self.trace.record(Kind.DONE, name, 0, clock, plan)
        operation.done = True
        if self._reading:
            with self._changed:
                self._changed.notify_all()

    def _fail(self, message: str) -> None:
        """The job is over: every operation under way, and every later one, fails with the first reason given."""
        if self._failure is None:
            self._failure = message
        for operation in list(self._operations.values()):
            operation.error = self._failure
            operation.done = True
        self._operations.clear()
        self._in_flight.clear()

    def _lost(self) -> str:
        host = socket.gethostname()
        return (f"the daemon of rank {self.rank}'s node (host {host}) is gone: it was killed or has crashed; "
                "see its log (`fusiond logs`)")  # fmt: skip

    def _await_welcome(self, timeout: float, skip_answers: bool) -> wire.Welcome:
        """`skip_answers`: what the daemon answered the client before may still come first."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise FusionError(f"rank {self.rank} waited {timeout:g} s for the other processes of the job; "
                                      "raise --start-timeout if they need longer to start")  # fmt: skip
                try:
                    data, fd = local.receive(self._socket)
                except ConnectionError:  # the daemon ended without having read Hello
                    data, fd = b"", -1
                if not data:
                    raise FusionError(self._lost())
                message = wire.decode_daemon_message(data)
                if isinstance(message, wire.JobFailed):
                    raise FusionError(message.message)
                if isinstance(message, wire.Welcome):
                    return message
                if fd >= 0:
                    os.close(fd)
                if not skip_answers:
                    raise FusionError(f"the daemon answered Hello with {type(message).__name__}")


def _nbytes_of(signature: wire.Signature) -> int:
    return math.prod(signature.shape) * DTYPES[signature.dtype].itemsize if signature.dtype else 0


def _connect(path: str, timeout: float, listened: bool) -> socket.socket:
    """Connects to the daemon's socket, which may be about to appear unless the daemon has listened already."""
    deadline = time.monotonic() + timeout
    wait = 0.002
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            sock.close()
            if listened:
                raise FusionError(f"the daemon that listened at {path} is gone ({error.strerror}): it has ended "
                                  "with its job, was killed or has crashed; see its log") from None  # fmt: skip
            if time.monotonic() + wait > deadline:
                raise FusionError(f"no daemon listens at {path} after {timeout:g} s ({error.strerror}); was it "
                                  "started, and did it come up? See its log (`fusiond logs`)") from None  # fmt: skip
            time.sleep(wait)
            wait = min(2 * wait, 0.05)
        else:
            return sock
