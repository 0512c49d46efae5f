"""The recorder: events of a worker or a daemon, written into a ring in a file that is mapped into memory.

An event costs a few hundred nanoseconds and no system call. Records are in the page cache at once, and so they can be
read later even if this process is killed in the middle of it. `trace_format` defines the format of the file.

Other modules get an `Instrument` and record; `open_recorder` decides once whether there is a file. They have to call
`instrument.record(...)` and not to keep `record`, which is replaced when a recorder is closed, and in forked children,
whose events are not this process's.

A full disk must not kill this process, and touching a page of a mapped file that has no block raises SIGBUS. So the
file is made sparse and blocks are reserved (`posix_fallocate`) piece by piece, as the ring grows to its size; when no
more can be had, the ring stays as long as it is.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import shlex
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from fusion_rt.core.errors import FusionError
from fusion_rt.host import bootstrap
from fusion_rt.host.private_files import is_at, open_private
from fusion_rt.settings import Settings
from fusion_rt.tracing import files, processors
from fusion_rt.tracing.format import (
    COMMAND_AT,
    COMMAND_NBYTES,
    HEADER,
    HEADER_NBYTES,
    LOST_AT,
    MAGIC,
    NAMES_AT,
    NAMES_NBYTES,
    NO_NAME,
    NOBODY,
    RECORD,
    VERSION,
    WRITTEN_AT,
    Role,
)

LEAST_NBYTES = HEADER_NBYTES + NAMES_NBYTES + 1024 * RECORD.size
_PIECE = 16384  # records for which room is reserved at once: 640 KiB
_PIECE_OF_NAMES = 64 * 1024  # bytes
_LONGEST_NAME = 1024  # bytes
_U16, _U32, _U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
_NUMBER = struct.Struct("<I")
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Record(Protocol):
    """A function that records an event; it never raises, and never waits."""

    def __call__(
        self,
        kind: int,
        name: str = "",
        value: int = 0,
        clock: int = 0,
        plan: int = 0,
        extra: int = 0,
        peer: int = NOBODY,
    ) -> None: ...


class Instrument(Protocol):
    """The interface that records events. The arguments of `record` are those of `trace_format.RECORD`."""

    @property
    def record(self) -> Record: ...

    def number(self, text: str) -> int:
        """Returns the number of a name, by which a record can refer to it."""

    def close(self) -> None:
        """Stops recording."""


def _nothing(
    kind: int, name: str = "", value: int = 0, clock: int = 0, plan: int = 0, extra: int = 0, peer: int = NOBODY
) -> None:
    """Records nothing."""


class NullRecorder:
    """An `Instrument` that records nothing."""

    record: Record = staticmethod(_nothing)

    def number(self, text: str) -> int:
        """Returns NO_NAME for every name."""
        return NO_NAME

    def close(self) -> None:
        """There is nothing to close."""


NULL = NullRecorder()


class Owner(NamedTuple):
    """The owner of a ring. `number`: a worker's rank, or a daemon's node; `host`: as the job calls it, "": as it calls
    itself."""

    job: str
    role: Role
    number: int
    node: int
    nodes: int
    host: str = ""

    @property
    def file_name(self) -> str:
        """The name of its ring's file."""
        return files.ring_name("rank" if self.role is Role.WORKER else "node", self.number)


