"""Elastic jobs on hosts of their own, whose network fails (network namespaces)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from benchmarks.netlab import Netlab, preflight
from tests.faults.jobs import FAST
from tests.runner.elastic.jobs import WORKER, Job

UNAVAILABLE = preflight()
pytestmark = [
    pytest.mark.root,
    pytest.mark.multiprocess,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]


@pytest.fixture
def lab() -> Iterator[Netlab]:
    with Netlab(hosts=3) as lab:
        yield lab


def test_a_host_that_is_cut_off_from_the_beginning_is_left_out_until_it_is_reached(
    start: Callable[..., Job], fusionrun, lab: Netlab
) -> None:
    hosts = [host.name for host in lab.hosts]
    with lab.cut_off(0):  # and not from the launcher
        job = start(
            *("-np", "3", "--min-np", "1", "-H", ",".join(hosts), "--start-timeout", "4"),
            *("--rsh-agent", lab.agent, "--network-interface", "eth0"),
            **FAST,
        )
        number, ((_, second), (_, third)) = job.epoch_from(2, 2)
    _, begun = job.epoch_from(number + 1, 3)
    assert [pid for _, pid in begun][:2] == [second, third], "who has trained stays"
    assert job.stop() == 0, job.err
    changes = "\n".join(job.changes())
    assert f": 2 workers on hosts {hosts[1]}, {hosts[2]} (" in changes, changes
    assert "the job did not come up within 4 s" in changes, changes
    assert f"host {hosts[0]} was added" in changes, changes


def test_hosts_that_are_cut_off_are_left_behind_and_come_back(
    start: Callable[..., Job], fusionrun, lab: Netlab
) -> None:
    hosts = [host.name for host in lab.hosts]
    job = start(
        *("-np", "3", "--min-np", "1", "-H", ",".join(hosts), "--blacklist-cooldown-range", "0.5", "0.5"),
        *("--rsh-agent", lab.agent, "--network-interface", "eth0"),
        command=(sys.executable, WORKER),  # a child of its agent
        **FAST,
    )
    number, ((_, first), (_, second), (_, third)) = job.epoch_from(1, 3)
    with lab.cut_off(0):  # and not from the launcher
        number, ((step, pid), (_, other)) = job.epoch_from(number + 1, 2)
    assert (pid, other) == (second, third), "the larger part goes on"
    assert step > 0
    number, begun = job.epoch_from(number + 1, 3)
    assert [pid for _, pid in begun] == [second, third, first], "in the same processes"
    assert {later > step for later, _ in begun} == {True}
    agent = psutil.Process(third).parent()
    assert agent is not None
    with lab.cut_off(2):
        os.kill(agent.pid, signal.SIGSTOP)  # as good as cut off from the launcher, too
        number, ((again, pid), (_, other)) = job.epoch_from(number + 1, 2)
    assert (pid, other) == (second, first)
    _, (*_, (last, new)) = job.epoch_from(number + 1, 3)
    assert new not in (first, second, third)
    assert last > again > begun[0][0]
    assert job.stop() == 0, job.err
    changes = "\n".join(job.changes())
    gone = f"host {hosts[2]}: its agent does not answer, and other hosts cannot reach it"
    told = [f": 2 workers on hosts {hosts[1]}, {hosts[2]} (", f"(host {hosts[0]} was added)", gone]
    # For the last time: a busy machine may have taken that host for lost before, too.
    places = [*(changes.find(text) for text in told), changes.rfind(f"(host {hosts[2]} was added)")]
    assert -1 not in places, changes
    assert places == sorted(places), changes
