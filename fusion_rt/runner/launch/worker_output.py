"""The output of workers and daemons: cut into lines, marked with its origin, and its end kept for errors.

A worker's line becomes `[rank]<stdout>:line` or `[rank]<stderr>:line`, as Horovod has it, written in one piece so that
ranks never tear each other's lines. A piece that ends in a carriage return (a progress bar) is passed on as it is, with
its mark, at once. A last line without an end gets one. Lines beyond `MAX_LINE` are broken.

Where one rank fails, each of the others raises the same error. The launcher prints its traceback once, and the files of
the ranks have all. A traceback is held until its error has come, and that of an error of fusion_rt until a line comes
that does not belong to it: the error may quote the traceback of another rank, or show the stack of one that hangs.
`release` ends this, and the launcher calls it within a second. An error of fusion_rt that another rank has printed,
line for line, becomes one line that names the rank. Anything that differs is printed, and so are other errors.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fusion_rt.core.traceback_format import MARGIN, TRACEBACK
from fusion_rt.host.private_files import open_private, open_private_directory
from fusion_rt.runner.decisions.places import Place
from fusion_rt.runner.decisions.worker_errors import last_error
from fusion_rt.runner.launch.printer import Printer
from fusion_rt.runner.protocol.agent_messages import Stream

MAX_LINE = 1024 * 1024  # bytes that are kept of a line whose end has not come
TAIL = 16 * 1024  # bytes kept of each worker's stderr, for the last word on a failure
_OURS = re.compile(r"[\w.]*\b(HorovodInternalError|CollectiveError|FusionError)\b")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # before each line, by torch's excepthook in a process group
_STACK = "most recent call first:"  # ends the line before the stack of a rank that hangs
_MOST_BYTES = 1024 * 1024  # of a traceback that is held
_MOST_SHOWN = 16  # tracebacks that are remembered


@dataclass
class _Traceback:
    """The lines of a traceback. `error`: the line that names the exception, once it has come."""

    lines: list[bytes]
    texts: list[str]
    error: str = ""
    size: int = 0
    has_stack: bool = False

    @property
    def is_ours(self) -> bool:
        return _OURS.match(self.error) is not None

    def take(self, line: bytes, text: str) -> bool:
        """Takes a line if it belongs to the traceback; tells whether it does."""
        if line.endswith(b"\r"):  # of a progress bar
            return False
        if not self.error:
            belongs = text not in ("", TRACEBACK)
            self.error = text if belongs and not text.startswith(" ") else ""
        elif text.endswith(_STACK):
            belongs = self.has_stack = True
        else:
            belongs = text.startswith(MARGIN) and (self.has_stack or self.error.endswith(TRACEBACK))
        self.size += len(line)
        if not belongs or self.size > _MOST_BYTES:
            return False
        self.lines.append(line)
        self.texts.append(text)
        return True


class RepeatedTracebacks:
    """Follows the lines of all ranks' stderr, and says which of them to print."""

    def __init__(self) -> None:
        self._held: dict[int, _Traceback] = {}
        self._shown: dict[tuple[str, ...], int] = {}  # by the texts of its lines: the rank that printed it first

    def __bool__(self) -> bool:
        """Tells whether any line is held."""
        return bool(self._held)

    def take(self, rank: int, lines: Iterable[bytes]) -> list[bytes]:
        """Takes lines of a rank, with their ends. Returns those to print now."""
        return [out for line in lines for out in self._take(rank, line)]

    def release(self) -> list[tuple[int, list[bytes]]]:
        """Holds no line any more. Returns the lines to print, with their rank."""
        return [(rank, self._finish(rank)) for rank in list(self._held)]

    def _take(self, rank: int, line: bytes) -> list[bytes]:
        text = _RANK.sub("", line.decode("utf-8", "surrogateescape").rstrip("\r\n"))
        traceback = self._held.get(rank)
        if traceback is not None and traceback.take(line, text):
            return self._finish(rank) if traceback.error and not traceback.is_ours else []
        before = [] if traceback is None else self._finish(rank)
        if text == TRACEBACK:
            self._held[rank] = _Traceback([line], [text])
            return before
        return [*before, line]

    def _finish(self, rank: int) -> list[bytes]:
        """Returns the lines to print of a traceback to which no line is added any more."""
        traceback = self._held.pop(rank)
        if not traceback.is_ours:
            return traceback.lines
        first = self._shown.setdefault(tuple(traceback.texts), rank)
        if len(self._shown) > _MOST_SHOWN:
            del self._shown[next(iter(self._shown))]
        if first == rank:
            return traceback.lines
        error = last_error("\n".join(traceback.texts))
        return [f"Traceback as of rank {first}: {error}\n".encode("utf-8", "surrogateescape")]


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


class DaemonLogs:
    """The log of the daemons of one host.

    Args:
        host: its name.
        printer: passes lines on.

    Attributes:
        last: the last line of the present daemon's.
    """

    def __init__(self, host: str, printer: Printer) -> None:
        self._mark = f"[{host}]<fusiond>:".encode()
        self._printer = printer
        self._lines = Lines()
        self.last = ""

    def begin(self) -> None:
        """Another daemon is started."""
        self._lines, self.last = Lines(), ""

    def feed(self, data: bytes) -> None:
        """Takes what a daemon logged."""
        lines = self._lines.feed(data)
        if lines:
            self.last = lines[-1].decode(errors="replace").strip()
            self._printer.write(2, b"".join(self._mark + line for line in lines))
