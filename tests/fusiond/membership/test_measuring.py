"""The measurement of links when a job starts: `Starting` of all nodes, in virtual time, and links between them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from fusion_rt import wire
from fusion_rt.core.cost import CostModel
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import DaemonConfig
from fusion_rt.settings import Settings
from fusiond.membership.epoch import Membership
from fusiond.membership.startup import Starting
from fusiond.transport.distance import shared_out
from fusiond.transport.probe import LinkProbe
from tests.for_each import for_each

Links = Callable[[int, int], CostModel]
HANDLING = 50e-6  # seconds for which a message occupies the loop that it has come to


class World:
    """Nodes that are up, and begin to measure. A payload goes out after those that its node sent before.

    Attributes:
        now: seconds.
        started: what each node was told, and the seconds a byte of its links.
        messages: that were sent.
    """

    def __init__(self, nodes: int, links: Links) -> None:
        self.now = 0.0
        self.started: dict[int, tuple[wire.Start, Mapping[int, float]]] = {}
        self.messages = 0
        self._links = links
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._free = [0.0] * nodes
        self._busy = [0.0] * nodes
        topology = Topology(tuple(f"host{node}" for node in range(nodes)), tuple((node,) for node in range(nodes)))
        self.nodes = [self._node(topology, node) for node in range(nodes)]
        for node in range(nodes):
            self.nodes[0].node_up(node, 0)

    def _node(self, topology: Topology, node: int) -> Starting:
        class Formation:
            def started(_, start: wire.Start, rates: Mapping[int, float]) -> None:
                self.started[node] = start, rates

            def start_failed(_, error: str) -> None:
                pytest.fail(error)

        loop = cast(Any, Loop(self))
        config = DaemonConfig("test", node, topology, attached=False)
        membership = Membership(topology, node)
        mesh = cast(Any, Mesh(self, node))
        parts = membership, loop, mesh, LinkProbe(loop.clock), Formation()
        return Starting(config, Settings(), *parts)

    def at(self, time: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._serial), callback))

    def send(self, node: int, other: int, message: wire.PeerMessage, payload: bytes | None = None) -> None:
        self.messages += 1
        link = self._links(min(node, other), max(node, other))
        leaves = self.now
        if payload is not None:
            leaves = self._free[node] = max(self.now, self._free[node]) + len(payload) * link.seconds_per_byte
        decoded = wire.decode_peer_message(wire.encode(message))

        def arrives() -> None:
            begins = max(self.now, self._busy[other])
            self._busy[other] = begins + HANDLING
            self.at(begins + HANDLING, handled)

        def handled() -> None:
            rest = () if payload is None else (memoryview(payload),)
            self.nodes[other].handlers()[type(decoded)](node, decoded, *rest)

        self.at(leaves + link.latency, arrives)

    def run(self) -> None:
        while self._events:
            self.now, _, callback = heapq.heappop(self._events)
            callback()


class Loop:
    """An event loop in the world's time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def clock(self) -> float:
        return self._world.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._world.at(self._world.now + seconds, callback)


class Mesh:
    """The mesh of one node."""

    def __init__(self, world: World, node: int) -> None:
        self._world, self._node = world, node

    def send(self, node: int, message: wire.PeerMessage) -> None:
        self._world.send(self._node, node, message)

    def send_payload(self, node: int, message: wire.PeerMessage, payload: bytes) -> None:
        self._world.send(self._node, node, message, payload)


def measured(nodes: int, links: Links) -> World:
    world = World(nodes, links)
    world.run()
    assert sorted(world.started) == [*range(nodes)]
    return world


def test_the_start_of_64_hosts_over_40_ms_takes_seconds_and_all_links_are_known() -> None:
    world = measured(64, lambda a, b: CostModel(20e-3 + 1e-4 * ((a * 31 + b * 17) % 50), 8e-9))
    assert world.now < 3.0  # seconds
    start, rates = world.started[0]
    assert len(start.paths) == 64 * 63 // 2
    assert len(rates) == 63
    for path in start.paths:
        a, b = path.nodes
        assert path.latency == pytest.approx(20e-3 + 1e-4 * ((a * 31 + b * 17) % 50), rel=0.05)
        assert path.seconds_per_byte == pytest.approx(8e-9, rel=0.1)
    assert all(told == start for told, _ in world.started.values())


@for_each("nodes", [2, 3, 5, 8, 10])
def test_up_to_ten_hosts_each_pair_is_measured_by_itself(nodes: int) -> None:
    def rate(a: int, b: int) -> float:
        return 1e-9 * (4 + (a * 5 + b * 3) % 7)

    start, _ = measured(nodes, lambda a, b: CostModel(10e-3, rate(a, b))).started[0]
    assert len(start.paths) == nodes * (nodes - 1) // 2
    for path in start.paths:
        assert path.seconds_per_byte == pytest.approx(rate(*path.nodes), rel=0.05)
    assert start.seconds_per_byte == pytest.approx(max(rate(*path.nodes) for path in start.paths), rel=0.05)


