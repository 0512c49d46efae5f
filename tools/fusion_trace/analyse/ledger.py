"""A table of the work of every rank, daemon and link in each step, from which `stragglers` reckons.

A synchronous job is a chain of operations. Rank r gives its part of operation o after some work of its own; when the
last rank has given its part, and what was given before is through, communication takes a while; then each rank that
waits for the result goes on. So every time in the trace is the sum of a few durations, which are the ledger:

| duration | from | to |
| --- | --- | --- |
| own | what a rank did last | its next event: it hands a part over, begins to wait, ends a step |
| lag | the daemon's answer, or the begin of a wait that came after it | the script goes on |
| took | the last part of an operation is there, and those before it are through | the last rank is answered |

`counterfactual.replay` adds them up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind
from fusion_trace.analyse.columns_of_spans import Busy, Carried, Floats, Ints, covered, paired
from fusion_trace.read.choice import StepRange
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.ring_reader import Records

SUBMIT, WAIT, END = 0, 1, 2
PARTS_OF_DAEMON = ("hand-over", "start", "kernels", "taking", "answer")
_LOOK_BACK = 8  # operations before one, among which the last one that was through before it is sought
_KERNELS = (
    (Kind.REDUCE_BEGIN, Kind.REDUCE_END),
    (Kind.ENCODE_BEGIN, Kind.ENCODE_END),
    (Kind.DECODE_BEGIN, Kind.DECODE_END),
)


@dataclass(frozen=True, eq=False)
class Ledger:
    """Durations of a job's steps, ns as float64.

    Attributes:
        ranks, node_of: the ranks, by column; nodes by rank.
        steps: numbers, of shape (s,); `begin`, `end`: when the first rank begins each, and the last one ends it.
        kind, about: of the events that ranks have in common, in order, of shape (e,): `SUBMIT` and `WAIT` of an
            operation, and `END` of a step (-1: not one of `steps`).
        step_of: the step in which an event is, by place in `steps`, of shape (e, r); -1: in none.
        own, lag: of shape (e, r); 0 where a rank has no such event. `there`: whether it has.
        spread: of shape (o, r), from the last rank's answer back to this one's; -inf: not a member.
        before: the operation that has to be through before one, of shape (o,); -1: none. Operations are in order of
            when their last part came.
        took: of shape (o,). coupled: ranks wait for each other there, shape (o,).
        start: when each rank begins, shape (r,).
        last, through: when the last part of an operation came, and the last rank was answered; shape (o,).
        clock, plan, name: what identifies an operation in records.
        phases: by name, of shape (s, r): the own time of forward, backward, and of standing still with an answer there.
    """

    ranks: tuple[int, ...]
    node_of: Mapping[int, int]
    steps: Ints
    begin: Floats
    end: Floats
    kind: NDArray[np.int8]
    about: Ints
    step_of: Ints
    own: Floats
    lag: Floats
    there: NDArray[np.bool_]
    spread: Floats
    before: Ints
    took: Floats
    coupled: NDArray[np.bool_]
    start: Floats
    last: Floats
    through: Floats
    key: NDArray[np.uint64]
    origin: int
    phases: Mapping[str, Floats]

    @property
    def lengths(self) -> Floats:
        """Lengths of the steps, from the end of the one before; shape (s,)."""
        return self.end - self.begin

    def step_of_operation(self) -> Ints:
        """Returns the place in `steps` of each operation, by its first member; -1: in none."""
        found = np.full(len(self.took), -1)
        for event in np.flatnonzero(self.kind == SUBMIT)[::-1]:
            of = self.step_of[event][self.there[event]]
            found[self.about[event]] = of[0] if len(of) else -1
        return found


def keys_of(records: Records) -> NDArray[np.uint64]:
    """Returns what identifies the operation of each record: name, plan and clock in one number."""
    name, plan, clock = (records[field].astype(np.uint64) for field in ("name", "plan", "clock"))
    keys: NDArray[np.uint64] = (name << np.uint64(44)) | ((plan & np.uint64(0xFFF)) << np.uint64(32))
    keys |= clock & np.uint64(0xFFFFFFFF)
    return keys


def ledger(trace: JobTrace, chosen: StepRange) -> Ledger | None:
    """Returns the ledger of the chosen steps that all ranks have whole; None if there are none, or no rank waits for
    another."""
    ends = {rank: _ends(worker) for rank, worker in sorted(trace.workers.items())}
    ends = {rank: its for rank, its in ends.items() if len(its[0])}
    if not ends:
        return None
    numbers = None
    for clocks, _, _ in ends.values():
        numbers = clocks if numbers is None else np.intersect1d(numbers, clocks)
    assert numbers is not None
    numbers = np.array([number for number in numbers.tolist() if number in chosen], np.int64)
    if not len(numbers):
        return None
    return _Maker(trace, tuple(ends), numbers, ends).make()


def _ends(worker: Process) -> tuple[Ints, Ints, Ints]:
    """Returns the numbers, begins and ends of a worker's whole steps."""
    found = worker.of(Kind.STEP_END)
    clock, time = found["clock"].astype(np.int64), found["time"]
    whole = (clock[1:] == clock[:-1] + 1) & (time[1:] > time[:-1]) if len(clock) > 1 else np.zeros(0, bool)
    return clock[1:][whole], time[:-1][whole], time[1:][whole]


