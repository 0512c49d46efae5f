"""Where the local workers are: the stacks of their main threads, which they write unasked (`fusion_rt.host.stacks`).

A worker is asked with a signal, through a descriptor of its process, so that it cannot reach another process that has
got its number; and only if the signal is one that it handles, since it would else be its end. What it writes is read
when it has stopped growing. Nothing here waits: a timer looks, and lines of source files, which may lie on a file
system that hangs, are read by a thread of their own.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusion_rt.host.process_stat import process_state
from fusion_rt.host.stacks import SEALS, STACK_BYTES, is_handled
from fusion_rt.local import stack_text
from fusiond.host.loop import EventLoop

_LOOK = 0.03  # seconds between looks at a worker's output
_UNCHANGED = 2  # looks in a row that see no change: it is written, if it goes as far as stacks do
_PAUSED = 10  # ... and if it does not: on a busy machine the worker may pause anywhere
PATIENCE = 1.0  # seconds until an answer is there, if it comes at all
Then = Callable[[wire.Whereabouts], None]


@dataclass(eq=False)
class Source:
    """A worker's process.

    Attributes:
        pid: as this daemon knows it; 0: it lives where this daemon sees no processes.
        process: a descriptor of it (pidfd); -1: there is none.
        memfd: the file that it writes its stacks into; -1: it writes none.
        number: the signal on which it does.
        unanswered: a signal has been sent, and nothing was written yet.
        waiting: the callers to be told next.
    """

    pid: int
    process: int = -1
    memfd: int = -1
    number: int = 0
    unanswered: bool = False
    waiting: list[Then] = field(default_factory=list)

    @classmethod
    def open(cls, pid: int, hello: wire.Hello, memfd: int) -> Source:
        """Opens that of the worker that has just said this. `memfd`: the attached descriptor (-1: none); it is taken
        over, also on failure.

        Raises:
            WireError: that is something else.
        """
        try:
            process = os.pidfd_open(pid)
        except OSError:  # of another namespace (pid 0), or an old kernel: then it is not asked
            process = -1
        source = cls(pid, process, memfd, hello.stack_signal)
        if (memfd < 0) != (hello.stack_signal == 0) or (memfd >= 0 and not _is_sealed(memfd)):
            source.close()
            raise WireError("what came with Hello is no memory for stacks")
        return source

    def close(self) -> None:
        for fd in (self.process, self.memfd):
            if fd >= 0:
                os.close(fd)
        self.process = self.memfd = -1

    @property
    def written(self) -> int:
        """The number of bytes that it has written; it and this daemon share the descriptor's offset."""
        return os.lseek(self.memfd, 0, os.SEEK_CUR)

    def state(self) -> str:
        """The letter of its state in /proc; empty when it has ended."""
        try:
            if self.process >= 0:
                signal.pidfd_send_signal(self.process, 0)
        except ProcessLookupError:
            return ""
        return process_state(self.pid)

    def why_not(self, state: str) -> str:
        """Returns why it is not asked, as a sentence; empty if it can be."""
        if self.pid == 0:
            return "no stack: the worker runs in another process namespace than the daemon"
        if not state:
            return "no stack: the process is gone"
        if state in ("T", "t", "Z", "X"):
            return f"no answer: the process is {stack_text.STATES[state]} (state {state} in /proc)"
        if self.process < 0:
            return "no stack: the system has no descriptors of processes (pidfd)"
        if self.memfd < 0:
            return "no stack: the script handles the signal that would show it"
        if not is_handled(self.pid, self.number):
            return "no stack: the script handles the signal that would show it"
        return ""


@dataclass
class _Look:
    """One question to a worker, whose process was in this state, and the answer so far."""

    rank: int
    source: Source
    state: str
    deadline: float
    written: int = 0
    unchanged: int = 0


