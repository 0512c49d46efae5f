"""Attempts of torchrun: when a worker has died, its agents start all of them again, perhaps with other ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import forks
from tests.launchers.conftest import TIMEOUT_S, logs, run, torchrun

SCRIPT = Path(__file__).parent / "restarted.py"

pytestmark = pytest.mark.multiprocess


def results(output: str) -> list[dict[str, Any]]:
    return sorted((json.loads(text) for text in re.findall(r"\{.*?\}", output)), key=lambda each: each["rank"])


def expected(size: int) -> list[dict[str, Any]]:
    """What the ranks of the second attempt find: each other, another daemon than before, and none from before."""
    found = {"total": float(size), "other": True, "gone": True}
    return [{"rank": rank, "ranks": f"{rank} of {size}", **found} for rank in range(size)]


@pytest.mark.parametrize("how", ["dist", pytest.param("hvd", marks=pytest.mark.long)])
def test_the_second_attempt_has_a_job_of_its_own_and_nothing_of_the_first_stays(
    runtime_dir: Path, tmp_path: Path, how: str
) -> None:
    command = [*torchrun(), "--standalone", "--max-restarts", "1", "--nproc-per-node", "3"]
    command += ["--no-python", *forks.interpreter(forks.WORKER)]
    done = run(*command, SCRIPT, how, tmp_path, "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == expected(3)
    (said,) = logs(runtime_dir).values()
    assert re.search(r"ERROR: rank 1 \(.*\) died \(killed, or crashed\) without leaving the job\n$", said), said
    assert said.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("how", ["dist", "hvd"])
def test_ranks_of_a_host_that_is_left_have_other_numbers_in_the_second_attempt(
    runtime_dir: Path, tmp_path: Path, how: str
) -> None:
    """The agent of rank 0 dies with it, and ranks 1 and 2 of the other one become 0 and 1."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("0123456789abcdef" * 4)
    left = tmp_path / "left"
    left.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)  # which keeps a pipe
    patience = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
    command = [*torchrun(), "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}"]
    command += ["--rdzv-id", "job", "--rdzv-conf", patience, "--max-restarts", "3", "--local-addr", "127.0.0.1"]
    agents = [
        subprocess.Popen(
            [*command, "--nproc-per-node", str(workers), str(SCRIPT), how, str(left), "0", "agent"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FUSION_JOB_SECRET_FILE": str(secret)},
        )
        for workers in (1, 2)  # the first one has the smaller number, and so the first rank
    ]
    (_, _), (out, err) = (agent.communicate(timeout=TIMEOUT_S) for agent in agents)
    assert [agent.returncode for agent in agents] == [-signal.SIGKILL, 0], err
    assert results(out) == expected(2)
