"""Connections that libzmq has accepted, by their descriptors: their addresses, and how to end one.

libzmq accepts whoever comes and has no limit for it. Its monitor tells the descriptor of a connection, which another
thread may close, and use for something else, at any time. So a descriptor is duplicated first, and what is then found
behind the duplicate is looked at before anything is done to it. The duplicate's number is kept in reserve, because
this is needed most when there are no descriptors left.
"""

from __future__ import annotations

import os
import socket

import zmq

Address = tuple[str, int]  # IP address and port
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
        return self._look(descriptor, None)

    def keep(self, descriptor: int) -> socket.socket | None:
        """Returns a duplicate of a connection, which tells how it ended (`hung_up`) once libzmq has closed its own;
        None if it has ended already, or there is no descriptor for a duplicate."""
        if self._look(descriptor, None) is None:
            return None
        try:
            return socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return None

    def shut_down(self, descriptor: int, address: Address) -> None:
        """Ends a connection, if it is still the one from that address; libzmq closes it then."""
        self._look(descriptor, address)

    def close(self) -> None:
        """Closes the reserved descriptors."""
        os.close(self._reserve)
        os.close(self._nothing)

    def _look(self, descriptor: int, end: Address | None) -> Address | None:
        """Returns the address of a connection, and ends it if that is `end`."""
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
            if (host, port) == end:
                found.shutdown(socket.SHUT_RDWR)
            return host, port
        except OSError:  # no socket, or not connected any more
            return None
        finally:
            if found is not None:
                found.detach()
            os.dup2(self._nothing, self._reserve, inheritable=False)


def hung_up(kept: socket.socket) -> bool:
    """Returns whether the other process has closed a connection, or the kernel has for it when it died. A network does
    not: a firewall resets connections, or swallows their data."""
    return kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
