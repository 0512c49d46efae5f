"""Workers of any launcher find each other by `torch.distributed`, and get the variables that torchrun sets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import fusion_rt.c10d  # noqa: F401  # torch 2.4 does not find it by its entry point
from tests import forks
from tests.harness import Job
from tests.launchers.conftest import HERE, logs, mpirun, run

pytestmark = pytest.mark.multiprocess

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("fusion")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("total", total.item())
dist.destroy_process_group()
"""


def place_and_sum(times: int, before: bool) -> tuple[list[str], float]:
    """Returns this rank's variables, and the sum of all ranks plus one by the last of so many process groups; `before`:
    the variables are set before the group is made."""
    import torch

    from fusion_rt.integrations import torchrun

    for _ in range(times):
        if before:
            torchrun.set_variables()
        dist.init_process_group("fusion")
        total = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(total)
        dist.destroy_process_group()
    return [os.environ[name] for name in NAMES], total.item()


@pytest.mark.parametrize("before", [True, False])
def test_workers_of_fusionrun_on_two_hosts_find_each_other_again_and_again(before: bool) -> None:
    with Job((2, 1), {"MASTER_ADDR": "127.0.0.1"}, init=False) as job:
        assert job.run(place_and_sum, 2, before) == [
            (["0", "3", "0", "2", "0"], 6.0),
            (["1", "3", "1", "2", "0"], 6.0),
            (["2", "3", "0", "1", "1"], 6.0),
        ]


def test_what_torchrun_has_left_behind_does_not_count_under_fusionrun() -> None:
    left = {"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "9", "MASTER_PORT": "1"}
    with Job((2,), {**left, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "another"}, init=False) as job:
        assert [total for _, total in job.run(place_and_sum, 1, True)] == [3.0, 3.0]


def test_without_any_launcher_torch_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        next(dist.rendezvous("env://"))
    with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected, but not set"):
        next(dist.rendezvous("env://", rank=0, world_size=1))


def test_workers_of_mpirun_find_each_other(runtime_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(*mpirun(), "-np", "2", *forks.interpreter(forks.WORKER), tmp_path / "script.py", cwd=HERE)
    assert done.returncode == 0, done.stderr
    assert "total 3.0" in done.stdout
    assert logs(runtime_dir) == {}


def test_an_elastic_job_is_refused_outside_of_its_function(runtime_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", "1", "--min-np", "1", "--reset-limit", "1"]
    done = run(*command, *forks.interpreter(forks.WORKER), tmp_path / "script.py", cwd=HERE)
    assert done.returncode != 0
    assert "this job of fusionrun is elastic, and a process group has the ranks of one membership of it" in done.stderr
