"""Tests of the model of a step, with times that can be added up by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fusion_rt import algorithms
from fusion_rt.choice.step_model import (
    BucketCost,
    Compute,
    HandOver,
    Network,
    Parcel,
    Wait,
    around_steps,
    exchange_cost,
    in_turn,
    walk,
)
from fusion_rt.core.cost import CostModel

NETWORK = Network(4, 2, CostModel(1e-3, 1e-6), 1 << 20)
ALLREDUCE = algorithms.parse("allreduce")
COST = BucketCost(work=1.0, link=2.0, after=0.5, sent=0.0)


def test_buckets_share_work_and_link_and_wait_for_latencies_by_themselves() -> None:
    """Works: 1, 2, 3. Links: 3, 5, 7. The last one is back half a second later."""
    assert in_turn([0.0, 0.0, 0.0], [COST] * 3) == 7.5
    assert in_turn([0.0, 10.0], [COST] * 2) == 13.5
    assert in_turn([], []) == 0.0


def test_an_all_reduce_moves_what_a_ring_does() -> None:
    found = exchange_cost(NETWORK, ALLREDUCE, Parcel(1e6, 4e5, "chunks", "ring"), 3)
    assert found.sent == pytest.approx(1.5 * 4e5)
    assert found.link == pytest.approx(1.5 * 0.4)
    assert found.after == pytest.approx(6e-3)


def test_owners_have_two_latencies_and_factors_two_sums() -> None:
    owners = exchange_cost(NETWORK, ALLREDUCE, Parcel(1e6, 4e5, "owners"), 3)
    assert (owners.link, owners.after) == (pytest.approx(0.6), pytest.approx(2e-3))
    factors = exchange_cost(NETWORK, ALLREDUCE, Parcel(1e8, 4e5, "factors", "ring"), 3)
    assert factors.link == pytest.approx(0.6)
    assert factors.after == pytest.approx(2 * 6e-3)


def test_a_home_hears_of_all_ranks_of_other_nodes_and_answers_them() -> None:
    """Three buckets, and so three homes: each has two ranks on each of three other nodes, both ways."""
    found = exchange_cost(NETWORK, algorithms.parse("bsp"), Parcel(1e6, 1e6), 3)
    assert found.link == pytest.approx(2 * 2 * 3 / 3)
    assert found.sent == pytest.approx(2 * 2 * 3 / 4 * 1e6)


def test_ranks_of_a_mixing_graph_send_to_their_neighbours() -> None:
    found = exchange_cost(NETWORK, algorithms.parse("dpsgd(topology='ring')"), Parcel(1e6, 1e6), 3)
    assert found.sent == 2 * 2 * 1e6


def test_gossip_of_a_package_says_to_how_many_a_rank_sends() -> None:
    @dataclass(frozen=True)
    class OfPairs(algorithms.Algorithm):
        name = "of_pairs"
        place = algorithms.Place.REPLICA

    @dataclass(frozen=True)
    class OfAll(OfPairs):
        def receivers(self, ranks: int) -> int:
            return ranks - 1

    assert exchange_cost(NETWORK, OfPairs(), Parcel(1e6, 1e6), 3).sent == 2 * 1 * 1e6
    assert exchange_cost(NETWORK, OfAll(), Parcel(1e6, 1e6), 3).sent == 2 * 7 * 1e6


def test_one_node_sends_nothing() -> None:
    alone = Network(1, 4, NETWORK.cost, 1 << 20)
    assert exchange_cost(alone, ALLREDUCE, Parcel(1e6, 1e6), 1) == (0.0, 0.0, 0.0, 0.0)


STEP = [Compute(1.0), HandOver(0), Compute(1.0), HandOver(1), Wait(0), Wait(1)]


def test_all_ranks_wait_for_the_last_one() -> None:
    slow = [Compute(5.0), HandOver(0), HandOver(1), Wait(0), Wait(1)]
    found = walk([[STEP], [slow]], [COST] * 2, together=True)
    assert found.ends == ((10.5,), (10.5,))
    assert found.waited == ((8.5,), (5.5,))
    apart = walk([[STEP], [slow]], [COST] * 2, together=False)
    assert apart.ends == ((6.5,), (10.5,))


def test_what_is_waited_for_in_the_next_step_overlaps_with_its_beginning() -> None:
    late = [[Compute(4.0), HandOver(0)], [Compute(3.0), Wait(0), HandOver(0)], [Compute(9.0), Wait(0)]]
    found = walk([late], [COST], together=True)
    assert found.ends == ((4.0, 7.5, 16.5),)
    assert found.waited == ((0.0, 0.5, 0.0),)


def test_a_recording_that_lacks_a_hand_over_comes_to_an_end() -> None:
    odd = [[*STEP, HandOver(0), Wait(0)]]
    found = walk([odd, [STEP]], [COST] * 2, together=True)
    assert found.ends[0][0] > found.ends[1][0] > 0


def test_nothing_more_is_handed_over_while_the_last_is_under_way_where_ranks_do_not_wait() -> None:
    eager = [[Compute(1.0), HandOver(0, if_answered=True)]] * 8
    found = walk([[*eager, [HandOver(1), Wait(1)]]], [COST] * 2, together=False)
    # Handed over at 1, back at 4.5; again at 5, back at 8.5; bucket 1 at 8 works until 9 and is carried until 11.
    assert found.ends[0][-1] == 11.5


@pytest.mark.parametrize(
    "algorithm", ["local_sgd(steps=2)", "diloco(steps=4, fragments=2, delay=1)", "decoupled(steps=2)"]
)
def test_fragments_are_exchanged_as_often_as_their_algorithm_says(algorithm: str) -> None:
    spec = algorithms.parse(algorithm)
    steps = around_steps([1.0] * 8, 4, spec)
    handed = [action.bucket for step in steps for action in step if isinstance(action, HandOver)]
    assert sorted(handed) == sorted([*range(4)] * (8 // spec.period))
