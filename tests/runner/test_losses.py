"""Jobs that lose a worker or a host: what can go on without goes on, and what cannot says why."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests import forks

pytestmark = pytest.mark.multiprocess

TRAIN = """
import contextlib, os, signal, sys, torch
import fusion_rt.torch as hvd
algorithm, victim, what = sys.argv[1:]
hvd.init()
model = torch.nn.Linear(30, 30)
hvd.broadcast_parameters(model.state_dict(), 0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), algorithm=algorithm
)
left = None
for step in range(10_000):
    if hvd.rank() == int(victim) and step == 10:
        open(os.environ["LOST"], "w").close()
        os.kill(int(os.environ.get("FUSION_TEST_PARENT", os.getppid())) if what == "host" else os.getpid(), 9)
        signal.pause()  # this process goes with its agent, and takes no other step before
    optimizer.zero_grad()
    model(torch.ones(4, 30)).square().mean().backward()
    optimizer.step()
    if left is None and os.path.exists(os.environ["LOST"]):
        left = step
        with contextlib.suppress(hvd.HorovodInternalError):
            hvd.barrier()  # which ends, well or not, when the rank is known to be lost; steps may be over before
    if left is not None and step == left + 50:
        break
print("ended", flush=True)
hvd.shutdown()
"""
HOSTS = ("-np", "3", "-H", "localhost:1,127.0.0.1:1,127.0.0.2:1", "--tolerate-losses")


@pytest.fixture(autouse=True)
def with_real_daemon(fusionrun) -> None:
    fusionrun.real_daemon = True


def train(fusionrun, monkeypatch, tmp_path, *arguments: str, hosts: tuple[str, ...] = HOSTS) -> tuple[int, str, str]:
    """Trains until a rank is lost, and for 50 more steps; returns exit status, output and errors."""
    monkeypatch.setenv("LOST", str(tmp_path / "lost"))
    result = fusionrun(*hosts, *forks.interpreter(forks.WORKER), "-c", TRAIN, *arguments, TEST_SETTLE="60")
    if "host" not in arguments:  # on a host that is lost nobody is left to clean up
        assert os.listdir(fusionrun.runtime_dir) == []
    return result.returncode, result.stdout, result.stderr


def test_partial_synchronisation_goes_on_without_a_worker(fusionrun, monkeypatch, tmp_path) -> None:
    status, out, err = train(fusionrun, monkeypatch, tmp_path, "partial(backup=1)", "1", "worker")
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0]<stdout>:ended", "[2]<stdout>:ended"]
    assert re.search("rank 1 .* was killed by SIGKILL.*; the job goes on without it", err)


@pytest.mark.parametrize(("algorithm", "victim"), [("dpsgd", 2), ("adpsgd", 0)])
def test_gossip_goes_on_without_a_host(fusionrun, monkeypatch, tmp_path, algorithm: str, victim: int) -> None:
    status, out, err = train(fusionrun, monkeypatch, tmp_path, algorithm, str(victim), "host")
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:ended" for rank in range(3) if rank != victim]
    assert f"node {victim} (host {('localhost', '127.0.0.1', '127.0.0.2')[victim]}) is lost" in err


@pytest.mark.parametrize(
    "algorithm",
    ["decoupled(steps=2, fragments=2, quorum=3)", pytest.param("noloco(steps=2)", marks=pytest.mark.long)],
)
def test_outer_steps_go_on_without_a_host_that_has_no_homes(fusionrun, monkeypatch, tmp_path, algorithm: str) -> None:
    hosts = (*HOSTS, "--shard-hosts", "localhost")
    status, out, err = train(fusionrun, monkeypatch, tmp_path, algorithm, "2", "host", hosts=hosts)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0]<stdout>:ended", "[1]<stdout>:ended"]
    assert "node 2 (host 127.0.0.2) is lost" in err


@pytest.mark.parametrize(
    ("algorithm", "what", "why"),
    [
        ("bsp", "worker", "bsp needs every rank"),
        ("asp", "host", r"it has the homes of buckets \d of 'optimizer\.1'"),
    ],
    ids=["synchronous", "home"],
)
def test_what_cannot_go_on_says_why(fusionrun, monkeypatch, tmp_path, algorithm: str, what: str, why: str) -> None:
    status, _, err = train(fusionrun, monkeypatch, tmp_path, algorithm, "1", what)
    assert status == 1
    for rank in (0, 2):
        assert re.search(
            rf"^\[{rank}\]<stderr>:.*HorovodInternalError: .*cannot go on without it: ({why})", err, re.M
        ), err


def test_without_the_switch_a_lost_worker_ends_the_job(fusionrun, monkeypatch, tmp_path) -> None:
    status, _, err = train(fusionrun, monkeypatch, tmp_path, "asp", "1", "worker", hosts=("-np", "2"))
    assert status == 1
    assert "goes on" not in err
    assert signal.SIGKILL.name in err
