"""Phases of a job's start: what is reported when, and the sum."""

from __future__ import annotations

import time

from fusion_rt.runner.launch.console import AGENTS, DAEMONS, LAUNCHER, OF_DAEMON, WORKERS, Phases, process_age


def test_a_phase_is_reached_when_every_host_has() -> None:
    now = 100.0
    phases = Phases(2, gone=0.25, clock=lambda: now)
    assert phases.reach(LAUNCHER) == ["0.25 s: the launcher is up"]
    now += 1
    assert phases.reach(AGENTS, "b") == []
    assert phases.reach(AGENTS, "b") == [], "the same host again is not the other"
    now += 0.5
    assert phases.reach(AGENTS, "a") == ["1.75 s: agents are up"]
    assert phases.reach(AGENTS, "a") == [], "said once"
    assert phases.seconds == 1.75


def test_the_first_collective_brings_the_sum_in_the_order_of_time() -> None:
    now = 0.0
    phases = Phases(1, clock=lambda: now)
    order = [LAUNCHER, AGENTS, WORKERS, DAEMONS, OF_DAEMON["joined"], OF_DAEMON["started"], OF_DAEMON["first_done"]]
    for phase in order:
        now += 0.5
        lines = phases.reach(phase, "a")
    assert lines == [
        "3.50 s: first collective is done",
        "3.50 s to the first collective = " + " + ".join(f"0.50 until {phase}" for phase in order),
    ]


def test_the_age_of_this_process_grows() -> None:
    first = process_age()
    begun = time.monotonic()
    while time.monotonic() - begun < 0.02:
        pass
    assert 0 < first < process_age() < first + 60
