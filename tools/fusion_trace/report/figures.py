"""All figures of a report. Times in ns on the job's axis, if nothing else is said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fusion_rt.choice.codec_costs import measured
from fusion_trace.analyse import bucket_times, critical_path, summary, usage
from fusion_trace.analyse.bucket_times import BucketTimes
from fusion_trace.analyse.critical_path import Path
from fusion_trace.analyse.link_figures import LinkFigures, link_figures
from fusion_trace.analyse.overlap import PARTS, Partition, by_rank, by_step, median, partitions, steps_of_operations
from fusion_trace.analyse.summary import Summary
from fusion_trace.analyse.usage import Usage
from fusion_trace.analyse.whatif import Measure
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import operations
from fusion_trace.read.span_columns import Span
from fusion_trace.report import timeline
from fusion_trace.report.curves import Curves, sweep
from fusion_trace.report.timeline import DrawnStep

MOST_COLUMNS = 240  # of charts over steps; with more steps, a column stands for several
MOST_BINS = 60  # of the histogram
MOST_PATHS = 240  # critical paths that are summed
MOST_USED = 16  # ranks whose processors and memory are drawn


@dataclass(frozen=True)
class RankTimes:
    """Steps of a rank. `mean`: of each of `PARTS`; they add up to `ns`, the mean step."""

    rank: int
    steps: int
    ns: float
    mean: Mapping[str, float]

    @property
    def hidden(self) -> float | None:
        """Share of its communication that was overlapped; None if there was none."""
        all_of_it = self.mean["overlapped"] + self.mean["exposed"]
        return self.mean["overlapped"] / all_of_it if all_of_it else None


@dataclass(frozen=True)
class Column:
    """One step, or some that follow each other.

    Attributes:
        first, last: their numbers.
        parts: by rank, the mean of each of `PARTS`.
        slower: by rank, by how much its own work took longer than the median rank's, where that is furthest from 0: a
            mean would hide rare ones.
        longest: by rank, the number of its longest step, and how long that and the shortest one are, ns.
    """

    first: int
    last: int
    parts: Mapping[int, Mapping[str, float]]
    slower: Mapping[int, float]
    longest: Mapping[int, tuple[int, int, int]]

    @property
    def hidden(self) -> float | None:
        """Share of all ranks' communication that was overlapped; None if there was none."""
        overlapped = sum(parts["overlapped"] for parts in self.parts.values())
        exposed = sum(parts["exposed"] for parts in self.parts.values())
        return overlapped / (overlapped + exposed) if overlapped + exposed else None


@dataclass(frozen=True)
class Report:
    """All figures about a job.

    Attributes:
        trace: what was recorded; `chosen`: the steps that this is about.
        summary: that of `fusion-trace summary`.
        ranks: by rank, those with whole steps.
        columns: by step.
        lengths: bins of the lengths of all ranks' steps: edges, one more than bins (ns), and how many are in each.
        slowest: single steps of all ranks, the longest first.
        buckets, links: as `bucket_times.find` and `link_figures.link_figures` have them.
        used: processors and memory, of the first ranks and their daemons.
        paths: the critical paths of steps throughout the job, at most `MOST_PATHS`; path: that of the step of median
            length, and longest: that of the longest one; None without steps.
        curves: what-ifs.
        drawn: steps of the timeline.
    """

    trace: JobTrace
    chosen: StepRange
    summary: Summary
    ranks: tuple[RankTimes, ...]
    columns: tuple[Column, ...]
    lengths: tuple[tuple[float, ...], tuple[int, ...]]
    slowest: tuple[Partition, ...]
    buckets: tuple[BucketTimes, ...]
    links: tuple[LinkFigures, ...]
    used: tuple[Usage, ...]
    paths: tuple[Path, ...]
    path: Path | None
    longest: Path | None
    curves: Curves
    drawn: tuple[DrawnStep, ...]


