"""One elastic job that lives through seeded random faults of every kind, losses among them (`python -m
tests.faults.soak --kind elastic`)."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.netlab import Netlab
from tests.faults import soak_faults, soak_flat, soak_losses, survivor
from tests.faults.soak_faults import Fault
from tests.faults.soak_job import SoakError
from tests.faults.soak_ledger import SLOTS, WorkerState
from tests.faults.soak_losses import Loss, NothingToLose
from tests.faults.soak_survival import ElasticJob

HOSTS = len(SLOTS)
BETWEEN = (0, 3)  # faults without a loss between two losses
STEPS = (1, 8)  # between two faults
# Resources of all processes that live from the warm-up to the end; the memory is their own, with that which they share
# with their daemon or workers. (The rest they share with the process that they were forked from.)
# pyzmq starts three threads with the first large message that it does not copy, which may come late.
FLAT = {"held": 4 << 20, "descriptors": 12, "threads": 3, "arenas": 8}
JUDGED_S = 600.0  # that a job has to live for this: not all is warm before
ROLES = ("the launcher", "the agent", "the daemon", "the worker")


class ElasticSoak:
    """A run of it.

    Args:
        seconds: for which new faults begin.
        seed: of everything that is random.
        lab: the hosts.
        directory: for the daemons' files; short.
        folder: for what the job says, and for the notes of its workers.
        residuals: whether gradients have a codec with a residual.
        kinds: of losses.
    """

    def __init__(
        self,
        seconds: float,
        seed: int,
        lab: Netlab,
        directory: Path,
        folder: Path,
        residuals: bool = False,
        kinds: Sequence[Loss] = soak_losses.LOSSES,
    ) -> None:
        self._seconds, self._seed, self._residuals, self._kinds = seconds, seed, residuals, kinds
        self._directory = directory
        self._random = random.Random(seed)
        self._losses: list[Loss] = []  # that are still to come in this round of all
        self.job = ElasticJob(lab, directory, folder, survivor.RESIDUALS if residuals else "dense")
        self.job.sample_every = min(self.job.sample_every, seconds / 60)
        self.lived = 0.0
        self.faults: Counter[str] = Counter()
        self.unplanned = 0  # losses by faults that are to be survived without one
        self.from_commit: Counter[str] = Counter()
        self.pauses: defaultdict[str, list[float]] = defaultdict(list)
        self.back: defaultdict[str, list[float]] = defaultdict(list)
        self.rises: dict[str, dict[str, float]] = {}
        self.problems: list[str] = []

    def run(self) -> None:
        """Has the job live for the time, and checks all that it has told."""
        job, last = self.job, "the start"
        try:
            job.start()
            began = time.monotonic()
            while time.monotonic() < began + self._seconds:
                for _ in range(self._random.randint(*BETWEEN)):
                    last = self._survived()
                last = self._lost()
                if job.spared < 0 and time.monotonic() > began + soak_flat.warm_up(self._seconds) / 2:
                    job.spared = job.host_of(max(job.present(), key=lambda one: one.rank))
                self.lived = time.monotonic() - began
            last = "the end"
            job.end()
            self._look_for_leftovers()
            if self._seconds >= JUDGED_S:
                self.check_flat(began)
        except (SoakError, AssertionError, OSError) as error:
            self.problems.append(f"{last}: {error}")
        finally:
            job.close()
        job.ledger.check_samples()
        self.problems += job.ledger.problems

    def _survived(self) -> str:
        """Makes a fault by which nobody is lost. Returns its name."""
        job, epoch = self.job, self.job.epoch
        of = soak_faults.OF_NETWORK if self._random.random() < 0.5 else soak_faults.OF_PROCESSES
        fault: Fault = self._random.choice(of)
        self.faults[fault.__name__] += 1
        try:
            fault(job, self._random)
            job.go_on(self._random.randint(*STEPS))
        except (SoakError, OSError) as error:
            raise SoakError(f"after {fault.__name__}: {error}") from error
        self.unplanned += job.epoch > epoch
        return fault.__name__

    def _lost(self) -> str:
        """Makes a loss, and waits until all are back. Returns its name."""
        if not self._losses:
            self._losses = self._random.sample(self._kinds, len(self._kinds))
        loss, job = self._losses.pop(), self.job
        name, epoch, rollbacks = loss.__name__, job.epoch, job.ledger.rollbacks
        began = time.monotonic()
        try:
            with loss(job, self._random) as survivors:
                job.wait_for_survivors(survivors, epoch)
            job.go_on(self._random.randint(*STEPS))
        except NothingToLose:
            return f"{name}, which has to wait"
        except (SoakError, OSError) as error:
            raise SoakError(f"after {name}: {error}") from error
        self.faults[name] += 1
        self.from_commit[name] += job.ledger.rollbacks > rollbacks
        self.pauses[name].append(max(longest(one, began) for one in survivors))
        self.back[name].append(time.monotonic() - began)
        return name

    def check_flat(self, began: float) -> None:
        """Compares what processes hold that have lived all the time after the warm-up."""
        for name, samples in self.job.samples.items():
            held = [dict(each) for each in soak_flat.medians(samples, began, self.lived)]
            if len(held) < soak_flat.WINDOWS:
                continue
            for each in held:
                each["held"] = each["memory"] + each["shared"]
            self.rises[name] = {what: soak_flat.rise(held, what) for what in FLAT}
            for what, limit in FLAT.items():
                if self.rises[name][what] > limit:
                    told = ", ".join(f"{each[what]:.0f}" for each in held)
                    self.problems.append(f"{what} of {name} rose by {self.rises[name][what]:.0f}: {told}")
        for role in ROLES:
            if not any(name.startswith(role) for name in self.rises):
                self.problems.append(f"{role} has not lived, or was not looked at, all the time after the warm-up")

    def _look_for_leftovers(self) -> None:
        job = self.job
        for host in range(job.nodes):
            for pid in job.pids_on(host):
                self.problems.append(f"process {pid} is left on host {host}")
        self.problems += [f"{path.name} is left" for path in self._directory.iterdir()]

    def summary(self) -> dict[str, Any]:
        """Returns all that was counted and measured."""
        ledger = self.job.ledger
        lost, repeated = (sum(each) for each in zip(*ledger.epochs.values(), strict=True)) if ledger.epochs else (0, 0)
        return {
            "passed": not self.problems,
            "problems": self.problems,
            "kind": "one elastic job",
            "codec": "top-k with a residual, of a part" if self._residuals else "none",
            "seed": self._seed,
            "seconds": round(self.lived, 1),
            "workers": list(SLOTS),
            "faults": dict(sorted(self.faults.items())),
            "losses": sum(self.faults[name] for name in self.back),
            "losses_not_intended": self.unplanned,
            "membership_epochs": self.job.epoch,
            "steps": ledger.steps,
            "comparisons_of_parameters": ledger.checked,
            "steps_of_lost_workers_alone": ledger.void,
            "left_out_steps_of_a_worker": ledger.left_out,
            "returns_to_a_commit": ledger.rollbacks,
            "steps_taken_again": ledger.repeated_steps,
            "by_loss": {
                name: {
                    "times": self.faults[name],
                    "from_the_commit": self.from_commit[name],
                    "pause_seconds": _told(self.pauses[name]),
                    "back_seconds": _told(self.back[name]),
                }
                for name in sorted(self.back)
            },
            "epochs_of_data": len(ledger.epochs),
            "samples_of_an_epoch": survivor.SAMPLES,
            "samples_lost": lost,
            "samples_repeated_at_the_end_of_an_epoch": repeated,
            "warm_up_seconds": soak_flat.warm_up(self.lived),
            "rise": {name: {what: int(most) for what, most in each.items()} for name, each in self.rises.items()},
        }


def longest(one: WorkerState, since: float) -> float:
    """Returns the longest time between two steps of a worker that count, of which the later one was after a moment."""
    return max((after - before for before, after in pairwise(one.counted) if after > since), default=0.0)


def _told(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 2), "most": round(max(seconds), 2)}
