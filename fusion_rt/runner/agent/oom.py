"""Finds out whether the kernel has killed a process for lack of memory, by the kernel's own counters.

Each control group counts the processes that were killed in it (`memory.events`, or `memory.oom_control` of the first
version), and `/proc/vmstat` those of the whole machine. They are read when a job begins and when one of its processes
has died of SIGKILL; the kernel counts before it kills.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

UNKNOWN = "perhaps by the kernel, which was out of memory"
_COUNTER = "oom_kill"


class OomKills:
    """The counters at one moment.

    Args:
        proc, groups: where the kernel shows processes and control groups.
    """

    def __init__(self, proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> None:
        self._machine = os.path.join(proc, "vmstat")
        self._group = next((path for path in _files(proc, groups) if _read(path) is not None), "")
        self._before = _read(self._machine), _read(self._group)

    def explain(self, status: int) -> str:
        """Returns the counters' verdict on a process that has ended with this exit status, or minus this signal.

        Returns: a part of a sentence; empty when the process was not killed, or not for lack of memory.
        """
        if status != -signal.SIGKILL:
            return ""
        machine, group = (_difference(path, count) for path, count in zip(self._files, self._before, strict=True))
        if group:
            return f"by the kernel: the memory limit of its control group was met (oom_kill in {self._group})"
        if machine:
            return f"by the kernel, it seems: the host was out of memory (oom_kill in {self._machine})"
        return UNKNOWN if machine is None and group is None else ""

    @property
    def _files(self) -> tuple[str, str]:
        return self._machine, self._group


def _files(proc: str, groups: str) -> Iterator[str]:
    """The files in which this process's control group may count."""
    try:
        with open(os.path.join(proc, "self/cgroup"), encoding="ascii", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for fields in lines:
        if len(fields) == 3:
            _, controllers, path = fields
            if not controllers:
                yield os.path.join(groups, path.lstrip("/"), "memory.events")
                yield os.path.join(groups, "unified", path.lstrip("/"), "memory.events")
            elif "memory" in controllers.split(","):
                yield os.path.join(groups, "memory", path.lstrip("/"), "memory.oom_control")


def _read(path: str) -> int | None:
    """The counter in a file of names and numbers; None when there is none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, number = line.partition(" ")
                if name == _COUNTER and number.strip().isdecimal():
                    return int(number)
    except OSError:
        return None  # this kernel, or whoever made this container, does not show it
    return None


def _difference(path: str, before: int | None) -> int | None:
    now = _read(path)
    return None if now is None or before is None else now - before