def test_links_of_a_slow_host_are_slow_also_where_they_were_not_measured() -> None:
    start, _ = measured(24, lambda a, b: CostModel(10e-3, 8e-8 if 17 in (a, b) else 8e-9)).started[0]
    for path in start.paths:
        assert path.seconds_per_byte == pytest.approx(8e-8 if 17 in path.nodes else 8e-9, rel=0.1)


@for_each("pair", [(3, 20), (0, 1)])
def test_a_single_slow_link_of_two_fast_hosts_is_found_and_the_start_is_not_late(pair: tuple[int, int]) -> None:
    """Three rounds of pairs measure 96 of the 2,016 links, so the slow one is most likely not among them."""
    world = measured(64, lambda a, b: CostModel(20e-3, 8e-8 if (a, b) == pair else 8e-9))
    start, _ = world.started[0]
    for path in start.paths:
        assert path.seconds_per_byte == pytest.approx(8e-8 if path.nodes == pair else 8e-9, rel=0.1)
    assert start.seconds_per_byte == pytest.approx(8e-8, rel=0.1)
    assert world.now < 4.0  # seconds


def test_several_slow_links_are_found_beside_a_slow_host() -> None:
    slow = {(2, 9), (2, 30), (5, 9), (14, 15)}

    def rate(a: int, b: int) -> float:
        return 1e-7 if 21 in (a, b) else 4e-8 if (a, b) in slow else 8e-9

    start, _ = measured(32, lambda a, b: CostModel(10e-3, rate(a, b))).started[0]
    for path in start.paths:
        assert path.seconds_per_byte == pytest.approx(rate(*path.nodes), rel=0.1), path.nodes


@for_each("count", [2, 3, 11, 12])
def test_each_pair_is_measured_by_one_of_its_nodes_and_no_node_is_the_next_of_two(count: int) -> None:
    shares = shared_out(range(count))
    assert sorted((min(a, b), max(a, b)) for a, others in shares.items() for b in others) == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    for turn in range(count // 2):
        asked = [others[turn] for others in shares.values() if turn < len(others)]
        assert len(set(asked)) == len(asked)


def test_two_sites_are_told_from_each_other() -> None:
    def link(a: int, b: int) -> CostModel:
        return CostModel(1e-4 if a % 2 == b % 2 else 15e-3, 8e-9)

    start, _ = measured(16, link).started[0]
    for path in start.paths:
        far = path.nodes[0] % 2 != path.nodes[1] % 2
        assert (path.latency > 14e-3) == far
        assert far or path.latency < 1e-3


def test_in_a_local_network_only_the_coordinator_measures_one_peer_at_a_time() -> None:
    world = measured(8, lambda a, b: CostModel(50e-6, 1e-9 * (1 + b)))
    start, rates = world.started[0]
    assert start.paths == ()
    assert rates == pytest.approx({node: 1e-9 * (1 + node) for node in range(1, 8)}, rel=0.1)
    assert world.started[1][1] == {}


def test_the_start_of_many_hosts_of_a_local_network_takes_no_longer_and_a_slow_host_is_noticed() -> None:
    def link(a: int, b: int) -> CostModel:
        return CostModel(50e-6, 8e-8 if 17 in (a, b) else 8e-9)

    few, many, odd = measured(12, link), measured(64, link), measured(65, link)
    assert many.now < 0.5 < 64 * 9 * 256 * 1024 * 8e-9  # which they take one after the other
    for world in (many, odd):
        start, rates = world.started[0]
        assert start.paths == ()
        assert start.seconds_per_byte == pytest.approx(8e-8, rel=0.1)
        assert rates[17] == pytest.approx(8e-8, rel=0.1)
        assert rates[3] == pytest.approx(8e-9, rel=0.1)
    start, _ = few.started[0]
    assert start.seconds_per_byte == pytest.approx(8e-9, rel=0.1)


def test_links_are_measured_once_however_often_ranks_come_back() -> None:
    world = measured(8, lambda a, b: CostModel(10e-3, 8e-9))
    before = world.messages
    for node in world.nodes:
        node._membership.started = False
    world.nodes[0]._measure()
    world.run()
    assert world.messages == before + 7, "only the start itself"


def test_a_formation_that_is_over_measures_nothing() -> None:
    world = World(8, lambda a, b: CostModel(10e-3, 8e-9))
    for node in world.nodes:
        node.end()
    world.run()
    assert (world.messages, world.started) == (0, {})
