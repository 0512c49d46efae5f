"""The local workers: their connections, their arenas, and what is on its way to them.

The socket lives in a directory that only this user can enter, and every connection's credentials are checked besides.
A connection whose first message is not `Hello` may only ask for the status or to stop (`fusiond status`, `fusiond
stop`).
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from fusion_rt import local, wire
from fusion_rt.arena import Segment
from fusion_rt.errors import ArenaError, FusionError, WireError
from fusiond.collectives.base import Array
from fusiond.host.loop import EventLoop
from fusiond.workers.stack_reader import Source

_log = logging.getLogger("fusiond")
_PAUSE = 0.1  # seconds until connections are accepted again after descriptors have run out
_MAX_SEGMENTS = 4096  # segments of one worker's arena


class Handler(Protocol):
    """What the daemon does about its workers."""

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        """A process says which worker it is. Raises FusionError to refuse it."""

    def worker_message(self, rank: int, link: WorkerLink, message: wire.WorkerMessage) -> None:
        """A worker that has joined sent a message. Raises FusionError when it makes no sense."""

    def worker_left(self, rank: int, pid: int, why: str) -> None:
        """A worker's connection ended without a `Bye`; `why` says how."""

    def connection_ended(self) -> None:
        """The connection of a worker that had said `Bye` ended: it will not come back."""

    def tool_message(self, link: WorkerLink, message: wire.ToolMessage) -> None:
        """`fusiond status`, `fusiond stop` or `fusion-trace hang` asks."""


@dataclass
class WorkerLink:
    """One connection.

    Attributes:
        rank: set by the handler once it has accepted the worker's `Hello`; None again after `Bye`.
        stacks: how to see where a worker is that has said `Hello`.
        left: it has said `Bye`, so that the end of the connection is no surprise; another `Hello` may come.
    """

    sock: socket.socket
    pid: int
    rank: int | None = None
    left: bool = False
    segments: dict[int, Segment] = field(default_factory=dict)
    plans: dict[int, int] = field(default_factory=dict)  # segment: the plan whose buckets it holds
    memory: dict[int, Array] = field(default_factory=dict)  # segment: its bytes
    stacks: Source | None = None
    outgoing: deque[local.Packet] = field(default_factory=deque)
    closed: bool = False

    def forget_stacks(self) -> None:
        """The worker's process is none of this daemon's business any more."""
        if self.stacks is not None:
            self.stacks.close()
            self.stacks = None

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
        handler: decides.
    """

    def __init__(self, loop: EventLoop, listener: socket.socket, handler: Handler) -> None:
        self._loop = loop
        self._socket = listener
        self._path: str = listener.getsockname()
        self._handler = handler
        self._links: dict[int, WorkerLink] = {}  # by descriptor
        self.refused = 0
        self.not_accepted = 0  # attempts to accept a connection for which there was no descriptor or memory
        self._pausing = False  # between two of these
        self._closed = False
        self._received = 0
        self._sent = 0
        self._watch()

    def send(self, link: WorkerLink, message: wire.DaemonMessage, fd: int = -1) -> None:
        """Sends a message, and a descriptor, which this takes over; what the socket has no room for waits."""
        packet = local.Packet(wire.encode(message), fd)
        if link.closed:
            packet.close()
            return
        self._sent += 1
        if not link.outgoing and self._send_now(link, packet):
            return
        link.outgoing.append(packet)
        self._loop.add_writer(link.sock.fileno(), partial(self._flush, link))

    def close(self) -> None:
        """Ends every connection and removes the socket."""
        self._closed = True
        self._loop.remove(self._socket.fileno())
        self._socket.close()
        if os.path.exists(self._path):
            os.unlink(self._path)
        for link in list(self._links.values()):
            self._drop(link)

    @property
    def may_return(self) -> bool:
        """Whether a worker that has said `Bye` is still connected."""
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
            except OSError as error:  # out of descriptors or memory: those who wait keep waiting
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
            pid, uid, _ = local.peer_credentials(sock)
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
            data, fd = local.receive(link.sock)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fd = b"", -1
        except (WireError, ArenaError) as error:
            self._end(link, f"sent something that is no message: {error}")
            return
        if not data:
            self._end(link, "died (killed, or crashed) without leaving the job")
            return
        self._received += 1
        try:
            self._dispatch(link, data, fd)
        except FusionError as error:
            self._end(link, f"sent a message that makes no sense: {error}")

    def _dispatch(self, link: WorkerLink, data: bytes, fd: int) -> None:
        try:
            message = wire.decode_worker_message(data)
            if link.left and not isinstance(message, wire.Hello):
                raise WireError("a message after Bye")
            if fd >= 0 and not isinstance(message, (wire.AddSegment, wire.Hello)):
                raise WireError("a descriptor came with a message that takes none")
        except WireError:
            if fd >= 0:
                os.close(fd)
            raise
        if isinstance(message, wire.AddSegment):
            self._add_segment(link, message, fd)
        if link.rank is not None and isinstance(message, (wire.Ready, wire.Submit)):
            self._handler.worker_message(link.rank, link, message)
        elif isinstance(message, wire.ToolMessage):
            self._handler.tool_message(link, message)
        elif isinstance(message, wire.Hello):
            if link.rank is not None:
                if fd >= 0:
                    os.close(fd)
                raise WireError("a second Hello")
            link.left = False
            link.stacks = Source.open(link.pid, message, fd)
            self._handler.worker_joined(link, message)
        elif link.rank is None:
            raise WireError("the first message has to be Hello")
        else:
            rank = link.rank
            if isinstance(message, wire.Bye):
                link.left, link.rank = True, None
                link.forget_stacks()
                for segment in list(link.segments):
                    self._drop_segment(link, segment)
            self._handler.worker_message(rank, link, message)
            if isinstance(message, wire.DropSegment):
                self._drop_segment(link, message.segment)

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
    def _send_now(link: WorkerLink, packet: local.Packet) -> bool:
        """Whether the packet is gone; if not, the socket is full."""
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
        if link.rank is not None and not link.left:
            self._handler.worker_left(link.rank, link.pid, why)
        elif link.left:
            self._handler.connection_ended()
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
        link.forget_stacks()
        for segment in list(link.segments):
            self._drop_segment(link, segment)
