"""Time of daemons, negotiations and links in the operations of a ledger, from which `stragglers` says where it went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import Records
from fusion_trace.analyse.ledger import Ledger, keys_of
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import KERNELS
from fusion_trace.read.span_columns import Floats, Ints, covered_by_group, distinct, matched, run, union_of

PARTS_OF_DAEMON = ("hand-over", "start", "kernels", "taking", "answer")
_Side = tuple[Ints, Floats, Records]


@dataclass(frozen=True, eq=False)
class Resources:
    """Time of nodes' daemons, negotiations and links in each operation, while the operation was waited for; ns.

    Attributes:
        nodes, links: by column; a link is (source, target).
        daemon, negotiation: of shape (o, nodes). wire, nbytes: of shape (o, links).
        work: of a daemon, for the operation at any time, shape (o, nodes): the last one does all of it while
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
    """Returns the work of daemons and links in the time that the ledger's operations took."""
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
        known = run(self.sorted[place] == keys)
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
                parts[name][:, column] = _covered(*whole[-1], count)
            every = [self.clipped(*each) for each in whole]
            daemon[:, column] = _covered(*_joined(every), count)
            work[:, column] = _covered(*_joined(whole), count)
            negotiation[:, column] = _covered(*self.clipped(*asked), count)
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
        questions = _paired(ask, asked, tell, told)
        agreed = all_ready.copy()
        np.maximum.at(agreed, questions[0], questions[2])
        run, begun, _ = self.place(daemon.of(Kind.RUN_BEGIN))
        waited = np.isfinite(agreed[run])
        found["start"] = [(run[waited], agreed[run][waited], begun[waited])]
        found["kernels"] = []
        for opens, closes in KERNELS.values():
            a, b = self.place(daemon.of(opens)), self.place(daemon.of(closes))
            found["kernels"].append(_paired(a[0], a[1], b[0], b[1]))
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
                # A link that carries another operation's chunks meanwhile is as busy; its load before the last
                # rank was there does not count.
                end = np.maximum(begin, end)
                _, waits_from, waits_to = _turns(_of_peer(out[Kind.QUEUED], target), sent)
                # A queued chunk waits for the chunk in flight and its acknowledgement.
                busy = union_of(np.concatenate([begin, waits_from]), np.concatenate([end, waits_to]))
                at = self.begin, self.book.through
                spans = np.searchsorted(np.sort(begin), at[1]) - np.searchsorted(np.sort(end), at[0])
                weight = _Carried(begin, end, nbytes)
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


def _joined(spans: list[tuple[Ints, Floats, Floats]]) -> tuple[Ints, Floats, Floats]:
    if not spans:
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    of, begin, end = zip(*spans, strict=True)
    return np.concatenate(of), np.concatenate(begin), np.concatenate(end)


def _of_peer(side: _Side, peer: int) -> _Side:
    mine = run(side[2]["peer"] == peer)
    return side[0][mine], side[1][mine], side[2][mine]


def _turns(queued: _Side, sent: _Side) -> tuple[Ints, Floats, Floats]:
    """Returns when chunks waited for their turn: operation, begin, end.

    Nothing overtakes, so that a chunk that was sent while none waited has not waited itself.
    """
    turn = queued[2]["extra"] == 1
    of = np.concatenate([queued[0][turn], sent[0]])
    time = np.concatenate([queued[1][turn], sent[1]])
    waits = np.arange(len(of)) < turn.sum()
    order = np.lexsort((~waits, time))
    of, time = of[order], time[order]
    begin, end = matched(of, waits[order])
    return of[begin], time[begin], time[end]


def _by_number_or_order(first: _Side, second: _Side) -> tuple[Ints, Floats, Floats]:
    """Pairs the records of chunks at two moments: by their numbers on the link, or, without one, by their order within
    an operation."""
    left, right = first[2]["extra"].astype(np.int64), second[2]["extra"].astype(np.int64)
    if len(left) and len(right) and left.all() and right.all() and distinct(left) and distinct(right):
        _, a, b = np.intersect1d(left, right, assume_unique=True, return_indices=True)
        return first[0][a], first[1][a], second[1][b]
    return _paired(first[0], first[1], second[0], second[1])


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
            of, begin, end = _paired(left[0], left[1], right[0], right[1])
            mean = np.bincount(left[0], left[2]["value"], len(right[0]) and int(left[0].max()) + 1)
            many = np.maximum(np.bincount(left[0]), 1)
            found.append((of, begin, end, (mean / many)[of]))
    joined = [np.concatenate([each[place] for each in found]) for place in range(4)]
    return joined[0], joined[1], joined[2], joined[3]


def _order_in_group(group: Ints) -> Ints:
    """Returns, for sorted group numbers, the place of each element within its group, from 0."""
    places = np.arange(len(group))
    if not len(group):
        return places
    first = np.r_[True, group[1:] != group[:-1]]
    return places - np.maximum.accumulate(np.where(first, places, 0))


def _paired(group: Ints, begin: Floats, other: Ints, end: Floats) -> tuple[Ints, Floats, Floats]:
    """Pairs the first begin of each group with its first end, and so on; those without a partner are left out.

    Args:
        group, begin: of each begin; other, end: of each end. In any order.

    Returns: the groups, begins and ends of the pairs.
    """
    if not len(group) or not len(other):
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    a, b = np.lexsort((begin, group)), np.lexsort((end, other))
    group, begin, other, end = group[a], begin[a], other[b], end[b]
    most = int(max(_order_in_group(group).max(), _order_in_group(other).max())) + 1
    _, left, right = np.intersect1d(
        group * most + _order_in_group(group), other * most + _order_in_group(other), assume_unique=True,
        return_indices=True,
    )  # fmt: skip
    return group[left], begin[left], end[right]


def _covered(group: Ints, begin: Floats, end: Floats, groups: int) -> Floats:
    """Returns how long the union of each group's spans is; float64, of length `groups`."""
    found = np.zeros(groups)
    kept = end > begin
    numbers, lengths = covered_by_group(group[kept], begin[kept], end[kept])
    found[numbers] = lengths
    return found


class _Carried:
    """How much spans have carried, as a function of time: each carries its weight evenly from its begin to its end."""

    def __init__(self, begin: Floats, end: Floats, weight: Floats) -> None:
        slope = weight / np.maximum(end - begin, 1)
        at = np.concatenate([begin, np.maximum(end, begin + 1)])
        order = np.argsort(at, kind="stable")
        self._at = at[order]
        speed = np.cumsum(np.concatenate([slope, -slope])[order])
        self._sum = np.concatenate([[0.0], np.cumsum(speed[:-1] * np.diff(self._at))]) if len(at) else np.zeros(0)

    def within(self, begin: Floats, end: Floats) -> Floats:
        """Returns how much of it was carried in each span from `begin` to `end`."""
        if not len(self._at):
            return np.zeros(len(begin))
        found: Floats = np.interp(end, self._at, self._sum) - np.interp(begin, self._at, self._sum)
        return found
