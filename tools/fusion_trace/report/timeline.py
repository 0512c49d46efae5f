"""Single steps of a report as a timeline: the activities of every process, as `merge` writes them for viewers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fusion_rt.tracing.format import Role
from fusion_trace.analyse.overlap import Partition, by_step
from fusion_trace.export import picture
from fusion_trace.export.picture import Track
from fusion_trace.read.choice import ChoiceError, StepRange
from fusion_trace.read.job import JobTrace, Process

MOST_STEPS = 12  # that are drawn
MOST_RANKS = 16  # in a step, with the daemons of their nodes
MOST_BARS = 2000  # in a step
_SLOWEST = 3  # steps, if no others are chosen
_WHOLE = {"waits": "wait", "handed over": "handed over", "blocked": "blocked"}
_OF_HOSTS = {"to": "sending", "from": "receiving"}
_BY_WORD = ("script", "memory", "kernels")  # tracks on which a slice's first word is its kind


@dataclass(frozen=True)
class Bar:
    """Something that lasts, on a track of a process. Times in ns since the step began."""

    process: str
    track: str
    kind: str
    what: str
    begin: int
    ns: int


@dataclass(frozen=True)
class DrawnStep:
    """A step with all that happened in it.

    Attributes:
        why: it was chosen.
        longest: how long it takes on the rank where that is longest, ns.
        ns: from its begin on the first rank to its end on the last one, which may be longer.
        left_out: how many bars are missing, which are shorter than all others.
    """

    number: int
    why: str
    longest: int
    ns: int
    bars: tuple[Bar, ...]
    left_out: int


def find(trace: JobTrace, parts: Sequence[Partition], chosen: StepRange | None, median: int) -> tuple[DrawnStep, ...]:
    """Returns the steps that are drawn.

    Args:
        parts: whole steps of all ranks.
        chosen: by a person; None: the one of median length, `median`, and the slowest ones.

    Raises:
        ChoiceError: none of them is in the trace.
    """
    steps = by_step(parts)
    if chosen is None:
        slowest = sorted(steps, key=lambda number: -max(part.ns for part in steps[number]))[:_SLOWEST]
        why = {median: "of median length"}
        why |= {number: f"number {place} of the slowest" for place, number in enumerate(slowest, 1)}
    else:
        why = {number: "" for number in steps if number in chosen}
        if not why:
            raise ChoiceError(f"--timeline: the trace has steps {min(steps)} to {max(steps)}, and none of these")
    return tuple(_drawn(trace, number, each, steps[number]) for number, each in [*why.items()][:MOST_STEPS])


def _drawn(trace: JobTrace, number: int, why: str, parts: Sequence[Partition]) -> DrawnStep:
    begin, end = min(part.begin for part in parts), max(part.end for part in parts)
    shown = sorted(part.rank for part in parts)[:MOST_RANKS]
    nodes = {trace.node_of[rank] for rank in shown}
    # With a step on either side, in which operations under way at its begin and end begin and end.
    part = trace.between(2 * begin - end, 2 * end - begin)
    rows = sorted(zip(part.processes, picture.draw(part).processes, strict=True), key=lambda each: _order(each[0]))
    bars = [
        bar
        for process, drawn in rows
        if (process.rank in shown if process.role == Role.WORKER else process.node in nodes)
        for track in drawn.tracks
        for bar in _bars(trace.name_of(process), track, begin, end)
    ]
    kept = sorted(sorted(range(len(bars)), key=lambda place: -bars[place].ns)[:MOST_BARS])
    longest = max(part.ns for part in parts)
    return DrawnStep(number, why, longest, end - begin, tuple(bars[place] for place in kept), len(bars) - len(kept))


def _order(process: Process) -> tuple[int, bool, int]:
    return process.node, process.role == Role.DAEMON, process.rank


def _bars(process: str, track: Track, begin: int, end: int) -> Iterator[Bar]:
    kind = _kind(track.name)
    if kind is None:
        return
    inside = np.flatnonzero((track.slices.end > begin) & (track.slices.begin < end))
    for each in track.slices.at(inside):
        first, last = max(each.begin, begin), min(each.end, end)
        yield Bar(process, track.name, kind or each.name.partition(" ")[0], each.name, first - begin, last - first)


def _kind(track: str) -> str | None:
    """Returns the contents of a track; "": a slice's first word says them; None: moments only, or steps."""
    base = track.partition(" (")[0]
    if base in _BY_WORD:
        return ""
    if base == "operations":
        return "operation"
    return _WHOLE.get(base) or _OF_HOSTS.get(base.partition(" ")[0])
