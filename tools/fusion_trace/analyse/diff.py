"""`fusion-trace diff` compares the steps of two jobs.

A sample is a step: its length, as the mean over its ranks. Steps are compared as distributions (`distributions.py`),
and their parts by medians; so is each rank's own work, without waits, since steps of ranks
that wait for each other last equally long. Neither a pause nor slow first steps move a median, and spikes have a row
of their own, in which typical steps cannot hide them. All intervals of a table are meant to hold at once with the
confidence that is asked for (Bonferroni), so that the same job against itself seldom shows a change, whatever is looked
at.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from fusion_trace.analyse import distributions
from fusion_trace.analyse.distributions import SHARE, Comparison, Series
from fusion_trace.analyse.overlap import PARTS, partitions
from fusion_trace.read.choice import EVERY_STEP, ChoiceError, StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import SCRIPT, all_steps, bounds_of
from fusion_trace.read.span_columns import phase_columns, union_of

MEASURES = ("step", *PARTS, "forward", "backward", "step()")
LEAST_STEPS = 8  # of each job
_OWN = ("compute", "overlapped", "idle")  # a rank's own work


@dataclass(frozen=True)
class Samples:
    """Steps of a job, ns, in order.

    Attributes:
        job: its id.
        measures: by measure, the mean over ranks; each of shape (steps,).
        own: by rank, its own work without waits; each of shape (its steps,).
    """

    job: str
    measures: Mapping[str, Series]
    own: Mapping[int, Series]


@dataclass(frozen=True)
class Diff:
    """Two jobs, compared.

    Attributes:
        step: the distribution of steps, by `distributions.ROWS`.
        parts: medians of the parts of steps, in order of `MEASURES`; those that either job has.
        ranks: the distribution of each rank's own work; of the ranks that both jobs have.
    """

    step: tuple[Comparison, ...]
    parts: tuple[Comparison, ...]
    ranks: Mapping[int, tuple[Comparison, ...]]


def compare(before: Samples, after: Samples, confidence: float = 0.95, seed: int = 0) -> Diff:
    """Compares the steps of two jobs.

    Args:
        confidence: that all intervals of steps and parts hold at once, and so do all of ranks.
        seed: of the resampling.

    Raises:
        ChoiceError: a job has too few steps.
    """
    for its in (before, after):
        number = len(its.measures["step"])
        if number < LEAST_STEPS:
            raise ChoiceError(f"job {its.job} has {number} whole steps, and a comparison needs {LEAST_STEPS}")
    generator = np.random.default_rng(seed)
    pairs = {name: (before.measures[name], after.measures[name]) for name in MEASURES[1:]}
    shown = {name: pair for name, pair in pairs.items() if pair[0].any() or pair[1].any()}
    level = _each(confidence, len(distributions.ROWS) + len(shown))
    step = distributions.compare(before.measures["step"], after.measures["step"], level, generator)
    parts = tuple(distributions.compare_medians(name, *pair, level) for name, pair in shown.items())
    both = [rank for rank in before.own if len(before.own[rank]) > 1 and len(after.own.get(rank, ())) > 1]
    level = _each(confidence, len(both) * len(distributions.ROWS))
    ranks = {rank: distributions.compare(before.own[rank], after.own[rank], level, generator) for rank in both}
    return Diff(step, parts, ranks)


def _each(confidence: float, number: int) -> float:
    """Returns the confidence of each of so many intervals."""
    return 1 - (1 - confidence) / max(number, 1)


def samples(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> Samples:
    """Returns the steps of a job."""
    sums: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    own: dict[int, list[int]] = defaultdict(list)
    for part in partitions(trace, chosen):
        sums[part.number]["step"].append(part.ns)
        for name, ns in part.parts.items():
            sums[part.number][name].append(ns)
        own[part.rank].append(sum(part.parts[name] for name in _OWN))
    for rank, steps in all_steps(trace).items():
        kept = [step for step in steps if step.number in chosen]
        bounds = bounds_of(kept)
        for name, kinds in SCRIPT.items():
            inside = union_of(*phase_columns(trace.workers[rank], *kinds)).within(*bounds)
            for step, ns in zip(kept, inside.tolist(), strict=True):
                sums[step.number][name].append(ns)
    measures = {name: np.array([np.mean(sums[number][name]) for number in sorted(sums)], float) for name in MEASURES}
    return Samples(trace.job, measures, {rank: np.array(its, float) for rank, its in sorted(own.items())})


# --- in words ---------------------------------------------------------------------------------------------------------


def verdict(found: Diff) -> str:
    """Returns a sentence on steps: typical ones first, then other changes of their distribution."""
    told = [_in_words(row) for row in found.step if row.changed]
    known = {row.measure for row in found.step if row.changed}
    hidden = [rank for rank, rows in found.ranks.items() if {row.measure for row in rows if row.changed} - known]
    if not told and hidden:
        return f"steps have not changed, as far as they tell; {_of_ranks(found, hidden)}"
    if not told:
        return "no change"
    typical, mean = found.step[:2]
    if not typical.changed and not mean.changed:
        told.insert(0, "typical steps have not changed")
    return "; ".join(told)


def _of_ranks(found: Diff, ranks: Sequence[int]) -> str:
    """Returns the change of the first rank's own work, and the number of other ranks with one."""
    first, *others = ranks
    changed = "; ".join(_in_words(row) for row in found.ranks[first] if row.changed)
    more = f" (and of {len(others)} more ranks)" if others else ""
    return f"of the own work of rank {first}, {changed}{more}"


