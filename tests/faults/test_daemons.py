"""Daemons that are killed, stand still, hang, or live in another time than their peers."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.netlab import preflight
from tests.faults import nemesis
from tests.faults.jobs import FAST, HANGABLE, Workers, fifo, wait
from tests.fusiond.processes import COMMAND, Daemons

pytestmark = pytest.mark.multiprocess
MakeDaemons = Callable[..., Daemons]
LARGE = 500_000  # elements: 4 MB
SOON_S = 30.0  # generous: what is measured is in docs/faults.md


def check_blame(errors: dict[int, str], node: int, job: Daemons) -> None:
    """Every rank of another node was told of this node; its own ranks may know no more than that it is gone."""
    assert set(errors) == set(range(job.topology.size))
    for rank, error in errors.items():
        if job.topology.node_of(rank) != node:
            assert error.startswith(f"node {node} (host host{node}) is lost: "), error


@pytest.mark.parametrize("node", [0, 1], ids=["the coordinator's", "another"])
def test_a_daemon_killed_amid_large_tensors_is_named_by_all_of_the_others(daemons: MakeDaemons, node: int) -> None:
    job = daemons(1, 1, 1).start()
    workers = Workers(job.join(), LARGE, range(3))
    workers.go_on()
    killed = nemesis.kill(job.processes[node])
    workers.join()
    assert max(workers.raised.values()) - killed < SOON_S
    check_blame(workers.errors, node, job)
    assert "the daemon of rank" in workers.errors[node]
    assert workers.wrong == []
    others = [each for each in range(3) if each != node]
    assert [job.end(other) for other in others] == [1, 1]
    assert [job.files(other) for other in others] == [set(), set()]


def test_a_daemon_that_stands_still_for_less_than_the_limit_is_waited_for(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, FUSION_HEARTBEAT_INTERVAL="50ms").start()  # the limit is 10 s
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on()
    with nemesis.stopped(job.processes[1]):
        job.wait_until(lambda status: status["mesh"]["peers"][0]["silent_seconds"] > 0.5)
    workers.go_on()
    assert (workers.errors, workers.wrong) == ({}, [])
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])


def test_a_daemon_that_comes_back_after_the_limit_is_not_listened_to_and_finds_itself_alone(
    daemons: MakeDaemons,
) -> None:
    job = daemons(1, 1, 1, **FAST).start()
    workers = Workers(job.join(), LARGE, range(3))
    workers.go_on()
    with nemesis.stopped(job.processes[2]):
        failures = [job.wait_until(lambda status: status["state"] == "failed", node)["failure"] for node in (0, 1)]
        steps = dict(workers.steps)
    workers.join()
    assert set(failures) == {workers.errors[0]} == {workers.errors[1]}
    check_blame({**workers.errors, 2: ""}, 2, job)
    assert "silent" in workers.errors[0]
    assert re.match(r"node [012] \(host host[012]\) (is lost|is cut off|was given up)", workers.errors[2])
    # What it had in hand came back with it, and completed nothing on either side.
    assert [workers.steps[rank] for rank in (0, 1)] == [steps[rank] for rank in (0, 1)]
    assert max(workers.steps.values()) - min(workers.steps.values()) <= 1
    assert workers.wrong == []


def test_a_daemon_whose_interpreter_hangs_is_noticed_and_writes_where_it_is(
    daemons: MakeDaemons, tmp_path: Path
) -> None:
    # ZeroMQ's own threads need no GIL: they answer for a process whose event loop has stopped for good.
    job = daemons(1, 1, **FAST, FUSION_TEST_HANG=str(fifo(tmp_path, 1)))
    job.commands[1] = HANGABLE
    job.start()
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on()
    nemesis.hang(tmp_path / "hang.1", 5.0)
    failure = job.wait_until(lambda status: status["state"] == "failed")["failure"]
    assert re.match(r"node 1 \(host host1\) is lost: .*silent", failure)
    wait(lambda: "Stack (most recent call first)" in job.log(1), "its stack")  # while it hangs: that needs no GIL
    workers.join()
    assert workers.errors[0] == failure
    assert workers.wrong == []
    wait(lambda: "the event loop stood still for" in job.log(1), "the watchdog's warning")


def test_a_daemon_whose_log_nobody_reads_goes_on(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, **FAST, HOROVOD_LOG_LEVEL="DEBUG")
    os.mkfifo(job.log_path(1))
    log = os.open(job.log_path(1), os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(log, bytes(4096))
    job.start()
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])
    with contextlib.suppress(BlockingIOError):
        while os.read(log, 4096)[0] == 0:
            pass
    os.close(log)


def test_a_peer_that_does_not_take_what_is_sent_to_it_is_named_as_slow(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, FUSION_HEARTBEAT_TIMEOUT="30s").start()
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on()
    with nemesis.stopped(job.processes[1]):
        wait(lambda: "node 1 (host host1) is slow: " in job.log(0), "a warning")
    workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])


def test_a_daemon_whose_interpreter_hangs_for_a_moment_is_waited_for(daemons: MakeDaemons, tmp_path: Path) -> None:
    job = daemons(1, 1, FUSION_HEARTBEAT_INTERVAL="50ms", FUSION_TEST_HANG=str(fifo(tmp_path, 1)))
    job.commands[1] = HANGABLE
    job.start()
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on()
    nemesis.hang(tmp_path / "hang.1", 0.6)
    job.wait_until(lambda status: status["mesh"]["peers"][0]["silent_seconds"] > 0.3)
    workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])


@pytest.mark.root
@pytest.mark.skipif(preflight() is not None, reason=preflight() or "")
def test_clocks_that_differ_by_days_disturb_nobody(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, **FAST)
    job.commands[1] = [*nemesis.in_another_time(500_000), *COMMAND]
    job.start()
    workers = Workers(job.join(), 1000, range(2))
    workers.go_on(20)
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])
    assert job.status()["mesh"]["peers"][0]["silent_seconds"] < 100


def test_workers_of_one_host_give_a_stopped_daemon_up_and_wait_for_one_that_goes_on(daemons: MakeDaemons) -> None:
    job = daemons(2, FUSION_HEARTBEAT_TIMEOUT="1s").start()  # workers have three times as much patience
    clients = job.join()
    workers = Workers(clients, LARGE, range(2))
    workers.go_on()
    with nemesis.stopped(job.processes[0]):
        wait(lambda: all(client.channel._silent > 1 for client in clients.values()), "both have asked")
    workers.go_on()
    assert (workers.errors, workers.wrong) == ({}, [])
    with nemesis.stopped(job.processes[0]):
        workers.join()
    for rank, error in workers.errors.items():
        pid = job.processes[0].pid
        assert re.match(
            f"the daemon of rank {rank}'s node .*, pid {pid}. has not answered for 3 s: it is stopped", error
        )
    assert workers.wrong == []
