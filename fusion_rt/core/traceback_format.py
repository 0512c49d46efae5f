"""Formats an error that tells of another process's traceback, so that it is not taken for the traceback of this one.

Whoever fails because another rank did prints a traceback whose message holds the other one's. The lines of that are
indented, and those of this process begin at the margin: `runner.decisions.worker_errors` and people tell them apart by
it.
"""

from __future__ import annotations

TRACEBACK = "Traceback (most recent call last):"  # how Python begins one
MARGIN = "    "
_FIRST, _LAST = 12, 68  # lines: more than a launcher keeps of a rank's output would hide its source


def quoted(text: str) -> str:
    """An error of another process, to stand behind `... failed: ` in a message.

    All of its lines but the first are indented by `MARGIN`; of very many, those in the middle are left out.
    """
    lines = [line.rstrip() for line in text.strip().splitlines() if line.strip()]
    if len(lines) > _FIRST + _LAST:
        lines[_FIRST:-_LAST] = [f"  ... ({len(lines) - _FIRST - _LAST} lines)"]
    return "\n".join([*lines[:1], *(MARGIN + line for line in lines[1:])])


def in_short(message: str) -> str:
    """A message that quotes a traceback, with its last exception alone: `rank 2 (host a) failed: ValueError: ...`."""
    before, quotes, traceback = message.partition(TRACEBACK)
    if not quotes:
        return message
    lines = [line for line in traceback.rpartition(TRACEBACK)[2].splitlines() if line]
    indents = [len(line) - len(line.lstrip()) for line in lines]  # of frames more than of the exception below them
    return (
        before
        + next((line for line, indent in zip(lines, indents, strict=True) if indent < indents[0]), lines[-1]).strip()
    )
