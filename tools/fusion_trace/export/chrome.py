"""Writes a picture as JSON of the Trace Event Format, which Perfetto and chrome://tracing load."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fusion_trace.export.picture import Picture, Rows, Slice
from fusion_trace.read.job import JobTrace

Event = dict[str, Any]


def events(picture: Picture) -> Iterator[Event]:
    """Yields all events; times in us since the picture's begin, exact to the ns."""
    ends: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # of arrows: time, pid, tid
    for rows in picture.processes:
        yield from _named(rows)
        for tid, track in enumerate(rows.tracks, 1):
            for each in track.slices:
                yield _slice(each, rows.pid, tid, picture.begin)
                for arrow in each.arrows:
                    ends[arrow].append((each.begin, rows.pid, tid))
            for mark in track.marks:
                yield {
                    "ph": "i", "name": mark.name, "cat": "fusion_rt", "ts": _us(mark.time - picture.begin), "s": "t",
                    "pid": rows.pid, "tid": tid, "args": dict(mark.about),
                }  # fmt: skip
    for arrow, places in ends.items():
        yield from _arrow(arrow, sorted(places), picture.begin)


def _named(rows: Rows) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": rows.pid, "args": {"name": rows.name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rows.pid, "args": {"sort_index": rows.pid}}
    for tid, track in enumerate(rows.tracks, 1):
        yield {"ph": "M", "name": "thread_name", "pid": rows.pid, "tid": tid, "args": {"name": track.name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rows.pid, "tid": tid, "args": {"sort_index": tid}}


def _slice(each: Slice, pid: int, tid: int, begin: int) -> Event:
    return {
        "ph": "X", "name": each.name, "cat": "fusion_rt", "ts": _us(each.begin - begin),
        "dur": _us(each.end - each.begin), "pid": pid, "tid": tid, "args": dict(each.about),
    }  # fmt: skip


def _arrow(number: int, places: list[tuple[int, int, int]], begin: int) -> Iterator[Event]:
    """Yields the ends of an arrow from slice to slice, in order of time. Nothing for one that has only one end."""
    if len(places) < 2:
        return
    for place, (time, pid, tid) in enumerate(places):
        phase = "s" if place == 0 else "f" if place == len(places) - 1 else "t"
        event = {"ph": phase, "name": "way", "cat": "fusion_rt", "id": number, "ts": _us(time - begin)}
        yield {**event, "pid": pid, "tid": tid, **({"bp": "e"} if phase == "f" else {})}


def _us(ns: int) -> float:
    return round(ns / 1000, 3)


def about(trace: JobTrace) -> dict[str, object]:
    """Returns what a file says of the trace that its events are from."""
    return {"job": trace.job, "begin_ns": trace.span[0], "problems": list(trace.problems)}


def write(path: str, every: Iterable[Event], about: Mapping[str, Any]) -> int:
    """Writes events to a file, compressed if it ends in .gz. Returns how many there are.

    Args:
        about: what else is said of them.

    Raises:
        OSError: the file cannot be written.
    """
    number = 0
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8") as file:
        head = json.dumps({"displayTimeUnit": "ns", "otherData": dict(about)})
        file.write(head[:-1] + ', "traceEvents": [\n')
        for event in every:
            file.write((",\n" if number else "") + json.dumps(event))
            number += 1
        file.write("\n]}\n")
    return number
