"""Connections that libzmq has accepted, by their descriptors: their addresses, and how to end one.

libzmq accepts whoever comes and has no limit for it. Its monitor tells the descriptor of a connection, which another
thread may close, and use for something else, at any time. So a descriptor is duplicated first, and what is then found
behind the duplicate is looked at before anything is done to it. The duplicate's number is kept in reserve, because
this is needed most when there are no descriptors left.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

import zmq

Address = tuple[str, int]  # IP address and port
_RECEIVED, _AT = struct.Struct("=Q"), 128  # `tcpi_bytes_received` in TCP_INFO, and where it is
_CLOSE_WAIT = 8  # the state of TCP, in the first byte of TCP_INFO, in which the other side has closed the connection


class AcceptedSockets:
    """Accepted connections of one listening socket.

    Args:
        listener: a bound ZeroMQ socket.
    """

    def __init__(self, listener: zmq.Socket[bytes]) -> None:
        self._port = int(listener.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._reserve = os.dup(self._nothing)

    def address(self, descriptor: int) -> Address | None:
        """Returns the address that a connection comes from; None if it has ended already."""
        return self._look(descriptor)

    def keep(self, descriptor: int) -> socket.socket | None:
        """Returns a duplicate of a connection, which tells how it ended (`hung_up`) once libzmq has closed its own;
        None if it has ended already, or there is no descriptor for a duplicate."""
        if self._look(descriptor) is None:
            return None
        try:
            return socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return None

    def shut_down(self, descriptor: int, address: Address) -> None:
        """Ends a connection, if it is still the one from that address; libzmq closes it then."""
        self._look(descriptor, _shut_down, address)

    def arrived(self, descriptor: int, address: Address) -> int:
        """Returns the bytes that have arrived on a connection, in all; 0 if it is no more the one from that address."""
        arrived = [0]

        def read(found: socket.socket) -> None:
            arrived[:] = _RECEIVED.unpack_from(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), _AT)

        self._look(descriptor, read, address)
        return arrived[0]

    def close(self) -> None:
        """Closes the reserved descriptors."""
        os.close(self._reserve)
        os.close(self._nothing)

    def _look(
        self, descriptor: int, act: Callable[[socket.socket], None] | None = None, only: Address | None = None
    ) -> Address | None:
        """Returns the address of a connection, and acts on it if that is `only`."""
        try:
            os.dup2(descriptor, self._reserve, inheritable=False)
        except OSError:  # closed
            return None
        found = None
        try:
            found = socket.socket(fileno=self._reserve)
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != self._port:
                return None
            host, port = found.getpeername()[:2]
            if act is not None and (host, port) == only:
                act(found)
            return host, port
        except OSError:  # no socket, or not connected any more
            return None
        finally:
            if found is not None:
                found.detach()
            os.dup2(self._nothing, self._reserve, inheritable=False)


def _shut_down(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def hung_up(kept: socket.socket) -> bool:
    """Returns whether the other process has closed a connection, or the kernel has for it when it died. A network does
    not: a firewall resets connections, or swallows their data."""
    return kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
