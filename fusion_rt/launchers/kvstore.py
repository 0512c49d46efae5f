"""Small key-value stores over HTTP, in which the nodes of a job without `fusionrun` leave word for each other.

`horovodrun` serves one (`GET` and `PUT` of `/<scope>/<key>`, 404 until the key is there). For other launchers rank 0
serves one of the same kind while the job comes up. Reads of either side from the network are limited beforehand,
in bytes and in seconds; their meaning is the rendezvous's business.

Python's own HTTP modules are not used: each of their reads has a time-out, but all of them together have none.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fusion_rt.core.errors import WireError
from fusion_rt.host.http_server import split_message
from fusion_rt.launchers.meeting import Address

MAX_VALUE = 1024 * 1024  # bytes
_PIECE = 64 * 1024  # bytes read at a time
REQUEST_S = 3.0  # for one request, connecting included
IDENTITY = "identity"  # how the keys begin under which a store says whose it is; a number behind it is not used twice
Prove = Callable[[str], bytes]
"""Returns the word that nobody but the job can have for a text."""


class Store(Protocol):
    """The interface of a store that a rendezvous uses. Keys are `scope/key`."""

    @property
    def where(self) -> str:
        """Its address, for people."""

    @property
    def hosts(self) -> Sequence[str]:
        """The host that serves it; several, likeliest first, while that is not known."""

    def get(self, key: str) -> bytes | None:
        """A value, or None while it is not there. Raises OSError when the store does not answer (yet), and
        `WireError` for an answer that cannot be used."""

    def put(self, key: str, value: bytes) -> None:
        """Stores a value; raises as `get`."""

    def remove(self, key: str) -> None:
        """Removes a value that is no longer needed, if the store can; raises as `get`."""

    def close(self) -> None:
        """Ends the use of the store, and the store itself if this process serves it."""


class HttpStore:
    """A store that another process serves.

    Args:
        places: where it may be, likeliest first.
        scope: first part of the keys.
        prove: a store at the right place answers as this does; None: the only place is the right one.
    """

    def __init__(self, places: Sequence[Address], scope: str, prove: Prove | None = None) -> None:
        self._places = places
        self._scope = scope
        self._prove = prove
        self._place = places[0] if prove is None else None

    @property
    def where(self) -> str:
        return " or ".join(show(place) for place in ([self._place] if self._place else self._places))

    @property
    def hosts(self) -> Sequence[str]:
        return [host for host, _ in ([self._place] if self._place else self._places)]

    def get(self, key: str) -> bytes | None:
        return _get(self._find(), key)

    def put(self, key: str, value: bytes) -> None:
        status, _ = _request(self._find(), "PUT", key, value)
        if status != 200:
            raise WireError(f"the store at {self.where} answered status {status} to a request to store an entry")

    def remove(self, key: str) -> None:
        _request(self._find(), "DELETE", key)

    def close(self) -> None:
        """Nothing is open between requests."""

    def _find(self) -> Address:
        """The place of this job's store; other jobs, and other programs, may be found at the rest.

        Any process may ask the store, and pass its answer on. So it is asked for another word each time, which is
        of its port as well: no other process of the same host can be taken for it.
        """
        if self._place is not None or self._prove is None:
            return self._place or self._places[0]
        problem = "there is no place to look at"
        for place in self._places:
            try:
                key = f"{IDENTITY}.{secrets.token_hex(16)}"
                answer = _get(place, f"{self._scope}/{key}") or b""
                if hmac.compare_digest(answer, self._prove(statement(key, place[1]))):
                    self._place = place
                    return place
                problem = f"the store at {show(place)} belongs to another job"
            except (OSError, WireError) as error:
                problem = str(error)
        raise OSError(problem)


def statement(key: str, port: int) -> str:
    """Returns the text that a store at a port proves itself by when it is asked for this key."""
    return f"{key}.{port}"


def _get(place: Address, key: str) -> bytes | None:
    status, value = _request(place, "GET", key)
    if status not in (200, 404):
        raise WireError(f"the store at {show(place)} answered status {status}")
    return value if status == 200 else None


def _request(place: Address, method: str, key: str, value: bytes = b"") -> tuple[int, bytes]:
    """Status and body of the answer to one request."""
    deadline = time.monotonic() + REQUEST_S
    with socket.create_connection(place, REQUEST_S) as connection:
        head = f"{method} /{key} HTTP/1.0\r\nHost: {place[0]}\r\nContent-Length: {len(value)}\r\n\r\n"
        connection.settimeout(_left(deadline))
        connection.sendall(head.encode("ascii", "replace") + value)
        start, body = read_message(connection, deadline)
    match = re.fullmatch(r"HTTP/1\.[01] ([0-9]{3})( .*)?", start)
    if match is None:
        raise WireError(f"{show(place)} does not speak HTTP")
    return int(match[1]), body


def read_message(connection: socket.socket, deadline: float) -> tuple[str, bytes]:
    """First line and body of an answer.

    Raises:
        OSError: it did not come in time.
        WireError: it is longer than allowed, or cut short.
    """
    data = b""
    while (found := split_message(data, MAX_VALUE)) is None:
        data += _read(connection, deadline)
    start, _, body = found
    return start, body


def _read(connection: socket.socket, deadline: float) -> bytes:
    connection.settimeout(_left(deadline))
    piece = connection.recv(_PIECE)
    if not piece:
        raise WireError("the connection was closed in the middle of a message")
    return piece


def _left(deadline: float) -> float:
    """Seconds left; raises TimeoutError, which is an OSError, when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def show(place: Address) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