class StackReader:
    """Asks workers for their stacks.

    Args:
        loop: has the timers.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._closed = False

    def close(self) -> None:
        """No caller is told anything any more."""
        self._closed = True

    def locate(self, sources: Mapping[int, Source | None], then: Callable[[list[wire.Whereabouts]], None]) -> None:
        """Tells where the workers of these ranks are, in order of their ranks, within about PATIENCE.

        Args:
            sources: by rank; None: the rank has no connection to this daemon.
        """
        found: dict[int, wire.Whereabouts] = {}

        def one(whereabouts: wire.Whereabouts) -> None:
            found[whereabouts.rank] = whereabouts
            if len(found) == len(sources):
                then([found[rank] for rank in sorted(found)])

        if not sources:
            then([])
        for rank, source in sources.items():
            if source is None:
                one(wire.Whereabouts(rank, 0, "gone", "it is not connected to its daemon"))
            else:
                self._ask(rank, source, one)

    def _ask(self, rank: int, source: Source, then: Then) -> None:
        if source.waiting:  # it has been asked already
            source.waiting.append(then)
            return
        try:
            state = source.state()
            why_not = source.why_not(state)
            if not why_not:
                self._signal(source)
        except (FileNotFoundError, ProcessLookupError):
            state, why_not = "", "no stack: the process is gone"
        if why_not:
            then(wire.Whereabouts(rank, source.pid, stack_text.state_in_words(state), why_not))
            return
        source.waiting.append(then)
        words = stack_text.state_in_words(state)  # before the signal makes it run
        self._look_later(_Look(rank, source, words, self._loop.clock() + PATIENCE))

    def _look_later(self, look: _Look) -> None:
        self._loop.call_later(_LOOK, lambda: self._look(look))

    @staticmethod
    def _signal(source: Source) -> None:
        """Real-time signals queue up: a worker that has not answered yet is not sent another."""
        if source.unanswered and not source.written:
            return
        os.lseek(source.memfd, 0, os.SEEK_SET)
        signal.pidfd_send_signal(source.process, source.number)
        source.unanswered = True

    def _look(self, look: _Look) -> None:
        rank, source = look.rank, look.source
        if self._closed or source.memfd < 0:  # it has left
            self._tell(source, wire.Whereabouts(rank, source.pid, "gone", "it has left the job"))
            return
        written = source.written
        late = self._loop.clock() > look.deadline
        look.unchanged = look.unchanged + 1 if written == look.written else 0
        look.written = written
        text = os.pread(source.memfd, min(written, STACK_BYTES), 0).decode(errors="replace")
        enough = _UNCHANGED if stack_text.is_whole(text) else _PAUSED
        if not late and (not written or look.unchanged < enough):
            self._look_later(look)
            return
        if written == 0:
            state = source.state()
            words = stack_text.state_in_words(state)
            why_not = source.why_not(state) or f"no answer within {PATIENCE:g} s: the process is {words}"
            self._tell(source, wire.Whereabouts(rank, source.pid, words, why_not))
            return
        source.unanswered = False
        stack = stack_text.parse(text, _directory(source.pid))

        def read_lines() -> None:
            found = wire.Whereabouts(rank, source.pid, look.state, "", stack_text.with_sources(stack))
            self._loop.call_from_thread(lambda: self._tell(source, found))

        try:
            threading.Thread(target=read_lines, name="source lines", daemon=True).start()
        except RuntimeError:  # the limit of processes is reached: the stack does without its lines of source
            self._tell(source, wire.Whereabouts(rank, source.pid, look.state, "", stack))

    @staticmethod
    def _tell(source: Source, found: wire.Whereabouts) -> None:
        waiting, source.waiting = source.waiting, []
        for then in waiting:
            then(found)


def _directory(pid: int) -> str:
    """The working directory of a process, which paths of its files may be relative to."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # it has ended since, or does not want to be looked at: then such paths stay as they are
        return ""


def _is_sealed(memfd: int) -> bool:
    try:
        return fcntl.fcntl(memfd, fcntl.F_GET_SEALS) & SEALS == SEALS and os.fstat(memfd).st_size == STACK_BYTES
    except OSError:
        return False
