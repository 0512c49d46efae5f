"""A listening socket of this node: takes what has come, and counts the connections that were nobody's."""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from fusion_rt import wire
from fusion_rt.pending import Pending
from fusiond.host.loop import EventLoop
from fusiond.transport import sockets
from fusiond.transport.accepted_sockets import AcceptedSockets, Address
from fusiond.transport.sockets import NOW, Socket

_STRANGERS_OF_HOST, _STRANGERS = 16, 64  # connections of nobody's that are left open, from one host and in all
_FRAMES = 2 + wire.MAX_MESSAGE // sockets.CONTROL_FRAME  # of a message that anybody may send, its first one not counted
_BATCH = 32  # messages taken before other events get their turn, and seconds in which they are
_SECONDS = 1e-3
Take = Callable[[bytes, zmq.Frame, list[zmq.Frame]], None]


class Inbox:
    """Gives each message to `take`: its routing id, its first frame, and the others, of which some are left out where
    there are more than any message has. Closes connections of strangers when there are too many.

    Args:
        socket, monitor, connections: a listening socket, what tells of its connections, and these themselves.
        peers: connections that the peers may be opening at a time, all of them from one host.

    Attributes:
        accepted: connections of TCP.
        strangers: those of them that have ended without a message of a peer: scans, half-open ones, refused keys.
    """

    def __init__(
        self, loop: EventLoop, socket: Socket, monitor: Socket, connections: AcceptedSockets, take: Take, peers: int
    ) -> None:
        self.accepted = 0
        self.strangers = 0
        self._loop = loop
        self._socket = socket
        self._monitor = monitor
        self._take = take
        self._peers: set[int] = set()  # descriptors of connections from which a peer was heard
        self._pending: Pending[int] = Pending(_STRANGERS + peers, _STRANGERS_OF_HOST + peers)
        self._addresses: dict[int, Address] = {}  # of the pending ones
        self._accepted_sockets = connections
        self._closed = False

    def start(self) -> None:
        """Begins to take messages. A ZeroMQ descriptor tells of changes only: it is looked at once now."""
        for socket, callback in ((self._monitor, self._watch), (self._socket, self._drain)):
            self._loop.add_reader(socket.fileno(), callback)
            self._loop.call_soon(callback)

    def close(self) -> None:
        """Takes no more; the sockets are the context's to close."""
        self._closed = True
        self._accepted_sockets.close()
        self._loop.remove(self._monitor.fileno())
        self._loop.remove(self._socket.fileno())

    def heard(self, descriptor: int) -> None:
        """A peer has spoken on that connection."""
        self._peers.add(descriptor)
        self._forget(descriptor)

    def _drain(self) -> None:
        until = self._loop.clock() + _SECONDS
        for _ in range(_BATCH):
            if self._closed:
                return
            try:
                routing_id = self._socket.recv(NOW)
            except zmq.Again:
                return
            first = self._socket.recv(NOW, copy=False)
            rest: list[zmq.Frame] = []
            last = first
            while last.more:
                last = self._socket.recv(NOW, copy=False)
                if len(rest) < _FRAMES:
                    rest.append(last)
            self._take(routing_id, first, rest)
            if self._loop.clock() > until:  # chunks, each reduced as it comes: what acknowledges them is due as well
                break
        self._loop.call_soon(self._drain)

    def _watch(self) -> None:
        while not self._closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(NOW))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.accepted += 1
                self._admit(int(event["value"]))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                descriptor = int(event["value"])
                self._forget(descriptor)
                if descriptor in self._peers:
                    self._peers.remove(descriptor)
                else:
                    self.strangers += 1

    def _admit(self, descriptor: int) -> None:
        """A new connection, for which an older one may have to go: libzmq accepts as many as there are."""
        address = self._accepted_sockets.address(descriptor)
        if address is None:
            return  # it has ended already
        self._addresses[descriptor] = address
        one_too_many = self._pending.add(descriptor, address[0])
        if one_too_many is not None:
            self._accepted_sockets.shut_down(one_too_many, self._addresses.pop(one_too_many))

    def _forget(self, descriptor: int) -> None:
        self._pending.remove(descriptor)
        self._addresses.pop(descriptor, None)


def descriptor_of(frame: zmq.Frame) -> int:
    """The descriptor from which libzmq has read a message; -1 where it speaks a ZMTP without properties, as no peer
    does: any bytes that do not look like a greeting of today are taken for ZMTP 1.0."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def admitted_node(frame: zmq.Frame) -> int | None:
    """The node whose key the connection of this message was admitted with."""
    try:
        return int(str(frame.get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return None
