"""The process that writes a timeline: `python -m fusiond.timeline.writer_process FD RING`, started by the daemon.

On the descriptor FD, a socket of packets, comes the order (JSON). The answer says why nothing can be written, or is an
empty line. What happens is read from the daemon's RING, another descriptor. The process ends, with everything written
that was recorded, when the daemon has closed its end, or has been killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from fusion_rt.host.private_files import open_private
from fusion_rt.tracing.reader import Event, Gap, RingFollower
from fusiond.timeline.writer import Order, TimelineWriter

MAX_ORDER = 1 << 18  # bytes
_BATCH = 1 << 16  # bytes of a write, if a single event does not need more
_EVERY = 0.05  # seconds between looks at the ring


_OPENING = b"[\n"
_BETWEEN = b",\n"
_CLOSING = b"]"


class ArrayFile:
    """Appends elements to an array in a file.

    Each append is one write that begins where the closing bracket was and ends with the new one, so that whoever reads
    the file, also after a crash, reads an array. What cannot be written whole, on a full disk, is taken back.

    Args:
        path: of the file, which only this user can read (`open_private`). One that is there and not empty is kept, as
            `path` with ".1" behind it.

    Attributes:
        elements: in the file.
        nbytes: of the file.

    Raises:
        OSError: it cannot be opened or written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.elements = 0
        self.nbytes = 0
        self._fd = -1
        self._open()

    def append(self, elements: Sequence[bytes]) -> None:
        """Appends JSON texts.

        Raises:
            OSError: they cannot be written; the file is as it was.
        """
        if not elements:
            return
        data = (_BETWEEN if self.elements else b"") + _BETWEEN.join(elements) + _CLOSING
        place = self.nbytes - len(_CLOSING)
        self._write(data, place)
        self.nbytes = place + len(data)
        self.elements += len(elements)

    def rotate(self) -> None:
        """Keeps the file as `path` with ".1" behind it, in place of what was kept before, and begins it anew.

        Raises:
            OSError: it cannot be done.
        """
        self.close()
        self._open()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self.path)
            if found.st_size and stat.S_ISREG(found.st_mode):
                os.replace(self.path, f"{self.path}.1")
        self._fd = open_private(self.path)
        self.elements = 0
        try:
            self._write(_OPENING + _CLOSING, 0)
        except OSError:
            self.close()
            raise
        self.nbytes = len(_OPENING + _CLOSING)

    def _write(self, data: bytes, place: int) -> None:
        try:
            written = os.pwrite(self._fd, data, place)
            while written < len(data):  # the disk has just become full, which the next write says
                written += os.pwrite(self._fd, data[written:], place + written)
        except OSError:
            if self.nbytes:
                os.pwrite(self._fd, _CLOSING, place)  # on a page that is there: needs no room
                os.ftruncate(self._fd, self.nbytes)
            raise


class TimelineFile:
    """One file, and what writes its lines.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, writer: TimelineWriter, max_bytes: int) -> None:
        self._writer = writer
        self._max_bytes = max_bytes
        self._file = ArrayFile(path)
        self._missing = 0  # lines that could not be written
        self._file.append(writer.header())

    def write(self, events: Sequence[Event | Gap]) -> None:
        """Appends the lines of these events. While the disk is full, lines are left out, and counted."""
        lines: list[bytes] = []
        nbytes = 0
        for event in events:
            if not lines and self._max_bytes and self._file.nbytes > self._max_bytes - _BATCH:
                self._try(self._begin_anew)
            new = self._writer.take(event)
            lines += new
            nbytes += sum(map(len, new))
            if nbytes >= _BATCH:
                self._append(lines)
                lines, nbytes = [], 0
        self._append(lines)

    def _begin_anew(self) -> None:
        self._file.rotate()
        self._file.append(self._writer.header())

    def _append(self, lines: list[bytes]) -> None:
        if not lines:
            return
        gap = []
        if self._missing:
            gap = [b'{"ph": "i", "name": "%d lines are missing", "ts": 0, "s": "g"}' % self._missing]
        self._missing = 0 if self._try(lambda: self._file.append(gap + lines)) else self._missing + len(lines)

    def _try(self, do: Callable[[], None]) -> bool:
        """Tells whether it could be done; says so once if not."""
        try:
            do()
        except OSError as error:
            if not self._missing:
                print(f"fusiond: the timeline {self._file.path} has gaps: {error.strerror}", file=sys.stderr)
            return False
        return True

    def close(self) -> None:
        self._file.close()


def path_of(path: str, rank: int) -> str:
    """Returns the path of the file of one rank."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.{rank}{suffix}"


def open_files(order: Order) -> list[TimelineFile]:
    """The files that are asked for. Raises `OSError` when one cannot be opened."""
    began = time.monotonic_ns(), time.time_ns() // 1000
    if not order.ranks:
        return [TimelineFile(order.path, TimelineWriter(order, began), order.max_bytes)]
    return [
        TimelineFile(path_of(order.path, rank), TimelineWriter(order, began, rank), order.max_bytes)
        for rank in order.ranks
    ]


def serve(connection: socket.socket, ring: int) -> None:
    """Writes until the daemon has closed its end.

    Args:
        ring: descriptor of the daemon's ring; taken over.

    Raises:
        msgspec.MsgspecError: the order is none that a daemon gives.
    """
    order = msgspec.json.decode(connection.recv(MAX_ORDER), type=Order)
    try:
        files = open_files(order)
    except OSError as error:
        connection.send(f"the timeline {error.filename or order.path} cannot be written: {error.strerror}\n".encode())
        return
    connection.send(b"\n")
    follower = RingFollower(ring, order.first)

    def write(until: int) -> None:
        for events in follower.read(until):
            for file in files:
                file.write(events)

    seen = follower.written
    while not select.select([connection], [], [], _EVERY)[0]:
        # Records seen the last time: by now the threads that were about to write them have done so.
        until, seen = seen, follower.written
        write(until)
    looks = 0  # at an end of the ring that is no end of the timeline: the daemon has been killed
    while not follower.over and looks < 2:
        time.sleep(_EVERY / 5)
        until = follower.written
        write(until)
        looks = looks + 1 if follower.next >= until else 0
    for file in files:
        file.close()
    follower.close()


def main() -> None:
    """Entry point."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of the whole job; it ends when the daemon has
        signal.signal(number, signal.SIG_IGN)
    ring = os.open(f"/proc/self/fd/{sys.argv[2]}", os.O_RDONLY)  # of its own, which does not keep the daemon's lock
    os.close(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection, ring)


if __name__ == "__main__":
    main()
