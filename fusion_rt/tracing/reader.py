"""Reads a ring, the records of one process, whole or as it is written. Its format is in `fusion_rt.tracing.format`.

A ring may be written while it is read, its writer may have been killed in the middle of a record, and the file may be
cut off or be no ring at all. What can be read is read; what could not be is said in `Ring.problems`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusion_rt.core.errors import FusionError
from fusion_rt.tracing.format import (
    COMMAND_AT,
    HEADER,
    HEADER_NBYTES,
    MAGIC,
    NAMES_NBYTES,
    NOBODY,
    RECORD,
    VERSION,
    WRITERS,
    Kind,
    Role,
)
from fusion_rt.tracing.processors import MACHINE, MACHINE_AT

RECORD_DTYPE = np.dtype(
    [
        ("time", "<i8"),
        ("value", "<i8"),
        ("clock", "<u8"),
        ("name", "<u4"),
        ("plan", "<u4"),
        ("extra", "<u4"),
        ("kind", "<u2"),
        ("peer", "<u2"),
    ]
)
"""`trace_format.RECORD`, for numpy. Times are signed, because clocks of other hosts can be behind node 0's."""

RECORDS_AT = HEADER_NBYTES + NAMES_NBYTES
MOST_RECORDS = 1 << 23  # of a ring that are read at once: 320 MiB
RARE = (
    Kind.PLAN, Kind.BUCKET, Kind.MEMBER, Kind.CLOCK, Kind.LOST, Kind.FOUND, Kind.BLOCKED_BEGIN, Kind.BLOCKED_END,
    Kind.STALL, Kind.VIEW, Kind.TIMELINE, Kind.TENSOR, Kind.GONE, Kind.FAILED,
)  # fmt: skip
"""Kinds that say something about the time after them, or about the job."""
Window = tuple[int, int]
_BLOCK = 1 << 18  # records that are looked through at once
_IS_RARE = np.isin(np.arange(max(Kind) + 2), RARE)
_KINDS = np.array(sorted(Kind), "<u2")
_SLACK = 10**9  # ns that a record may be older than its ring
# No job reaches these, and a damaged or hostile file may claim them. Within it, sums of times and sizes fit into int64.
_LONGEST = 1 << 58  # ns, nine years: since a host came up, and of anything
_LATEST = 1 << 62  # ns since 1970
_MOST_BYTES = 1 << 44  # of a tensor
_MOST_STEPS = 1 << 48
_EVER = 1 << 56  # records that a process has written
_JOB = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_OF_TIME = (
    Kind.STEP_END, Kind.RUN_END, Kind.CLOCK, Kind.APPLIED, Kind.STALL, Kind.VIEW, Kind.TIMELINE, Kind.GONE,
)  # fmt: skip
"""Kinds whose value is no number of bytes."""
_IS_OF_TIME = np.isin(np.arange(max(Kind) + 2), _OF_TIME)

assert RECORD_DTYPE.itemsize == RECORD.size

Records = NDArray[Any]  # of RECORD_DTYPE


class TraceError(FusionError):
    """A file, directory or job has no trace that could be read."""


@dataclass(frozen=True, eq=False)
class Header:
    """The first bytes of a ring: whose it is, and how much has been written.

    Attributes:
        capacity: records that the file has room for.
        created: CLOCK_MONOTONIC of its host when the ring was made, ns.
        created_wall: wall-clock time then, ns since 1970.
        pid, rank, node, nodes, role, host, job: of the process; the rank of a daemon is its node.
        written: records ever written.
        names_nbytes: of the table of names.
        lost_names: names that found no room.
        machine: the same number for all hosts of one machine; "": not recorded.
        processors: that the process may use; 0: not recorded.
        command: its command line; "": not recorded.
    """

    capacity: int
    created: int
    created_wall: int
    pid: int
    rank: int
    node: int
    nodes: int
    role: Role
    host: str
    job: str
    written: int
    names_nbytes: int
    lost_names: int
    machine: str
    processors: float
    command: str


