"""Runs `fusionrun` as a person does, with a stand-in for the daemon unless a test asks for the real one."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests import forks

ROOT = Path(__file__).resolve().parents[2]
FAKE_DAEMON = Path(__file__).with_name("fake_daemon")
FORKED_DAEMON = FAKE_DAEMON.with_name("forked_daemon")
LAUNCHER = (
    FAKE_DAEMON.with_name("script") / "fusionrun.py"
)  # as the console script, it does not look for modules where it is started
TIMEOUT_S = 120.0  # for a whole job, on however slow a machine
LASTING = "while [ ! -e told ]; do sleep 0.02; done"  # what a worker does until its test has seen enough


@dataclass
class Fusionrun:
    """Starts `fusionrun` processes and remembers them, so that the fixture can end what a failing test left."""

    runtime_dir: Path
    directory: Path
    real_daemon: bool = False
    forks_daemons: bool = True
    wrapper: list[str] = field(default_factory=list)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
        paths = [ROOT, ROOT / "daemon"]
        if not self.real_daemon:
            paths.insert(0, FAKE_DAEMON)
        elif self.forks_daemons and forks.possible():
            paths.insert(0, FORKED_DAEMON)
            environment["FUSION_TEST_DAEMONS"] = forks.nursery(forks.DAEMON).address
        process = subprocess.Popen(
            [*self.wrapper, sys.executable, LAUNCHER, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment},
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def until_told(self, process: subprocess.Popen[str], *texts: str) -> str:
        """Reads what a process says on its standard error until all of these have been in it. Then lets the workers end
        that wait for it (`LASTING`); returns what was read."""
        assert process.stderr is not None
        told = ""
        while not all(text in told for text in texts):
            line = process.stderr.readline()
            assert line, told
            told += line
        self.file("told", "")
        return told

    def python(self, code: str, *arguments: str, np: int = 2, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a piece of Python on `np` workers."""
        return self("-np", str(np), *arguments, sys.executable, "-c", code, **environment)

    def file(self, name: str, text: str, executable: bool = False) -> Path:
        """A file in the working directory."""
        path = self.directory / name
        path.write_text(text)
        if executable:
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path


@pytest.fixture
def fusionrun(runtime_dir: Path, tmp_path: Path) -> Iterator[Fusionrun]:
    runner = Fusionrun(runtime_dir, tmp_path)
    yield runner
    for process in runner.started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def wait_for(condition: Callable[[], object], what: str, timeout: float = TIMEOUT_S) -> object:
    """Polls until `condition()` is true and returns what it was."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def until() -> Callable[..., object]:
    return wait_for


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    return alive
