"""`fusion-trace buckets` measures how long each phase of each bucket takes.

Phases of a bucket at one clock, of which medians over clocks and ranks (or nodes, or chunks) are shown:

| phase | from | to |
| --- | --- | --- |
| fill | its first gradient | its last one |
| hand over | its last gradient, or the copy of it | the worker hands it to the daemon |
| local | ... | all workers of the node have, and the daemon starts it, without negotiation |
| negotiate | the coordinator is asked | and has answered |
| run | the daemon starts it | results are where they belong |
| kernels | within run | reducing, encoding, decoding |
| queue | a chunk waits to be sent | it is handed to the link |
| wire | a chunk is sent | and received |
| take | a chunk is received | and used |
| answer | the daemon answers | the worker has read it |
| wait | within the step | the script is kept waiting for it |
| apply | results | are where they belong |
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fusion_rt.tracing.format import Flush, Kind
from fusion_trace.analyse.overlap import median, partitions, steps_of_operations
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import Operation, operations
from fusion_trace.read.ring_reader import Records
from fusion_trace.read.spans import difference, total, union

PHASES = (
    "fill", "hand over", "local", "negotiate", "run", "kernels", "queue", "wire", "take", "answer", "wait", "apply",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A plan, as a daemon received it.

    Attributes:
        number: its id; at: when it came, ns; nbytes: of all its buckets.
        buckets: their names by index; tensors: by the bucket's name, (name, bytes) in order.
    """

    number: int
    at: int
    nbytes: int
    buckets: Mapping[int, str]
    tensors: Mapping[str, tuple[tuple[str, int], ...]]

    def bucket_of(self, tensor: str) -> str | None:
        return next((name for name, its in self.tensors.items() if any(each == tensor for each, _ in its)), None)


@dataclass(frozen=True)
class BucketTimes:
    """A bucket of a plan, or a tensor outside any (`plan` is 0), over all clocks.

    Attributes:
        nbytes: of it, the most that was handed over.
        fill: of the largest bucket of its plan, how much it is (0 to 1); None outside a plan.
        tensors: in it.
        times: how often it was exchanged.
        flushes: by reason, how often a rank handed it over for it.
        phases: medians by `PHASES`, ns; those that were not recorded are missing.
    """

    name: str
    plan: int
    nbytes: int
    fill: float | None
    tensors: int
    times: int
    flushes: Mapping[str, int]
    phases: Mapping[str, int]


def plans(trace: JobTrace) -> tuple[Plan, ...]:
    """Returns all plans, by time. The lowest node's records count; plans are recorded anew now and then, so that full
    rings have them."""
    found: dict[int, Plan] = {}
    for _, daemon in sorted(trace.daemons.items()):
        records = daemon.of(Kind.PLAN, Kind.BUCKET, Kind.MEMBER)
        for number in np.unique(records["plan"]).tolist():
            if number not in found:
                found[number] = _plan(trace, number, records[records["plan"] == number])
    return tuple(sorted(found.values(), key=lambda plan: plan.at))


def _plan(trace: JobTrace, number: int, records: Records) -> Plan:
    names: dict[int, str] = {}
    tensors: dict[int, dict[str, int]] = defaultdict(dict)
    nbytes = 0
    for kind, name, value, extra in zip(
        *(records[field].tolist() for field in ("kind", "name", "value", "extra")), strict=True
    ):
        if kind == Kind.PLAN:
            nbytes = value
        elif kind == Kind.BUCKET:
            names[extra] = trace.names[name]
        else:
            tensors[extra][trace.names[name]] = value
    members = {names.get(index, f"bucket {index}"): tuple(its.items()) for index, its in tensors.items()}
    return Plan(number, int(records["time"][0]), nbytes, names, members)


