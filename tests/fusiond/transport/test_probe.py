"""Measuring links, with a clock that the test moves."""

from __future__ import annotations

import pytest

from fusiond.collectives.cost import CostModel
from fusiond.transport.probe import SMALL, LinkProbe


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(probe: LinkProbe, clock: Clock, round_trip: dict[int, tuple[float, float]]) -> list[int]:
    """Echoes every probe after `latency + nbytes * rate` of its node; the nodes in the order in which they came."""
    order = []
    due = probe.begin(list(round_trip))
    while due is not None:
        node, serial, nbytes = due
        order.append(node)
        latency, rate = round_trip[node]
        clock.now += latency + nbytes * rate
        due = probe.echo(node, serial)
    return order


def test_the_worst_link_of_the_job_counts() -> None:
    clock = Clock()
    probe = LinkProbe(clock)
    order = run(probe, clock, {1: (200e-6, 1e-9), 2: (400e-6, 0.5e-9)})
    assert probe.cost is not None
    assert probe.cost.latency == pytest.approx(200e-6, rel=0.01)
    assert probe.cost.seconds_per_byte == pytest.approx(1e-9)
    assert probe.seconds_per_byte == pytest.approx({1: 1e-9, 2: 0.5e-9})
    assert order == sorted(order)  # one peer at a time
    assert set(order) == {1, 2}


def test_the_best_small_round_trip_and_the_best_large_one_beyond_a_burst_count() -> None:
    clock = Clock()
    probe = LinkProbe(clock)
    due = probe.begin([1])
    rounds: dict[int, int] = {}
    while due is not None:
        _, serial, nbytes = due
        rounds[nbytes] = rounds.get(nbytes, 0) + 1
        if nbytes == SMALL:
            clock.now += 200e-6 + (0.1 if rounds[nbytes] == 1 else 0)  # the first one pays for warming up
        else:
            clock.now += 200e-6 + (0 if rounds[nbytes] <= 2 else nbytes * 1e-8)  # the first two pass in a burst
        due = probe.echo(1, serial)
    assert probe.cost is not None
    assert probe.cost.latency == pytest.approx(100e-6)
    assert probe.cost.seconds_per_byte == pytest.approx(1e-8, rel=0.01)


def test_large_round_trips_that_are_late_do_not_make_a_link_slow() -> None:
    clock = Clock()
    probe = LinkProbe(clock)
    due = probe.begin([1])
    large = 0
    while due is not None:
        _, serial, nbytes = due
        large += nbytes != SMALL
        clock.now += 200e-6 + nbytes * 1e-9 + (5e-3 if large % 2 else 0)  # every other one finds the processor busy
        due = probe.echo(1, serial)
    assert probe.cost is not None
    assert probe.cost.seconds_per_byte == pytest.approx(1e-9, rel=0.01)


def test_an_echo_that_nobody_waits_for_is_ignored() -> None:
    clock = Clock()
    probe = LinkProbe(clock)
    first = probe.begin([1, 2])
    assert first is not None
    node, serial, _ = first
    assert probe.echo(2, serial) is None
    assert probe.echo(node, serial + 1) is None
    second = probe.echo(node, serial)
    assert second is not None
    assert second[1] != serial
    assert probe.echo(node, serial) is None  # it came twice
    while second is not None:
        second = probe.echo(second[0], second[1])
    assert probe.cost is not None
    assert probe.echo(2, 1) is None


def test_without_a_link_the_model_is_a_guess() -> None:
    probe = LinkProbe(Clock())
    assert probe.begin([]) is None
    assert probe.cost == CostModel()


def test_only_links_that_are_new_are_measured() -> None:
    clock = Clock()
    probe = LinkProbe(clock)
    links = {1: (200e-6, 1e-9), 2: (200e-6, 4e-9), 3: (200e-6, 2e-9)}
    run(probe, clock, {1: links[1], 2: links[2]})
    assert set(run(probe, clock, {1: links[1], 3: links[3]})) == {3}
    assert probe.seconds_per_byte == pytest.approx({1: 1e-9, 3: 2e-9})
    assert probe.cost is not None
    assert probe.cost.seconds_per_byte == pytest.approx(2e-9)  # of the worst that is left


def test_a_link_is_measured_anew_if_another_daemon_is_at_its_end() -> None:
    clock = Clock()
    probe = LinkProbe(clock)
    links = {1: (200e-6, 1e-9), 2: (200e-6, 4e-9)}
    for daemons, expected in (
        ({1: "a", 2: "b"}, {1, 2}),
        ({2: "b"}, set()),
        ({1: "a", 2: "b"}, set()),
        ({1: "c"}, {1}),
    ):
        for node, daemon in daemons.items():
            probe.admit(node, daemon)
        assert set(run(probe, clock, {node: links[node] for node in daemons})) == expected


def test_a_measurement_that_was_cut_short_begins_again_and_its_late_echo_is_ignored() -> None:
    clock = Clock()
    probe = LinkProbe(clock)
    first = probe.begin([1, 2])
    assert first is not None
    again = probe.begin([1])
    assert again is not None
    assert probe.echo(1, first[1]) is None
    clock.now += 1.0
    assert probe.echo(1, again[1]) is not None
