"""Links over a distance: how many connections, which credit, which order of a ring. No I/O."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fusion_rt.core.cost import CostModel
from fusiond.transport.distance import MOST_CONNECTIONS, Costs, Pipe, connections, pairs, ring_order, time_of
from tests.for_each import for_each


def link(round_trip_ms: float, mbit: float) -> CostModel:
    return CostModel(round_trip_ms / 2e3, 8e-6 / mbit)


@for_each(
    ("round_trip_ms", "mbit", "wanted"),
    [
        (0.1, 10_000, 1),  # a local network has one, however fast it is
        (4.9, 10_000, 1),
        (40, 10, 1),  # 50 KB fill it
        (40, 50, 4),  # 250 KB
        (40, 1000, MOST_CONNECTIONS),
        (100, 100_000, MOST_CONNECTIONS),
    ],
)
def test_a_link_has_as_many_connections_as_fill_it(round_trip_ms: float, mbit: float, wanted: int) -> None:
    assert connections(link(round_trip_ms, mbit)) == wanted


@given(st.floats(1e-5, 1.0), st.floats(1e-12, 1e-3))
def test_a_link_never_has_fewer_than_one_connection_nor_more_than_the_most(latency: float, slope: float) -> None:
    assert 1 <= connections(CostModel(latency, slope)) <= MOST_CONNECTIONS


class Line:
    """A link that carries what is under way on it at up to `rate` B/s with a round trip of `trip` seconds."""

    def __init__(self, rate: float, trip: float, pipe: Pipe, count: int) -> None:
        self.rate, self.trip, self.pipe, self.count = rate, trip, pipe, count
        self.now = 0.0
        self.arrived = 0.0

    def turn(self, waiting: bool = True) -> None:
        """Passes a quarter of a round trip, in which as much arrives as rate and credit allow."""
        self.now += self.trip / 4
        self.arrived += min(self.rate, self.pipe.credit * self.count / self.trip) * self.trip / 4
        self.pipe.acknowledged(self.now, int(self.arrived), waiting)


def test_credit_grows_until_a_link_is_full_although_the_start_saw_a_tenth_of_its_rate() -> None:
    pipe = Pipe(link(100, 100), 8, 100_000, 16 << 20)
    line = Line(125e6, 0.1, pipe, 8)

    for _ in range(60):
        line.turn()

    assert pipe.rate == pytest.approx(125e6, rel=0.01)
    assert 8 * pipe.credit >= 125e6 * 0.1  # bandwidth x delay
    assert 8 * pipe.credit == pytest.approx(2 * 125e6 * (0.1 + 10e-3), rel=0.02)


def test_credit_stays_small_on_a_slow_link_so_that_urgent_payloads_need_not_wait() -> None:
    slow = link(40, 10)
    pipe = Pipe(slow, 1, slow.link_credit(16 << 20), 16 << 20)
    line = Line(1.25e6, 0.04, pipe, 1)

    for _ in range(60):
        line.turn()

    assert pipe.credit <= max(slow.link_credit(16 << 20), 2 * 1.25e6 * 0.05 * 1.01)


def test_a_rate_without_anything_that_waits_changes_no_credit() -> None:
    pipe = Pipe(link(40, 100), 8, 100_000, 16 << 20)
    line = Line(125e6, 0.04, pipe, 8)

    for _ in range(60):
        line.turn(waiting=False)

    assert (pipe.credit, pipe.rate) == (100_000, 0.0)


@given(st.lists(st.tuples(st.floats(1e-4, 10), st.integers(0, 1 << 40), st.booleans()), max_size=30))
def test_credit_keeps_its_bounds_whatever_arrives(steps: list[tuple[float, int, bool]]) -> None:
    pipe = Pipe(link(20, 100), 4, 50_000, 1 << 20)
    now, arrived = 0.0, 0
    for seconds, nbytes, waiting in steps:
        now, arrived = now + seconds, arrived + nbytes
        assert 50_000 <= pipe.acknowledged(now, arrived, waiting) <= 1 << 20


@for_each("count", range(0, 12))
def test_every_pair_is_measured_once_and_no_node_twice_at_a_time(count: int) -> None:
    nodes = [3 * n + 1 for n in range(count)]
    rounds = pairs(nodes)

    assert sorted(itertools.chain(*rounds)) == sorted(itertools.combinations(nodes, 2))
    for each in rounds:
        assert len(set(itertools.chain(*each))) == 2 * len(each)


def costs_of(nodes: int, values: list[tuple[float, float]]) -> Costs:
    found = itertools.combinations(range(nodes), 2)
    return {pair: CostModel(latency, slope) for pair, (latency, slope) in zip(found, values, strict=True)}


@st.composite
def networks(draw: st.DrawFn, least: int, most: int) -> tuple[int, Costs]:
    nodes = draw(st.integers(least, most))
    count = nodes * (nodes - 1) // 2
    value = st.tuples(st.sampled_from([1e-4, 5e-3, 0.02, 0.08]), st.sampled_from([1e-9, 1e-8, 8e-8]))
    return nodes, costs_of(nodes, draw(st.lists(value, min_size=count, max_size=count)))


@settings(max_examples=40, deadline=None)
@given(networks(4, 7))
def test_the_order_is_as_good_as_the_best_of_all_or_within_a_tenth_of_it(network: tuple[int, Costs]) -> None:
    nodes, costs = network
    found = ring_order(range(nodes), costs)
    slow, late = time_of(found, costs)
    best_slow, best_late = min(time_of((0, *rest), costs) for rest in itertools.permutations(range(1, nodes)))

    assert sorted(found) == list(range(nodes))
    assert found[0] == 0
    assert slow <= 1.1 * best_slow
    if slow == best_slow:
        assert late <= 1.1 * best_late + 1e-12


@settings(max_examples=15, deadline=None)
@given(networks(11, 14))
def test_above_ten_nodes_the_order_is_no_worse_than_the_given_one(network: tuple[int, Costs]) -> None:
    nodes, costs = network
    found = ring_order(range(nodes), costs)

    assert sorted(found) == list(range(nodes))
    assert time_of(found, costs)[0] <= time_of(range(nodes), costs)[0] * 1.1


def test_a_slow_pair_is_no_longer_side_by_side_and_equal_links_change_no_order() -> None:
    even = {pair: CostModel(0.02, 1e-8) for pair in itertools.combinations(range(4), 2)}
    slow = {**even, (0, 1): CostModel(0.04, 1e-7)}
    noisy = {pair: CostModel(0.02 * (1 + 0.01 * sum(pair)), 1e-8 * (1 + 0.01 * sum(pair))) for pair in even}

    assert ring_order(range(4), even) == ring_order(range(4), noisy) == (0, 1, 2, 3)
    order = ring_order(range(4), slow)
    assert abs(order.index(0) - order.index(1)) == 2
    assert ring_order((1, 2, 3), slow) == (1, 2, 3)
    assert ring_order((0, 1, 2, 3), {}) == (0, 1, 2, 3)


def test_of_thirty_hosts_at_three_sites_the_ring_leaves_each_once() -> None:
    """A turn is judged by the links that it changes: what is found is what the whole round costs."""
    pairs = itertools.combinations(range(30), 2)
    costs = {(a, b): CostModel(1e-4 + a * 1e-6 if a % 3 == b % 3 else 20e-3, 8e-9) for a, b in pairs}
    order = ring_order(range(30), costs)
    assert sum(a % 3 != b % 3 for a, b in itertools.pairwise([*order, order[0]])) == 3
