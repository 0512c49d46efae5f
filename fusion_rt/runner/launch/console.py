"""All that a person sees of a job: output of its workers and daemons, the launcher's own lines, phases of the start.

A phase is reached when every node has reached it. Agents tell of their own phases, daemons of those that only they see
(`bootstrap.Phase`); `fusionrun --verbose` reports them up to the first collective.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from fusion_rt.core.wording import counted
from fusion_rt.host.process_stat import process_start
from fusion_rt.runner.decisions.places import Place, Places
from fusion_rt.runner.launch.launch_plan import LaunchPlan
from fusion_rt.runner.launch.printer import Printer
from fusion_rt.runner.launch.worker_output import WorkerOutput
from fusion_rt.runner.protocol.agent_messages import Stream

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
_HOLD_S = 1.0  # seconds for which a traceback may wait for its end
_FLUSH_S = 5.0  # seconds the reader of our own output has to take the rest of it
_FLUSH_INTERRUPTED_S = 0.5


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


class Console:
    """The output of one job. To be made inside the event loop.

    Args:
        plan: the job.
        gone: seconds since the person asked for it.

    Raises:
        OSError: the files for the output cannot be made.
    """

    def __init__(self, plan: LaunchPlan, gone: float) -> None:
        self._is_verbose = plan.verbose
        self._is_elastic = plan.elastic is not None
        self.printer = Printer()
        self._workers = WorkerOutput(self.printer, plan.places.size, plan.output_directory, plan.timestamps)
        self._phases = Phases(len(plan.places.hosts), gone)
        self._has_output = False
        self._release: asyncio.TimerHandle | None = None  # for a traceback that is held

    def say(self, line: str) -> None:
        """Tells the person."""
        self.printer.write(2, os.fsencode(line) + b"\n")

    def warn(self, text: str) -> None:
        self.say(f"fusionrun: warning: {text}")

    def note(self, text: str) -> None:
        """Tells the job's course where that is asked for."""
        if self._is_verbose:
            self.say(f"fusionrun: {self._phases.seconds:.2f} s: {text}")

    def reach(self, phase: str, host: str = "") -> None:
        """Reports a phase of the start; an elastic job has as many starts as epochs."""
        for line in self._phases.reach(phase, host) if not (self._is_elastic and host) else ():
            if self._is_verbose:
                self.say(f"fusionrun: {line}")

    def reach_in_epoch(self, host: str, epoch: int, phase: str) -> None:
        """Reports a phase that the daemon of a host has reached in an epoch."""
        if self._is_elastic:
            self.note(f"epoch {epoch}: {phase} on host {host}")
        else:
            self.reach(OF_DAEMON[phase], host)

    def begin_epoch(self, number: int, places: Places) -> None:
        """An epoch begins; ranks may be other workers than before."""
        if self._is_elastic:
            self._workers.change(places.size)
            workers, hosts = counted(places.size, "worker"), counted(len(places.names), "host")
            self.note(f"epoch {number} begins with {workers} on {hosts}")

    def expect(self, size: int) -> None:
        """A worker begins that is to have one of so many ranks."""
        self._workers.make_files(size)

    def print(self, place: Place, rank: int, stream: Stream, data: bytes) -> None:
        """Passes on a piece of a worker's output."""
        if not self._has_output:
            self._has_output = True
            self.note(f"first output, of rank {rank}")
        self._workers.feed(place, rank, stream, data)
        if self._workers.holds and self._release is None:
            self._release = asyncio.get_running_loop().call_later(_HOLD_S, self._release_output)

    def tail(self, place: Place) -> str:
        """The end of a worker's stderr."""
        return self._workers.tail(place)

    def flush(self) -> None:
        """Writes last lines that have no end, and says which output was lost."""
        self._workers.flush()
        for fd, error in self.printer.failures.items():
            name = {1: "standard output", 2: "standard error"}.get(fd, "a file of --output-filename")
            self.say(f"fusionrun: some output was lost: {name}: {error.strerror}")

    async def close(self, is_interrupted: bool) -> None:
        """Ends when all is written, or the reader has had its time."""
        if await self.printer.close(_FLUSH_INTERRUPTED_S if is_interrupted else _FLUSH_S):
            self._workers.close()

    @property
    def is_unread(self) -> bool:
        """Tells whether the reader of the job's standard output is gone."""
        return isinstance(self.printer.failures.get(1), BrokenPipeError)

    def _release_output(self) -> None:
        self._release = None
        self._workers.release()


def process_age() -> float:
    """Seconds since this process was started: a person waits for the start of Python and its imports, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process_start()
