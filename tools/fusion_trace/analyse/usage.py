"""Processors and memory that the processes of a job used, over time.

Processor time is told at the end of each step of a worker, and of each operation of a daemon; memory twice a second at
most. Times in ns on the job's axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind, Role
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.span_columns import Span

MOST_POINTS = 240  # of a curve
Series = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class UsageCurve:
    """Use of one thing by a process: `values` at `times`, each of shape (n,); n = 0: it was not recorded."""

    times: Series
    values: Series

    @property
    def most(self) -> float | None:
        """The largest value; None if there is none."""
        return float(self.values.max()) if len(self.values) else None


@dataclass(frozen=True, eq=False)
class Usage:
    """Use of processors and memory by a process.

    Attributes:
        process: which.
        processors: how many were busy for it, the mean of each stretch of time; `mean`: of all of it, None: not known.
        memory, on_gpus: bytes that it held.
    """

    process: Process
    processors: UsageCurve
    mean: float | None
    memory: UsageCurve
    on_gpus: UsageCurve


def find(trace: JobTrace, span: Span, ranks: int) -> tuple[Usage, ...]:
    """Returns the usage of the first so many ranks, and the daemons of their nodes, in a time."""
    workers = [worker for _, worker in sorted(trace.workers.items())][:ranks]
    nodes = {worker.node for worker in workers}
    daemons = [daemon for node, daemon in sorted(trace.daemons.items()) if node in nodes]
    return tuple(_of(process, span) for process in [*workers, *daemons])


def _of(process: Process, span: Span) -> Usage:
    ends = process.of(Kind.STEP_END if process.role == Role.WORKER else Kind.RUN_END)
    ends = ends[(ends["time"] >= span.begin) & (ends["time"] <= span.end) & (ends["value"] > 0)]
    processors, mean = _rates(ends["time"].astype(float), ends["value"].astype(float))
    held = process.of(Kind.MEMORY)
    held = held[(held["time"] >= span.begin) & (held["time"] <= span.end)]
    times = held["time"].astype(float)
    on_gpus = held["extra"].astype(float) * 1024
    return Usage(
        process,
        processors,
        mean,
        _highest(times, held["value"].astype(float), span),
        _highest(times, on_gpus, span) if on_gpus.any() else UsageCurve(np.zeros(0), np.zeros(0)),
    )


def _rates(times: Series, used: Series) -> tuple[UsageCurve, float | None]:
    """Returns by how much processor time has grown in stretches of time, and in all of it.

    Args:
        times: when it was told; used: how much there was until then, ns.
    """
    # Processes that had this part one after the other have each begun with 0.
    begun = np.flatnonzero(np.diff(used, prepend=used[:1]) < 0)
    more = np.diff(used, prepend=used[:1])
    more[begun] = used[begun]
    used = np.cumsum(more)
    if len(times) < 2 or times[-1] <= times[0]:
        return UsageCurve(np.zeros(0), np.zeros(0)), None
    number = int(min(MOST_POINTS, len(times) - 1))
    edges = np.linspace(times[0], times[-1], number + 1)
    rates = np.diff(np.interp(edges, times, used)) / np.diff(edges)
    return UsageCurve(edges[:-1] + np.diff(edges) / 2, rates), float(used[-1] - used[0]) / float(times[-1] - times[0])


def _highest(times: Series, values: Series, span: Span) -> UsageCurve:
    """Returns values as they are, or, if they are many, the highest of each stretch of time: rare values are kept."""
    if len(times) <= MOST_POINTS:
        return UsageCurve(times, values)
    places = np.minimum(
        ((times - span.begin) * MOST_POINTS / max(span.end - span.begin, 1)).astype(np.int64), MOST_POINTS - 1
    )
    order: Sequence[int] = np.lexsort((-values, places)).tolist()
    first = np.unique(places[order], return_index=True)[1]
    kept = np.array(order, np.int64)[first]
    return UsageCurve(times[kept], values[kept])
