"""Whole elastic jobs on this machine, whose hosts are its names: with the real daemon, and workers without torch."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

import fusion_rt
from tests import forks
from tests.faults.jobs import FAST
from tests.runner.elastic.jobs import WORKER

pytestmark = pytest.mark.multiprocess

TRAIN = Path(__file__).with_name("train.py")
BOTH = "localhost:1,127.0.0.1:1"


def test_a_killed_worker_is_replaced_and_the_others_keep_the_state(start, fusionrun, until, runtime_dir: Path) -> None:
    hold = fusionrun.file("hold", "new workers")
    job = start("-np", "2", "--min-np", "1", "-H", BOTH)
    (_, first), (_, second) = job.epoch(1, 2)
    daemons = {process.pid for process in job.processes("fusiond")}
    os.kill(first, signal.SIGKILL)
    ((step, pid),) = job.epoch(2, 1)
    hold.unlink()
    assert pid == second, "the survivor is rank 0 now"
    assert step > 0
    (later, pid), (same, new) = job.epoch(3, 2)
    assert (pid, same) == (second, later)
    assert new not in (first, second)
    assert later > step
    until(lambda: len(job.processes("fusiond")) == 2, "the end of the daemon that was replaced")
    after = {process.pid for process in job.processes("fusiond")}
    assert (len(daemons), len(daemons & after)) == (2, 1), "the survivor's is the same"
    assert job.stop() == 0, job.err
    lost, came = job.changes()
    assert lost.startswith(
        "fusionrun: membership epoch 2: 1 worker on host 127.0.0.1 (rank 0 on host localhost was killed by SIGKILL"
    )
    assert came == "fusionrun: membership epoch 3: 2 workers on hosts 127.0.0.1, localhost (host localhost was added)"
    assert os.listdir(runtime_dir) == []


def test_a_killed_daemon_costs_no_worker(start, runtime_dir: Path) -> None:
    job = start("-np", "3", "--min-np", "3", "-H", "localhost:2,127.0.0.1:1")
    before = [pid for _, pid in job.epoch(1, 3)]
    job.processes("fusiond")[0].kill()
    after = job.epoch(2, 3)
    assert [pid for _, pid in after] == before
    assert len({step for step, _ in after}) == 1
    assert job.stop() == 0, job.err
    assert re.search(r"epoch 2: 3 workers .*the daemon of ranks? .* was killed by SIGKILL", job.changes()[0])
    assert os.listdir(runtime_dir) == []


def test_a_daemon_that_stands_still_costs_no_worker(start, fusionrun, runtime_dir: Path) -> None:
    """Its workers do not wait until it answers, and the others do not wait until these have given it up."""
    fusionrun.forks_daemons = False
    job = start("-np", "3", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1,127.0.0.2:1", **FAST)
    number, ranks = job.epoch_from(1, 3)
    before = [pid for _, pid in ranks]
    stopped = job.processes("fusiond")[0]
    stopped.suspend()
    number, ranks = job.epoch_from(number + 1, 2)
    assert {pid for _, pid in ranks} < set(before)
    step = ranks[0][0]
    _, after = job.epoch_from(number + 1, 3)
    assert {pid for _, pid in after} == set(before), "all in the same processes"
    assert {later > step for later, _ in after} == {True}
    assert not stopped.is_running()
    assert job.stop() == 0, job.err
    why = "was killed by SIGKILL: other hosts had declared it dead, and it did not answer its agent within 0.5 s"
    assert any(why in line for line in job.changes()), job.changes()
    assert os.listdir(runtime_dir) == []


def test_hosts_come_and_go_as_the_script_says(start, fusionrun, until, runtime_dir: Path) -> None:
    script = fusionrun.file("hosts.sh", "#!/bin/sh\ncat hosts\n", executable=True)
    hosts = fusionrun.file("hosts", "localhost:1\n")
    job = start("--min-np", "1", "--max-np", "2", "--host-discovery-script", script)
    ((_, first),) = job.epoch(1, 1)
    hosts.write_text("localhost:1\n127.0.0.1:4\n")
    (step, pid), (_, second) = job.epoch(2, 2)
    assert pid == first
    hosts.write_text("127.0.0.1:1\n")
    ((later, pid),) = job.epoch(3, 1)
    assert pid == second
    assert later > step > 0
    words = "[0]<stdout>:removed: host localhost has no place for this worker in membership epoch 3"
    until(lambda: words in job.out, "the word of the worker without a place")
    assert job.stop() == 0, job.err
    assert job.changes() == [
        "fusionrun: membership epoch 2: 2 workers on hosts localhost, 127.0.0.1 (host 127.0.0.1 was added)",
        "fusionrun: membership epoch 3: 1 worker on host 127.0.0.1 (host localhost was removed)",
    ]
    assert os.listdir(runtime_dir) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--min-np", "2", "--elastic-timeout", "1s", "--restart-limit", "0"),
            "fusionrun: the job needs 2 workers, and the slots there are (127.0.0.1:1) did not suffice for 1 s "
            "(--elastic-timeout); before that: rank 0 on host localhost was killed by SIGKILL",
        ),
        (
            ("--min-np", "1", "--reset-limit", "0"),
            "fusionrun: the job has been reset as often as --reset-limit allows (0); before that: rank 0 on host "
            "localhost was killed by SIGKILL",
        ),
    ],
)
def test_a_job_that_may_not_go_on_says_why(start, runtime_dir: Path, flags: tuple[str, ...], words: str) -> None:
    job = start("-np", "2", "-H", BOTH, "--blacklist-cooldown-range", "100", "100", *flags)
    os.kill(job.epoch(1, 2)[0][1], signal.SIGKILL)
    assert job.wait() == 1
    assert job.err[-1].startswith(words)
    assert os.listdir(runtime_dir) == []


def test_a_script_that_fails_on_import_ends_the_job_with_its_error(fusionrun, runtime_dir: Path) -> None:
    fusionrun.real_daemon = True
    done = fusionrun("-np", "2", "--min-np", "1", sys.executable, "-c", "import no_such_module")
    assert done.returncode == 1
    assert "fusionrun: membership epoch 2" not in done.stderr
    assert re.search(r"rank \d on host localhost failed first: ModuleNotFoundError: .*no_such_module", done.stderr)


def test_a_lost_host_and_a_worker_that_hangs_are_left_behind(start, runtime_dir: Path) -> None:
    job = start(
        *("-np", "3", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1,127.0.0.2:1"),
        *("--blacklist-cooldown-range", "100", "100", "--leave-timeout", "9s"),
        command=(sys.executable, WORKER),  # a child of its agent
        FUSION_HEARTBEAT_TIMEOUT="4s",
    )
    (_, first), (_, second), (_, third) = job.epoch(1, 3)
    os.kill(second, signal.SIGSTOP)
    agent = psutil.Process(third).parent()
    assert agent is not None
    agent.kill()
    ((_, pid),) = job.epoch(2, 1)
    assert pid == first
    (change,) = job.changes()
    assert "host 127.0.0.2: the connection to it was lost; its agent was killed by SIGKILL" in change
    assert "host 127.0.0.1: rank 1 was killed: it did not leave membership epoch 1 within 9 s" in change
    assert job.stop() == 0, job.err


def test_ctrl_c_in_a_later_epoch_leaves_nothing(start, until, is_alive, runtime_dir: Path) -> None:
    job = start("-np", "2", "--min-np", "2", "-H", BOTH)
    job.epoch(1, 2)
    job.processes("fusiond")[1].kill()
    job.epoch(2, 2)
    everything = [process.pid for process in psutil.Process(job.process.pid).children(recursive=True)]
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert not [pid for pid in everything if is_alive(pid)]
    assert os.listdir(runtime_dir) == []


def test_a_script_that_fails_at_every_worker_fails_the_job(start, fusionrun) -> None:
    result = fusionrun.python("import sys; sys.exit('no data')", "--min-np", "1", "-H", BOTH)
    assert result.returncode == 1
    assert re.search(r"fusionrun: rank [01] on host \S+ failed first: no data", result.stderr.splitlines()[-1])


def test_training_goes_on_without_rank_0_and_with_a_new_worker(start, fusionrun) -> None:
    hold = fusionrun.file("hold", "new workers")
    train = (*forks.interpreter(forks.WORKER), TRAIN)
    job = start("-np", "2", "--min-np", "1", "-H", BOTH, "--blacklist-cooldown-range", "7", "7", command=train)
    (_, first), (_, second) = job.epoch(1, 2)
    os.kill(first, signal.SIGKILL)
    ((step, pid),) = job.epoch(2, 1)
    hold.unlink()
    assert pid == second
    (later, pid), (same, _) = job.epoch(3, 2)
    assert (pid, same) == (second, later)
    assert later > step
    assert job.stop() == 0, job.err  # the workers have compared their parameters
    assert len([line for line in job.out if "done at step" in line]) == 2


@pytest.mark.parametrize("mirrors", ["update", pytest.param("commit", marks=pytest.mark.long)])
def test_an_algorithm_that_asks_for_more_ranks_than_are_left_waits_for_a_new_worker(start, mirrors: str) -> None:
    job = start(
        *("-np", "3", "--min-np", "1", "-H", "localhost:3", "--algorithm", "softsync(contributions=3)"),
        command=(*forks.interpreter(forks.WORKER), TRAIN),
        FUSION_MIRROR_SHARDS=mirrors,
    )
    pids = [pid for _, pid in job.epoch(1, 3)]
    os.kill(pids[2], signal.SIGKILL)
    number, ranks = job.epoch_from(2, 3)
    assert [pid for _, pid in ranks[:2]] == pids[:2], "they keep the state"
    assert number <= 3, "two see at most once that they are too few"
    assert job.stop() == 0, job.err
    assert len([line for line in job.out if "done at step" in line]) == 3


def test_a_job_whose_algorithm_asks_for_more_ranks_than_come_ends_and_says_so(start) -> None:
    job = start(
        *("-np", "2", "--min-np", "1", "-H", BOTH, "--algorithm", "partial(backup=1)", "--elastic-timeout", "2s"),
        *("--blacklist-cooldown-range", "100", "100", "--restart-limit", "0"),
        command=(*forks.interpreter(forks.WORKER), TRAIN),
    )
    os.kill(job.epoch(1, 2)[0][1], signal.SIGKILL)
    assert job.wait() == 1
    assert job.err[-1] == (
        "fusionrun: no more workers have come for 2 s (--elastic-timeout): partial would wait for no rank: there are 1 "
        "ranks, and 1 are backups; use fewer backups, or more ranks"
    )
    assert len(job.changes()) == 1


@pytest.mark.parametrize("algorithm", ["adpsgd", pytest.param("sgp", marks=pytest.mark.long)])
def test_a_job_of_neighbours_goes_on_when_one_rank_is_left_which_has_none(start, fusionrun, algorithm: str) -> None:
    hold = fusionrun.file("hold", "new workers")
    job = start(
        *("-np", "2", "--min-np", "1", "-H", "localhost:2", "--algorithm", algorithm),
        command=(*forks.interpreter(forks.WORKER), TRAIN),
    )
    (_, first), (_, second) = job.epoch(1, 2)
    os.kill(first, signal.SIGKILL)
    number, ((step, pid),) = job.epoch_from(2, 1)
    hold.unlink()
    assert pid == second
    _, ((later, pid), (same, _)) = job.epoch_from(number + 1, 2)
    assert (pid, same) == (second, later)
    assert later > step, "it has taken steps alone"
    assert job.stop() == 0, job.err
    assert len([line for line in job.out if "done at step" in line]) == 2


def test_a_job_grows_by_as_many_workers_as_its_algorithm_can_have_and_a_number_it_cannot_have_disturbs_nobody(
    start, fusionrun, until
) -> None:
    script = fusionrun.file("hosts.sh", "#!/bin/sh\ncat hosts\n", executable=True)
    hosts = fusionrun.file("hosts", "localhost:2\n")
    job = start(
        *("--min-np", "2", "--max-np", "4", "--host-discovery-script", script),
        *("--algorithm", "dpsgd(topology='hypercube')"),
        command=(*forks.interpreter(forks.WORKER), TRAIN),
    )
    before = [pid for _, pid in job.epoch(1, 2)]
    hosts.write_text("localhost:2\n127.0.0.1:1\n")
    until(
        lambda: any("rank 2 on host 127.0.0.1 failed" in line and "ranks, not 3" in line for line in job.err),
        "the sentence of the third worker",
    )
    hosts.write_text("localhost:2\n127.0.0.2:2\n")
    number, ranks = job.epoch_from(2, 4)
    assert number == 2, "nobody was interrupted for the third one"
    assert [pid for _, pid in ranks[:2]] == before, "they keep the state"
    assert ranks[0][0] > 0
    assert job.stop() == 0, job.err
    assert len([line for line in job.out if "done at step" in line]) == 4


def where_and_who() -> tuple[str, str]:
    """What `fusion_rt.run` calls: it loses a worker in the first epoch."""
    from fusion_rt.local.elastic import AgentConnection, Assignment

    rank, agent = os.environ["HOROVOD_RANK"], AgentConnection(os.environ)
    if agent.epoch == 1:
        if rank == "0":
            os._exit(3)
        answer = agent.rejoin("rank 0 is gone")
        assert isinstance(answer, Assignment)
        rank = answer.environment["HOROVOD_RANK"]
    return rank, str(agent.epoch)


def test_a_function_returns_results_of_those_who_are_there_at_last(runtime_dir: Path) -> None:
    results = fusion_rt.run(
        where_and_who, num_proc=3, min_num_proc=2, hosts="localhost:1,127.0.0.1:2", cooldown_range=(100, 100)
    )
    assert results == [("0", "2"), ("1", "2")]
