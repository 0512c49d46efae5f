"""The chunks of all operations of a job, in columns: both ends of each link, as its two daemons have recorded them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind
from fusion_trace.read.rows import NEVER, Ints, Row, RowsOfOperations
from fusion_trace.read.span_columns import matched

_NONE = -1  # no row
_RECORDS = 1 << 18  # that are joined at once: columns are many times as large as their records


class Chunk(NamedTuple):
    """A chunk on its way from a node to another. Times in ns on the job's axis, None: not recorded.

    Attributes:
        source, target: nodes.
        number: among those of the link; 0: not counted.
        nbytes: of its payload.
        queued: it waits for credit or its turn.
        sent: it was handed to the link.
        received, taken: it came; it was consumed.
    """

    source: int
    target: int
    number: int
    nbytes: int
    queued: int | None
    sent: int | None
    received: int | None
    taken: int | None


@dataclass(frozen=True, eq=False)
class ChunkColumns:
    """Chunks by operation, and by time within it; all int64, of shape (n,).

    Attributes:
        of: the number of the operation. source, target, number, nbytes: as `Chunk` has them.
        queued, sent, received, taken: ns; `NEVER`: not recorded.
    """

    of: Ints
    source: Ints
    target: Ints
    number: Ints
    nbytes: Ints
    queued: Ints
    sent: Ints
    received: Ints
    taken: Ints

    def __len__(self) -> int:
        return len(self.of)

    def kept(self, which: NDArray[np.bool_] | Ints) -> ChunkColumns:
        """Returns some of them."""
        return ChunkColumns(*(getattr(self, field.name)[which] for field in fields(self)))

    def alone(self) -> Ints:
        """Returns when each was the first of those on its link: until then the link carried the ones before it.
        `NEVER`: only one end has seen it."""
        found = np.full(len(self), NEVER)
        its = np.flatnonzero((self.sent != NEVER) & (self.received != NEVER))
        its = its[np.lexsort((self.received[its], self.target[its], self.source[its]))]
        before = np.concatenate([[NEVER], self.received[its][:-1]])
        for end in (self.source[its], self.target[its]):
            before[1:][end[1:] != end[:-1]] = NEVER
        found[its] = np.maximum(self.sent[its], before[: len(its)])
        return found

    def chunks(self, begin: int, end: int) -> list[Chunk]:
        """Returns those in these places, as objects."""
        plain = (getattr(self, name)[begin:end].tolist() for name in ("source", "target", "number", "nbytes"))
        times = (
            [None if time == NEVER else time for time in getattr(self, name)[begin:end].tolist()]
            for name in ("queued", "sent", "received", "taken")
        )
        return [Chunk(*each) for each in zip(*plain, *times, strict=True)]


def chunk_columns(daemons: Mapping[int, RowsOfOperations], count: int) -> ChunkColumns:
    """Returns the chunks of all operations, which are so many.

    They are joined in columns where their numbers and their order leave no doubt, and else link by link (`of_link`).
    """
    records = sum(len(rows.rows) for rows in daemons.values())
    size = max(1, count * _RECORDS // max(1, records))
    parts = []
    for low in range(0, max(1, count), size):
        high = min(low + size, count)
        part = _Join({node: rows.within(low, high) for node, rows in daemons.items()}).join()
        parts.append(replace(part, of=part.of + low))
    return ChunkColumns(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(parts[0])))


@dataclass(frozen=True, eq=False)
class _Side:
    """Records of one end of each link, by node, operation and time; columns of shape (n,).

    Attributes:
        of, group: the operation; and the operation on one link, as a number.
        time, value, number: of each record; the number is `extra`. opens: it is the first of two kinds.
    """

    of: Ints
    group: Ints
    time: Ints
    value: Ints
    number: Ints
    opens: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.of)

    def rows(self, places: Ints, kinds: tuple[Kind, Kind]) -> list[Row]:
        columns = (column[places].tolist() for column in (self.opens, self.time, self.value, self.number))
        return [(kinds[not opens], time, value, number, 0) for opens, time, value, number in zip(*columns, strict=True)]


class _Join:
    """Joins both ends of all links."""

    def __init__(self, daemons: Mapping[int, RowsOfOperations]) -> None:
        most = 1 + max([*daemons, 0])
        for rows in daemons.values():
            peers = rows.field("peer", Kind.QUEUED, Kind.SENT, Kind.RECEIVED, Kind.TAKEN)
            most = max(most, int(peers.max()) + 1 if len(peers) else 0)
        self._most, self._links = most, most * most
        self._out = self._side(daemons, Kind.QUEUED, Kind.SENT, leaves=True)
        self._into = self._side(daemons, Kind.RECEIVED, Kind.TAKEN, leaves=False)
        self._groups = np.unique(np.concatenate([self._out.group, self._into.group]))

    def _side(self, daemons: Mapping[int, RowsOfOperations], first: Kind, second: Kind, leaves: bool) -> _Side:
        parts: list[tuple[Ints, ...]] = []
        for node, rows in daemons.items():
            of, records = rows.select(first, second)
            peer = records["peer"].astype(np.int64)
            link = node * self._most + peer if leaves else peer * self._most + node
            opens = records["kind"] == first
            number = records["extra"].astype(np.int64)
            parts.append((of, of * self._links + link, records["time"], records["value"], number, opens))
        if not parts:
            none = np.zeros(0, np.int64)
            return _Side(none, none, none, none, none, none.astype(bool))
        return _Side(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def join(self) -> ChunkColumns:
        out, into = self._out, self._into
        odd = np.zeros(len(self._groups), bool)
        queued = self._queued(odd)
        taken = self._taken(odd)
        came = self._came(odd, taken)
        odd_out = odd[np.searchsorted(self._groups, out.group)]
        odd_into = odd[np.searchsorted(self._groups, into.group)]
        # Chunks that left, or wait to.
        left = ~out.opens
        waits = out.opens.copy()
        waits[queued[left & (queued != _NONE)]] = False
        leaving = np.flatnonzero((left | waits) & ~odd_out)
        sent = left[leaving]
        arrival = np.where(sent, came[leaving], _NONE)
        first = np.where(sent, queued[leaving], leaving)
        # Chunks that came, without a record of their leaving.
        known = np.zeros(len(into), bool)
        known[arrival[arrival != _NONE]] = True
        has_come = np.zeros(len(into), bool)
        has_come[taken[into.opens & (taken != _NONE)]] = True  # these are TAKEN of something that came
        alone = np.flatnonzero(~known & ~has_come & ~odd_into)
        is_arrival = into.opens[alone]
        after = np.where(is_arrival, taken[alone], alone)
        columns = {
            "group": np.concatenate([out.group[leaving], into.group[alone]]),
            "number": np.concatenate([np.where(sent, out.number[leaving], 0), into.number[alone]]),
            "nbytes": np.concatenate([out.value[leaving], into.value[alone]]),
            "queued": np.concatenate([_at(out.time, first), np.full(len(alone), NEVER)]),
            "sent": np.concatenate([np.where(sent, out.time[leaving], NEVER), np.full(len(alone), NEVER)]),
            "received": np.concatenate([_at(into.time, arrival), np.where(is_arrival, into.time[alone], NEVER)]),
            "taken": np.concatenate([_at(into.time, _follow(taken, arrival)), _at(into.time, after)]),
            # Within a link: chunks sent, still waiting, received by number, and received without one.
            "turn": np.concatenate([np.where(sent, 0, 1), np.where(is_arrival & (into.number[alone] > 0), 2, 3)]),
            "place": np.concatenate([leaving, np.where(after != _NONE, after, len(into) + alone)]),
        }
        self._add_odd(columns, odd)
        return self._ordered(columns)

    def _queued(self, odd: NDArray[np.bool_]) -> Ints:
        """Returns, of each SENT, the QUEUED of its chunk."""
        out = self._out
        begins, ends = matched(out.group, out.opens)
        found = np.full(len(out), _NONE)
        found[ends] = begins
        # A chunk that waits for credit may wait for its turn then.
        turns = np.unique(out.group[out.opens & (out.number > 0)])
        credits = np.unique(out.group[out.opens & (out.number == 0)])
        odd[np.searchsorted(self._groups, np.intersect1d(turns, credits, assume_unique=True))] = True
        return found

    def _taken(self, odd: NDArray[np.bool_]) -> Ints:
        """Returns, of each RECEIVED, the TAKEN of its chunk."""
        into = self._into
        found = np.full(len(into), _NONE)
        group = np.searchsorted(self._groups, into.group)
        count = len(self._groups)
        numbered = into.number > 0
        some = [np.bincount(group[side & numbered], minlength=count) > 0 for side in (into.opens, ~into.opens)]
        by_number = some[0] & some[1]
        in_order = ~by_number[group]
        begins, ends = matched(into.group[in_order], into.opens[in_order])
        places = np.flatnonzero(in_order)
        found[places[begins]] = places[ends]
        odd[group[~numbered & by_number[group]]] = True
        mine = np.flatnonzero(by_number[group] & numbered)
        came, gone = mine[into.opens[mine]], mine[~into.opens[mine]]
        odd[_twice(group[gone], into.number[gone])] = True
        a, b = _same(group[came], into.number[came], group[gone], into.number[gone])
        fits = came[a] < gone[b]  # a chunk that is taken before it came is another one
        found[came[a][fits]] = gone[b][fits]
        return found

    def _came(self, odd: NDArray[np.bool_], taken: Ints) -> Ints:
        """Returns, of each SENT, the RECEIVED of its chunk."""
        out, into = self._out, self._into
        found = np.full(len(out), _NONE)
        of_out, of_into = (np.searchsorted(self._groups, side.group) for side in (out, into))
        sent, came = np.flatnonzero(~out.opens & (out.number > 0)), np.flatnonzero(into.opens & (into.number > 0))
        odd[_twice(of_out[sent], out.number[sent])] = True
        odd[_twice(of_into[came], into.number[came])] = True
        # A chunk without a number belongs to the next one that has nothing yet.
        without = np.zeros(len(odd), bool)
        without[of_out[~out.opens & (out.number == 0)]] = True
        loose = into.opens & (into.number == 0)
        gone = ~into.opens
        gone[taken[into.opens & (taken != _NONE)]] = False
        others = np.zeros(len(odd), bool)
        others[of_into[loose | gone]] = True
        odd |= without & others
        a, b = _same(of_out[sent], out.number[sent], of_into[came], into.number[came])
        found[sent[a]] = came[b]
        return found

    def _add_odd(self, columns: dict[str, Ints], odd: NDArray[np.bool_]) -> None:
        """Joins the links of operations that need more than that, one after the other."""
        found: list[tuple[int, ...]] = []
        sides = []
        for side in (self._out, self._into):
            order = np.argsort(side.group, kind="stable")
            sides.append((side, order, side.group[order]))
        for group in self._groups[odd].tolist():
            source, target = divmod(group % self._links, self._most)
            rows = []
            for (side, order, groups), kinds in zip(
                sides, ((Kind.QUEUED, Kind.SENT), (Kind.RECEIVED, Kind.TAKEN)), strict=True
            ):
                low, high = np.searchsorted(groups, (group, group + 1))
                rows.append(side.rows(order[low:high], kinds))
            for place, each in enumerate(of_link(source, target, *rows)):
                times = (each.queued, each.sent, each.received, each.taken)
                found.append(
                    (group, each.number, each.nbytes, *(NEVER if time is None else time for time in times), 0, place)
                )
        if found:
            for name, more in zip(columns, np.array(found, np.int64).T, strict=True):
                columns[name] = np.concatenate([columns[name], more])

    def _ordered(self, columns: dict[str, Ints]) -> ChunkColumns:
        """Returns the chunks by operation and the first that was recorded of them; then by link, in order of
        appearance."""
        appearance = np.full(len(self._groups), np.iinfo(np.int64).max)
        for side, after in ((self._into, len(self._out)), (self._out, 0)):
            groups, first = np.unique(side.group, return_index=True)
            appearance[np.searchsorted(self._groups, groups)] = first + after
        group = columns["group"]
        of = group // self._links
        times = [columns[name] for name in ("queued", "sent", "received", "taken")]
        earliest = np.full(len(of), np.iinfo(np.int64).max)
        for time in times:
            np.minimum(earliest, time, out=earliest, where=time != NEVER)
        link = appearance[np.searchsorted(self._groups, group)]
        order = np.lexsort((columns["place"], columns["turn"], link, earliest, of))
        source, target = np.divmod(group[order] % self._links, self._most)
        return ChunkColumns(
            of[order], source, target, columns["number"][order], columns["nbytes"][order], *(t[order] for t in times)
        )


def _at(times: Ints, places: Ints) -> Ints:
    """Returns times by place; `NEVER` where there is none."""
    found = np.full(len(places), NEVER)
    found[places != _NONE] = times[places[places != _NONE]]
    return found


def _follow(partner: Ints, places: Ints) -> Ints:
    found = np.full(len(places), _NONE)
    found[places != _NONE] = partner[places[places != _NONE]]
    return found


def _twice(group: Ints, number: Ints) -> Ints:
    """Returns the groups in which a number comes twice."""
    order = np.lexsort((number, group))
    group, number = group[order], number[order]
    found: Ints = group[1:][(group[1:] == group[:-1]) & (number[1:] == number[:-1])]
    return found


def _same(group: Ints, number: Ints, other: Ints, of_other: Ints) -> tuple[Ints, Ints]:
    """Returns the places of elements of two lists that are of the same group and number. Where a number comes twice,
    anything may be returned."""
    wide = 1 << 32
    a, first = np.unique(group * wide + number, return_index=True)
    b, second = np.unique(other * wide + of_other, return_index=True)
    _, left, right = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    return first[left], second[right]


# --- link by link -----------------------------------------------------------------------------------------------------


def of_link(source: int, target: int, out: Sequence[Row], into: Sequence[Row]) -> list[Chunk]:
    """Returns the chunks of one operation on one link, from the records of both ends, by time.

    A link keeps its order, so that a record without a number belongs to the next chunk that has none yet.
    """
    sent = _departures(out)
    received = _arrivals(into)
    by_number = {row[3]: (row, taken) for row, taken in received if row is not None and row[3]}
    others = deque((row, taken) for row, taken in received if row is None or not row[3])
    chunks = []
    for queued, row in sent:
        number = row[3] if row is not None else 0
        came: Row | None
        if number:
            came, taken = by_number.pop(number, (None, None))
        elif row is not None and others:
            came, taken = others.popleft()
        else:
            came, taken = None, None
        nbytes = next((each[2] for each in (row, queued, came) if each is not None), 0)
        chunks.append(
            Chunk(
                source,
                target,
                number,
                nbytes,
                queued and queued[1],
                row and row[1],
                came and came[1],
                taken and taken[1],
            )
        )
    for came, taken in [*by_number.values(), *others]:
        row = came or taken
        assert row is not None
        chunks.append(Chunk(source, target, row[3], row[2], None, None, came and came[1], taken and taken[1]))
    return chunks


def _departures(rows: Iterable[Row]) -> list[tuple[Row | None, Row | None]]:
    """Returns the chunks sent on a link, each with its first QUEUED, if it had to wait; then those that still
    waits.

    A chunk waits for credit, then for its turn, or for one of them, or for neither; nothing overtakes.
    """
    for_credit: deque[Row] = deque()
    for_turn: deque[Row] = deque()
    found: list[tuple[Row | None, Row | None]] = []
    for row in rows:
        if row[0] == Kind.QUEUED and not row[3]:
            for_credit.append(row)
        elif row[0] == Kind.QUEUED:
            for_turn.append(for_credit.popleft() if for_credit else row)
        else:
            waited = for_turn.popleft() if for_turn else for_credit.popleft() if for_credit else None
            found.append((waited, row))
    return found + [(row, None) for row in (*for_turn, *for_credit)]


def _arrivals(rows: Iterable[Row]) -> list[tuple[Row | None, Row | None]]:
    """Returns the chunks that came on a link, each with its TAKEN: of the same number, or the first one that is not of
    another chunk."""
    waiting: deque[Row] = deque()
    found: list[tuple[Row | None, Row | None]] = []
    for row in rows:
        if row[0] == Kind.RECEIVED:
            waiting.append(row)
            continue
        came = next((each for each in waiting if row[3] and each[3] == row[3]), None)
        if came is None and waiting and not (waiting[0][3] and row[3]):
            came = waiting[0]
        if came is not None:
            waiting.remove(came)
        found.append((came, row))
    return found + [(row, None) for row in waiting]