def _in_words(row: Comparison) -> str:
    assert row.before is not None
    assert row.after is not None
    more = row.after > row.before
    if row.measure == SHARE:
        return f"spikes are {'more' if more else 'less'} frequent ({row.before:.1%} of steps, then {row.after:.1%})"
    low, high = sorted(abs(row.relative(ns) or 0.0) for ns in (row.low, row.high))
    interval = f"{low:.1%} to {high:.1%}" if math.isfinite(high) else f"at least {low:.1%}"
    by = f"{abs(row.relative(row.difference) or 0.0):.1%} ({interval})"
    how = "slower" if more else "faster"
    return {
        "median": f"steps are {how} by {by}",
        "mean": f"their mean is {how} by {by}",
        "95 %": f"the slowest twentieth begins {how} by {by}",
        "spikes": f"spikes are {'longer' if more else 'shorter'} by {by}",
    }[row.measure]


@dataclass(frozen=True)
class Gate:
    """The answer to whether steps have become slower by more than a limit.

    Attributes:
        slower: a row of steps that is a time has grown by more, and not by chance; or one of what a rank does itself,
            where that of steps does not tell.
        what: a sentence on it; it says too where an increase above the limit cannot be excluded.
        undecided: that is so of the median, which needs the fewest steps: the comparison says nothing.
    """

    slower: bool
    what: str
    undecided: bool = False


def gate(found: Diff, limit: float) -> Gate:
    """Returns the answer for a limit, a share of a row's value before (0.05: 5 %)."""
    asked = [(row, row.before, row.difference) for row in found.step if row.measure != SHARE]
    told = [(row, more / before) for row, before, more in asked if before and more is not None and row.changed]
    above = [f"{row.measure} {by:+.1%}" for row, by in told if by > limit]
    above += [] if above else _of_one(found, limit)
    if above:
        return Gate(True, f"slower by more than {limit:.1%}: {', '.join(above)}")
    open_ = {
        row.measure: f"up to {row.high / before:+.1%}" if row.known else "(too few steps)"
        for row, before, _ in asked
        if before and row.high > limit * before
    }
    if open_:
        which = ", ".join(f"{measure} {by}" for measure, by in open_.items())
        more = "; more steps would tell" if "median" in open_ else ""
        return Gate(
            False,
            f"not found to be slower by more than {limit:.1%}, but it cannot be excluded: {which}{more}",
            undecided="median" in open_,
        )
    return Gate(False, f"not slower by more than {limit:.1%}")


def _of_one(found: Diff, limit: float) -> list[str]:
    """Returns how ranks have become slower themselves by more than the limit of a step, where steps do not exclude that
    they have, too: those of all ranks have the noise of all."""
    slower = []
    for rank, rows in found.ranks.items():
        for row, step in zip(rows, found.step, strict=True):
            if row.measure == SHARE or step.before is None or not row.changed or row.difference is None:
                continue
            if row.difference > limit * step.before and step.high > limit * step.before:
                by = row.difference / step.before
                slower.append(f"{row.measure} of the own work of rank {rank}, {by:+.1%} of a step")
                break
    return slower


def parse_share(text: str) -> float:
    """Reads a percentage such as `5%`, as a share.

    Raises:
        ChoiceError: it is something else, or has no unit.
    """
    match = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{0,6})?)\s*%\s*", text, re.ASCII)
    if match is None:
        raise ChoiceError(f"--fail-above {text!r} is not a percentage such as 5%")
    return float(match[1]) / 100


def document(first: JobTrace, second: JobTrace, found: Diff, confidence: float) -> dict[str, object]:
    """Returns what `--json` shows; times in ns, shares of 1; null: there is none, or it is not known."""
    return {
        "jobs": [first.job, second.job],
        "confidence": confidence,
        "verdict": verdict(found),
        "step": [_row(row) for row in found.step],
        "parts": [_row(row) for row in found.parts],
        "ranks": {str(rank): [_row(row) for row in rows] for rank, rows in found.ranks.items()},
        "problems": [*first.problems, *second.problems],
    }


def _row(row: Comparison) -> dict[str, object]:
    values: dict[str, object] = {field.name: getattr(row, field.name) for field in fields(row)}
    values |= {side: values[side] if math.isfinite(getattr(row, side)) else None for side in ("low", "high")}
    return {**values, "difference": row.difference, "changed": row.changed}


def changed_ranks(found: Diff) -> Sequence[int]:
    """Returns the ranks of which something has changed."""
    return [rank for rank, rows in found.ranks.items() if any(row.changed for row in rows)]
