"""The cost model: which all-reduce is the cheapest, and how links are measured."""

from __future__ import annotations

import pytest

from fusiond.collectives.cost import CostModel, measured, worst
from tests.for_each import for_each

LINK = CostModel(latency=100e-6, seconds_per_byte=1e-9)


def test_a_ring_moves_two_thirds_twice_among_three() -> None:
    assert LINK.ring(3_000_000, 3) == pytest.approx(4 * 100e-6 + 4_000_000 * 1e-9)


@for_each(("nodes", "rounds"), [(2, 1), (3, 3), (4, 2), (5, 4), (7, 4), (8, 3)])
def test_doubling_takes_log_rounds_and_two_more_to_fold(nodes: int, rounds: int) -> None:
    assert LINK.doubling(1000, nodes) == pytest.approx(rounds * (100e-6 + 1000e-9))


@for_each(("nodes", "rounds"), [(2, 2), (3, 4), (4, 4), (5, 6), (8, 6), (9, 8), (256, 16)])
def test_halving_takes_log_rounds_twice_and_the_bytes_of_a_ring(nodes: int, rounds: int) -> None:
    assert LINK.halving(0, nodes) == pytest.approx(rounds * 100e-6)
    moved = LINK.ring(10**6, nodes) - LINK.ring(0, nodes)
    assert LINK.halving(10**6, nodes) - LINK.halving(0, nodes) == pytest.approx(moved)


@for_each("nodes", [2, 3, 4, 5, 8, 256])
def test_small_arrays_double_middle_ones_halve_and_large_ones_go_round(nodes: int) -> None:
    chunk = 1 << 30
    # With two nodes doubling moves as many bytes, in one message less.
    assert LINK.route(4, nodes, chunk) == "doubling"
    assert LINK.route(10**9, nodes, chunk) == ("doubling" if nodes == 2 else "ring")
    found = [LINK.route(2**power, nodes, chunk) for power in range(2, 31)]
    ways = ["doubling", "halving", "ring"] if nodes > 3 else ["doubling", "ring"][: nodes - 1]
    assert list(dict.fromkeys(found)) == ways, "each has one range of sizes"


def test_an_array_that_is_more_than_a_chunk_never_doubles() -> None:
    assert LINK.route(4096, 2, 4096) == "doubling"
    assert LINK.route(4097, 2, 4096) == "ring"
    assert LINK.route(4097, 64, 4096) == "halving"


def test_a_link_is_measured_by_the_difference_of_two_round_trips() -> None:
    link = measured(small_round_trip=200e-6, large_round_trip=700e-6, extra_nbytes=250_000)
    assert link.latency == pytest.approx(100e-6)
    assert link.seconds_per_byte == pytest.approx(2e-9)


def test_a_large_message_that_happened_to_be_faster_costs_next_to_nothing_but_not_less() -> None:
    assert 0 < measured(200e-6, 100e-6, 1000).seconds_per_byte <= 1e-9


def test_the_worst_link_counts() -> None:
    assert worst([CostModel(1e-3, 1e-9), CostModel(1e-4, 5e-9)]) == CostModel(1e-3, 5e-9)


SIZES = [4 * 2**power // 3 for power in range(24)]


def ways(link: CostModel, chunk: int) -> list[object]:
    """Returns which way arrays of every size go between 2 to 8 nodes."""
    whole = link.chunk_bytes(chunk)
    return [
        way
        for nodes in range(2, 9)
        for nbytes in SIZES
        for way in (link.route(nbytes, nodes, whole), link.prefers_gathering(nbytes, nodes))
    ]


def test_a_link_that_is_measured_a_little_faster_goes_the_same_ways() -> None:
    """Or sums of three nodes would differ in their last bits from job to job."""
    chunk = 1 << 20
    links = [CostModel(slower * 130e-6, dearer * 3e-8) for slower in (0.8, 1, 1.2) for dearer in (0.8, 1, 1.1)]
    assert len({tuple(ways(link, chunk)) for link in links}) > 1
    assert len({tuple(ways(link.rounded(), chunk)) for link in links}) == 1


def test_figures_are_rounded_to_powers_of_two() -> None:
    rounded = CostModel(100e-6, 1 / 25e6).rounded()
    assert rounded == CostModel(128e-6, 1 / (32 * 1024 * 1024))
    assert CostModel(0.0, 1e-9).rounded().latency == 1e-6


@pytest.mark.parametrize("latency", [50e-6, 20e-3])
def test_what_may_be_under_way_covers_a_round_trip(latency: float) -> None:
    link = CostModel(latency, 1 / 125e6)
    assert link.link_credit(1 << 30) >= 125e6 * (10e-3 + 2 * latency)
    assert link.acknowledged_bytes() <= link.link_credit(1 << 30) / 3
    assert link.link_credit(1000) == 1000


def test_slow_links_have_room_for_three_chunks_that_are_acknowledged_one_by_one() -> None:
    """Or their senders wait for acknowledgements that wait behind what is sent the other way."""
    link = CostModel(100e-6, 1 / 12.5e6)
    chunk = link.chunk_bytes(1 << 30)
    assert link.link_credit(1 << 30) >= 3 * chunk
    assert link.acknowledged_bytes() <= chunk
