"""Logs the stack of a daemon whose event loop is blocked, by a call that never returns or another thread with the GIL.

Its peers notice that by themselves, because heartbeats stop; the cause can only be seen from inside.

The stack of the main thread is written to the log by `faulthandler` in the handler of a timer's signal, which needs
no GIL. Rejected: its own thread (`dump_traceback_later`) and the stacks of all threads. Both read stacks of threads
that may run on meanwhile, as after a SIGSTOP and SIGCONT, which ended the daemon with a segmentation fault.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import stat

from fusiond.host.loop import EventLoop

_log = logging.getLogger("fusiond")
_LOG = 2  # standard error
_LOOKS = 4  # times that the loop resets the timer until the limit


class Watchdog:
    """Watches the event loop of the main thread.

    Args:
        loop: the event loop.
        limit: seconds for which it may be blocked.
    """

    def __init__(self, loop: EventLoop, limit: float) -> None:
        self._loop = loop
        self._limit = limit
        self._last = loop.clock()
        self._log = _without_waiting(_LOG)
        faulthandler.register(signal.SIGALRM, file=self._log, all_threads=False, chain=False)
        self._look()
        loop.call_every(limit / _LOOKS, self._look)

    def _look(self) -> None:
        now = self._loop.clock()
        if now - self._last > self._limit:
            _log.warning("the event loop stood still for %.1f s; its stack is above", now - self._last)
        self._last = now
        signal.setitimer(signal.ITIMER_REAL, self._limit)  # replaces the timer before

    def close(self) -> None:
        """Ends the watch."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.unregister(signal.SIGALRM)
        os.close(self._log)


def _without_waiting(fd: int) -> int:
    """Opens another descriptor of a file; writes to a pipe without a reader do not block, and drop bytes."""
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return os.dup(fd)
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
