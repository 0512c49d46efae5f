"""Reads the records of a timeline from a ring while it is written, in order. The format is that of `trace_format`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from fusion_rt.tracing.format import HEADER, HEADER_NBYTES, NAMES_NBYTES, RECORD, WRITERS, Kind

_RECORDS_AT = HEADER_NBYTES + NAMES_NBYTES
_MOST = 4096  # records that are read at a time
_PAUSE = 10**9  # ns for which a thread may be kept from writing a record whose place it has taken
_DESCRIBING = frozenset({Kind.PLAN, Kind.MEMBER, Kind.TENSOR})
_KINDS = _DESCRIBING | {
    Kind.READY,
    Kind.RUN_BEGIN,
    Kind.REDUCE_BEGIN,
    Kind.REDUCE_END,
    Kind.SENT,
    Kind.RECEIVED,
    Kind.ANSWERED,
    Kind.RUN_END,
    Kind.FAILED,
    Kind.TIMELINE,
}


class Event(NamedTuple):
    """A record; see `trace_format.Kind`. `ns`: of the monotonic clock; `text`: the name whose number `clock` is."""

    ns: int
    kind: int
    name: str
    clock: int
    plan: int
    extra: int
    peer: int
    text: str = ""


class Gap(NamedTuple):
    """So many records were overwritten before they were read: things happen faster than this process goes on."""

    ns: int
    records: int


class RingFollower:
    """One reader of a ring that a process of this host writes, from the beginning to the end of a timeline.

    A place in the ring may be taken by a thread that has not written its record yet, while those of other threads
    behind it are there. What such a place holds is a round of the ring old, or nothing, so it is waited for; after
    `_PAUSE` it is passed over. (A ring that goes round within that time may have its old record told twice then.)

    Args:
        fd: of the file; taken over.
        first: number of a record before the one that begins the timeline.

    Attributes:
        next: number of the next record.
        over: the record that ends the timeline has been read.
    """

    def __init__(self, fd: int, first: int) -> None:
        self._fd = fd
        self.next = first
        self.over = False
        self._names = [""]
        self._names_end = 0  # bytes
        self._last = 0  # ns, of the newest record so far
        self._begun = False
        self._late = (-1, 0)  # a record that is waited for, and since when (ns)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self._fd)

    @property
    def written(self) -> int:
        """The number of records so far; those of the last moment may not be there yet."""
        return self._header()[1]

    def read(self, until: int) -> Iterator[list[Event | Gap]]:
        """Reads as far as the record `until` (excluded), one that is waited for, or the end of the timeline."""
        while self.next < until and not self.over:
            capacity = self._header()[0]
            place = self.next % capacity
            count = min(until - self.next, _MOST, capacity - place)
            data = os.pread(self._fd, count * RECORD.size, _RECORDS_AT + place * RECORD.size)
            if self.written + WRITERS - capacity > self.next:  # what was read may be newer than it should be
                skipped = self.written - capacity // 2 - self.next
                self.next += skipped
                self._begun = True
                yield [Gap(self._last, skipped)]
                continue
            end = self.next + count
            yield self._events(data)
            if self.next < end:
                return

    def _events(self, data: bytes) -> list[Event | Gap]:
        found: list[Event | Gap] = []
        for ns, value, clock, name, plan, extra, kind, peer in RECORD.iter_unpack(data):
            late = not ns or ns < self._last - _PAUSE
            if late and self._may_still_come():
                break
            self.next += 1
            self._last = max(self._last, ns)
            if late or kind not in _KINDS:
                continue
            if kind == Kind.TIMELINE:
                self.over = self._begun and not value
                self._begun = True
                if self.over:
                    break
            elif self._begun:
                text = self._name(clock) if kind in _DESCRIBING else ""
                found.append(Event(ns, kind, self._name(name), clock, plan, extra, peer, text))
        return found

    def _may_still_come(self) -> bool:
        """Tells whether the next record is to be waited for."""
        now = time.monotonic_ns()
        if self._late[0] != self.next:
            self._late = self.next, now
        return now - self._late[1] < _PAUSE

    def _name(self, number: int) -> str:
        if number >= len(self._names):
            end = self._header()[2]
            data = os.pread(self._fd, end - self._names_end, HEADER_NBYTES + self._names_end)
            at = 0
            while at < len(data):
                length = int.from_bytes(data[at : at + 2], "little")
                self._names.append(data[at + 2 : at + 2 + length].decode(errors="replace"))
                at += 2 + length
            self._names_end = end
        return self._names[number] if number < len(self._names) else ""

    def _header(self) -> tuple[int, int, int]:
        """Capacity and records written so far, and bytes of names."""
        fields = HEADER.unpack(os.pread(self._fd, HEADER.size, 0))
        return fields[3], fields[13], fields[14]
