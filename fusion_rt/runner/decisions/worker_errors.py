"""Reads the output of a worker before it failed: the error, and whether it only tells of another one's failure."""

from __future__ import annotations

import itertools
import re

from fusion_rt.core.errors import DIED
from fusion_rt.core.traceback_format import MARGIN, TRACEBACK

_ECHO = re.compile(r"[\w.]*\b(HorovodInternalError|CollectiveError)\b")
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # before each line, by torch's excepthook in a process group
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_TAIL_LINES = 30


def echo_of(stderr: str) -> int:
    """Tells how far a worker that ended with an error tells of another failure only.

    It does when its exception is HorovodInternalError (or CollectiveError, which is one), or was raised because of one.

    Returns:
        0 not at all, 1 it does, 2 in the other one's own words, or that the other one has died.
    """
    chain = _chain(_lines(stderr))
    if not any(_ECHO.match(_error(lines)) for lines in chain):
        return 0
    return 2 if any(_is_quote(line) or DIED in line for lines in chain for line in lines) else 1


def last_error(stderr: str) -> str:
    """The line that tells the error: of the last Python traceback, or the last line that is not empty."""
    lines = _end(_lines(stderr))
    line = _error(lines)
    if not _is_quote(line):
        return line
    after = next(number for number, each in enumerate(lines, 1) if each.strip() == line.strip())
    other = [each.removeprefix(MARGIN) for each in _quote(lines[after:])]
    return line.removesuffix(TRACEBACK) + last_error("\n".join([TRACEBACK, *other]))


def in_a_line(message: str) -> str:
    """The first line of an exception's message; if that quotes a traceback, with the error there."""
    first, *rest = _lines(message) or [""]
    return last_error("\n".join([first, *rest])) if _is_quote(first) else first


def excerpt(stderr: str) -> list[str]:
    """As much of the last traceback, and the lines after it, as people are shown: at most `_TAIL_LINES`."""
    lines = _end(_lines(stderr))
    if len(lines) <= _TAIL_LINES:
        return lines
    return [lines[0], "  ...", *lines[2 - _TAIL_LINES :]]


def _lines(stderr: str) -> list[str]:
    return [line for line in re.split(r"\r\n|\r|\n", _RANK.sub("", stderr)) if line.strip()]


def _end(lines: list[str]) -> list[str]:
    """The last traceback and the lines after it, or a few last lines.

    Where the beginning of a traceback is lost, the message that quotes another one begins it.
    """
    for begins in (_is_traceback, _is_quote):
        found = [number for number, line in enumerate(lines) if begins(line)]
        if found:
            return lines[found[-1] :]
    return lines[-_TAIL_LINES // 3 :]


def _chain(lines: list[str]) -> list[list[str]]:
    """The last traceback, and those of the exceptions that led to it, the last one first."""
    chain = [_end(lines)]
    while len(lines) > len(chain[-1]) and lines[-len(chain[-1]) - 1] in _CHAINED:
        lines = lines[: -len(chain[-1]) - 1]
        chain.append(_end(lines))
    return chain


def _error(lines: list[str]) -> str:
    """The line of a traceback that names the exception; the last line where there is none."""
    if not lines:
        return ""
    if _is_quote(lines[0]):
        return lines[0]
    if _is_traceback(lines[0]):
        return next((line for line in lines[1:] if not line.startswith(" ")), lines[-1].strip())
    return lines[-1].strip()


def _is_traceback(line: str) -> bool:
    return line.startswith(TRACEBACK)


def _is_quote(line: str) -> bool:
    """Tells whether a message goes on with another process's traceback after this line."""
    return line.endswith(TRACEBACK) and not line.startswith((TRACEBACK, " "))


def _quote(lines: list[str]) -> list[str]:
    """The quoted lines at the beginning of these."""
    return list(itertools.takewhile(lambda line: line.startswith(MARGIN), lines))
