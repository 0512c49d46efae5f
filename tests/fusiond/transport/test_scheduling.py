"""Buckets of several operations in rings over slow links, in virtual time: what priorities are worth, and what not."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from fusion_rt import codecs, wire
from fusion_rt.core.dtypes import DTYPES
from fusiond.collectives.base import Reducer
from fusiond.collectives.ring import Ring
from fusiond.transport import delivery
from fusiond.transport.delivery import Sending, SendWindow
from fusiond.transport.flow_control import FlowPort

NODES = 4
RATE = 1e6  # bytes a second
LATENCY = 1e-4  # seconds
CHUNK = 2048  # bytes: 2 ms
CREDIT = 5 * CHUNK
ELEMENTS = {"large": 64 * 1024, "small": 2048}
FLOAT = DTYPES["float32"]


class Network:
    """Nodes in a ring, each with a link to the right that carries `RATE`, and what happens when.

    Args:
        credit: of each link.

    Attributes:
        now: seconds.
        done: when each operation was done on its last node.
    """

    def __init__(self, credit: int) -> None:
        self.now = 0.0
        self.done: dict[str, float] = {}
        self.results: dict[tuple[str, int], np.ndarray] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._rings: dict[tuple[str, int], tuple[Ring, FlowPort]] = {}
        self._over: set[tuple[str, int]] = set()
        self._sending = [Sending(credit) for _ in range(NODES)]
        for node, sending in enumerate(self._sending):
            sending.links.append(Line(self, node, sending))

    def at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), what))

    def run(self) -> None:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def add(self, name: str, start: float, urgency: int) -> None:
        """All nodes sum up an array; each begins at that time."""
        key = wire.OpKey(0, 1, name, 0)
        elements = ELEMENTS[name.split()[0]]
        for node in range(NODES):
            values = self.results[name, node] = np.full(elements, node + 1, np.float32)
            port = FlowPort(
                key, 0, range(NODES), node, CHUNK, 64 * CHUNK, Outlet(self, name, node), urgency=urgency
            )  # fmt: skip
            codec = codecs.parse("dense").open(codecs.Layout(FLOAT, elements, ()))
            ring = Ring(port, Reducer("sum", FLOAT), codec, [values], [values])
            self._rings[name, node] = ring, port
            self.at(start, ring.start)

    def send(self, node: int, urgency: int, chunk: wire.Chunk, payload: bytes | memoryview) -> None:
        self._sending[node].send(urgency, wire.encode(chunk), bytes(payload), False)

    def grant(self, name: str, node: int, to: int, count: int) -> None:
        self.at(self.now + LATENCY, lambda: self._credit(name, to, node, count))

    def _credit(self, name: str, node: int, of: int, count: int) -> None:
        port = self._rings[name, node][1]
        port.credit(of, count)
        self._note_if_over(name, port)

    def _note_if_over(self, name: str, port: FlowPort) -> None:
        if port.is_over and (name, port.node) not in self._over:
            self._over.add((name, port.node))
            self.done[name] = self.now

    def receive(self, node: int, frame: bytes, payload: bytes) -> None:
        """A chunk has come to a node; one of an operation that has not begun there would wait, and there is none."""
        message = wire.decode_peer_message(delivery.split_payload_head(frame)[1])
        assert isinstance(message, wire.Chunk)
        ring, port = self._rings[message.key.name, node]
        left = (node - 1) % NODES
        ring.receive(left, message, memoryview(payload))
        port.consumed(left, len(payload))
        self._note_if_over(message.key.name, port)


class Outlet:
    """The way of an operation's port on one node."""

    def __init__(self, network: Network, name: str, node: int) -> None:
        self._network, self._name, self._node = network, name, node

    def send_chunk(self, node: int, chunk: wire.Chunk, payload: bytes | memoryview, urgency: int) -> bool:
        assert node == (self._node + 1) % NODES
        self._network.send(self._node, urgency, chunk, payload)
        return False

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        assert isinstance(message, wire.Credit)
        self._network.grant(self._name, self._node, node, message.chunks)


class Line:
    """The link from a node to its right, one message after the other."""

    number = 1
    stands = True

    def __init__(self, network: Network, node: int, sending: Sending) -> None:
        self.out = SendWindow()
        self._network = network
        self._to = (node + 1) % NODES
        self._sending = sending
        self._free = 0.0

    def post(self, frame: bytes, payload: bytes | memoryview, borrowed: bool) -> None:
        self.out.add(frame, payload, borrowed)
        serial = self.out.serial
        network = self._network
        self._free = max(self._free, network.now) + len(payload) / RATE

        def arrives() -> None:
            network.receive(self._to, frame, bytes(payload))
            network.at(network.now + LATENCY, lambda: self._acknowledged(serial))

        network.at(self._free + LATENCY, arrives)

    def _acknowledged(self, serial: int) -> None:
        self.out.acknowledge(serial)
        self._sending.go_on()


def run(credit: int, operations: Mapping[str, tuple[float, int]]) -> Network:
    """Operations with the times at which they begin, and their urgencies."""
    network = Network(credit)
    for name, (start, urgency) in operations.items():
        network.add(name, start, urgency)
    network.run()
    assert network.done.keys() == operations.keys()
    for result in network.results.values():
        assert (result == 1 + 2 + 3 + 4).all()
    return network


def wire_seconds(name: str) -> float:
    """What a ring takes on its own, without latency."""
    return 2 * (NODES - 1) / NODES * 4 * ELEMENTS[name] / RATE


LATE = 0.2  # when the small bucket of the first layers is full, while the large one is under way


@pytest.mark.parametrize("larges", [1, 3])
def test_the_bucket_that_is_needed_first_is_there_long_before_the_large_ones(larges: int) -> None:
    backlog = {f"large {number}": (0.0, 9) for number in range(larges)}
    urgent = run(CREDIT, {**backlog, "small": (LATE, 1)})
    fifo = run(0, {**backlog, "small": (LATE, 1)})
    hops = 2 * (NODES - 1)
    alone = wire_seconds("small")
    assert urgent.done["small"] - LATE < alone + hops * (CREDIT + CHUNK) / RATE + 20 * LATENCY
    assert fifo.done["small"] - LATE > 2 * (urgent.done["small"] - LATE)


def test_priorities_cost_the_others_only_what_the_urgent_one_takes() -> None:
    """The links are busy all the time, whatever the order."""
    operations = {"large 0": (0.0, 9), "large 1": (0.01, 8), "large 2": (0.02, 7), "small": (LATE, 1)}
    urgent, fifo = run(CREDIT, operations), run(0, operations)
    total = 3 * wire_seconds("large") + wire_seconds("small")
    assert max(fifo.done.values()) == pytest.approx(total, rel=0.05)
    assert max(urgent.done.values()) == pytest.approx(total, rel=0.05)


def test_bounded_links_carry_as_much_as_unbounded_ones() -> None:
    one = {"large": (0.0, 1)}
    assert run(CREDIT, one).done["large"] < 1.02 * run(0, one).done["large"]
