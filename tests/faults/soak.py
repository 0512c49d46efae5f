"""Job after job on three hosts, under seeded random faults of every kind; every sum is checked.

    python -m tests.faults.soak            # or `make soak`; as root on hosts of network namespaces, else on loopback
    python -m tests.faults.soak --seconds 3600 --seed 7 --out soak.json
    python -m tests.faults.soak --kind long             # one job that lives all the time
    python -m tests.faults.soak --kind elastic          # one under fusionrun that lives through losses, too

Most faults have to be survived: connections reset, links down, hosts cut off, slow or in one direction only, processes
stopped or hung, all shorter than the limits; every operation completes. Each job ends by a fatal one: then every
survivor raises within its limit and names the culprit, nothing is left behind, and the next job goes on from the step
of the survivors. In the end the model has to be that of a single process after all steps. Prints a table and a line of
JSON; the exit status is 0 when nothing was wrong, and only then the file of `--out` is written: otherwise its name ends
with `.failed`. `--loopback` leaves the hosts, and the faults of networks, out. The variables SOAK_SECONDS, SOAK_SEED,
SOAK_OUT, SOAK_LONG_JOB=1 and SOAK_LOOPBACK=1 do the same.

A long job has faults of the first kind only, and its resources may not grow after five minutes (a quarter of the time
if that is less), but for 4 MiB of memory.

An elastic job (`soak_elastic`) has faults of the first kind, and between them losses: workers, daemons, agents and
hosts that are killed or stand still, hosts that are cut off, newcomers and donors that die while one gives the other
the state. Others go on, and all come back. Each step is checked, and so is what its processes hold.
"""

from __future__ import annotations

import argparse
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
from tests.faults import soak_faults, soak_flat, soak_losses
from tests.faults.jobs import Array
from tests.faults.soak_elastic import HOSTS, ElasticSoak
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

    def check_flat_for_long(self, job: SoakJob, began: float) -> None:
        """Compares every process's resources in each tenth of the time after the warm-up with the first tenth."""
        for name, samples in job.samples.items():
            held = soak_flat.medians(samples, began, self._seconds)
            if missing := soak_flat.WINDOWS - len(held):
                self.problems.append(f"{name} was not looked at in {missing} of {soak_flat.WINDOWS} parts of the time")
                continue
            for what, limit in FLAT_FOR_LONG.items():
                rise = soak_flat.rise(held, what)
                self.drift[what] = max(self.drift[what], rise)
                if rise > limit:
                    medians = ", ".join(f"{each[what]:.0f}" for each in held)
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
            **({"warm_up_seconds": soak_flat.warm_up(self._seconds)} if self._long else {}),
            "rise_of_a_process" if self._long else "drift_of_a_daemon": {
                what: int(most) for what, most in self.drift.items()
            },
        }


def show(summary: dict[str, Any]) -> None:
    """Prints a table for people, then a line of JSON."""
    table = Table(title=f"{summary['kind']}, seed {summary['seed']}")
    table.add_column("fault")
    table.add_column("times", justify="right")
    if "by_loss" in summary:
        for title in ("from the commit", "pause: median, most [s]", "until all are back: median, most [s]"):
            table.add_column(title, justify="right")
    else:
        table.add_column("until all raised: median, most [s]", justify="right")
    for kind, times in summary["faults"].items():
        if loss := summary.get("by_loss", {}).get(kind):
            took = [
                f"{told['median']:.2f}  {told['most']:.2f}" for told in (loss["pause_seconds"], loss["back_seconds"])
            ]
            table.add_row(kind, str(times), str(loss["from_the_commit"]), *took)
        else:
            raised = summary.get("seconds_until_all_raised", {}).get(kind)
            table.add_row(kind, str(times), f"{raised['median']:.2f}  {raised['most']:.2f}" if raised else "")
    console = Console()
    console.print(table)
    console.print(f"{sum(summary['faults'].values())} faults, {summary['steps']} steps")
    if not summary["passed"]:
        console.print(f"FAILED: {len(summary['problems'])} problems")
    for problem in summary["problems"]:
        console.print(f"WRONG: {problem}", markup=False, highlight=False)
    print(json.dumps(summary), flush=True)


def write(path: Path, summary: dict[str, Any]) -> None:
    """Writes a result to a file, or, with problems, to one beside it with `.failed` in its name."""
    path = path if summary["passed"] else path.with_name(f"{path.name}.failed")
    path.write_text(json.dumps(summary, indent=1) + "\n")


def options() -> argparse.Namespace:
    """Reads the command line; the variables that `make soak` documents are its defaults."""
    said = os.environ.get
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("jobs", "long", "elastic")
    parser.add_argument("--kind", choices=kinds, default="long" if said("SOAK_LONG_JOB") else "jobs")
    parser.add_argument("--seconds", type=float, default=float(said("SOAK_SECONDS", "1200")), help="(%(default)g)")
    parser.add_argument("--seed", type=int, default=int(said("SOAK_SEED") or random.SystemRandom().randrange(1 << 31)))
    parser.add_argument("--out", type=Path, default=said("SOAK_OUT"), metavar="FILE", help="for the result, as JSON")
    parser.add_argument("--loopback", action="store_true", default=bool(said("SOAK_LOOPBACK")))
    parser.add_argument("--residuals", action="store_true", help="a codec that has one, in an elastic job")
    names = [loss.__name__ for loss in soak_losses.LOSSES]
    parser.add_argument("--losses", nargs="+", choices=names, default=names, help="those of an elastic job (all)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for what an elastic job says, and its notes")
    return parser.parse_args()


def main() -> int:
    asked = options()
    why_not = "it was asked for" if asked.loopback else preflight()
    told = f"SOAK_SEED={asked.seed} SOAK_SECONDS={asked.seconds:g}"
    print(told + (f"; on loopback: {why_not}" if why_not else ""), flush=True)
    if why_not and asked.kind == "elastic":
        print("an elastic job needs hosts", file=sys.stderr)
        return 2
    directory = Path(tempfile.mkdtemp(prefix="frt", dir="/tmp"))
    # Compiling them takes longer than the first job may stand still.
    cpu.prepare([DTYPES[name] for name in ("int64", "float64", "float32")])
    before = len(os.listdir("/proc/self/fd"))
    soak: Soak | ElasticSoak
    try:
        with contextlib.ExitStack() as stack:
            if asked.kind == "elastic":
                folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
                folder.mkdir(parents=True, exist_ok=True)
                hosts = stack.enter_context(Netlab(hosts=HOSTS))
                losses = [loss for loss in soak_losses.LOSSES if loss.__name__ in asked.losses]
                soak = ElasticSoak(asked.seconds, asked.seed, hosts, directory, folder, asked.residuals, losses)
            else:
                lab = None if why_not else stack.enter_context(Netlab(hosts=NODES))
                soak = Soak(asked.seconds, asked.seed, lab, directory, asked.kind == "long")
            soak.run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    after = len(os.listdir("/proc/self/fd")) - len(forks.descriptors())
    if after > before:
        soak.problems.append(f"this process has {after} descriptors, and had {before}")
    summary = soak.summary()
    show(summary)
    if asked.out:
        write(Path(asked.out), summary)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
