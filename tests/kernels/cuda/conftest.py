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


@pytest.fixture(scope="session", autouse=SIMULATED)
def _sound_simulator() -> Iterator[None]:
    """Makes the simulator give all threads of a block the same shared array, which it does not when two of them ask for
    it at once; and lets its threads, which wait for each other all the time, take turns more often.

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

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with pytest.MonkeyPatch.context() as patch:
        simulator = importlib.import_module("numba.cuda.simulator.kernelapi")
        patch.setattr(simulator.FakeCUDAShared, "array", array)
        yield
    sys.setswitchinterval(interval)
