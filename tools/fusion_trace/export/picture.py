"""A job's records as slices on tracks, from which all formats for viewers are made.

A track shows one thing after another. What overlaps (operations, kernels of a pool, chunks) is laid out on as many
tracks as it takes. An *arrow* joins slices of several processes: a bucket from the worker that hands it over to its
daemon and back, and a chunk from the node that sends it to the one that receives it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fusion_rt.tracing.format import NOBODY, Kind, Role
from fusion_trace.read.chunks import Chunk
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import DaemonPart, Key, Operation, WorkerPart, operations, pairs, script, steps_of

_MARKS = {
    Kind.GRADIENT: "gradients",
    Kind.FAILED: "events",
    Kind.PLAN: "events",
    Kind.LOST: "events",
    Kind.FOUND: "events",
    Kind.STALL: "events",
    Kind.VIEW: "events",
}


@dataclass(frozen=True)
class Slice:
    """An activity that lasts. Times in ns on the job's axis; `arrows`: numbers of those that go through it."""

    begin: int
    end: int
    name: str
    about: Mapping[str, object] = field(default_factory=dict)
    arrows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Mark:
    """An event at a moment."""

    time: int
    name: str
    about: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Track:
    """A row; what is on it is by time, and does not overlap."""

    name: str
    slices: list[Slice] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass
class Rows:
    """The tracks of a process; `pid`: its number in the picture."""

    pid: int
    name: str
    tracks: list[Track]


@dataclass
class Picture:
    """All processes, and the time of the earliest record, ns."""

    job: str
    begin: int
    processes: list[Rows]


def draw(trace: JobTrace) -> Picture:
    """Returns the picture of a job."""
    found = operations(trace)
    arrows = _Arrows(trace, found.values())
    rows = []
    for number, process in enumerate(trace.processes, 1):
        tracks = (_of_worker if process.role == Role.WORKER else _of_daemon)(process, trace, found.values(), arrows)
        tracks += _marks(process, trace)
        kept = [track for track in tracks if track.slices or track.marks]
        rows.append(Rows(number, f"{process} ({process.host}, pid {process.pid})", kept))
    return Picture(trace.job, trace.span[0], rows)


class _Arrows:
    """The number of each arrow: of an operation and rank, and of a chunk."""

    def __init__(self, trace: JobTrace, found: Iterable[Operation]) -> None:
        self._of_rank: dict[tuple[Key, int], int] = {}
        self._of_chunk: dict[Chunk, int] = {}
        number = 0
        for operation in found:
            for rank, part in operation.workers.items():
                daemon = operation.daemons.get(trace.node_of[rank])
                if part.submitted is not None and daemon is not None and rank in daemon.ready:
                    number += 1
                    self._of_rank[operation.key, rank] = number
            for chunk in operation.chunks:
                if chunk.sent is not None and chunk.received is not None:
                    number += 1
                    self._of_chunk[chunk] = number

    def of(self, key: Key, rank: int) -> tuple[int, ...]:
        number = self._of_rank.get((key, rank))
        return () if number is None else (number,)

    def of_chunk(self, chunk: Chunk) -> tuple[int, ...]:
        number = self._of_chunk.get(chunk)
        return () if number is None else (number,)


# --- workers ----------------------------------------------------------------------------------------------------------


def _of_worker(process: Process, trace: JobTrace, found: Iterable[Operation], arrows: _Arrows) -> list[Track]:
    del trace
    steps = [Slice(step.begin, step.end, f"step {step.number}") for step in steps_of(process)]
    phases = [Slice(*span, name) for name, spans in script(process).items() for span in spans]
    waits: list[Slice] = []
    memory: list[Slice] = []
    flights: list[Slice] = []
    for operation in found:
        part = operation.workers.get(process.rank)
        if part is not None:
            about = _about(operation.key)
            waits += [Slice(*span, f"wait for {operation.key.name}", about) for span in part.waits]
            memory += [Slice(*span, f"copy {operation.key.name}", about) for span in part.copies]
            memory += [Slice(*span, f"apply {operation.key.name}", about) for span in part.applies]
            flights += _flight(operation.key, part, arrows.of(operation.key, process.rank))
    return [
        *lanes("steps", steps), *lanes("script", phases), *lanes("waits", waits), *lanes("memory", memory),
        *lanes("handed over", flights),
    ]  # fmt: skip


def _flight(key: Key, part: WorkerPart, arrows: tuple[int, ...]) -> Iterator[Slice]:
    """Yields a slice from the hand-over to when the answer was read; an arrow leaves at its begin and comes to an end
    after it."""
    if part.submitted is None:
        return
    why = {} if part.flush is None else {"why": part.flush.name.lower()}
    about = {**_about(key), "bytes": part.nbytes, **why}
    done = part.submitted if part.done is None else part.done
    yield Slice(part.submitted, max(done, part.submitted), key.name, about, arrows)
    if part.done is not None:
        yield Slice(part.done, part.done, f"{key.name} is back", _about(key), arrows)


