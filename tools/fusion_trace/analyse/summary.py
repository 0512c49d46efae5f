"""`fusion-trace summary` shows a job at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fusion_rt.tracing.format import NOBODY, Kind
from fusion_trace.analyse import endings, gaps, stragglers
from fusion_trace.analyse.overlap import Overview, Partition, by_rank, overview, partitions
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import operations, pairs


@dataclass(frozen=True)
class Rank:
    """Steps of a rank: how many, and percentiles of their time, ns."""

    rank: int
    node: int
    host: str
    pid: int
    steps: int
    first: int
    last: int
    p5: int
    median: int
    p95: int


@dataclass(frozen=True)
class LinkTraffic:
    """Payload bytes and chunks that went from one node to another in the chosen steps."""

    source: int
    target: int
    nbytes: int
    chunks: int


@dataclass(frozen=True)
class Summary:
    """A job at a glance.

    Attributes:
        job, nodes: which, and how many nodes have daemons in the trace.
        seconds: from the first record to the last.
        ranks: by rank, those with whole steps.
        steps_per_second: of the rank with the most steps, over all of them; 0: no whole step.
        handed_over: bytes that a rank hands over in a step, the mean.
        links: payload between nodes, and `link_rate`: bytes a second of all of them in these steps.
        overlap: medians of all ranks' steps, or None.
        stragglers: the most expensive first.
        records, overwritten: of all processes.
        odd: sentences about what is unusual.
        ended: sentences about who died, and why the job failed.
    """

    job: str
    nodes: int
    seconds: float
    ranks: tuple[Rank, ...]
    steps_per_second: float
    handed_over: int
    links: tuple[LinkTraffic, ...]
    link_rate: float
    overlap: Overview | None
    stragglers: tuple[stragglers.Finding, ...]
    records: int
    overwritten: int
    odd: tuple[str, ...]
    ended: tuple[str, ...]


def find(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> Summary:
    every = operations(trace)
    parts = partitions(trace, chosen)
    steps_of_rank = by_rank(parts)
    begin, end = trace.span
    spans = {rank: (steps[0].begin, steps[-1].end) for rank, steps in steps_of_rank.items()}
    handed, links = [], dict[tuple[int, int], list[int]]()
    first = min((span[0] for span in spans.values()), default=begin)
    last = max((span[1] for span in spans.values()), default=end)
    for operation in every.values():
        for rank, mine in operation.workers.items():
            if rank in spans and mine.submitted is not None and spans[rank][0] < mine.submitted <= spans[rank][1]:
                handed.append(mine.nbytes)
        for chunk in operation.chunks:
            at = chunk.sent if chunk.sent is not None else chunk.received
            if at is not None and first <= at <= last:
                links.setdefault((chunk.source, chunk.target), []).append(chunk.nbytes)
    most = max(steps_of_rank.values(), key=len, default=[])
    seconds = (most[-1].end - most[0].begin) / 1e9 if most else 0.0
    return Summary(
        job=trace.job,
        nodes=len(trace.daemons),
        seconds=(end - begin) / 1e9,
        ranks=tuple(_rank(trace.workers[rank], steps) for rank, steps in sorted(steps_of_rank.items())),
        steps_per_second=len(most) / seconds if seconds else 0.0,
        handed_over=sum(handed) // max(1, len(parts)),
        links=tuple(LinkTraffic(*link, sum(sizes), len(sizes)) for link, sizes in sorted(links.items())),
        link_rate=sum(sum(sizes) for sizes in links.values()) / max(1e-9, (last - first) / 1e9),
        overlap=overview(parts) if parts else None,
        stragglers=stragglers.find(trace, chosen),
        records=sum(process.written for process in trace.processes),
        overwritten=sum(process.overwritten for process in trace.processes),
        odd=tuple(_odd(trace, bool(parts))),
        ended=tuple(endings.sentences(trace, endings.find(trace))),
    )


def _rank(worker: Process, steps: Sequence[Partition]) -> Rank:
    low, middle, high = (round(float(x)) for x in np.percentile([step.ns for step in steps], [5, 50, 95]))
    return Rank(
        worker.rank,
        worker.node,
        worker.host,
        worker.pid,
        len(steps),
        steps[0].number,
        steps[-1].number,
        low,
        middle,
        high,
    )


def _odd(trace: JobTrace, any_step: bool) -> Iterator[str]:
    """Yields sentences on lost records, connections, stalls, plans and failures, in this order, and then on what could
    not be read."""
    for process in trace.processes:
        if process.overwritten:
            share = process.overwritten / max(1, process.written)
            yield f"{process}: its first {process.overwritten} records ({share:.0%}) were overwritten by later ones"
    if trace.workers and not any_step:
        yield "no rank has a whole step: a step lasts from one end of `optimizer.step()` to the next"
    for node, daemon in sorted(trace.daemons.items()):
        yield from _of_daemon(trace, node, daemon)
    yield from gaps.sentences(gaps.unseen(trace))
    yield from trace.problems


def _of_daemon(trace: JobTrace, node: int, daemon: Process) -> Iterator[str]:
    who = f"node {node} (host {daemon.host})"
    for peer, count in _by_peer(daemon, Kind.LOST):
        again = dict(_by_peer(daemon, Kind.FOUND)).get(peer, 0)
        to = f"to node {peer}" if peer != NOBODY else "to a peer"
        yield f"{who}: connections {to} broke {_times(count)}, and were made again {_times(again)}"
    blocked = pairs(daemon, Kind.BLOCKED_BEGIN, Kind.BLOCKED_END)
    if blocked:
        total = sum(span.ns for span in blocked)
        yield f"{who}: it could not send {_times(len(blocked))}, for {total / 1e9:.3f} s together"
    stalls: dict[str, int] = {}
    for row in daemon.of(Kind.STALL):
        name = trace.names[row["name"]]
        stalls[name] = max(stalls.get(name, 0), int(row["value"]))
    for name, seconds in stalls.items():
        yield f"{who}: {name or 'an operation'} made no progress for {seconds} s"
    plans, first = np.unique(daemon.of(Kind.PLAN)["plan"], return_index=True)  # they are recorded from time to time
    if len(plans) > 1:
        last = int(daemon.of(Kind.PLAN)["time"][first].max())
        yield f"{who}: {len(plans)} plans came, the last one {_since(trace, last)}"
    failed = daemon.of(Kind.FAILED)
    if len(failed):
        name = trace.names[failed["name"][0]]
        yield f"{who}: {len(failed)} operations failed, the first one of {name or 'a tensor without a name'}"
    for row in daemon.of(Kind.VIEW):
        yield f"{who}: the job went on with {int(row['value'])} nodes {_since(trace, int(row['time']))}"


def _by_peer(daemon: Process, kind: Kind) -> list[tuple[int, int]]:
    peers, counts = np.unique(daemon.of(kind)["peer"], return_counts=True)
    return list(zip(peers.tolist(), counts.tolist(), strict=True))


def _since(trace: JobTrace, at: int) -> str:
    return f"{(at - trace.span[0]) / 1e9:.1f} s after the first record"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def document(found: Summary, trace: JobTrace) -> dict[str, object]:
    """Returns what `--json` shows; times in ns if nothing else is said."""
    processes = [
        {
            "role": process.role.name.lower(),
            "rank": process.rank,
            "node": process.node,
            "host": process.host,
            "pid": process.pid,
            "records": process.written,
            "overwritten": process.overwritten,
            "clock_error_ns": trace.offsets[process.node].error,
            "files": list(process.paths),
        }
        for process in trace.processes
    ]
    return {**asdict(found), "processes": processes}
