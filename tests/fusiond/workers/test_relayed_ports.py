"""Ports of loopback that lead to another node: what goes in comes out, in order, and nobody else comes in."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import cast

import pytest

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusiond.host.loop import EventLoop
from fusiond.workers import relayed_ports
from fusiond.workers.relayed_ports import WINDOW, RelayedPorts, owner_of

pytestmark = pytest.mark.multiprocess  # for the descriptors
TIMEOUT_S = 60.0


class Way:
    """The way of one node to the others: `send` gets the other node and the message."""

    def __init__(self, send: Callable[[int, wire.PeerMessage], None]) -> None:
        self._send = send

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        self._send(node, message)


class Nodes:
    """Two nodes in one loop, and a server on the first one. Messages go from one to the other in order.

    `said`: all of them, with the node that has said it.
    """

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.loop = EventLoop()
        self.said: list[tuple[int, wire.PeerMessage]] = []
        self._queue: deque[Callable[[], None]] = deque()
        self.nodes = [RelayedPorts(self.loop, node, Way(self._sender(node))) for node in range(2)]
        self.server = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._serve = serve
        self.port = self.server.getsockname()[1]

    def _sender(self, node: int) -> Callable[[int, wire.PeerMessage], None]:
        def to_node(other: int, message: wire.PeerMessage) -> None:
            assert other == 1 - node
            self.said.append((node, message))
            message = wire.decode_peer_message(wire.encode(message))
            self._queue.append(lambda: self.nodes[other].handlers()[type(message)](node, message))
            self.loop.call_soon(self._deliver)

        return to_node

    def _deliver(self) -> None:
        if self._queue:
            self._queue.popleft()()

    def during(self, client: Callable[[], None]) -> None:
        """Runs the loop, and a server of one connection, until a client on a thread is done."""
        problems: list[BaseException] = []

        def accept() -> None:
            with suppress(OSError):  # the client does not come, or hangs up
                sock, _ = self.server.accept()
                with sock:
                    self._serve(sock)

        def act() -> None:
            try:
                client()
            except BaseException as problem:
                problems.append(problem)
            self.loop.call_from_thread(self.loop.stop)

        server, thread = threading.Thread(target=accept, daemon=True), threading.Thread(target=act)
        server.start()
        thread.start()
        self.loop.run()
        thread.join()
        self.server.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        for node in self.nodes:
            node.close()
        server.join()
        if problems:
            raise problems[0]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.way), TIMEOUT_S)

    @property
    def way(self) -> int:
        """The port of the second node that leads to the server."""
        return self.nodes[1].port_for(0, self.port)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self.loop.close()
        self.server.close()


def echo(sock: socket.socket) -> None:
    while data := sock.recv(50_000):
        sock.sendall(data)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(echo)
    yield made
    made.close()


def test_what_goes_in_comes_out_in_order(nodes: Nodes) -> None:
    assert nodes.nodes[0].port_for(0, nodes.port) == nodes.port
    sent = random.Random(1).randbytes(3 << 20)

    def client() -> None:
        with nodes.connect() as sock:
            writer = threading.Thread(target=lambda: sock.sendall(sent))
            writer.start()
            received = b""
            while len(received) < len(sent):
                received += sock.recv(1 << 20)
            writer.join()
        assert received == sent

    nodes.during(client)


def test_whoever_does_not_read_keeps_no_more_than_a_window_waiting() -> None:
    go_on = threading.Event()

    def stubborn(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        go_on.wait(TIMEOUT_S)
        while sock.recv(1 << 20):
            pass

    nodes = Nodes(stubborn)
    nodes.server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    nodes.nodes[0].port_for(0, nodes.port)

    def client() -> None:
        with nodes.connect() as sock:
            sock.settimeout(1.0)
            with suppress(TimeoutError):
                for _ in range(1000):
                    sock.sendall(bytes(1 << 16))
            assert nodes.nodes[0].statistics()["waiting"]
        assert nodes.nodes[0].statistics()["waiting"] <= WINDOW
        go_on.set()

    nodes.during(client)
    said = [(node, message) for node, message in nodes.said if isinstance(message, wire.Relayed)]
    under_way = sum(len(message.data) for node, message in said if node == 1)
    assert 0 < under_way - sum(message.taken for node, message in said if node == 0) <= WINDOW
    nodes.close()


def ends(nodes: Nodes) -> None:
    """Connects, and is hung up on."""

    def client() -> None:
        with nodes.connect() as sock:
            assert sock.recv(10) == b""

    nodes.during(client)


def test_the_end_is_told_once_all_is_written() -> None:
    nodes = Nodes(lambda sock: sock.sendall(b"x" * 500_000))
    nodes.nodes[0].port_for(0, nodes.port)

    def client() -> None:
        with nodes.connect() as sock:
            assert sum(map(len, iter(lambda: sock.recv(1 << 20), b""))) == 500_000

    nodes.during(client)
    nodes.close()


def test_a_port_that_no_worker_serves_is_not_reached(nodes: Nodes) -> None:
    ends(nodes)
    assert not [message for node, message in nodes.said if node == 0 and not getattr(message, "is_over", False)]


def test_other_users_of_the_host_are_hung_up_on(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.nodes[0].port_for(0, nodes.port)
    monkeypatch.setattr(relayed_ports, "owner_of", lambda port, of: os.getuid() + 1)
    ends(nodes)
    assert not nodes.said


def test_there_is_a_most_of_connections(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_ports, "MOST", 0)
    ends(nodes)
    assert not nodes.said


def test_connections_to_a_lost_node_end(nodes: Nodes) -> None:
    nodes.nodes[0].port_for(0, nodes.port)

    def client() -> None:
        with nodes.connect() as sock:
            sock.sendall(b"x")
            assert sock.recv(10) == b"x"
            nodes.loop.call_from_thread(lambda: nodes.nodes[1].lost(0))
            assert sock.recv(10) == b""
        assert nodes.nodes[1].statistics() == {"relays": 0, "waiting": 0}

    nodes.during(client)


def test_a_peer_that_sends_more_than_it_may_is_at_fault(nodes: Nodes) -> None:
    one = nodes.nodes[0]
    one.port_for(0, nodes.port)
    one.handlers()[wire.RelayOpened](1, wire.RelayOpened(1, nodes.port))
    with pytest.raises(WireError, match="opened connection 1 before"):
        one.handlers()[wire.RelayOpened](1, wire.RelayOpened(1, nodes.port))
    with pytest.raises(WireError, match="more than was under way"):
        one.handlers()[wire.Relayed](1, wire.Relayed(1, True, taken=1))
    with pytest.raises(WireError):
        wire.decode_peer_message(wire.encode(wire.Relayed(1, True, bytes(wire.MAX_RELAYED + 1))))
    one.handlers()[wire.Relayed](1, wire.Relayed(7, True, b"of a connection that is over"))


def test_the_owner_of_a_connection_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as sock:
            assert owner_of(sock.getsockname()[1], port) == os.getuid()
        assert owner_of(1, port) == -1


class _Full:
    """A listener with a connection for which there is no descriptor."""

    def __init__(self, readable: socket.socket) -> None:
        self._readable, self.asked = readable, 0

    def fileno(self) -> int:
        return self._readable.fileno()

    def accept(self) -> None:
        self.asked += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_connection_without_a_descriptor_waits_and_the_loop_does_not_spin() -> None:
    loop = EventLoop()
    ports = RelayedPorts(loop, 1, Way(lambda node, message: None))
    here, there = socket.socketpair()
    with here, there:
        there.send(b"x")  # it stays readable
        full = _Full(here)
        ports._listen(cast(socket.socket, full), 0, 80)
        loop.call_later(0.25, loop.stop)
        loop.run()
        assert 1 <= full.asked <= 4
        loop.remove(here.fileno())
    loop.close()


def test_a_relay_for_which_there_is_no_descriptor_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, said = EventLoop(), []
    ports = RelayedPorts(loop, 0, Way(lambda node, message: said.append((node, message))))
    ports.port_for(0, 4321)

    def full() -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(relayed_ports.socket, "socket", full)
    ports.handlers()[wire.RelayOpened](1, wire.RelayOpened(1, 4321))
    monkeypatch.undo()
    assert said == [(1, wire.Relayed(1, False, is_over=True))]
    assert ports.statistics() == {"relays": 0, "waiting": 0}
    loop.close()
