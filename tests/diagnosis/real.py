"""python -m tests.diagnosis.real [FAULT...]: real jobs on four hosts of one machine, with known faults, as root.

Compute is `sleep`, so that a machine with few processors can be four hosts; daemons, links and clocks are real. Each
rank notes by itself when its steps end, which is the truth beside what the tools say.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.netlab import Netlab
from fusion_rt.tracing.reader import read_header
from fusion_trace.analyse import diff, endings, stragglers
from fusion_trace.read import job as jobs
from fusion_trace.report import stragglers_page

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
SCRIPT = """\
import json, os, sys, time
import torch
import fusion_rt.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
fault = json.loads(os.environ["FAULT"])


class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(512, 512)

    def forward(self, x):
        time.sleep(0.02)
        return self.inner(x)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(Slow() for _ in range(3)))

    def forward(self, x):
        mine = fault.get("rank") == hvd.rank() and step % fault.get("every", 1) == 0
        time.sleep(fault["more"] if mine else 0)
        return self.layers(x)


model = Model()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
ends = []
directory = sys.argv[1]
open(f"{directory}/pid-{hvd.rank()}", "w").write(str(os.getpid()))
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    model(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()
    ends.append(time.perf_counter())
    open(f"{directory}/at-{hvd.rank()}", "w").write(str(step))
json.dump(ends, open(f"{directory}/ends-{hvd.rank()}", "w"))
hvd.barrier()
"""


@dataclass(frozen=True)
class RealFault:
    """A fault of a real job.

    Attributes:
        says: the fault in words.
        right: whether what the tools say of it is right: findings, who died, and all that they say.
        environment: what the script is told. rate: of host 2. meanwhile: what is done once step 15 is reached.
        only: the node of which the rings are looked at; None: all.
        before: what the script of an earlier job was told, with which `diff` compares this one; None: nothing is
            compared.
        steps: of each job.
    """

    says: str
    right: Callable[[tuple[stragglers.Finding, ...], endings.Endings], bool]
    environment: dict[str, float] | None = None
    rate: str | None = None
    meanwhile: Callable[[Path], None] | None = None
    only: int | None = None
    before: dict[str, float] | None = None
    steps: int = STEPS


def _pid(directory: Path, rank: int) -> int:
    return int((directory / f"pid-{rank}").read_text())


def _stop(directory: Path) -> None:
    pid = _pid(directory, 1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(pid, signal.SIGCONT)


def _kill_worker(directory: Path) -> None:
    os.kill(_pid(directory, 2), signal.SIGKILL)


def _kill_daemon(directory: Path) -> None:
    """Kills the daemon of node 3: of the job's daemons, the one whose ring says so."""
    (ring,) = directory.glob("traces/*/node-3.ring")
    os.kill(read_header(str(ring)).pid, signal.SIGKILL)


def _only(findings: tuple[stragglers.Finding, ...], **wanted: object) -> bool:
    return len(findings) == 1 and all(getattr(findings[0], name) == value for name, value in wanted.items())


FAULTS = {
    "always": RealFault(
        "rank 2 +62 ms in forward, every step",
        lambda found, _: _only(found, cause="compute", rank=2, detail="forward"),
        {"rank": 2, "more": 0.062},
    ),
    "fifth": RealFault(
        "rank 2 +41 ms, every 5th step",
        lambda found, _: _only(found, rank=2, every=5),
        {"rank": 2, "more": 0.041, "every": 5},
    ),
    "twelfth": RealFault(
        "rank 2 +1,000 ms, every 12th step",
        lambda found, _: _only(found, rank=2, every=12),
        {"rank": 2, "more": 1.0, "every": 12},
    ),
    "nothing": RealFault("nothing", lambda found, _: not found),
    "host": RealFault("host 2 at 100 Mbit/s", lambda found, _: _only(found, cause="wire", node=2), rate="100mbit"),
    "stop": RealFault("rank 1 stopped for 5 s", lambda found, _: _only(found, rank=1), meanwhile=_stop),
    "spikes": RealFault(
        "rank 2's spikes in every 12th step +36 % (a step of 183 ms becomes one of 249)",
        lambda found, _: any(each.rank == 2 for each in found),
        {"rank": 2, "more": 0.166, "every": 12},
        before={"rank": 2, "more": 0.1, "every": 12},
        steps=121,
    ),
    "worker": RealFault(
        "rank 2 killed",
        lambda _, ended: [(each.what, each.number) for each in ended.dead] == [("rank", 2)],
        meanwhile=_kill_worker,
    ),
    "daemon": RealFault(
        "the daemon of node 3 killed",
        lambda _, ended: ("node", 3) in {(each.what, each.number) for each in ended.dead[:1]},
        meanwhile=_kill_daemon,
    ),
    "one host": RealFault(
        "rank 2 +62 ms, rings of host 0 only", lambda found, _: not found, {"rank": 2, "more": 0.062}, only=0
    ),
}


def run(fault: RealFault, home: Path) -> None:
    """Runs a job with a fault; its rings are in `home/traces`, and those of one before it in `home/before/traces`."""
    if fault.before is not None:
        (home / "before").mkdir()
        run(replace(fault, environment=fault.before, before=None), home / "before")
    (home / "train.py").write_text(SCRIPT)
    rates = {2: fault.rate} if fault.rate else {}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "daemon", ROOT / "tools")))
    environment = {
        **os.environ, "PYTHONPATH": path, "FAULT": json.dumps(fault.environment or {"more": 0}), "OMP_NUM_THREADS": "1",
        "FUSION_TRACE_DIR": str(home / "traces"), "FUSION_RUNTIME_DIR": str(home / "run"),
    }  # fmt: skip
    with Netlab(4, "1gbit", rates=rates) as lab:
        names = ",".join(f"{host.name}:1" for host in lab.hosts)
        command = [
            sys.executable, "-m", "fusion_rt.runner", "-np", "4", "-H", names, "--rsh-agent", lab.agent,
            "--trace-dir", str(home / "traces"), sys.executable, str(home / "train.py"), str(home), str(fault.steps),
        ]  # fmt: skip
        job = lab.run(
            None, command, env=environment, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            if fault.meanwhile is not None:
                _wait_for_step(home, 15, job)
                fault.meanwhile(home)
            output, _ = job.communicate(timeout=300)
        finally:
            job.kill()
        if fault.meanwhile in (None, _stop) and job.returncode:
            raise RuntimeError(output)


def _wait_for_step(home: Path, step: int, job: subprocess.Popen[str]) -> None:
    while job.poll() is None:
        try:
            if int((home / "at-0").read_text() or 0) >= step:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.05)


