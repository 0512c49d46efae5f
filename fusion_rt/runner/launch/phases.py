"""The phases of a job's start, and their times: `fusionrun --verbose` reports them up to the first collective.

A phase is reached when every node has reached it. Agents tell of their own phases, daemons of those that only they see
(`bootstrap.Phase`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

LAUNCHER = "the launcher is up"
AGENTS = "agents are up"
DAEMONS = "daemons listen"
WORKERS = "workers are started"
OF_DAEMON = {
    "joined": "workers have joined",
    "connected": "daemons are connected",
    "started": "links are measured, and the job starts",
    "first_done": "first collective is done",
}
_LAST = OF_DAEMON["first_done"]


class Phases:
    """The phases of one job.

    Args:
        nodes: how many nodes it has.
        gone: seconds that have passed since the person pressed Enter.
        clock: seconds from any moment on.
    """

    def __init__(self, nodes: int, gone: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes = nodes
        self._clock = clock
        self._begun = clock() - gone
        self._waiting: dict[str, set[str]] = {}  # by phase: the nodes that have reached it
        self._times: dict[str, float] = {}  # by phase, in the order in which they were reached; seconds

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._begun

    def reach(self, phase: str, host: str = "") -> list[str]:
        """Notes that one host has reached a phase, or (none named) the whole job; returns lines to report."""
        if phase in self._times:
            return []
        hosts = self._waiting.setdefault(phase, set())
        hosts.add(host)
        if host and len(hosts) < self._nodes:
            return []
        self._times[phase] = self.seconds
        lines = [f"{self._times[phase]:.2f} s: {phase}"]
        return [*lines, self._summary()] if phase == _LAST else lines

    def _summary(self) -> str:
        """The time that each phase took, in one line."""
        parts, before = [], 0.0
        for phase, reached in self._times.items():
            parts.append(f"{reached - before:.2f} until {phase}")
            before = reached
        return f"{before:.2f} s to the first collective = {' + '.join(parts)}"


def process_age() -> float:
    """Seconds since this process was started: a person waits for the start of Python and its imports, too."""
    with open("/proc/self/stat", "rb") as file:
        # The command's name stands in parentheses; the start, in clock ticks since boot, is the 22nd field of all.
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
