"""Makes records into the training steps of every rank, and the operations of a job: the activities of each worker,
daemon and link did for each.

An operation is one bucket or tensor at one clock: `Key`. Its parts are put together from records of workers, the
daemons of their nodes, and the daemons at both ends of each link have recorded. Any part may be missing (`None`, or not
in the tuples), because rings are finite and processes die; nothing is invented for it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Flush, Kind
from fusion_trace.read.chunks import Chunk, ChunkColumns, chunk_columns
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.rows import NEVER, OF_LINKS, Ints, Row, RowsOfOperations
from fusion_trace.read.span_columns import Span

SCRIPT = {
    "forward": (Kind.FORWARD_BEGIN, Kind.FORWARD_END),
    "backward": (Kind.BACKWARD_BEGIN, Kind.BACKWARD_END),
    "step()": (Kind.STEP_BEGIN, Kind.STEP_END),
}


class Key(NamedTuple):
    """The identity of an operation. `name`: `bucket 3`, or a tensor outside a plan, for which `plan` is 0."""

    name: str
    plan: int
    clock: int

    def __str__(self) -> str:
        return (
            f"{self.name} (plan {self.plan}, clock {self.clock})" if self.plan else f"{self.name} (clock {self.clock})"
        )


@dataclass(frozen=True)
class Step:
    """A training step of a rank, from one STEP_END to the next; `number` is the clock of the latter."""

    rank: int
    number: int
    begin: int
    end: int

    @property
    def ns(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class WorkerPart:
    """A worker's part in an operation. Times in ns, None: not recorded.

    Attributes:
        rank: whose.
        full: the last gradient of the bucket was there.
        submitted: it was handed to the daemon.
        nbytes: how much.
        flush: why it was handed over then.
        done: the daemon's answer was read.
        waits, copies, applies: when the script waited for it; gradients into the arena; results out of it.
    """

    rank: int
    full: int | None
    submitted: int | None
    nbytes: int
    flush: Flush | None
    done: int | None
    waits: tuple[Span, ...]
    copies: tuple[Span, ...]
    applies: tuple[Span, ...]


@dataclass(frozen=True)
class DaemonPart:
    """The part of a node's daemon in an operation. Times in ns, None: not recorded.

    Attributes:
        node: whose.
        ready: by rank, when its part came.
        negotiations: the coordinator was asked, and answered.
        run_begin, run_end: all local parts were there; results are where they belong.
        nbytes: how much.
        kernels: work of kernels, by kind: reduce, encode, decode.
        answered: by rank, when it was given the result.
        applied: by rank, when a home took its contribution, and its staleness in versions.
        failed: when it failed.
    """

    node: int
    ready: Mapping[int, int]
    negotiations: tuple[Span, ...]
    run_begin: int | None
    run_end: int | None
    nbytes: int
    kernels: Mapping[str, tuple[Span, ...]]
    answered: Mapping[int, int]
    applied: Mapping[int, tuple[int, int]]
    failed: int | None


@dataclass(frozen=True)
class Operation:
    """One bucket or tensor at one clock, on all ranks and nodes that have recorded something of it."""

    key: Key
    workers: Mapping[int, WorkerPart]
    daemons: Mapping[int, DaemonPart]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket or tensor; 0 if they are not recorded."""
        parts: list[int] = [part.nbytes for part in self.workers.values()]
        return max([*parts, *(part.nbytes for part in self.daemons.values())], default=0)

    @property
    def asynchronous(self) -> bool:
        """Says whether homes took contributions one at a time, so that no rank waits for all others."""
        return any(part.applied for part in self.daemons.values())

    @property
    def submitted(self) -> int | None:
        """Time at which the first rank handed it over."""
        return min((part.submitted for part in self.workers.values() if part.submitted is not None), default=None)


def steps_of(process: Process) -> tuple[Step, ...]:
    """Returns the whole steps of a worker, in order; the time before the first STEP_END and after the last one is
    none."""
    ends = process.of(Kind.STEP_END)
    times, clocks = ends["time"].tolist(), ends["clock"].tolist()
    return tuple(
        Step(process.rank, number, begin, end)
        for begin, end, before, number in zip(times, times[1:], clocks, clocks[1:], strict=False)
        if number == before + 1 and begin < end  # else records between them are lost, or steps are counted anew
    )


def all_steps(trace: JobTrace) -> dict[int, tuple[Step, ...]]:
    """Returns the whole steps of all workers, by rank."""
    return {rank: steps_of(worker) for rank, worker in sorted(trace.workers.items())}


