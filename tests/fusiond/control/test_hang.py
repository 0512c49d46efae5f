"""Jobs that hang, for real: what the daemon writes, what the workers raise, and what `fusion-trace hang` shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fusiond.processes import TIMEOUT_S, Daemons, read_line

pytestmark = pytest.mark.multiprocess
MakeDaemons = Callable[..., Daemons]
SUBMIT = """\
op = client.submit("loss", wire.Signature("allreduce", "float32", (2,)), inline=bytes(8))
try:
    client.wait(op)
    print("done", flush=True)
except Exception as error:
    print(repr(str(error)), flush=True)
sys.stdin.read()
"""
LATER = f"sys.stdin.readline()\n{SUBMIT}"  # when it is told to: who is missing then is asked only once
# A script of its own, so that its lines can be read.
SCRIPT = """\
import ctypes, time

def slow():
    print("here", flush=True)
    {body}

slow()
"""


def tell(process: subprocess.Popen[bytes]) -> None:
    """Lets a process go on that reads a line."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def script_of(directory: Path, body: str) -> str:
    """Code that runs a script; the script's file."""
    path = directory / "train.py"
    path.write_text(SCRIPT.format(body=body))
    return f"import runpy; runpy.run_path({str(path)!r})"


def hang(job: Daemons, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusion_trace", "hang", *options]
    return subprocess.run(command, env=job.environment, capture_output=True, text=True, timeout=180)


def hang_until(job: Daemons, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The document of the job once it is as it should be."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        shown = hang(job, "--json")
        assert shown.returncode == 0, shown.stderr
        (document,) = json.loads(shown.stdout)
        if condition(document):
            found: dict[str, Any] = document
            return found
        assert time.monotonic() < deadline, document


def log_until(job: Daemons, text: str) -> str:
    deadline = time.monotonic() + TIMEOUT_S
    while text not in job.log(0):
        assert time.monotonic() < deadline, job.log(0)
        time.sleep(0.05)
    return job.log(0)


def test_a_rank_that_sleeps_in_its_own_code_is_shown_with_the_line(daemons: MakeDaemons, tmp_path: Path) -> None:
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1s", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4s"}
    job = daemons(1, 1, **limits).start()
    waits = job.worker_process(0, LATER)
    sleeps = job.worker_process(1, script_of(tmp_path, "time.sleep(300)"))
    assert read_line(sleeps) == "here"
    tell(waits)
    where = f"    {tmp_path}/train.py:5 in slow: time.sleep(300)"
    head = f"rank 1 (host host1, pid {sleeps.pid}, sleeping (S)), most recent call first:"
    log = log_until(job, "most recent call first")
    log = log_until(job, where)
    assert "WARNING: tensor 'loss' waited " in log
    assert (
        f"s for rank 1 (host host1), which did not submit it (submitted by rank 0 (host host0))\n{head}\n{where}" in log
    )
    error = eval(read_line(waits))
    assert error.startswith("tensor 'loss' waited ")
    assert f"{head}\n{where}\n    {tmp_path}/train.py:7 in <module>: slow()" in error
    assert sleeps.poll() is None
    sleeps.kill()


def test_a_rank_that_holds_the_gil_in_c_is_shown(daemons: MakeDaemons, tmp_path: Path) -> None:
    job = daemons(2, HOROVOD_STALL_CHECK_TIME_SECONDS="1s").start()
    waits = job.worker_process(0, LATER)
    body = "ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)"
    stuck = job.worker_process(1, script_of(tmp_path, f"{body}; print('read', flush=True)") + f"\n{SUBMIT}")
    assert read_line(stuck) == "here"
    tell(waits)
    log_until(job, f"    {tmp_path}/train.py:5 in slow: {body}")
    tell(stuck)
    assert read_line(stuck) == "read"  # the system call has gone on
    assert [read_line(waits), read_line(stuck)] == ["done", "done"]


def test_a_rank_that_is_stopped_is_told_as_such(daemons: MakeDaemons, tmp_path: Path) -> None:
    job = daemons(2, HOROVOD_STALL_CHECK_TIME_SECONDS="1s").start()
    waits = job.worker_process(0, LATER)
    stopped = job.worker_process(1, script_of(tmp_path, "input()") + f"\n{SUBMIT}")
    assert read_line(stopped) == "here"
    stopped.send_signal(signal.SIGSTOP)
    tell(waits)
    try:
        expected = (
            f"rank 1 (host host0, pid {stopped.pid}, stopped (T)): no answer: the process is stopped (state T in /proc)"
        )
        log_until(job, expected)
    finally:
        stopped.send_signal(signal.SIGCONT)
    tell(stopped)
    assert [read_line(waits), read_line(stopped)] == ["done", "done"]


def test_a_job_of_two_nodes_is_shown_from_either(daemons: MakeDaemons, tmp_path: Path) -> None:
    job = daemons(2, 1).start()
    waiting = [job.worker_process(rank, SUBMIT) for rank in (0, 1)]
    missing = job.worker_process(2, script_of(tmp_path, "time.sleep(300)"))
    assert read_line(missing) == "here"
    document = hang_until(job, lambda found: bool(found["waiting"]) and found["waiting"][0]["submitted"] == [0, 1])
    (stall,) = document["waiting"]
    assert stall["what"] == "tensor 'loss' (allreduce sum float32 [2])"
    assert (stall["missing"], stall["stragglers"]) == ([2], [])
    (rank,) = document["ranks"]
    assert (rank["rank"], rank["host"], rank["pid"], rank["state"]) == (2, "host1", missing.pid, "sleeping (S)")
    first = rank["stack"]["frames"][0]
    assert (first["function"], first["source"], first["line"]) == ("slow", "time.sleep(300)", 5)
    pids = [process.pid for process in job.processes]
    assert [(d["node"], d["pid"], d["answered"]) for d in document["daemons"]] == [
        (0, pids[0], True),
        (1, pids[1], True),
    ]
    assert all(d["stack"]["frames"] for d in document["daemons"])

    page = hang(job)
    assert page.returncode == 0, page.stderr
    assert "tensor 'loss' (allreduce sum float32 [2]) has waited" in page.stdout
    assert "waits for rank 2 (host host1)" in page.stdout
    assert f"{tmp_path}/train.py:5 in slow: time.sleep(300)" in page.stdout
    everyone = hang(job, "--all").stdout
    assert f"rank 0 (host host0, pid {waiting[0].pid}" in everyone

    # A daemon that is stopped cannot answer; the other one says what it knows.
    job.processes[1].send_signal(signal.SIGSTOP)
    try:
        shown = hang(job)
    finally:
        job.processes[1].send_signal(signal.SIGCONT)
    assert f"host host1 (pid {pids[1]}, stopped (T)): it does not answer within 10 s" in shown.stdout
    assert f"`kill -CONT {pids[1]}` lets it go on" in shown.stdout
    assert "host host0 (pid" in shown.stdout
    for process in (*waiting, missing):
        process.kill()


def test_a_daemon_that_hangs_shows_its_stack(daemons: MakeDaemons, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'fusiond' in ' '.join(sys.orig_argv):\n"
        "    import ctypes, threading, time\n"
        "    def hang(reader):\n"
        "        import fusiond.host.loop\n"
        "        turn = fusiond.host.loop.EventLoop.turn\n"
        "        def stuck(loop):\n"
        "            turn(loop)\n"
        f"            if os.path.exists({str(tmp_path / 'now')!r}):\n"
        "                ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)\n"
        "        fusiond.host.loop.EventLoop.turn = stuck\n"
        "    hang(os.pipe()[0])\n"
    )
    job = daemons(1)
    job.environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{job.environment['PYTHONPATH']}"
    job.start()
    job.status()
    (tmp_path / "now").touch()
    shown = hang(job, "--job", "test", "--timeout", "2")
    assert shown.returncode == 0, shown.stderr
    assert "none of its daemons on this host answers" in shown.stdout
    assert f"pid {job.processes[0].pid}" in shown.stdout
    assert "in stuck: ctypes.PyDLL(None).read(reader" in shown.stdout
    job.processes[0].kill()


def test_nothing_waits_and_nothing_is_there(daemons: MakeDaemons) -> None:
    job = daemons(1)
    nobody = hang(job)
    assert nobody.returncode == 1
    assert f"no daemon of this user runs on this host (in {job.directory})" in nobody.stderr
    job.start()
    (client,) = job.join().values()
    shown = hang(job)
    assert "nothing waits" in shown.stdout
    assert "host host0 (pid" in shown.stdout
    client.close()
