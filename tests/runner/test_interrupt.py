"""Ctrl-C, a closed terminal, a batch system's TERM, and SIGKILL of any part: nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fusion_rt.runner.launch.launcher import INTERRUPT_GRACE
from tests.runner.conftest import TIMEOUT_S

pytestmark = pytest.mark.multiprocess

WORKER = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
child.wait()
"""
DEAF = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()"
)


def start(fusionrun, code: str, np: int, *arguments: str, **environment: str) -> tuple[subprocess.Popen[str], set[int]]:
    """A running job, and the ids of all its processes but the launcher's."""
    process = fusionrun.start("-np", str(np), *arguments, sys.executable, "-c", code, **environment)
    for _ in range(np):
        assert process.stdout is not None
        assert process.stdout.readline(), process.communicate()[1]
    everything = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    return process, everything


def agents(pids: set[int]) -> list[int]:
    return [pid for pid in pids if "fusion_rt.runner.agent" in psutil.Process(pid).cmdline()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_and_its_number_is_the_exit_status(fusionrun, is_alive, number: int) -> None:
    process, pids = start(fusionrun, WORKER, 2, "-H", "127.0.0.1,localhost")
    assert len(pids) == 2 * 4  # agent, daemon, worker and its child, twice
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + number
    assert not [pid for pid in pids if is_alive(pid)]
    assert f"fusionrun: {signal.Signals(number).name}: stopping the job" in err
    assert "failed first" not in err  # nobody failed: somebody stopped it


def test_ctrl_c_in_the_terminal_reaches_the_launcher_alone(fusionrun, is_alive) -> None:
    process, pids = start(fusionrun, WORKER, 1)
    assert os.getpgid(process.pid) not in {os.getpgid(pid) for pid in pids}
    assert os.getsid(process.pid) not in {os.getsid(pid) for pid in pids}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


def test_a_worker_deaf_to_term_is_killed_after_the_grace(fusionrun, is_alive) -> None:
    process, pids = start(fusionrun, DEAF, 1)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - started >= INTERRUPT_GRACE
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_second_ctrl_c_does_not_wait(fusionrun, is_alive, until) -> None:
    process, pids = start(fusionrun, DEAF, 1, TEST_INTERRUPT_GRACE="600")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopping the job" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize("code", [WORKER, DEAF])
def test_when_the_launcher_is_killed_nothing_is_left(fusionrun, is_alive, until, code: str) -> None:
    process, pids = start(fusionrun, code, 2, "-H", "127.0.0.1,localhost")
    process.kill()
    process.communicate()
    until(lambda: not [pid for pid in pids if is_alive(pid)], "the end of all processes")


def test_when_an_agent_is_killed_its_daemon_and_workers_are_too(fusionrun, is_alive, until) -> None:
    process, pids = start(fusionrun, DEAF, 2, "-H", "127.0.0.1,localhost")
    psutil.Process(agents(pids)[0]).kill()
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "the connection to it was lost; its agent was killed by SIGKILL" in err.splitlines()[-1]
    until(lambda: not [pid for pid in pids if is_alive(pid)], "the end of all processes")


def test_an_agent_that_is_stopped_is_taken_for_lost_and_killed(fusionrun, is_alive) -> None:
    process, pids = start(fusionrun, WORKER, 2, "-H", "127.0.0.1,localhost", FUSION_HEARTBEAT_TIMEOUT="500ms")
    os.kill(agents(pids)[0], signal.SIGSTOP)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert not [pid for pid in pids if is_alive(pid)]
    assert ": its agent has been silent for 3 s: it was stopped or hangs, or the host" in err.splitlines()[-1]


def test_when_the_launcher_is_stopped_the_agents_end_the_job(fusionrun, is_alive, until) -> None:
    process, pids = start(fusionrun, WORKER, 1, FUSION_HEARTBEAT_TIMEOUT="500ms")
    process.send_signal(signal.SIGSTOP)
    until(lambda: not [pid for pid in pids if is_alive(pid)], "the end of all processes but the launcher's")


def test_a_stopped_worker_is_killed_too(fusionrun, is_alive) -> None:
    process, pids = start(fusionrun, "import os; print(1, flush=True); os.kill(os.getpid(), 19)", 1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 143
    assert not [pid for pid in pids if is_alive(pid)]


def test_an_interrupt_while_a_host_is_being_reached_does_not_wait_for_it(fusionrun, until) -> None:
    fusionrun.file("to", "#!/bin/sh\necho $$ > started\nexec sleep 600\n", executable=True)
    process = fusionrun.start("-H", "far", "--rsh-agent", f"{fusionrun.directory}/to {{host}}", "true")
    until((fusionrun.directory / "started").exists, "the attempt")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


def test_a_signal_that_nohup_ignores_stays_ignored(fusionrun) -> None:
    fusionrun.wrapper = ["nohup"]
    process, _ = start(fusionrun, "import time; print(1, flush=True); time.sleep(1); print(2)", 1)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (0, "[0]<stdout>:2\n"), err


def test_a_reader_that_is_stuck_does_not_stop_ctrl_c(fusionrun, is_alive) -> None:
    process, pids = start(fusionrun, "import os\nwhile True: print('x' * 1000)", 1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)  # nobody reads: the pipe is full
    process.send_signal(signal.SIGINT)
    process.wait(TIMEOUT_S)
    assert process.returncode == 130
    assert not [pid for pid in pids if is_alive(pid)]
