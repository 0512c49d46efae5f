"""Requests to the kernel, the C library, numpy and Python for the daemon's whole process."""

from __future__ import annotations

import ctypes
import gc
import resource

import numpy as np

_M_TRIM_THRESHOLD = -1  # parameters of mallopt(3), as in glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_KEEP = 128 * 1024 * 1024  # bytes of freed memory kept for the next chunks
_LARGEST_ON_HEAP = 4 * 1024 * 1024  # bytes: more than a chunk


def allow_many_descriptors() -> None:
    """Raises the limit of open descriptors to the system's maximum: each segment of each worker's arena takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def ignore_float_errors() -> None:
    """Switches numpy's warnings of infinities and NaN off in this thread: a diverging model is reported by workers."""
    np.seterr(all="ignore")


def keep_freed_memory() -> None:
    """Has malloc keep freed memory instead of returning it to the kernel.

    ZeroMQ allocates every chunk it receives. Returned at each free, their pages would have to be zeroed and mapped
    again for the next one: with 512 KiB chunks between two daemons an all-reduce of 25.6 MB took 1.5 to 2 times as
    long. Kept memory is bounded by the bytes under way at once, that is by the window. What one thread has freed, all
    may have: with a heap for each thread, every heap kept as much. Larger pieces, which stay, or are `core.scratch`'s,
    are not malloc's to keep. Does nothing where libc has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEEP)


def exempt_from_collections() -> None:
    """Has Python's collector of garbage look at no object any more that there is now.

    Modules and their objects live as long as the daemon. To look at these 55,000 objects took 37 ms of processor
    time, in the midst of the first step after each change of the membership: there the daemon frees the memory of
    workers that are gone.
    """
    gc.freeze()
