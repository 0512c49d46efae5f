"""Small key-value stores over HTTP, in which the nodes of a job without `fusionrun` leave word for each other.

`horovodrun` serves one (`GET` and `PUT` of `/<scope>/<key>`, 404 until the key is there). For other launchers rank 0
serves one of the same kind while the job comes up. Reads of either side from the network are limited beforehand,
in bytes and in seconds; their meaning is the rendezvous's business.

Python's own HTTP modules are not used: each of their reads has a time-out, but all of them together have none.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.host.address import is_loopback
from fusion_rt.host.http_server import HttpRequest, Server, response, split_message
from fusion_rt.launchers.meeting import Address

MAX_VALUE = 1024 * 1024  # bytes
_PIECE = 64 * 1024  # bytes read at a time
REQUEST_S = 3.0  # for one request, connecting included
IDENTITY = "identity"  # how the keys begin under which a store says whose it is; a number behind it is not used twice
Prove = Callable[[str], bytes]
"""Returns the word that nobody but the job can have for a text."""
_BACKLOG = 128
_AT_A_TIME = 192  # ranks of the job that may ask at the same moment, all of one host perhaps; others try again
_MAX_PUT = 64 * 1024  # bytes of a value from the network; rank 0's own, the longest ones, do not come that way


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


class HttpServer:
    """The store that this process serves, until `close`.

    Args:
        hosts: host names and addresses at which others look for it; if just one usable address among them is this
            machine's, it listens on that, else on all there are.
        ports: on the first of these that is free.
        scope: first part of the keys.
        prove: makes its proof of identity.
        admits: whether a value may be stored under a key.
        max_keys: how many there may be.

    Raises:
        FusionError: none of the ports can be listened on.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        ports: Sequence[int],
        scope: str,
        prove: Prove,
        admits: Callable[[str, bytes], bool],
        max_keys: int,
    ) -> None:
        self._hosts = hosts
        self._values: dict[str, bytes] = {}
        self._own = f"{scope}/{IDENTITY}."
        self._prove = prove
        self._lock = threading.Lock()
        self._admits = admits
        self._max_keys = max_keys
        listener = _listen(hosts, ports)
        self.port: int = listener.getsockname()[1]
        expected = min(max_keys, _AT_A_TIME)
        self._server = Server(listener, self._answer, REQUEST_S, _MAX_PUT, expected)

    @property
    def where(self) -> str:
        return show((self._hosts[0], self.port))

    @property
    def hosts(self) -> Sequence[str]:
        return self._hosts

    def get(self, key: str) -> bytes | None:
        if key.startswith(self._own):
            return self._prove(statement(key.partition("/")[2], self.port))
        with self._lock:
            return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def remove(self, key: str) -> None:
        """Nothing: the store ends with this process's use of it."""

    def close(self) -> None:
        self._server.close()

    def _answer(self, request: HttpRequest) -> bytes:
        """The answer to a request from the network."""
        key = request.target[1:]
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}/[A-Za-z0-9_.-]{1,200}", key):
            return response("400 Bad HttpRequest")
        if request.method == "GET":
            found = self.get(key)
            return response("404 Not Found") if found is None else response("200 OK", found)
        if request.method != "PUT" or key.startswith(self._own) or not self._admits(key, request.body):
            return response("403 Forbidden")
        with self._lock:
            if key not in self._values and len(self._values) >= self._max_keys:
                return response("403 Forbidden")
            self._values[key] = request.body
        return response("200 OK")


def _listen(hosts: Sequence[str], ports: Sequence[int]) -> socket.socket:
    problem = "it was given no port"
    for port in ports:
        for family, address in _listening_addresses(hosts):
            try:
                both = address == "::" and socket.has_dualstack_ipv6()
                return socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
            except OSError as error:
                problem = f"{show((address or '*', port))}: {os.strerror(error.errno or 0)}"
    raise FusionError(f"rank 0 cannot serve the rendezvous of its job ({problem}); set MASTER_PORT to a free port of "
                      "its host, the same on all hosts, or give FUSION_PORTS more ports")  # fmt: skip


def _listening_addresses(hosts: Sequence[str]) -> list[tuple[socket.AddressFamily, str]]:
    own = {}
    for host in hosts:
        for family, address in _addresses(host):
            if is_loopback(host) or not is_loopback(address):
                with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
                    probe.bind((address, 0))
                    own[address] = family
    if len(own) == 1:
        return [(family, address) for address, family in own.items()]
    return [(socket.AF_INET6, "::"), (socket.AF_INET, "")]  # the first one serves IPv4 as well


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]