class _Maker:
    """Makes a ledger."""

    def __init__(
        self, trace: JobTrace, ranks: tuple[int, ...], numbers: Ints, ends: Mapping[int, tuple[Ints, Ints, Ints]]
    ) -> None:
        self.trace, self.ranks, self.numbers = trace, ranks, numbers
        places = {rank: np.searchsorted(ends[rank][0], numbers) for rank in ranks}
        self.step_begin = np.stack([ends[rank][1][places[rank]] for rank in ranks], 1)
        self.step_end = np.stack([ends[rank][2][places[rank]] for rank in ranks], 1)
        self.origin = int(self.step_begin[0].min())
        self.step_begin = (self.step_begin - self.origin).astype(float)
        self.step_end = (self.step_end - self.origin).astype(float)
        self.records = {}
        for column, rank in enumerate(ranks):
            records = trace.workers[rank].of(Kind.SUBMITTED, Kind.DONE, Kind.WAIT_BEGIN, Kind.WAIT_END)
            time = records["time"] - self.origin
            inside = (time > self.step_begin[0, column]) & (time <= self.step_end[-1, column]) & (records["name"] > 0)
            self.records[rank] = records[inside]

    def make(self) -> Ledger | None:
        submitted = {rank: records[records["kind"] == Kind.SUBMITTED] for rank, records in self.records.items()}
        self.key = np.unique(np.concatenate([keys_of(records) for records in submitted.values()]))
        if not len(self.key):
            return None
        shape = len(self.key), len(self.ranks)
        sub, wait_begin, wait_end = (np.full(shape, np.nan) for _ in range(3))
        answered = np.full(shape, np.nan)
        for column, rank in enumerate(self.ranks):
            self._first(sub[:, column], submitted[rank])
            self._waits(rank, wait_begin[:, column], wait_end[:, column])
            self._answers(rank, answered[:, column])
        known = ~np.isnan(sub) & ~np.isnan(answered)
        whole = (known | np.isnan(sub)).all(1) & known.any(1)
        sub, wait_begin, wait_end, answered = (each[whole] for each in (sub, wait_begin, wait_end, answered))
        self.key = self.key[whole]
        if not len(self.key):
            return None
        order = np.lexsort((np.nanmax(answered, 1), np.nanmax(sub, 1)))
        sub, wait_begin, wait_end, answered = (each[order] for each in (sub, wait_begin, wait_end, answered))
        self.key = self.key[order]
        return self._ledger(sub, wait_begin, wait_end, answered)

    # --- times of operations, by rank ---------------------------------------------------------------------------------

    def _place(self, records: Records) -> tuple[Ints, Floats]:
        """Returns the operations that records are about, and their times; those of no known operation are left out."""
        keys = keys_of(records)
        place = np.minimum(np.searchsorted(self.key, keys), len(self.key) - 1)
        known = self.key[place] == keys
        return place[known].astype(np.int64), (records["time"][known] - self.origin).astype(float)

    def _first(self, into: Floats, records: Records) -> None:
        place, time = self._place(records)
        into[place[::-1]] = time[::-1]

    def _waits(self, rank: int, begin: Floats, end: Floats) -> None:
        """Notes a rank's waits: the last one for an operation counts, since that one ended with the answer."""
        records = self.records[rank]
        records = records[np.isin(records["kind"], (Kind.WAIT_BEGIN, Kind.WAIT_END))]
        keys = keys_of(records)
        opens = np.flatnonzero(
            (records["kind"][:-1] == Kind.WAIT_BEGIN) & (records["kind"][1:] == Kind.WAIT_END) & (keys[:-1] == keys[1:])
        )
        place = np.minimum(np.searchsorted(self.key, keys[opens]), len(self.key) - 1)
        known = self.key[place] == keys[opens]
        begin[place[known]] = records["time"][opens[known]] - self.origin
        end[place[known]] = records["time"][opens[known] + 1] - self.origin

    def _answers(self, rank: int, into: Floats) -> None:
        """Notes when a rank was answered, by its daemon, or else by itself."""
        records = self.records[rank]
        self._first(into, records[records["kind"] == Kind.DONE])
        daemon = self.trace.daemons.get(self.trace.node_of[rank])
        if daemon is not None:
            answers = daemon.of(Kind.ANSWERED)
            mine = np.full(len(into), np.nan)
            self._first(mine, answers[answers["peer"] == rank])
            sooner = ~np.isnan(mine) & ((mine <= into) | np.isnan(into))
            into[sooner] = mine[sooner]

    # --- durations ----------------------------------------------------------------------------------------------------

    def _ledger(self, sub: Floats, wait_begin: Floats, wait_end: Floats, answered: Floats) -> Ledger:
        member = ~np.isnan(sub)
        last = np.nanmax(sub, 1)
        coupled = (member.sum(1) > 1) & (np.nanmin(answered, 1) >= last - self._clock_error())
        last = np.where(coupled, last, np.nanmin(sub, 1))
        through = np.maximum(np.nanmax(answered, 1), last)
        before = _before(last, through, coupled)
        begun = np.maximum(last, np.where(before >= 0, through[before], -np.inf))
        kind, about, time, there = self._events(sub, wait_end)
        own, lag = np.zeros(time.shape), np.zeros(time.shape)
        at = self.step_begin[0].copy()
        step = np.full(time.shape, -1)
        waited = wait_begin.copy()
        for column in range(len(self.ranks)):
            its = np.flatnonzero(there[:, column])
            times = time[its, column]
            previous = np.r_[at[column], times[:-1]]
            is_wait = kind[its] == WAIT
            of = about[its]
            opened = np.where(is_wait, waited[np.where(is_wait, of, 0), column], times)
            own[its, column] = opened - previous
            ready = np.where(is_wait, answered[np.where(is_wait, of, 0), column], -np.inf)
            lag[its, column] = np.where(is_wait, times - np.maximum(opened, ready), 0)
            place = np.searchsorted(self.step_end[:, column], times)
            inside = place < len(self.numbers)
            inside[inside] &= times[inside] > self.step_begin[place[inside], column]
            step[its, column] = np.where(inside, place, -1)
        return Ledger(
            ranks=self.ranks, node_of=self.trace.node_of, steps=self.numbers, begin=self.step_begin.min(1),
            end=self.step_end.max(1), kind=kind, about=about, step_of=step, own=own, lag=lag, there=there,
            spread=np.where(member, answered - through[:, None], -np.inf), before=before, took=through - begun,
            coupled=coupled, start=at, last=last, through=through, key=self.key, origin=self.origin,
            phases=self._phases(wait_begin, wait_end, answered),
        )  # fmt: skip

    def _clock_error(self) -> float:
        errors = [offset.error for offset in self.trace.offsets.values()]
        return float(max(0, *errors, 1000)) * 2

    def _events(self, sub: Floats, wait_end: Floats) -> tuple[NDArray[np.int8], Ints, Floats, NDArray[np.bool_]]:
        """Returns the events that ranks have in common, in order.

        That of the first rank to come to each: who has no such event, because the answer was there already, was later.
        """
        waited = ~np.isnan(wait_end).all(1)
        time = np.concatenate([sub, wait_end[waited], self.step_end])
        kind = np.repeat(np.array([SUBMIT, WAIT, END], np.int8), [len(sub), int(waited.sum()), len(self.numbers)])
        about = np.concatenate([np.arange(len(sub)), np.flatnonzero(waited), np.arange(len(self.numbers))])
        order = np.lexsort((kind, np.nanmin(time, 1)))
        time = time[order]
        return kind[order], about[order], time, ~np.isnan(time)

    def _phases(self, wait_begin: Floats, wait_end: Floats, answered: Floats) -> dict[str, Floats]:
        """Returns the own time of forward and backward passes, and of waits after the answer, by step and rank."""
        shape = len(self.numbers), len(self.ranks)
        found = {name: np.zeros(shape) for name in ("forward", "backward", "still")}
        for column, rank in enumerate(self.ranks):
            known = ~np.isnan(wait_end[:, column])
            begin, end = wait_begin[known, column], wait_end[known, column]
            waits = Busy(begin, end)
            ends = self.step_end[:, column].astype(float)
            for name, kinds in (
                ("forward", (Kind.FORWARD_BEGIN, Kind.FORWARD_END)),
                ("backward", (Kind.BACKWARD_BEGIN, Kind.BACKWARD_END)),
            ):
                opened, closed = _phases_of(self.trace.workers[rank], *kinds, self.origin)
                _add(found[name][:, column], ends, opened, closed - opened - waits.within(opened, closed))
            still = end - np.maximum(begin, answered[known, column])
            _add(found["still"][:, column], ends, begin, still)
        return found


