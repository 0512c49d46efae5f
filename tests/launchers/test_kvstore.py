"""Stores over HTTP: what is put can be got by those it is meant for, and whatever else comes in is borne."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.launchers import kvstore
from fusion_rt.launchers.kvstore import MAX_VALUE, HttpServer, HttpStore

pytestmark = pytest.mark.multiprocess  # for the descriptors


def ours(text: str) -> bytes:
    return b"us:" + text.encode()


def theirs(text: str) -> bytes:
    return b"them:" + text.encode()


@pytest.fixture
def server() -> Iterator[HttpServer]:
    store = HttpServer(["127.0.0.1"], [0], "job", ours, lambda key, value: not value.startswith(b"bad"), max_keys=3)
    yield store
    store.close()


def client_of(server: HttpServer) -> HttpStore:
    return HttpStore([("127.0.0.1", server.port)], "job", ours)


def exchange(port: int, request: bytes) -> bytes:
    """What the server answers to these bytes, to its end of the connection."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@contextlib.contextmanager
def fake_server(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server on loopback that does this with each connection; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        behave(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_value_is_there_once_it_was_put(server: HttpServer) -> None:
    client = client_of(server)
    assert client.get("job/a") is None
    client.put("job/a", b"\0one")
    server.put("job/big", bytes(MAX_VALUE))
    assert client.get("job/a") == server.get("job/a") == b"\0one"
    assert client.get("job/big") == bytes(MAX_VALUE)
    server.put("job/a", b"two")
    assert client_of(server).get("job/a") == b"two"
    assert (client.hosts, server.hosts) == (["127.0.0.1"], ["127.0.0.1"])
    assert client.where == server.where == f"127.0.0.1:{server.port}"


def test_many_at_once(server: HttpServer) -> None:
    server.put("job/a", b"x")
    found: list[bytes | None] = []
    threads = [threading.Thread(target=lambda: found.append(client_of(server).get("job/a"))) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"x"] * 100


def test_the_server_keeps_what_it_admits_and_no_more(server: HttpServer) -> None:
    client = client_of(server)
    for key, value in (("job/a", b"bad"), ("job/identity.1", b"mine")):
        with pytest.raises(WireError, match="403"):
            client.put(key, value)
    for key in "abc":
        client.put(f"job/{key}", b"1")
    with pytest.raises(WireError, match="403"):
        client.put("job/d", b"1")
    client.put("job/a", b"2")
    assert client.get("job/a") == b"2"


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"GET /job/identity.1 HTTP/1.0\r\n\r\n", b"200"),
        (b"DELETE /job/identity.1 HTTP/1.0\r\n\r\n", b"403"),
        (b"GET /job HTTP/1.0\r\n\r\n", b"400"),
        (b"GET /job/a/b HTTP/1.0\r\n\r\n", b"400"),
        (b"GET /../../etc/passwd HTTP/1.0\r\n\r\n", b"400"),
        (b"\x16\x03\x01\xff\xff\r\n\r\n", b"400"),
        (b"PUT /job/a HTTP/1.0\r\nContent-Length: -1\r\n\r\n", b""),
        (b"PUT /job/a HTTP/1.0\r\nContent-Length: 99999999999999999999\r\n\r\n", b""),
        (b"PUT /job/a HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (MAX_VALUE + 1), b""),
        (b"PUT /job/a HTTP/1.0\r\nContent-Length: 5\r\n\r\nfour", b""),
        (b"GET /job/a HTTP/1.0\r\n" + b"x: y\r\n" * 20000, b""),
        (b"", b""),
    ],
)
def test_the_server_bears_what_comes(server: HttpServer, request_bytes: bytes, answer: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        assert exchange(server.port, request_bytes)[9:12] == answer
    assert client_of(server).get("job/a") is None, "it does not serve any more, or has kept something"


def test_the_server_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "REQUEST_S", 0.2)
    server = HttpServer(["127.0.0.1"], [0], "job", ours, lambda *_: True, max_keys=3)
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(b"GET /job/a")
        assert connection.recv(10) == b""
    server.close()


