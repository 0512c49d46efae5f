"""Workers that come into a job: how often a slot may fail until it is abandoned."""

from __future__ import annotations

from fusion_rt.runner.decisions.newcomers import STEADY_S, Newcomers
from fusion_rt.runner.decisions.outcome import WorkerFailure

PLACE = ("a", 0)
FAILURE = WorkerFailure("a", 0, -9, "")


def fail_after(daemon_is_lost: bool) -> Newcomers:
    """Workers that fail five times in a row, each after a minute; the daemon of their host is lost shortly before."""
    now = [0.0]
    newcomers = Newcomers(lambda: now[0], 5)
    for _ in range(5):
        newcomers.begin(PLACE, 0)
        newcomers.take(PLACE)
        now[0] += STEADY_S
        if daemon_is_lost:
            newcomers.wait(PLACE, 0)
            newcomers.take(PLACE)
        now[0] += 1
        newcomers.fail(PLACE, FAILURE)
    return newcomers


def test_a_worker_that_was_without_its_daemon_has_trained_since_it_came() -> None:
    assert fail_after(daemon_is_lost=False).given_up == set()
    assert fail_after(daemon_is_lost=True).given_up == set()


def test_five_workers_in_a_row_that_fail_within_a_minute_close_their_slot() -> None:
    now = [0.0]
    newcomers = Newcomers(lambda: now[0], 5)
    for failures in range(1, 6):
        newcomers.begin(PLACE, 0)
        newcomers.take(PLACE)
        now[0] += STEADY_S - 1
        newcomers.fail(PLACE, FAILURE)
        assert (newcomers.given_up == {PLACE}) == (failures == 5)


def test_a_slot_with_a_higher_limit_waits_twice_as_long_each_time_and_a_minute_at_most() -> None:
    now = [0.0]
    newcomers = Newcomers(lambda: now[0], 1000)
    waits = []
    for _ in range(999):
        newcomers.begin(PLACE, 0)
        told = newcomers.fail(PLACE, FAILURE)
        waits.append(told.rpartition(" in ")[2])
    assert waits[:10] == ["", "1 s", "2 s", "4 s", "8 s", "16 s", "32 s", "60 s", "60 s", "60 s"]
    assert newcomers.closed == {PLACE}
    assert newcomers.given_up == set()
    newcomers.begin(PLACE, 0)
    assert "1000 workers in a row failed there" in newcomers.fail(PLACE, FAILURE)
    assert newcomers.given_up == {PLACE}
