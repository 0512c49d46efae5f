"""Job after job on three hosts, under seeded random faults of every kind; every sum is checked.

    python -m tests.faults.soak            # or `make soak`; as root on hosts of network namespaces, else on loopback
    SOAK_SECONDS=3600 SOAK_SEED=7 SOAK_OUT=soak.json python -m tests.faults.soak

Most faults have to be survived: connections reset, links down, hosts cut off, slow or in one direction only, processes
stopped or hung, all shorter than the limits; every operation completes. Each job ends by a fatal one: then every
survivor raises within its limit and names the culprit, nothing is left behind, and the next job goes on from where the
survivors were. In the end the model is what a single process makes of all steps. Prints a table and a line of JSON; the
exit status is 0 when nothing was wrong. SOAK_LOOPBACK=1 leaves the hosts, and the faults of networks, out.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.netlab import Netlab, preflight
from tests.faults import soak_faults
from tests.faults.jobs import Array
from tests.faults.soak_faults import Fatal, Fault
from tests.faults.soak_job import SoakError, SoakJob
from tests.faults.soak_worker import MODEL, reference

NODES = 3
RANKS = (1, 1, 1, 2)  # of a node, one of these
FAULTS = (4, 30)  # survived by each job, so that some daemons live long
STEPS = (1, 8)  # between two faults
# Flat: what a daemon holds after a warm-up and in the end may differ by so much. Connections that are being made again
# hold descriptors; memory goes up by what each size of message has needed at most, which malloc keeps.
FLAT = {"memory": 24 << 20, "descriptors": 12, "threads": 2, "arenas": 8}
WATCHED = 8  # samples of a daemon, at least, before it is judged


class Soak:
    """A run.

    Args:
        seconds: how long to begin new faults for.
        seed: of everything that is random.
        lab: the hosts, or None.
        directory: for the daemons' files; short.
    """

    def __init__(self, seconds: float, seed: int, lab: Netlab | None, directory: Path) -> None:
        self._seconds = seconds
        self._seed = seed
        self._lab = lab
        self._directory = directory
        self._random = random.Random(seed)
        self._ends = time.monotonic() + seconds
        self._model: Array = np.zeros(MODEL, np.int64)
        self._step = 0
        self._expected: Array = np.zeros(MODEL, np.int64)
        self._fatal: list[Fatal] = []  # that are still to come in this round of all
        self.faults: Counter[str] = Counter()
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        self.jobs = self.operations = self.mismatches = 0
        self.megabytes = 0.0
        self.drift: dict[str, float] = dict.fromkeys(FLAT, 0)
        self.longest = 0.0
        self.problems: list[str] = []

    @property
    def over(self) -> bool:
        return time.monotonic() > self._ends or len(self.problems) > 5

    def run(self) -> None:
        while not self.over:
            self.jobs += 1
            self._one_job()
            self._look_for_leftovers()
        if not np.array_equal(self._model, self._expected):
            self.mismatches += 1
            self.problems.append("the model is not what a single process makes of the same steps")

    def _one_job(self) -> None:
        sizes = [self._random.choice(RANKS) for _ in range(NODES)]
        job = SoakJob(self._lab, self._directory, sizes, self._step, self._model.tolist())
        began = time.monotonic()
        last = "the start"
        try:
            job.start()
            for _ in range(self._random.randint(*FAULTS)):
                if self.over:
                    break
                last = self._survived(job)
            last = self._end(job)
        except (SoakError, AssertionError, OSError) as error:
            self.problems.append(f"job {self.jobs}, {last}: {error}")
            for state in job.ranks.values():
                state.process.kill()
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
            self.problems += [f"job {self.jobs}, {last}: {what}" for what in job.close()]
        self.check_flat(job)
        self.take_over(job)

    def _survived(self, job: SoakJob) -> str:
        """One fault, after which all have to go on. Returns its name."""
        choice: tuple[Fault, ...] = soak_faults.OF_PROCESSES
        if self._lab is not None and self._random.random() < 0.6:
            choice = soak_faults.OF_NETWORK
        fault = self._random.choice(choice)
        fault(job, self._random)
        self.faults[fault.__name__] += 1
        try:
            job.go_on(self._random.randint(*STEPS))
        except SoakError as error:
            raise SoakError(f"after {fault.__name__}: {error}") from None
        job.sample()
        return fault.__name__

    def _end(self, job: SoakJob) -> str:
        """The end of a job: a fatal fault, or a good one. Returns its name."""
        if self.over:
            job.stop()
            return "the end"
        if not self._fatal:  # each kind once before any kind comes again
            of_network = soak_faults.FATAL_OF_NETWORK if self._lab is not None else ()
            self._fatal = [*soak_faults.FATAL_OF_PROCESSES, *of_network]
            self._random.shuffle(self._fatal)
        fatal = self._fatal.pop()
        self.faults[fatal.__name__] += 1
        with fatal(job, self._random) as blow:
            took, wrong = soak_faults.check(job, blow)
        self.took[fatal.__name__].append(took)
        self.problems += [f"job {self.jobs}, {fatal.__name__}: {what}" for what in wrong]
        return fatal.__name__

    def take_over(self, job: SoakJob) -> None:
        """Checks what the ranks have, and goes on from the last step that all who tell have completed."""
        for rank, state in job.ranks.items():
            self.operations += state.operations
            self.megabytes += state.elements * 8 / 1e6
            self.mismatches += len(state.wrong)
            if state.wrong:
                self.problems.append(f"job {self.jobs}: rank {rank} got wrong results in steps {state.wrong[:10]}")
        told = [state.models for state in job.ranks.values() if state.models]
        common = set.intersection(*(set(models) for models in told)) if told else set()
        if not common:
            steps = [sorted(models) for models in told]
            self.problems.append(f"job {self.jobs}: no step was completed by all who are left: {steps}")
            return
        step = max(common)
        models = [models[step] for models in told]
        if any(model != models[0] for model in models):
            self.mismatches += 1
            self.problems.append(f"job {self.jobs}: ranks differ after step {step}")
        self._expected = reference(self._expected, range(job.topology.size), range(self._step, step))
        self._model, self._step = np.array(models[0], np.int64), step
        if not np.array_equal(self._model, self._expected):
            self.mismatches += 1
            self.problems.append(f"job {self.jobs}: the model differs from a single process's after step {step}")
            self._expected = self._model

    def check_flat(self, job: SoakJob) -> None:
        """What a daemon held in its last quarter against its second one; the first one is warming up."""
        for node, samples in job.samples.items():
            if len(samples) < WATCHED:
                continue
            quarter = len(samples) // 4
            for what, limit in FLAT.items():
                early = statistics.median(each[what] for each in samples[quarter : 2 * quarter])
                late = statistics.median(each[what] for each in samples[-quarter:])
                self.drift[what] = max(self.drift[what], late - early)
                if late - early > limit:
                    self.problems.append(f"job {self.jobs}: {what} of node {node}'s daemon rose from {early} to {late}")

    def _look_for_leftovers(self) -> None:
        """Of a job that is over: processes, and files of daemons that could still remove theirs."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("FUSION_RUNTIME_DIR") == str(self._directory):
                    self.problems.append(f"job {self.jobs} left process {process.pid}: {' '.join(process.cmdline())}")
                    process.kill()

    def summary(self) -> dict[str, Any]:
        """All that was counted."""
        return {
            "seed": self._seed,
            "seconds": self._seconds,
            "hosts": "network namespaces" if self._lab is not None else "loopback",
            "jobs": self.jobs,
            "longest_job_seconds": round(self.longest, 1),
            "faults": dict(sorted(self.faults.items())),
            "operations": self.operations,
            "megabytes": round(self.megabytes),
            "steps": self._step,
            "mismatches": self.mismatches,
            "seconds_until_all_raised": {
                kind: {"median": round(statistics.median(took), 3), "most": round(max(took), 3)}
                for kind, took in sorted(self.took.items())
            },
            "drift_of_a_daemon": {what: int(most) for what, most in self.drift.items()},
            "problems": self.problems,
        }


