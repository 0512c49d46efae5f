"""Memory that a process holds, for its ring and for status reports."""

from __future__ import annotations

import contextlib
import os

EVERY_NS = 500_000_000
"""Time between two records of it, at least."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_last = 0


def nbytes() -> int:
    """Returns the bytes of this process that are in the machine's memory, shared memory included; as known last while
    the kernel does not tell, and 0 before that."""
    global _last
    # There may be no /proc in a sandbox, and no descriptor left while strangers connect: no reason to end a job.
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:
        _last = int(file.read().split()[1]) * _PAGE
    return _last
