"""Whole jobs with the real daemon and real workers: it goes well, and it fails as people have to see it."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest

from fusion_rt.runner.launch.console import AGENTS, DAEMONS, LAUNCHER, OF_DAEMON, WORKERS
from tests import forks
from tests.runner.conftest import TIMEOUT_S

pytestmark = pytest.mark.multiprocess

JOINED = """
import os, signal, sys, time
import numpy as np
from fusion_rt.client import Client
from fusion_rt.wire import Signature
client = Client(os.environ["FUSION_SOCKET"], os.environ["FUSION_JOB_ID"], int(os.environ["HOROVOD_RANK"]), 120.0)
def add(name, *numbers):
    signature = Signature("allreduce", "float32", (len(numbers),))
    operation = client.submit(name, signature, inline=np.array(numbers, np.float32).tobytes())
    return np.frombuffer(client.wait(operation).inline, np.float32).tolist()
"""  # a worker that has joined, without torch, whose import takes seconds
ADD = f"""{JOINED}
print("sum", add("sum", client.rank + 1, client.rank + 1), flush=True)
while sys.argv[1] == "train":
    add("step", 1)
    if str(client.rank) in sys.argv[2:]:
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "once":
    client.close()
else:
    add("loss", *range(2 + client.rank))
"""
TWO_NODES = ("-np", "3", "-H", "127.0.0.1:2,localhost:1")
SUMS = [f"[{rank}]<stdout>:sum [6.0, 6.0]" for rank in range(3)]


def python() -> list[str]:
    """An interpreter for workers without torch."""
    return forks.interpreter(forks.DAEMON)


@pytest.fixture(autouse=True)
def with_real_daemon(fusionrun) -> None:
    fusionrun.real_daemon = True


def check_phases(stderr: str) -> dict[str, float]:
    """Every phase up to the first collective was reported, and what they took adds up."""
    reached = {what: float(when) for when, what in re.findall(r"^fusionrun: ([\d.]+) s: (.*)$", stderr, re.MULTILINE)}
    phases = {LAUNCHER, AGENTS, WORKERS, DAEMONS, *OF_DAEMON.values()}
    assert phases <= reached.keys(), stderr
    sums = re.findall(r"^fusionrun: ([\d.]+) s to the first collective = (.*)$", stderr, re.MULTILINE)
    assert len(sums) == 1
    total, parts = sums[0]
    took = {what: float(seconds) for seconds, what in (part.split(" until ") for part in parts.split(" + "))}
    assert took.keys() == phases
    assert float(total) == reached[OF_DAEMON["first_done"]] == pytest.approx(sum(took.values()), abs=0.05)
    assert reached[LAUNCHER] > 0
    return took


def test_a_killed_worker_is_the_last_line_and_every_survivor_names_it(fusionrun) -> None:
    result = fusionrun(*TWO_NODES, *python(), "-c", ADD, "train", "1", TEST_SETTLE="60")
    assert result.returncode == 1
    assert "Process 1 exit with status code 137.\n" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("fusionrun: rank 1 on host 127.0.0.1 was killed by SIGKILL")
    for rank in (0, 2):
        assert re.search(
            rf"^\[{rank}\]<stderr>:.*HorovodInternalError: .*rank 1 \(host 127", result.stderr, re.MULTILINE
        )
    assert os.listdir(fusionrun.runtime_dir) == []


def start_training(fusionrun):
    process = fusionrun.start(*TWO_NODES, *python(), "-c", ADD, "train")
    assert sorted(process.stdout.readline().rstrip() for _ in range(3)) == SUMS
    return process, psutil.Process(process.pid).children(recursive=True)


def test_a_killed_daemon_is_the_last_line(fusionrun) -> None:
    process, everything = start_training(fusionrun)
    daemon = next(p for p in everything if "fusiond" in p.cmdline())
    daemon.kill()
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert re.search(r"fusionrun: the daemon of ranks? [-0-9]+ \(host .*\) was killed by SIGKILL", err.splitlines()[-1])
    assert not psutil.wait_procs(everything, timeout=TIMEOUT_S)[1]
    assert os.listdir(fusionrun.runtime_dir) == []


def test_ctrl_c_in_the_middle_of_training_leaves_nothing(fusionrun) -> None:
    process, everything = start_training(fusionrun)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "ERROR" not in err, "what was ordered is no error"
    assert not [p for p in everything if p.is_running()]
    assert os.listdir(fusionrun.runtime_dir) == []


SHARD_NODE = ("-np", "3", "-H", "127.0.0.1:2,localhost:1", "--shard-hosts", "127.0.0.2")


def test_a_node_without_workers_comes_and_goes_with_the_job(fusionrun) -> None:
    flags = ("--verbose", "--log-level", "INFO", "--log-without-timestamp")
    result = fusionrun(*SHARD_NODE, *flags, *python(), "-c", ADD, "once")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == SUMS
    assert re.search(r"^\[127.0.0.2\]<fusiond>:.* INFO: the job has started", result.stderr, re.MULTILINE)
    assert re.search(r"^\[localhost\]<fusiond>:fusiond\[\d+\] INFO: rank 2 .* has joined$", result.stderr, re.MULTILINE)
    assert not re.search("ERROR|is lost", result.stderr)
    assert os.listdir(fusionrun.runtime_dir) == []
    check_phases(result.stderr)


def test_a_killed_daemon_of_a_node_without_workers_is_named_by_all(fusionrun) -> None:
    process = fusionrun.start(*SHARD_NODE, *python(), "-c", ADD, "train", TEST_SETTLE="60")
    assert sorted(process.stdout.readline().rstrip() for _ in range(3)) == SUMS
    everything = psutil.Process(process.pid).children(recursive=True)
    daemons = {int(name.rpartition(".")[2]): name for name in os.listdir(fusionrun.runtime_dir)}
    lock = os.path.join(fusionrun.runtime_dir, daemons[2], "lock")
    with open(lock) as file:
        os.kill(int(file.read()), signal.SIGKILL)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    for rank in range(3):
        words = rf"^\[{rank}\]<stderr>:.*HorovodInternalError: .*node 2 \(host 127.0.0.2\) is lost"
        assert re.search(words, err, re.MULTILINE), err
    assert err.splitlines()[-1] == "fusionrun: the daemon of host 127.0.0.2 (no workers) was killed by SIGKILL"
    assert not psutil.wait_procs(everything, timeout=TIMEOUT_S)[1]
    assert os.listdir(fusionrun.runtime_dir) == []


def test_ctrl_c_ends_a_node_without_workers_last(fusionrun) -> None:
    code = f"""{JOINED}
