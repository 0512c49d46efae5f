"""A test that does not end in time fails, and shows where all of its processes are.

pytest-timeout says when, here is what happens then. All processes that descend from this one, or carry the mark of the
test, are stopped, so that what they show is of one moment; then each Python among them is ended by SIGABRT, which has
`faulthandler` write the stacks of its threads (PYTHONFAULTHANDLER is set for all tests). They are read from wherever
its standard error goes. The message of the failure has them all.

A main thread that never comes back to its interpreter cannot fail: its process ends `GRACE_S` later, and pytest-xdist
names the test, starts another process and goes on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import psutil
import pytest

from fusion_rt.host import stacks

GRACE_S = 90.0  # for fixtures to clean up after a test that was too slow; then its process ends
_ABORT_S = 5.0  # for a process to write its stacks and end
_LONGEST = 8000  # characters shown of one process


@contextlib.contextmanager
def alarm(seconds: float, output: int, others: Callable[[], Iterable[psutil.Process]]) -> Iterator[None]:
    """Fails the test that runs in the main thread when it takes too long, and again whenever cleaning up does.

    Args:
        seconds: limit.
        output: descriptor for the stacks of this process when it has to be ended.
        others: finds the processes of the test, this one excepted.
    """

    def fail(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        told = [*_own_threads(), *_ended(others())]
        signal.setitimer(signal.ITIMER_REAL, GRACE_S / 2)
        pytest.fail("\n\n".join([f"the test did not end within {seconds:g} s; its processes were here:", *told]))

    before = signal.signal(signal.SIGALRM, fail)
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=output)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def _own_threads() -> list[str]:
    """Stacks of this process's threads but the main one, whose stack is pytest's traceback."""
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread is not threading.main_thread()}
    frames = sys._current_frames()
    return [
        f"thread {name} of the test:\n{''.join(traceback.format_stack(frames[ident]))[-_LONGEST:]}"
        for ident, name in names.items()
        if ident in frames
    ]


def _ended(processes: Iterable[psutil.Process]) -> list[str]:
    """Ends the Python processes among these; what each was doing, as text."""
    stopped = list(processes)
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    told = []
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            title = f"process {process.pid}: {' '.join(process.cmdline())[:300]}"
            handled = stacks.is_handled(process.pid, signal.SIGABRT)
            told.append(f"{title}\n{_last_words(process) if handled else f'is no Python: {process.status()}'}")
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    return told


def _last_words(process: psutil.Process) -> str:
    """Ends a Python process, and returns what it writes to its standard error from then on."""
    try:
        output = os.open(f"/proc/{process.pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:  # a socket, or closed
        return f"its standard error cannot be read: {error}"
    try:
        with contextlib.suppress(OSError):
            os.lseek(output, 0, os.SEEK_END)  # of a file; a pipe has no end
        process.rlimit(psutil.RLIMIT_CORE, (0, 0))
        process.send_signal(signal.SIGABRT)
        process.resume()
        words, deadline = b"", time.monotonic() + _ABORT_S
        while _lives(process) and time.monotonic() < deadline:
            words += _read(output)
            time.sleep(0.01)
        words += _read(output)
    finally:
        os.close(output)
        process.kill()
    lines = words.decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))[:_LONGEST]


def _lives(process: psutil.Process) -> bool:
    """Whether it runs; its parent, which may be stopped, will learn of its end later."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _read(output: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(output, 1 << 20)
    return b""
