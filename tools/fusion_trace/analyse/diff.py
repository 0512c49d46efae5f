"""`fusion-trace diff` compares the steps of two jobs.

A sample is a step: what it takes, as the mean over its ranks. Of each measure a trimmed mean over the steps is compared
(the highest and the lowest tenth are left out, which a pause or the first steps would decide otherwise). That hides
spikes that are rare, so the plain mean of steps is compared too; the median is not, whose intervals from few steps are
too narrow. Each interval comes from a bootstrap of blocks of steps that follow each other (Künsch, 1989), because
neighbours resemble each other. All intervals of a comparison are meant to hold at once with the confidence that is
asked for (Bonferroni), so that the same job against itself seldom shows a change, whatever is looked at.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fusion_trace.analyse.overlap import PARTS, partitions
from fusion_trace.read.choice import EVERY_STEP, ChoiceError, StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import all_steps, script, within
from fusion_trace.read.spans import union

MEASURES = ("step", *PARTS, "forward", "backward", "step()")
LEAST_STEPS = 8  # of each job
_RESAMPLES = 4000
_TRIM = 0.1
MEAN = "step, mean"  # of all steps, without trimming
_Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # of each row


@dataclass(frozen=True)
class Comparison:
    """A measure of a step in both jobs, in ns.

    Attributes:
        before, after: trimmed means over steps, or what the measure says.
        low, high: interval of the difference.
        changed: 0 is not in it.
    """

    measure: str
    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def changed(self) -> bool:
        return self.low > 0 or self.high < 0

    def relative(self, ns: float) -> float | None:
        """Returns a time as a part of what the measure was before."""
        return ns / self.before if self.before else None


def compare(
    first: JobTrace,
    second: JobTrace,
    chosen: StepRange = EVERY_STEP,
    chosen_after: StepRange | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[Comparison, ...]:
    """Returns the measures that either job has, in order of `MEASURES`, then the plain mean of its steps.

    Args:
        chosen_after: the steps of the second job, if other ones.
        confidence: that all intervals hold at once.
        seed: of the resampling.

    Raises:
        ChoiceError: a job has too few steps.
    """
    before, after = samples(first, chosen), samples(second, chosen if chosen_after is None else chosen_after)
    return changes(before, after, (first.job, second.job), confidence, seed)


def changes(
    before: dict[str, NDArray[np.float64]],
    after: dict[str, NDArray[np.float64]],
    jobs: tuple[str, str] = ("the first", "the second"),
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[Comparison, ...]:
    """Compares samples, as `compare` compares jobs."""
    for job, its in zip(jobs, (before, after), strict=True):
        if len(its["step"]) < LEAST_STEPS:
            raise ChoiceError(f"job {job} has {len(its['step'])} whole steps, and a comparison needs {LEAST_STEPS}")
    shown = [name for name in MEASURES if before[name].any() or after[name].any()]
    rows: list[tuple[str, str, _Statistic]] = [(name, name, _trimmed) for name in shown]
    rows.append((MEAN, "step", _means))
    level = 1 - (1 - confidence) / len(rows)
    generator = np.random.default_rng(seed)
    found = []
    for measure, name, statistic in rows:
        first, second = before[name], after[name]
        low, high = _interval(first, second, statistic, level, generator)
        found.append(Comparison(measure, _one(first, statistic), _one(second, statistic), low, high))
    return tuple(found)


def samples(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> dict[str, NDArray[np.float64]]:
    """Returns, by measure, the time of each step, in order: ns, the mean over its ranks."""
    sums: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for part in partitions(trace, chosen):
        sums[part.number]["step"].append(part.ns)
        for name, ns in part.parts.items():
            sums[part.number][name].append(ns)
    for rank, steps in all_steps(trace).items():
        kept = [step for step in steps if step.number in chosen]
        for name, spans in script(trace.workers[rank]).items():
            for step, ns in zip(kept, within(kept, union(spans)), strict=True):
                sums[step.number][name].append(ns)
    return {name: np.array([np.mean(sums[number][name]) for number in sorted(sums)], np.float64) for name in MEASURES}


def _one(values: NDArray[np.float64], statistic: _Statistic) -> float:
    return float(statistic(values[np.newaxis])[0])


def _means(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    means: NDArray[np.float64] = rows.mean(axis=1)
    return means


def _trimmed(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the trimmed mean of each row."""
    number = rows.shape[1]
    cut = int(number * _TRIM)
    means: NDArray[np.float64] = np.sort(rows, axis=1)[:, cut : number - cut].mean(axis=1)
    return means


