"""Decisions about a job whose hosts and workers stay, on a clock of the test's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.runner.decisions.fixed import QUOTED_S, SETTLE_S, Fixed
from fusion_rt.runner.decisions.host_list import parse_hosts
from fusion_rt.runner.decisions.outcome import DaemonFailure, Failure, HostFailure, WorkerFailure, tell
from fusion_rt.runner.decisions.places import fill
from tests.for_each import for_each

START_S = 30.0
ECHO = "HorovodInternalError: rank 1 is gone"
QUOTE = "HorovodInternalError: rank 1 failed: Traceback (most recent call last):\n  | ValueError: boom"


class World:
    """Effects that are only recorded, and what happens to the hosts a:1, b:2."""

    def __init__(self, tolerates: bool = False) -> None:
        self.now = 0.0
        self.calls: list[tuple[Any, ...]] = []
        self.ended: list[Failure] | None = None
        hosts = parse_hosts("a:1,b:2")
        self.job = Fixed(fill(hosts, 3), self, lambda: self.now, START_S, tolerates)  # type: ignore[arg-type]
        self.job.found(hosts)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))

    def end(self, failures: Sequence[Failure]) -> None:
        assert self.ended is None
        self.ended = list(failures)

    def up(self) -> World:
        for node, host in enumerate("ab"):
            self.job.ready(host)
            self.job.daemon_up(host, 1, Endpoint(node, 1, "127.0.0.1", 1, 2, "k" * 40))
        return self

    def fail(self, host: str, slot: int = 0, status: int = 1, stderr: str = "ValueError: boom") -> None:
        self.job.ended(host, slot, WorkerFailure(host, 0, status, stderr))

    def settles_in(self) -> float:
        """Seconds until the job ends by itself."""
        assert self.ended is None
        start, self.now = self.now, self.job.due
        self.job.tick()
        assert self.ended is not None
        return self.now - start


def test_workers_of_all_hosts_are_started_before_any_daemon_listens() -> None:
    world = World()
    assert [call[0] for call in world.calls] == ["start", "connect", "connect"]
    world.up()
    assert [call[0] for call in world.calls[3:]] == ["begin"]
    assert [endpoint.node for endpoint in world.calls[-1][3]] == [0, 1]
    assert world.job.due == math.inf, "nothing more is waited for"


def test_a_job_whose_workers_have_all_ended_well_is_over() -> None:
    world = World().up()
    world.job.ended("b", 1, None)
    world.job.ended("a", 0, None)
    assert world.ended is None
    world.job.ended("b", 0, None)
    assert world.ended == []


@for_each(("stderr", "seconds"), [("ValueError: boom", SETTLE_S), (ECHO, SETTLE_S), (QUOTE, QUOTED_S)])
def test_after_a_failure_the_others_have_time_to_tell_theirs(stderr: str, seconds: float) -> None:
    world = World().up()
    world.fail("b", stderr=stderr)
    assert world.settles_in() == seconds


def test_when_the_cause_of_a_quote_comes_the_time_is_short_again() -> None:
    world = World().up()
    world.fail("b", stderr=QUOTE)
    world.now += 1
    world.fail("a", status=-9)
    assert world.settles_in() == SETTLE_S
    assert world.ended is not None
    assert tell(world.ended)[-1].endswith("on host a was killed by SIGKILL")


def test_when_all_have_ended_nothing_is_waited_for() -> None:
    world = World().up()
    world.fail("b")
    world.fail("a")
    world.job.ended("b", 1, None)
    world.now += SETTLE_S
    world.job.tick()
    assert world.ended is not None
    world = World().up()
    world.job.ended("b", 1, None)
    world.fail("b")
    world.fail("a")
    assert world.ended is not None


def test_what_is_not_up_in_time_is_named() -> None:
    world = World()
    world.job.ready("a")
    assert world.settles_in() == START_S
    assert world.ended == [
        HostFailure("a", ("its daemon did not listen within 30 s (--start-timeout)",)),
        HostFailure("b", ("it did not answer within 30 s (--start-timeout)",)),
    ]


def test_a_host_that_refuses_the_job_is_told_once() -> None:
    world = World()
    world.job.refused(HostFailure("a", ("no disk",)))
    world.job.lost(HostFailure("a", ("its command ended",)))
    world.job.lost(HostFailure("b", ("no route",)))
    assert world.ended == [HostFailure("a", ("no disk",)), HostFailure("b", ("no route",))]


def test_a_daemon_that_ends_ends_the_job() -> None:
    world = World().up()
    world.job.daemon_down("b", 1, DaemonFailure("b", -9, "", "ranks 1-2 (host b)"))
    assert world.settles_in() == SETTLE_S


def test_a_job_that_tolerates_losses_ends_well_without_those_it_lost() -> None:
    world = World(tolerates=True).up()
    world.fail("a", status=-9)
    world.job.lost(HostFailure("b", ("it burns",)))
    assert [call[1] for call in world.calls if call[0] == "say"] == [
        "fusionrun: rank 0 on host a was killed by SIGKILL; the job goes on without it"
    ]
    assert world.ended is not None, "nobody is left"
    world = World(tolerates=True).up()
    world.fail("a", status=-9)
    world.job.ended("b", 0, None)
    world.job.ended("b", 1, None)
    assert world.ended == []


def test_a_job_that_somebody_has_ended_decides_nothing() -> None:
    world = World().up()
    world.job.close()
    world.fail("a")
    world.now = math.inf
    world.job.tick()
    assert world.ended is None
