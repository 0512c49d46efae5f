"""Futures completed by threads: a function that is called back may wait for another future, whatever has ended."""

from __future__ import annotations

import threading
from typing import Any

from fusion_rt.c10d.completion import Completer


class _Part:
    watcher: Any = None
    done = False

    def end(self) -> None:
        self.done = True
        self.watcher()


class _Channel:
    """One that a thread reads: it comes back from it when something has been done, and says that it is reading."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def read_until(self, awaited: Completer) -> None:
        with self.changed:
            self.changed.wait_for(lambda: awaited.done, 60)


class _Work:
    def __init__(self, calls_back: bool, then: Any = None) -> None:
        self.parts = [_Part()]
        self.calls_back = calls_back
        self.settled = threading.Event()
        self._then = then

    def settle(self) -> None:
        if self._then is not None:
            assert self._then()
        self.settled.set()


def test_what_ended_together_is_completed_while_a_function_that_is_called_back_waits_for_it() -> None:
    channel = _Channel()
    completer = Completer(channel)  # type: ignore[arg-type]
    second = _Work(False)
    first = _Work(True, lambda: second.settled.wait(30))
    completer.complete(first)  # type: ignore[arg-type]
    completer.complete(second)  # type: ignore[arg-type]
    with channel.changed:  # both, before any thread looks
        for work in (first, second):
            work.parts[0].end()
        channel.changed.notify_all()
    assert first.settled.wait(60)
    completer.close()


def test_a_work_that_has_ended_needs_no_thread() -> None:
    completer = Completer(_Channel())  # type: ignore[arg-type]
    work = _Work(False)
    work.parts[0].done = True
    before = threading.active_count()
    completer.complete(work)  # type: ignore[arg-type]
    assert work.settled.is_set()
    assert threading.active_count() == before
    completer.close()