def _interval(
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    statistic: _Statistic,
    level: float,
    generator: np.random.Generator,
) -> tuple[float, float]:
    """Returns the interval of the difference of a statistic: the basic bootstrap, widened as Student's t is for
    few steps."""
    difference = _one(after, statistic) - _one(before, statistic)
    drawn = statistic(_resampled(after, generator)) - statistic(_resampled(before, generator)) - difference
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    fewest = min(len(before), len(after))
    wider = math.sqrt(fewest / (fewest - 1)) * (1 + 2.5 / fewest)
    return difference - float(high) * wider, difference - float(low) * wider


def _resampled(values: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Returns resamples, one a row, which are made of blocks of steps that follow each other, around the end
    too."""
    number = len(values)
    length = max(1, round(number ** (1 / 3)))
    begins = generator.integers(0, number, (_RESAMPLES, -(-number // length), 1))
    places = (begins + np.arange(length)).reshape(_RESAMPLES, -1)[:, :number] % number
    drawn: NDArray[np.float64] = values[places]
    return drawn


def verdict(found: Sequence[Comparison]) -> str:
    """Returns a sentence on the step, the first of the measures."""
    step = found[0]
    assert step.measure == "step"
    if not step.changed:
        return "no change"
    part, low, high = (step.relative(ns) or 0.0 for ns in (step.difference, step.low, step.high))
    ends = sorted((abs(low), abs(high)))
    return f"steps are {'slower' if part > 0 else 'faster'} by {abs(part):.1%} ({ends[0]:.1%} to {ends[1]:.1%})"


@dataclass(frozen=True)
class Gate:
    """The answer to whether steps have become slower by more than a limit.

    Attributes:
        slower: the trimmed or the plain mean of steps has grown by more, and not by chance.
        what: a sentence on it; it says too where an increase above the limit cannot be excluded.
    """

    slower: bool
    what: str


def gate(found: Sequence[Comparison], limit: float) -> Gate:
    """Returns the answer for a limit, a share of the step before (0.05: 5 %)."""
    asked = [change for change in found if change.measure in ("step", MEAN)]
    above = [each for each in asked if each.low > 0 and each.difference > limit * each.before]
    if above:
        told = ", ".join(f"{each.measure} {each.difference / each.before:+.1%}" for each in above)
        return Gate(True, f"slower by more than {limit:.1%}: {told}")
    open_ = [each for each in asked if each.high > limit * each.before]
    if open_:
        told = ", ".join(f"{each.measure} up to {each.high / each.before:+.1%}" for each in open_)
        return Gate(False, f"not found to be slower by more than {limit:.1%}, but it cannot be excluded: {told}")
    return Gate(False, f"not slower by more than {limit:.1%}")


def parse_share(text: str) -> float:
    """Reads a percentage such as `5%`, as a share.

    Raises:
        ChoiceError: it is something else, or has no unit.
    """
    match = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{0,6})?)\s*%\s*", text, re.ASCII)
    if match is None:
        raise ChoiceError(f"--fail-above {text!r} is not a percentage such as 5%")
    return float(match[1]) / 100


def document(first: JobTrace, second: JobTrace, found: Sequence[Comparison], confidence: float) -> dict[str, object]:
    """Returns what `--json` shows; all times in ns."""
    return {
        "jobs": [first.job, second.job],
        "confidence": confidence,
        "verdict": verdict(found),
        "measures": [
            {
                **{field.name: getattr(change, field.name) for field in fields(change)},
                "difference": change.difference,
                "changed": change.changed,
            }
            for change in found
        ],
        "problems": [*first.problems, *second.problems],
    }
