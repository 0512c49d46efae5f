"""Finds the part of each ring in which some steps are, so that not all of a large job has to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fusion_rt.tracing.format import Role
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.progress import told
from fusion_trace.read.ring_reader import Header, Window, ends_of_steps

AT_ONCE = 4 << 20  # of a job that are read if nobody has chosen steps: with what is made of them, a few 100 MB
_FOREVER: Window = (-(1 << 62), 1 << 62)


@dataclass(frozen=True)
class Windows:
    """What is to be read.

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
    """
    records = sum(min(header.written, header.capacity) for header in headers.values())
    if chosen == EVERY_STEP and records <= AT_ONCE:
        return Windows({})
    workers = [path for path, header in headers.items() if header.role == Role.WORKER]
    ends = {path: ends_of_steps(path) for path in told("looking for steps: rings", workers)}
    last = [int(its["clock"][-1]) for its in ends.values() if len(its)]
    if not last:
        return Windows({})
    steps = max(len(its) for its in ends.values())
    limited = None
    if chosen == EVERY_STEP:
        kept = max(1, steps * AT_ONCE // records)
        limited = chosen = StepRange(max(0, min(last) - kept + 1), None)
    of: dict[str, Window] = {}
    of_host: dict[tuple[str, int], list[Window]] = {}
    for path, its in ends.items():
        inside = np.flatnonzero(
            (its["clock"] >= (chosen.first or 0)) & (its["clock"] < (1 << 62 if chosen.stop is None else chosen.stop))
        )
        if len(inside):
            low, high = int(inside[0]) - 2, int(inside[-1]) + 1
            of[path] = (
                int(its["time"][low]) if low >= 0 else _FOREVER[0],
                int(its["time"][high]) if high < len(its) else _FOREVER[1],
            )
            of_host.setdefault(_host(headers[path]), []).append(of[path])
    for path, header in headers.items():
        if header.role == Role.DAEMON and _host(header) in of_host:
            of[path] = _around(of_host[_host(header)])
    return Windows(of, limited, records)


def _host(header: Header) -> tuple[str, int]:
    """Returns what tells clocks apart."""
    return header.host, header.node


def _around(every: Sequence[Window]) -> Window:
    return min(low for low, _ in every), max(high for _, high in every)
