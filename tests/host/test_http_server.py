"""A server on one thread: what clients do to it, and that its other clients and its owner notice nothing of it."""

from __future__ import annotations

import contextlib
import errno
import http.client
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from fusion_rt.core.errors import WireError
from fusion_rt.host import http_server
from fusion_rt.host.http_server import HttpRequest, Server, response, split_message
from tests.for_each import for_each

PATIENCE_S = 20.0  # for what has to happen, on however slow a machine
LONG = bytes(8 << 20)  # more than the kernel keeps for a client that does not read


def answer(request: HttpRequest) -> bytes:
    if request.target == "/fails":
        raise ValueError("a bug of the page")
    return response("200 OK", LONG if request.target == "/long" else request.method.encode() + request.body)


class Serve:
    """Starts servers. `servers`: those that it has started."""

    def __init__(self) -> None:
        self.servers: list[Server] = []

    def __call__(self, listener: socket.socket | None = None, seconds: float = PATIENCE_S, most_body: int = 10) -> int:
        """A server's port."""
        listener = listener or socket.create_server(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        self.servers.append(Server(listener, answer, seconds, most_body))
        return port


@pytest.fixture
def serve() -> Iterator[Serve]:
    started = Serve()
    yield started
    for server in started.servers:
        server.close()
        server.close()  # as often as one likes


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def ask(port: int, method: str = "GET", path: str = "/", body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        found = connection.getresponse()
        return found.status, found.read()


def is_over(sock: socket.socket) -> bool:
    """Waits for the end of a connection."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 20):
            pass
    return True


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_is_complete_when_its_body_is() -> None:
    text = b"PUT /a HTTP/1.0\r\nA-B:  c : d \r\ncontent-length: 3\r\n\r\nxyz"
    for length in range(len(text)):
        assert split_message(text[:length], 3) is None
    assert split_message(text, 3) == ("PUT /a HTTP/1.0", {"a-b": "c : d", "content-length": "3"}, b"xyz")
    assert split_message(b"GET / HTTP/1.0\r\n\r\n", 0) == ("GET / HTTP/1.0", {}, b"")


@for_each("length", ["4", "-1", "+1", "1_0", "", "x", "99999999999999999999"])
def test_a_body_has_a_limit_that_is_looked_at_before_it_comes(length: str) -> None:
    with pytest.raises(WireError, match="is not allowed"):
        split_message(b"PUT /a HTTP/1.0\r\nContent-Length: %s\r\n\r\n" % length.encode(), 3)


def test_lines_without_an_end_have_one() -> None:
    with pytest.raises(WireError, match="have no end"):
        split_message(b"GET / HTTP/1.0\r\n" + b"x: y\r\n" * 20_000, 0)


# --- the server -------------------------------------------------------------------------------------------------------


def test_requests_are_answered(serve: Serve) -> None:
    port = serve()
    assert ask(port) == (200, b"GET")
    assert ask(port, "PUT", body=b"body") == (200, b"PUTbody")
    assert ask(port, path="/long") == (200, LONG)


def test_a_page_that_fails_ends_one_connection_and_is_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    port = serve()
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        ask(port, path="/fails")
    assert "a bug of the page" in caplog.text
    assert ask(port) == (200, b"GET")


def test_who_does_not_take_his_answer_in_time_does_not_get_it(serve: Serve) -> None:
    port = serve(seconds=1.0)
    server = serve.servers[0]
    with connect(port) as sock:
        sock.sendall(b"GET /long HTTP/1.0\r\n\r\n")
        deadline = time.monotonic() + PATIENCE_S
        while server.ended == 0:  # nothing else tells of the end of a connection that is not read from
            assert time.monotonic() < deadline
            time.sleep(0.01)
        received = 0
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(1 << 20):
                received += len(data)
    assert received < len(LONG)
    assert ask(port) == (200, b"GET")


def test_of_too_many_connections_the_oldest_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_STRANGERS_OF_HOST", 4)
    port = serve()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connect(port)) for _ in range(10)]
        assert ask(port) == (200, b"GET")  # and so all of them have been accepted
        assert all(is_over(sock) for sock in crowd[:7])
        for sock in crowd[7:]:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)


class Lacking(socket.socket):
    """A listening socket for whose connections there are no descriptors at first."""

    attempts = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.attempts += 1
        if self.attempts <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_lack_of_descriptors_is_waited_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "_PAUSE", 0.01)
    listener = Lacking()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    with caplog.at_level(logging.WARNING):
        assert ask(serve(listener)) == (200, b"GET")
    assert listener.attempts >= 4
    assert caplog.text.count("Too many open files") == 1
