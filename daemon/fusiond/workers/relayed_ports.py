"""Ports of loopback that workers of one node serve, and those of other nodes reach.

torch's store asks for no key, and whoever reaches it reads and writes all of it. So rank 0 serves it on loopback alone.
On each other node that asks, this daemon listens on a port of loopback, and relays its connections: over the mesh,
whose messages have been shown to be of this job's daemons, and are encrypted.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusiond.core.dispatch import Handlers
from fusiond.core.effects import Outlet
from fusiond.core.errors import NO_ROOM
from fusiond.host.loop import EventLoop

WINDOW = 4 * wire.MAX_RELAYED  # bytes of a connection, in one direction, that are under way or wait to be written
MOST = 512  # connections that are relayed from this node at a time
_BACKLOG = 128
_AGAIN = 0.1  # seconds until a connection is accepted for which there was no descriptor
_LOOPBACK = "127.0.0.1"
_Key = tuple[int, int, bool]  # the other node, the serial, whether this node has opened it


@dataclass(eq=False)
class _Relay:
    """One end of a connection.

    Attributes:
        waits: bytes to be written.
        under_way: bytes that have been sent and were not taken yet.
        taken: bytes that have been written and were not told yet.
        is_over: it has ended at the other end; waiting bytes are still written.
    """

    key: _Key
    sock: socket.socket
    waits: deque[memoryview] = field(default_factory=deque)
    waiting: int = 0
    under_way: int = 0
    taken: int = 0
    is_over: bool = False


class RelayedPorts:
    """All relays of one daemon, in one formation.

    Args:
        node: this one.
        outside: sends messages to other nodes.
    """

    def __init__(self, loop: EventLoop, node: int, outside: Outlet) -> None:
        self._loop = loop
        self._node = node
        self._outside = outside
        self._served: set[int] = set()  # ports that workers of this node serve
        self._listeners: dict[tuple[int, int], socket.socket] = {}  # by node and port
        self._relays: dict[_Key, _Relay] = {}
        self._serial = 0

    def handlers(self) -> Handlers:
        """Handlers of the messages of the other nodes."""
        return {wire.RelayOpened: self._opened, wire.Relayed: self._relayed}

    def port_for(self, node: int, port: int) -> int:
        """Returns the port of this node's loopback that leads to a port of another node's; on its own node, that port,
        which others may ask for from now on.

        Raises:
            OSError: there is no port or descriptor for it.
        """
        if node == self._node:
            self._served.add(port)
            return port
        if (node, port) not in self._listeners:
            listener = socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG)
            listener.setblocking(False)
            self._listeners[node, port] = listener
            self._listen(listener, node, port)
        own: int = self._listeners[node, port].getsockname()[1]
        return own

    def lost(self, node: int) -> None:
        """Ends the connections to a node that is gone."""
        for relay in [relay for key, relay in self._relays.items() if key[0] == node]:
            self._drop(relay)

    def close(self) -> None:
        """Ends all of it."""
        for listener in self._listeners.values():
            self._loop.remove(listener.fileno())
            listener.close()
        self._listeners.clear()
        self._served.clear()
        for relay in list(self._relays.values()):
            self._drop(relay)

    def statistics(self) -> dict[str, int]:
        """Returns the connections, and the bytes that wait to be written."""
        return {"relays": len(self._relays), "waiting": sum(relay.waiting for relay in self._relays.values())}

    # --- from here ----------------------------------------------------------------------------------------------------

    def _listen(self, listener: socket.socket, node: int, port: int) -> None:
        if listener.fileno() >= 0:  # it has not been closed meanwhile
            self._loop.add_reader(listener.fileno(), partial(self._accept, listener, node, port))

    def _accept(self, listener: socket.socket, node: int, port: int) -> None:
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:  # the connection waits, and the descriptor would tell of it again and again
                self._loop.remove(listener.fileno())
                self._loop.call_later(_AGAIN, partial(self._listen, listener, node, port))
            return  # else it has ended already
        if len(self._relays) >= MOST or owner_of(address[1], listener.getsockname()[1]) != os.getuid():
            sock.close()
            return
        sock.setblocking(False)
        self._serial += 1
        self._outside.to_node(node, wire.RelayOpened(self._serial, port))
        self._begin((node, self._serial, True), sock)

    def _begin(self, key: _Key, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        relay = self._relays[key] = _Relay(key, sock)
        self._read_on(relay)

    def _read_on(self, relay: _Relay) -> None:
        self._loop.add_reader(relay.sock.fileno(), lambda: self._read(relay))

    def _read(self, relay: _Relay) -> None:
        try:
            data = relay.sock.recv(min(wire.MAX_RELAYED, WINDOW - relay.under_way))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(relay)
            return
        relay.under_way += len(data)
        self._say(relay, data=data)
        if relay.under_way >= WINDOW:  # until some of it is taken
            self._loop.remove(relay.sock.fileno())
            if relay.waits:
                self._loop.add_writer(relay.sock.fileno(), lambda: self._write(relay))

    def _say(self, relay: _Relay, data: bytes = b"", taken: int = 0, is_over: bool = False) -> None:
        node, serial, is_ours = relay.key
        self._outside.to_node(node, wire.Relayed(serial, is_ours, data, taken, is_over))

    def _end(self, relay: _Relay) -> None:
        """Ends a connection that has ended here."""
        if not relay.is_over:
            self._say(relay, is_over=True)
        self._drop(relay)

    def _drop(self, relay: _Relay) -> None:
        del self._relays[relay.key]
        self._loop.remove(relay.sock.fileno())
        relay.sock.close()

    # --- from other nodes ---------------------------------------------------------------------------------------------

    def _opened(self, node: int, message: wire.RelayOpened) -> None:
        key = (node, message.serial, False)
        if key in self._relays:
            raise WireError(f"it has opened connection {message.serial} before")
        try:
            sock = socket.socket() if message.port in self._served else None
        except OSError:  # there is no descriptor for it
            sock = None
        if sock is None:
            self._outside.to_node(node, wire.Relayed(message.serial, False, is_over=True))
            return
        sock.setblocking(False)
        self._begin(key, sock)
        if sock.connect_ex((_LOOPBACK, message.port)) not in (0, errno.EINPROGRESS):
            self._end(self._relays[key])

    def _relayed(self, node: int, message: wire.Relayed) -> None:
        relay = self._relays.get((node, message.serial, not message.is_senders))
        if relay is None:
            return  # it has ended here
        if message.taken > relay.under_way or relay.waiting + len(message.data) > WINDOW:
            raise WireError("it is more than was under way, or may be")
        if message.taken:
            relay.under_way -= message.taken
            if not relay.is_over:
                self._read_on(relay)
        if message.data:
            relay.waits.append(memoryview(message.data))
            relay.waiting += len(message.data)
        relay.is_over |= message.is_over
        self._write(relay)

    def _write(self, relay: _Relay) -> None:
        try:
            while relay.waits:
                first = relay.waits[0]
                sent = relay.sock.send(first)
                relay.waiting -= sent
                relay.taken += sent
                if sent < len(first):
                    relay.waits[0] = first[sent:]
                else:
                    relay.waits.popleft()
        except BlockingIOError:
            self._loop.add_writer(relay.sock.fileno(), lambda: self._write(relay))
        except OSError:
            self._end(relay)
            return
        if relay.is_over and not relay.waits:
            self._drop(relay)
            return
        if not relay.waits:
            self._loop.remove_writer(relay.sock.fileno())
        if relay.taken >= WINDOW // 2 and not relay.is_over:
            self._say(relay, taken=relay.taken)
            relay.taken = 0


def owner_of(port: int, of: int) -> int:
    """Returns the user whose connection leads from a port of loopback to another one; -1 if there is none."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            for row in file:
                _, local, remote, *rest = row.split()
                if local.endswith(f"0100007F:{port:04X}") and remote.endswith(f"0100007F:{of:04X}"):
                    return int(rest[4])
    return -1
