"""Everything ends when its time is up, with one timer at a time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from fusiond.core.deadlines import Deadlines


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self.made = 0

    def clock(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.made += 1
        heapq.heappush(self._timers, (self.now + seconds, self.made, callback))

    def run_until(self, time: float) -> None:
        while self._timers and self._timers[0][0] <= time:
            self.now, _, callback = heapq.heappop(self._timers)
            callback()
        self.now = time


class Things:
    """What has a deadline; `ended`: when each did."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.due: list[float] = []
        self.ended: list[tuple[float, float]] = []
        self.deadlines = Deadlines(self.clock, self)

    def add(self, seconds: float) -> None:
        self.due.append(self.clock.now + seconds)
        self.deadlines.add(self.due[-1])

    def end_overdue(self, now: float) -> float:
        self.ended += [(due, self.clock.now) for due in self.due if due <= now]
        self.due = [due for due in self.due if due > now]
        return min(self.due, default=math.inf)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 9)), max_size=30))
def test_each_ends_when_its_time_is_up(events: list[tuple[float, float]]) -> None:
    things = Things()
    for later, seconds in events:
        things.clock.run_until(things.clock.now + later)
        things.add(seconds)
    things.clock.run_until(100.0)
    assert len(things.ended) == len(events)
    assert all(abs(due - at) < 2e-3 for due, at in things.ended)


def test_a_thousand_that_end_early_have_one_timer() -> None:
    things = Things()
    for _ in range(1000):
        things.clock.now += 0.001
        things.add(1800.0)
        things.due.clear()
    assert things.clock.made == 1
