"""The thread pool that runs kernels: they release the GIL, hold no state, and finish in the event loop's thread."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

from fusion_rt.core.dtypes import DTYPES, DType
from fusiond.host.loop import EventLoop

Job = Callable[[], None]
Then = Callable[[BaseException | None], None]
LANES_ABOVE = 2
"""Kernel threads up to which the event loop works on what arrives itself: its host has no processors for more."""


class KernelPool:
    """A pool of threads that take jobs in order. It grows to the most jobs that came at once, up to one for each core.

    Args:
        loop: runs completions.
        threads: number of threads at first.
        name: of the threads.
    """

    def __init__(self, loop: EventLoop, threads: int, name: str = "kernel") -> None:
        self.threads = threads
        self._name = name
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[BaseException | None], None]] | None] = queue.SimpleQueue()
        self._submitted = 0
        self._workers: list[threading.Thread] = []
        self._grow(threads)

    def run(self, jobs: Sequence[Job], then: Then) -> None:
        """Runs jobs concurrently; when all have ended, `then` gets the first exception, or None, in the loop."""
        remaining = len(jobs)
        first_error: BaseException | None = None

        def finished(error: BaseException | None) -> None:
            def in_loop() -> None:
                nonlocal remaining, first_error
                remaining -= 1
                first_error = first_error or error
                if remaining == 0:
                    then(first_error)

            self._loop.call_from_thread(in_loop)

        if len(jobs) > self.threads:  # a plan was tuned to have more
            self._grow(min(len(jobs), os.cpu_count() or 1))
        self._submitted += len(jobs)
        for job in jobs:
            self._jobs.put((job, finished))

    def _grow(self, threads: int) -> None:
        while len(self._workers) < threads:
            name = f"{self._name}-{len(self._workers)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._workers:
                    raise
                break  # the limit of processes is reached: those that there are do the work
            self._workers.append(thread)
        self.threads = len(self._workers)

    def close(self) -> None:
        """Ends the threads once their jobs have ended."""
        for _ in self._workers:
            self._jobs.put(None)
        for worker in self._workers:
            worker.join()

    def statistics(self) -> dict[str, int]:
        """Returns the numbers of `threads`, and of `jobs` submitted so far."""
        return {"threads": self.threads, "jobs": self._submitted}

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, finished = item
            try:
                job()
            except BaseException as error:  # handed to `then`, which fails the operation
                finished(error)
            else:
                finished(None)
            del item, job, finished  # a waiting thread must not keep the last operation's arrays alive


def prepare_kernels(
    pool: KernelPool, compression: str, dtypes: Sequence[str], failed: Callable[[BaseException], None]
) -> None:
    """Loads or compiles kernels before they are needed, outside of the event loop.

    Args:
        pool: loads them.
        compression: spec of the codec whose kernels are needed, too.
        dtypes: names of the element types.
        failed: called with the exception if that fails.
    """
    from fusion_rt import codecs
    from fusion_rt.kernels import cpu

    codec = codecs.parse(compression)

    def prepare() -> None:
        cpu.prepare([DType.named(name) for name in dtypes])
        for name in dtypes:
            codecs.open_bucket(codec, codecs.Layout(DTYPES[name], 1))

    pool.run([prepare], lambda error: None if error is None else failed(error))
