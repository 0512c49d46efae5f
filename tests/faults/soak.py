"""Job after job on three hosts, under seeded random faults of every kind; every sum is checked.

    python -m tests.faults.soak            # or `make soak`; as root on hosts of network namespaces, else on loopback
    SOAK_SECONDS=3600 SOAK_SEED=7 SOAK_OUT=soak.json python -m tests.faults.soak
    SOAK_LONG_JOB=1 python -m tests.faults.soak         # one job that lives all the time

Most faults have to be survived: connections reset, links down, hosts cut off, slow or in one direction only, processes
stopped or hung, all shorter than the limits; every operation completes. Each job ends by a fatal one: then every
survivor raises within its limit and names the culprit, nothing is left behind, and the next job goes on from the step
of the survivors. In the end the model has to be that of a single process after all steps. Prints a table and a line of
JSON; the exit status is 0 when nothing was wrong, and only then the file SOAK_OUT is written: otherwise its name ends
with `.failed`. SOAK_LOOPBACK=1 leaves the hosts, and the faults of networks, out.

A long job has faults of the first kind only, and its resources may not grow after five minutes (a quarter of the time
if that is less), but for 4 MiB of memory.
"""

from __future__ import annotations

import contextlib
import itertools
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
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels import cpu
from tests import forks
from tests.faults import soak_faults
from tests.faults.jobs import Array
from tests.faults.soak_faults import Fatal, Fault
from tests.faults.soak_job import SoakError, SoakJob
from tests.faults.soak_worker import MODEL, reference

NODES = 3
RANKS = (1, 1, 1, 2)  # of a node, one of these
FAULTS = (4, 30)  # survived by each job, so that some daemons live long
STEPS = (1, 8)  # between two faults
# Allowed growth of a daemon's resources from the warm-up to the end. Connections that are being made again hold
# descriptors; memory grows by the largest need of each size of message, which malloc keeps.
FLAT = {"memory": 24 << 20, "descriptors": 12, "threads": 2, "arenas": 8}
WATCHED = 8  # samples of a daemon, at least, before it is judged
# The same of all processes of a long job, with their share of what is shared, and at any time after the warm-up.
FLAT_FOR_LONG = FLAT | {"memory": 4 << 20, "pss": 4 << 20}
WARM_UP_S = 300.0
WINDOWS = 10  # of the time after it, whose medians are compared
LONG_JOB = {
    "FUSION_TRACE_BUFFER": "2MiB",  # rings that are full before the warm-up ends
    # A single peer that is declared dead in a thousand faults, because this machine was busy, would end the job.
    "FUSION_HEARTBEAT_TIMEOUT": "12s",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20s",
}


