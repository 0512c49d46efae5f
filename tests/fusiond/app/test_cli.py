"""The `fusiond` command: start, status, stop and logs, as a person uses it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.host.bootstrap import DaemonConfig, StartError, decode_line, encode_line, job_directory, socket_path
from fusiond.app.cli import app
from tests.fusiond.processes import COMMAND, JOB, TIMEOUT_S, Daemons, kill

pytestmark = pytest.mark.multiprocess
MakeDaemons = Callable[..., Daemons]
BARRIER = wire.Signature("barrier")


def fusiond(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_life_of_a_daemon_in_the_background(runtime_dir: Path) -> None:
    started = fusiond("start", "--job", "mine", "--size", "2")
    assert started.exit_code == 0, started.output
    again = fusiond("start", "--job", "mine", "--size", "2")
    assert again.exit_code == 1
    path = socket_path(str(runtime_dir), "mine", 0)

    (status,) = json.loads(fusiond("status", "--json").stdout)
    assert f"fusiond of job 'mine' listens (pid {status['pid']})" in started.stdout
    assert f"a daemon of job 'mine' runs on this host already (pid {status['pid']})" in again.stderr
    assert (status["job"], status["size"], status["state"]) == ("mine", 2, "starting")
    assert "mine" in fusiond("status").stdout

    def work(rank: int) -> str:
        client = Client(path, "mine", rank, TIMEOUT_S)
        joined.wait(TIMEOUT_S)
        try:
            while True:
                client.wait(client.submit("x", BARRIER))
        except HorovodInternalError as error:
            return str(error)
        finally:
            client.close()

    joined = threading.Barrier(3)
    with ThreadPoolExecutor() as pool:
        errors = pool.map(work, range(2))
        joined.wait(TIMEOUT_S)
        stopped = fusiond("stop", "--job", "mine")
        assert stopped.exit_code == 0, stopped.output
        assert not os.path.exists(path)
        assert set(errors) == {f"the job was stopped on host {socket.gethostname()}: fusiond stop"}

    logs = fusiond("logs", "--job", "mine")
    assert logs.exit_code == 0
    assert "the job was stopped on host" in logs.stdout
    assert len(fusiond("logs", "-n", "1").stdout.splitlines()) == 2  # the name of the file, and one line
    assert fusiond("status").exit_code == 1


def test_without_a_daemon_every_command_says_so(runtime_dir: Path) -> None:
    for command in ("status", "stop"):
        result = fusiond(command)
        assert result.exit_code == 1
        assert "no daemon of this user runs on this host" in result.stderr
        assert "no daemon of job 'mine' of this user" in fusiond(command, "--job", "mine").stderr
    result = fusiond("logs")
    assert result.exit_code == 1
    assert "no daemon of this user has left a log" in result.stderr


def test_the_daemons_of_a_job_on_one_host(daemons: MakeDaemons) -> None:
    job = daemons(2, 1).start()
    job.join()
    found = json.loads(fusiond("status", "--json").stdout)
    assert [(status["node"], status["ranks"]) for status in found] == [(0, [0, 1]), (1, [2])]
    assert [status["node"] for status in json.loads(fusiond("status", "--json", "--node", "1").stdout)] == [1]
    table = fusiond("status", "--job", JOB).stdout
    assert "running" in table
    for client in job.clients.values():
        client.close()
    stopped = fusiond("stop")
    assert stopped.exit_code == 0, stopped.output
    assert [process.wait(TIMEOUT_S) for process in job.processes] == [1, 1]


def test_a_daemon_that_was_killed_is_shown_and_stopped_as_such(daemons: MakeDaemons) -> None:
    job = daemons(1).start()
    job.status()
    kill(job.processes[0])
    (status,) = json.loads(fusiond("status", "--json").stdout)
    assert status["state"] == "gone"
    assert "gone" in fusiond("status").stdout
    stopped = fusiond("stop")
    assert stopped.exit_code == 0
    assert "does not answer" in stopped.stderr


def test_a_job_has_to_be_named_where_there_are_several(daemons: MakeDaemons, runtime_dir: Path) -> None:
    job = daemons(1).start()
    job.status()
    other = Path(job_directory(str(runtime_dir), "other", 0))
    other.mkdir(mode=0o700)
    (other / "sock").touch()
    result = fusiond("stop")
    assert result.exit_code == 2
    assert "name one with --job" in " ".join(result.stderr.split())
    assert fusiond("stop", "--job", JOB).exit_code == 0
    assert job.processes[0].wait(TIMEOUT_S) == 1


def test_a_daemon_for_shards_is_started_by_hand(daemons: MakeDaemons) -> None:
    job = daemons(1, 0)
    options = ["--role", "shard"], ["--role", "worker"]
    refusals = []
    for node in (0, 1):
        config = encode_line(DaemonConfig(JOB, node, job.topology))
        command = [*COMMAND, *options[node]]
        done = subprocess.run(command, input=config, capture_output=True, env=job.environment, timeout=TIMEOUT_S)
        assert done.returncode == 1
        refusals.append(decode_line(done.stdout, StartError).error)
    assert refusals[0].startswith("node 0 (host host0) has workers (ranks [0])")
    assert refusals[1] == "node 1 (host host1) has no workers; start its daemon with --role shard"
    assert "have to come on standard input (--config-stdin)" in fusiond("start", "--role", "shard").stderr

    job.launch_options = {0: ["--role", "worker"], 1: ["--role", "shard"]}
    job.start().join()
    found = json.loads(fusiond("status", "--json").stdout)
    assert [status["role"] for status in found] == ["worker", "shard"]
    assert "shard" in fusiond("status").stdout


@pytest.mark.parametrize("name", ["../x", "", "a b", "x" * 33])
def test_a_name_that_is_none_is_refused(runtime_dir: Path, name: str) -> None:
    result = fusiond("start", "--job", name)
    assert result.exit_code == 1
    assert f"the job cannot be called {name!r}" in result.stderr
    assert os.listdir(runtime_dir) == []


def test_a_setting_that_cannot_be_used_is_refused(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_CHUNK_BYTES", "tiny")
    for command in ("start", "status"):
        done = subprocess.run([sys.executable, "-m", "fusiond", command], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.startswith("fusiond: FUSION_CHUNK_BYTES: 'tiny' is not a size")
        assert "Traceback" not in done.stderr


def test_a_daemon_that_ends_without_a_word_is_told_with_its_log(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = runtime_dir / "broken"
    broken.mkdir()
    (broken / "fusiond.py").write_text("raise SystemExit('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    result = fusiond("start")
    assert result.exit_code == 1
    assert "a broken installation" in result.stderr
