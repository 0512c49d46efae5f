"""Notes that workers under faults take of their steps, and the costs of faults that follow from them.

A worker writes a line of JSON for each event into a file of its own: `begins` when it enters its training, and `step`
at the end of each step. A step has *counted* if it changed the parameters. Workers whose samples are counted write
`takes`, too, before they give to a step, and `ends`. Times are those of the machine's monotonic clock, which all hosts
of a netlab share.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

FOLDER = "FUSION_BENCHMARK_NOTES"  # the variable that has the folder for workers' notes
PLACE = "FUSION_BENCHMARK_PLACE"  # the variable that has a worker's place, which a worker after it takes again


class Note(msgspec.Struct, frozen=True):
    """One event of one worker.

    Attributes:
        what: `begins`, `takes`, `step` or `ends`.
        at: seconds.
        pid: of the worker.
        place: host and slot.
        step: number of steps that its state has counted.
        size: number of ranks, as it knows.
        counted: whether the parameters changed in this step.
        fingerprint: of the parameters after it.
        epoch: the membership epoch now; of a `step`, also the one in which the worker has given to it (`given`).
        rank: of the worker, in `takes`.
        samples: that it gives to the step, in `takes`.
        done: samples of the epoch that are done, in a `step`.
        loss: of what is held out, in `ends`.
    """

    what: str
    at: float
    pid: int
    place: str
    step: int = 0
    size: int = 0
    counted: bool = False
    fingerprint: int = 0
    epoch: int = 0
    given: int = 0
    rank: int = 0
    samples: tuple[int, ...] = ()
    done: int = 0
    loss: float = 0.0


class Notebook:
    """The notes of one worker."""

    def __init__(self) -> None:
        self._place = os.environ[PLACE]
        self._file = (Path(os.environ[FOLDER]) / f"{os.getpid()}").open("a", encoding="utf-8", buffering=1)

    def begins(self) -> None:
        """Notes that the worker enters its training."""
        self._write(Note("begins", time.monotonic(), os.getpid(), self._place))

    def step(
        self, step: int, size: int, before: int, after: int, *, epoch: int = 0, given: int = 0, done: int = 0
    ) -> None:
        """Notes the end of a step, with the fingerprints of the parameters before and after it, and what else there is
        to tell of it where samples are counted.
        """
        now, pid = time.monotonic(), os.getpid()
        note = Note("step", now, pid, self._place, step, size, before != after, after, epoch, given, done=done)
        self._write(note)

    def takes(self, step: int, size: int, epoch: int, rank: int, samples: Sequence[int]) -> None:
        """Notes what the worker is about to give to the step after so many."""
        now, pid, given = time.monotonic(), os.getpid(), tuple(samples)
        self._write(Note("takes", now, pid, self._place, step, size, epoch=epoch, rank=rank, samples=given))

    def ends(self, step: int, size: int, fingerprint: int, loss: float) -> None:
        """Notes the end of the training."""
        now, pid = time.monotonic(), os.getpid()
        self._write(Note("ends", now, pid, self._place, step, size, fingerprint=fingerprint, loss=loss))

    def _write(self, note: Note) -> None:
        self._file.write(json.dumps(msgspec.to_builtins(note)) + "\n")


def read(folder: Path) -> list[Note]:
    """Returns all notes in a folder, in order of time."""
    lines = [line for path in folder.iterdir() for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return sorted((msgspec.json.decode(line, type=Note) for line in lines), key=lambda note: note.at)


@dataclass
class Fault:
    """A fault and its costs.

    Attributes:
        kind: of fault.
        at: when it happened.
        victims: pids of workers that it killed or cut off.
        pause: seconds for which a survivor, at most, stood still longer than a step takes.
        dropped: steps that a survivor, at most, took in vain or repeated.
        returned: seconds from the fault to the first step that counted of a worker in a victim's place, at the latest;
            None where there was none before the next fault.
        join_pause: seconds for which one of the others, at most, stood still when it came; None as above.
        kept: the share of throughput, until the next fault.
    """

    kind: str
    at: float
    victims: list[int]
    pause: float | None = None
    dropped: int = 0
    returned: float | None = None
    join_pause: float | None = None
    kept: float | None = None


@dataclass
class Worker:
    """The steps of one worker, in order of time."""

    pid: int
    place: str
    begins: float
    steps: list[Note] = field(default_factory=list)

    @property
    def counted(self) -> list[float]:
        return [note.at for note in self.steps if note.counted]


def workers(notes: Iterable[Note]) -> dict[int, Worker]:
    """Returns the workers by pid."""
    found: dict[int, Worker] = {}
    for note in notes:
        if note.what == "begins":
            found.setdefault(note.pid, Worker(note.pid, note.place, note.at))
        elif note.what == "step" and note.pid in found:
            found[note.pid].steps.append(note)
    return found


def step_seconds(all_workers: Iterable[Worker]) -> float:
    """Returns the median time between two steps that count."""
    return statistics.median(after - before for one in all_workers for before, after in pairwise(one.counted))


def calm_seconds(found: Iterable[Worker], faults: Sequence[Fault], ended: float) -> float:
    """Returns the mean time between two steps that count where no fault has any effect: before the first one, and after
    each from a second after all were back until the next. Commits, which not all steps have, are in it.

    Args:
        found: all workers.
        faults: in order of time, with their costs.
        ended: when the measurement did.
    """
    everybody = [one for one in found if one.counted]
    ends = [*(fault.at for fault in faults), ended]
    begins = [max((one.counted[0] for one in everybody if one.counted[0] < ends[0]), default=ends[0])]
    begins += [math.inf if fault.returned is None else fault.at + fault.returned for fault in faults]
    calm = [
        after - before
        for begin, end in zip(begins, ends, strict=True)
        for one in everybody
        for before, after in pairwise(one.counted)
        if begin + 1.0 <= before and after <= end
    ]
    return statistics.fmean(calm) if calm else step_seconds(everybody)


def judge(fault: Fault, until: float, found: dict[int, Worker], step: float) -> None:
    """Computes the costs of a fault.

    Args:
        fault: gets them.
        until: the next fault, or the end.
        found: all workers.
        step: seconds that a step takes without faults.
    """
    survivors = [one for pid, one in found.items() if pid not in fault.victims and one.begins < fault.at]
    places = {found[pid].place for pid in fault.victims if pid in found}
    entered, returned = until, []
    for one in found.values():
        if one.place not in places:
            continue
        came = one.begins if one.begins > fault.at else _after(one.counted, fault.at + step + 1.0)  # or was cut off
        first = None if came is None else _after(one.counted, max(came, fault.at + step))
        if came is not None and first is not None and first < until:
            entered = min(entered, came)
            returned.append(first)
    fault.pause = max((_longest(one, fault.at, entered) - step for one in survivors), default=None)
    fault.dropped = max((_in_vain(one, fault.at, entered) for one in survivors), default=0)
    if len(returned) >= len(places) > 0:
        fault.returned = max(returned) - fault.at
        joined = [_longest(one, entered, max(returned) + 1.0) - step for one in survivors]
        fault.join_pause = max([0.0, *joined])


def differing(found: Iterable[Worker]) -> int:
    """Returns the number of steps after which parameters were not the same, bit by bit, on all ranks that took them."""
    by_step: dict[int, set[int]] = {}
    for one in found:
        for note in one.steps:
            if note.counted:
                by_step.setdefault(note.step, set()).add(note.fingerprint)
    return sum(len(fingerprints) > 1 for fingerprints in by_step.values())


@dataclass
class SamplesTaken:
    """The samples of a training, and whether they count.

    Attributes:
        counted: how often each counts in the parameters of the end.
        in_vain: number of those that were given to steps which were left out, or are undone by a return to a commit.
        steps: that count.
        missing: steps that count, of which a rank has not told what it gave.
    """

    counted: Counter[int]
    in_vain: int
    steps: int
    missing: list[int]


def samples_taken(notes: Sequence[Note]) -> SamplesTaken:
    """Finds out what counts: of a step that was taken several times, after returns to a commit, the last time does."""
    steps: dict[int, tuple[int, int]] = {}  # the epoch in which it counted, and that in which ranks have given to it
    given: dict[tuple[int, int], dict[int, Note]] = {}
    total = 0
    for note in notes:
        if note.what == "step" and note.counted:
            steps[note.step] = max(steps.get(note.step, (0, 0)), (note.epoch, note.given))
        elif note.what == "takes":
            total += len(note.samples)
            given.setdefault((note.epoch, note.step + 1), {})[note.rank] = note
    ends = max((note.step for note in notes if note.what == "ends"), default=0)
    counted: Counter[int] = Counter()
    missing = []
    for step in range(1, ends + 1):
        told = given.get((steps[step][1], step), {}) if step in steps else {}
        if not told or set(told) != set(range(told[min(told)].size)):
            missing.append(step)
        for note in told.values():
            counted.update(note.samples)
    return SamplesTaken(counted, total - counted.total(), ends, missing)


def throughput(
    found: Sequence[Worker], faults: Iterable[Fault], step: float, since: float = -math.inf, until: float = math.inf
) -> float:
    """Returns the share of the steps that the workers which were there could have taken in a span, and did. `step`:
    seconds that one takes without faults.

    A worker is there from its first step that counts to its last, but for the time from a fault that hits it to its
    next step that counts.
    """
    done, could = 0, 0.0
    for one in found:
        hits = [fault.at for fault in faults if one.pid in fault.victims]
        for times in _parted(one.counted, hits, step):
            begin, end = max(times[0], since), min(times[-1], until)
            done += sum(begin < at <= end for at in times)
            could += max(end - begin, 0.0) / step
    return done / could


def _parted(times: Sequence[float], hits: Sequence[float], step: float) -> list[list[float]]:
    """Returns a worker's times between the faults that hit it, without the step that was under way at each."""
    edges = [-math.inf, *hits, math.inf]
    parts = [[at for at in times if begin + step < at <= end] for begin, end in pairwise(edges)]
    return [part for part in parts if part]


def _after(times: Sequence[float], moment: float) -> float | None:
    """Returns the first time after a moment."""
    return next((at for at in times if at > moment), None)


def _longest(one: Worker, since: float, until: float) -> float:
    """Returns the longest time between two steps that count which was under way or began in a span."""
    return max(
        (after - before for before, after in pairwise(one.counted) if after >= since and before < until), default=0.0
    )


def _in_vain(one: Worker, since: float, until: float) -> int:
    """Returns the number of steps in a span that did not count, or were repeated."""
    steps = [note for note in one.steps if since - 1.0 <= note.at <= until]
    repeated = sum(max(before.step - after.step + 1, 0) for before, after in pairwise(steps) if after.counted)
    return sum(not note.counted for note in steps if note.at >= since) + repeated
