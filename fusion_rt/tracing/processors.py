"""Processors of the machine: how many a process may use, and for how long it has waited for one; for its ring."""

from __future__ import annotations

import os
import struct
import threading
import uuid

MACHINE = struct.Struct("<16sI")
"""The number of the machine (its running kernel's own), and thousandths of processors that the process may use."""

MACHINE_AT = 2048
"""Where it is in the header of a ring; zeros: not known."""

_CGROUPS = "/sys/fs/cgroup"


def machine() -> bytes:
    """Returns `MACHINE` of this process. Hosts that are containers or namespaces of one machine have the same."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return MACHINE.pack(uuid.UUID(file.read().strip()).bytes, round(allowed() * 1000))
    except FileNotFoundError:  # a sandbox without /proc: the record is worth more than its place
        return bytes(MACHINE.size)


def allowed() -> float:
    """Returns how many processors this process may use: those of its mask, or fewer by the limit of a cgroup."""
    return min([float(len(os.sched_getaffinity(0))), *_limits()])


def _limits() -> list[float]:
    """Returns the limits of this process's cgroups (version 2), from its own up to the outermost one that is seen."""
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        own = next((line.strip().removeprefix("0::") for line in file if line.startswith("0::")), "/")
    found = []
    while True:
        try:
            with open(f"{_CGROUPS}{own}/cpu.max", encoding="ascii") as file:
                quota, period = file.read().split()
        except FileNotFoundError:  # the outermost one of a machine has none; a container may not see others
            quota = "max"
        if quota != "max":
            found.append(int(quota) / int(period))
        if own in ("/", ""):
            return found
        own = os.path.dirname(own)


class _Waits:
    """The kernel's count of a thread's waits, which stays open: to open it takes 20 times as long as to read it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115  closed with the thread

    def read(self) -> bytes:
        return os.pread(self._file.fileno(), 100, 0)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


_here = threading.local()


def waited() -> int:
    """Returns for how long this thread has been ready to run and waited for a processor (us, modulo 2**32); 0 where the
    kernel does not count it."""
    try:
        if getattr(_here, "waits", None) is None or _here.waits.pid != os.getpid():  # a forked child's is its parent's
            _here.waits = _Waits()
        return int(_here.waits.read().split()[1]) // 1000 % (1 << 32)
    except FileNotFoundError:
        return 0