# --- daemons ----------------------------------------------------------------------------------------------------------


def _of_daemon(process: Process, trace: JobTrace, found: Iterable[Operation], arrows: _Arrows) -> list[Track]:
    ready: list[Slice] = []
    runs: list[Slice] = []
    kernels: list[Slice] = []
    answers: list[Slice] = []
    links: dict[str, list[Slice]] = defaultdict(list)
    for operation in found:
        key, about = operation.key, _about(operation.key)
        part = operation.daemons.get(process.node)
        if part is not None:
            for rank, time in part.ready.items():
                ready.append(Slice(time, time, f"{key.name} of rank {rank}", about, arrows.of(key, rank)))
            for rank, time in part.answered.items():
                answers.append(Slice(time, time, f"{key.name} to rank {rank}", about, arrows.of(key, rank)))
            runs += _run(key, part)
            for name, spans in part.kernels.items():
                kernels += [Slice(*span, f"{name} {key.name}", about) for span in spans]
        for chunk in operation.chunks:
            if process.node in (chunk.source, chunk.target):
                _chunk(chunk, process.node, key, links, arrows.of_chunk(chunk))
    blocked = [Slice(*span, "blocked") for span in pairs(process, Kind.BLOCKED_BEGIN, Kind.BLOCKED_END)]
    tracks = [*lanes("from workers", ready), *lanes("operations", runs), *lanes("kernels", kernels)]
    for name in sorted(links):
        tracks += lanes(name, links[name])
    return [*tracks, *lanes("blocked", blocked), *lanes("to workers", answers)]


def _run(key: Key, part: DaemonPart) -> Iterator[Slice]:
    about = {**_about(key), "bytes": part.nbytes}
    for span in part.negotiations:
        yield Slice(*span, f"negotiate {key.name}", about)
    if part.run_begin is not None and part.run_end is not None and part.run_end >= part.run_begin:
        yield Slice(part.run_begin, part.run_end, key.name, about)


def _chunk(chunk: Chunk, node: int, key: Key, links: dict[str, list[Slice]], arrows: tuple[int, ...]) -> None:
    about = {**_about(key), "bytes": chunk.nbytes, "number": chunk.number}
    if node == chunk.source and chunk.sent is not None:
        begin = chunk.sent if chunk.queued is None else min(chunk.queued, chunk.sent)
        links[f"to node {chunk.target}"].append(Slice(begin, chunk.sent, key.name, about, arrows))
    if node == chunk.target and chunk.received is not None:
        end = chunk.received if chunk.taken is None else max(chunk.taken, chunk.received)
        links[f"from node {chunk.source}"].append(Slice(chunk.received, end, key.name, about, arrows))


# --- both -------------------------------------------------------------------------------------------------------------


def _about(key: Key) -> dict[str, object]:
    return {"plan": key.plan, "clock": key.clock} if key.plan else {"clock": key.clock}


def _marks(process: Process, trace: JobTrace) -> list[Track]:
    tracks = {name: Track(name) for name in dict.fromkeys(_MARKS.values())}
    for record in process.of(*_MARKS):
        kind, name = Kind(int(record["kind"])), trace.names[record["name"]]
        what = name if kind is Kind.GRADIENT else f"{kind.name.lower()} {name}".strip()
        about: dict[str, object] = {"value": int(record["value"])}
        if record["peer"] != NOBODY:
            about["peer"] = int(record["peer"])
        tracks[_MARKS[kind]].marks.append(Mark(int(record["time"]), what, about))
    return list(tracks.values())


def lanes(name: str, slices: Sequence[Slice]) -> list[Track]:
    """Lays out slices so that on no track one begins before the one before it has ended. Those that last no time at all
    get 1 ns, which viewers need to attach arrows to them."""
    tracks: list[Track] = []
    busy: list[tuple[int, int]] = []  # when each of these tracks is free again
    free: list[int] = []
    for each in sorted(slices, key=lambda each: (each.begin, each.end)):
        end = max(each.end, each.begin + 1)
        while busy and busy[0][0] <= each.begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            place = heapq.heappop(free)
        else:
            place = len(tracks)
            tracks.append(Track(name if not tracks else f"{name} ({len(tracks) + 1})"))
        tracks[place].slices.append(Slice(each.begin, end, each.name, each.about, each.arrows))
        heapq.heappush(busy, (end, place))
    return tracks
