"""Threads that share a call."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from fusion_rt.kernels.team import ALONE, Team


def test_all_jobs_are_done_once() -> None:
    team = Team(3)
    done: list[int] = []
    team.run([partial(done.append, i) for i in range(50)])
    assert sorted(done) == list(range(50))
    team.run([])
    team.close()


def test_jobs_run_side_by_side() -> None:
    team, meeting = Team(2), threading.Barrier(2, timeout=10)
    team.run([lambda: meeting.wait() and None for _ in range(2)])  # would break the barrier one after the other
    team.close()


def test_alone_runs_them_in_order_in_the_calling_thread() -> None:
    ran: list[tuple[int, str]] = []
    ALONE.run([lambda i=i: ran.append((i, threading.current_thread().name)) for i in range(3)])  # type: ignore[misc]
    assert ran == [(i, threading.current_thread().name) for i in range(3)]
    assert ALONE.threads == 1


def test_a_call_ends_though_the_helpers_are_busy_with_the_call_that_made_it() -> None:
    team, done = Team(2), []

    def outer(i: int) -> None:
        team.run([partial(done.append, (i, j)) for j in range(3)])

    team.run([partial(outer, i) for i in range(4)])
    assert sorted(done) == [(i, j) for i in range(4) for j in range(3)]
    team.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_error_is_raised(threads: int) -> None:
    team = Team(threads)
    with pytest.raises(ZeroDivisionError):
        team.run([lambda: 1 // 0 and None for _ in range(4)])
    team.close()