def _add(into: Floats, ends: Floats, at: Floats, values: Floats) -> None:
    """Adds values to the steps in which they are."""
    place = np.searchsorted(ends, at)
    inside = (place < len(ends)) & (at >= 0)
    into += np.bincount(place[inside], values[inside], len(into))


def _phases_of(worker: Process, begin: Kind, end: Kind, origin: int) -> tuple[Floats, Floats]:
    """Returns the begins and ends of a worker's phases: where a begin follows a begin, the first one counts."""
    records = worker.of(begin, end)
    opens = records["kind"] == begin
    closing = np.flatnonzero(~opens & np.r_[False, opens[:-1]]) if len(opens) else np.zeros(0, int)
    first = np.flatnonzero(opens & np.r_[True, ~opens[:-1]]) if len(opens) else np.zeros(0, int)
    count = min(len(first), len(closing))
    time = (records["time"] - origin).astype(float)
    return time[first[:count]], time[closing[:count]]


def _before(last: Floats, through: Floats, coupled: NDArray[np.bool_]) -> Ints:
    """Returns, of each operation, the one that was through last among those given before it; -1: there is none."""
    count = len(last)
    before, best = np.full(count, -1), np.full(count, -np.inf)
    for back in range(1, min(_LOOK_BACK, count - 1) + 1):
        earlier = np.arange(count) - back
        fits = (earlier >= 0) & coupled & coupled[np.maximum(earlier, 0)]
        done = through[np.maximum(earlier, 0)]
        fits &= (done <= through) & (done > best)
        before[fits], best[fits] = earlier[fits], done[fits]
    return before


