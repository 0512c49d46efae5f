"""Turns records into the lines of Horovod's timeline. No I/O.

A tensor is a process of the trace, so that each has a row of its own: NEGOTIATE_<OP> lasts from the first rank's part
to the moment when all ranks have agreed, with a mark for each rank; <OP> lasts until the results are there, with
activities in it:

    QUEUE           the local part waits for a thread of the kernel pool
    SHM_<OP>        the parts of the node's workers are combined through shared memory
    WAIT_FOR_DATA   no other node has sent anything yet
    ZMQ_<OP>        data goes between nodes

The tensors of a bucket have the same lines, as fused ones have in Horovod. What goes to homes is one PUSH_PULL of a
rank, without negotiation. Copies into and out of the fusion buffer are the workers' (they are in their rings, see
docs/tracing.md). There is no cycle; CYCLE_START marks the beginning of a *step*: a plan's bucket comes with a clock
that no bucket of that plan has had, or, before there is a plan, a tensor with a clock that none has had.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import Event, Gap
from fusiond.core.tracing import PUSH_PULL

_MAX_EARLY = 1024  # operations of which only other nodes have said anything
_ACTIVITIES = ("QUEUE", "SHM_", "WAIT_FOR_DATA", "ZMQ_")  # in order; after _ comes the OP
_QUEUE, _SHM, _WAIT, _ZMQ = range(len(_ACTIVITIES))
_BEGINS = {Kind.REDUCE_BEGIN: _SHM, Kind.SENT: _WAIT, Kind.RECEIVED: _ZMQ}
_quoted = msgspec.json.Encoder().encode
_Key: TypeAlias = tuple[str, int, int]  # name, plan, clock


class Order(msgspec.Struct, frozen=True):
    """Order to the process that writes a timeline.

    Attributes:
        path: of the file; absolute.
        first: number of a record before the one that begins this timeline.
        ranks: whose view of it gets a file of its own (its number before the path's suffix); empty: one file, with
            what happens on this node.
        nodes: the ranks of each node.
        mark_cycles: whether the beginning of each step is marked.
        first_step, last_step: steps that are recorded, counted from the start of the timeline, from 0; the last may be
            -1: no end.
        max_bytes: size at which a file is kept as .1, and begun anew; 0: it may grow.
    """

    path: str
    first: int = 0
    ranks: tuple[int, ...] = ()
    nodes: tuple[tuple[int, ...], ...] = ()
    mark_cycles: bool = False
    first_step: int = 0
    last_step: int = -1
    max_bytes: int = 0


@dataclass(eq=False)
class _Plan:
    """A plan: its operation, what goes after the labels of its rows, and its tensors (dtype and shape) by bucket."""

    op: str
    where: str
    buckets: defaultdict[int, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))


@dataclass(eq=False)
class _Row:
    """A process of the trace. `open`: what has begun on it, the outermost first: its lines."""

    pid: int
    label: str
    busy: bool = False
    told: bool = False
    open: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class _Under:
    """An operation under way.

    Attributes:
        rows: of its tensors.
        closing: the end of the line that closes each of them.
        ready: ranks that have a mark.
        activity: which of `_ACTIVITIES`; -1: none yet.
    """

    rows: list[_Row]
    closing: list[bytes]
    op: str
    ready: set[int] = field(default_factory=set)
    negotiating: bool = False
    activity: int = -1


class TimelineWriter:
    """Lines of one file.

    Args:
        order: what is recorded.
        began: when the timeline began, on the monotonic clock (ns) and the wall clock (us since 1970).
        rank: whose view it is; None: all that happens on the node.
    """

    def __init__(self, order: Order, began: tuple[int, int], rank: int | None = None) -> None:
        self._order = order
        self._began, self._epoch_us = began
        self._rank = rank
        self._plans: dict[int, _Plan] = {}
        self._clocks: dict[int, int] = {}  # the highest of each plan
        self._step = -1
        self._rows: dict[str, list[_Row]] = {}  # by label; several when a name is used several times at once
        self._pids = 0
        self._tensors: dict[str, str] = {}  # operation, dtype and shape
        self._under: dict[tuple[_Key, int], _Under] = {}  # with the rank, at homes, or -1
        self._early: OrderedDict[_Key, dict[int, int]] = OrderedDict()  # times by rank
        self._lines: list[bytes] = []

    def header(self) -> list[bytes]:
        """The first lines of a file. In one that goes on where another was full, also what is under way."""
        lines = [
            b'{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": %d}}'
            % self._epoch_us,
            b'{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}}',
        ]
        rows = [row for same in self._rows.values() for row in same]
        for row in rows:
            row.told = bool(row.open)
        return lines + [line for row in rows if row.open for line in (*_named(row), *row.open)]

    def take(self, event: Event | Gap) -> list[bytes]:
        """The lines that a record leads to."""
        self._lines = []
        if isinstance(event, Gap):
            self._lose(event)
        elif event.kind == Kind.PLAN:
            op, _, where = event.text.partition(" ")
            self._plans[event.plan] = _Plan(op, f" {where}" if where else "")
        elif event.kind == Kind.MEMBER:
            if event.plan in self._plans:
                self._plans[event.plan].buckets[event.extra].append((event.name, event.text))
        elif event.kind == Kind.TENSOR:
            self._tensors[event.name] = event.text
        else:
            self._event(event)
        return self._lines

    # --- operations ---------------------------------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        key = event.name, event.plan, event.clock
        plan = self._plans.get(event.plan)
        if plan is not None and plan.op == PUSH_PULL:
            self._at_home(event, key)
            return
        under = self._under.get((key, -1))
        if under is None:
            if event.kind == Kind.READY:
                self._first(event, key)
            elif event.kind == Kind.RECEIVED:
                self._early_data(event, key)
            elif event.kind in (Kind.RUN_END, Kind.FAILED):
                self._early.pop(key, None)
        elif event.kind == Kind.READY:
            self._mark(under, event.ns, [event.peer])
        elif event.kind == Kind.RUN_BEGIN:
            self._starts(under, event.ns)
        elif event.kind in (Kind.RUN_END, Kind.FAILED):
            self._close(under, event.ns, event.kind == Kind.FAILED)
            del self._under[key, -1]
        elif under.negotiating:
            if event.kind == Kind.RECEIVED:
                self._mark(under, event.ns, self._ranks_of(event.peer))
        else:
            self._goes_on(under, event)

    def _first(self, event: Event, key: _Key) -> None:
        """A local rank's part, before anything else that this file has about the operation."""
        if self._rank not in (None, event.peer):
            return
        early = self._early.pop(key, {}) if self._rank is None else {}
        self._count(event)
        if not self._recording:
            return
        under = self._under[key, -1] = self._open(event)
        under.negotiating = True
        self._begin(under, min((event.ns, *early.values())), f"NEGOTIATE_{under.op}")
        for rank, ns in early.items():
            self._mark(under, ns, [rank])
        self._mark(under, event.ns, [event.peer])

    def _early_data(self, event: Event, key: _Key) -> None:
        """Another node's data, before any local part: its ranks are ready."""
        early = self._early.setdefault(key, {})
        for rank in self._ranks_of(event.peer):
            early.setdefault(rank, event.ns)
        if len(self._early) > _MAX_EARLY:
            self._early.popitem(last=False)

    def _ranks_of(self, node: int) -> tuple[int, ...]:
        return self._order.nodes[node] if node < len(self._order.nodes) else ()

    def _starts(self, under: _Under, ns: int) -> None:
        """All ranks have agreed."""
        if under.negotiating:
            self._end(under, ns)
            under.negotiating = False
            self._begin(under, ns, under.op)
            self._do(under, ns, _QUEUE)

    def _goes_on(self, under: _Under, event: Event) -> None:
        if event.kind == Kind.REDUCE_END:
            return  # there may be several; the next record ends them
        activity = _BEGINS.get(Kind(event.kind), -1)
        if activity > under.activity:
            self._do(under, event.ns, activity)

    def _do(self, under: _Under, ns: int, activity: int) -> None:
        if under.activity >= 0:
            self._end(under, ns)
        under.activity = activity
        name = _ACTIVITIES[activity]
        self._begin(under, ns, name + under.op if name.endswith("_") else name)

    def _at_home(self, event: Event, key: _Key) -> None:
        if self._rank not in (None, event.peer):
            return
        if event.kind == Kind.READY and (key, event.peer) not in self._under:
            self._count(event)
            if self._recording:
                under = self._under[key, event.peer] = self._open(event)
                self._begin(under, event.ns, under.op)
        elif event.kind == Kind.ANSWERED and (key, event.peer) in self._under:
            self._close(self._under.pop((key, event.peer)), event.ns, False)

    def _close(self, under: _Under, ns: int, failed: bool) -> None:
        """It has ended, well or not."""
        while len(under.rows[0].open) > 1:
            self._end(under, ns)
        if failed:
            self._end(under, ns)
            self._begin(under, ns, "ERROR")
        for row, closing in zip(under.rows, under.closing, strict=True):
            end = b"" if failed or under.negotiating else closing
            self._lines.append(b'{"ph": "E", "ts": %d, "pid": %d%s}' % (self._us(ns), row.pid, end))
            row.open.clear()
            row.busy = False

    def _open(self, event: Event) -> _Under:
        """Its rows, found or made."""
        plan, index = self._plans.get(event.plan), event.name.removeprefix("bucket ")
        where = ""
        if plan is not None and index.isdecimal() and int(index) in plan.buckets:
            op, where = plan.op, plan.where
            where += f" [rank {event.peer}]" if op == PUSH_PULL and self._rank is None else ""
            tensors = [(f"allreduce.{name}", what) for name, what in plan.buckets[int(index)]]
        else:
            op = "MESSAGE" if event.name.startswith("message ") else "ALLREDUCE"  # a tensor that was not described
            op, _, what = self._tensors.get(event.name, op).partition(" ")
            tensors = [(event.name, what)]
        rows = [self._row(name + where) for name, _ in tensors]
        closing = []
        for _, what in tensors:
            dtype, _, shape = what.partition(" ")
            closing.append(b', "args": {"dtype": %s, "shape": %s}' % (_quoted(dtype), _quoted(shape or "[]")))
        return _Under(rows, closing, op)

    def _row(self, label: str) -> _Row:
        same = self._rows.setdefault(label, [])
        row = next((row for row in same if not row.busy), None)
        if row is None:
            self._pids += 1
            row = _Row(self._pids, label if not same else f"{label} ({len(same) + 1})")
            same.append(row)
        row.busy = True
        return row

    def _lose(self, gap: Gap) -> None:
        """The ends of what is under way may be among what was overwritten."""
        self._lines.append(self._marker(f"{gap.records} events were dropped", gap.ns))
        for under in self._under.values():
            under.closing = [b""] * len(under.rows)
            self._close(under, gap.ns, False)
        self._under.clear()
        self._early.clear()

    # --- steps --------------------------------------------------------------------------------------------------------

    def _count(self, event: Event) -> None:
        """Notes whether a step begins with an operation."""
        plan = event.plan
        if (not plan and any(self._clocks)) or event.clock <= self._clocks.get(plan, -1):
            return
        self._clocks[plan] = event.clock
        self._step += 1
        if self._order.mark_cycles and self._recording:
            self._lines.append(self._marker("CYCLE_START", event.ns))

    @property
    def _recording(self) -> bool:
        last = self._order.last_step
        return self._step >= self._order.first_step and (last < 0 or self._step <= last)

    # --- lines --------------------------------------------------------------------------------------------------------

    def _us(self, ns: int) -> int:
        return max(0, ns - self._began) // 1000

    def _begin(self, under: _Under, ns: int, name: str) -> None:
        for row in under.rows:
            if not row.told:
                self._lines.extend(_named(row))
                row.told = True
            line = b'{"ph": "B", "name": "%s", "ts": %d, "pid": %d}' % (name.encode(), self._us(ns), row.pid)
            row.open.append(line)
            self._lines.append(line)

    def _end(self, under: _Under, ns: int) -> None:
        for row in under.rows:
            row.open.pop()
            self._lines.append(b'{"ph": "E", "ts": %d, "pid": %d}' % (self._us(ns), row.pid))

    def _mark(self, under: _Under, ns: int, ranks: Iterable[int]) -> None:
        """These ranks are ready."""
        for rank in ranks if under.negotiating else ():
            if rank in under.ready:
                continue
            under.ready.add(rank)
            for row in under.rows:
                text = b'{"ph": "X", "name": "%d", "ts": %d, "pid": %d, "dur": 0}'
                self._lines.append(text % (rank, self._us(ns), row.pid))

    def _marker(self, name: str, ns: int) -> bytes:
        return b'{"ph": "i", "name": "%s", "ts": %d, "s": "g"}' % (name.encode(), self._us(ns))


def _named(row: _Row) -> tuple[bytes, bytes]:
    """The lines that say whose row it is."""
    return (
        b'{"name": "process_name", "ph": "M", "pid": %d, "args": {"name": %s}}' % (row.pid, _quoted(row.label)),
        b'{"name": "process_sort_index", "ph": "M", "pid": %d, "args": {"sort_index": %d}}' % (row.pid, row.pid),
    )
