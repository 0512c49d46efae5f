"""Scratch memory: arrays as large as a bucket, which are needed for a moment, in pages that are used again and again.

malloc has a heap for each thread, and the freed pages of one are of no use to the others; nor are those between arrays
that stay. So a daemon grew for many steps. Pages that are given back to the kernel each time have to be zeroed and
mapped again: that took a daemon 20 to 45 % more processor time in a step. Here, memory that is free is that of all
threads, and there is an end to it.

An array is given back when nothing refers to it or to a view of it any more, `memoryview`s included. So it can be sent,
kept or handed on like any other one.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

KEPT_BYTES = 128 * 1024 * 1024
"""Free memory that is kept for the next arrays, at most. It counts as the scratch memory of `choice.memory_needs`."""
LEAST_BYTES = 1024 * 1024
"""Smaller arrays are malloc's, which has them sooner."""


class Scratch:
    """Scratch memory of one process, for any of its threads.

    Args:
        kept: bytes of free memory that are kept at most.
        least: bytes of the smallest array that is made of it.
    """

    def __init__(self, kept: int = KEPT_BYTES, least: int = LEAST_BYTES) -> None:
        self._kept, self._least = kept, least
        self._free: list[Array] = []  # the one that was given back last is the last
        self._returned: deque[Array] = deque()  # by any thread, in the midst of anything; not among the free ones yet
        self._changing = threading.Lock()

    def empty(self, count: int, dtype: npt.DTypeLike) -> Array:
        """Returns an array of so many elements, with undefined contents."""
        kind = np.dtype(dtype)
        nbytes = count * kind.itemsize
        if nbytes < self._least:
            return np.empty(count, kind)
        block = self._taken(nbytes)
        # The base of all views of an array is the array that has a `memoryview` as its own base.
        owner: Array = np.frombuffer(block.data, np.uint8, nbytes)
        weakref.finalize(owner, self._give_back, block).atexit = False
        return owner.view(kind)

    def statistics(self) -> dict[str, int]:
        """Returns the bytes that are `free`, and kept."""
        self._settle()
        return {"free": sum(map(len, self._free))}

    def _taken(self, nbytes: int) -> Array:
        """Returns a block of at least so many bytes."""
        self._settle()
        with self._changing:
            sizes = [(len(block), number) for number, block in enumerate(self._free)]
            fitting = [(size, number) for size, number in sizes if nbytes <= size <= 2 * nbytes]
            if fitting:
                return self._free.pop(min(fitting)[1])
        step = 1 << max(nbytes.bit_length() - 4, 0)  # payloads of a bucket differ a little from step to step
        return np.empty(-(-nbytes // step) * step, np.uint8)

    def _give_back(self, block: Array) -> None:
        """Takes a block back. May be called while this very thread is in `_taken`."""
        self._returned.append(block)
        self._settle()

    def _settle(self) -> None:
        """Puts what was returned among the free blocks, and drops the oldest ones beyond what is kept. If another
        thread is at it, that one does so, or the next."""
        while self._returned and self._changing.acquire(blocking=False):
            try:
                while self._returned:
                    self._free.append(self._returned.popleft())
                excess = sum(map(len, self._free)) - self._kept
                while excess > 0:
                    excess -= len(self._free.pop(0))
            finally:
                self._changing.release()


SCRATCH = Scratch()
"""The scratch memory of this process."""


def empty(count: int, dtype: npt.DTypeLike) -> Array:
    """Returns an array of so many elements, with undefined contents, in scratch memory."""
    return SCRATCH.empty(count, dtype)


def zeros(count: int, dtype: npt.DTypeLike) -> Array:
    """Returns an array of so many zeros, in scratch memory."""
    made = SCRATCH.empty(count, dtype)
    made[:] = 0
    return made


def copied(values: Array) -> Array:
    """Returns a copy of a one-dimensional array, in scratch memory. While numpy copies, other threads go on."""
    made = SCRATCH.empty(len(values), values.dtype)
    np.copyto(made, values)
    return made
