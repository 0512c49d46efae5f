"""A real job of two ranks on two nodes: recorded, fetched while it runs, and explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion_rt.tracing.format import Flush, Kind
from fusion_trace.analyse import bucket_times, summary, tensor
from fusion_trace.analyse.overlap import partitions
from fusion_trace.read import job as jobs
from fusion_trace.read.operations import all_steps, operations
from fusion_trace.read.span_columns import common, pair_columns, phase_columns, union_of
from tests import forks

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
SCRIPT = f"""\
import subprocess, sys
import torch
import fusion_rt.torch as hvd

hvd.init()
torch.manual_seed(1)
layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
if hvd.rank() == 0:
    subprocess.run([sys.executable, "-m", "fusion_trace", "collect", "--json", "--out", sys.argv[1]], check=True)
hvd.barrier()
"""


DDP = f"""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("fusion")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range({STEPS}):
    if dist.get_rank() == 0:
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)  # the other rank waits for this one's buffers meanwhile
    optimizer.zero_grad()
    ddp(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """Where temporary files are; that of pytest is too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="frt", dir="/tmp") as path:
        yield Path(path)


def run(home: Path, *command: str, session: bool = False) -> str:
    """What a command writes, run as by people who have read README.md: no variable says where anything is, and
    XDG_RUNTIME_DIR is there if they have logged in (`session`), or is not."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSION_TRACE")}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "daemon", ROOT / "tools")))
    environment |= {"PYTHONPATH": path, "TMPDIR": str(home), "HOROVOD_FUSION_THRESHOLD": "20000"}
    environment.pop("XDG_RUNTIME_DIR", None)
    if session:
        environment["XDG_RUNTIME_DIR"] = str(home / "session")
        (home / "session").mkdir(mode=0o700, exist_ok=True)
    ran = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def the_newest(home: Path, session: bool = False) -> Path:
    """The directory of the only job, after it has been found without a word of where it is."""
    shown = json.loads(run(home, sys.executable, "-m", "fusion_trace", "summary", "--json", session=session))
    assert [rank["steps"] for rank in shown["ranks"]] == [STEPS - 1, STEPS - 1]
    assert shown["handed_over"] > 0  # which the daemon's ring says
    (made,) = home.glob("fusion_rt-traces-*")
    assert made.stat().st_mode & 0o777 == 0o700
    (job,) = made.iterdir()
    return job


def test_a_job_is_recorded_fetched_from_all_daemons_found_and_explained(home: Path, tmp_path: Path) -> None:
    script, fetched = tmp_path / "train.py", tmp_path / "fetched"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", "2", "-H", "localhost:1,127.0.0.1:1"]
    run(home, *command, *forks.interpreter(forks.WORKER), str(script), str(fetched))
    rings = ["node-0.ring", "node-1.ring", "rank-0.ring", "rank-1.ring"]
    assert sorted(os.listdir(fetched)) == rings
    job = the_newest(home)
    assert sorted(os.listdir(job)) == rings
    traces = job.parent

    whole, trace = jobs.load([], str(traces)), jobs.load([str(fetched)], str(traces))
    assert trace.job == whole.job
    assert trace.problems == whole.problems == ()
    for process in trace.processes:  # what was fetched is the beginning of what was recorded in the end
        times = process.of(Kind.READY, Kind.SUBMITTED)["time"]
        later = next(each for each in whole.processes if str(each) == str(process)).of(Kind.READY, Kind.SUBMITTED)
        assert 0 < len(times) <= len(later)
    for each in (trace, whole):
        assert {rank: len(steps) for rank, steps in all_steps(each).items()} == {0: STEPS - 1, 1: STEPS - 1}
        for part in partitions(each):
            assert sum(part.parts.values()) == part.ns > 0
            assert min(part.parts.values()) >= 0

    # Every bucket of every step has been through all hands.
    planned = [operation for key, operation in operations(whole).items() if key.plan]
    assert len(planned) == STEPS * len({operation.key.name for operation in planned})
    for operation in planned:
        assert sorted(operation.workers) == sorted(operation.daemons) == [0, 1]
        for rank, mine in operation.workers.items():
            there = operation.daemons[rank]  # a rank a node
            assert mine.submitted is not None
            assert mine.done is not None
            assert there.run_begin is not None
            assert mine.submitted <= there.ready[rank] <= there.run_begin <= there.answered[rank] <= mine.done
        assert operation.chunks
        for chunk in operation.chunks:
            assert None not in (chunk.sent, chunk.received, chunk.taken)

    (plan,) = bucket_times.plans(whole)
    assert sum(nbytes for its in plan.tensors.values() for _, nbytes in its) == 3 * (64 * 64 + 64) * 4
    found = {bucket.name: bucket for bucket in bucket_times.find(whole)}
    assert set(plan.buckets.values()) <= set(found)
    reasons = {reason for bucket in found.values() for reason in bucket.flushes}
    assert reasons <= {reason.name.lower() for reason in Flush}
    assert [rank.steps for rank in summary.find(whole).ranks] == [STEPS - 1, STEPS - 1]
    lives = tensor.find(whole, "2.weight").lives
    assert len(lives) == STEPS


def test_a_job_that_torchrun_has_started_is_found_in_a_session(home: Path) -> None:
    script = home / "train.py"
    script.write_text(SCRIPT.partition("if hvd.rank()")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    run(home, *command, *forks.interpreter(forks.WORKER), str(script), session=True)
    assert sorted(os.listdir(the_newest(home, session=True))) == ["node-0.ring", "rank-0.ring", "rank-1.ring"]


def test_plain_ddp_of_the_backend_has_steps_whose_waits_are_no_compute(home: Path) -> None:
    script = home / "train.py"
    script.write_text(DDP)
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", "2", "-H", "localhost:1,127.0.0.1:1"]
    run(home, *command, *forks.interpreter(forks.WORKER), str(script))
    whole = jobs.load([str(the_newest(home))], str(home))
    assert whole.command.endswith("train.py")
    for part in partitions(whole):
        assert sum(part.parts.values()) == part.ns
    assert sum(part.exposed + part.waiting for part in partitions(whole)) > 0  # of the rank that is the first, often
    # Whoever waits for the other's buffers does that in its forward pass.
    waits = pair_columns(whole.workers[1], Kind.WAIT_BEGIN, Kind.WAIT_END)
    passes = phase_columns(whole.workers[1], Kind.FORWARD_BEGIN, Kind.FORWARD_END)
    assert len(common(union_of(*waits), union_of(*passes)).begin) > 0
