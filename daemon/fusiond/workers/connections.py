"""The local workers: their connections, their arenas, and messages on their way to them.

The socket lives in a directory that only this user can enter, and every connection's credentials are checked besides.
A connection whose first message is not `Hello` may only ask for the status or to stop (`fusiond status`, `fusiond
stop`).
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, get_args

import numpy as np

from fusion_rt import wire
from fusion_rt.core.errors import DIED, ArenaError, FusionError, WireError
from fusion_rt.host.arena import Segment
from fusion_rt.host.process_memory import Process, ProcessMemoryError
from fusion_rt.kernels.ordinary import Operand, Remote
from fusion_rt.local import packets
from fusiond.collectives.base import Array
from fusiond.core.dispatch import Handlers
from fusiond.core.result import Result
from fusiond.host.loop import EventLoop
from fusiond.workers.stack_reader import Source

_log = logging.getLogger("fusiond")
_PAUSE = 0.1  # seconds until connections are accepted again after descriptors have run out
_MAX_SEGMENTS = 4096  # segments of one worker's arena
_WITH_DESCRIPTOR = (wire.AddSegment, wire.Hello)
_BYTE = np.dtype(np.uint8)
_OF_ANYBODY = {wire.Hello, wire.AddSegment, *get_args(wire.ToolMessage)}  # also where no worker has joined


class WorkerEvents(Protocol):
    """The part of a daemon that local workers are for."""

    @property
    def handlers(self) -> Handlers:
        """Returns the handlers of the messages of workers that have joined, and of tools."""

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        """A process says which worker it is. Raises FusionError to refuse it."""

    def worker_left(self, rank: int, bye: wire.Bye) -> None:
        """A worker says that it leaves."""

    def worker_lost(self, rank: int, pid: int, why: str) -> None:
        """A worker's connection ended without a `Bye`; `why` says how."""

    def connection_ended(self) -> None:
        """The connection of a worker that had said `Bye` ended: it will not come back."""


@dataclass
class WorkerLink:
    """One connection.

    Attributes:
        rank: set by the handler once it has accepted the worker's `Hello`; None again after `Bye`.
        events: those of the formation in which it has said `Hello`.
        stacks: how to see where a worker is that has said `Hello`.
        process: its process, if the kernel lets this one read and write its memory.
        left: it has said `Bye`, so that the end of the connection is no surprise; another `Hello` may come.
    """

    sock: socket.socket
    pid: int
    events: WorkerEvents | None = None
    rank: int | None = None
    left: bool = False
    segments: dict[int, Segment] = field(default_factory=dict)
    plans: dict[int, int] = field(default_factory=dict)  # segment: the plan whose buckets it holds
    memory: dict[int, Array] = field(default_factory=dict)  # segment: its bytes
    stacks: Source | None = None
    process: Process | None = None
    outgoing: deque[packets.Packet] = field(default_factory=deque)
    closed: bool = False

    def forget_process(self) -> None:
        """The worker's process is none of this daemon's business any more."""
        if self.stacks is not None:
            self.stacks.close()
            self.stacks = None
        if self.process is not None:
            self.process.end()
            self.process = None

    def operand(self, place: wire.Place | wire.Address, nbytes: int) -> Operand:
        """The bytes at a place in the arena, or at an address of the worker, not yet looked up.

        Raises:
            WireError: they are not in the arena; or there are so few that they travel in messages, or the worker was
                not told that addresses may be given.
        """
        if isinstance(place, wire.Place):
            return self.at(place, nbytes)
        if self.process is None or nbytes <= wire.MAX_INLINE:
            raise WireError(f"{nbytes} bytes of rank {self.rank} cannot be given by their address")
        return Remote(self.process, place.address, _BYTE, nbytes)

    def at(self, place: wire.Place, nbytes: int) -> Array:
        """The bytes at a place in the arena.

        Raises:
            WireError: they are not in it.
        """
        memory = self.memory.get(place.segment)
        if memory is None or place.offset + nbytes > len(memory):
            raise WireError(f"{nbytes} bytes at {place} are not in the arena of rank {self.rank}")
        return memory[place.offset : place.offset + nbytes]


