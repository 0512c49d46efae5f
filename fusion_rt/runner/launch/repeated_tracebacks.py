"""Tells the traceback that many ranks print once: where one rank fails, each of the others raises the same error.

A traceback is held until its error has come, and that of an error of fusion_rt until a line comes that does not belong
to it: the error may quote the traceback of another rank, or show the stack of one that hangs. `release` ends this, and
the launcher calls it within a second. An error of fusion_rt that another rank has printed, line for line, becomes one
line that names the rank. Anything that differs is printed, and so are other errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fusion_rt.core.traceback_format import MARGIN, TRACEBACK
from fusion_rt.runner.decisions.worker_errors import last_error

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
