"""The batch script for Slurm, with an `srun` that starts the tasks of two nodes on this machine as Slurm's does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.launchers.conftest import logs, run

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "digits.sbatch"

# Starts `srun [--flag…] COMMAND` once a task, and ends all of them when one fails.
SRUN = """#!{python}
import os, subprocess, sys
nodes, each = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
command = [part for number, part in enumerate(sys.argv[1:]) if not part.startswith("--") or number > 1]
tasks = [
    subprocess.Popen(command, env={{
        **os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each), "SLURM_NODEID": str(rank // each),
        "SLURM_NTASKS": str(nodes * each), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(nodes * each),
        "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
    }})
    for rank in range(nodes * each)
]
failed = max(task.wait() for task in tasks)
sys.exit(failed)
"""


def sbatch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the batch script as Slurm does on the first node of an allocation of what its comments ask for."""
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SCRIPT.read_text(), re.MULTILINE))
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o700)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {" ".join(forks.interpreter(forks.WORKER))} "$@"\n')
    python.chmod(0o700)
    return run(
        "bash", SCRIPT, *arguments, cwd=tmp_path, HOME=str(tmp_path), PYTHON=str(python),
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", MASTER_ADDR="127.0.0.1",
        SLURM_JOB_ID="4711", SLURM_JOB_NUM_NODES=asked["nodes"], SLURM_JOB_NODELIST="n[1-2]",
        SLURM_NTASKS_PER_NODE=asked["ntasks-per-node"], SLURM_CPUS_PER_TASK=asked["cpus-per-task"],
        SLURM_SUBMIT_DIR=str(ROOT),
    )  # fmt: skip


def test_the_batch_script_trains_on_all_tasks_of_all_nodes(runtime_dir: Path, tmp_path: Path) -> None:
    done = sbatch(tmp_path, "examples/digits.py", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy +([\d.]+)% .*\n.*on (\d+) ranks", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 90
    assert found[2] == "4"
    assert (tmp_path / ".fusion_rt_secret").stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / ".fusion_rt_secret").read_text()) == 65
    assert logs(runtime_dir) == {}


def test_the_comments_ask_slurm_for_what_it_knows() -> None:
    options = re.findall(r"^#SBATCH --([\w-]+)=\S+$", SCRIPT.read_text(), re.MULTILINE)
    assert set(options) == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time"}
    assert SCRIPT.read_text().startswith("#!/bin/bash\n")


def test_a_script_of_torch_distributed_needs_nothing_but_the_name_of_the_backend(
    runtime_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('fusion')\n"
        "total = torch.tensor(float(dist.get_rank() + 1))\n"
        "dist.all_reduce(total)\n"
        "print(f\"{dist.get_rank()} {total:g} {os.environ['LOCAL_RANK']}\", flush=True)\n"
    )
    done = sbatch(tmp_path, str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 10 0", "1 10 1", "2 10 0", "3 10 1"]
    assert logs(runtime_dir) == {}
