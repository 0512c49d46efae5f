"""Puts traces of torch.profiler (`export_chrome_trace`) on the axis of a job.

Their times are of the host's wall clock: microseconds since `baseTimeNanoseconds`, or since 1970 where there is none.
A ring says what the wall clock showed at a moment of the monotonic clock, which records have.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from fusion_rt.tracing.reader import TraceError, read_header
from fusion_trace.export.chrome import Event
from fusion_trace.read.job import JobTrace, Process

MOST_BYTES = 1 << 30  # of a file, uncompressed
_FIRST_TID = 1_000_000  # of threads of these traces, which keeps them apart from tracks
_PIDS = 10_000  # pids of processes that are no workers, for each file


def read(path: str) -> dict[str, Any]:
    """Returns the document in a file.

    Raises:
        TraceError: it is none.
    """
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, EOFError) as error:
        raise TraceError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST_BYTES:
        raise TraceError(f"{path} is longer than {MOST_BYTES >> 20} MiB, more than a trace of a profiler may have here")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not a trace of torch.profiler: {error}") from None
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"{path} is not a trace of torch.profiler: it has no list of traceEvents")
    return document


def merged(trace: JobTrace, path: str, number: int, pids: dict[int, int]) -> Iterator[Event]:
    """Yields the events of a profile, on the job's axis and in the rows of its rank.

    Args:
        path: of the file, with `RANK=` before it if the rank cannot be told by the process's id.
        number: of this file, which keeps apart the common numbers of files.
        pids: in the picture, by rank.

    Raises:
        TraceError: it cannot be used.
    """
    rank, path = _named_rank(path)
    document = read(path)
    every = [event for event in document["traceEvents"] if isinstance(event, dict)]
    worker = _worker(trace, every, rank, path)
    to_axis = _Axis(trace, worker, document)
    tids: dict[object, int] = {}
    others: dict[object, int] = {}
    for event in every:
        moved = dict(event)
        own = event.get("pid") == worker.pid
        if own:
            moved["pid"] = pids[worker.rank]
        else:
            moved["pid"] = others.setdefault(event.get("pid"), _PIDS * (number + 1) + len(others))
        if "tid" in event:
            tid = str(event.get("pid")), str(event["tid"])
            moved["tid"] = tids.setdefault(tid, _FIRST_TID * (number + 1) + len(tids))
        if event.get("ph") == "M":
            if own and event.get("name") != "thread_name":
                continue  # the process has a name here
        elif not isinstance(event.get("ts"), (int, float)) or isinstance(event["ts"], bool):
            continue
        else:
            moved["ts"] = round((to_axis(event["ts"]) - trace.span[0]) / 1000, 3)
        if "id" in event:
            moved["id"] = f"{os.path.basename(path)}-{number}-{event['id']}"
        yield moved


class _Axis:
    """The way from times of a profile to the job's axis."""

    def __init__(self, trace: JobTrace, worker: Process, document: dict[str, Any]) -> None:
        header = read_header(worker.paths[-1])
        base = document.get("baseTimeNanoseconds", 0)
        if not isinstance(base, int):
            raise TraceError(f"baseTimeNanoseconds is {base!r}, which is no time")
        self._base = base - header.created_wall + header.created
        self._offset = trace.offsets[worker.node]

    def __call__(self, us: float) -> int:
        """Returns a time in ns of the job's axis. The fraction is kept apart, since a float has not room for both."""
        whole = int(us // 1)
        local = self._base + whole * 1000 + round((us - whole) * 1000)
        return int(self._offset.apply(np.array([local], np.int64))[0])


def _named_rank(path: str) -> tuple[int | None, str]:
    rank, found, rest = path.partition("=")
    return (int(rank), rest) if found and rank.isdecimal() else (None, path)


def _worker(trace: JobTrace, every: list[dict[str, Any]], rank: int | None, path: str) -> Process:
    if rank is not None:
        if rank not in trace.workers:
            raise TraceError(f"there is no ring of rank {rank}, which is named for {path}")
        return trace.workers[rank]
    pids = {event.get("pid") for event in every if isinstance(event.get("pid"), int)}
    found = [worker for worker in trace.workers.values() if worker.pid in pids]
    if len(found) != 1:
        raise TraceError(f"the rank of the trace {path} cannot be found by the ids of its processes: write RANK={path}")
    return found[0]
