"""A process that hangs inside a call that holds the GIL, as a C extension does that waits for a lock."""

from __future__ import annotations

import ctypes
import time


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold_gil(seconds: float) -> None:
    """Holds the GIL for `seconds`, with a mutex rather than a sleep, since a signal would end the sleep."""
    libc = ctypes.PyDLL(None)  # keeps the GIL during calls
    mutex = ctypes.create_string_buffer(64)  # all zero: one that does not count who locks it
    until = time.time() + seconds
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(_TimeSpec(int(until), int(until % 1 * 1e9))))
