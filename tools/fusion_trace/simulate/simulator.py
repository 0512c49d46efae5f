"""Simulated time, events, and threads. Events of the same time happen in the order in which they were asked for, so
that a simulation with the same arguments always comes to the same result."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

Event = Callable[..., None]


class Simulator:
    """The clock, and the queue of events.

    Attributes:
        now: seconds since the beginning.
        running: the thread that does something at this moment.
        events: how many there have been.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.running: Thread | None = None
        self.events = 0
        self._queue: list[tuple[float, int, Event, tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, event: Event, *arguments: Any) -> None:
        """Schedules `event` for a time, which is not before now."""
        if not time >= self.now:
            raise ValueError(f"an event at {time} s cannot be asked for at {self.now} s")
        self._asked += 1
        heapq.heappush(self._queue, (time, self._asked, event, arguments))

    def after(self, seconds: float, event: Event, *arguments: Any) -> None:
        self.at(self.now + seconds, event, *arguments)

    def run(self) -> None:
        """Runs until nothing is left to happen."""
        queue = self._queue
        while queue:
            self.now, _, event, arguments = heapq.heappop(queue)
            self.events += 1
            event(*arguments)

    def spend(self, seconds: float) -> None:
        """Makes the thread that is at work take so long for what it does."""
        if self.running is not None:
            self.running.cursor += seconds

    @property
    def time(self) -> float:
        """The present, as whoever is at work sees it, who has spent time since the event began."""
        return self.now if self.running is None else self.running.cursor


class Processor:
    """Cores of a machine, for which threads wait in the order in which they came."""

    def __init__(self, simulator: Simulator, cores: int) -> None:
        self._simulator = simulator
        self._free = cores
        self._waiting: deque[Event] = deque()

    def take(self, then: Event) -> None:
        """Calls `then` with a core, which has to be given back."""
        if self._free:
            self._free -= 1
            then()
        else:
            self._waiting.append(then)

    def give(self) -> None:
        if self._waiting:
            self._simulator.after(0.0, self._waiting.popleft())
        else:
            self._free += 1


class Thread:
    """A thread that does one thing after the other, in the order in which they were posted.

    Args:
        processor: on which it runs; none: it always has a core.

    Attributes:
        cursor: how far it is (s), while it does something.
        busy: seconds for which it has worked.
    """

    def __init__(self, simulator: Simulator, processor: Processor | None = None) -> None:
        self.cursor = 0.0
        self.busy = 0.0
        self._simulator = simulator
        self._processor = processor
        self._waiting: deque[tuple[float, Event, tuple[Any, ...]]] = deque()
        self._active = False

    def post(self, seconds: float, work: Event, *arguments: Any) -> None:
        """Has it spend `seconds`, and then do `work`, which may spend more (`Simulator.spend`)."""
        self._waiting.append((seconds, work, arguments))
        if not self._active:
            self._active = True
            self._ask()

    def _ask(self) -> None:
        if self._processor is None:
            self._turn()
        else:
            self._processor.take(self._turn)

    def _turn(self) -> None:
        simulator = self._simulator
        seconds, work, arguments = self._waiting.popleft()
        began = simulator.now
        self.cursor = began + seconds
        before, simulator.running = simulator.running, self
        try:
            work(*arguments)
        finally:
            simulator.running = before
        self.busy += self.cursor - began
        simulator.at(self.cursor, self._turned)

    def _turned(self) -> None:
        if self._processor is not None:
            self._processor.give()
        if self._waiting:
            self._ask()
        else:
            self._active = False
