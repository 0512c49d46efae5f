"""A real job of two ranks on two nodes: recorded, fetched while it runs, and explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fusion_rt.trace_format import Flush, Kind
from fusion_trace import buckets, summary, tensor
from fusion_trace import job as jobs
from fusion_trace.overlap import partitions
from fusion_trace.steps import all_steps, operations

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).resolve().parents[3]
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


def test_a_job_is_recorded_fetched_from_all_daemons_and_explained(runtime_dir: Path, tmp_path: Path) -> None:
    script, fetched, traces = tmp_path / "train.py", tmp_path / "fetched", tmp_path / "traces"
    script.write_text(SCRIPT)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "daemon", ROOT / "tools")))
    environment = {
        **os.environ, "PYTHONPATH": path, "FUSION_RUNTIME_DIR": str(runtime_dir), "FUSION_TRACE_DIR": str(traces),
        "HOROVOD_FUSION_THRESHOLD": "20000",
    }  # fmt: skip
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", "2", "-H", "localhost:1,127.0.0.1:1", sys.executable]
    ran = subprocess.run(
        [*command, str(script), str(fetched)], env=environment, capture_output=True, text=True, timeout=180
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(os.listdir(fetched)) == ["node-0.ring", "node-1.ring", "rank-0.ring", "rank-1.ring"]

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

    (plan,) = buckets.plans(whole)
    assert sum(nbytes for its in plan.tensors.values() for _, nbytes in its) == 3 * (64 * 64 + 64) * 4
    found = {bucket.name: bucket for bucket in buckets.find(whole)}
    assert set(plan.buckets.values()) <= set(found)
    reasons = {reason for bucket in found.values() for reason in bucket.flushes}
    assert reasons <= {reason.name.lower() for reason in Flush}
    assert [rank.steps for rank in summary.find(whole).ranks] == [STEPS - 1, STEPS - 1]
    lives = tensor.find(whole, "2.weight").lives
    assert len(lives) == STEPS


@pytest.mark.parametrize(("launcher", "session"), [("fusionrun", False), ("torchrun", True)])
def test_the_newest_job_of_any_launcher_is_found_without_a_word_of_where_it_is(
    tmp_path: Path, launcher: str, session: bool
) -> None:
    """As people do it who have read README.md: XDG_RUNTIME_DIR is there if they have logged in, or is not."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.partition("if hvd.rank()")[0])
    with tempfile.TemporaryDirectory(prefix="frt", dir="/tmp") as home:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "daemon", ROOT / "tools")))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSION_TRACE")}
        environment |= {"PYTHONPATH": path, "TMPDIR": home, "XDG_RUNTIME_DIR": f"{home}/session"}
        os.mkdir(environment["XDG_RUNTIME_DIR"], 0o700)
        if not session:
            del environment["XDG_RUNTIME_DIR"]

        def run(*command: str) -> str:
            ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=180)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            return ran.stdout

        start = {
            "fusionrun": [sys.executable, "-m", "fusion_rt.runner", "-np", "2", sys.executable, str(script)],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)],
        }
        run(*start[launcher])
        shown = json.loads(run(sys.executable, "-m", "fusion_trace", "summary", "--json"))
        assert [rank["steps"] for rank in shown["ranks"]] == [STEPS - 1, STEPS - 1]
        assert shown["handed_over"] > 0  # which the daemon's ring says
        (made,) = Path(home).glob("fusion_rt-traces-*")
        assert made.stat().st_mode & 0o777 == 0o700
        (job,) = made.iterdir()
        assert sorted(ring.name for ring in job.iterdir()) == ["node-0.ring", "rank-0.ring", "rank-1.ring"]
