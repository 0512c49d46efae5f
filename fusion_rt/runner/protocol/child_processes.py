"""Child processes that cannot be lost: found again as orphans, ended as whole trees, and gone when their parent is.

Three means of Linux together leave nothing behind. Each child leads a session of its own, out of reach of the
terminal's Ctrl-C, which is for the launcher to handle. The agent is a child subreaper (prctl(2)): what a worker leaves
behind, even in another session, becomes the agent's child instead of init's, so that the tree below the agent is all
there is. And each child asks for SIGKILL when its parent ends (PR_SET_PDEATHSIG), for the case that the agent itself
is killed.

Rejected: asyncio's subprocesses, which tell of a child's end only when its pipes are closed too (its own children may
keep them open for ever) and leave orphans unreaped; cgroups, which need rights that users lack; process groups alone,
which a grandchild leaves with one call; psutil, which takes 30 ms to import.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO

from fusion_rt.host.bootstrap import MAX_LINE
from fusion_rt.host.process_stat import stat_fields
from fusion_rt.runner.protocol.pipes import LineWriter, Reader

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02
_KILL_S = 1.0  # seconds in which the kernel has to carry out SIGKILL
_DESCRIPTORS = 3  # of a child's pipes
_OTHERS = 64  # descriptors of this process, and those of a child that is being started
_PF_EXITING = 0x4  # in the flags of /proc/PID/stat; as in <linux/sched.h>


@dataclass(frozen=True)
class Child:
    """A process in a session of its own.

    Attributes:
        pid: its id, and that of its session.
        stdin: writes to it; None when it has no input.
        stdout, stderr: read from it.
        exit: its exit status, or minus the signal that ended it; done when it ends, whoever then holds its pipes.
    """

    pid: int
    stdin: LineWriter | None
    stdout: Reader
    stderr: Reader
    exit: asyncio.Future[int]

    def signal(self, number: int) -> None:
        """Sends a signal to it and what else is in its process group, if it still runs."""
        if not self.exit.done():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def close(self) -> None:
        """Closes the pipes; somebody else may hold their other ends for ever."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.abort()


