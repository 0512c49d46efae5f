"""Threads that share the work of one call, which begins and ends in the thread of the caller.

The caller works too, and takes whatever the helpers have not begun. So a call ends however busy the helpers are, even
when it was made by one of them, and needs a thread of its own only where one is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]


class Team:
    """The calling thread and `threads` - 1 helpers, which are started when they are first needed.

    Any number of threads may use it at the same time.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = max(1, threads)
        self._pool = ThreadPoolExecutor(self.threads - 1, "team") if self.threads > 1 else None

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs all jobs and returns when they have ended. Raises the first exception; jobs that were not begun are
        left."""
        if self._pool is None or len(jobs) == 1:
            for job in jobs:
                job()
            return
        waiting = deque(jobs)
        work = _drain(waiting)
        helpers = [self._pool.submit(work) for _ in range(min(len(jobs), self.threads) - 1)]
        try:
            work()
        finally:
            waiting.clear()
            running = [helper for helper in helpers if not helper.cancel()]
            errors = [error for helper in running if (error := helper.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Ends the helpers once they have nothing to do."""
        if self._pool is not None:
            self._pool.shutdown()


def _drain(waiting: deque[Job]) -> Job:
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                job = waiting.popleft()
            job()

    return work


ALONE = Team()
"""The calling thread and nobody else."""
