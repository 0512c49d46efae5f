"""The worker's Python stack for its node's daemon, written on a signal whatever the worker is doing.

`faulthandler` writes the stack of the main thread into a sealed memfd whenever STACK_SIGNAL comes: from the signal
handler, in C, and so also while some extension holds the GIL, or the main thread waits in a system call. The memfd goes
to the daemon with the worker's `Hello`; both share its file offset, which is how much has been written.

Rejected: the stacks of all threads. The handler reads those while their threads run, begin and end: a process with a
busy thread beside ended with a segmentation fault after six signals. (The system hands a signal for the process to the
main thread, unless that one blocks it, or has another one to handle first.)

The registration stays as long as the process: undoing it would leave a moment in which the signal kills.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading
from typing import NamedTuple

STACK_SIGNAL = int(signal.SIGRTMIN) + 11  # a real-time signal that neither C libraries nor common tools use
STACK_BYTES = 256 * 1024  # of the memfd: a hundred calls, which is as far as it goes, with long paths; the rest is lost
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Offer(NamedTuple):
    """The memfd for the daemon (owned by the caller; -1: there is none), and the signal."""

    fd: int
    signal: int


_lock = threading.Lock()
_memfd = -1  # of this process


def offer() -> Offer:
    """Returns this process's offer, without a memfd where the script handles the signal itself.

    Raises:
        OSError: there is no memory, or no descriptor, for it.
    """
    global _memfd
    with _lock:
        if _memfd < 0:
            if is_handled(os.getpid(), STACK_SIGNAL):
                return Offer(-1, 0)
            _memfd = _new_memfd()
            faulthandler.register(STACK_SIGNAL, file=_memfd, all_threads=False, chain=False)
        return Offer(os.dup(_memfd), STACK_SIGNAL)


def is_handled(pid: int, number: int) -> bool:
    """Returns whether a process catches or ignores a signal.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigCgt:", "SigIgn:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _new_memfd() -> int:
    fd = os.memfd_create("fusion_rt-stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, STACK_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def _after_fork() -> None:
    """Undoes the registration in a forked child: the memfd is the parent's, and a child's stacks are never asked
    for."""
    global _memfd, _lock
    _lock = threading.Lock()  # another thread may have held it
    if _memfd >= 0:
        faulthandler.unregister(STACK_SIGNAL)
        os.close(_memfd)
        _memfd = -1


os.register_at_fork(after_in_child=_after_fork)
