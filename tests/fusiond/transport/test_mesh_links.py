"""Two meshes in this process, and a network between them that can be cut: what arrives, what is kept, who is lost."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fusion_rt import wire
from fusion_rt.core.cost import CostModel
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import DaemonConfig, Endpoint, PeerTable
from fusion_rt.settings import Settings
from fusiond.host.loop import EventLoop
from fusiond.transport import delivery, links
from fusiond.transport.flow_control import BORROW_FROM
from fusiond.transport.links import COPY_BELOW, Link
from fusiond.transport.mesh import Mesh
from fusiond.transport.peers import Peer
from fusiond.transport.sockets import CONTROL_FRAME, LANE_FROM, Socket, Sockets
from tests.faults.proxy import Proxy
from tests.fusiond.processes import TIMEOUT_S

TOPOLOGY = Topology(("host0", "host1"), ((0,), (1,)))
SETTINGS = Settings(heartbeat_interval=0.05, heartbeat_timeout=TIMEOUT_S, connections=2)
Got = tuple[wire.PeerMessage, bytes | None]


class Node:
    """A mesh with a loop of its own, which turns when it is told to."""

    def __init__(self, node: int, settings: Settings = SETTINGS) -> None:
        self.loop = EventLoop()
        self.got: list[Got] = []
        self.lost: list[str] = []
        self.up = False
        self.mesh = Mesh(self.loop, DaemonConfig("test", node, TOPOLOGY), settings, self)
        self.mesh.take_with(self._take)
        self.other = 1 - node

    def _take(self, node: int, message: wire.PeerMessage, payload: memoryview | None = None) -> None:
        assert node == self.other
        self.got.append((message, None if payload is None else bytes(payload)))

    def mesh_up(self) -> None:
        assert not self.up
        self.up = True

    def peer_lost(self, node: int, why: str) -> None:
        assert node == self.other
        self.lost.append(why)

    def say(self, serial: int) -> None:
        """A numbered control message."""
        self.mesh.send(self.other, wire.Echo(serial))

    def said(self) -> list[int]:
        """Those that have come here."""
        return [message.serial for message, _ in self.got if isinstance(message, wire.Echo)]

    def payloads(self) -> list[tuple[int, bytes]]:
        """The payloads that have come here, with their numbers, in order of these."""
        found = [(message.serial, payload) for message, payload in self.got if isinstance(message, wire.Probe)]
        return sorted((serial, payload) for serial, payload in found if payload is not None)

    @property
    def peer(self) -> Peer:
        return self.mesh._peers[self.other]

    def statistics(self) -> dict[str, int]:
        """About the peer."""
        peers = self.mesh.statistics()["peers"]
        assert isinstance(peers, list)
        found: dict[str, int] = peers[0]
        return found


class Two:
    """Both nodes, and proxies on all four ways between them."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.proxies: list[Proxy] = []
        endpoints = [node.mesh.endpoint(1) for node in nodes]
        for node in nodes:
            there = endpoints[node.other]
            ways = [Proxy(port, len(self.proxies)).__enter__() for port in (there.control_port, there.payload_port)]
            self.proxies += ways
            seen = Endpoint(there.node, 1, there.address, ways[0].port, ways[1].port, there.public_key)
            node.mesh.connect(PeerTable(tuple(seen if e is there else e for e in endpoints)))

    def until(self, condition: Callable[[], object], *turning: int) -> None:
        """Turns the loops of these nodes, or of both, until a condition holds."""
        deadline = time.monotonic() + TIMEOUT_S
        for node in self.nodes:
            node.loop.call_soon(lambda: None)
        while not condition():
            assert time.monotonic() < deadline, [node.mesh.statistics() for node in self.nodes]
            for index in turning or (0, 1):
                self.nodes[index].loop.call_later(0.005, lambda: None)  # does not wait for longer than that
                self.nodes[index].loop.turn()

    def turn_for(self, seconds: float) -> None:
        """Turns the loops of both nodes for a while."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def close(self) -> None:
        for node in self.nodes:
            node.mesh.close()
            node.loop.close()
        for proxy in self.proxies:
            proxy.__exit__(None, None, None)


@pytest.fixture
def two() -> Iterator[Two]:
    both = Two([Node(0), Node(1)])
    both.until(lambda: all(node.up for node in both.nodes))
    yield both
    both.close()


class Lanes:
    """Threads that seal and open payloads, of which any may be done first, once it is told to go on."""

    def __init__(self, node: Node, seed: int) -> None:
        self._node = node
        self._choose = random.Random(seed)
        self.waiting: list[tuple[Sequence[Callable[[], None]], Callable[[BaseException | None], None]]] = []
        self.jobs = 0
        node.mesh.work_on(self.run)

    def run(self, jobs: Sequence[Callable[[], None]], then: Callable[[BaseException | None], None]) -> None:
        self.waiting.append((jobs, then))
        self.jobs += 1
        self._node.loop.call_later(0.002, self.go_on)

    def go_on(self) -> None:
        jobs, then = self.waiting.pop(self._choose.randrange(len(self.waiting)))
        for job in jobs:
            job()
        then(None)


def content(serial: int, nbytes: int) -> bytes:
    return random.Random(serial).randbytes(nbytes)


@pytest.mark.parametrize(("seed", "lanes"), [(1, False), (2, False), (3, True), (4, True)])
def test_whatever_is_cut_every_message_arrives_once_and_control_messages_in_order(
    two: Two, seed: int, lanes: bool
) -> None:
    chooser = random.Random(seed)
    made = [Lanes(node, seed) for node in two.nodes] if lanes else []
    first, second = two.nodes
    count = 120
    sizes = [chooser.choice([0, 100, BORROW_FROM - 1, BORROW_FROM, COPY_BELOW]) for _ in range(count)]
    cuts = 0
    for serial, nbytes in enumerate(sizes):
        for node in two.nodes:
            node.say(serial)
            borrowed = node.mesh.send_payload(node.other, wire.Probe(serial), memoryview(content(serial, nbytes)))
            assert borrowed == (nbytes >= BORROW_FROM)
        if chooser.random() < 0.15:
            proxy = chooser.choice(two.proxies)
            two.until(lambda proxy=proxy: proxy.reset() > 0)  # type: ignore[misc]
            cuts += 1
        for node in two.nodes:
            node.loop.call_soon(lambda: None)
            node.loop.turn()
    two.until(lambda: all(len(node.said()) >= count and len(node.payloads()) >= count for node in two.nodes))
    two.until(lambda: all(node.statistics()["unacknowledged_messages"] == 0 for node in two.nodes))
    assert cuts >= 5
    for node in two.nodes:
        assert node.said() == list(range(count))
        assert node.payloads() == [(serial, content(serial, nbytes)) for serial, nbytes in enumerate(sizes)]
        assert node.lost == []
        assert node.statistics()["unacknowledged_bytes"] == 0
        assert node.mesh.statistics()["dropped"] == 0
        assert node.mesh.statistics()["damaged"] == 0
    assert first.statistics()["reconnections"] + second.statistics()["reconnections"] > 0
    assert all(each.jobs > count // 10 for each in made)


def test_messages_leave_and_arrive_in_order_whichever_lane_is_done_first(two: Two) -> None:
    first, second = two.nodes
    for node in two.nodes:
        Lanes(node, 1)
    sizes = [COPY_BELOW, 100, LANE_FROM, 0, LANE_FROM - 1, COPY_BELOW, LANE_FROM, 10] * 2
    del first.peer.sending.links[1:]  # a single connection has an order
    for serial, nbytes in enumerate(sizes):
        first.mesh.send_payload(1, wire.Probe(serial), content(serial, nbytes))
    two.until(lambda: len(second.payloads()) == len(sizes))
    arrived = [message.serial for message, _ in second.got if isinstance(message, wire.Probe)]
    assert arrived == list(range(len(sizes)))
    assert second.payloads() == [(serial, content(serial, nbytes)) for serial, nbytes in enumerate(sizes)]


def test_a_node_that_leaves_sends_what_its_lanes_have_not_sealed_yet(two: Two) -> None:
    first, second = two.nodes
    lanes = Lanes(first, 1)
    first.mesh.send_payload(1, wire.Probe(1), content(1, COPY_BELOW))
    first.mesh.send_payload(1, wire.Probe(2), content(2, 10))
    assert lanes.waiting
    first.mesh.close()
    two.until(lambda: len(second.payloads()) == 2, 1)
    assert second.payloads() == [(1, content(1, COPY_BELOW)), (2, content(2, 10))]


def test_long_control_messages_come_in_pieces_and_arrive_whole_and_in_order(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two.nodes
    sizes = [wire.MAX_RING_PIECE, CONTROL_FRAME, 1, CONTROL_FRAME - 1, wire.MAX_RING_PIECE]
    sent = [wire.RingPiece(serial, content(serial, nbytes)) for serial, nbytes in enumerate(sizes)]
    for message in sent[:3]:
        first.mesh.send(1, message)
    assert two.proxies[0].reset() > 0
    monkeypatch.setattr(links, "CONTROL_FRAME", 1000)
    for message in sent[3:]:
        first.mesh.send(1, message)
    two.until(lambda: len(second.got) >= len(sent) and first.statistics()["unacknowledged_messages"] == 0)
    assert [message for message, _ in second.got] == sent
    assert second.mesh.statistics()["dropped"] == 0


def test_an_attempt_of_which_nothing_is_heard_is_made_again(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq says nothing where its own thread finds no descriptor for a connection."""
    first, second = two.nodes
    made: list[Silent] = []
    outbox = Sockets.outbox

    class Silent:
        """A socket that does not connect."""

        def __init__(self, socket: Socket) -> None:
            self.close = socket.close
            self.disable_monitor = socket.disable_monitor

        def connect(self, address: str) -> None:
            made.append(self)

    def silent_at_first(*args: Any) -> tuple[Any, Socket]:
        socket, monitor = outbox(*args)
        return (socket if made else Silent(socket)), monitor

    monkeypatch.setattr(links, "_FIRST_SIGN", 0.05)
    monkeypatch.setattr(Sockets, "outbox", silent_at_first)
    two.until(lambda: first.statistics()["unacknowledged_messages"] == 0)
    assert two.proxies[0].reset() > 0
    two.until(lambda: made)
    first.say(1)
    two.until(lambda: 1 in second.said())