# --- what daemons and links did in the time that communication took ---------------------------------------------------


@dataclass(frozen=True, eq=False)
class Resources:
    """Time of nodes' daemons, negotiations and links in each operation, while the operation was waited for; ns.

    Attributes:
        nodes, links: by column; a link is (source, target).
        daemon, negotiation: of shape (o, nodes). wire, nbytes: of shape (o, links).
        work: of a daemon, what it did for the operation at any time, shape (o, nodes): who is last does all of it while
            the others wait, and is not slower for that.
        rate: ns a byte takes on a link at any time of a step, shape (s, links); NaN: it carried nothing.
        error: by how much a span on each link may be wrong because of clocks, times the spans, shape (o, links).
        parts: of a daemon's time, by name, shape (o, nodes); they may overlap.
    """

    nodes: tuple[int, ...]
    links: tuple[tuple[int, int], ...]
    daemon: Floats
    work: Floats
    negotiation: Floats
    wire: Floats
    nbytes: Floats
    rate: Floats
    error: Floats
    parts: Mapping[str, Floats]


def resources(trace: JobTrace, book: Ledger) -> Resources:
    """Returns what daemons and links did in the time that the ledger's operations took."""
    return _Resources(trace, book).make()


class _Resources:
    """Collects spans of daemons and links, each within the time in which its operation was waited for."""

    def __init__(self, trace: JobTrace, book: Ledger) -> None:
        self.trace, self.book = trace, book
        self.begin = book.through - book.took
        self.nodes = tuple(sorted(trace.daemons))
        order = np.argsort(book.key)
        self.sorted, self.order = book.key[order], order
        self.parts: dict[str, list[tuple[Ints, Floats, Floats]]] = {name: [] for name in PARTS_OF_DAEMON}

    def place(self, records: Records) -> tuple[Ints, Floats, Records]:
        """Returns the operations, times and records of those that are about one of the ledger's."""
        keys = keys_of(records)
        place = np.minimum(np.searchsorted(self.sorted, keys), len(self.sorted) - 1)
        known = self.sorted[place] == keys
        records = records[known]
        return self.order[place[known]].astype(np.int64), (records["time"] - self.book.origin).astype(float), records

    def clipped(self, of: Ints, begin: Floats, end: Floats) -> tuple[Ints, Floats, Floats]:
        return of, np.maximum(begin, self.begin[of]), np.minimum(end, self.book.through[of])

    def make(self) -> Resources:
        count, width = len(self.book.took), len(self.nodes)
        parts = {name: np.zeros((count, width)) for name in PARTS_OF_DAEMON}
        daemon, work, negotiation = (np.zeros((count, width)) for _ in range(3))
        links, wire, nbytes, rate, error, waits = self._links()
        for column, node in enumerate(self.nodes):
            spans, asked = self._of_daemon(node)
            spans["taking"] = waits.get(node, [])
            whole = []
            for name, its in spans.items():
                whole.append(_joined(its))
                parts[name][:, column] = covered(*whole[-1], count)
            every = [self.clipped(*each) for each in whole]
            daemon[:, column] = covered(*_joined(every), count)
            work[:, column] = covered(*_joined(whole), count)
            negotiation[:, column] = covered(*self.clipped(*asked), count)
        return Resources(self.nodes, links, daemon, work, negotiation, wire, nbytes, rate, error, parts)

    def _of_daemon(self, node: int) -> tuple[dict[str, list[tuple[Ints, Floats, Floats]]], tuple[Ints, Floats, Floats]]:
        """Returns the spans of a daemon's own work, by part, and of its questions to the coordinator."""
        daemon, book = self.trace.daemons[node], self.book
        count = len(book.took)
        of, ready, records = self.place(daemon.of(Kind.READY))
        ranks = {rank: column for column, rank in enumerate(book.ranks)}
        column = np.array([ranks.get(int(peer), -1) for peer in records["peer"].tolist()], np.int64)
        of, ready, column = of[column >= 0], ready[column >= 0], column[column >= 0]
        submitted = self._submissions()[of, column]
        found: dict[str, list[tuple[Ints, Floats, Floats]]] = {"hand-over": [(of, submitted, ready)]}
        all_ready = np.full(count, -np.inf)
        np.maximum.at(all_ready, of, ready)
        ask, asked, _ = self.place(daemon.of(Kind.NEGOTIATE_BEGIN))
        tell, told, _ = self.place(daemon.of(Kind.NEGOTIATE_END))
        questions = paired(ask, asked, tell, told)
        agreed = all_ready.copy()
        np.maximum.at(agreed, questions[0], questions[2])
        run, begun, _ = self.place(daemon.of(Kind.RUN_BEGIN))
        waited = np.isfinite(agreed[run])
        found["start"] = [(run[waited], agreed[run][waited], begun[waited])]
        found["kernels"] = []
        for opens, closes in _KERNELS:
            a, b = self.place(daemon.of(opens)), self.place(daemon.of(closes))
            found["kernels"].append(paired(a[0], a[1], b[0], b[1]))
        over, done, _ = self.place(daemon.of(Kind.RUN_END))
        ended = np.full(count, np.nan)
        ended[over[::-1]] = done[::-1]
        of, answered, _ = self.place(daemon.of(Kind.ANSWERED))
        known = ~np.isnan(ended[of])
        found["answer"] = [(of[known], ended[of][known], answered[known])]
        return found, questions

    def _submissions(self) -> Floats:
        """Returns when each rank handed each operation over; shape (o, r)."""
        if not hasattr(self, "_submitted"):
            found = np.full(self.book.spread.shape, np.nan)
            for column, rank in enumerate(self.book.ranks):
                of, time, _ = self.place(self.trace.workers[rank].of(Kind.SUBMITTED))
                found[of[::-1], column] = time[::-1]
            self._submitted = found
        return self._submitted

    def _links(
        self,
    ) -> tuple[
        tuple[tuple[int, int], ...],
        Floats,
        Floats,
        Floats,
        Floats,
        dict[int, list[tuple[Ints, Floats, Floats]]],
    ]:
        """Returns links, their busy time, bytes, rates and errors by operation; and when chunks that have come wait to
        be taken, by node."""
        count = len(self.book.took)
        sides, begun = {}, {}
        for node, daemon in self.trace.daemons.items():
            sides[node] = {
                kind: self.place(daemon.of(kind)) for kind in (Kind.QUEUED, Kind.SENT, Kind.RECEIVED, Kind.TAKEN)
            }
            begun[node] = np.full(count, np.inf)
            of, time, _ = self.place(daemon.of(Kind.RUN_BEGIN))
            begun[node][of[::-1]] = time[::-1]
        waits: dict[int, list[tuple[Ints, Floats, Floats]]] = {}
        columns, links = [], []
        for source, out in sides.items():
            for target in np.unique(out[Kind.SENT][2]["peer"]).tolist():
                if target not in sides:
                    continue
                sent = _of_peer(out[Kind.SENT], target)
                received = _of_peer(sides[target][Kind.RECEIVED], source)
                of, begin, end, nbytes = _flights(sent, received)
                if not len(of):
                    continue
                links.append((source, target))
                # A link that carries another operation's chunks meanwhile is as busy; what it carried before the last
                # rank was there does not count.
                end = np.maximum(begin, end)
                _, waits_from, waits_to = _turns(_of_peer(out[Kind.QUEUED], target), sent)
                # Who waits for its turn waits for what is under way, and for word that it has come.
                busy = Busy(np.concatenate([begin, waits_from]), np.concatenate([end, waits_to]))
                at = self.begin, self.book.through
                spans = np.searchsorted(np.sort(begin), at[1]) - np.searchsorted(np.sort(end), at[0])
                weight = Carried(begin, end, nbytes)
                in_step = weight.within(self.book.begin, self.book.end)
                rate = np.where(
                    in_step > 0, busy.within(self.book.begin, self.book.end) / np.maximum(in_step, 1), np.nan
                )
                error = np.maximum(spans, 0) * self._error(source, target)
                columns.append((busy.within(*at), weight.within(*at), rate, error))
                taken = _of_peer(sides[target][Kind.TAKEN], source)
                of, begin, end = _by_number_or_order(received, taken)
                # Before its own ranks are there, a daemon cannot take a chunk.
                waits.setdefault(target, []).append((of, np.maximum(begin, begun[target][of]), end))
        wire, nbytes, rate, errors = (
            np.stack([column[place] for column in columns], 1) if columns else np.zeros((count, 0))
            for place in range(4)
        )
        return tuple(links), wire, nbytes, rate, errors, waits

    def _error(self, source: int, target: int) -> float:
        offsets = self.trace.offsets
        return float(sum(max(0, offsets[node].error) for node in (source, target) if node in offsets))


