"""The clock by which the launcher judges whether something is late."""

from __future__ import annotations

import time

import pytest

from fusion_rt.runner.launch.launcher import PatientClock


class Elsewhere:
    """The time of the world."""

    now = 100.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_time_passes_as_it_does_elsewhere_while_the_launcher_takes_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    world, clock = Elsewhere(monkeypatch), PatientClock()
    for number in range(1, 81):
        world.now += PatientClock.STEP_S / 2
        assert clock() == number * PatientClock.STEP_S / 2
        clock.notice()


def test_a_minute_in_one_callback_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that answered meanwhile are heard before the next: a limit of 15 s is 60 turns of the event loop away."""
    world, clock = Elsewhere(monkeypatch), PatientClock()
    world.now += 60
    assert clock() == PatientClock.STEP_S
    world.now += 60
    assert clock() == PatientClock.STEP_S, "also twice in the same callback"
    clock.notice()
    assert clock() == PatientClock.STEP_S
    world.now += 0.125
    assert clock() == PatientClock.STEP_S + 0.125