class Children:
    """Starts this process's children, and takes the exit statuses of them and of the orphans it adopted.

    One per process, made inside the event loop of the main thread.
    """

    def __init__(self) -> None:
        self._running: dict[int, tuple[subprocess.Popen[bytes], asyncio.Future[int]]] = {}
        self._room = 0  # children for which there are descriptors
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    async def start(
        self,
        argv: Sequence[bytes | str],
        env: Mapping[bytes, bytes],
        cwd: bytes,
        *,
        has_input: bool = False,
        dies_with_parent: bool = True,
        inherits: Collection[int] = (),
        line_limit: int = MAX_LINE,
    ) -> Child:
        """Starts a child in a session of its own. Nothing else of the event loop runs between the child's birth and the
        return of this, so that whoever starts it has noted it before anything is heard of it.

        Args:
            argv: its command line.
            env: its environment.
            cwd: its working directory.
            has_input: whether it can be written to; else it reads nothing.
            dies_with_parent: whether it is killed when this process ends.
            inherits: descriptors that it has besides, under the same numbers.
            line_limit: bytes of a line that is read from it.

        Raises:
            OSError: the program cannot be run.
        """
        if len(self._running) >= self._room:
            self._room = _make_room(len(self._running) + 1)
        with ExitStack() as its_ends, ExitStack() as undo:
            its_input, stdin = subprocess.DEVNULL, None
            if has_input:
                its_input, end = _pipe(its_ends, undo, is_input=True)
                stdin = await LineWriter.open(end)
                undo.callback(stdin.abort)
            outputs = []
            for _ in range(2):
                its_output, end = _pipe(its_ends, undo, is_input=False)
                reader = await Reader.open(end, line_limit)
                undo.callback(reader.abort)
                outputs.append((its_output, reader))
            (its_stdout, stdout), (its_stderr, stderr) = outputs
            process = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=its_input,
                stdout=its_stdout,
                stderr=its_stderr,
                pass_fds=inherits,
                start_new_session=True,
                preexec_fn=_die_with_parent() if dies_with_parent else None,
            )
            undo.pop_all()
        exit_status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running[process.pid] = (process, exit_status)  # SIGCHLD is handled when the loop goes on
        return Child(process.pid, stdin, stdout, stderr, exit_status)

    def _reap(self) -> None:
        """Takes the status of every child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return  # there are none
            if pid == 0:
                return
            if pid in self._running:
                process, exit_status = self._running.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                if not exit_status.done():
                    exit_status.set_result(process.returncode)


def _make_room(children: int) -> int:
    """Raises the limit of descriptors, as far as the hard one allows, where so many children need more than there are.
    Returns for how many there is room now. Only where they are needed, since children inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard and _DESCRIPTORS * children + _OTHERS > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return max(children, (soft - _OTHERS) // _DESCRIPTORS)


def _pipe(its_ends: ExitStack, undo: ExitStack, is_input: bool) -> tuple[int, IO[bytes]]:
    """Makes a pipe to or from a child: the child's end, and this process's.

    Args:
        its_ends: closes the child's end here.
        undo: closes this process's.
        is_input: the child reads it.
    """
    reading, writing = os.pipe()
    its, own = (reading, writing) if is_input else (writing, reading)
    its_ends.callback(os.close, its)
    return its, undo.enter_context(os.fdopen(own, "wb" if is_input else "rb", buffering=0))


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans; it then needs `Children` to reap them.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


async def end_descendants(keep: Collection[int], grace: float, hurry: asyncio.Event) -> list[int]:
    """Ends this process's descendants: TERM, and after `grace` seconds KILL.

    Args:
        keep: children to leave alone, with all that descends from them.
        grace: seconds; 0 kills at once.
        hurry: set it to end the grace early.

    Returns:
        Ids of the processes that not even KILL ended within a second (stuck in the kernel, or another user's). Not of
        those that are about to end, while the kernel frees their memory: several GiB on a busy host take seconds.
    """
    started = time.monotonic()
    if grace > 0:
        _signal(_descendants(keep), signal.SIGTERM)
    killed = None
    while running := _descendants(keep):
        now = time.monotonic()
        if killed is not None and now >= killed + _KILL_S:
            return [pid for pid in running if not _is_exiting(pid)]
        if now >= started + grace or hurry.is_set():
            killed = killed or now
            _signal(running, signal.SIGKILL)
        await asyncio.sleep(_POLL_S)
    return []


def signal_tree(pid: int, number: int) -> None:
    """Sends a signal to a child, before it can make something of their ends, and to all that descends from it."""
    _signal([pid, *_descendants((), pid)], number)


def _descendants(keep: Collection[int], of: int = 0) -> list[int]:
    """Descendants of a process (0: this one) that have not ended."""
    children: dict[int, list[tuple[int, str]]] = {}
    for pid, parent, state in _processes():
        children.setdefault(parent, []).append((pid, state))
    running = []
    parents = [of or os.getpid()]
    while parents:
        for pid, state in children.get(parents.pop(), ()):
            if pid not in keep:
                parents.append(pid)
                if state not in "ZX":
                    running.append(pid)
    return running


def _processes() -> Iterator[tuple[int, int, str]]:
    """(pid, parent's pid, state) of every process of the machine."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := stat_fields(int(name))):
            yield int(name), int(stat[1]), stat[0]


def _is_exiting(pid: int) -> bool:
    """Tells whether a process will run no more and only the kernel has something left to do for it."""
    stat = stat_fields(pid)
    return not stat or bool(int(stat[6]) & _PF_EXITING)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):  # ended meanwhile; another user's: the caller returns it
            os.kill(pid, number)


def _die_with_parent() -> Callable[[], None]:
    """Makes what a child runs before exec: it asks for SIGKILL when the parent ends, and checks that it has not yet."""
    parent = os.getpid()

    def ask() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) failed: {os.strerror(number)}")
