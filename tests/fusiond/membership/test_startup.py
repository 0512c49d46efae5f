"""Which node says why a job did not come up in time, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import DaemonConfig
from fusion_rt.settings import Settings
from fusiond.membership.epoch import Membership
from fusiond.membership.startup import Starting

TOPOLOGY = Topology(("a", "b"), ((0, 2), (1,)))
WHAT_TO_DO = (
    "; raise --start-timeout (HOROVOD_START_TIMEOUT) if a busy host or a slow link needs longer "
    "(docs/troubleshooting.md)"
)


class Clock:
    """Stands in for the loop: callbacks that are due, with their seconds."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        self.due.append((seconds, callback))
        return self

    def ring(self) -> float:
        """Runs what is due next; returns its seconds."""
        seconds, callback = self.due.pop(0)
        callback()
        return seconds


class Told(list[str]):
    """A formation: the sentences why it has not started."""

    def start_failed(self, error: str) -> None:
        self.append(error)


class Peers:
    """Stands in for the mesh."""

    def __init__(self, *missing: int) -> None:
        self._missing = list(missing)

    def missing(self) -> list[int]:
        return self._missing


@pytest.fixture
def told() -> Told:
    return Told()


def begin(node: int, told: Told, joined: tuple[int, ...], *unreached: int) -> tuple[Clock, Membership]:
    membership, clock = Membership(TOPOLOGY, node), Clock()
    membership.joined.update(joined)
    parts: list[Any] = [clock, Peers(*unreached), None, told]
    config = DaemonConfig("test", node, TOPOLOGY)
    Starting(config, cast(Any, Settings(start_timeout=30.0)), membership, *parts).begin()
    return clock, membership


def test_a_node_whose_own_worker_is_missing_says_so_at_once(told: Told) -> None:
    clock, _ = begin(1, told, ())
    assert clock.ring() == 30
    assert told == ["the job did not come up within 30 s: rank 1 (host b) did not connect to the daemon" + WHAT_TO_DO]


def test_the_coordinator_says_who_is_late_once_that_node_could(told: Told) -> None:
    clock, membership = begin(0, told, (0, 2))
    membership.came_up(0, 0)
    assert clock.ring() == 30
    assert told == [], "node 1 knows best which of its workers are late"
    assert clock.ring() == 1.5
    assert told == ["the job did not come up within 30 s: node 1 did not come up: rank 1 (host b)" + WHAT_TO_DO]


def test_a_node_that_only_waits_lets_the_coordinator_speak_first(told: Told) -> None:
    clock, _ = begin(1, told, (1,))
    assert clock.ring() == 30
    assert told == [], "the coordinator knows who is late"
    assert clock.ring() == 3
    assert told == [
        "the job did not come up within 30 s: node 0 did not say that every node is up: ranks 0,2 (host a)" + WHAT_TO_DO
    ]


def test_a_node_that_reaches_no_other_says_so_at_once(told: Told) -> None:
    clock, _ = begin(1, told, (1,), 0)
    clock.ring()
    assert told == [
        "the job did not come up within 30 s: the daemons of nodes 0 (host a) could not be reached from host b"
        + WHAT_TO_DO
    ]
