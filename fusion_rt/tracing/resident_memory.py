"""Memory that a process holds, for its ring and for those who ask how it is."""

from __future__ import annotations

import os

EVERY_NS = 500_000_000
"""Time between two records of it, at least."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


def nbytes() -> int:
    """Returns the bytes of this process that are in the machine's memory, shared memory included; 0 where the kernel
    does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except FileNotFoundError:  # a sandbox without /proc
        return 0
