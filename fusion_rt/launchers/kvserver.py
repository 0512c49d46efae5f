"""The key-value store that rank 0 serves while a job comes up whose launcher has none (`kvstore` is the other side)."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Sequence

from fusion_rt.core.errors import FusionError
from fusion_rt.host.address import is_loopback
from fusion_rt.host.http_server import Request, Server, response
from fusion_rt.launchers import kvstore
from fusion_rt.launchers.kvstore import IDENTITY, Prove, show

_BACKLOG = 128
_AT_A_TIME = 192  # ranks of the job that may ask at the same moment, all of one host perhaps; others try again
_MAX_PUT = 64 * 1024  # bytes of a value from the network; rank 0's own, the longest ones, do not come that way


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
        self._server = Server(listener, self._answer, kvstore.REQUEST_S, _MAX_PUT, expected)

    @property
    def where(self) -> str:
        return show((self._hosts[0], self.port))

    @property
    def hosts(self) -> Sequence[str]:
        return self._hosts

    def get(self, key: str) -> bytes | None:
        if key.startswith(self._own):
            return self._prove(kvstore.statement(key.partition("/")[2], self.port))
        with self._lock:
            return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def remove(self, key: str) -> None:
        """Nothing: the store ends with this process's use of it."""

    def close(self) -> None:
        self._server.close()

    def _answer(self, request: Request) -> bytes:
        """The answer to a request from the network."""
        key = request.target[1:]
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}/[A-Za-z0-9_.-]{1,200}", key):
            return response("400 Bad Request")
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
