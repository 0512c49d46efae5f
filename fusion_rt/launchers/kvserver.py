"""The key-value store that rank 0 serves while a job comes up whose launcher has none (`kvstore` is the other side)."""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence

from fusion_rt.address import is_loopback
from fusion_rt.errors import FusionError
from fusion_rt.launchers import kvstore
from fusion_rt.launchers.kvstore import IDENTITY, left, read_message, show
from fusion_rt.launchers.meeting import Place

_MAX_REQUESTS = 64  # served at a time; the next ones wait


class HttpServer:
    """The store that this process serves, until `close`.

    Args:
        hosts: host names and addresses at which others look for it; if just one usable address among them is this
            machine's, it listens on that, else on all there are.
        ports: on the first of these that is free.
        scope: first part of the keys.
        identity: what it says about itself.
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
        identity: bytes,
        admits: Callable[[str, bytes], bool],
        max_keys: int,
    ) -> None:
        self._hosts = hosts
        self._values: dict[str, bytes] = {f"{scope}/{IDENTITY}": identity}
        self._lock = threading.Lock()
        self._admits = admits
        self._max_keys = max_keys
        self._server = _listen(hosts, ports, self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def where(self) -> str:
        return show((self._hosts[0], self.port))

    @property
    def hosts(self) -> Sequence[str]:
        return self._hosts

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def remove(self, key: str) -> None:
        """Nothing: the store ends with this process's use of it."""

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, key: str, value: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a request from the network."""
        if method == "GET":
            found = self.get(key)
            return (404, b"") if found is None else (200, found)
        if method != "PUT" or key.endswith(f"/{IDENTITY}") or not self._admits(key, value):
            return 403, b""
        with self._lock:
            if key not in self._values and len(self._values) > self._max_keys:
                return 403, b""
            self._values[key] = value
        return 200, b""


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, family: socket.AddressFamily, address: Place, store: HttpServer) -> None:
        self.address_family = family
        self.store = store
        self.slots = threading.BoundedSemaphore(_MAX_REQUESTS)
        super().__init__(address, _Handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        self.slots.acquire()
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        super().shutdown_request(request)
        self.slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: whatever goes wrong with a request is its sender's affair."""


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        deadline = time.monotonic() + kvstore.REQUEST_S
        start, value = read_message(self.request, deadline)
        match = re.fullmatch(r"([A-Z]{1,10}) /([A-Za-z0-9_.-]{1,200}/[A-Za-z0-9_.-]{1,200}) HTTP/1\.[01]", start)
        assert isinstance(self.server, _Server)
        status, body = self.server.store.answer(match[1], match[2], value) if match else (400, b"")
        head = f"HTTP/1.0 {status} -\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request.settimeout(left(deadline))
        self.request.sendall(head.encode() + body)


def _listen(hosts: Sequence[str], ports: Sequence[int], store: HttpServer) -> _Server:
    problem = "it was given no port"
    for port in ports:
        for family, address in _listening_addresses(hosts):
            try:
                return _Server(family, (address, port), store)
            except OSError as error:
                problem = f"{show((address or '*', port))}: {error.strerror}"
    raise FusionError(f"rank 0 cannot serve the rendezvous of its job ({problem}); set MASTER_PORT to a free port of "
                      "its host, the same on all hosts")  # fmt: skip


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