class Soak:
    """A run of the soak.

    Args:
        seconds: for which new faults begin.
        seed: of everything that is random.
        lab: the hosts, or None.
        directory: for the daemons' files; short.
        long: whether it is one job.
    """

    def __init__(self, seconds: float, seed: int, lab: Netlab | None, directory: Path, long: bool = False) -> None:
        self._seconds = seconds
        self._long = long
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
        self.drift: dict[str, float] = dict.fromkeys(FLAT_FOR_LONG if long else FLAT, 0)
        self.longest = 0.0
        self.problems: list[str] = []

    @property
    def over(self) -> bool:
        return time.monotonic() > self._ends or len(self.problems) > 5

    def run(self) -> None:
        while not self.over and not (self._long and self.jobs):
            self.jobs += 1
            self._one_job()
            self._look_for_leftovers()
        if self._long and self.longest < self._seconds:
            self.problems.append(f"the job lived for {self.longest:.0f} s, and not for {self._seconds:g} s")
        if not np.array_equal(self._model, self._expected):
            self.mismatches += 1
            self.problems.append("the model is not what a single process makes of the same steps")

    def _one_job(self) -> None:
        sizes = [self._random.choice(RANKS) for _ in range(NODES)]
        job = SoakJob(self._lab, self._directory, sizes, self._step, self._model.tolist())
        if self._long:
            job.daemons.environment |= LONG_JOB
        began = time.monotonic()
        if self._long:
            self._ends = began + self._seconds
        last = "the start"
        try:
            job.start()
            for _ in itertools.count() if self._long else range(self._random.randint(*FAULTS)):
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
        if self._long and not self.problems:
            self.check_flat_for_long(job, began)
        elif not self._long:
            self.check_flat(job)
        self.take_over(job)

    def _survived(self, job: SoakJob) -> str:
        """Makes one fault, after which all have to go on. Returns its name."""
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
        """Ends a job, by a fatal fault or in good order. Returns the name of the end."""
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
        """Checks the ranks' results, and goes on from the last step that all ranks with a model have completed."""
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
        """Compares a daemon's resources in its last quarter with the second one; the first one is the warm-up."""
        for name, samples in job.samples.items():
            if len(samples) < WATCHED or name.startswith("rank"):
                continue
            quarter = len(samples) // 4
            for what, limit in FLAT.items():
                early = statistics.median(each[what] for each in samples[quarter : 2 * quarter])
                late = statistics.median(each[what] for each in samples[-quarter:])
                self.drift[what] = max(self.drift[what], late - early)
                if late - early > limit:
                    self.problems.append(f"job {self.jobs}: {what} of {name} rose from {early} to {late}")

    @property
    def warm_up(self) -> float:
        """Seconds of a long job in which its resources may still grow."""
        return min(WARM_UP_S, self._seconds / 4)

    def check_flat_for_long(self, job: SoakJob, began: float) -> None:
        """Compares every process's resources in each tenth of the time after the warm-up with the first tenth."""
        width = (self._seconds - self.warm_up) / WINDOWS
        for name, samples in job.samples.items():
            windows: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
            for sample in samples:
                windows[int((sample["at"] - began - self.warm_up) // width)].append(sample)
            if missing := set(range(WINDOWS)) - set(windows):
                self.problems.append(f"{name} was not looked at in {len(missing)} of {WINDOWS} parts of the time")
                continue
            for what, limit in FLAT_FOR_LONG.items():
                held = [statistics.median(each[what] for each in windows[part]) for part in range(WINDOWS)]
                rise = max(held) - held[0]
                self.drift[what] = max(self.drift[what], rise)
                if rise > limit:
                    medians = ", ".join(f"{median:.0f}" for median in held)
                    self.problems.append(f"{what} of {name} rose by {rise:.0f}, and may by {limit}: {medians}")

    def _look_for_leftovers(self) -> None:
        """Looks for processes and files that a job has left."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("FUSION_RUNTIME_DIR") == str(self._directory):
                    self.problems.append(f"job {self.jobs} left process {process.pid}: {' '.join(process.cmdline())}")
                    process.kill()

    def summary(self) -> dict[str, Any]:
        """Returns all counters of the run."""
        return {
            "passed": not self.problems,
            "problems": self.problems,
            "kind": "one long job" if self._long else "job after job",
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
            **({"warm_up_seconds": self.warm_up} if self._long else {}),
            "rise_of_a_process" if self._long else "drift_of_a_daemon": {
                what: int(most) for what, most in self.drift.items()
            },
        }


def show(summary: dict[str, Any]) -> None:
    """Prints a table for people, then a line of JSON."""
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
    if not summary["passed"]:
        console.print(f"FAILED: {len(summary['problems'])} problems")
    for problem in summary["problems"]:
        console.print(f"WRONG: {problem}", markup=False, highlight=False)
    print(json.dumps(summary), flush=True)


def write(path: Path, summary: dict[str, Any]) -> None:
    """Writes a result to a file, or, with problems, to one beside it with `.failed` in its name."""
    path = path if summary["passed"] else path.with_name(f"{path.name}.failed")
    path.write_text(json.dumps(summary, indent=1) + "\n")


def main() -> int:
    seconds = float(os.environ.get("SOAK_SECONDS", "1200"))
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1 << 31))
    why_not = "SOAK_LOOPBACK is set" if os.environ.get("SOAK_LOOPBACK") else preflight()
    long = bool(os.environ.get("SOAK_LONG_JOB"))
    print(f"SOAK_SEED={seed} SOAK_SECONDS={seconds:g}" + (f"; on loopback: {why_not}" if why_not else ""), flush=True)
    directory = Path(tempfile.mkdtemp(prefix="frt", dir="/tmp"))
    cpu.prepare([DTYPES["int64"]])  # compiling them takes longer than the first job may stand still
    before = len(os.listdir("/proc/self/fd"))
    try:
        with contextlib.ExitStack() as stack:
            lab = None if why_not else stack.enter_context(Netlab(hosts=NODES))
            soak = Soak(seconds, seed, lab, directory, long)
            soak.run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    after = len(os.listdir("/proc/self/fd")) - len(forks.descriptors())
    if after > before:
        soak.problems.append(f"this process has {after} descriptors, and had {before}")
    summary = soak.summary()
    show(summary)
    if out := os.environ.get("SOAK_OUT"):
        write(Path(out), summary)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