def test_strangers_who_say_nothing_keep_nobody_waiting(server: HttpServer) -> None:
    """Not even until their own time is over: the job's ranks are answered at once, however many strangers sit there."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10)) for _ in range(300)]
        for number, each in enumerate(silent):
            with contextlib.suppress(ConnectionError):  # it has been thrown out
                each.sendall(b"GET /job/a HTTP/1.0\r\n"[: number % 20])
        client_of(server).put("job/a", b"x")
        for each in silent[-10:]:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):  # they are still there
                each.recv(1)


def test_a_job_finds_its_own_store_among_others(server: HttpServer) -> None:
    other = HttpServer(["localhost"], [0], "job", theirs, lambda *_: True, max_keys=9)
    with fake_server(lambda connection: connection.sendall(b"SSH-2.0-x\r\n\r\n")) as port:
        places = [("127.0.0.1", port), ("127.0.0.1", other.port), ("127.0.0.1", server.port)]
        client = HttpStore(places, "job", ours)
        assert len(client.hosts) == 3
        client.put("job/a", b"1")
        assert (server.get("job/a"), other.get("job/a")) == (b"1", None)
        assert client.where == server.where
        nobody = HttpStore(places[:2], "job", ours)
        with pytest.raises(OSError, match="belongs to another job"):
            nobody.get("job/a")
        assert nobody.where == f"127.0.0.1:{port} or 127.0.0.1:{other.port}"
    other.close()


def test_a_stranger_who_passes_on_what_the_store_says_is_not_taken_for_it(server: HttpServer) -> None:
    """At a port that comes first: the job would wait for what is never there."""

    def pass_on(connection: socket.socket) -> None:
        connection.sendall(exchange(server.port, connection.recv(1000)))

    with fake_server(pass_on) as port:
        client = HttpStore([("127.0.0.1", port), ("127.0.0.1", server.port)], "job", ours)
        client.put("job/a", b"1")
        assert client.where == server.where
        assert server.get("job/a") == b"1"


def test_a_large_job_gives_strangers_no_more_room() -> None:
    server = HttpServer(["127.0.0.1"], [0], "job", ours, lambda *_: True, max_keys=4 * 8192)
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
        assert client_of(server).get("job/a") is None
        assert len(server._server._connections) <= 256
    server.close()


def test_the_next_port_is_taken_when_one_is_in_use(server: HttpServer) -> None:
    second = HttpServer(["127.0.0.1"], [server.port, 0], "job", ours, lambda *_: True, max_keys=9)
    assert second.port != server.port
    second.close()
    with pytest.raises(FusionError, match=rf"127.0.0.1:{server.port}: Address already in use\); set MASTER_PORT"):
        HttpServer(["127.0.0.1"], [server.port], "job", ours, lambda *_: True, max_keys=9)


def test_a_server_listens_on_all_addresses_unless_one_is_meant() -> None:
    assert kvstore._listening_addresses(["127.0.0.1", "192.0.2.1"]) == [(socket.AF_INET, "127.0.0.1")]
    everywhere = [(socket.AF_INET6, "::"), (socket.AF_INET, "")]
    assert kvstore._listening_addresses(["127.0.0.1", "127.0.0.2"]) == everywhere
    assert kvstore._listening_addresses(["no-such-host.invalid"]) == everywhere
    server = HttpServer(["no-such-host.invalid"], [0], "job", ours, lambda *_: True, max_keys=9)
    assert client_of(server).get("job/a") is None
    server.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.0 500 oops\r\n\r\n", "status 500"),
        (b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n", "status 302"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 99999999\r\n\r\n", "99999999 bytes is not allowed"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n1234", "closed in the middle"),
        (b"220 mail\r\n\r\n", "does not speak HTTP"),
        (b"x" * 200_000, "no end"),
        (b"", "closed in the middle"),
    ],
)
def test_a_client_bears_any_answer(answer: bytes, error: str) -> None:
    def behave(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(answer)

    with fake_server(behave) as port, pytest.raises((WireError, ConnectionError), match=f"{error}|reset"):
        HttpStore([("127.0.0.1", port)], "job").get("job/a")


def test_a_client_does_not_wait_for_a_slow_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "REQUEST_S", 0.2)
    released = threading.Event()

    def behave(connection: socket.socket) -> None:
        while not released.wait(0.05):  # each byte comes before a time-out of its own
            connection.sendall(b"x")

    with fake_server(behave) as port:
        with pytest.raises(TimeoutError):
            HttpStore([("127.0.0.1", port)], "job").get("job/a")
        released.set()
