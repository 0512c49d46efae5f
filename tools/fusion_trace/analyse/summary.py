"""`fusion-trace summary` shows a job at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fusion_rt.tracing.format import NOBODY, Kind
from fusion_rt.tracing.reader import RECORD_DTYPE, Records
from fusion_trace.analyse import endings, gaps, stragglers
from fusion_trace.analyse.overlap import Overview, Partition, by_rank, overview, partitions
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import Operations, operations
from fusion_trace.read.rows import Ints
from fusion_trace.read.span_columns import distinct, pair_columns, run

_MUCH_LONGER = 1.5  # than most ranks' steps
_LONG_START = 10**9  # ns


@dataclass(frozen=True)
class Rank:
    """Steps of a rank: how many, percentiles of their time, ns, and how many a second, over all of them."""

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
    per_second: float


@dataclass(frozen=True)
class LinkTraffic:
    """Payload bytes and chunks that went from one node to another in the chosen steps, and bytes a second."""

    source: int
    target: int
    nbytes: int
    chunks: int
    rate: float


@dataclass(frozen=True)
class Summary:
    """A job at a glance.

    Attributes:
        job, nodes: which, and how many nodes have daemons in the trace.
        began: wall-clock time, ns since 1970.
        command: the command line of the first rank; "": not recorded.
        seconds: from the first record to the last.
        ranks: by rank, those with whole steps.
        steps_per_second: of the rank with the most steps, over all of them; 0: no whole step.
        handed_over: bytes that a rank hands over in a step, the mean.
        links: payload between nodes, and `link_rate`: bytes a second of all of them together in these steps.
        overlap: medians and means of all ranks' steps, or None.
        stragglers: the most expensive first.
        records, overwritten: of all processes.
        odd: sentences about unusual things.
        ended: sentences about processes that died, and why the job failed.
    """

    job: str
    nodes: int
    began: int
    command: str
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
    # First, since it takes the most memory: columns of all operations, which stay, are not there yet.
    slow = stragglers.find(trace, chosen)
    every = operations(trace)
    ended = tuple(endings.sentences(trace, endings.find(trace)))
    parts = partitions(trace, chosen)
    steps_of_rank = by_rank(parts)
    begin, end = trace.span
    spans = {rank: (steps[0].begin, steps[-1].end) for rank, steps in steps_of_rank.items()}
    first = min((span[0] for span in spans.values()), default=begin)
    last = max((span[1] for span in spans.values()), default=end)
    handed = 0
    for rank, span in spans.items():
        submitted, nbytes = (every.workers[rank].first(Kind.SUBMITTED, field) for field in ("time", "value"))
        handed += int(nbytes[(submitted > span[0]) & (submitted <= span[1])].sum())
    links = traffic(every, first, last)
    ranks = tuple(_rank(trace.workers[rank], steps) for rank, steps in sorted(steps_of_rank.items()))
    most = max(steps_of_rank.values(), key=len, default=[])
    seconds = (most[-1].end - most[0].begin) / 1e9 if most else 0.0
    return Summary(
        job=trace.job,
        nodes=len(trace.daemons),
        began=trace.began,
        command=trace.command,
        seconds=(end - begin) / 1e9,
        ranks=ranks,
        steps_per_second=len(most) / seconds if seconds else 0.0,
        handed_over=handed // max(1, len(parts)),
        links=links,
        link_rate=sum(link.rate for link in links),
        overlap=overview(parts) if parts else None,
        stragglers=slow,
        records=sum(process.written for process in trace.processes),
        overwritten=sum(process.overwritten for process in trace.processes),
        odd=tuple(
            odd for odd in dict.fromkeys([*_first_steps(trace, ranks), *_odd(trace, bool(parts))]) if odd not in ended
        ),
        ended=ended,
    )


def traffic(every: Operations, first: int, last: int) -> tuple[LinkTraffic, ...]:
    """Returns the bytes sent on each link from one time to another, or received ones without a record of their
    sending."""
    sent = {node: rows.select(Kind.SENT) for node, rows in every.daemons.items()}
    came = {node: rows.select(Kind.RECEIVED) for node, rows in every.daemons.items()}
    pairs_of = {(node, peer) for node, (_, rows) in sent.items() for peer in np.unique(rows["peer"]).tolist()}
    pairs_of |= {(peer, node) for node, (_, rows) in came.items() for peer in np.unique(rows["peer"]).tolist()}
    found = []
    seconds = max(1e-9, (last - first) / 1e9)
    for source, target in sorted(pairs_of):
        left, right = _of_peer(sent, source, target), _of_peer(came, target, source)
        numbers = left[1]["extra"].astype(np.int64), right[1]["extra"].astype(np.int64)
        if not all(each.all() and distinct(each) for each in numbers):
            found.append(_counted(every, source, target, first, last))
            continue
        # The same number is the same chunk, if it is of the same operation.
        _, a, b = np.intersect1d(*numbers, assume_unique=True, return_indices=True)
        alone = np.ones(len(right[0]), bool)
        alone[b[left[0][a] == right[0][b]]] = False
        rows = np.concatenate([left[1], right[1][alone]])
        rows = rows[(rows["time"] >= first) & (rows["time"] <= last)]
        nbytes = int(rows["value"].sum())
        found.append(LinkTraffic(source, target, nbytes, len(rows), nbytes / seconds))
    return tuple(each for each in found if each.chunks)


def _of_peer(side: dict[int, tuple[Ints, Records]], node: int, peer: int) -> tuple[Ints, Records]:
    of, rows = side.get(node, (np.zeros(0, np.int64), np.zeros(0, RECORD_DTYPE)))
    mine = run(rows["peer"] == peer)
    return of[mine], rows[mine]


def _counted(every: Operations, source: int, target: int, first: int, last: int) -> LinkTraffic:
    """Counts the chunks of a link one by one: without numbers only their order says which ones are the same."""
    sizes = [
        chunk.nbytes
        for operation in every.values()
        for chunk in operation.chunks
        if (chunk.source, chunk.target) == (source, target)
        and (at := chunk.sent if chunk.sent is not None else chunk.received) is not None
        and first <= at <= last
    ]
    return LinkTraffic(source, target, sum(sizes), len(sizes), sum(sizes) / max(1e-9, (last - first) / 1e9))


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
        len(steps) / ((steps[-1].end - steps[0].begin) / 1e9),
    )


def alone(ranks: Sequence[Rank]) -> tuple[Rank, ...]:
    """Returns the ranks whose steps take much longer than those of most others, which do not wait for them."""
    usual = float(np.median([rank.median for rank in ranks])) if ranks else 0.0
    return tuple(rank for rank in ranks if rank.median > _MUCH_LONGER * usual)


def _first_steps(trace: JobTrace, ranks: Sequence[Rank]) -> Iterator[str]:
    """Yields a sentence on a first step that took much longer than the others, of the rank where it was longest."""
    took: dict[int, int] = {}
    for rank in ranks:
        records = trace.workers[rank.rank].of(Kind.GRADIENT, Kind.STEP_END)
        records = records[records["clock"] == 0]
        ends = np.flatnonzero(records["kind"] == Kind.STEP_END)
        if len(ends) and ends[0]:
            took[rank.rank] = int(records["time"][ends[0]] - records["time"][0])
    longest = max(ranks, key=lambda rank: took.get(rank.rank, 0), default=None)
    if longest is None or took.get(longest.rank, 0) < max(_LONG_START, 10 * longest.median):
        return
    yield (
        f"the first step took {took[longest.rank] / 1e9:.1f} s on rank {longest.rank}, from its first gradient on, "
        f"where others take {longest.median / 1e6:.3g} ms: plans are made then, and kernels may be compiled"
    )


def _odd(trace: JobTrace, any_step: bool) -> Iterator[str]:
    """Yields sentences on lost records, connections, stalls, plans and failures, in this order, and then on what could
    not be read."""
    for process in trace.processes:
        if process.overwritten:
            share = process.overwritten / max(1, process.written)
            yield f"{process}: its first {process.overwritten} records ({share:.0%}) were overwritten by later ones"
    if trace.workers and not any_step:
        yield (
            "no rank has a whole step: a step lasts from one end of `optimizer.step()` to the next; it is recorded of "
            'hvd.DistributedOptimizer, and of any optimizer of torch where the backend is "fusion"'
        )
    for node, daemon in sorted(trace.daemons.items()):
        yield from _of_daemon(trace, node, daemon)
    yield from gaps.sentences(trace, gaps.unseen(trace))
    yield from trace.problems


def _of_daemon(trace: JobTrace, node: int, daemon: Process) -> Iterator[str]:
    who = f"host {trace.host_of(node)}"
    for peer, count in _by_peer(daemon, Kind.LOST):
        again = dict(_by_peer(daemon, Kind.FOUND)).get(peer, 0)
        to = f"to {trace.host_of(peer)}" if peer != NOBODY else "to a peer"
        yield f"{who}: connections {to} broke {_times(count)}, and were made again {_times(again)}"
    begin, end = pair_columns(daemon, Kind.BLOCKED_BEGIN, Kind.BLOCKED_END)
    if len(begin):
        yield f"{who}: it could not send {_times(len(begin))}, for {int((end - begin).sum()) / 1e9:.3f} s together"
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
