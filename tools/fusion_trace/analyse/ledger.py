"""A table of the work of every rank, daemon and link in each step, from which `stragglers` reckons.

A synchronous job is a chain of operations. Rank r gives its part of operation o after some work of its own; when the
last rank has given its part, and earlier ones are through, communication takes a while; then each rank that
waits for the result goes on. So every time in the trace is the sum of a few durations, which are the ledger:

| duration | from | to |
| --- | --- | --- |
| own | what a rank did last | its next event: it hands a part over, begins to wait, ends a step |
| lag | the daemon's answer, or the begin of a wait that came after it | the script goes on |
| took | the last part of an operation is there, and those before it are through | the last rank is answered |

`stragglers` adds them up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import Records
from fusion_trace.read.choice import StepRange
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import SCRIPT
from fusion_trace.read.span_columns import Floats, Ints, phase_columns, union_of

SUBMIT, WAIT, END = 0, 1, 2
_LOOK_BACK = 8  # operations before one, among which the last one that was through before it is sought


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
        clock, plan, name: identify an operation in records.
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
    """Returns the identity of each record's operation: name, plan and clock in one number."""
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

        That of the first rank to come to each: a rank without such an event, because the answer was there already, was
        later.
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
            waits = union_of(begin, end)
            ends = self.step_end[:, column].astype(float)
            for name in ("forward", "backward"):
                opened, closed = (
                    (times - self.origin).astype(float)
                    for times in phase_columns(self.trace.workers[rank], *SCRIPT[name])
                )
                _add(found[name][:, column], ends, opened, closed - opened - waits.within(opened, closed))
            still = end - np.maximum(begin, answered[known, column])
            _add(found["still"][:, column], ends, begin, still)
        return found


def _add(into: Floats, ends: Floats, at: Floats, values: Floats) -> None:
    """Adds values to the steps in which they are."""
    place = np.searchsorted(ends, at)
    inside = (place < len(ends)) & (at >= 0)
    into += np.bincount(place[inside], values[inside], len(into))


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