def find(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> tuple[BucketTimes, ...]:
    """Returns buckets by plan and size, and then what is outside any plan.

    Without a choice of steps, operations outside of whole steps count too.
    """
    every = operations(trace)
    its: Iterable[Operation] = every.values()
    if chosen != EVERY_STEP:
        its = (each for _, each in every.some(steps_of_operations(every, partitions(trace, chosen)) >= 0))
    groups: dict[tuple[int, str], list[Operation]] = defaultdict(list)
    for operation in its:
        groups[operation.key.plan, operation.key.name].append(operation)
    known = {plan.number: plan for plan in plans(trace)}
    completed = gradients(trace)
    sizes = {key: max(operation.nbytes for operation in group) for key, group in groups.items()}
    result = []
    for (number, name), group in groups.items():
        plan = known.get(number)
        members = plan.tensors.get(name, ()) if plan is not None else ()
        largest = max((size for (of, _), size in sizes.items() if of == number), default=0)
        result.append(
            BucketTimes(
                name=name,
                plan=number,
                nbytes=sizes[number, name],
                fill=sizes[number, name] / largest if number and largest else None,
                tensors=len(members) or 1,
                times=len(group),
                flushes=_flushes(group),
                phases=_phases(trace, group, {tensor for tensor, _ in members}, completed),
            )
        )
    return tuple(sorted(result, key=lambda bucket: (not bucket.plan, bucket.plan, _in_order(bucket.name))))


def _in_order(name: str) -> tuple[str, int, str]:
    """Returns a key that sorts `bucket 2` before `bucket 10`."""
    head, _, number = name.rpartition(" ")
    return (head, int(number), "") if number.isascii() and number.isdigit() else (name, 0, name)


def _flushes(group: Sequence[Operation]) -> dict[str, int]:
    reasons = Counter(part.flush for operation in group for part in operation.workers.values())
    return {reason.name.lower(): reasons[reason] for reason in Flush if reasons[reason]}


_Completed = Mapping[tuple[int, str], Sequence[int]]


def gradients(trace: JobTrace) -> _Completed:
    """Returns when gradients were complete, by rank and name, in order."""
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, worker in trace.workers.items():
        records = worker.of(Kind.GRADIENT)
        for name, time in zip(records["name"].tolist(), records["time"].tolist(), strict=True):
            found[rank, trace.names[name]].append(time)
    return found


def _phases(trace: JobTrace, group: Sequence[Operation], members: set[str], completed: _Completed) -> dict[str, int]:
    seen: dict[str, list[int]] = defaultdict(list)

    def note(phase: str, begin: int | None, end: int | None) -> None:
        if begin is not None and end is not None:
            seen[phase].append(end - begin)

    since: dict[int, int] = {}
    for operation in sorted(group, key=lambda each: each.key.clock):
        for rank, mine in operation.workers.items():
            note("fill", _first_gradient(completed, rank, members, since.get(rank), mine.full), mine.full)
            note("hand over", mine.full, mine.submitted)
            if mine.full is not None:
                since[rank] = mine.full
            answered = next((part.answered[rank] for part in operation.daemons.values() if rank in part.answered), None)
            note("answer", answered, mine.done)
            for phase, spans in (("wait", mine.waits), ("apply", mine.applies)):
                if spans:
                    seen[phase].append(total(union(spans)))
        for part in operation.daemons.values():
            handed = [operation.workers[rank].submitted for rank in part.ready if rank in operation.workers]
            last = max((time for time in handed if time is not None), default=None)
            asked = union(part.negotiations)
            if last is not None and part.run_begin is not None:
                seen["local"].append(total(difference(union([(last, part.run_begin)]), asked)))
            if asked:
                seen["negotiate"].append(total(asked))
            note("run", part.run_begin, part.run_end)
            if part.run_end is not None:
                seen["kernels"].append(total(union(part.worked)))
        for chunk in operation.chunks:
            note("queue", chunk.queued, chunk.sent)
            note("wire", chunk.sent, chunk.received)
            note("take", chunk.received, chunk.taken)
    return {phase: median(seen[phase]) for phase in PHASES if phase in seen}


def _first_gradient(
    completed: _Completed, rank: int, members: set[str], since: int | None, full: int | None
) -> int | None:
    """Returns when the first gradient of a bucket came after the bucket was full the last time; None: not known."""
    if full is None or since is None:
        return None
    first = None
    for name in members:
        times = completed.get((rank, name), ())
        place = bisect_right(times, since)
        if place < len(times) and times[place] <= full and (first is None or times[place] < first):
            first = times[place]
    return first


def document(trace: JobTrace, found: Iterable[BucketTimes]) -> dict[str, object]:
    """Returns what `--json` shows; all times in ns."""
    return {
        "job": trace.job,
        "plans": [
            {"plan": plan.number, "at": plan.at, "bytes": plan.nbytes, "buckets": len(plan.buckets)}
            for plan in plans(trace)
        ],
        "buckets": [asdict(bucket) for bucket in found],
        "problems": list(trace.problems),
    }
