"""Finds the part of each ring in which some steps are, so that not all of a large job has to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fusion_rt.tracing.format import Role
from fusion_rt.tracing.reader import Header, Records, Window, ends_of_steps
from fusion_trace.read.choice import EVERY_STEP, ChoiceError, StepRange
from fusion_trace.read.progress import told

AT_ONCE = 4 << 20  # of a job that are read if nobody has chosen steps: with what is made of them, a few 100 MB
_FOREVER: Window = (-(1 << 62), 1 << 62)


@dataclass(frozen=True)
class Windows:
    """The parts of a job's rings that are read.

    Attributes:
        of: by path; those that are missing are read wholly.
        chosen: the steps, if only the last ones of a job are read because it is large; else None.
        records: how many it has.
    """

    of: Mapping[str, Window]
    chosen: StepRange | None = None
    records: int = 0


def windows(headers: Mapping[str, Header], chosen: StepRange) -> Windows:
    """Returns which part of each ring some steps are in, with a step on either side, in which operations of theirs may
    begin and end. Without a choice, and if a job is large, the last steps of it.

    Args:
        headers: of the rings, by path.

    Raises:
        ChoiceError: there are whole steps in them, and none that was chosen.
    """
    records = sum(min(header.written, header.capacity) for header in headers.values())
    if chosen == EVERY_STEP and records <= AT_ONCE:
        return Windows({})
    workers = [path for path, header in headers.items() if header.role == Role.WORKER]
    ends = {path: ends_of_steps(path) for path in told("looking for steps: rings", workers)}
    clocks = np.sort(np.concatenate([its["clock"] for its in ends.values()])) if ends else np.zeros(0)
    if not len(clocks):
        return Windows({})
    if not any(clock in chosen for clock in [*np.unique(clocks).tolist(), int(clocks[-1]) + 1]):
        # The one after the last that has ended is there as well, and may be what a rank has died in.
        whole = [its["clock"][1:][its["clock"][1:] == its["clock"][:-1] + 1] for its in ends.values()]
        first, last = (pick((int(pick(its)) for its in whole if len(its)), default=0) for pick in (min, max))
        job = next(iter(headers.values())).job
        raise ChoiceError(f"none of the chosen steps is in job {job}, which has steps {first} to {last}")
    limited = None
    if chosen == EVERY_STEP:
        # A record belongs to a step of one rank, on average: the last of these, so that a rank that died long ago does
        # not count.
        kept = max(1, len(clocks) * AT_ONCE // records)
        limited = chosen = StepRange(int(clocks[-kept]), None)
    of = {path: _window(its, chosen) for path, its in ends.items()}
    of_host: dict[tuple[str, int], list[Window]] = {}
    for path, window in of.items():
        of_host.setdefault(_host(headers[path]), []).append(window)
    for path, header in headers.items():
        if header.role == Role.DAEMON and _host(header) in of_host:
            of[path] = _around(of_host[_host(header)])
    return Windows(of, limited, records)


def _window(ends: Records, chosen: StepRange) -> Window:
    """Returns from when to when a worker's records are to be read, whose steps ended so: where it has none of the
    chosen steps, around where they would be."""
    first, stop = chosen.first or 0, 1 << 62 if chosen.stop is None else chosen.stop
    inside = np.flatnonzero((ends["clock"] >= first) & (ends["clock"] < stop))
    before = np.count_nonzero(ends["clock"] < first)
    low, high = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (int(before), int(before))
    return (
        int(ends["time"][low - 2]) if low >= 2 else _FOREVER[0],
        int(ends["time"][high]) if high < len(ends) else _FOREVER[1],
    )


def _host(header: Header) -> tuple[str, int]:
    """Returns a key that tells clocks apart."""
    return header.host, header.node


def _around(every: Sequence[Window]) -> Window:
    return min(low for low, _ in every), max(high for _, high in every)
