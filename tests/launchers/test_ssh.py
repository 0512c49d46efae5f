"""Launching over a real OpenSSH: what arrives at the other end, and what is said when nothing can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launchers.conftest import HOSTS, TIMEOUT_S, Sshd, run

pytestmark = pytest.mark.multiprocess

LOOK = """
import os, sys
print(os.getcwd(), os.environ["ODD"].encode(), sys.argv[1:])
print("x" * 200_000)
"""
ODD = "a  b 'c' \"d\" $(e) `f` \\ \n é"


def test_directory_environment_and_arguments_arrive_as_they_are(runtime_dir: Path, tmp_path: Path, sshd: Sshd) -> None:
    """Also where the shells at the other end have something to say first, and the paths need quotes."""
    directory = tmp_path / "it's a $place"
    directory.mkdir()
    command = sshd.fusionrun(sys.executable, "-c", LOOK, ODD, port=1)
    done = run(*command, cwd=directory, ODD=ODD, PYTHONPATH=f"{directory}/my modules", **sshd.environ)
    assert done.returncode == 0, done.stderr
    expected = [f"[{rank}]<stdout>:{line}" for rank in range(2)
                for line in (f"{directory} {ODD.encode()} {[ODD]}", "x" * 200_000)]  # fmt: skip
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("fusionrun: warning: no worker has joined the job")


@pytest.mark.parametrize(
    ("port", "key", "sentence"),
    [
        (0, "other", "Permission denied (publickey)"),
        (2, "user", "This account is currently not available"),
        (3, "user", "Connection refused"),
    ],
)
def test_why_a_host_cannot_be_reached_is_said(
    runtime_dir: Path, tmp_path: Path, sshd: Sshd, port: int, key: str, sentence: str
) -> None:
    reach = Sshd(sshd.directory, (*sshd.ports, 1))  # type: ignore[arg-type]
    done = run(*reach.fusionrun("true", port=port, key=key), cwd=tmp_path, **sshd.environ)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    for line, name in zip(sorted(lines), HOSTS, strict=True):
        assert line.startswith(f"fusionrun: host {name}: it cannot be reached with `ssh -p {reach.ports[port]} -i ")
        assert line.endswith(f": {sentence}") or line.endswith(f"{sentence}"), line


def test_an_environment_that_is_not_there_is_named(runtime_dir: Path, tmp_path: Path, sshd: Sshd) -> None:
    """The launcher runs on an interpreter that the hosts do not have under that path."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    code = "import os, sys; os.unlink(sys.executable); from fusion_rt.runner.command.cli import main; sys.exit(main())"
    command = sshd.fusionrun("true")
    del command[:3]
    environ = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **sshd.environ}
    done = run(python, "-c", code, *command, cwd=tmp_path, **environ)
    assert done.returncode == 1
    assert f"fusionrun: host nodeA: there is no Python at {python} there" in done.stderr
    assert "install the same environment on every host" in done.stderr


def test_nothing_is_left_when_the_connection_or_the_launcher_goes(
    runtime_dir: Path, tmp_path: Path, sshd: Sshd
) -> None:
    for victim, number, sentence in (
        ("ssh", signal.SIGKILL, "the connection to it was lost"),
        ("launcher", signal.SIGINT, "SIGINT: stopping the job"),
        ("launcher", signal.SIGKILL, ""),
    ):
        command = sshd.fusionrun("sh", "-c", "echo $$; exec sleep 300")
        launcher = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, **sshd.environ},
        )  # fmt: skip
        with launcher:
            assert launcher.stdout is not None
            workers = [psutil.Process(int(launcher.stdout.readline().partition(":")[2])) for _ in HOSTS]
            agents = [worker.parent() for worker in workers]
            children = psutil.Process(launcher.pid).children()
            assert [child.name() for child in children] == ["ssh", "ssh"]
            (children[0] if victim == "ssh" else launcher).send_signal(number)
            _, err = launcher.communicate(timeout=TIMEOUT_S)
        assert sentence in err
        assert launcher.returncode in (1, 130, -signal.SIGKILL)
        _, alive = psutil.wait_procs([*workers, *filter(None, agents)], timeout=TIMEOUT_S)
        assert not alive
        deadline = time.monotonic() + TIMEOUT_S
        while os.listdir(runtime_dir):
            assert time.monotonic() < deadline, "a daemon was left, or its files"
            time.sleep(0.05)


def test_a_host_with_another_key_than_the_known_one_is_not_believed(
    runtime_dir: Path, tmp_path: Path, sshd: Sshd
) -> None:
    """Somebody has taken its address, or its network."""
    other = (sshd.directory / "other.pub").read_text()
    known = "".join(f"[{address}]:{sshd.ports[0]} {other}" for address in HOSTS.values())
    (sshd.directory / "known_hosts").write_text(known)
    done = run(*sshd.fusionrun("true"), cwd=tmp_path, **sshd.environ)
    assert done.returncode == 1
    assert "Host key verification failed" in done.stderr
    assert (sshd.directory / "known_hosts").read_text() == known
