"""Numba decides when it is imported whether it simulates a GPU, and other tests have imported it by then. So
`test_simulator` runs the tests that need the simulator in a process of their own, where this environment variable is
set; on their own they run as `NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/kernels/cuda`.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


class Barrier:
    """Where the threads of a block wait for each other, until all of those that still run have come."""

    def __init__(self, running: int) -> None:
        self.error: Exception | None = None  # of the first thread that failed
        self._changed = threading.Condition()
        self._running, self._waiting, self._turn = running, 0, 0

    def wait(self) -> None:
        with self._changed:
            turn = self._turn
            self._waiting += 1
            self._release()
            self._changed.wait_for(lambda: self._turn != turn or self.error)
            if self.error:
                raise RuntimeError("another thread of this block has failed")

    def leave(self, error: Exception | None) -> None:
        with self._changed:
            self._running -= 1
            self.error = self.error or error
            self._release()

    def _release(self) -> None:
        if self._waiting == self._running or self.error:
            self._waiting = 0
            self._turn += 1
            self._changed.notify_all()


def run_block(manager: Any, point: Any, *args: Any) -> None:
    """As `BlockManager.run`, which polls its threads without a pause while they compute."""
    places = list(np.ndindex(*manager._block_dim))
    barrier = Barrier(len(places))

    def work() -> None:
        error = None
        try:
            manager._f(*args)
        except Exception as raised:
            error = raised
        barrier.leave(error)

    simulator = importlib.import_module("numba.cuda.simulator.kernel")
    threads = [simulator.BlockThread(work, manager, point, place, manager._debug) for place in places]
    for thread in threads:
        thread.syncthreads = barrier.wait
        thread.start()
    for thread in threads:
        thread.join()
    if barrier.error:
        raise barrier.error


@pytest.fixture(scope="session", autouse=SIMULATED)
def _sound_simulator() -> Iterator[None]:
    """Makes the simulator give all threads of a block the same shared array, which it does not when two of them ask for
    it at once; and lets its threads wait for each other without a thread that looks after them all the time.

    The simulator walks through a kernel's globals while other threads run the kernel. The first warning of numpy in a
    module adds a name to its globals, which ends such a walk with an error: so the name is there from the start.
    """
    vars(importlib.import_module("fusion_rt.kernels.cuda._kernels")).setdefault("__warningregistry__", {})
    lock = threading.Lock()

    def array(self: Any, shape: Any, dtype: Any, **_: Any) -> Any:
        caller = sys._getframe(1)
        place = caller.f_code.co_filename, caller.f_lineno
        with lock:
            if place not in self._allocations:
                self._allocations[place] = np.empty(shape, dtype)
            return self._allocations[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("numba.cuda.simulator.kernelapi").FakeCUDAShared, "array", array)
        patch.setattr(importlib.import_module("numba.cuda.simulator.kernel").BlockManager, "run", run_block)
        yield
