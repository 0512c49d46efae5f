"""Two looks at a job, compared."""

from __future__ import annotations

from typing import Any

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusiond.live import figures
from fusiond.live.rates import compare
from tests.fusiond.live.looks import document, link, rank, told


def test_a_first_look_has_no_rates() -> None:
    rates = compare(None, document(1.0, {0: told((rank(0, 5), rank(1, 5)), (link(1, 10),), operations=3)}))
    assert (rates.seconds, rates.stragglers) == (0.0, ())
    assert [node.operations for node in rates.nodes] == [None, None]
    assert [(each.steps, each.steps_per_second, each.late_ms) for each in rates.ranks] == [(5, None, None)] * 2
    assert rates.links[0].nbytes is None


def test_counters_become_rates() -> None:
    before = document(10.0, {0: told((rank(0, 4, 8, 1.0),), (link(1, 100),), operations=3, bytes=30, cpu_seconds=1.0)})
    after = document(
        12.0,
        {0: told((rank(0, 9, 18, 1.5),), (link(1, 500),), operations=13, bytes=130, cpu_seconds=1.5, dense_bytes=200,
                 packed_bytes=20, staleness_count=2, staleness_mean=1.5, under_way=3)},
    )  # fmt: skip
    rates = compare(before, after)
    node, silent = rates.nodes
    assert (node.operations, node.nbytes, node.cpu, node.under_way) == (5.0, 50.0, 0.25, 3)
    assert (node.saved, node.staleness) == (0.9, 1.5)
    assert (silent.host, silent.state) == ("b", "silent")
    assert rates.ranks[0].steps_per_second == 2.5
    assert rates.ranks[0].late_ms == 50.0  # half a second over ten buckets
    assert (rates.links[0].source, rates.links[0].target, rates.links[0].nbytes) == (0, 1, 200.0)


def test_a_rank_that_is_later_than_the_others_straggles() -> None:
    before = document(0.0, {0: told((rank(0), rank(1)), ()), 1: told((rank(2),), ())})
    ranks = rank(0, 10, 10, 0.1), rank(1, 10, 10, 0.8)
    after = document(1.0, {0: told(ranks, ()), 1: told((rank(2, 10, 10, 0.4),), ())})
    rates = compare(before, after)  # a step takes 100 ms; they come 10, 80 and 40 ms late
    assert [each.straggles for each in rates.ranks] == [False, True, True]
    assert rates.stragglers == (1, 2)  # the latest first


def test_ranks_behind_a_slow_network_are_not_blamed_but_their_host_is() -> None:
    """Rank 2 gets its results late, and gives its next parts late; on its host's links data waits."""
    topology = Topology(("a", "b", "c"), ((0,), (1,), (2,)))

    def seen(now: float, steps: int, waiting: dict[tuple[int, int], int]) -> dict[str, Any]:
        nodes = {}
        for node in range(3):
            links = tuple(
                wire.LinkFigures(peer, 1000 * steps, 0, waiting.get((node, peer), 100), 0, False)
                for peer in range(3)
                if peer != node
            )
            nodes[node] = told((rank(node, steps, steps, 0.04 * steps if node == 2 else 0.0),), links)
        return figures.document("mine", topology, nodes, now)

    full = {(2, 0): 300_000, (2, 1): 200_000, (0, 2): 250_000, (1, 2): 260_000}
    rates = compare(seen(0.0, 0, full), seen(1.0, 10, full))
    assert (rates.slow_networks, rates.stragglers) == ((2,), ())
    # Without that, it is the rank that is late; one look at which data waits is nothing.
    for before, after in (({}, full), (full, {}), ({}, {})):
        rates = compare(seen(0.0, 0, before), seen(1.0, 10, after))
        assert (rates.slow_networks, rates.stragglers) == ((), (2,))


def test_ranks_that_are_all_late_by_the_same_keep_nobody_waiting() -> None:
    before = document(0.0, {0: told((rank(0), rank(1)), ())})
    after = document(1.0, {0: told((rank(0, 10, 10, 0.5), rank(1, 10, 10, 0.52)), ())})
    assert compare(before, after).stragglers == ()


def test_counters_that_began_anew_are_no_negative_rates() -> None:
    before = document(0.0, {0: told((rank(0, 50, 50, 1.0),), (link(1, 900),), operations=80)})
    again = document(1.0, {0: told((rank(0, 2, 2, 0.1),), (link(1, 10),), operations=4)})
    rates = compare(before, again)
    assert rates.nodes[0].operations is None
    assert rates.ranks[0].late_ms is None
    replaced = document(1.0, {0: told((rank(0, 99, 99, 9.0),), (link(1, 999),), operations=99, pid=101)})
    assert compare(before, replaced).ranks[0].steps_per_second is None
