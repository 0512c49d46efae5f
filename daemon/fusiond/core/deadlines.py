"""The time-outs of many operations, with one timer."""

from __future__ import annotations

import math
from collections.abc import Callable

_EARLY = 1e-3  # seconds; what is due so soon is due


class Deadlines:
    """The clock of operations that end when their time is up.

    There is one timer for the first of them, and it is not set again for each operation: most end long before.

    Args:
        clock: seconds.
        call_later: calls back after so many seconds.
        end: called with a time; ends what is due then, and returns when the next one is, or infinity.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], object],
        end: Callable[[float], float],
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._end = end
        self._next = math.inf

    def add(self, until: float) -> None:
        """Notes that something is due then."""
        if until < self._next:
            self._next = until
            self._call_later(max(until - self._clock(), 0.0), self._look)

    def _look(self) -> None:
        now = self._clock() + _EARLY
        if now >= self._next:  # else this was the timer of one that is over
            self._next = math.inf
            self.add(self._end(now))
