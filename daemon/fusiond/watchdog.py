"""Writes where a daemon is whose event loop stands still: in a call that never returns, or with somebody who holds the
GIL. Its peers notice that by themselves, because heartbeats stop; why it stood still is only to be seen from inside.

The stacks are written to the log by a thread of `faulthandler`, which needs no GIL.
"""

from __future__ import annotations

import faulthandler
import logging

from fusiond.loop import EventLoop

_log = logging.getLogger("fusiond")
_LOG = 2  # standard error
_LOOKS = 4  # times that the loop has to come by until the limit


class Watchdog:
    """Watches an event loop, which has to run in time.

    Args:
        loop: the one.
        limit: seconds for which it may stand still.
    """

    def __init__(self, loop: EventLoop, limit: float) -> None:
        self._loop = loop
        self._limit = limit
        self._last = loop.clock()
        self._look()
        loop.call_every(limit / _LOOKS, self._look)

    def _look(self) -> None:
        now = self._loop.clock()
        if now - self._last > self._limit:
            _log.warning("the event loop stood still for %.1f s; where it was stands above", now - self._last)
        self._last = now
        faulthandler.dump_traceback_later(self._limit, file=_LOG)  # replaces the one before

    def close(self) -> None:
        """Ends the watch."""
        faulthandler.cancel_dump_traceback_later()
