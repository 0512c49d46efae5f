"""The process that writes a timeline: `python -m fusiond.timeline.writer_process FD`, started by the daemon.

On the descriptor, a stream socket, come the order (JSON) and then messages with events, each behind its length (4
bytes). The line back says why nothing can be written, or nothing. The process ends, with what has come written, when
the daemon has closed its end, or has been killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

import msgspec

from fusiond.timeline.array_file import ArrayFile
from fusiond.timeline.events import Order, Told, decode
from fusiond.timeline.writer import Chronicle

_BATCH = 1 << 16  # bytes of a write, if a single event does not need more


class Book:
    """One chronicle and the file that it is in.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, chronicle: Chronicle, max_bytes: int) -> None:
        self._chronicle = chronicle
        self._max_bytes = max_bytes
        self._file = ArrayFile(path)
        self._missing = 0  # lines that could not be written
        self._file.append(chronicle.header())

    def write(self, events: Sequence[Told]) -> None:
        """Appends what these events are. While the disk is full, lines are left out, and counted."""
        lines: list[bytes] = []
        nbytes = 0
        for event in events:
            if not lines and self._max_bytes and self._file.nbytes > self._max_bytes - _BATCH:
                self._try(self._begin_anew)
            new = self._chronicle.take(event)
            lines += new
            nbytes += sum(map(len, new))
            if nbytes >= _BATCH:
                self._append(lines)
                lines, nbytes = [], 0
        self._append(lines)

    def _begin_anew(self) -> None:
        self._file.rotate()
        self._file.append(self._chronicle.header())

    def _append(self, lines: list[bytes]) -> None:
        if not lines:
            return
        gap = []
        if self._missing:
            gap = [b'{"ph": "i", "name": "%d lines are missing", "ts": 0, "s": "g"}' % self._missing]
        self._missing = 0 if self._try(lambda: self._file.append(gap + lines)) else self._missing + len(lines)

    def _try(self, do: Callable[[], None]) -> bool:
        """Whether it could be done; says so once if not."""
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
    """Of the file of one rank."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.{rank}{suffix}"


def open_books(order: Order) -> list[Book]:
    """The files that are asked for. Raises `OSError` when one cannot be opened."""
    began = time.monotonic_ns(), time.time_ns() // 1000
    if not order.ranks:
        return [Book(order.path, Chronicle(order, began), order.max_bytes)]
    return [Book(path_of(order.path, rank), Chronicle(order, began, rank), order.max_bytes) for rank in order.ranks]


def serve(connection: socket.socket) -> None:
    """Writes until the daemon has closed its end. Raises `msgspec.MsgspecError` for what no daemon sends."""
    with connection.makefile("rb") as stream:
        messages = _messages(stream)
        order = msgspec.json.decode(next(messages, b""), type=Order)
        try:
            books = open_books(order)
        except OSError as error:
            connection.send(
                f"the timeline {error.filename or order.path} cannot be written: {error.strerror}\n".encode()
            )
            return
        connection.send(b"\n")
        for message in messages:
            events = decode(message)
            for book in books:
                book.write(events)
        for book in books:
            book.close()


def _messages(stream: IO[bytes]) -> Iterator[bytes]:
    """Whole messages; a daemon that was killed may have sent a part of one."""
    while len(head := stream.read(4)) == 4:
        length = int.from_bytes(head, "big")
        message = stream.read(length)
        if len(message) < length:
            return
        yield message


def main() -> None:
    """Entry point."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of the whole job; it ends when the daemon has
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
