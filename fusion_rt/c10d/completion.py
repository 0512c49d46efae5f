"""Futures of works, completed by a thread that starts with the first request for a future."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fusion_rt.c10d.submission import Submission
from fusion_rt.client.channel import Channel
from fusion_rt.torch.core.device import as_here
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import NULL

_MOST_KEPT = 64  # works that have ended: as many as scripts start between a forward pass and its backward pass


class ReducerWaits:
    """Records when the reducer waits for operations of a backward pass, one after the other, as it does.

    Args:
        channel: to the daemon; it has the instrument that records.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._graph = -1  # the backward pass
        self._expected: deque[Submission] = deque()
        self._is_over = False  # the graph, and not yet the reducer's work after it
        self._open: Submission | None = None  # is waited for

    def expect(self, parts: Sequence[Submission]) -> None:
        """Notes operations whose future was asked for. Nothing happens outside of a backward pass."""
        graph = torch._C._current_graph_task_id()
        if graph == -1 or self._channel.trace is NULL:
            return
        with self._lock:
            new, self._graph = graph != self._graph, graph
            if new:  # the one before may have failed
                self._expected.clear()
            self._expected.extend(parts)
        if new:
            torch.autograd.Variable._execution_engine.queue_callback(self._begin)

    def ended(self) -> None:
        """Notes that an operation has ended."""
        if self._open is not None:
            with self._lock:
                self._go_on()

    def _begin(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        with self._lock:
            self._is_over = True
            self._go_on()

    def _end(self) -> None:
        with self._lock:
            self._is_over = False
            self._expected.clear()
            self._close()
            self._graph = -1

    def _go_on(self) -> None:
        """Ends the wait that is over, and begins the next one."""
        if self._open is not None and self._open.done:
            self._close()
        if self._open is not None or not self._is_over:
            return
        while self._expected and self._expected[0].done:
            self._expected.popleft()
        if self._expected:
            self._open = self._expected.popleft()
            name, clock, plan = self._open.about
            self._channel.trace.record(Kind.WAIT_BEGIN, name, 0, clock, plan)

    def _close(self) -> None:
        part, self._open = self._open, None
        if part is not None:
            name, clock, plan = part.about
            self._channel.trace.record(Kind.WAIT_END, name, 0, clock, plan)


class Completable(Protocol):
    """A work whose future is to be completed."""

    @property
    def parts(self) -> Sequence[Submission]:
        """The submissions that it consists of."""

    @property
    def calls_back(self) -> bool:
        """True if the completion of its future runs functions of a script, which may wait for other works."""

    def settle(self) -> None:
        """Completes its future, once all parts have ended."""


class Completer:
    """Completes the futures of works when these have ended, in the order in which they do.

    Its thread reads the channel while a future is wanted, and otherwise sleeps. Functions that a script has hung on a
    future run on it too, and may wait for further futures: so another thread reads meanwhile.

    Args:
        channel: to the daemon.

    Attributes:
        channel: to the daemon.
        reducer_waits: records waits for the futures in C++.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.reducer_waits = ReducerWaits(channel)
        self._changed = threading.Condition(threading.Lock())
        self._wanted: set[Completable] = set()  # have not ended
        self._ended: deque[Completable] = deque()
        self._free = 0  # threads that are not in functions of a script
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._kept: dict[Completable, None] = {}

    def keep(self, work: Completable) -> None:
        """Keeps a work alive until it is released, or it and many after it have ended."""
        self._kept[work] = None
        if len(self._kept) > _MOST_KEPT:
            ended = [each for each in list(self._kept) if all(part.done for part in each.parts)]
            for each in ended[:-_MOST_KEPT]:
                self.release(each)

    def release(self, work: Completable) -> None:
        """Keeps a work no longer alive."""
        self._kept.pop(work, None)

    def complete(self, work: Completable) -> None:
        """Sees to it that the work's future is completed when all its parts have ended; at once if they have."""
        if all(part.done for part in work.parts):
            work.settle()
            return
        with self._changed:
            self._wanted.add(work)
            if self._free:
                self._changed.notify()
            else:
                self._start()
        for part in work.parts:
            part.watcher = lambda: self._part_ended(work)
        self._part_ended(work)  # which the watcher has not been told of, if it was the last and has ended meanwhile

    def close(self) -> None:
        """Ends the threads, when the channel has failed, and waits for them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join()

    @property
    def done(self) -> bool:
        """True if there is something else to do than to read the channel."""
        return bool(self._ended) or not self._wanted

    def _part_ended(self, work: Completable) -> None:
        self.reducer_waits.ended()
        if all(part.done for part in work.parts):
            with self._changed:
                if work in self._wanted:
                    self._wanted.remove(work)
                    self._ended.append(work)

    def _start(self) -> None:
        """Starts a thread; to be called with the lock held."""
        thread = threading.Thread(target=self._serve, args=(as_here(),), name="fusion-futures", daemon=True)
        self._threads.add(thread)
        self._free += 1
        thread.start()

    def _serve(self, begin: Callable[[], None]) -> None:
        begin()
        while True:
            self.channel.read_until(self)
            with self._changed:
                while not self._ended and not self._wanted:
                    if self._closed or self._free > 1:
                        self._free -= 1
                        self._threads.discard(threading.current_thread())
                        return
                    self._changed.wait()
                if not self._ended:
                    continue
                work = self._ended.popleft()
                away = work.calls_back
                if away:
                    self._free -= 1
                    if not self._free and (self._ended or self._wanted):
                        self._start()
            work.settle()
            if away:
                with self._changed:
                    self._free += 1