_Side = tuple[Ints, Floats, Records]


def _joined(spans: list[tuple[Ints, Floats, Floats]]) -> tuple[Ints, Floats, Floats]:
    if not spans:
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    of, begin, end = zip(*spans, strict=True)
    return np.concatenate(of), np.concatenate(begin), np.concatenate(end)


def _of_peer(side: _Side, peer: int) -> _Side:
    mine = side[2]["peer"] == peer
    return side[0][mine], side[1][mine], side[2][mine]


def _turns(queued: _Side, sent: _Side) -> tuple[Ints, Floats, Floats]:
    """Returns when chunks waited for their turn: operation, begin, end.

    Nothing overtakes, so that a chunk that was sent while none waited has not waited itself.
    """
    turn = queued[2]["extra"] == 1
    of = np.concatenate([queued[0][turn], sent[0]])
    time = np.concatenate([queued[1][turn], sent[1]])
    change = np.repeat([1, -1], [int(turn.sum()), len(sent[0])])
    order = np.lexsort((-change, time, of))
    of, time, change = of[order], time[order], change[order]
    if not len(of):
        return of, time, time
    new = np.r_[True, of[1:] != of[:-1]]
    walked = np.cumsum(change)
    base = np.maximum.accumulate(np.where(new, np.arange(len(of)), 0))
    walked = walked - (walked - change)[base]
    far = 2 * len(of) * np.cumsum(new)  # each operation's walk lies below the one before
    lowest = np.minimum.accumulate(np.minimum(walked, 0) - far)
    earlier = np.where(new, -far, np.r_[0, lowest[:-1]])
    waited = (change < 0) & (lowest == earlier)
    return paired(of[change > 0], time[change > 0], of[waited], time[waited])


