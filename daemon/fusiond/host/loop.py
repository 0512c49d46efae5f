"""The event loop: one thread, one epoll, that touches all of the daemon's state.

Rejected: asyncio, whose futures and task switches cost 20 to 50 microseconds an event (measured), about as long as a
whole 4-byte all-reduce between two local workers. Callbacks run to completion; long work goes to the kernel pool and
comes back through `call_from_thread`.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

Callback = Callable[[], None]

_LONG = 0.005  # seconds for a callback, in which a thousand others could run


class Timer:
    """A callback that is due once; `cancel` makes it never run."""

    __slots__ = ("__weakref__", "callback")

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class EventLoop:
    """Runs callbacks for readable and writable descriptors, timers, and other threads' completions.

    Attributes:
        longest: the most time (s) that callbacks of each name have taken, of those that have taken some milliseconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._epoll = select.epoll()
        self._readers: dict[int, Callback] = {}
        self._writers: dict[int, Callback] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._serial = itertools.count()
        self._soon: deque[Callback] = deque()
        self._from_threads: deque[Callback] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()
        self._closed = False
        self._stopping = False
        self._turns = 0
        self.longest: dict[str, float] = {}
        self.add_reader(self._wake, self._clear_wake)

    def add_reader(self, fd: int, callback: Callback) -> None:
        """Calls back whenever `fd` is readable or has hung up."""
        self._readers[fd] = callback
        self._update(fd)

    def add_writer(self, fd: int, callback: Callback) -> None:
        """Calls back whenever `fd` is writable."""
        self._writers[fd] = callback
        self._update(fd)

    def remove_writer(self, fd: int) -> None:
        if self._writers.pop(fd, None) is not None:
            self._update(fd)

    def remove(self, fd: int) -> None:
        """Forgets a descriptor, which is still open."""
        known = self._readers.pop(fd, None), self._writers.pop(fd, None)
        if known != (None, None):
            self._epoll.unregister(fd)

    def call_soon(self, callback: Callback) -> None:
        """Calls back after the events that are being handled."""
        self._soon.append(callback)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.clock() + seconds, next(self._serial), timer))
        return timer

    def call_every(self, seconds: float, callback: Callback) -> None:
        """Calls back every `seconds` until the loop stops."""

        def again() -> None:
            self.call_later(seconds, again)
            callback()

        self.call_later(seconds, again)

    def call_from_thread(self, callback: Callback) -> None:
        """Runs a callback in the loop's thread; the one method that other threads may call. A loop that is closed runs
        it no more."""
        self._from_threads.append(callback)
        with self._waking:  # the callback may run, and end the loop, before this: then the number is another file's
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Makes `run` return after the callbacks that are due now."""
        self._stopping = True

    def run(self) -> None:
        """Runs until `stop`. An exception from a callback ends the loop, and is raised."""
        while not self._stopping:
            self.turn()

    def turn(self) -> None:
        """Waits for events, or the next timer, and handles them."""
        self._turns += 1
        # In the order of descriptors, so standard input first: the starter's orders explain why workers die.
        for fd, events in sorted(self._epoll.poll(self._seconds_to_wait())):
            reader = self._readers.get(fd)
            if reader is not None and events != select.EPOLLOUT:
                self._call(reader)
            if events & select.EPOLLOUT and (writer := self._writers.get(fd)) is not None:
                self._call(writer)
        while self._from_threads:
            self._call(self._from_threads.popleft())
        for _ in range(len(self._soon)):
            self._call(self._soon.popleft())
        now = self.clock()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                self._call(timer.callback)

    def _call(self, callback: Callback) -> None:
        """Calls back, and notes how long that took if it was long: no heartbeat was sent meanwhile."""
        began = self.clock()
        callback()
        if (took := self.clock() - began) > _LONG:
            name = _name(callback)
            self.longest[name] = max(took, self.longest.get(name, 0.0))

    def close(self) -> None:
        self._epoll.close()
        with self._waking:
            self._closed = True
            os.close(self._wake)

    def statistics(self) -> dict[str, int]:
        """Returns the number of `turns` so far, of `descriptors` watched and of `timers` pending."""
        return {
            "turns": self._turns,
            "descriptors": len(self._readers),
            "timers": len(self._timers),
        }

    def _seconds_to_wait(self) -> float:
        if self._soon or self._from_threads or self._stopping:
            return 0
        if not self._timers:
            return -1
        return max(0.0, self._timers[0][0] - self.clock())

    def _clear_wake(self) -> None:
        os.eventfd_read(self._wake)

    def _update(self, fd: int) -> None:
        mask = (select.EPOLLIN if fd in self._readers else 0) | (select.EPOLLOUT if fd in self._writers else 0)
        try:
            self._epoll.modify(fd, mask)
        except FileNotFoundError:
            self._epoll.register(fd, mask)


def _name(callback: Callback) -> str:
    """Returns the name of a callback's function, as it is in the source."""
    function = callback.func if isinstance(callback, partial) else callback
    return str(getattr(function, "__qualname__", type(function).__qualname__))
