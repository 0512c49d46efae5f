"""Processes of a job without a ring in its trace, and the questions that stay open without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fusion_rt.tracing.format import NOBODY, Kind
from fusion_trace.read.job import JobTrace


@dataclass(frozen=True)
class Unseen:
    """Processes that the job had and the trace has not.

    Attributes:
        hosts: nodes of which neither the daemon's ring is there nor any worker's.
        daemons: other nodes, without their daemon's.
        ranks: of the other nodes, as far as their daemons have recorded that they are there.
    """

    hosts: tuple[int, ...]
    daemons: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def ranks_may_be_missing(self) -> bool:
        """Says whether a rank without a ring may be the one that the others wait for."""
        return bool(self.hosts or self.ranks)


def unseen(trace: JobTrace) -> Unseen:
    """Returns the processes that are missing."""
    with_workers = set(trace.node_of.values())
    heard: set[int] = set()
    for daemon in trace.daemons.values():
        heard |= set(np.unique(daemon.of(Kind.READY)["peer"]).tolist())
    nodes = range(max(trace.nodes, max((*trace.daemons, *with_workers), default=-1) + 1))
    hosts = tuple(node for node in nodes if node not in with_workers and node not in trace.daemons)
    return Unseen(
        hosts=hosts,
        daemons=tuple(node for node in nodes if node not in trace.daemons and node not in hosts),
        ranks=tuple(sorted(heard - set(trace.workers) - {NOBODY})),
    )


def sentences(trace: JobTrace, found: Unseen) -> Iterator[str]:
    """Yields the unknowns, a sentence each."""
    if found.hosts:
        yield (
            f"there are no records of {_hosts(trace, found.hosts)}, so the cause of waits is unknown, because their "
            "ranks may have been the slow ones, nor how their links and daemons are"
        )
    if found.daemons:
        yield f"without the daemons of {_hosts(trace, found.daemons)} their links, and who died there, cannot be known"
    if found.ranks:
        shown = ", ".join(map(str, found.ranks[:8])) + (", ..." if found.ranks[8:] else "")
        yield f"ranks {shown} have no ring here: any of them may have kept the others waiting, so no rank is blamed"


def _hosts(trace: JobTrace, which: tuple[int, ...]) -> str:
    return ", ".join(map(trace.host_of, which[:8])) + (", ..." if which[8:] else "")
