"""A small HTTP/1.0 server on one thread, with limits on the time, bytes and connections that clients can take.

Python's own servers serve one client at a time or have a thread for each, and limit the time of each read but not that
of a request. Here one thread serves all connections. Each has one request, a deadline for it and its answer together,
and limits in bytes; where there are too many connections, the oldest one is closed (`Pending`).
"""

from __future__ import annotations

import logging
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from fusion_rt.core.errors import WireError
from fusion_rt.host.pending import Pending

_MAX_HEAD = 16 * 1024  # bytes of a message's lines before its body
_PIECE = 64 * 1024  # bytes read at a time
_PAUSE = 0.1  # seconds until connections are accepted again after descriptors have run out
_ENDING = 5.0  # seconds that the thread gets to end
_STRANGERS_OF_HOST, _STRANGERS = 32, 128  # connections at a time, besides those that are expected
_log = logging.getLogger("fusion_rt")


class HttpRequest(NamedTuple):
    """A request of a client. `headers`: by name in small letters."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


def split_message(data: bytes, most: int) -> tuple[str, dict[str, str], bytes] | None:
    """Splits a request or an answer into its first line, headers and body; None while it is not complete.

    Args:
        data: the bytes received so far.
        most: limit of the body, in bytes.

    Returns: the first line, the headers by their names in small letters, and the body.

    Raises:
        WireError: it is longer than allowed.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    if len(head) > _MAX_HEAD + _PIECE:
        raise WireError("the lines before the body have no end")
    if not end:
        return None
    start, *fields = head.decode("latin-1").split("\r\n")
    pairs = [field.partition(":") for field in fields]
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    length = headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,9}", length) or int(length) > most:
        raise WireError(f"a body of {length[:20]} bytes is not allowed")
    return None if len(body) < int(length) else (start, headers, body[: int(length)])


def response(status: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """Encodes an answer. `status`: its code and text, such as `404 Not Found`."""
    fields = {"Content-Length": str(len(body)), **(headers or {})}
    lines = [f"HTTP/1.0 {status}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


@dataclass(eq=False)
class _Connection:
    """A client's connection. `answer`: the rest that is to be sent; None while its request is not complete."""

    sock: socket.socket
    deadline: float
    data: bytes = b""
    answer: memoryview | None = None


class Server:
    """An HTTP server on a thread of its own, which serves until it is closed.

    Args:
        listener: a listening socket, which the server owns from now on.
        answer: makes the whole answer to a request, on the server's thread; empty: the connection is just closed. An
            exception is logged and ends the connection.
        seconds: time limit of a request and its answer together.
        most_body: limit of a request's body, in bytes.
        expected: clients that are expected at a time, all of them perhaps from one host.

    Attributes:
        ended: number of connections that have ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[HttpRequest], bytes],
        seconds: float,
        most_body: int = 0,
        expected: int = 0,
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._seconds = seconds
        self._most_body = most_body
        self._connections: dict[_Connection, None] = {}  # the oldest first, which is the first whose time is over
        self._pending: Pending[_Connection] = Pending(_STRANGERS + expected, _STRANGERS_OF_HOST + expected)
        self._paused_until = 0.0
        self.ended = 0
        self._lacking = False  # there was no descriptor for the last connection
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda _: None)
        self._listen()
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server, whatever clients do; waits at most `_ENDING` seconds for an answer that is being made."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_ENDING)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._seconds_to_wait()):
                key.data(events)
            now = time.monotonic()
            while self._connections and (first := next(iter(self._connections))).deadline <= now:
                self._end(first)
            if self._paused_until and self._paused_until <= now:
                self._listen()
        for connection in list(self._connections):
            self._end(connection)
        self._selector.close()
        self._listener.close()

    def _seconds_to_wait(self) -> float | None:
        times = [self._paused_until] if self._paused_until else []
        if self._connections:
            times.append(next(iter(self._connections)).deadline)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _listen(self) -> None:
        self._paused_until = 0.0
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, events: int) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it was gone before it was accepted
            return
        except OSError as error:  # no descriptors or memory: pending connections keep waiting
            if not self._lacking:  # else it has been said
                _log.warning(
                    "no connection can be accepted for now: %s; tried again every %g s", error.strerror, _PAUSE
                )
            self._lacking = True
            self._selector.unregister(self._listener)
            self._paused_until = time.monotonic() + _PAUSE
            return
        self._lacking = False
        sock.setblocking(False)
        connection = _Connection(sock, time.monotonic() + self._seconds)
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, partial(self._go_on, connection))
        one_too_many = self._pending.add(connection, str(address[0]))
        if one_too_many is not None:
            self._end(one_too_many)

    def _go_on(self, connection: _Connection, events: int) -> None:
        """Reads or writes as much as the socket allows."""
        if connection not in self._connections:
            return  # it has just given way
        try:
            if connection.answer is None:
                self._read(connection)
            if connection.answer is not None:
                connection.answer = connection.answer[connection.sock.send(connection.answer) :]
                if not connection.answer:
                    connection.sock.shutdown(socket.SHUT_WR)
                    self._end(connection)
        except BlockingIOError:
            pass
        except (OSError, WireError):  # its sender's affair
            self._end(connection)

    def _read(self, connection: _Connection) -> None:
        piece = connection.sock.recv(_PIECE)
        if not piece:
            raise ConnectionError("it has ended in the middle of a request")
        connection.data += piece
        found = split_message(connection.data, self._most_body)
        if found is None:
            return
        start, headers, body = found
        connection.data = b""
        asked = re.fullmatch(r"([A-Z]{1,10}) (/[!-~]{0,2000}) HTTP/1\.[01]", start)
        try:
            request = HttpRequest(asked[1], asked[2], headers, body) if asked else None
            answer = self._answer(request) if request is not None else response("400 Bad Request")
        except Exception:
            _log.exception("web: a page failed")
            answer = b""
        if not answer:
            self._end(connection)
            return
        connection.answer = memoryview(answer)
        self._selector.modify(connection.sock, selectors.EVENT_WRITE, partial(self._go_on, connection))

    def _end(self, connection: _Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self.ended += 1
            self._pending.remove(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()
