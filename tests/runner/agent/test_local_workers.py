"""The workers of an agent, without processes."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fusion_rt.runner.agent import local_workers
from fusion_rt.runner.agent.local_workers import LocalWorkers, _Worker


def test_a_worker_that_is_ended_before_it_has_begun_can_connect_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message may lie in the socket already. It was in the next epoch then, in which it ended: as if it had done
    all its work."""
    killed = []
    monkeypatch.setattr(local_workers, "signal_tree", lambda pid, number: killed.append((pid, number)))
    nothing = cast(Any, None)
    workers = LocalWorkers(nothing, {}, nothing, nothing, nothing, nothing, nothing)
    workers.server = cast(Any, SimpleNamespace(knows=lambda slot: slot == 1))
    for slot in (0, 1):
        workers._workers[slot] = _Worker(cast(Any, SimpleNamespace(pid=100 + slot)), slot, 1, True)
    assert workers.connectable() == [0, 1]
    workers.end_unused(1)
    assert killed == [(100, signal.SIGKILL)]
    assert workers.connectable() == [1]
    assert workers.slots() == [0, 1], "its slot is not free yet"