def _by_number_or_order(first: _Side, second: _Side) -> tuple[Ints, Floats, Floats]:
    """Pairs the records of chunks at two moments: by their numbers on the link, or, without one, by their order within
    an operation."""
    left, right = first[2]["extra"].astype(np.int64), second[2]["extra"].astype(np.int64)
    if (
        len(left)
        and len(right)
        and left.all()
        and right.all()
        and len(np.unique(left)) == len(left)
        and (len(np.unique(right)) == len(right))
    ):
        _, a, b = np.intersect1d(left, right, assume_unique=True, return_indices=True)
        return first[0][a], first[1][a], second[1][b]
    return paired(first[0], first[1], second[0], second[1])


def _flights(sent: _Side, received: _Side) -> tuple[Ints, Floats, Floats, Floats]:
    """Returns, of the chunks of a link that both ends have seen: operation, begin, end, bytes."""
    numbered = sent[2]["extra"] > 0, received[2]["extra"] > 0
    found = []
    for with_number in (True, False):
        a, b = (numbered[side] == with_number for side in (0, 1))
        left, right = tuple(each[a] for each in sent), tuple(each[b] for each in received)
        if with_number:
            _, i, j = np.intersect1d(left[2]["extra"], right[2]["extra"], return_indices=True)
            found.append((left[0][i], left[1][i], right[1][j], left[2]["value"][i].astype(float)))
        elif len(left[0]) and len(right[0]):
            of, begin, end = paired(left[0], left[1], right[0], right[1])
            mean = np.bincount(left[0], left[2]["value"], len(right[0]) and int(left[0].max()) + 1)
            many = np.maximum(np.bincount(left[0]), 1)
            found.append((of, begin, end, (mean / many)[of]))
    joined = [np.concatenate([each[place] for each in found]) for place in range(4)]
    return joined[0], joined[1], joined[2], joined[3]
