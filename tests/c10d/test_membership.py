"""How workers of `torch.distributed` come to a job and leave it: started by whatever, on one host and on two."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.netlab import Netlab, preflight
from fusion_rt.c10d.membership import Opening
from fusion_rt.core.errors import FusionError
from tests import forks
from tests.launchers.conftest import TIMEOUT_S, fusionrun, logs, mpirun, run, torchrun

SCRIPT = Path(__file__).parent / "launched.py"
UNAVAILABLE = preflight()

pytestmark = pytest.mark.multiprocess


def results(output: str) -> list[dict[str, Any]]:
    """What the ranks printed, in their order; launchers put something in front of lines."""
    return sorted((json.loads(text) for text in re.findall(r"\{.*\}", output)), key=lambda each: each["rank"])


def by_hand(rank: int, size: int, *words: str, **environ: str) -> subprocess.Popen[str]:
    """A worker that nobody has started but this test."""
    return forks.popen(
        [sys.executable, str(SCRIPT), *words],
        forks.WORKER,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), **environ},
    )


def finished(*processes: subprocess.Popen[str]) -> tuple[str, str]:
    """What processes have printed, and written to standard error, when they have ended."""
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    return "".join(out for out, _ in outputs), "".join(err for _, err in outputs)


def test_the_first_member_does_not_go_before_all_know_that_a_group_is_open() -> None:
    """It may serve the store, and its script may end at once: the others would find the store gone."""
    store = dist.HashStore()

    def members(seconds: float) -> list[Opening]:
        found = [Opening(store, "job", "group", rank, (0, 1), timedelta(seconds=seconds)) for rank in (0, 1)]
        assert len(set(pool.map(Opening.agree, found))) == 1
        return found

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Opening.complete, members(60)))
        first, second = members(0.5)
        second.count("complete")  # and has not seen yet that it was the last one
        with pytest.raises(FusionError, match=r"was not opened within 0.5 s: not all members got further"):
            first.complete()


def test_a_script_of_torchrun_comes_again_and_shares_its_job_with_horovod(runtime_dir: Path, tmp_path: Path) -> None:
    command = [*torchrun(), "--standalone", "--nproc-per-node", "2", "--no-python", *forks.interpreter(forks.WORKER)]
    done = run(*command, SCRIPT, "loader", "again", "hvd", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = {"total": 3.0, "loaded": 28, "again": 3.0, "hvd": [2.0, 2, 1, 3.0]}
    assert results(done.stdout) == [{"rank": rank, **expected} for rank in range(2)]
    assert logs(runtime_dir) == {}


def test_a_script_of_mpirun_uses_the_job_of_horovod(runtime_dir: Path, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    command = [*mpirun(), "-np", "2", "sh", "-c", 'RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=2 exec "$@"', "sh"]
    done = run(*command, *forks.interpreter(forks.WORKER), SCRIPT, store, "hvd-first", "leaves", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == [{"rank": rank, "total": 3.0, "hvd": [2.0, 2, 1, 3.0]} for rank in range(2)]
    assert logs(runtime_dir) == {}


def test_a_worker_that_fails_is_named_to_those_started_by_hand(runtime_dir: Path, tmp_path: Path) -> None:
    workers = [by_hand(rank, 2, f"file://{tmp_path}/store", "fails") for rank in range(2)]
    _, err = finished(*workers)
    assert [worker.returncode for worker in workers] == [1, 1]
    assert err.count("ValueError: the script of rank 1 fails") >= 2, err  # its own, and what rank 0 heard
    assert "CollectiveError" in err


@pytest.mark.root
@pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
def test_no_stranger_on_a_network_reaches_the_store_of_a_job_on_one_host(runtime_dir: Path, tmp_path: Path) -> None:
    """The store asks for no key: torch's own listens on all interfaces."""
    done = run(*fusionrun(), "-np", "2", sys.executable, SCRIPT, "listens", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = results(done.stdout)
    assert (first["listens"], second["listens"]) == (["127.0.0.1"], [])


@pytest.mark.root
@pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
@pytest.mark.parametrize("backend", ["fusion", "gloo"])
def test_the_store_of_a_job_on_two_hosts_is_reached_over_the_daemons_alone(
    runtime_dir: Path, tmp_path: Path, backend: str
) -> None:
    """No worker listens on a network, and neither does a daemon but for its peers."""
    with Netlab(hosts=2) as lab:
        where = ",".join(f"{host.name}:2" for host in lab.hosts)
        words = [*fusionrun(), "-np", "4", "-H", where, "--rsh-agent", "ip netns exec {host}", sys.executable, SCRIPT]
        done = run(*words, "listens", f"backend={backend}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(done.stdout)
    assert [each["total"] for each in found] == [10.0] * 4
    if backend == "fusion":  # gloo's ranks listen for each other
        assert [each["listens"] for each in found] == [["127.0.0.1"], [], [], []]
    assert [each["master"] for each in found] == ["127.0.0.1"] * 4


def test_workers_on_two_hosts_need_a_secret(runtime_dir: Path, tmp_path: Path) -> None:
    """They meet in the store that rank 0's torch serves."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("0123456789abcdef" * 4)
    with Netlab(hosts=2) as lab:
        place = {"MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29400", "OMP_NUM_THREADS": "1"}
        for file in ("", str(secret)):
            workers = [
                forks.popen(
                    ["ip", "netns", "exec", lab.hosts[rank // 2].name, sys.executable, str(SCRIPT)],
                    forks.WORKER,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={
                        **os.environ,
                        **place,
                        "RANK": str(rank),
                        "WORLD_SIZE": "4",
                        "FUSION_JOB_SECRET_FILE": file,
                        "FUSION_RUNTIME_DIR": f"{runtime_dir}/{rank // 2}",
                    },
                )
                for rank in range(4)
            ]
            out, err = finished(*workers)
            if not file:
                assert err.count("this job runs on several hosts and its processes share no secret") == 4, err
                assert not out
        assert results(out) == [{"rank": rank, "total": 10.0} for rank in range(4)], err