def explain(fault: RealFault, home: Path) -> bool:
    """Prints what the tools say of a job, and beside it what its script noted. Returns whether they are right."""
    pattern = "*.ring" if fault.only is None else f"*-{fault.only}.ring"
    trace = jobs.load([str(path) for path in home.glob(f"traces/*/{pattern}")], "")
    found, ended = stragglers.find(trace), endings.find(trace)
    well = fault.right(found, ended)
    compared = []
    if fault.before is not None:
        earlier = jobs.load([str(path) for path in home.glob("before/traces/*/*.ring")], "")
        difference = diff.compare(diff.samples(earlier), diff.samples(trace))
        gate = diff.gate(difference, 0.05)
        well = well and gate.slower
        compared = [f"diff: {diff.verdict(difference)}", f"diff --fail-above 5%: {gate.what}"]
    print(f"{fault.says}: {'right' if well else 'WRONG'}")
    for each in found:
        print(f"    {stragglers_page.sentence(trace, each)}")
    if not found and not ended.dead:
        print(f"    {stragglers_page.nobody(trace, fault.steps - 1)[0]}")
    for sentence in endings.sentences(trace, ended):
        print(f"    {sentence}")
    for sentence in compared:
        print(f"    {sentence}")
    ends = [json.loads(path.read_text()) for path in home.glob("ends-*")]
    if ends:
        steps = sorted(after - before for before, after in pairwise(ends[0]))
        middle = steps[len(steps) // 2]
        print(f"    by the script's own clock: {len(steps)} steps, {sum(steps):.2f} s, median {middle:.4f} s")
    print(flush=True)
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument(
        "--keep", type=Path, help="directory for what the jobs leave; those that are there do not run again"
    )
    options = parser.parse_args()
    right = []
    for name in options.faults or FAULTS:
        with tempfile.TemporaryDirectory(prefix="frt", dir="/tmp") as directory:
            home = Path(directory) if options.keep is None else options.keep / name.replace(" ", "-")
            if not home.exists() or not any(home.iterdir()):
                home.mkdir(parents=True, exist_ok=True)
                run(FAULTS[name], home)
            right.append(explain(FAULTS[name], home))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
