"""Launchers other than `fusionrun` with several hosts: the workers find each other, and their daemons."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.netlab import Netlab, preflight
from tests import forks
from tests.launchers.conftest import HERE, TIMEOUT_S, fusionrun, horovodrun, logs, mpirun, run, torchrun

WORKER = [sys.executable, str(HERE / "worker.py")]
UNAVAILABLE = preflight()
RESTARTED = """
import pathlib, sys, torch
import fusion_rt.torch as hvd
hvd.init()
failed = pathlib.Path(sys.argv[1])
if hvd.rank() == 1 and not failed.exists():
    failed.touch()
    sys.exit("the first attempt fails here")
total = hvd.allreduce(torch.ones(1) * (hvd.rank() + 1), op=hvd.Sum).item()
hvd.shutdown()
hvd.init()
print("total", total, hvd.allgather_object(hvd.cross_rank()))
"""

pytestmark = pytest.mark.multiprocess
in_lab = [pytest.mark.root, pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")]


@pytest.fixture
def lab(runtime_dir: Path) -> Iterator[Netlab]:
    with Netlab(hosts=3) as made:
        yield made


@pytest.fixture(autouse=True)
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with the job's secret on all hosts, as docs/launchers.md says."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("FUSION_JOB_SECRET_FILE", str(path))


def results(*outputs: str) -> dict[int, dict[str, object]]:
    """What the workers printed, by rank; some launchers put something in front of each line."""
    found = [json.loads(text) for output in outputs for text in re.findall(r"\{.*?\}", output)]
    return {each["rank"]: each for each in found}


def run_in_lab(lab: Netlab, commands: Sequence[tuple[int, Sequence[str], Mapping[str, str]]]) -> list[str]:
    """Runs a command with additional variables on each of the hosts at once; their standard outputs."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}  # no name server answers
    processes = [
        lab.run(host, argv, env={**common, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for host, argv, environ in commands
    ]
    finished = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(err for _, err in finished)
    return [out for out, _ in finished]


def test_horovodrun(runtime_dir: Path, tmp_path: Path) -> None:
    """Two names of this machine are two hosts, with different numbers of slots, whose daemons meet at its store."""
    done = run(*horovodrun(), "-np", "3", "-H", "localhost:1,127.0.0.1:2", "--gloo", *WORKER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(done.stdout)
    assert sorted(found) == [0, 1, 2]
    assert all(each["total"] == [6] and each["ranks"] == [[0], [1, 2]] for each in found.values())
    assert logs(runtime_dir) == {}


@pytest.mark.usefixtures("runtime_dir")
class TestInALab:
    pytestmark = in_lab

    def test_torchrun_restarts_a_job(self, lab: Netlab, tmp_path: Path) -> None:
        """Its agents do not agree on how often, and its store keeps what the workers before have written."""
        script = tmp_path / "script.py"
        script.write_text(RESTARTED)
        place = f"{lab.hosts[0].address}:29400"
        words = [*torchrun(), "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "job"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place]
        python, arguments = forks.interpreter(forks.WORKER), [str(script), str(tmp_path / "failed")]
        outputs = run_in_lab(
            lab,
            [
                (host, [*words, "--local-addr", lab.hosts[host].address, "--no-python", *python, *arguments], {})
                for host in range(2)
            ],
        )
        assert (tmp_path / "failed").exists()
        assert [output.strip() for output in outputs] == ["total 3.0 [0, 1]"] * 2

    def test_mpirun_from_a_host_without_workers(self, lab: Netlab, tmp_path: Path) -> None:
        """Rank 0 is then on the first of the others; ranks go around the hosts."""
        reach = tmp_path / "reach"
        # Hosts that share a file system and a name also share Open MPI's folder for temporary files, unless told.
        folder = f'TMPDIR="{tmp_path}/$host"; mkdir -p "$TMPDIR"; export TMPDIR'
        reach.write_text(f'#!/bin/sh\nhost=$1\nshift\n{folder}\nexec ip netns exec "$host" sh -c "$*"\n')
        reach.chmod(0o700)
        hosts = ",".join(f"{host.name}:2" for host in lab.hosts[1:])
        flags = ["--mca", "plm_rsh_agent", str(reach), "-H", hosts, "--map-by", "node"]
        found = results(*run_in_lab(lab, [(0, [*mpirun(), *flags, *WORKER], {})]))
        assert sorted(found) == [0, 1, 2, 3]
        assert all(each["total"] == [10] and each["ranks"] == [[0, 2], [1, 3]] for each in found.values())

    def test_every_port_is_in_the_range(self, lab: Netlab) -> None:
        """All sockets that any process of a host listens on; the lab's hosts have no others."""
        hosts = [host.name for host in lab.hosts[:2]]
        flags = ["-np", "4", "-H", f"{hosts[0]}:2,{hosts[1]}:2", "--rsh-agent", lab.agent]
        flags += ["--network-interface", "eth0", "--ports", "30000-30010"]
        done = run(*fusionrun(), *flags, *WORKER, cwd=HERE)
        assert done.returncode == 0, done.stderr
        found = results(done.stdout)
        assert sorted(found) == [0, 1, 2, 3]
        for rank, each in found.items():
            address = lab.hosts[rank // 2].address
            assert each["listening"] == [[address, 30000], [address, 30001]], "control and payload of one daemon"

    def test_ports_that_are_used_up(self, lab: Netlab) -> None:
        hosts = ",".join(host.name for host in lab.hosts[:2])
        flags = ["-np", "2", "-H", hosts, "--rsh-agent", lab.agent, "--network-interface", "eth0"]
        done = run(*fusionrun(), *flags, "--ports", "30000", *WORKER, cwd=HERE)
        assert done.returncode == 1
        assert "for its peers: all ports of FUSION_PORTS=30000-30000 are taken on this host" in done.stderr

    def test_advice_from_measured_links(self, lab: Netlab) -> None:
        for host in lab.hosts:
            lab.set_rate(host, "100mbit")
        hosts = ",".join(host.name for host in lab.hosts[:2])
        flags = ["-np", "2", "-H", hosts, "--rsh-agent", lab.agent, "--network-interface", "eth0"]
        done = run(*fusionrun(), "--advise", "100", "250", *flags, cwd=HERE)
        assert done.returncode == 0, done.stderr
        told = re.search(r"between the 2 hosts carries ([0-9.]+) Mbit/s, with a latency of", done.stdout)
        assert told is not None, done.stdout
        # After every pause the link lets half a probe through at once, and a busy machine pauses often.
        assert float(told[1]) < 250, "the link was measured, not the lab's unshaped 10 Gbit/s or more"
        assert "Dense gradients do not pay off" in done.stdout
        assert done.stdout.splitlines()[-1].startswith(f"Start it with: fusionrun -np 2 -H {hosts} --rsh-agent ")

    def test_srun(self, lab: Netlab, runtime_dir: Path) -> None:
        """Its variables, set by hand: three tasks on two nodes."""
        step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_NODES": "2"}
        step["FUSION_PORTS"] = "30000-30040"  # of daemons, and of the store at which they meet
        step["SLURM_STEP_NODELIST"] = lab.hosts[0].name[:-1] + "[0-1]"
        tasks = ((0, 0, 0), (1, 1, 0), (2, 0, 1))  # rank, node, local rank
        commands = [
            (
                node,
                WORKER,
                {
                    **step,
                    "SLURM_PROCID": str(rank),
                    "SLURM_NODEID": str(node),
                    "SLURM_LOCALID": str(local),
                    "SLURMD_NODENAME": lab.hosts[node].name,
                },
            )
            for rank, node, local in tasks
        ]
        found = results(*run_in_lab(lab, commands))
        assert all(each["total"] == [6] and each["ranks"] == [[0, 2], [1]] for each in found.values())
        assert sorted(found) == [0, 1, 2]
        assert all(30000 <= port <= 30040 for each in found.values() for _, port in each["listening"])  # type: ignore[attr-defined]
        # Without one of the hosts, the others say which it is.
        first = lab.run(0, WORKER, env={**os.environ, **commands[0][2], "HOROVOD_START_TIMEOUT": "2"},
                        stderr=subprocess.PIPE, text=True)  # fmt: skip
        _, err = first.communicate(timeout=TIMEOUT_S)
        assert f"ranks 1, 2 of hosts {lab.hosts[1].name} did not come to the rendezvous" in err
