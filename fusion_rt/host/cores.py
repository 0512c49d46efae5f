"""Processors that this process may use, and the threads that a daemon has with them.

Each rule is a function of numbers. Measurements: a machine of 16 cores (Xeon), all-reduce beside gloo; × is gloo's time
over the daemon's, so more is better.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_PER_THREAD = 4 * 1024 * 1024  # bytes that a kernel thread reads, at least, where there are more than two
_ALWAYS = 2  # kernel threads that any bucket may have


def kernel_threads(cores: int) -> int:
    """Returns the kernel threads of a daemon: half of the processors, since workers have the others, from 2 to 8.

    102.4 MB between two hosts took 90 to 103 ms with 2 threads, and 59 with 6 (gloo 51). On one host with 8 ranks it
    was 2.1 × with 2 threads, and 5.4 × with 8. More were not measured.
    """
    return min(8, max(_ALWAYS, cores // 2))


def io_threads(cores: int) -> int:
    """Returns ZeroMQ's I/O threads of a daemon: one for each four processors, from 1 to 4.

    102.4 MB between two hosts took 59 ms with one, and 52 with 4 (6 kernel threads). On two cores a second one made
    1 MiB 1.26 to 1.63 times as fast, 25.6 MB 0.99, and 4 B to 256 KiB 0.58 to 1.73 times: no difference to be seen.
    """
    return min(4, max(1, cores // 4))


def threads_for(nbytes: int, threads: int) -> int:
    """Returns the number of threads, of so many, that reduce a bucket of which all of them read `nbytes` together.

    Each hand-over to a thread takes the event loop some tens of microseconds. With 8 threads for everything, 8 ranks
    with 1 MiB each (8 MiB to read) were 1.5 ×, with 2 threads 5.4 ×; 102.4 MB each were 5.4 × and 2.1 ×. So up to 12
    MiB have two threads, however many there are.
    """
    return min(threads, max(_ALWAYS, nbytes // _PER_THREAD))


def usable(affinity: int, quota: float) -> int:
    """Returns the number of processors of a process that may run on `affinity` and gets the time of `quota` of them."""
    return max(1, math.ceil(min(affinity, quota)))


def cores() -> int:
    """Returns the number of processors that this process may use, by its affinity and its control group's quota."""
    return usable(len(os.sched_getaffinity(0)), quota(Path("/")))


def quota(root: Path) -> float:
    """Returns the processors whose time this process's control groups (version 1 or 2) may use; infinity without a
    limit, or where it cannot be read.

    Args:
        root: the file system's, which tests replace.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    least = math.inf
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / (controllers and "cpu")
        group = mounted / path.strip("/")
        for folder in (group, *group.parents):
            least = min(least, _quota_v1(folder) if controllers else _quota_v2(folder))
            if folder == mounted:
                break
    return least


def _quota_v2(folder: Path) -> float:
    try:
        most, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        return math.inf if most == "max" else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def _quota_v1(folder: Path) -> float:
    try:
        most, period = (
            int((folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8")) for name in ("quota", "period")
        )
        return math.inf if most <= 0 else most / period
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
