"""Finds operations that were not finished when a job's records end: waits between ranks, and each rank's last activity.

For `fusion-trace hang`, of a job whose daemons are gone and can be asked nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fusion_rt.tracing.format import Kind
from fusion_trace.analyse import endings, gaps
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import Operation, Operations, operations
from fusion_trace.read.rows import NEVER

_DOING = {
    Kind.FORWARD_BEGIN: "in the forward pass",
    Kind.FORWARD_END: "between forward and backward",
    Kind.BACKWARD_BEGIN: "in the backward pass",
    Kind.BACKWARD_END: "between backward and step()",
    Kind.STEP_BEGIN: "in step()",
    Kind.STEP_END: "outside of forward, backward and step()",
}


@dataclass(frozen=True)
class Unfinished:
    """An operation that was handed over, and whose end is not recorded.

    Attributes:
        what, clock: the bucket or tensor.
        seconds: from its first hand-over to the end of the records.
        submitted: ranks that had handed it over and had no answer.
        missing: ranks that take part in it, as in those before of that name, and had not handed it over.
        running: nodes on which it had begun; if no rank is missing, the data of the others was waited for.
    """

    what: str
    clock: int
    seconds: float
    submitted: tuple[int, ...]
    missing: tuple[int, ...]
    running: tuple[int, ...]


@dataclass(frozen=True)
class Last:
    """The last activity of a rank: `silent` seconds before the records of the whole job end; `doing`: in words."""

    rank: int
    host: str
    pid: int
    silent: float
    step: int
    doing: str


@dataclass(frozen=True)
class Ending:
    """The end of a job's records. `died`: the dead, and why the job failed, in sentences; `waiting`: the longest wait
    first."""

    job: str
    died: tuple[str, ...]
    waiting: tuple[Unfinished, ...]
    ranks: tuple[Last, ...]
    problems: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Returns the end as JSON types."""
        return {"from": "records", **asdict(self)}


def ending(trace: JobTrace) -> Ending:
    """Returns the operations that were not finished when the records end."""
    _, end = trace.span
    every = operations(trace)
    found = [_unfinished(operation, members, end) for operation, members in _open(every)]
    waiting = sorted((each for each in found if each is not None), key=lambda each: -each.seconds)
    ranks = tuple(_last(trace, worker, end) for _, worker in sorted(trace.workers.items()))
    died = tuple(endings.sentences(trace, endings.find(trace)))
    missing = dict.fromkeys((*gaps.sentences(trace, gaps.unseen(trace)), *trace.problems))
    return Ending(trace.job, died, tuple(waiting), ranks, tuple(problem for problem in missing if problem not in died))


def _open(every: Operations) -> Iterator[tuple[Operation, set[int]]]:
    """Yields operations that some rank has handed over and got no answer to, each with the ranks that ever take part in
    one of its name."""
    waits = np.zeros(len(every), bool)
    for rows in every.workers.values():
        waits |= (rows.first(Kind.SUBMITTED) != NEVER) & (rows.first(Kind.DONE) == NEVER)
    taken = {rank: set(np.unique(every.name[rows.some]).tolist()) for rank, rows in every.workers.items()}
    for number, operation in every.some(waits):
        yield operation, {rank for rank, names in taken.items() if int(every.name[number]) in names}


def _unfinished(operation: Operation, members: set[int], end: int) -> Unfinished | None:
    submitted = sorted(rank for rank, part in operation.workers.items() if part.submitted is not None)
    waits = [rank for rank in submitted if operation.workers[rank].done is None]
    gone = any(part.failed is not None for part in operation.daemons.values())
    if not waits or gone or operation.submitted is None:
        return None
    finished = any(part.done is not None for part in operation.workers.values())
    missing = () if finished else tuple(sorted(members.difference(submitted)))
    running = tuple(sorted(
        node for node, part in operation.daemons.items() if part.run_begin is not None and part.run_end is None
    ))  # fmt: skip
    key = operation.key
    return Unfinished(key.name, key.clock, (end - operation.submitted) / 1e9, tuple(waits), missing, running)


def _last(trace: JobTrace, worker: Process, end: int) -> Last:
    records = worker.records
    if not len(records):
        return Last(worker.rank, worker.host, worker.pid, 0.0, 0, "nothing that was recorded")
    phases = records[np.isin(records["kind"], list(_DOING))]
    doing = _DOING[Kind(phases["kind"][-1])] if len(phases) else "before the first step"
    number = int(phases["clock"][-1]) if len(phases) else 0
    step = number + 1 if len(phases) and phases["kind"][-1] == Kind.STEP_END else number
    waited = _waits_for(trace, worker)
    if waited:
        doing += f", waiting for {waited}"
    return Last(worker.rank, worker.host, worker.pid, (end - int(records["time"][-1])) / 1e9, step, doing)


def _waits_for(trace: JobTrace, worker: Process) -> str:
    """Returns the name of the operation that the script was kept waiting for; empty if it was not."""
    waits = worker.of(Kind.WAIT_BEGIN, Kind.WAIT_END)
    if not len(waits) or waits["kind"][-1] != Kind.WAIT_BEGIN:
        return ""
    return trace.names[int(waits["name"][-1])] or "communication"
