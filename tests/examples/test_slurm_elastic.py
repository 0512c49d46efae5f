"""The batch script of an elastic job, with stand-ins for what it asks Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchers.conftest import TIMEOUT_S
from tests.runner.elastic.jobs import WORKER

ROOT = Path(__file__).resolve().parents[2]
ELASTIC = ROOT / "examples" / "slurm" / "elastic.sbatch"


def test_the_comments_ask_slurm_for_what_it_knows() -> None:
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=\S+)?$", ELASTIC.read_text(), re.MULTILINE)
    assert set(options) == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "no-kill"}
    assert ELASTIC.read_text().startswith("#!/bin/bash\n")


@pytest.mark.multiprocess
def test_an_elastic_job_begins_on_the_nodes_that_are_up_and_takes_one_that_comes(tmp_path: Path) -> None:
    """`sinfo` and `srun --nodelist={host}` are stand-ins; two names of this machine are the nodes."""
    nodes, wanted = tmp_path / "nodes", tmp_path / "wanted"
    nodes.write_text("localhost\n")
    for name, text in (
        ("sinfo", f'echo "$*" >> {wanted}; sed s/$/:1/ {nodes}'),
        ("srun", f'echo "$*" >> {wanted}; while case "$1" in --*) true;; *) false;; esac; do shift; done; exec "$@"'),
        ("fusionrun", f'exec {sys.executable} -m fusion_rt.runner "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    stop = tmp_path / "stop"
    process = subprocess.Popen(
        ["bash", ELASTIC, WORKER, tmp_path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        env={
            **os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable,
            "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "1", "SLURM_SUBMIT_DIR": str(ROOT),
        },
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "rank 0 of 1" in process.stdout.readline()
        nodes.write_text("localhost\n127.0.0.1\n")
        assert "of 2" in process.stdout.readline()
        stop.touch()
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    calls = wanted.read_text()
    assert "--nodes=n[1-2] --states=allocated,mixed --format=%n:1\n" in calls
    assert "--overlap --nodes=1 --ntasks=1 --unbuffered --nodelist=127.0.0.1 " in calls
