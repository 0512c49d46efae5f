"""A job's records as slices on tracks, from which all formats for viewers are made.

A track shows one thing after another. Overlapping ones (operations, kernels of a pool, chunks) are laid out on as many
tracks as it takes. An *arrow* joins slices of several processes: a bucket from the worker that hands it over to its
daemon and back, and a chunk from the node that sends it to the one that receives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fusion_rt.tracing.format import Flush, Kind, Role
from fusion_rt.tracing.reader import RECORD_DTYPE
from fusion_trace.export.slices import Marks, Slices, Texts, lanes, slices, together
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import KERNELS, SCRIPT, operations, steps_of
from fusion_trace.read.rows import NEVER, Ints, RowsOfOperations
from fusion_trace.read.span_columns import pair_columns, phase_columns

_MARKS = {
    Kind.GRADIENT: "gradients",
    Kind.FAILED: "events",
    Kind.PLAN: "events",
    Kind.LOST: "events",
    Kind.FOUND: "events",
    Kind.STALL: "events",
    Kind.VIEW: "events",
}


@dataclass(frozen=True, eq=False)
class Track:
    """A row; its contents are by time, and do not overlap."""

    name: str
    slices: Slices
    marks: Marks


@dataclass(frozen=True, eq=False)
class Rows:
    """The tracks of a process; `pid`: its number in the picture."""

    pid: int
    name: str
    tracks: list[Track]


@dataclass(frozen=True, eq=False)
class Picture:
    """All processes, and the time of the earliest record, ns."""

    job: str
    begin: int
    processes: list[Rows]


def draw(trace: JobTrace) -> Picture:
    """Returns the picture of a job."""
    painter = _Painter(trace)
    rows = []
    for number, process in enumerate(trace.processes, 1):
        drawn = painter.of_worker(process) if process.role == Role.WORKER else painter.of_daemon(process)
        none = Marks(np.zeros(0, RECORD_DTYPE), trace.names)
        tracks = [Track(name, its, none) for name, its in drawn]
        tracks += painter.marks(process)
        where = f"{process.host}, " if process.role == Role.WORKER else ""
        rows.append(Rows(number, f"{process} ({where}pid {process.pid})", tracks))
    return Picture(trace.job, trace.span[0], rows)


class _Painter:
    """Makes the tracks of processes. Slices of operations are in the order of these, before they are laid out."""

    def __init__(self, trace: JobTrace) -> None:
        self._trace = trace
        self._every = operations(trace)
        self._texts = Texts(self._every.plan, self._every.clock, trace.names)
        self._chunks = self._every.chunks
        self._number_arrows()

    def _number_arrows(self) -> None:
        """Numbers them by operation: those of ranks, then those of chunks."""
        places = self._every.places
        ranks: list[tuple[int, Ints]] = []
        for rank, rows in self._every.workers.items():
            daemon = self._every.daemons.get(self._trace.node_of[rank])
            came = np.zeros(len(self._every), bool)
            if daemon is not None:
                of, ready = daemon.select(Kind.READY)
                came[of[ready["peer"] == rank]] = True
            ranks.append((rank, np.flatnonzero(came & (rows.first(Kind.SUBMITTED) != NEVER))))
        flown = np.flatnonzero((self._chunks.sent != NEVER) & (self._chunks.received != NEVER))
        of = np.concatenate([*(its for _, its in ranks), self._chunks.of[flown]])
        turn = np.repeat(np.arange(len(ranks) + 1), [*(len(its) for _, its in ranks), len(flown)])
        order = np.lexsort((np.arange(len(of)), turn, places[of]))
        numbers = np.empty(len(of), np.int32)
        numbers[order] = np.arange(1, len(of) + 1)
        self._arrows: dict[int, Ints] = {}
        for place, (rank, its) in enumerate(ranks):
            self._arrows[rank] = np.zeros(len(self._every), np.int32)
            self._arrows[rank][its] = numbers[turn == place]
        self._chunk_arrows = np.zeros(len(self._chunks), np.int32)
        self._chunk_arrows[flown] = numbers[turn == len(ranks)]

    # --- workers ------------------------------------------------------------------------------------------------------

    def of_worker(self, process: Process) -> Iterator[tuple[str, Slices]]:
        """Yields the tracks of a worker."""
        rows, texts = self._every.workers[process.rank], self._texts
        steps = steps_of(process)
        begin, end = (np.array([getattr(step, side) for step in steps], np.int64) for side in ("begin", "end"))
        numbers = np.array([texts.number(f"step {step.number}") for step in steps], np.int64)
        yield from lanes("steps", slices(texts, begin, end, numbers))
        phases = [slices(texts, *phase_columns(process, *kinds), texts.number(name)) for name, kinds in SCRIPT.items()]
        yield from lanes("script", together(phases))
        yield from lanes("waits", self._ordered([self._spans(rows, "wait for ", Kind.WAIT_BEGIN, Kind.WAIT_END)]))
        memory = [
            self._spans(rows, "copy ", Kind.COPY_BEGIN, Kind.COPY_END),
            self._spans(rows, "apply ", Kind.APPLY_BEGIN, Kind.APPLY_END),
        ]
        yield from lanes("memory", self._ordered(memory))
        yield from lanes("handed over", self._flights(process.rank, rows))

    def _flights(self, rank: int, rows: RowsOfOperations) -> Slices:
        """Returns slices from hand-overs to when answers were read; an arrow leaves at its begin and comes to an end
        after it."""
        submitted, done = rows.first(Kind.SUBMITTED), rows.first(Kind.DONE)
        of = np.flatnonzero(submitted != NEVER)
        back = of[done[of] != NEVER]
        end = np.maximum(np.where(done[of] == NEVER, submitted[of], done[of]), submitted[of])
        why = rows.first(Kind.SUBMITTED, "extra")[of]
        why = np.where((why > 0) & (why <= max(Flush)), why, 0)
        name, arrow, nbytes = self._every.name, self._arrows[rank], rows.first(Kind.SUBMITTED, "value")
        gone = slices(
            self._texts, submitted[of], end, self._texts.numbers("", name[of]), of, nbytes[of], why=why, arrow=arrow[of]
        )
        text = self._texts.numbers("", name[back], " is back")
        return self._ordered([gone, slices(self._texts, done[back], done[back], text, back, arrow=arrow[back])])

    # --- daemons ------------------------------------------------------------------------------------------------------

    def of_daemon(self, process: Process) -> Iterator[tuple[str, Slices]]:
        """Yields the tracks of a daemon."""
        rows = self._every.daemons[process.node]
        yield from lanes("from workers", self._of_ranks(rows, Kind.READY, " of rank "))
        yield from lanes("operations", self._runs(rows))
        kernels = [self._spans(rows, f"{name} ", *kinds) for name, kinds in KERNELS.items()]
        yield from lanes("kernels", self._ordered(kernels))
        for name, its in sorted(self._links(process.node), key=lambda each: each[0]):
            yield from lanes(name, its)
        blocked = pair_columns(process, Kind.BLOCKED_BEGIN, Kind.BLOCKED_END)
        yield from lanes("blocked", slices(self._texts, *blocked, self._texts.number("blocked")))
        yield from lanes("to workers", self._of_ranks(rows, Kind.ANSWERED, " to rank "))

    def _of_ranks(self, rows: RowsOfOperations, kind: Kind, how: str) -> Slices:
        """Returns moments of operations and ranks: of parts the first time counts, of answers the last one."""
        of, records = rows.select(kind)
        peers, place = records["peer"].astype(np.int64), np.arange(len(of))
        _, first, inverse = np.unique((of << 16) | peers, return_index=True, return_inverse=True)
        last = np.zeros(len(first), np.int64)
        np.maximum.at(last, inverse.reshape(-1), place)
        at, turn = (first, -last) if kind == Kind.READY else (last, first)
        time, of, peers = records["time"][at], of[at], peers[at]
        text, arrow = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
        for rank in np.unique(peers).tolist():
            mine = peers == rank
            text[mine] = self._texts.numbers("", self._every.name[of[mine]], f"{how}{rank}")
            if rank in self._arrows:
                arrow[mine] = self._arrows[rank][of[mine]]
        return together([slices(self._texts, time, time, text, of, arrow=arrow)], self._every.places[of], turn)

    def _runs(self, rows: RowsOfOperations) -> Slices:
        begin, end = rows.first(Kind.RUN_BEGIN), rows.first(Kind.RUN_END)
        of = np.flatnonzero((begin != NEVER) & (end != NEVER) & (end >= begin))
        nbytes = np.where(begin == NEVER, 0, rows.first(Kind.RUN_BEGIN, "value"))
        asked = self._spans(rows, "negotiate ", Kind.NEGOTIATE_BEGIN, Kind.NEGOTIATE_END)
        asked = slices(self._texts, asked.begin, asked.end, asked.text, asked.operation, nbytes[asked.operation])
        text = self._texts.numbers("", self._every.name[of])
        return self._ordered([asked, slices(self._texts, begin[of], end[of], text, of, nbytes[of])])

    def _links(self, node: int) -> Iterator[tuple[str, Slices]]:
        """Yields the bytes that a node sends to, and receives from, each other one."""
        chunks = self._chunks
        for peer in np.unique(
            np.r_[chunks.target[chunks.source == node], chunks.source[chunks.target == node]]
        ).tolist():
            host = self._trace.host_of(peer)
            gone = np.flatnonzero((chunks.source == node) & (chunks.target == peer) & (chunks.sent != NEVER))
            sent, queued = chunks.sent[gone], chunks.queued[gone]
            begin = np.where(queued == NEVER, sent, np.minimum(queued, sent))
            yield f"to {host}", self._of_chunks(gone, begin, sent)
            come = np.flatnonzero((chunks.target == node) & (chunks.source == peer) & (chunks.received != NEVER))
            received = chunks.received[come]
            yield f"from {host}", self._of_chunks(come, received, np.maximum(chunks.taken[come], received))

    def _of_chunks(self, which: Ints, begin: Ints, end: Ints) -> Slices:
        chunks, of = self._chunks, self._chunks.of[which]
        text = self._texts.numbers("", self._every.name[of])
        found = slices(
            self._texts, begin, end, text, of, chunks.nbytes[which], chunks.number[which],
            arrow=self._chunk_arrows[which],
        )  # fmt: skip
        return self._ordered([found])

    # --- both ---------------------------------------------------------------------------------------------------------

    def _spans(self, rows: RowsOfOperations, what: str, begin: Kind, end: Kind) -> Slices:
        of, opened, closed = rows.spans(begin, end)
        return slices(self._texts, opened, closed, self._texts.numbers(what, self._every.name[of]), of)

    def _ordered(self, parts: list[Slices]) -> Slices:
        """Returns parts in the order of operations, and within one in that of the parts."""
        of = np.concatenate([part.operation for part in parts])
        return together(parts, self._every.places[of])

    def marks(self, process: Process) -> Iterator[Track]:
        """Yields the tracks of moments."""
        nothing = slices(self._texts, np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
        for name in dict.fromkeys(_MARKS.values()):
            records = process.of(*(kind for kind, where in _MARKS.items() if where == name))
            if len(records):
                yield Track(name, nothing, Marks(records, self._trace.names))