class Workers:
    """The listening socket and its connections.

    Args:
        loop: watches them.
        listener: the socket, which is taken over.
        events: decides.

    Attributes:
        events: decide about connections whose workers have not joined. Others are told to those that were here then.
    """

    def __init__(self, loop: EventLoop, listener: socket.socket, events: WorkerEvents) -> None:
        self._loop = loop
        self._socket = listener
        self._path: str = listener.getsockname()
        self.events = events
        self._own: Mapping[type[Any], Callable[[WorkerLink, Any, int], None]] = {
            wire.Hello: self._hello,
            wire.Bye: self._bye,
            wire.AddSegment: self._add_segment,
            wire.DropSegment: self._segment_dropped,
        }
        self._links: dict[int, WorkerLink] = {}  # by descriptor
        self.refused = 0
        self.not_accepted = 0  # attempts to accept a connection for which there was no descriptor or memory
        self._pausing = False  # between two of these
        self._closed = False
        self._received = 0
        self._sent = 0
        self._watch()

    def send(self, link: WorkerLink, message: wire.DaemonMessage, fd: int = -1) -> None:
        """Sends a message, and a descriptor, which this takes over; bytes beyond the socket's room wait."""
        data = wire.encode(message)
        if link.closed or link.outgoing or fd >= 0 or len(data) > wire.MAX_PACKET:
            self._send_packet(link, packets.Packet(data, fd))
            return
        self._sent += 1
        try:
            link.sock.send(data)
        except BlockingIOError:
            self._queue(link, packets.Packet(data))
        except OSError:
            pass  # the worker is gone; reading says so too, and that is where it is dealt with

    def answer(
        self, links: Mapping[int, WorkerLink], rank: int, message: wire.DaemonMessage, result: Result | None = None
    ) -> None:
        """Sends a message to the worker of a rank, if it is connected, with the memfd of a large result."""
        link = links.get(rank)
        if link is not None:
            fd = -1 if result is None or result.segment is None else os.dup(result.segment.fd)
            self.send(link, message, fd)

    def _send_packet(self, link: WorkerLink, packet: packets.Packet) -> None:
        """Sends a message that is long, or goes with a descriptor, or may have to wait for others."""
        if link.closed:
            packet.close()
            return
        self._sent += 1
        if link.outgoing or not self._send_now(link, packet):
            self._queue(link, packet)

    def _queue(self, link: WorkerLink, packet: packets.Packet) -> None:
        link.outgoing.append(packet)
        self._loop.add_writer(link.sock.fileno(), partial(self._flush, link))

    def close(self) -> None:
        """Ends every connection and removes the socket."""
        self._closed = True
        self._loop.remove(self._socket.fileno())
        if os.path.exists(self._path):  # removed first: a worker cut off may look whether this daemon ended in order
            os.unlink(self._path)
        self._socket.close()
        for link in list(self._links.values()):
            self._drop(link)

    @property
    def may_return(self) -> bool:
        """True if a worker that has said `Bye` is still connected."""
        return any(link.left for link in self._links.values())

    def statistics(self) -> dict[str, int]:
        """`connections`, connections `refused`, attempts to accept one that failed for lack of descriptors
        (`not_accepted`), messages `received` and `sent`, bytes of `arenas`."""
        return {
            "connections": len(self._links),
            "refused": self.refused,
            "not_accepted": self.not_accepted,
            "received": self._received,
            "sent": self._sent,
            "arenas": sum(s.nbytes for link in self._links.values() for s in link.segments.values()),
        }

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it was gone before it was accepted
            except OSError as error:  # out of descriptors or memory: pending connections keep waiting
                if not self._pausing:  # else it has been said
                    _log.warning("no connection can be accepted for now: %s; tried again every %g s",
                                 error.strerror, _PAUSE)  # fmt: skip
                self._pausing = True
                self.not_accepted += 1
                self._loop.remove(self._socket.fileno())
                self._loop.call_later(_PAUSE, self._watch)
                return
            self._pausing = False
            sock.setblocking(False)
            pid, uid, _ = packets.peer_credentials(sock)
            if uid not in (os.getuid(), 0):
                self.refused += 1
                sock.close()
                continue
            link = WorkerLink(sock, pid)
            self._links[sock.fileno()] = link
            self._loop.add_reader(sock.fileno(), partial(self._read, link))

    def _read(self, link: WorkerLink) -> None:
        """Takes one message; epoll tells of the next, and trying for it would mostly be a system call in vain."""
        if link.closed:
            return
        try:
            data, fd = packets.receive(link.sock)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fd = b"", -1
        except (WireError, ArenaError) as error:
            self._end(link, f"sent something that is no message: {error}")
            return
        if not data:
            self._end(link, DIED)
            return
        self._received += 1
        try:
            self._dispatch(link, data, fd)
        except FusionError as error:
            self._end(link, f"sent a message that makes no sense: {error}")

    def _dispatch(self, link: WorkerLink, data: bytes, fd: int) -> None:
        try:
            message = wire.decode_worker_message(data)
            if fd >= 0 or link.rank is None:
                self._check(link, type(message), fd)
        except WireError:
            if fd >= 0:
                os.close(fd)
            raise
        if own := self._own.get(type(message)):
            own(link, message, fd)
        else:
            self._hand_on(link, message)

    @staticmethod
    def _check(link: WorkerLink, kind: type[Any], fd: int) -> None:
        """Raises `WireError` unless such a message may come now, with this descriptor."""
        if link.left and kind is not wire.Hello:
            raise WireError("a message after Bye")
        if fd >= 0 and kind not in _WITH_DESCRIPTOR:
            raise WireError("a descriptor came with a message that takes none")
        if link.rank is None and kind not in _OF_ANYBODY:
            raise WireError("the first message has to be Hello")

    def _hand_on(self, link: WorkerLink, message: wire.WorkerMessage) -> None:
        (self.events if link.events is None else link.events).handlers[type(message)](link, message)

    def _hello(self, link: WorkerLink, hello: wire.Hello, fd: int) -> None:
        if link.rank is not None:
            if fd >= 0:
                os.close(fd)
            raise WireError("a second Hello")
        link.left = False
        link.stacks = Source.open(link.pid, hello, fd)
        if link.stacks.process >= 0:
            self._loop.add_reader(link.stacks.process, partial(self._process_ended, link))
        link.process = _process_of(link.pid, hello)
        link.events = self.events
        self.events.worker_joined(link, hello)
        if link.rank is None:  # it was refused
            link.events = None

    def _process_ended(self, link: WorkerLink) -> None:
        """A worker's process has ended. Its socket says so, too, unless a child of it still has the socket, for example
        one that a library in C has forked. Messages that wait in the socket come first."""
        if link.stacks is not None:  # its end is said again and again, and a worker that was refused has no rank
            self._loop.remove(link.stacks.process)
        received = -1
        while not link.closed and link.rank is not None and received != self._received:
            received = self._received
            self._read(link)
        if not link.closed and link.rank is not None:
            self._end(link, DIED)

    def _forget_process(self, link: WorkerLink) -> None:
        if link.stacks is not None and link.stacks.process >= 0:
            self._loop.remove(link.stacks.process)
        link.forget_process()

    def _bye(self, link: WorkerLink, bye: wire.Bye, fd: int) -> None:
        rank, events = link.rank, link.events
        assert rank is not None
        assert events is not None
        link.left, link.rank, link.events = True, None, None
        self._forget_process(link)
        for segment in list(link.segments):
            self._drop_segment(link, segment)
        events.worker_left(rank, bye)

    def _add_segment(self, link: WorkerLink, message: wire.AddSegment, fd: int) -> None:
        if fd < 0:
            raise WireError("a segment was offered without a descriptor")
        if link.rank is None or message.segment in link.segments or len(link.segments) >= _MAX_SEGMENTS:
            os.close(fd)
            raise WireError(f"segment {message.segment} was offered before Hello, twice, or as one too many")
        segment = Segment.open(fd, message.nbytes)
        segment.close_fd()
        link.segments[message.segment] = segment
        link.memory[message.segment] = np.frombuffer(segment.view, np.uint8)
        if message.plan:
            link.plans[message.segment] = message.plan
        self._hand_on(link, message)

    def _segment_dropped(self, link: WorkerLink, message: wire.DropSegment, fd: int) -> None:
        self._hand_on(link, message)
        self._drop_segment(link, message.segment)

    def _drop_segment(self, link: WorkerLink, segment: int) -> None:
        link.memory.pop(segment, None)
        link.plans.pop(segment, None)
        found = link.segments.pop(segment, None)
        if found is not None:
            found.close()

    def _flush(self, link: WorkerLink) -> None:
        while link.outgoing and self._send_now(link, link.outgoing[0]):
            link.outgoing.popleft()
        if not link.outgoing:
            self._loop.remove_writer(link.sock.fileno())

    @staticmethod
    def _send_now(link: WorkerLink, packet: packets.Packet) -> bool:
        """Returns whether the packet is gone; if not, the socket is full."""
        try:
            packet.send(link.sock)
        except BlockingIOError:
            return False
        except OSError:  # the worker is gone; reading says so too, and that is where it is dealt with
            packet.close()
        return True

    def _end(self, link: WorkerLink, why: str) -> None:
        """The connection is over."""
        self._drop(link)
        if link.rank is not None and link.events is not None:
            link.events.worker_lost(link.rank, link.pid, why)
        elif link.left:
            self.events.connection_ended()
        elif link.rank is None and "died" not in why:
            self.refused += 1

    def _drop(self, link: WorkerLink) -> None:
        if link.closed:
            return
        link.closed = True
        self._loop.remove(link.sock.fileno())
        del self._links[link.sock.fileno()]
        link.sock.close()
        for packet in link.outgoing:
            packet.close()
        link.outgoing.clear()
        self._forget_process(link)
        for segment in list(link.segments):
            self._drop_segment(link, segment)


def _process_of(pid: int, hello: wire.Hello) -> Process | None:
    """Returns the process of the worker that says this; None where its memory cannot be read and written."""
    if not hello.offer_text:
        return None
    try:
        process = Process(pid, f"rank {hello.rank} (pid {pid})")
    except ProcessMemoryError:
        return None
    if process.accepts(hello.offer_address, hello.offer_text):
        return process
    process.end()
    return None
