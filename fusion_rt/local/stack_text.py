"""Parses the stacks that `faulthandler` writes, and describes where workers are, for people.

A stack has the most recent call first, as `faulthandler` writes it. Calls inside of fusion_rt do not help to find out
what hangs: only the one that the script has made is kept.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from itertools import islice

from fusion_rt import wire

_HEAD = "Stack (most recent call first):"
_FRAME = re.compile(r'  File "(.*)", line ([0-9]{1,9}) in (.*)')
_KEPT = 20  # calls of a stack
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LARGEST_SOURCE = 4 << 20  # bytes of a file whose lines are read
_LONGEST_SOURCE = 120  # characters of a line that are kept
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a system call that cannot be interrupted",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended, and not reaped yet",
    "X": "dead",
    "I": "idle",
}


def parse(text: str, directory: str = "") -> wire.Stack:
    """Parses the stack that `faulthandler` wrote; of several, the last one.

    Args:
        directory: where paths that are not absolute begin.
    """
    frames: list[wire.Frame] | None = None
    for line in text.split("\n")[:-1]:  # a text without an end was cut off
        if line == _HEAD:
            frames = []
        elif frames is not None and (found := _FRAME.fullmatch(line)):
            path = found[1] if found[1].startswith("<") else os.path.join(directory, found[1])
            frames.append(wire.Frame(path[-wire.MAX_LINE :], int(found[2]), found[3][: wire.MAX_LINE]))
    return _shortened(frames or [])


def is_whole(text: str) -> bool:
    """Returns whether a stack of `faulthandler` ends with the module that was run, as nearly all complete ones do."""
    return text.endswith(" in <module>\n")


def with_sources(stack: wire.Stack) -> wire.Stack:
    """Returns the stack with the lines of the source files, where they can be read. Blocks where a file system does."""
    frames = (wire.Frame(f.file, f.line, f.function, source_line(f.file, f.line), f.inner) for f in stack.frames)
    return wire.Stack(tuple(frames), stack.more)


def source_line(path: str, number: int) -> str:
    """Returns a line of a file of at most `_LARGEST_SOURCE` bytes, stripped; empty if it cannot be read."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_SOURCE or number < 1:
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return next(islice(file, number - 1, None), "").strip()[:_LONGEST_SOURCE]
    except (OSError, ValueError):  # ValueError: no path has a null character
        return ""  # it is not on this host, or gone since: the stack says enough


def state_in_words(letter: str) -> str:
    """Formats the state of a process: `sleeping (S)`."""
    return f"{STATES.get(letter, 'in an unknown state')} ({letter})" if letter else "gone"


def describe(found: wire.Whereabouts, host: str) -> list[str]:
    """Describes where a worker is, in lines for people: the stack of its main thread."""
    process = f"pid {found.pid}, {found.state}" if found.pid else found.state
    head = f"rank {found.rank} (host {host}, {process})"
    if found.why_not:
        return [f"{head}: {found.why_not}"]
    return [f"{head}, most recent call first:", *describe_stack(found.stack)]


def describe_stack(stack: wire.Stack) -> Iterator[str]:
    """Yields a line for each call of a stack."""
    if not stack.frames:
        yield "    it has no Python stack"
    for frame in stack.frames:
        yield f"    {describe_frame(frame)}"
    if stack.more:
        yield f"    and {stack.more} more calls"


def describe_frame(frame: wire.Frame) -> str:
    """Formats a call: `/home/me/train.py:12 in slow: time.sleep(300)`."""
    source = f": {frame.source}" if frame.source else ""
    inner = f" (and {frame.inner} calls inside of fusion_rt)" if frame.inner else ""
    return f"{frame.file}:{frame.line} in {frame.function}{source}{inner}"


def _shortened(frames: Sequence[wire.Frame]) -> wire.Stack:
    kept: list[wire.Frame] = []
    inner = 0
    for index, frame in enumerate(frames):
        if _is_ours(frame) and index + 1 < len(frames) and _is_ours(frames[index + 1]):
            inner += 1
            continue
        kept.append(wire.Frame(frame.file, frame.line, frame.function, "", inner))
        inner = 0
    return wire.Stack(tuple(kept[:_KEPT]), len(kept[_KEPT:]))


def _is_ours(frame: wire.Frame) -> bool:
    return frame.file.startswith(_PACKAGE)
