"""The workers' output is cut into lines, marked with the rank as Horovod does, and its end is kept for errors.

A line becomes `[rank]<stdout>:line` or `[rank]<stderr>:line`, written in one piece so that ranks never tear each
other's lines. A piece that ends in a carriage return (a progress bar) is passed on as it is, with its mark, at once. A
last line without an end gets one. Lines beyond `MAX_LINE` are broken. Of a traceback that many ranks print, the
launcher shows one (`repeated_tracebacks`), and the files of the ranks have all.
"""

from __future__ import annotations

import os
import time
from typing import Protocol

from fusion_rt.host.private_files import open_private, open_private_directory
from fusion_rt.runner.decisions.places import Place
from fusion_rt.runner.launch.repeated_tracebacks import RepeatedTracebacks
from fusion_rt.runner.protocol.agent_messages import Stream

MAX_LINE = 1024 * 1024  # bytes that are kept of a line whose end has not come
TAIL = 16 * 1024  # bytes kept of each worker's stderr, for the last word on a failure


class Sink(Protocol):
    """The destination of marked lines; see `printer.Printer`."""

    def write(self, fd: int, data: bytes) -> None: ...


class Lines:
    """Cuts a stream of bytes into lines that end in a line feed or a carriage return."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        self._rest += data
        lines = self._rest.splitlines(keepends=True)  # bytes: at line feeds and carriage returns only
        self._rest = b"" if not lines or lines[-1].endswith((b"\r", b"\n")) else lines.pop()
        while len(self._rest) > self._limit:
            lines.append(self._rest[: self._limit] + b"\n")
            self._rest = self._rest[self._limit :]
        return lines

    def flush(self) -> list[bytes]:
        """The last line, if it has no end yet."""
        rest, self._rest = self._rest, b""
        return [rest + b"\n"] if rest else []


class WorkerOutput:
    """Passes the output of all ranks on to the launcher's own stdout and stderr, and to a file per rank and stream.

    Args:
        sink: writes.
        size: number of ranks.
        directory: where `rank.<zero-padded>/{stdout,stderr}` are made; "" for none.
        timestamps: put the local time in front of each line.

    Raises:
        OSError: the files cannot be made.
    """

    def __init__(self, sink: Sink, size: int, directory: str = "", timestamps: bool = False) -> None:
        self._sink = sink
        self._timestamps = timestamps
        self._lines: dict[tuple[Place, Stream], tuple[int, Lines]] = {}  # with the rank, of each worker
        self._tails: dict[Place, bytes] = {}
        self._files: dict[tuple[int, Stream], int] = {}
        self._tracebacks = RepeatedTracebacks()
        self._directory = directory
        self._digits = len(str(size - 1))
        self.make_files(size)

    def feed(self, place: Place, rank: int, stream: Stream, data: bytes) -> None:
        """Takes what the worker in a place printed, which has this rank, or (while others train) is to have it."""
        if stream == "stderr":
            self._tails[place] = (self._tails.get(place, b"") + data)[-TAIL:]
        before, lines = self._lines.get((place, stream), (rank, Lines()))
        if before != rank:
            self._write(before, stream, lines.flush())
        self._lines[place, stream] = rank, lines
        self._write(rank, stream, lines.feed(data))

    def change(self, size: int) -> None:
        """There are `size` ranks from now on, which may be other workers than before."""
        self.flush()
        self._lines.clear()
        self._tails.clear()
        self._tracebacks = RepeatedTracebacks()
        self.make_files(size)

    @property
    def holds(self) -> bool:
        """Tells whether a traceback is held to which lines may still be added."""
        return bool(self._tracebacks)

    def release(self) -> None:
        """Writes the tracebacks that are held."""
        for rank, lines in self._tracebacks.release():
            self._sink.write(2, self._marked(rank, "stderr", lines))

    def flush(self) -> None:
        """Writes last lines that have no end, and tracebacks that are held."""
        for (_, stream), (rank, lines) in self._lines.items():
            self._write(rank, stream, lines.flush())
        self.release()

    def close(self) -> None:
        """Closes the files. The sink must have written all it was given."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def tail(self, place: Place) -> str:
        """The end of a worker's stderr."""
        return self._tails.get(place, b"").decode(errors="replace")

    def _write(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        if lines and (rank, stream) in self._files:
            self._sink.write(self._files[rank, stream], self._marked(rank, stream, lines))
        shown = lines if stream == "stdout" else self._tracebacks.take(rank, lines)
        if shown:
            self._sink.write(1 if stream == "stdout" else 2, self._marked(rank, stream, shown))

    def _marked(self, rank: int, stream: Stream, lines: list[bytes]) -> bytes:
        now = time.asctime() if self._timestamps else ""
        mark = f"{now}[{rank}]<{stream}>:".encode()
        return b"".join(mark + line for line in lines)

    def make_files(self, size: int) -> None:
        """Makes the files of the first `size` ranks, of those that have none."""
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        for rank in range(size) if self._directory else ():
            directory = os.path.join(self._directory, f"rank.{rank:0{self._digits}}")
            inside = open_private_directory(directory)
            try:
                for stream in streams:
                    if (rank, stream) not in self._files:
                        try:
                            self._files[rank, stream] = open_private(stream, inside)
                        except OSError as error:
                            error.filename = os.path.join(directory, stream)
                            raise
            finally:
                os.close(inside)
