"""What `faulthandler` writes, read; and where workers are, in words.

Stacks have the most recent call first, as `faulthandler` writes them. Calls inside of fusion_rt are of no interest to
whoever looks for what hangs: only the one that the script has made is kept.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from itertools import islice

from fusion_rt import wire

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]{1,16})(?: \[.*\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line ([0-9]{1,9}) in (.*)')
_OF_MAIN, _OF_OTHERS = 20, 6  # calls that are kept of a thread
_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
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


def parse(text: str, main_thread: int, directory: str = "") -> tuple[wire.ThreadStack, ...]:
    """The stacks in what `faulthandler` wrote: of the main thread first, then of the others as they come.

    Args:
        main_thread: its ident; 0: the one that wrote.
        directory: where paths that are not absolute begin.
    """
    stacks: dict[int, list[wire.Frame]] = {}  # of a thread that is there twice, what came last counts
    frames: list[wire.Frame] | None = None
    for line in text.split("\n")[:-1]:  # what has no end was cut off
        if thread := _THREAD.fullmatch(line):
            ident = int(thread[1], 16)
            if line.startswith("Current") and not main_thread:
                main_thread = ident
            frames = stacks[ident] = []
        elif frames is not None and (found := _FRAME.fullmatch(line)):
            path = found[1] if found[1].startswith("<") else os.path.join(directory, found[1])
            frames.append(wire.Frame(path[-wire.MAX_LINE :], int(found[2]), found[3][: wire.MAX_LINE]))
    order = sorted(stacks, key=lambda ident: ident != main_thread)[: wire.MAX_THREADS]
    return tuple(_shortened(ident, ident == main_thread, stacks[ident]) for ident in order)


def with_sources(threads: Sequence[wire.ThreadStack]) -> tuple[wire.ThreadStack, ...]:
    """The same with the lines of the files, where they can be read. It blocks where a file system does."""
    return tuple(
        wire.ThreadStack(
            thread.name,
            tuple(wire.Frame(f.file, f.line, f.function, source_line(f.file, f.line), f.inner) for f in thread.frames),
            thread.more,
        )
        for thread in threads
    )


def source_line(path: str, number: int) -> str:
    """A line of a file of moderate size, without its margins; empty if it cannot be read."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_SOURCE or number < 1:
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return next(islice(file, number - 1, None), "").strip()[:_LONGEST_SOURCE]
    except (OSError, ValueError):  # ValueError: no path has a null character
        return ""  # it is not on this host, or gone since: the stack says enough


def process_state(pid: int) -> str:
    """The letter of a process's state in /proc; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def state_in_words(letter: str) -> str:
    """`sleeping (S)`."""
    return f"{STATES.get(letter, 'in an unknown state')} ({letter})" if letter else "gone"


def describe(found: wire.Whereabouts, host: str) -> list[str]:
    """Where a worker is, in lines for people: the stack of its main thread."""
    process = f"pid {found.pid}, {found.state}" if found.pid else found.state
    head = f"rank {found.rank} (host {host}, {process})"
    if found.why_not:
        return [f"{head}: {found.why_not}"]
    return [f"{head}, most recent call first:", *describe_threads(found.threads)]


def describe_threads(threads: Sequence[wire.ThreadStack]) -> Iterator[str]:
    """A line for each call of the first thread, and how many others there are."""
    if not threads:
        yield "    it has no Python stack"
        return
    for frame in threads[0].frames:
        yield f"    {describe_frame(frame)}"
    if threads[0].more:
        yield f"    and {threads[0].more} more calls"
    if len(threads) > 1:
        yield f"    ({len(threads) - 1} other thread{'s' if len(threads) > 2 else ''})"


def describe_frame(frame: wire.Frame) -> str:
    """`/home/me/train.py:12 in slow: time.sleep(300)`."""
    source = f": {frame.source}" if frame.source else ""
    inner = f" (and {frame.inner} calls inside of fusion_rt)" if frame.inner else ""
    return f"{frame.file}:{frame.line} in {frame.function}{source}{inner}"


def _shortened(ident: int, is_main: bool, frames: Sequence[wire.Frame]) -> wire.ThreadStack:
    kept: list[wire.Frame] = []
    inner = 0
    for index, frame in enumerate(frames):
        if _is_ours(frame) and index + 1 < len(frames) and _is_ours(frames[index + 1]):
            inner += 1
            continue
        kept.append(wire.Frame(frame.file, frame.line, frame.function, "", inner))
        inner = 0
    most = _OF_MAIN if is_main else _OF_OTHERS
    return wire.ThreadStack("main thread" if is_main else f"thread {ident:#x}", tuple(kept[:most]), len(kept[most:]))


def _is_ours(frame: wire.Frame) -> bool:
    return frame.file.startswith(_PACKAGE)
