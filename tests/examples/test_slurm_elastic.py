"""The batch script of an elastic job, with stand-ins for what it asks Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.launchers.conftest import TIMEOUT_S
from tests.runner.elastic.jobs import WORKER

ROOT = Path(__file__).resolve().parents[2]
ELASTIC = ROOT / "examples" / "slurm" / "elastic.sbatch"


def test_the_comments_ask_slurm_for_what_it_knows() -> None:
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=\S+)?$", ELASTIC.read_text(), re.MULTILINE)
    assert set(options) == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "no-kill"}
    assert ELASTIC.read_text().startswith("#!/bin/bash\n")


class Batch:
    """The running batch script. `sinfo` and `srun` are stand-ins, and names of this machine are the nodes."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.nodes, self.asked = folder / "nodes", folder / "asked"
        self.nodes.write_text("localhost\n")
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        skip = 'while case "$1" in --*) true;; *) false;; esac; do shift; done'
        for name, text in (
            ("sinfo", f'echo "$*" >> {self.asked}; sed s/$/:1/ {self.nodes}'),
            ("srun", f'echo "$*" >> {self.asked}; {skip}; exec "$@"'),
        ):
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o700)
        self.process = subprocess.Popen(
            ["bash", ELASTIC, WORKER, folder],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable,
                "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "1", "SLURM_SUBMIT_DIR": str(ROOT),
                "TMPDIR": str(self.temporary), **variables,
            },
        )  # fmt: skip
        assert self.process.stdout is not None
        self.out = self.process.stdout

    def first_line(self) -> str:
        """Returns the first line of the job's output; what it said on standard error if there is none."""
        return self.out.readline() or self.process.communicate()[1]


@pytest.fixture
def batch(tmp_path: Path, runtime_dir: Path) -> Iterator[Callable[..., Batch]]:
    started = []

    def start(**variables: str) -> Batch:
        started.append(Batch(tmp_path, **variables))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.multiprocess
def test_an_elastic_job_begins_on_the_nodes_that_are_up_and_takes_one_that_comes(
    batch: Callable[..., Batch], tmp_path: Path
) -> None:
    job = batch()
    assert "rank 0 of 1" in job.first_line()
    job.nodes.write_text("localhost\n127.0.0.1\n")
    assert "of 2" in job.out.readline()
    (tmp_path / "stop").touch()
    _, err = job.process.communicate(timeout=TIMEOUT_S)
    assert job.process.returncode == 0, err
    calls = job.asked.read_text()
    assert "--nodes=n[1-2] --states=allocated,mixed --format=%n:1\n" in calls
    assert "--overlap --nodes=1 --ntasks=1 --unbuffered --nodelist=127.0.0.1 " in calls
    assert [*job.temporary.glob("tmp.*")] == []


@pytest.mark.multiprocess
def test_a_signal_to_the_batch_script_alone_ends_the_job_in_order(batch: Callable[..., Batch]) -> None:
    job = batch(FUSIONRUN_FLAGS="--restart-limit 0 --verbose")
    line = job.first_line()
    assert "rank 0 of 1" in line
    worker = int(line.rpartition("pid ")[2])
    job.process.terminate()
    _, err = job.process.communicate(timeout=TIMEOUT_S)
    assert job.process.returncode == 128 + signal.SIGTERM, err
    assert "fusionrun: SIGTERM: stopping the job" in err
    assert re.search(r"^fusionrun: \d+\.\d+ s: over$", err, re.MULTILINE), "it had the flags, and came to its end"
    assert not psutil.pid_exists(worker)
    assert [*job.temporary.glob("tmp.*")] == []
