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
| queue | a chunk may be sent | it is the first on its link: before, there was no credit, or others were carried |
| wire | a chunk is the first on its link | and received |
| take | a chunk is received | and used |
| answer | the daemon answers | the worker has read it |
| wait | within the step | the script is kept waiting for it |
| apply | results | are where they belong |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from fusion_rt.tracing.format import Flush, Kind
from fusion_rt.tracing.reader import Records
from fusion_trace.analyse.overlap import median, partitions, steps_of_operations
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import KERNELS, Operations, operations
from fusion_trace.read.rows import NEVER, Ints, RowsOfOperations
from fusion_trace.read.span_columns import covered_by_group

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
        tensors: in it.
        times: how often it was exchanged.
        flushes: by reason, how often a rank handed it over for it.
        phases: medians by `PHASES`, ns; those that were not recorded are missing.
    """

    name: str
    plan: int
    nbytes: int
    tensors: int
    times: int
    flushes: Mapping[str, int]
    phases: Mapping[str, int]


def repeated(found: Sequence[BucketTimes]) -> Sequence[BucketTimes]:
    """Returns those without what a script has done once, such as a broadcast of each parameter, which would bury what
    is in every step; all of them if nothing is left."""
    return [bucket for bucket in found if bucket.plan or bucket.times > 1] or found


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
    """Returns buckets by plan and size, and then operations outside any plan.

    Without a choice of steps, operations outside of whole steps count too.
    """
    every = operations(trace)
    kept = np.ones(len(every), bool)
    if chosen != EVERY_STEP:
        kept = steps_of_operations(every, partitions(trace, chosen)) >= 0
    kinds, group_of = np.unique(np.stack([every.plan[kept], every.name[kept]]), axis=1, return_inverse=True)
    group = np.full(len(every), -1)
    group[kept] = group_of.reshape(-1)
    count = kinds.shape[1]
    known = {plan.number: plan for plan in plans(trace)}
    keys = [(int(plan), trace.names[name]) for plan, name in kinds.T]
    members = [known[plan].tensors.get(name, ()) if plan in known else () for plan, name in keys]
    sizes = [int(nbytes) for nbytes in _largest(group, every.nbytes, count)]
    times = np.bincount(group[kept], minlength=count)
    flushes = _flushes(every, group, count)
    phases = _Phases(trace, every, group, [{tensor for tensor, _ in its} for its in members]).medians()
    result = []
    for number, (plan, name) in enumerate(keys):
        result.append(
            BucketTimes(
                name=name,
                plan=plan,
                nbytes=sizes[number],
                tensors=len(members[number]) or 1,
                times=int(times[number]),
                flushes=flushes[number],
                phases=phases[number],
            )
        )
    return tuple(sorted(result, key=lambda bucket: (not bucket.plan, bucket.plan, _in_order(bucket.name))))


def _largest(group: Ints, values: Ints, count: int) -> Ints:
    found = np.zeros(count, np.int64)
    np.maximum.at(found, group[group >= 0], values[group >= 0])
    return found


def _in_order(name: str) -> tuple[str, int, str]:
    """Returns a key that sorts `bucket 2` before `bucket 10`."""
    head, _, number = name.rpartition(" ")
    return (head, int(number), "") if number.isascii() and number.isdigit() else (name, 0, name)


def _flushes(every: Operations, group: Ints, count: int) -> list[dict[str, int]]:
    """Returns, of each group, how often a rank handed it over for which reason."""
    found = np.zeros((count, max(Flush) + 1), np.int64)
    for rows in every.workers.values():
        why = rows.first(Kind.SUBMITTED, "extra")
        its = (why > 0) & (why <= max(Flush)) & (group >= 0)
        np.add.at(found, (group[its], why[its]), 1)
    return [{reason.name.lower(): int(row[reason]) for reason in Flush if row[reason]} for row in found]


def gradients(trace: JobTrace) -> dict[tuple[int, str], Ints]:
    """Returns when gradients were complete, by rank and name, in order; ns."""
    found: dict[tuple[int, str], Ints] = {}
    for rank, worker in trace.workers.items():
        records = worker.of(Kind.GRADIENT)
        order = np.argsort(records["name"], kind="stable")
        for name, times in zip(*_runs(records["name"][order], records["time"][order]), strict=True):
            found[rank, trace.names[name]] = times
    return found


class _Phases:
    """How long each phase of each operation takes, by group; see `PHASES`.

    Args:
        group: of each operation, by its number; -1: not asked for.
        members: tensors of each group.
    """

    def __init__(self, trace: JobTrace, every: Operations, group: Ints, members: Sequence[set[str]]) -> None:
        self._trace, self._every, self._group, self._members = trace, every, group, members
        self._seen: dict[str, list[tuple[Ints, Ints]]] = defaultdict(list)

    def medians(self) -> list[dict[str, int]]:
        """Returns the median of each phase that was recorded, by group."""
        submitted = self._every.submitted()
        for rank, rows in self._every.workers.items():
            self._of_worker(rank, rows)
        for node, rows in self._every.daemons.items():
            self._of_daemon(node, rows, submitted)
        chunks = self._every.chunks
        first = chunks.alone()
        self._note("queue", np.where(chunks.queued == NEVER, chunks.sent, chunks.queued), first, chunks.of)
        self._note("wire", first, chunks.received, chunks.of)
        self._note("take", chunks.received, chunks.taken, chunks.of)
        found: list[dict[str, int]] = [{} for _ in self._members]
        for phase in PHASES:
            its = self._seen.get(phase, ())
            of, lengths = (np.concatenate([*(each[side] for each in its), _NOTHING]) for side in (0, 1))
            order = np.argsort(of, kind="stable")
            for group, values in zip(*_runs(of[order], lengths[order]), strict=True):
                found[group][phase] = median(values)
        return found

    def _note(self, phase: str, begin: Ints, end: Ints, of: Ints | None = None) -> None:
        """Notes the time between the records of both sides; clocks that disagree make none negative.

        Args:
            of: the operations; by default all.
        """
        group = self._group if of is None else self._group[of]
        there = (begin != NEVER) & (end != NEVER) & (group >= 0)
        self._seen[phase].append((group[there], np.maximum(end[there] - begin[there], 0)))

    def _note_lengths(self, phase: str, of: Ints, lengths: Ints) -> None:
        kept = self._group[of] >= 0
        self._seen[phase].append((self._group[of][kept], lengths[kept]))

    def _of_worker(self, rank: int, rows: RowsOfOperations) -> None:
        full, submitted, done = (rows.first(kind) for kind in (Kind.FULL, Kind.SUBMITTED, Kind.DONE))
        self._note("fill", self._first_gradients(rank, full), full)
        self._note("hand over", full, submitted)
        answered = np.full(len(full), NEVER)
        for daemon in self._every.daemons.values():
            answered = np.where(answered == NEVER, daemon.last_of_peer(Kind.ANSWERED, rank), answered)
        self._note("answer", answered, done)
        for phase, kinds in (("wait", (Kind.WAIT_BEGIN, Kind.WAIT_END)), ("apply", (Kind.APPLY_BEGIN, Kind.APPLY_END))):
            of, begin, end = rows.spans(*kinds)
            self._note_lengths(phase, *covered_by_group(of, begin, end))

    def _of_daemon(self, node: int, rows: RowsOfOperations, submitted: Mapping[int, Ints]) -> None:
        del node
        begin, end = rows.first(Kind.RUN_BEGIN), rows.first(Kind.RUN_END)
        last = np.full(len(begin), NEVER)
        of, ready = rows.select(Kind.READY)
        for rank, times in submitted.items():
            came = np.zeros(len(last), bool)
            came[of[ready["peer"] == rank]] = True
            np.maximum(last, times, out=last, where=came)
        asked = rows.spans(Kind.NEGOTIATE_BEGIN, Kind.NEGOTIATE_END)
        waited = np.maximum(begin - last, 0)
        of, opened, closed = asked
        known = (last[of] != NEVER) & (begin[of] != NEVER)
        inside = of[known], np.maximum(opened[known], last[of[known]]), np.minimum(closed[known], begin[of[known]])
        for_answers = np.zeros(len(begin), np.int64)
        its, lengths = covered_by_group(*inside)
        for_answers[its] = lengths
        there = np.flatnonzero((last != NEVER) & (begin != NEVER))
        self._note_lengths("local", there, (waited - for_answers)[there])
        its, lengths = covered_by_group(*asked)
        self._note_lengths("negotiate", its[lengths > 0], lengths[lengths > 0])
        self._note("run", begin, end)
        worked = [rows.spans(*kinds) for kinds in KERNELS.values()]
        its, lengths = covered_by_group(*(np.concatenate(column) for column in zip(*worked, strict=True)))
        kernels = np.zeros(len(begin), np.int64)
        kernels[its] = lengths
        run = np.flatnonzero(end != NEVER)
        self._note_lengths("kernels", run, kernels[run])

    def _first_gradients(self, rank: int, full: Ints) -> Ints:
        """Returns when the first gradient of each operation came after its bucket was full the last time; `NEVER`: not
        known."""
        found = np.full(len(full), NEVER)
        clock = self._every.clock
        there = np.flatnonzero((full != NEVER) & (self._group >= 0))
        there = there[np.lexsort((self._every.places[there], clock[there], self._group[there]))]
        groups = self._group[there]
        for number, its in zip(*_runs(groups, there), strict=True):
            since, until = full[its[:-1]], full[its[1:]]
            first = np.full(len(since), NEVER)
            for name in self._members[number]:
                times = self._completed.get((rank, name), _NOTHING)
                place = np.searchsorted(times, since, "right")
                came = np.concatenate([times, [np.iinfo(np.int64).max]])[place]
                sooner = (came <= until) & ((first == NEVER) | (came < first))
                first[sooner] = came[sooner]
            found[its[1:]] = first
        return found

    @cached_property
    def _completed(self) -> dict[tuple[int, str], Ints]:
        return gradients(self._trace)


_NOTHING = np.zeros(0, np.int64)


def _runs(groups: Ints, values: Ints) -> tuple[list[int], list[Ints]]:
    """Returns the numbers of sorted groups, and the values of each."""
    numbers, first = np.unique(groups, return_index=True)
    return numbers.tolist(), np.split(values, first[1:]) if len(numbers) else []


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
