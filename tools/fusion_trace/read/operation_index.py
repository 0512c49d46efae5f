"""The records of each operation of a job, in columns: nothing here makes a Python object of a record.

Operations are numbered. A column has a value for each of them, in the order of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import Records
from fusion_trace.read.chunks import OF_LINKS, Row
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.span_columns import matched

Ints = NDArray[np.int64]
NEVER = np.iinfo(np.int64).min
"""The time of unrecorded events."""

_FIELDS = ("kind", "time", "value", "extra", "peer")


@dataclass(frozen=True, eq=False)
class RowsOfOperations:
    """Records of a process that are about operations.

    Attributes:
        process: whose.
        rows: places in its records, sorted by operation and then by time; of shape (n,).
        starts: where the rows of each operation begin, and the last ones end; of shape (operations + 1,).
    """

    process: Process
    rows: NDArray[np.int32]
    starts: Ints

    @cached_property
    def kinds(self) -> NDArray[np.uint16]:
        """Kinds of the records, as `rows` has them."""
        found: NDArray[np.uint16] = self.process.records["kind"][self.rows]
        return found

    @cached_property
    def operations(self) -> NDArray[np.int32]:
        """Numbers of the operations that the records are about, as `rows` has them."""
        return np.repeat(np.arange(len(self.starts) - 1, dtype=np.int32), np.diff(self.starts))

    @property
    def some(self) -> NDArray[np.bool_]:
        """Says of each operation whether anything but chunks was recorded."""
        found = np.zeros(len(self.starts) - 1, bool)
        found[self.operations[~_is(self.kinds, OF_LINKS)]] = True
        return found

    def within(self, low: int, high: int) -> RowsOfOperations:
        """Returns the rows of operations from one up to, but without, another; their numbers are counted from there."""
        starts = self.starts[low : high + 1]
        return RowsOfOperations(self.process, self.rows[starts[0] : starts[-1]], starts - starts[0])

    def of(self, numbers: Sequence[int]) -> list[list[Row]]:
        """Returns the records of each of some operations, by time, without those of chunks."""
        begins, ends = self.starts[list(numbers)], self.starts[[number + 1 for number in numbers]]
        places = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
        kept = ~_is(self.kinds[places], OF_LINKS)
        stops = np.concatenate([[0], np.cumsum(kept)])[np.cumsum(ends - begins)].tolist()
        found = self.process.records[self.rows[places[kept]]]
        rows: list[Row] = list(zip(*(found[field].tolist() for field in _FIELDS), strict=True))
        return [rows[low:high] for low, high in zip([0, *stops[:-1]], stops, strict=True)]

    def select(self, *kinds: Kind) -> tuple[Ints, Records]:
        """Returns the records of some kinds, by operation and time, with the number of the operation of each."""
        wanted = _is(self.kinds, kinds)
        return self.operations[wanted].astype(np.int64), self.process.records[self.rows[wanted]]

    def field(self, name: str, *kinds: Kind) -> NDArray[Any]:
        """Returns one field of the records of some kinds, by operation and time."""
        found: NDArray[Any] = self.process.records[name][self.rows[_is(self.kinds, kinds)]]
        return found

    def spans(self, begin: Kind, end: Kind) -> tuple[Ints, Ints, Ints]:
        """Returns operations, begins and ends of spans, by operation and begin: first begun, first ended, because
        kernels of a pool may overlap, and what they do together is the same either way."""
        of, records = self.select(begin, end)
        opened, closed = matched(of, records["kind"] == begin)
        times = records["time"]
        return of[opened], times[opened], times[closed]

    def first(self, kind: Kind, field: str = "time") -> Ints:
        """Returns the time, or another field, of the first record of a kind of each operation; `NEVER`: none."""
        found = np.full(len(self.starts) - 1, NEVER)
        found[self.operations[self.kinds == kind][::-1]] = self.field(field, kind)[::-1]
        return found

    def last_of_peer(self, kind: Kind, peer: int) -> Ints:
        """Returns the time of the last record of a kind and with a peer of each operation; `NEVER`: none."""
        of, records = self.select(kind)
        mine = records["peer"] == peer
        found = np.full(len(self.starts) - 1, NEVER)
        found[of[mine]] = records["time"][mine]
        return found


@dataclass(frozen=True, eq=False)
class OperationIndex:
    """The operations of a job, numbered in no order that means anything.

    Attributes:
        name, plan, clock: what identifies each; the name is its number in the job's table.
        came: their order of appearance: workers by rank, then daemons by node, then chunks; a permutation.
        workers, daemons: rows by rank, and by node. Those of daemons have the chunks too.
    """

    name: Ints
    plan: Ints
    clock: NDArray[np.uint64]
    came: Ints
    workers: Mapping[int, RowsOfOperations]
    daemons: Mapping[int, RowsOfOperations]

    def submitted(self) -> dict[int, Ints]:
        """Returns when each rank handed each operation over first; `NEVER`: it did not."""
        return {rank: rows.first(Kind.SUBMITTED) for rank, rows in self.workers.items()}


def index_of(trace: JobTrace, of_workers: Sequence[Kind], of_daemons: Sequence[Kind]) -> OperationIndex:
    """Returns the index of a job's operations, from what workers and daemons have recorded of these kinds."""
    everybody = [(process, (*of_workers,)) for process in trace.workers.values()]
    everybody += [(process, (*of_daemons, *OF_LINKS)) for process in trace.daemons.values()]
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
        later = np.zeros(len(of), np.int64)  # links come after everything else, what was sent first
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
    workers = dict(zip(trace.workers, rows, strict=False))
    daemons = dict(zip(trace.daemons, rows[len(workers) :], strict=True))
    return OperationIndex(
        (known >> np.uint64(32)).astype(np.int64),
        (known & np.uint64(0xFFFFFFFF)).astype(np.int64),
        clock[found % max(1, len(clock))] if len(found) else np.zeros(0, np.uint64),
        came,
        workers,
        daemons,
    )


def _is(kinds: NDArray[np.uint16], which: Sequence[Kind]) -> NDArray[np.bool_]:
    """Says which kinds are among some; a few comparisons are faster than a search."""
    found = np.zeros(len(kinds), bool)
    for kind in which:
        found |= kinds == kind
    return found


def _all_of(parts: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
    return np.unique(np.concatenate([np.unique(part) for part in parts])) if parts else np.zeros(0, np.int64)