def last_words(*_):
    until = time.monotonic() + 1  # time enough for a daemon to end too early
    while time.monotonic() < until:
        add("step", 1)
    print("last", add("last", 1, 1), flush=True)
    client.close()
    sys.exit(0)
signal.signal(signal.SIGTERM, last_words)
os.write(1, b"up\\n")  # not by the stream that the handler uses: the signal may come meanwhile
while True:
    signal.pause()
"""
    flags = ("-np", "1", "-H", "localhost", "--shard-hosts", "127.0.0.2")
    process = fusionrun.start(*flags, *python(), "-c", code, TEST_INTERRUPT_GRACE="60")
    assert process.stdout.readline() == "[0]<stdout>:up\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert out == "[0]<stdout>:last [1.0, 1.0]\n", err
    assert "is lost" not in err
    assert os.listdir(fusionrun.runtime_dir) == []


def test_ranks_that_disagree_are_told_what_about(fusionrun) -> None:
    result = fusionrun(*TWO_NODES, *python(), "-c", ADD, "differ")
    assert result.returncode == 1
    assert "'loss'" in result.stderr.splitlines()[-1]


def test_processes_that_never_join_are_told_to_have_run_alone(fusionrun) -> None:
    alone = fusionrun("-np", "2", *python(), "-c", "print('trained')")
    assert alone.returncode == 0
    assert "fusionrun: warning: no worker has joined the job, by hvd.init()" in alone.stderr
    assert "2 processes ran the script, each alone" in alone.stderr
    joined = fusionrun("-np", "2", *python(), "-c", ADD, "once")
    assert "no worker has joined" not in joined.stderr, joined.stderr