def show(summary: dict[str, Any]) -> None:
    """A table for people, then a line of JSON."""
    table = Table(title=f"{summary['jobs']} jobs on {summary['hosts']}, seed {summary['seed']}")
    table.add_column("fault")
    table.add_column("times", justify="right")
    table.add_column("until all raised: median, most [s]", justify="right")
    for kind, times in summary["faults"].items():
        took = summary["seconds_until_all_raised"].get(kind)
        table.add_row(kind, str(times), f"{took['median']:.2f}  {took['most']:.2f}" if took else "")
    console = Console()
    console.print(table)
    faults = sum(summary["faults"].values())
    console.print(f"{faults} faults, {summary['operations']} operations, {summary['mismatches']} mismatches")
    for problem in summary["problems"]:
        console.print(f"WRONG: {problem}", markup=False, highlight=False)
    print(json.dumps(summary), flush=True)


def main() -> int:
    seconds = float(os.environ.get("SOAK_SECONDS", "1200"))
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1 << 31))
    why_not = "SOAK_LOOPBACK is set" if os.environ.get("SOAK_LOOPBACK") else preflight()
    print(f"SOAK_SEED={seed} SOAK_SECONDS={seconds:g}" + (f"; on loopback: {why_not}" if why_not else ""), flush=True)
    directory = Path(tempfile.mkdtemp(prefix="frt", dir="/tmp"))
    before = len(os.listdir("/proc/self/fd"))
    try:
        with contextlib.ExitStack() as stack:
            lab = None if why_not else stack.enter_context(Netlab(hosts=NODES))
            soak = Soak(seconds, seed, lab, directory)
            soak.run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    after = len(os.listdir("/proc/self/fd"))
    if after > before:
        soak.problems.append(f"this process has {after} descriptors, and had {before}")
    summary = soak.summary()
    show(summary)
    if out := os.environ.get("SOAK_OUT"):
        Path(out).write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
