"""Processes that died, when, and the evidence: records of daemons, and rings that end before the others do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fusion_rt.tracing.format import Kind
from fusion_trace.read.job import JobTrace, Process

_SAME = 5 * 10**6  # ns: by as much clocks of hosts may differ here
SILENT = 10 * 10**9  # ns: daemons measure each other's clocks more often than that


@dataclass(frozen=True)
class Dead:
    """A process that died before the job was over.

    Attributes:
        what, number: "rank", or "node" for a daemon.
        host: its name; "?" if nothing of it is in the trace.
        at: when it is known to have been dead, ns; `last`: its last record, or None if its ring is not there.
        why: in words.
        by: the node whose daemon says so; None: only its silence does.
    """

    what: str
    number: int
    host: str
    at: int
    last: int | None
    why: str
    by: int | None

    @property
    def time(self) -> int:
        """Time of its death, as nearly as is known; ns."""
        return self.at if self.last is None else min(self.at, self.last)


@dataclass(frozen=True)
class Endings:
    """How processes of a job ended.

    Attributes:
        dead: those that died, the first one first.
        failure: why the job failed, in the words of the daemon that said so first; "" if none did.
        failed: how many operations failed, on the node where most did.
    """

    dead: tuple[Dead, ...]
    failure: str
    failed: int


def find(trace: JobTrace) -> Endings:
    """Returns the processes that died."""
    dead: dict[tuple[str, int], Dead] = {}
    failures: list[tuple[int, str]] = []
    failed = 0
    for node, daemon in trace.daemons.items():
        failed = max(failed, len(daemon.of(Kind.FAILED)))
        for row in daemon.of(Kind.GONE):
            why, at = trace.names[int(row["name"])], int(row["time"])
            if row["extra"] >= 2:
                failures.append((at, why))
                continue
            key = ("node" if row["extra"] == 1 else "rank"), int(row["peer"])
            if key not in dead or at < dead[key].at:
                dead[key] = _dead(trace, *key, at, why, node)
    # An elastic job goes on after an epoch that has failed.
    began = max((int(its["time"][-1]) for d in trace.daemons.values() if len(its := d.of(Kind.RUN_BEGIN))), default=0)
    failures = [each for each in failures if each[0] >= began]
    # Once the job has failed, whoever started it ends all that are left.
    over = min(failures, default=(None, ""))[0]
    dead = {key: each for key, each in dead.items() if over is None or each.at <= over + _SAME}
    for each in _silent(trace):
        dead.setdefault((each.what, each.number), each)
    first = tuple(sorted(dead.values(), key=lambda each: each.time))
    return Endings(first, min(failures, default=(0, ""))[1], failed)


def _dead(trace: JobTrace, what: str, number: int, at: int, why: str, by: int) -> Dead:
    process = (trace.workers if what == "rank" else trace.daemons).get(number)
    host = process.host if process is not None else trace.hosts.get(number, "?") if what == "node" else "?"
    return Dead(what, number, host, at, _last(process), why, by)


def _last(process: Process | None) -> int | None:
    return int(process.records["time"][-1]) if process is not None and len(process.records) else None


def _silent(trace: JobTrace) -> Iterator[Dead]:
    """Yields daemons whose rings end long before those of the others, and of which no other ring tells anything."""
    lasts = {node: last for node, daemon in trace.daemons.items() if (last := _last(daemon)) is not None}
    if len(lasts) < 2:
        return
    end = max(lasts.values())
    for node, last in lasts.items():
        others = np.array([len(daemon.of(Kind.CLOCK)) for other, daemon in trace.daemons.items() if other != node])
        if end - last > SILENT and others.any():
            why = f"its records end {(end - last) / 1e9:.1f} s before those of the others"
            yield Dead("node", node, trace.hosts[node], last, last, why, None)


def sentences(trace: JobTrace, found: Endings) -> Iterator[str]:
    """Yields the events, a sentence each."""
    begin, _ = trace.span
    for place, each in enumerate(found.dead):
        told = f" (says the daemon of {trace.host_of(each.by)})" if each.by is not None else ""
        after = f"died {(each.time - begin) / 1e9:.1f} s after the first record"
        if place:
            after = f"died {(each.time - found.dead[0].time) / 1e9:.2f} s later, perhaps because of that"
        # Most daemons' sentences begin with the dead process, too.
        named, _, how = each.why.partition(" died ")
        why = f" {how}" if how and named.startswith(f"{each.what} {each.number} (") else f": {each.why}"
        yield f"{_who(trace, each)} {after}{why}{told}"
    if found.failure:
        culprit = next((each for each in found.dead if each.why == found.failure), None)
        yield f"the job failed{f': {found.failure}' if culprit is None else f' because {_who(trace, culprit)} died'}"


def _who(trace: JobTrace, dead: Dead) -> str:
    return (
        f"rank {dead.number} (host {dead.host})"
        if dead.what == "rank"
        else f"the daemon of {trace.host_of(dead.number)}"
    )