def analyse(
    trace: JobTrace,
    chosen: StepRange = EVERY_STEP,
    measure: Measure = measured,
    drawn: StepRange | None = None,
) -> Report:
    """Analyses a job from all sides.

    Args:
        measure: measures a codec, as in `curves.sweep`.
        drawn: steps of the timeline, as in `timeline.find`.

    Raises:
        ChoiceError: no step of `drawn` is among those that were chosen.
    """
    at_a_glance = summary.find(trace, chosen)  # first: see there
    parts = partitions(trace, chosen)
    every = operations(trace)
    inside = steps_of_operations(every, parts) >= 0
    span = Span(min((part.begin for part in parts), default=0), max((part.end for part in parts), default=0))
    ordered = _by_length(parts)
    some = frozenset(evenly(sorted(ordered), MOST_PATHS))
    single = {ordered[(len(ordered) - 1) // 2], ordered[-1]} if ordered else set[int]()
    paths = {path.step.number: path for path in critical_path.find(trace, some | single)}
    middle = ordered[(len(ordered) - 1) // 2] if ordered else None
    return Report(
        trace=trace,
        chosen=chosen,
        summary=at_a_glance,
        ranks=_ranks(parts),
        columns=columns_of(parts),
        lengths=lengths_of(parts),
        slowest=tuple(sorted(parts, key=lambda part: -part.ns)[:10]),
        buckets=bucket_times.find(trace, chosen),
        links=link_figures(trace, every.chunks_of(inside), span),
        used=usage.find(trace, span, MOST_USED),
        paths=tuple(path for number, path in paths.items() if number in some),
        path=None if middle is None else paths[middle],
        longest=paths[ordered[-1]] if ordered else None,
        curves=sweep(trace, chosen, measure),
        # Last, since it asks for the operations of other traces, of which few are kept.
        drawn=() if middle is None else timeline.find(trace, parts, drawn, middle),
    )


def _ranks(parts: Sequence[Partition]) -> tuple[RankTimes, ...]:
    return tuple(
        RankTimes(
            rank=rank,
            steps=len(its),
            ns=fmean(part.ns for part in its),
            mean=_means(its),
        )
        for rank, its in sorted(by_rank(parts).items())
    )


def _means(parts: Sequence[Partition]) -> dict[str, float]:
    return {name: fmean(getattr(part, name) for part in parts) for name in PARTS}


def columns_of(parts: Sequence[Partition]) -> tuple[Column, ...]:
    """Returns the columns of charts over steps, at most `MOST_COLUMNS`."""
    steps = list(by_step(parts).items())
    size = -(-len(steps) // MOST_COLUMNS) or 1
    return tuple(_column(steps[at : at + size]) for at in range(0, len(steps), size))


def lengths_of(parts: Sequence[Partition]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Returns bins of the lengths of steps: edges, ns, one more than bins; and how many steps are in each."""
    if not parts:
        return (), ()
    counts, edges = np.histogram([part.ns for part in parts], MOST_BINS)
    return tuple(edges.tolist()), tuple(counts.tolist())


def _column(steps: Sequence[tuple[int, Sequence[Partition]]]) -> Column:
    slower: dict[int, list[int]] = defaultdict(list)
    for _, its in steps:
        usual = median([part.ns - part.blocked for part in its])
        for part in its:
            slower[part.rank].append(part.ns - part.blocked - usual)
    of_rank = dict(sorted(by_rank(part for _, its in steps for part in its).items()))
    longest = {rank: max(its, key=lambda part: part.ns) for rank, its in of_rank.items()}
    shortest = {rank: min(part.ns for part in its) for rank, its in of_rank.items()}
    return Column(
        first=steps[0][0],
        last=steps[-1][0],
        parts={rank: _means(its) for rank, its in of_rank.items()},
        slower={rank: max(values, key=abs) for rank, values in sorted(slower.items())},
        longest={rank: (each.number, each.ns, shortest[rank]) for rank, each in longest.items()},
    )


def _by_length(parts: Sequence[Partition]) -> list[int]:
    """Returns the numbers of steps, the shortest first, by the mean over ranks."""
    lengths = {number: fmean(part.ns for part in its) for number, its in by_step(parts).items()}
    return sorted(lengths, key=lambda number: (lengths[number], number))


def evenly(numbers: Sequence[int], most: int) -> list[int]:
    """Returns all of them, or so many that are spread evenly."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[place * len(numbers) // most] for place in range(most)]