class Recorder:
    """A ring in a new file, which replaces one that is there already.

    Args:
        path: of the file; its directory has to exist.
        owner: the process whose events are recorded.
        nbytes: of the file, at most.
        clock: returns nanoseconds; those of CLOCK_MONOTONIC, unless it is for a test.

    Attributes:
        path: of the file.
        record: see `Record`.

    Raises:
        OSError: the file cannot be made.
    """

    record: Record

    def __init__(
        self, path: str, owner: Owner, nbytes: int = LEAST_NBYTES, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.path = path
        self._owner = owner
        self._capacity = max(1, (nbytes - HEADER_NBYTES - NAMES_NBYTES) // RECORD.size)
        self._room = 0  # records for which blocks are reserved
        self._room_of_names = 0
        self._lock = threading.Lock()
        self._numbers = {"": NO_NAME}
        self._names_nbytes = self._lost = 0
        self._fd = -1
        temporary = f"{path}.{os.getpid()}.new"
        try:
            self._map = self._make(temporary)
            self._write_header()
            os.rename(temporary, path)
        except BaseException:
            if self._fd >= 0:
                os.close(self._fd)
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            raise
        self._written = memoryview(self._map)[WRITTEN_AT : WRITTEN_AT + 8].cast("Q")
        self.record = self._writer(clock)
        _recorders.add(self)

    @property
    def written(self) -> int:
        """Number of records so far; it may lag behind while several threads record."""
        return self._written[0]

    def fileno(self) -> int:
        """Returns the descriptor of the file."""
        return self._fd

    def number(self, text: str) -> int:
        """Returns the number of a name, which never changes; NO_NAME if there is no room for it."""
        number = self._numbers.get(text)
        return self._intern(text) if number is None else number

    def _make(self, path: str) -> mmap.mmap:
        while True:
            self._fd = open_private(path, flags=os.O_RDWR | os.O_TRUNC)
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # as long as this process lives: see `files`
            if is_at(self._fd, path):
                break
            os.close(self._fd)  # another daemon of this host took it for one of a dead writer, and has removed it
            self._fd = -1
        os.ftruncate(self._fd, HEADER_NBYTES + NAMES_NBYTES + self._capacity * RECORD.size)
        os.posix_fallocate(self._fd, 0, HEADER_NBYTES)
        self._reserve()
        self._reserve_names()
        return mmap.mmap(self._fd, 0)

    def close(self) -> None:
        """Stops recording, and closes the file, which stays."""
        self.stop()
        if self._map.closed:
            return
        with self._lock:
            self._written.release()
            self._map.close()
            os.close(self._fd)

    def stop(self) -> None:
        """Stops recording."""
        self.record = _nothing

    def _writer(self, now: Callable[[], int]) -> Record:
        """Returns `record` as a closure, since looking up each attribute would cost as much as packing a number."""
        data, written, capacity, room = self._map, self._written, self._capacity, self._room
        numbers, intern = self._numbers.get, self._intern
        pack, size, begin = RECORD.pack_into, RECORD.size, HEADER_NBYTES + NAMES_NBYTES
        count = itertools.count().__next__  # is atomic, so that threads may record side by side

        def record(
            kind: int,
            name: str = "",
            value: int = 0,
            clock: int = 0,
            plan: int = 0,
            extra: int = 0,
            peer: int = NOBODY,
        ) -> None:
            nonlocal capacity, room
            number = numbers(name)
            try:
                if number is None:
                    number = intern(name)
                index = count()
                if index >= room:
                    room, capacity = self._grow(index)
                at = begin + index % capacity * size
                try:
                    pack(data, at, now(), value, clock, number, plan, extra, kind, peer)
                except struct.error:  # a number does not fit into its field
                    pack(data, at, *_fitting((now(), value, clock, number, plan, extra, kind, peer)))
                written[0] = index + 1
            except (TypeError, ValueError):  # the recorder was closed while this thread was in here
                if not data.closed:
                    raise

        return record

    # --- rare events: growth, new names -------------------------------------------------------------------------------

    def _grow(self, index: int) -> tuple[int, int]:
        """Reserves room for the record `index`. Returns the number of records with room, and that of the ring."""
        with self._lock:
            if index >= self._room and self._room < self._capacity:
                self._try_to_reserve()
            full = self._room >= self._capacity
            return (_U64 if full else self._room), self._capacity

    def _try_to_reserve(self) -> None:
        try:
            self._reserve()
        except OSError:  # no more blocks: no record has been overwritten yet, so the ring can begin anew here
            self._capacity = self._room
            self._write_header()

    def _reserve(self) -> None:
        room = min(self._room + _PIECE, self._capacity)
        begin = HEADER_NBYTES + NAMES_NBYTES + self._room * RECORD.size
        os.posix_fallocate(self._fd, begin, (room - self._room) * RECORD.size)
        self._room = room

    def _reserve_names(self) -> None:
        os.posix_fallocate(self._fd, HEADER_NBYTES + self._room_of_names, _PIECE_OF_NAMES)
        self._room_of_names += _PIECE_OF_NAMES

    def _intern(self, name: str) -> int:
        """Returns the number of a name, which is added if it has none yet."""
        with self._lock:
            number = self._numbers.get(name)
            if number is not None:
                return number
            text = name.encode(errors="replace")[:_LONGEST_NAME].decode(errors="ignore").encode()
            end = self._names_nbytes + 2 + len(text)
            if not self._has_room_for_names(end):
                self._lost = min(self._lost + 1, _U32)
                _NUMBER.pack_into(self._map, LOST_AT, self._lost)
                return NO_NAME
            at = HEADER_NBYTES + self._names_nbytes
            self._map[at : at + 2 + len(text)] = len(text).to_bytes(2, "little") + text
            self._names_nbytes = end
            _NUMBER.pack_into(self._map, NAMES_AT, end)
            number = len(self._numbers)
            self._numbers[name] = number
            return number

    def _has_room_for_names(self, nbytes: int) -> bool:
        if nbytes > NAMES_NBYTES:
            return False
        try:
            while nbytes > self._room_of_names:
                self._reserve_names()
        except OSError:
            return False
        return True

    def _write_header(self) -> None:
        """Writes the whole header at first; later only the number of records of the ring."""
        if bytes(self._map[:8]) == MAGIC:
            struct.pack_into("<Q", self._map, 16, self._capacity)
            return
        owner = self._owner
        host, job = (owner.host or socket.gethostname()).encode()[:255], owner.job.encode()[:255]
        now, wall = time.monotonic_ns(), time.time_ns()
        HEADER.pack_into(
            self._map, 0, MAGIC, VERSION, RECORD.size, self._capacity, now, wall, os.getpid(), owner.number, owner.node,
            owner.nodes, len(host), len(job), owner.role, 0, 0, 0,
        )  # fmt: skip
        self._map[HEADER.size : HEADER.size + len(host) + len(job)] = host + job
        about = processors.machine()
        self._map[processors.MACHINE_AT : processors.MACHINE_AT + len(about)] = about
        command = shlex.join(sys.orig_argv).encode(errors="replace")[:COMMAND_NBYTES]
        command = command.decode(errors="ignore").encode()
        self._map[COMMAND_AT : COMMAND_AT + 2 + len(command)] = len(command).to_bytes(2, "little") + command


def open_recorder(settings: Settings, owner: Owner, tell: Callable[[str], None]) -> Instrument:
    """Opens the recorder that the settings ask for; calls `tell` with a sentence if that fails."""
    if not settings.trace:
        return NULL
    root = settings.trace_root()
    directory = files.directory_of(root, owner.job)
    try:
        if not settings.trace_dir:
            bootstrap.make_private_directory(root, "FUSION_TRACE_DIR")
        bootstrap.make_private_directory(directory, "FUSION_TRACE_DIR")
        return Recorder(os.path.join(directory, owner.file_name), owner, settings.trace_buffer)
    except (FusionError, OSError) as error:
        who = f"rank {owner.number}" if owner.role is Role.WORKER else f"the daemon of node {owner.number}"
        why = error.strerror if isinstance(error, OSError) else error
        tell(f"what {who} does is not recorded, because {directory} cannot be used: {why}; choose another directory "
             "with --trace-dir, or switch recording off with --no-trace")  # fmt: skip
        return NULL


def _fitting(record: tuple[int, ...]) -> tuple[int, ...]:
    """Fits numbers into the fields of a record: `clock` and `plan` modulo their size, the others clipped."""
    now, value, clock, number, plan, extra, kind, peer = record
    value = max(-(1 << 63), min(int(value), (1 << 63) - 1))
    cut = [max(0, min(int(n), most)) for n, most in ((extra, _U32), (kind, _U16), (peer, _U16))]
    return (now & _U64, value, int(clock) & _U64, number, int(plan) & _U32, *cut)


def _after_fork() -> None:
    """Stops recording in a forked child, whose events are not those of the ring's owner."""
    for recorder in list(_recorders):
        recorder.stop()


os.register_at_fork(after_in_child=_after_fork)
