"""The time-outs of many operations, with one timer."""

from __future__ import annotations

import math
from typing import Protocol

from fusiond.core.effects import Timers

_EARLY = 1e-3  # seconds; a deadline so near counts as passed


class Timed(Protocol):
    """An object with operations that end when their time is up."""

    def end_overdue(self, now: float) -> float:
        """Ends those that are due; returns when the next one is, or infinity."""


class Deadlines:
    """The clock of operations that end when their time is up.

    There is one timer for the first of them, and it is not set again for each operation: most end long before.

    Args:
        timers: the clock.
        owner: has the operations.
    """

    def __init__(self, timers: Timers, owner: Timed) -> None:
        self._timers = timers
        self._owner = owner
        self._next = math.inf

    def add(self, until: float) -> None:
        """Notes that something is due then."""
        if until < self._next:
            self._next = until
            self._timers.call_later(max(until - self._timers.clock(), 0.0), self._look)

    def _look(self) -> None:
        now = self._timers.clock() + _EARLY
        if now >= self._next:  # else this was the timer of one that is over
            self._next = math.inf
            self.add(self._owner.end_overdue(now))
