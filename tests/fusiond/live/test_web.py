"""A server for this host only."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from fusion_rt.core.errors import FusionError
from fusiond.live import web
from fusiond.live.web import Page, WebServer


def fail() -> bytes:
    raise FusionError("nobody is there")


@pytest.fixture
def server() -> Iterator[WebServer]:
    pages = {"/": Page("text/plain", lambda: b"here"), "/fails": Page("text/plain", fail)}
    server = WebServer(0, pages, "the token")
    yield server
    server.close()


def ask(server: WebServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


KNOWN = {"Authorization": "Bearer the token"}


def test_pages_are_served_and_nothing_else(server: WebServer) -> None:
    assert ask(server, "/", **KNOWN) == (200, "here")
    assert ask(server, "/?whatever=1", **KNOWN) == (200, "here")
    assert ask(server, "/../etc/passwd", **KNOWN)[0] == 404
    assert ask(server, "/", "POST", **KNOWN)[0] == 501


def test_nothing_is_said_to_who_has_no_token(server: WebServer) -> None:
    """Other users of the host, who reach the port as well."""
    assert ask(server, server.address("/").removeprefix(server.url)) == (200, "here")
    for path in ("/", "/nowhere", "/?token=", "/?token=the%20toke", "/?token=the%20tokens", "/?tokens=the%20token"):
        status, text = ask(server, path)
        assert (status, "here" in text) == (401, False)
    for header in ("", "Bearer", "Bearer ", "Bearer the toke", "Basic the token", "the token"):
        assert ask(server, "/", Authorization=header)[0] == 401
    assert ask(server, "/?token=wrong", **KNOWN)[0] == 200  # one of them is right


def test_a_token_is_drawn_where_none_is_given() -> None:
    servers = [WebServer(0, {}) for _ in range(2)]
    tokens = [server.address("/").partition("?token=")[2] for server in servers]
    for server in servers:
        server.close()
    assert tokens[0] != tokens[1]
    assert min(map(len, tokens)) >= 32


def test_an_error_is_a_sentence(server: WebServer) -> None:
    assert ask(server, "/fails", **KNOWN) == (503, "nobody is there\n")


def test_a_page_of_a_strangers_name_for_this_address_is_refused(server: WebServer) -> None:
    assert ask(server, "/", Host="attacker.example", **KNOWN)[0] == 403
    assert ask(server, "/", Host="[::1", **KNOWN)[0] == 403
    assert ask(server, "/", Host="localhost:1", **KNOWN)[0] == 200


def test_closing_frees_the_port() -> None:
    first = WebServer(0, {})
    port = int(first.url.rpartition(":")[2])
    first.close()
    WebServer(port, {}).close()


class Dripping:
    """A client that says a byte of an endless request every few milliseconds, until it is told to stop."""

    def __init__(self, server: WebServer) -> None:
        self._sock = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 10)
        self._sock.sendall(b"GET / HTTP/1.1\r\nX: ")
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._drip)
        self._thread.start()

    def _drip(self) -> None:
        with contextlib.suppress(OSError):  # it has been thrown out
            while not self._ends.wait(0.005):
                self._sock.sendall(b"x")

    @property
    def is_connected(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> bool:
        """Waits until it has been thrown out; whether it has."""
        self._thread.join(20)
        return not self.is_connected

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._sock.close()


def test_a_client_that_drips_keeps_nobody_from_being_served_and_the_server_not_from_ending() -> None:
    server = WebServer(0, {"/": Page("text/plain", lambda: b"here")}, "the token")
    clients = [Dripping(server) for _ in range(5)]
    try:
        assert ask(server, "/", **KNOWN) == (200, "here")
        assert all(client.is_connected for client in clients)
        server.close()
        assert all(client.wait() for client in clients)
    finally:
        for client in clients:
            client.close()


def test_a_request_that_drips_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_REQUEST", 0.1)  # its bytes come more often
    server = WebServer(0, {})
    client = Dripping(server)
    try:
        assert client.wait()
    finally:
        client.close()
        server.close()
