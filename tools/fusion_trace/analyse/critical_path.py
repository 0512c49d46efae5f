"""`fusion-trace critical-path` divides the length of a step into activities, across ranks and nodes.

The path is found backwards, from the moment when the last rank ends the step. Whoever is busy then is on it, back to
when it last waited for something; from there on whoever it waited for is, and so on until the step's begin. So each
nanosecond of the step is one activity of one process or link, and the path is as long as the step.

A worker's activities are forward, backward, step (in `step()`, or where gradients are finished), copy, apply, wake-up
(it reads an answer that is there) and other (outside of all these: loading data, most often). A daemon's are its
kernels (reduce, encode, decode), and daemon: its loop, or a thread, is not yet at it. Between them are hand-over (a
worker's message on its way) and negotiation. A link's are wire, which carries a chunk, and queue: the chunk waits for
credit or its turn, or in the connection, while the link carries those before it. An operation ends when peers have
taken what is lent to connections; that wait is the link's, and the peer's, and not this daemon's. `unrecorded` is what
rings do not tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from fusion_rt.tracing.format import Kind
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.chunks import Chunk
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import SCRIPT, DaemonPart, Key, Operation, Operations, Step, all_steps, operations
from fusion_trace.read.rows import Ints
from fusion_trace.read.span_columns import Span, joined, pair_columns, phase_columns, union_of, without

ACTIVITIES = (
    "forward", "backward", "step", "copy", "apply", "wake-up", "other", "hand-over", "daemon", "reduce", "encode",
    "decode", "negotiation", "queue", "wire", "unrecorded",
)  # fmt: skip
_OF_WORKERS = ("apply", "copy", "step", "backward", "forward", "other")  # the earlier one counts, of two at a time
_END, _LAST, _DATA, _RUN, _NEGOTIATED, _READY = 5, 4, 3, 2, 1, 0  # the order of events at the same moment


@dataclass(frozen=True)
class Place:
    """A rank, a node's daemon, or a link from one node to another."""

    rank: int | None = None
    node: int | None = None
    link: tuple[int, int] | None = None

    def named(self, trace: JobTrace) -> str:
        """Returns its name."""
        if self.link is not None:
            return trace.link_of(*self.link)
        if self.node is not None:
            return f"daemon of {trace.host_of(self.node)}"
        return f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a path; ns on the job's axis. `what`: the bucket or tensor that it is about, or ""."""

    begin: int
    end: int
    activity: str
    place: Place
    what: str = ""

    @property
    def ns(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Path:
    """The critical path of a step, in order of time. `step` is that of the rank that was the last to end it."""

    step: Step
    segments: tuple[Segment, ...]

    @property
    def ns(self) -> int:
        return sum(segment.ns for segment in self.segments)


def find(trace: JobTrace, chosen: StepRange | Set[int] = EVERY_STEP) -> tuple[Path, ...]:
    """Returns the critical path of each step, by number."""
    last: dict[int, Step] = {}
    for step in (step for steps in all_steps(trace).values() for step in steps if step.number in chosen):
        if step.number not in last or step.end > last[step.number].end:
            last[step.number] = step
    graph = _Graph(trace)
    return tuple(Path(step, graph.back_from(step)) for _, step in sorted(last.items()))


def totals(paths: Iterable[Path]) -> dict[tuple[str, Place], int]:
    """Returns the ns of each activity at each place, the longest first."""
    sums: Counter[tuple[str, Place]] = Counter()
    for path in paths:
        for segment in path.segments:
            sums[segment.activity, segment.place] += segment.ns
    return dict(sums.most_common())


@dataclass(frozen=True)
class Beside:
    """An activity at a place, and its part of a step in some steps and in others; ns, means."""

    activity: str
    place: Place
    one: float
    other: float

    @property
    def difference(self) -> float:
        return self.other - self.one


def beside(one: Sequence[Path], other: Sequence[Path]) -> tuple[Beside, ...]:
    """Compares the paths of some steps with those of others, at least one of each; the largest difference first."""
    sums = [totals(paths) for paths in (one, other)]
    found = (
        Beside(*what, *(its.get(what, 0) / len(paths) for its, paths in zip(sums, (one, other), strict=True)))
        for what in dict.fromkeys((*sums[0], *sums[1]))
    )
    return tuple(sorted(found, key=lambda row: -abs(row.difference)))


# --- the graph --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pieces:
    """A worker's time in stretches that follow each other, in columns of shape (n,).

    Attributes:
        begin, end: ns. activity: a place in `_OF_WORKERS`.
        operation: the number of the operation that it waits for, if it does; else -1.
    """

    begin: Ints
    end: Ints
    activity: Ints
    operation: Ints


@dataclass
class _Walk:
    """The state of a walk backwards along a path.

    Attributes:
        limit: the step's begin.
        time: everything after it is in `segments`.
        waiting: the rank whose wait is being explained, when that wait began, and its object.
    """

    limit: int
    time: int
    waiting: tuple[int, int, str]
    segments: list[Segment] = field(default_factory=list)

    def back_to(self, time: int, activity: str, place: Place, what: str = "") -> None:
        """Goes back to `time`, all of which was this activity. Clocks that disagree do not make the path longer."""
        begin = max(self.limit, min(time, self.time))
        if begin < self.time:
            self.segments.append(Segment(begin, self.time, activity, place, what))
            self.time = begin

    @property
    def at_end(self) -> bool:
        return self.time <= self.limit


class _Graph:
    """The operations and workers' pieces that a path is walked back through."""

    def __init__(self, trace: JobTrace) -> None:
        self._operations = operations(trace)
        self._node_of = trace.node_of
        self._error = {node: max(offset.error, 0) for node, offset in trace.offsets.items()}
        self._arrivals: dict[tuple[int, int], Ints] = {}  # by link, when chunks came; in order
        self._pieces = {rank: _pieces(worker, self._operations) for rank, worker in trace.workers.items()}

    def back_from(self, step: Step) -> tuple[Segment, ...]:
        """Walks from the end of a step back to its begin."""
        walk = _Walk(step.begin, step.end, (step.rank, step.begin, ""))
        at: tuple[int, Key] | int = step.rank  # a worker's rank, or a node and its daemon's work
        stage = _END
        seen: set[object] = set()
        while not walk.at_end:
            state = at, walk.time, stage
            if state in seen:  # clocks disagree so much that everybody waited for everybody
                at = self._not_known(walk)
                stage = _END
                continue
            seen.add(state)
            if isinstance(at, int):
                at, stage = self._in_worker(at, walk), _END
            else:
                at, stage = self._in_daemon(at[0], at[1], stage, walk)
        return tuple(reversed(walk.segments))

    def _not_known(self, walk: _Walk) -> int:
        """Goes on where the wait that cannot be explained began."""
        rank, began, what = walk.waiting
        walk.back_to(min(began, walk.time - 1), "unrecorded", Place(rank=rank), what)
        return rank

    # --- workers ------------------------------------------------------------------------------------------------------

    def _in_worker(self, rank: int, walk: _Walk) -> tuple[int, Key] | int:
        pieces = self._pieces[rank]
        place = int(np.searchsorted(pieces.end, walk.time))
        if place == len(pieces.end) or pieces.begin[place] >= walk.time:  # before its first record, or after its last
            before = int(pieces.end[place - 1]) if place else walk.limit
            walk.back_to(before, "unrecorded" if not place else "other", Place(rank=rank))
            return rank
        began, number = int(pieces.begin[place]), int(pieces.operation[place])
        if number < 0:
            walk.back_to(began, _OF_WORKERS[pieces.activity[place]], Place(rank=rank))
            return rank
        key = self._operations.key_of(number)
        walk.waiting = rank, began, key.name
        node, operation = self._node_of[rank], self._operations[key]
        daemon = operation.daemons.get(node)
        answered = None if daemon is None else daemon.answered.get(rank, daemon.run_end)
        if answered is None:
            return self._not_known(walk)
        walk.back_to(max(answered, began), "wake-up", Place(rank=rank), key.name)
        return rank if answered <= began else (node, key)

    # --- daemons ------------------------------------------------------------------------------------------------------

    def _in_daemon(self, node: int, key: Key, stage: int, walk: _Walk) -> tuple[tuple[int, Key] | int, int]:
        """Goes back by one event of an operation on a node; `stage`: events of this very moment count from before this
        stage."""
        operation = self._operations[key]
        part = operation.daemons.get(node)
        found = None if part is None else self._latest(operation, part, node, stage, walk)
        if found is None:
            return self._not_known(walk), _LAST
        time, stage, what = found
        here = Place(node=node)
        if isinstance(what, Chunk) and what.source == node:
            assert what.taken is not None
            walk.back_to(what.taken, "wire", Place(link=(what.target, node)), key.name)
            return (what.target, key), _LAST
        walk.back_to(time, "daemon", here, key.name)
        if isinstance(what, Chunk):
            assert what.sent is not None
            link = Place(link=(what.source, what.target))
            walk.back_to(self._alone(what), "wire", link, key.name)
            walk.back_to(what.sent if what.queued is None else what.queued, "queue", link, key.name)
            return (what.source, key), _LAST
        if isinstance(what, _Kernel):
            walk.back_to(what.begin, what.name, here, key.name)
            return (node, key), _LAST if what.begin < time else stage
        if isinstance(what, Span):
            # The coordinator answers when it has heard of all nodes: the last of them kept it waiting.
            begins = {
                other: max((span.begin for span in its.negotiations if span.begin <= time), default=-1)
                for other, its in operation.daemons.items()
            }
            last = max(begins, key=lambda other: (begins[other], other == node))
            walk.back_to(begins[last], "negotiation", Place(node=last), key.name)
            return (last, key), _NEGOTIATED
        if isinstance(what, int):
            worker = operation.workers.get(what)
            if worker is None or worker.submitted is None:
                return self._not_known(walk), _LAST
            walk.back_to(worker.submitted, "hand-over", Place(rank=what), key.name)
            return what, _LAST
        return (node, key), stage

    def _latest(
        self, operation: Operation, part: DaemonPart, node: int, stage: int, walk: _Walk
    ) -> tuple[int, int, Chunk | _Kernel | Span | int | None] | None:
        """Returns the last event before the moment that the walk is at: its time, its stage, and its kind."""
        found: list[tuple[int, int, Chunk | _Kernel | Span | int | None]] = []
        for name, spans in part.kernels.items():
            for begin, end in spans:
                if begin < walk.time:
                    found.append((min(end, walk.time), _DATA, _Kernel(begin, name)))
        for chunk in operation.chunks:
            if chunk.target == node and chunk.received is not None and chunk.sent is not None:
                found.append((chunk.received, _DATA, chunk))
        if part.run_begin is not None:
            found.append((part.run_begin, _RUN, None))
        found += [(span.end, _NEGOTIATED, span) for span in part.negotiations]
        ready = part.ready
        if operation.asynchronous and walk.waiting[0] in ready:  # homes do not wait for the others
            ready = {walk.waiting[0]: ready[walk.waiting[0]]}
        found += [(time, _READY, rank) for rank, time in ready.items()]
        found = [each for each in found if each[0] < walk.time or (each[0] == walk.time and each[1] < stage)]
        last = max(found, key=lambda each: each[:2], default=None)
        returned = self._returned(operation, node, walk) if stage == _END else None
        if returned is not None and (last is None or returned[0] > last[0]):
            return returned
        return last

    def _returned(self, operation: Operation, node: int, walk: _Walk) -> tuple[int, int, Chunk] | None:
        """Returns the chunk that an operation waits for in its end, with when its peer had taken it: until the peer
        says so, the chunk's memory is lent to the connection.

        Clocks may be wrong: that much later is what the time counts as, so that it is later than all that was here.
        """
        times = [
            (chunk.taken + self._error[node] + self._error[chunk.target], _DATA, chunk)
            for chunk in operation.chunks
            if chunk.source == node and chunk.taken is not None and chunk.target in self._error
        ]
        return max((each for each in times if each[0] < walk.time), key=lambda each: each[:2], default=None)

    def _alone(self, chunk: Chunk) -> int:
        """Returns when a chunk was the first of those on its link: until then the ones before it were carried."""
        assert chunk.sent is not None
        assert chunk.received is not None
        link = chunk.source, chunk.target
        if link not in self._arrivals:
            rows = self._operations.daemons[chunk.target].select(Kind.RECEIVED)[1]
            self._arrivals[link] = np.sort(rows["time"][rows["peer"] == chunk.source])
        before = int(np.searchsorted(self._arrivals[link], chunk.received)) - 1
        return chunk.sent if before < 0 else max(chunk.sent, int(self._arrivals[link][before]))


@dataclass(frozen=True)
class _Kernel:
    begin: int
    name: str


def _pieces(worker: Process, every: Operations) -> _Pieces:
    """Returns all of a worker's time, from its first record to its last."""
    of, begin, end = every.workers[worker.rank].spans(Kind.WAIT_BEGIN, Kind.WAIT_END)
    place = np.empty(len(every), np.int64)
    place[every.order] = np.arange(len(every))
    order = np.lexsort((place[of], end, begin))
    begin, end, of = begin[order], end[order], of[order]
    reached = np.maximum.accumulate(end)
    begin[1:] = np.maximum(begin[1:], reached[:-1])  # waits of a script follow each other
    kept = begin < end
    columns = [(begin[kept], end[kept], np.full(int(kept.sum()), -1), of[kept])]
    taken = union_of(begin, end)
    times = worker.records["time"]
    phases = {name: phase_columns(worker, *kinds) for name, kinds in SCRIPT.items()}
    work: Mapping[str, tuple[Ints, Ints]] = {
        "apply": pair_columns(worker, Kind.APPLY_BEGIN, Kind.APPLY_END),
        "copy": pair_columns(worker, Kind.COPY_BEGIN, Kind.COPY_END),
        "step": phases["step()"],
        "backward": phases["backward"],
        "forward": phases["forward"],
        "other": (times[:1], times[-1:]),
    }
    for number, activity in enumerate(_OF_WORKERS):
        free = without(union_of(*work[activity]), taken)
        columns.append((free.begin, free.end, np.full(len(free.begin), number), np.full(len(free.begin), -1)))
        taken = joined([(taken.begin, taken.end), (free.begin, free.end)])
    begin, end, activities, of = (np.concatenate([each[column] for each in columns]) for column in range(4))
    order = np.argsort(begin, kind="stable")
    return _Pieces(begin[order], end[order], activities[order], of[order])


def document(trace: JobTrace, paths: Sequence[Path], others: Sequence[Path] = ()) -> dict[str, object]:
    """Returns what `--json` shows; all times in ns. `others`: steps that are compared with them."""
    compared = beside(paths, others) if paths and others else ()
    return {
        "job": trace.job,
        "totals": [
            {"activity": activity, "place": place.named(trace), "ns": ns}
            for (activity, place), ns in totals(paths).items()
        ],
        "steps": [
            {
                "number": path.step.number,
                "rank": path.step.rank,
                "begin": path.step.begin,
                "ns": path.step.ns,
                "path": [
                    {
                        "begin": s.begin,
                        "ns": s.ns,
                        "activity": s.activity,
                        "place": s.place.named(trace),
                        "what": s.what,
                    }
                    for s in path.segments
                ],
            }
            for path in paths
        ],
        "beside": [
            {
                "activity": row.activity,
                "place": row.place.named(trace),
                "one": row.one,
                "other": row.other,
                "difference": row.difference,
            }
            for row in compared
        ],
        "problems": list(trace.problems),
    }
