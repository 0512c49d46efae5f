"""Jobs beside each other in a report: the lengths of their steps, and their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusion_trace.analyse import diff
from fusion_trace.analyse.diff import Samples
from fusion_trace.analyse.overlap import PARTS
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.report.charts import COLOURS, LINES, Chart, axis, layout, ms, plain
from fusion_trace.report.figures import MOST_COLUMNS
from fusion_trace.report.wording import Table, duration

MOST_RUNS = 8  # beside a job
_SHARES = np.concatenate([np.linspace(0, 0.9, 91), np.linspace(0.905, 1, 20)])  # of a curve of lengths: more at its end


@dataclass(frozen=True)
class Run:
    """A job, in short. `samples`: its steps; `ranks`, `nodes`: how many it had."""

    samples: Samples
    ranks: int
    nodes: int

    @property
    def name(self) -> str:
        return f"job {self.samples.job}"


def run_of(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> Run:
    """Returns a job in short."""
    return Run(diff.samples(trace, chosen), len(trace.workers), len(trace.hosts))


def verdicts(here: Run, others: Sequence[Run]) -> tuple[tuple[str, bool], ...]:
    """Returns a sentence for each other job on what this one's steps are, compared with its, and whether they are
    slower.

    Raises:
        ChoiceError: one has too few steps.
    """
    found = []
    for other in others:
        difference = diff.compare(other.samples, here.samples)
        slower = any(row.changed and (row.difference or 0) > 0 for row in difference.step[:2])
        found.append((f"From {other.name} to {here.name}: {diff.verdict(difference)}.", slower))
    return tuple(found)


def table(runs: Sequence[Run]) -> Table:
    """Returns a row for each job."""
    rows = []
    for run in runs:
        steps = run.samples.measures["step"]
        parts = (duration(float(run.samples.measures[part].mean())) for part in PARTS)
        lengths = (float(np.median(steps)), float(steps.mean()), float(np.quantile(steps, 0.95)), float(steps.max()))
        rows.append(
            (run.name, str(run.nodes), str(run.ranks), str(len(steps)), *(duration(ns) for ns in lengths), *parts)
        )
    head = ("", "nodes", "ranks", "steps", "median", "mean", "95 %", "longest", *PARTS)
    return Table("Steps, and the means of their parts", head, tuple(rows))


def charts_of(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """Draws steps one after the other, how many are how long, and their parts."""
    return _lines(runs), _lengths(runs), _parts(runs)


def _lines(runs: Sequence[Run]) -> Chart:
    data = []
    for place, run in enumerate(runs):
        steps = run.samples.measures["step"]
        size = -(-len(steps) // MOST_COLUMNS)
        begins = range(0, len(steps), size)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": plain(run.name),
                "x": [first + 1 for first in begins],
                "y": [ms(float(steps[first : first + size].max())) for first in begins],
                "line": _line(place),
                "hovertemplate": "%{x}.: %{y:.3f} ms",
            }
        )
    axes = {"xaxis": axis("steps, from the first that was read"), "yaxis": axis("longest, ms", rangemode="tozero")}
    return {"data": data, "layout": layout(320, showlegend=True, **axes)}


def _lengths(runs: Sequence[Run]) -> Chart:
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": plain(run.name),
            "x": [ms(float(ns)) for ns in np.quantile(run.samples.measures["step"], _SHARES)],
            "y": [round(100 * float(share), 2) for share in _SHARES],
            "line": _line(place),
            "hovertemplate": "%{y:.1f} % of steps take at most %{x:.3f} ms",
        }
        for place, run in enumerate(runs)
    ]
    axes = {"xaxis": axis("a step, ms"), "yaxis": axis("of steps, %", range=[0, 101])}
    return {"data": data, "layout": layout(320, showlegend=True, **axes)}


def _parts(runs: Sequence[Run]) -> Chart:
    rows = [plain(run.name) for run in runs]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": rows,
            "x": [ms(float(run.samples.measures[part].mean())) for run in runs],
            "marker": {"color": COLOURS[part]},
            "hovertemplate": f"%{{y}}: {part} %{{x:.3f}} ms<extra></extra>",
        }
        for part in PARTS
    ]
    axes = {"xaxis": axis("mean of a step, ms"), "yaxis": axis("", autorange="reversed", type="category")}
    return {"data": data, "layout": layout(150 + 30 * len(rows), barmode="stack", **axes)}


def _line(place: int) -> Chart:
    colour, dash = LINES[place % len(LINES)]
    return {"color": colour, "dash": dash if place < len(LINES) else "dash", "width": 2}
