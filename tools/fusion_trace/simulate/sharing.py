"""Processors that several workers and daemons of a recorded job share: those of a machine that has fewer than they use,
and of a machine that is several hosts (network namespaces, containers).

What a recording of such a job calls computing is partly waiting for a processor. Each step says how much of it was: the
processor time that its worker has used, and for how long its script was ready and had none. Without that wait the rest
is computed again, and waits for the processors of the simulated machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusion_rt.tracing.format import Kind, Role
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import Step
from fusion_trace.simulate.programs import Compute, Event

S = 1e9  # ns
THREADS = 2  # of a daemon that are busy at once, for most of the time: its event loop, and ZeroMQ's or a kernel's
_WRAPS = 1 << 32  # us


@dataclass(frozen=True)
class Machines:
    """Machines whose processors are shared.

    Attributes:
        of: by node, the number of its machine; processors: by machine.
        daemons: processor time that a daemon uses in a step (s), the mean over nodes.
    """

    of: tuple[int, ...]
    processors: tuple[int, ...]
    daemons: float


def machines_of(trace: JobTrace, nodes: Sequence[int], steps: Sequence[Sequence[Step]]) -> Machines | None:
    """Returns the machines of a job whose processes may want more processors than there are, or None: all have one, or
    nothing of that was recorded.

    Args:
        steps: of each rank, those that were chosen.
    """
    processes = [process for process in trace.processes if process.node in nodes]
    needs = _needs(processes)
    used = _of_daemons(trace, nodes, steps) if needs else None
    if used is None or all(wanted <= there for wanted, there in needs.values()):
        return None
    numbers = {machine: number for number, machine in enumerate(needs)}
    machine_of = {process.node: numbers[process.machine] for process in processes}
    return Machines(tuple(machine_of[node] for node in nodes), tuple(there for _, there in needs.values()), used)


def on_one_full_machine(processes: Sequence[Process]) -> bool:
    """Says whether all processes are known to be on one machine that has fewer processors than they may want."""
    needs = _needs(processes)
    return len(needs) == 1 and all(wanted > there for wanted, there in needs.values())


def _needs(processes: Sequence[Process]) -> dict[str, tuple[int, int]]:
    """Returns, by machine, how many processors its processes may want, and how many there are; nothing where that was
    not recorded."""
    if not all(process.machine and process.processors for process in processes):
        return {}
    on: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        on[process.machine].append(process)
    return {
        machine: (
            sum(1 if process.role == Role.WORKER else THREADS for process in its),
            max(1, round(max(process.processors for process in its))),
        )
        for machine, its in on.items()
    }


def _of_daemons(trace: JobTrace, nodes: Sequence[int], steps: Sequence[Sequence[Step]]) -> float | None:
    """Returns the processor time that a daemon has used in a step (s), or None if that was not recorded."""
    begin, end = min(its[0].begin for its in steps), max(its[-1].end for its in steps)
    count = max(its[-1].number - its[0].number + 1 for its in steps)
    found: list[float] = []
    for node in nodes:
        records = trace.daemons[node].of(Kind.RUN_END) if node in trace.daemons else None
        if records is None:
            return None
        records = records[(records["time"] >= begin) & (records["time"] <= end) & (records["value"] > 0)]
        if len(records) < 2:
            return None
        span = float(records["time"][-1] - records["time"][0]) / (end - begin)
        found.append(float(records["value"][-1] - records["value"][0]) / S / count / span)
    return sum(found) / len(found)


def used_in(worker: Process) -> dict[int, tuple[float, float]]:
    """Returns for each step of a worker, by its number, the processor time that it used and for how long its script
    waited for a processor (s)."""
    ends = worker.of(Kind.STEP_END)
    used = np.diff(ends["value"]) / S
    waited = np.mod(np.diff(ends["extra"].astype(np.int64)), _WRAPS) / 1e6
    return dict(zip(ends["clock"][1:].tolist(), zip(used.tolist(), waited.tolist(), strict=True), strict=True))


def without_waits(step: Sequence[Event], used: float, waited: float) -> tuple[Event, ...]:
    """Returns a step in which computing takes as long as it would if there were always a processor.

    Args:
        used: processor time of the step (s); waited: for how long its script waited for a processor (s).
    """
    computed = sum(event.seconds for event in step if isinstance(event, Compute))
    own = max(computed - waited, min(used, computed), 1e-9)
    return tuple(
        Compute(event.seconds * own / computed, event.seconds * used / computed)
        if isinstance(event, Compute)
        else event
        for event in step
    )


def slowed(step: Sequence[Event], factor: float) -> tuple[Event, ...]:
    """Returns a step whose work takes so many times as long on a processor."""
    return tuple(
        Compute(
            event.seconds + event.used * (factor - 1) / max(math.ceil(event.used / event.seconds), 1),
            event.used * factor,
        )
        if isinstance(event, Compute) and event.seconds
        else event
        for event in step
    )
