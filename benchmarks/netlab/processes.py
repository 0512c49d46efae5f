"""Ends every process in a set of network namespaces.

It uses process descriptors (pidfd_open(2), Linux 5.3): a recycled process id cannot be hit, and, unlike psutil's
`wait`, waiting does not take the exit status away from the parent of the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.netlab.iproute import NetlabError

TERM_GRACE_S = 1.0
KILL_GRACE_S = 5.0
_ROUNDS = 5  # a process may fork between the search and the kill


def kill_processes(namespaces: Sequence[Path], others: Sequence[int] = ()) -> None:
    """Sends TERM, and later KILL, to all processes in `namespaces` and to the process ids `others`.

    Missing files among `namespaces` (those of `ip netns`) are skipped, and so is the caller's own network namespace: a
    name that was bound to it by mistake must not end all processes of the machine.

    Raises:
        NetlabError: processes are still there afterwards.
    """
    wanted = {(stat.st_dev, stat.st_ino) for stat in (os.stat(path) for path in namespaces if path.exists())}
    own = os.stat("/proc/self/ns/net")
    wanted.discard((own.st_dev, own.st_ino))
    for _ in range(_ROUNDS):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        found = {pid: fd for pid in pids if (fd := _open_if(pid, wanted, others)) is not None}
        if not found:
            return
        try:
            rest = _end(set(found.values()), signal.SIGTERM, TERM_GRACE_S)
            rest = _end(rest, signal.SIGKILL, KILL_GRACE_S)
        finally:
            for fd in found.values():
                os.close(fd)
    raise NetlabError(f"processes {sorted(found)} do not end: kill them by hand, then run `clean`.")


def _open_if(pid: int, namespaces: set[tuple[int, int]], others: Sequence[int]) -> int | None:
    """Returns a descriptor of the process if it is alive and to be ended, else None."""
    if pid == os.getpid():
        return None
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        # Only now, with the descriptor at hand, the id cannot change hands any more.
        stat = os.stat(f"/proc/{pid}/ns/net")
        if ((stat.st_dev, stat.st_ino) in namespaces or pid in others) and not _ended(fd):
            return fd
    except OSError:  # it has just ended; a zombie has no namespaces
        pass
    os.close(fd)
    return None


def _ended(fd: int, timeout_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _end(descriptors: set[int], number: signal.Signals, grace_s: float) -> set[int]:
    """Sends a signal to all, gives them `grace_s` seconds together, and returns those that still run."""
    for fd in descriptors:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)
    deadline = time.monotonic() + grace_s
    return {fd for fd in descriptors if not _ended(fd, max(0.0, deadline - time.monotonic()))}