def bounds_of(steps: Sequence[Step]) -> tuple[Ints, Ints]:
    """Returns the begins and ends of steps."""
    begin, end = (np.array([getattr(step, side) for step in steps], np.int64) for side in ("begin", "end"))
    return begin, end


KERNELS = {
    "reduce": (Kind.REDUCE_BEGIN, Kind.REDUCE_END),
    "encode": (Kind.ENCODE_BEGIN, Kind.ENCODE_END),
    "decode": (Kind.DECODE_BEGIN, Kind.DECODE_END),
}
_OF_WORKERS = (
    Kind.FULL, Kind.SUBMITTED, Kind.DONE, Kind.WAIT_BEGIN, Kind.WAIT_END, Kind.COPY_BEGIN, Kind.COPY_END,
    Kind.APPLY_BEGIN, Kind.APPLY_END,
)  # fmt: skip
_OF_DAEMONS = (
    Kind.READY, Kind.NEGOTIATE_BEGIN, Kind.NEGOTIATE_END, Kind.RUN_BEGIN, Kind.RUN_END, Kind.FAILED, Kind.ANSWERED,
    Kind.APPLIED, *chain(*KERNELS.values()),
)  # fmt: skip


class Operations(Mapping[Key, Operation]):
    """All operations of a job, in order of their first hand-over.

    They are numbered, in no order that means anything, and have columns with a value for each number. An operation is
    put together when it is asked for, with its neighbours: a job may have so many that all of them do not fit into
    memory.

    Attributes:
        name, plan, clock: columns that identify each; the name is its number in the job's table.
        workers, daemons: rows by rank, and by node. Those of daemons have the chunks too.
        order: the operations' numbers, by first hand-over; shape (n,).
    """

    def __init__(self, trace: JobTrace) -> None:
        self._names = trace.names
        self._blocks: OrderedDict[int, list[Operation]] = OrderedDict()
        self._places: dict[tuple[int, int, int], int] | None = None
        self._numbers = {name: number for number, name in enumerate(trace.names)}
        self.name, self.plan, self.clock, self.order, rows = _numbered(trace)
        self.workers = dict(zip(trace.workers, rows, strict=False))
        self.daemons = dict(zip(trace.daemons, rows[len(self.workers) :], strict=True))
        self.order = self.order[np.lexsort((self.clock[self.order], self._first()[self.order]))]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Key]:
        return (self.key_of(number) for number in self.order.tolist())

    def __getitem__(self, key: Key) -> Operation:
        if self._places is None:
            columns = (column[self.order].tolist() for column in (self.name, self.plan, self.clock))
            self._places = {its: place for place, its in enumerate(zip(*columns, strict=True))}
        return self.at(self._places[self._numbers.get(key.name, 0), key.plan, key.clock])

    def values(self) -> Iterator[Operation]:  # type: ignore[override]  # made one after the other
        return (operation for first in range(0, len(self), _BLOCK) for operation in self._block(first // _BLOCK))

    def items(self) -> Iterator[tuple[Key, Operation]]:  # type: ignore[override]
        return ((operation.key, operation) for operation in self.values())

    def at(self, place: int) -> Operation:
        """Returns an operation by its place in the order."""
        return self._block(place // _BLOCK)[place % _BLOCK]

    def some(self, kept: NDArray[np.bool_]) -> Iterator[tuple[int, Operation]]:
        """Yields operations that are kept, in order, with their numbers. `kept`: by these numbers."""
        chosen = self.order[kept[self.order]].tolist()
        for first in range(0, len(chosen), _BLOCK):
            yield from zip(chosen[first : first + _BLOCK], self._made(chosen[first : first + _BLOCK]), strict=True)

    def key_of(self, number: int) -> Key:
        """Returns the identity of an operation by its number."""
        return Key(self._names[self.name[number]], int(self.plan[number]), int(self.clock[number]))

    def submitted(self) -> dict[int, Ints]:
        """Returns when each rank handed each operation over first; `NEVER`: it did not."""
        return {rank: rows.first(Kind.SUBMITTED) for rank, rows in self.workers.items()}

    @cached_property
    def places(self) -> Ints:
        """The place of each operation in the order, by its number."""
        found = np.empty(len(self), np.int64)
        found[self.order] = np.arange(len(self))
        return found

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of each bucket or tensor, by its number; 0 if they are not recorded."""
        found = np.zeros(len(self), np.int64)
        for rows in self.workers.values():
            np.maximum(found, rows.first(Kind.SUBMITTED, "value"), out=found)
        for rows in self.daemons.values():
            np.maximum(found, rows.first(Kind.RUN_BEGIN, "value"), out=found)
        return found

    @cached_property
    def chunks(self) -> ChunkColumns:
        """The chunks of all operations, by their numbers."""
        return chunk_columns(self.daemons, len(self))

    def chunks_of(self, kept: NDArray[np.bool_]) -> ChunkColumns:
        """Returns the chunks of operations that are kept, in the order of these. `kept`: by number."""
        its = self.chunks.kept(kept[self.chunks.of])
        return its.kept(np.argsort(self.places[its.of], kind="stable"))

    def _first(self) -> Ints:
        """Returns when each operation was handed over first, or else the time of its first record."""
        first = np.full(len(self), np.iinfo(np.int64).max)
        for its in self.submitted().values():
            np.minimum(first, its, out=first, where=its != NEVER)
        for number in np.flatnonzero(first == np.iinfo(np.int64).max).tolist():
            first[number] = _first_sign(self._made([number])[0])
        return first

    def _block(self, number: int) -> list[Operation]:
        if number not in self._blocks:
            if len(self._blocks) == _BLOCKS:
                self._blocks.popitem(last=False)
            self._blocks[number] = self._made(self.order[number * _BLOCK : (number + 1) * _BLOCK].tolist())
        self._blocks.move_to_end(number)
        return self._blocks[number]

    def _made(self, numbers: Sequence[int]) -> list[Operation]:
        workers = {rank: rows.of(numbers) for rank, rows in self.workers.items()}
        daemons = {node: rows.of(numbers) for node, rows in self.daemons.items()}
        starts, stops = np.searchsorted(self.chunks.of, [numbers, [number + 1 for number in numbers]]).tolist()
        return [
            Operation(
                self.key_of(number),
                {rank: _worker_part(rank, its[place]) for rank, its in workers.items() if its[place]},
                {node: _daemon_part(node, its[place]) for node, its in daemons.items() if its[place]},
                tuple(self.chunks.chunks(starts[place], stops[place])),
            )
            for place, number in enumerate(numbers)
        ]


def _numbered(trace: JobTrace) -> tuple[Ints, Ints, NDArray[np.uint64], Ints, list[RowsOfOperations]]:
    """Numbers a job's operations, from the records of workers and daemons.

    Returns:
        Columns of names, plans and clocks; the numbers in order of appearance (workers by rank, then daemons by node,
        then chunks); and the rows of each process, workers first.
    """
    everybody: list[tuple[Process, tuple[Kind, ...]]] = [(process, _OF_WORKERS) for process in trace.workers.values()]
    everybody += [(process, (*_OF_DAEMONS, *OF_LINKS)) for process in trace.daemons.values()]
    places, abouts, clocks = [], [], []
    for process, kinds in everybody:
        records = process.records
        kept = np.flatnonzero(np.isin(records["kind"], kinds) & (records["name"] > 0)).astype(np.int32)
        places.append(kept)
        abouts.append((records["name"][kept].astype(np.uint64) << np.uint64(32)) | records["plan"][kept])
        clocks.append(records["clock"][kept])
    about = _all_of(abouts)
    clock = _all_of(clocks)
    numbers = [
        np.searchsorted(about, its) * max(1, len(clock)) + np.searchsorted(clock, at)
        for its, at in zip(abouts, clocks, strict=True)
    ]
    abouts.clear()
    clocks.clear()
    found = _all_of(numbers)
    known = about[found // max(1, len(clock))]
    rows, stage, first = [], np.full(len(found), 4 * len(everybody)), np.zeros(len(found), np.int64)
    for place, ((process, _), kept) in enumerate(zip(everybody, places, strict=True)):
        of = np.searchsorted(found, numbers[place])
        kind = process.records["kind"][kept]
        later = np.zeros(len(of), np.int64)  # links come after everything else, sent chunks first
        later[np.isin(kind, (Kind.QUEUED, Kind.SENT))] = 1
        later[np.isin(kind, (Kind.RECEIVED, Kind.TAKEN))] = 2
        for turn in range(3):
            its = np.flatnonzero(later == turn)[::-1]
            began = np.full(len(found), -1)
            began[of[its]] = its
            new = (began >= 0) & (stage > turn * len(everybody) + place)
            stage[new], first[new] = turn * len(everybody) + place, began[new]
        order = np.argsort(of, kind="stable")
        starts = np.searchsorted(of[order], np.arange(len(found) + 1))
        rows.append(RowsOfOperations(process, kept[order], starts))
    came = np.lexsort((first, stage))
    name, plan = (known >> np.uint64(32)).astype(np.int64), (known & np.uint64(0xFFFFFFFF)).astype(np.int64)
    at = clock[found % max(1, len(clock))] if len(found) else np.zeros(0, np.uint64)
    return name, plan, at, came, rows


def _all_of(parts: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
    return np.unique(np.concatenate([np.unique(part) for part in parts])) if parts else np.zeros(0, np.int64)


_BLOCK = 8  # operations that are put together at once
_BLOCKS = 8  # that are kept


@lru_cache(maxsize=2)  # a command asks several questions about a job, or compares two
def operations(trace: JobTrace) -> Operations:
    """Returns all operations, in order of their first hand-over."""
    return Operations(trace)


class _Rows:
    """The records of a process that are about an operation, in one pass.

    Attributes:
        first: by kind, the first one.
        spans: by the kind that begins them; first begun, first ended, as `RowsOfOperations.spans` has them.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.first: dict[int, Row] = {}
        self.spans: dict[int, list[Span]] = {}
        opened: dict[int, deque[int]] = {}
        for row in rows:
            kind = row[0]
            self.first.setdefault(kind, row)
            if kind in _BEGIN_OF:
                begun = opened.get(_BEGIN_OF[kind])
                if begun:
                    self.spans.setdefault(_BEGIN_OF[kind], []).append(Span(begun.popleft(), row[1]))
            elif kind in _BEGINS:
                opened.setdefault(kind, deque()).append(row[1])

    def time(self, kind: Kind) -> int | None:
        row = self.first.get(kind)
        return None if row is None else row[1]

    def spans_from(self, begin: Kind) -> tuple[Span, ...]:
        return tuple(self.spans.get(begin, ()))


_SPANS = (
    (Kind.WAIT_BEGIN, Kind.WAIT_END), (Kind.COPY_BEGIN, Kind.COPY_END), (Kind.APPLY_BEGIN, Kind.APPLY_END),
    (Kind.NEGOTIATE_BEGIN, Kind.NEGOTIATE_END), *KERNELS.values(),
)  # fmt: skip
_BEGIN_OF = {int(end): int(begin) for begin, end in _SPANS}
_BEGINS = frozenset(_BEGIN_OF.values())
_REASONS = {int(reason): reason for reason in Flush}


def _worker_part(rank: int, rows: Sequence[Row]) -> WorkerPart:
    its = _Rows(rows)
    submitted = its.first.get(Kind.SUBMITTED)
    return WorkerPart(
        rank=rank,
        full=its.time(Kind.FULL),
        submitted=None if submitted is None else submitted[1],
        nbytes=0 if submitted is None else submitted[2],
        flush=None if submitted is None else _REASONS.get(submitted[3]),
        done=its.time(Kind.DONE),
        waits=its.spans_from(Kind.WAIT_BEGIN),
        copies=its.spans_from(Kind.COPY_BEGIN),
        applies=its.spans_from(Kind.APPLY_BEGIN),
    )


def _daemon_part(node: int, rows: Sequence[Row]) -> DaemonPart:
    its = _Rows(rows)
    run = its.first.get(Kind.RUN_BEGIN)
    return DaemonPart(
        node=node,
        ready={peer: time for kind, time, _, _, peer in reversed(rows) if kind == _READY},
        negotiations=its.spans_from(Kind.NEGOTIATE_BEGIN),
        run_begin=None if run is None else run[1],
        run_end=its.time(Kind.RUN_END),
        nbytes=0 if run is None else run[2],
        kernels={name: its.spans_from(begin) for name, (begin, _) in KERNELS.items()},
        answered={peer: time for kind, time, _, _, peer in rows if kind == _ANSWERED},
        applied={peer: (time, value) for kind, time, value, _, peer in rows if kind == _APPLIED},
        failed=its.time(Kind.FAILED),
    )


_READY, _ANSWERED, _APPLIED = int(Kind.READY), int(Kind.ANSWERED), int(Kind.APPLIED)


def _first_sign(operation: Operation) -> int:
    """Returns the first record of an operation that was not handed over."""
    times = [
        time
        for part in operation.daemons.values()
        for time in (*part.ready.values(), part.run_begin)
        if time is not None
    ]
    times += [time for chunk in operation.chunks for time in (chunk.sent, chunk.received) if time is not None]
    times += [time for part in operation.workers.values() for time in (part.full, part.done) if time is not None]
    return min(times, default=0)
