"""Writes a picture as JSON of the Trace Event Format, which Perfetto and chrome://tracing load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from fusion_rt.tracing.format import NOBODY, Flush
from fusion_trace.export.output_file import opened
from fusion_trace.export.picture import Picture, Rows
from fusion_trace.export.slices import Marks, Slices
from fusion_trace.read.job import JobTrace
from fusion_trace.read.rows import NEVER, Ints

Event = dict[str, Any]
_US = 1000  # ns; a float holds the quotient exactly enough for all digits to come out
_ROWS = 16384  # that are made into text at once


def lines(picture: Picture) -> Iterator[str]:
    """Yields all events, each as a line of JSON; times in us since the picture's begin, exact to the ns."""
    ends: list[tuple[Ints, ...]] = []  # of arrows: their numbers, time, pid, tid
    for rows in picture.processes:
        yield from map(json.dumps, _named(rows))
        for tid, track in enumerate(rows.tracks, 1):
            yield from _slices(track.slices, rows.pid, tid, picture.begin)
            through = np.flatnonzero(track.slices.arrow)
            where = np.full((2, len(through)), [[rows.pid], [tid]], np.int32)
            ends.append((track.slices.arrow[through], track.slices.begin[through], *where))
            yield from _marks(track.marks, rows.pid, tid, picture.begin)
    if ends:
        yield from _arrows(picture.begin, *(np.concatenate(column) for column in zip(*ends, strict=True)))


def _named(rows: Rows) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": rows.pid, "args": {"name": rows.name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rows.pid, "args": {"sort_index": rows.pid}}
    for tid, track in enumerate(rows.tracks, 1):
        yield {"ph": "M", "name": "thread_name", "pid": rows.pid, "tid": tid, "args": {"name": track.name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rows.pid, "tid": tid, "args": {"sort_index": tid}}


def _slices(its: Slices, pid: int, tid: int, begin: int) -> Iterator[str]:
    known = {text: json.dumps(its.texts.known[text]) for text in np.unique(its.text).tolist()}
    abouts = _Abouts(its)
    for low in range(0, len(its), _ROWS):
        part = slice(low, low + _ROWS)
        times = ((its.begin[part] - begin) / _US).tolist(), ((its.end[part] - its.begin[part]) / _US).tolist()
        for text, ts, duration, args in zip(its.text[part].tolist(), *times, abouts.of(part), strict=True):
            yield (
                f'{{"ph": "X", "name": {known[text]}, "cat": "fusion_rt", "ts": {ts}, "dur": {duration}, '
                f'"pid": {pid}, "tid": {tid}, "args": {{{args}}}}}'
            )


class _Abouts:
    """The insides of slices' `args`."""

    def __init__(self, its: Slices) -> None:
        self._its = its
        plan, clock = its.texts.plan, its.texts.clock
        of = np.unique(its.operation)
        of = of[of >= 0]
        self._operations = {-1: ""}
        for number, its_plan, its_clock in zip(of.tolist(), plan[of].tolist(), clock[of].tolist(), strict=True):
            planned = f'"plan": {its_plan}, ' if its_plan else ""
            self._operations[number] = f'{planned}"clock": {its_clock}'
        self._whys = {int(why): f', "why": "{why.name.lower()}"' for why in Flush} | {0: ""}

    def of(self, part: slice) -> Iterator[str]:
        """Yields those of some slices."""
        its = self._its
        columns = [its.operation[part].tolist()]
        if (its.nbytes == NEVER).all() and not its.why.any():
            return map(self._operations.__getitem__, *columns)
        columns += [column[part].tolist() for column in (its.nbytes, its.chunk, its.why)]
        return (
            self._operations[operation]
            + (f', "bytes": {nbytes}' if nbytes != NEVER else "")
            + (f', "number": {chunk}' if chunk != NEVER else "")
            + self._whys[why]
            for operation, nbytes, chunk, why in zip(*columns, strict=True)
        )


def _marks(its: Marks, pid: int, tid: int, begin: int) -> Iterator[str]:
    known: dict[tuple[int, int], str] = {}
    for low in range(0, len(its), _ROWS):
        records = its.records[low : low + _ROWS]
        times = ((records["time"] - begin) / _US).tolist()
        columns = (records[of].tolist() for of in ("kind", "name", "value", "peer"))
        for ts, kind, name, value, peer in zip(times, *columns, strict=True):
            if (kind, name) not in known:
                known[kind, name] = json.dumps(its.text(kind, name))
            whose = f', "peer": {peer}' if peer != NOBODY else ""
            yield (
                f'{{"ph": "i", "name": {known[kind, name]}, "cat": "fusion_rt", "ts": {ts}, "s": "t", '
                f'"pid": {pid}, "tid": {tid}, "args": {{"value": {value}{whose}}}}}'
            )


def _arrows(begin: int, arrow: Ints, time: Ints, pid: Ints, tid: Ints) -> Iterator[str]:
    """Yields the ends of arrows from slice to slice, in order of time. Nothing for one that has only one end."""
    _, first, inverse, count = np.unique(arrow, return_index=True, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    order = np.lexsort((tid, pid, time, first[inverse]))  # arrows by their first appearance
    order = order[count[inverse[order]] > 1]
    arrow = arrow[order]
    new = np.r_[True, arrow[1:] != arrow[:-1]] if len(arrow) else np.zeros(0, bool)
    last = np.r_[new[1:], True] if len(arrow) else new
    phases = np.where(new, "s", np.where(last, "f", "t"))
    for low in range(0, len(order), _ROWS):
        part = order[low : low + _ROWS]
        columns = (
            arrow[low : low + _ROWS],
            (time[part] - begin) / _US,
            pid[part],
            tid[part],
            phases[low : low + _ROWS],
        )
        for number, ts, of, row, phase in zip(*(column.tolist() for column in columns), strict=True):
            enclosed = ', "bp": "e"' if phase == "f" else ""
            yield (
                f'{{"ph": "{phase}", "name": "way", "cat": "fusion_rt", "id": {number}, "ts": {ts}, '
                f'"pid": {of}, "tid": {row}{enclosed}}}'
            )


def about(trace: JobTrace) -> dict[str, object]:
    """Returns the part of a file that describes the trace of its events."""
    return {"job": trace.job, "begin_ns": trace.span[0], "problems": list(trace.problems)}


def write(path: str, every: Iterable[str], about: Mapping[str, Any]) -> int:
    """Writes events to a file, compressed if it ends in .gz. Returns how many there are.

    Args:
        every: lines of JSON.
        about: further properties of them.

    Raises:
        OSError: the file cannot be written.
    """
    number = 0
    remaining = iter(every)
    with opened(path) as file:
        head = json.dumps({"displayTimeUnit": "ns", "otherData": dict(about)})
        file.write((head[:-1] + ', "traceEvents": [\n').encode())
        while some := list(islice(remaining, _ROWS)):
            file.write(((",\n" if number else "") + ",\n".join(some)).encode())
            number += len(some)
        file.write(b"\n]}\n")
    return number
