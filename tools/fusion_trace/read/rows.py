"""The records of a process that are about operations, in columns: nothing here makes a Python object of a record.

Operations are numbered. A column has a value for each of them, in the order of these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import Records
from fusion_trace.read.job import Process
from fusion_trace.read.span_columns import Ints, matched

__all__ = ["NEVER", "OF_LINKS", "Ints", "Row", "RowsOfOperations"]

NEVER = np.iinfo(np.int64).min
"""The time of unrecorded events."""

OF_LINKS = (Kind.QUEUED, Kind.SENT, Kind.RECEIVED, Kind.TAKEN)

Row: TypeAlias = tuple[int, int, int, int, int]
"""Fields of a record: kind, time, value, extra, peer."""

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
        kernels of a pool may overlap, and their work together is the same either way."""
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


def _is(kinds: NDArray[np.uint16], which: Sequence[Kind]) -> NDArray[np.bool_]:
    """Says which kinds are among some; a few comparisons are faster than a search."""
    found = np.zeros(len(kinds), bool)
    for kind in which:
        found |= kinds == kind
    return found