def test_a_payload_that_was_received_is_not_sent_again_with_what_its_memory_holds_by_then(two: Two) -> None:
    first, second = two.nodes
    memory = bytearray(content(1, 2 * BORROW_FROM))
    assert first.mesh.send_payload(1, wire.Probe(1), memoryview(memory))
    (link,) = [link for link in first.peer.links[1:] if len(link.out)]
    two.until(lambda: second.payloads(), 1)  # the sender does not turn: it hears no acknowledgement
    assert len(link.out) == 1
    memory[:] = bytes(len(memory))  # as when credit had come on another way
    assert two.proxies[1].reset() > 0
    first.mesh.send_payload(1, wire.Probe(2), b"later")
    first.mesh.send_payload(1, wire.Probe(3), b"last")
    two.until(lambda: len(second.payloads()) == 3 and link.stands)
    assert first.mesh.traffic() == (0, 0)  # what measures links is no traffic of the job
    assert second.payloads() == [(1, content(1, 2 * BORROW_FROM)), (2, b"later"), (3, b"last")]
    assert second.statistics()["repeated"] == 0


def test_a_connection_that_breaks_again_and_again_is_named_once(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    first = two.nodes[0]
    for number in range(1, 6):
        connections = two.proxies[0].connections
        assert two.proxies[0].reset() > 0
        two.until(lambda n=connections: two.proxies[0].connections > n and first.peer.control.stands)  # type: ignore[misc]
        assert first.statistics()["reconnections"] == number
    assert first.statistics()["flapping"] == 1
    told = [record.message for record in caplog.records if "again and again" in record.message]
    assert told == [
        "connections to node 1 (host host1) break again and again: 3 within a minute, the last one its control "
        "connection. The network between the hosts is unstable"
    ]


def test_a_peer_that_does_not_read_is_named_as_slow_and_given_up_when_too_much_waits_for_it(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = two.nodes
    two.until(lambda: first.statistics()["unacknowledged_messages"] == 0)
    first.peer.control.out._most_messages = 1000
    first.say(0)
    two.until(lambda: first.statistics()["slow"], 0)  # the other one does not turn
    assert next(record.message for record in caplog.records if "is slow" in record.message).startswith(
        "node 1 (host host1) is slow: 1 messages (0.0 MiB) on its control connection have been unacknowledged for 2."
    )
    for serial in range(1, 1000):
        first.say(serial)
    turns = first.loop.statistics()["turns"]
    two.until(lambda: first.loop.statistics()["turns"] > turns + 100, 0)
    assert first.lost == []
    first.say(1000)
    two.until(lambda: first.lost, 0)
    assert first.lost == [
        "it does not accept data: 1001 messages (0 MiB) on its control connection are not acknowledged"
    ]
    assert first.statistics()["slow"] == 1
    assert first.statistics()["unacknowledged_bytes"] == 0
    two.until(lambda: second.lost, 1)
    assert second.lost == [f"it has declared this node dead ({first.lost[0]})"]


def test_a_peer_that_was_given_up_is_fenced_and_cannot_come_back(two: Two) -> None:
    first, second = two.nodes
    second.say(1)
    two.until(lambda: first.said() == [1])
    second.say(2)
    second.mesh.send_payload(0, wire.Probe(1), b"x")
    first.mesh.lose(1, "for a test")
    assert first.lost == ["for a test"]
    two.until(lambda: first.statistics()["fenced"] >= 2, 0)
    assert first.said() == [1]
    assert first.payloads() == []
    two.until(lambda: second.lost, 1)
    assert second.lost == ["it has declared this node dead (for a test)"]
    first.say(3)
    assert first.mesh.send_payload(1, wire.Probe(2), bytes(BORROW_FROM)) is False
    assert first.statistics()["unacknowledged_messages"] == 0


def test_a_key_that_was_forbidden_is_refused_and_its_owner_told(two: Two) -> None:
    first, second = two.nodes
    first.mesh._reception.gate.forbid(first.mesh._peers[1].id)
    assert two.proxies[2].reset() > 0
    two.until(lambda: second.lost)
    assert second.lost[0].startswith("it refuses this node's key: it has declared this node dead")
    assert first.mesh.statistics()["refused"] == 1


def test_a_payload_connection_that_cannot_be_made_again_loses_the_peer() -> None:
    settings = Settings(heartbeat_interval=0.05, heartbeat_timeout=1.0)
    two = Two([Node(0, settings), Node(1, settings)])
    try:
        two.until(lambda: all(node.up for node in two.nodes))
        two.proxies[1].__exit__(None, None, None)  # nobody listens on the way to the payload port any more
        two.until(lambda: two.nodes[0].lost)
        why = two.nodes[0].lost[0]
        assert why == "its payload connection 1 broke and could not be made again within 1 s"
        del two.proxies[1]
    finally:
        two.close()


@pytest.mark.parametrize("what", ["one way", "both ways"])
def test_a_firewall_that_rejects_for_less_than_the_limit_costs_nothing_but_time(two: Two, what: str) -> None:
    first, second = two.nodes
    rejecting = two.proxies[:2] if what == "one way" else two.proxies
    for serial in range(60):
        first.say(serial)
        first.mesh.send_payload(1, wire.Probe(serial), content(serial, COPY_BELOW))
        second.say(serial)
        second.mesh.send_payload(0, wire.Probe(serial), content(serial, 5000))
        if serial == 30:  # amid what is under way
            for proxy in rejecting:
                proxy.reject()
            two.turn_for(1.3)
            assert [node.lost for node in two.nodes] == [[], []]
            assert first.peer.control.trouble == f"127.0.0.1:{two.proxies[0].port}: Connection refused"
            for proxy in rejecting:
                proxy.admit()
    two.until(lambda: all(len(node.payloads()) == len(node.said()) == 60 for node in two.nodes))
    for node, nbytes in ((second, COPY_BELOW), (first, 5000)):
        assert node.payloads() == [(serial, content(serial, nbytes)) for serial in range(60)]
        assert node.said() == [*range(60)]
        assert node.lost == []
        assert node.peer.control.trouble == ""


def test_a_firewall_that_rejects_for_longer_is_named_with_the_address_that_it_guards() -> None:
    settings = Settings(heartbeat_interval=0.05, heartbeat_timeout=1.0)
    two = Two([Node(0, settings), Node(1, settings)])
    try:
        two.until(lambda: all(node.up for node in two.nodes))
        for proxy in two.proxies:
            proxy.reject()
        two.until(lambda: two.nodes[0].lost)
        why = two.nodes[0].lost[0]
        refused = f"; connections to it fail: 127.0.0.1:{two.proxies[0].port}: Connection refused"
        assert re.fullmatch(r"its daemon has been silent for (0\.[5-9]|1\.\d) s" + re.escape(refused), why)
    finally:
        two.close()


def test_a_peer_that_leaves_is_lost_at_once_and_its_last_words_are_heard(two: Two) -> None:
    first, second = two.nodes
    second.say(7)
    second.mesh.send_payload(0, wire.Probe(1), b"goodbye")
    second.mesh.close()
    two.until(lambda: first.lost and first.payloads(), 0)
    assert first.lost == ["its connection was closed"]
    assert first.said() == [7]
    assert first.payloads() == [(1, b"goodbye")]


def test_a_gap_loses_the_peer_instead_of_a_part_of_its_data(two: Two) -> None:
    first, second = two.nodes
    link: Link = first.peer.control
    link.out.serial += 1  # a message that was never sent
    first.say(1)
    two.until(lambda: second.lost, 0, 1)
    assert "those between are missing" in second.lost[0]
    assert second.said() == []


def test_acknowledgements_come_without_a_message_to_ride_on(two: Two) -> None:
    first, second = two.nodes
    for serial in range(3 * delivery.ACK_MESSAGES):
        first.say(serial)
        for node in two.nodes:
            node.loop.call_soon(lambda: None)
            node.loop.turn()
    two.until(lambda: len(second.said()) == 3 * delivery.ACK_MESSAGES)
    two.until(lambda: len(first.peer.control.out) <= delivery.ACK_MESSAGES)


@pytest.fixture
def two_as_they_come() -> Iterator[Two]:
    """Nodes whose number of connections is left to the mesh."""
    settings = Settings(heartbeat_interval=0.05, heartbeat_timeout=TIMEOUT_S)
    both = Two([Node(0, settings), Node(1, settings)])
    both.until(lambda: all(node.up for node in both.nodes))
    yield both
    both.close()


def test_a_far_peer_gets_more_connections_on_which_everything_arrives_once_and_a_near_one_does_not(
    two_as_they_come: Two,
) -> None:
    two = two_as_they_come
    first, second = two.nodes
    first.mesh.stretch(1, CostModel(1e-4, 1e-10))
    assert first.statistics()["connections"] == 1

    first.mesh.stretch(1, CostModel(20e-3, 1e-9))  # 40 ms: the other node has not been told yet, and takes them
    first.mesh.stretch(1, CostModel(20e-3, 1e-9))  # again, as in another epoch of the job
    two.until(lambda: all(link.stands for link in first.peer.links))
    count = 60
    for serial in range(count):
        first.mesh.send_payload(1, wire.Probe(serial), content(serial, BORROW_FROM - 1))
    two.proxies[1].reset()
    two.until(lambda: len(second.payloads()) >= count)
    two.until(lambda: first.statistics()["unacknowledged_messages"] == 0)

    assert (first.statistics()["connections"], second.statistics()["connections"]) == (8, 1)
    assert second.payloads() == [(serial, content(serial, BORROW_FROM - 1)) for serial in range(count)]
    assert first.lost == second.lost == []


def test_a_peer_cannot_ask_for_more_connections_than_anybody_needs(two_as_they_come: Two) -> None:
    first, second = two_as_they_come.nodes
    first.mesh.send(1, wire.Reopen(9))
    two_as_they_come.until(lambda: second.lost)
    assert "it has no connection 9" in second.lost[0]
