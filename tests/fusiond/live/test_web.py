"""A server for this host only."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from fusion_rt.errors import FusionError
from fusiond.live.web import Page, WebServer


def fail() -> bytes:
    raise FusionError("nobody is there")


@pytest.fixture
def server() -> Iterator[WebServer]:
    server = WebServer(0, {"/": Page("text/plain", lambda: b"here"), "/fails": Page("text/plain", fail)})
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


def test_pages_are_served_and_nothing_else(server: WebServer) -> None:
    assert ask(server, "/") == (200, "here")
    assert ask(server, "/?whatever=1") == (200, "here")
    assert ask(server, "/../etc/passwd")[0] == 404
    assert ask(server, "/", "POST")[0] == 501


def test_an_error_is_a_sentence(server: WebServer) -> None:
    assert ask(server, "/fails") == (503, "nobody is there\n")


def test_a_page_of_a_strangers_name_for_this_address_is_refused(server: WebServer) -> None:
    assert ask(server, "/", Host="attacker.example")[0] == 403
    assert ask(server, "/", Host="[::1")[0] == 403
    assert ask(server, "/", Host="localhost:1")[0] == 200


def test_closing_frees_the_port() -> None:
    first = WebServer(0, {})
    port = int(first.url.rpartition(":")[2])
    first.close()
    WebServer(port, {}).close()