@dataclass(frozen=True, eq=False)
class Ring(Header):
    """The records of one process, and its header as it was when they were read.

    Attributes:
        path: the file.
        names: by number; number 0 is "".
        records: of RECORD_DTYPE, by time; times are of its host's CLOCK_MONOTONIC, ns.
        overwritten: of the records ever written, how many were overwritten by later ones.
        problems: sentences about what could not be read.
    """

    path: str
    names: tuple[str, ...]
    records: Records
    overwritten: int
    problems: tuple[str, ...]


def read_header(path: str) -> Header:
    """Reads the header of a ring.

    Raises:
        TraceError: it is not a ring, or cannot be read.
    """
    with _opened(path) as file:
        return header_of(file.read(HEADER_NBYTES), path)


def is_ring(path: str) -> bool:
    """Says whether a file begins as a ring does."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read(path: str, window: Window | None = None) -> Ring:
    """Reads a ring, as far as that is possible.

    Args:
        window: from when to when all records are wanted, ns of the ring's clock. Of other times only the first and the
            last record are read, and those of kinds in `RARE`. None: everything is read.

    Raises:
        TraceError: it is not a ring, or cannot be read at all.
    """
    with _opened(path) as file:
        try:
            header = header_of(file.read(HEADER_NBYTES), path)
            nbytes = os.fstat(file.fileno()).st_size
            problems: list[str] = []
            records, overwritten = _records(file, header, nbytes, path, problems, window)
            # After the records: a name that one of them has is in the file by now.
            file.seek(0)
            names_nbytes = header_of(file.read(HEADER_NBYTES), path).names_nbytes
            file.seek(HEADER_NBYTES)
            names, found = _names(file.read(NAMES_NBYTES)[:names_nbytes])
            if found != names_nbytes:
                problems.append(f"{path}: its names end after {found} of {names_nbytes} bytes")
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    if len(records) and int(records["name"].max()) > len(names):
        unknown = records["name"] > len(names)
        records["name"][unknown] = 0
        problems.append(f"{path}: the names of {int(unknown.sum())} records are not in the file")
    if header.lost_names:
        problems.append(f"{path}: {header.lost_names} names found no room, and are shown without one")
    return Ring(
        **vars(header),
        path=path,
        names=("", *map(shown, names)),
        records=records,
        overwritten=overwritten,
        problems=tuple(problems),
    )


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None


def header_of(data: bytes, path: str) -> Header:
    """Returns the header in the first bytes of a file, which is called `path`. Raises as `read_header` does."""
    if not data.startswith(MAGIC):
        raise TraceError(f"{path} is not a trace of fusion_rt" + ("" if data else ": it is empty"))
    if len(data) < HEADER.size:
        raise TraceError(f"{path} ends within its header ({len(data)} bytes)")
    fields = HEADER.unpack_from(data)
    _, version, record_nbytes, capacity, created, created_wall, pid, rank, node, nodes = fields[:10]
    host_nbytes, job_nbytes, role, written, names_nbytes, lost_names = fields[10:]
    if version != VERSION or record_nbytes != RECORD.size:
        raise TraceError(
            f"{path} is of version {version} with records of {record_nbytes} bytes; this fusion-trace reads version "
            f"{VERSION} with {RECORD.size}"
        )
    if role not in tuple(Role) or not capacity or host_nbytes + job_nbytes > HEADER_NBYTES - HEADER.size:
        raise TraceError(f"{path} has a damaged header (role {role}, room for {capacity} records)")
    if not node < nodes < NOBODY or rank >= NOBODY:
        raise TraceError(f"{path} has a damaged header (rank {rank}, node {node} of {nodes})")
    if max(capacity, written) >= _EVER or created > _LONGEST or created_wall > _LATEST:
        raise TraceError(f"{path} has a damaged header ({written} records since {created} ns, {created_wall} ns)")
    whole = data[:HEADER_NBYTES].ljust(HEADER_NBYTES, b"\0")
    machine, processors = MACHINE.unpack_from(whole, MACHINE_AT)
    command_nbytes = int.from_bytes(whole[COMMAND_AT : COMMAND_AT + 2], "little")
    host, job = data[HEADER.size :][:host_nbytes], data[HEADER.size + host_nbytes :][:job_nbytes]
    if not _JOB.fullmatch(shown(job)):
        raise TraceError(f"{path} has a damaged header (a job is not called {shown(job)[:80]!r})")
    return Header(
        capacity=capacity,
        created=created,
        created_wall=created_wall,
        pid=pid,
        rank=rank,
        node=node,
        nodes=nodes,
        role=Role(role),
        host=shown(host),
        job=shown(job),
        written=written,
        names_nbytes=names_nbytes,
        lost_names=lost_names,
        machine=machine.hex() if any(machine) else "",
        processors=processors / 1000,
        command=shown(b" ".join(whole[COMMAND_AT + 2 :][:command_nbytes].split())),  # scripts have lines
    )


def shown(text: bytes) -> str:
    """Returns a text of a file as it may be printed: whatever steers a terminal is escaped, as Python writes it."""
    decoded = text.decode(errors="replace")
    if decoded.isprintable():
        return decoded
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in decoded)


def _names(data: bytes) -> tuple[list[bytes], int]:
    """Returns the names in a part of the table of names as they are, and the bytes that they take."""
    names, at = [], 0
    while at + 2 <= len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "little")
        if end > len(data):
            break
        names.append(data[at + 2 : end])
        at = end
    return names, at


def ends_of_steps(path: str) -> Records:
    """Returns all STEP_ENDs of a ring, by time.

    Raises:
        TraceError: it is not a ring, or cannot be read.
    """
    with _opened(path) as file:
        try:
            header = header_of(file.read(HEADER_NBYTES), path)
            file.seek(RECORDS_AT)
            room = min(header.capacity, header.written)
            found, _ = _run(file, room, lambda block: block["kind"] == Kind.STEP_END)
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    return found[np.argsort(found["time"], kind="stable")]


def _run(file: BinaryIO, count: int, wanted: Callable[[Records], NDArray[np.bool_]] | None) -> tuple[Records, int]:
    """Returns the records that are wanted of those that follow in a file, and how many there were."""
    if wanted is None:
        records = np.fromfile(file, RECORD_DTYPE, count)
        return records, len(records)
    pieces, there = [np.zeros(0, RECORD_DTYPE)], 0
    while len(block := np.fromfile(file, RECORD_DTYPE, min(count - there, _BLOCK))):
        kept = wanted(block)
        kept[0] |= not there
        kept[-1] |= there + len(block) == count
        pieces.append(block[kept])
        there += len(block)
    return np.concatenate(pieces), there


def _are_sound(records: Records, header: Header) -> NDArray[np.bool_]:
    """Returns which records a process may have written."""
    kind, value = records["kind"], records["value"]
    of_time = _IS_OF_TIME[np.minimum(kind, len(_IS_OF_TIME) - 1)]
    sound: NDArray[np.bool_] = np.isin(kind, _KINDS) & (records["clock"] < _MOST_STEPS)
    sound &= (records["time"] >= header.created - _SLACK) & (records["time"] <= header.created + _LONGEST)
    sound &= (value >= np.where(kind == Kind.CLOCK, -_LONGEST, 0)) & (value <= np.where(of_time, _LONGEST, _MOST_BYTES))
    return sound


def _inside(window: Window) -> Callable[[Records], NDArray[np.bool_]]:
    def wanted(block: Records) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (block["time"] >= window[0]) & (block["time"] <= window[1])
        found |= _IS_RARE[np.minimum(block["kind"], len(_IS_RARE) - 1)]
        return found

    return wanted


def _records(
    file: BinaryIO, header: Header, nbytes: int, path: str, problems: list[str], window: Window | None
) -> tuple[Records, int]:
    """Returns the records, by time, and how many were overwritten."""
    room = min(header.capacity, max(0, nbytes - RECORDS_AT) // RECORD.size)  # truncated files have less
    first = max(0, header.written - header.capacity)
    wanted = range(first if window else max(first, header.written - MOST_RECORDS), header.written)
    if len(wanted) < header.written - first:
        problems.append(f"{path}: only the newest {MOST_RECORDS} records were read")
    pieces, there = [], 0
    start = wanted.start
    while start < wanted.stop:  # at most two runs of places, the older one first
        place = start % header.capacity
        stop = min(wanted.stop, start + header.capacity - place)
        count = max(0, min(place + stop - start, room) - place)
        file.seek(RECORDS_AT + place * RECORD.size)
        records, number = _run(file, count, None if window is None else _inside(window))
        pieces.append(records)
        there += number
        start = stop
    records = pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.zeros(0, RECORD_DTYPE)
    if missing := len(wanted) - there:
        problems.append(f"{path} is cut off: {missing} of {len(wanted)} records are not there")
    overwritten = first
    if not missing:
        # Written meanwhile, into the places of the oldest; and some threads of the writer may be at it just now.
        file.seek(0)
        passed = header_of(file.read(HEADER_NBYTES), path).written + WRITERS - header.capacity
        meanwhile = min(there, max(0, passed - wanted.start))
        if meanwhile and window is not None:  # a ring that is full, and so not large
            return _records(file, header, nbytes, path, problems, None)
        records = records[meanwhile:]
        overwritten += meanwhile
    sound = _are_sound(records, header)
    if damaged := len(records) - int(sound.sum()):
        problems.append(f"{path}: {damaged} records are damaged, and were left out")
        records = records[sound]
    if (records["time"][1:] < records["time"][:-1]).any():
        records = records[np.argsort(records["time"], kind="stable")]
    return records, overwritten


# --- as it is written -------------------------------------------------------------------------------------------------

_MOST = 4096  # records that are read at a time
_PAUSE = 10**9  # ns for which a thread may be kept from writing a record whose place it has taken
_DESCRIBING = frozenset({Kind.PLAN, Kind.MEMBER, Kind.TENSOR})
_OF_TIMELINES = _DESCRIBING | {
    Kind.READY, Kind.RUN_BEGIN, Kind.REDUCE_BEGIN, Kind.REDUCE_END, Kind.SENT, Kind.RECEIVED, Kind.ANSWERED,
    Kind.RUN_END, Kind.FAILED, Kind.TIMELINE,
}  # fmt: skip


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
        self._names_nbytes = 0  # that these take
        self._last = 0  # ns, of the newest record so far
        self._begun = False
        self._late = (-1, 0)  # a record that is waited for, and since when (ns)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self._fd)

    @property
    def written(self) -> int:
        """The number of records so far; those of the last moment may not be there yet."""
        return self._header().written

    def read(self, until: int) -> Iterator[list[Event | Gap]]:
        """Reads as far as the record `until` (excluded), one that is waited for, or the end of the timeline."""
        while self.next < until and not self.over:
            capacity = self._header().capacity
            place = self.next % capacity
            count = min(until - self.next, _MOST, capacity - place)
            data = os.pread(self._fd, count * RECORD.size, RECORDS_AT + place * RECORD.size)
            if self.written + WRITERS - capacity > self.next:  # the data that was read may be newer than it should be
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
            if late or kind not in _OF_TIMELINES:
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
            more = self._header().names_nbytes - self._names_nbytes
            names, nbytes = _names(os.pread(self._fd, more, HEADER_NBYTES + self._names_nbytes))
            self._names += [name.decode(errors="replace") for name in names]  # JSON escapes them itself
            self._names_nbytes += nbytes
        return self._names[number] if number < len(self._names) else ""

    def _header(self) -> Header:
        return header_of(os.pread(self._fd, HEADER_NBYTES, 0), "the ring")
