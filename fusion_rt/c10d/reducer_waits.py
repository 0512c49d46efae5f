"""Waits of DDP's reducer, recorded: it waits in C++, at the end of a backward pass, where nobody else could note it.

Autograd calls what was queued when it has run the whole graph. The reducer queues its end after the last of its
operations was begun. So what is queued with the first of them is called before that, and what that queues, after it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from fusion_rt.c10d.submission import Submission
from fusion_rt.client.channel import Channel
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import NULL


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
        self._is_over = False  # the graph, and not yet what the reducer does then
        self._open: Submission | None = None  # is waited for

    def expect(self, parts: Sequence[Submission]) -> None:
        """Notes operations for whose future somebody has asked. Nothing happens outside of a backward pass."""
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
