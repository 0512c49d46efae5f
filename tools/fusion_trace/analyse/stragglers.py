"""`fusion-trace stragglers` says which rank, host or link is slow, why, and the loss of the others by it.

Each rank, daemon and link is compared with the others of its kind in the same step. The part of its excess that is more
than chance is taken away, and the steps are added up again: by how much they would have been shorter is the loss. Of
several at once, each gets the mean of its share in any order (its Shapley value), so that all of them together have
cost as much as would be saved without all of them, and never more.

| cause | of a | measured in a step |
| --- | --- | --- |
| compute | rank, or host: all of its ranks | the step without the script's waits |
| daemon | node | hand-overs, kernels, chunks that have come and wait for it, answers |
| negotiation | node | asking the coordinator, from when the last rank had handed its part over |
| wire | link, or host: its links | something is between its two ends, or waits for that; for the bytes it carried |

Where rings are missing, ranks are not compared: one of those without a ring may be the slow one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from math import factorial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fusion_rt.tracing.format import Role
from fusion_trace.analyse.gaps import unseen
from fusion_trace.analyse.ledger import SUBMIT, WAIT, Ledger, ledger
from fusion_trace.analyse.link_figures import Link, one_shaper
from fusion_trace.analyse.resources import Resources, resources
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import operations
from fusion_trace.read.rows import NEVER
from fusion_trace.read.span_columns import Floats, Ints

WORTH_TELLING = 0.02  # of the time of all steps, that a finding costs
CLEARLY = 0.3  # of the usual figure: daemons and links that differ by less are alike
_ALIKE = 0.1  # of the bytes of the link that carries most in a step: links that carry less are not compared with it
LIKELY = 0.01  # chance, of any of its kind, up to which a finding is told
SINGULAR = 5.0  # times the cost of any other, and
SINGULAR_COST = 0.04  # of the time: then it is told, though it may be chance
CAUSES = ("compute", "daemon", "negotiation", "wire")
_WORDS = {
    "still": "standing still while its answer was there", "hand-over": "taking what workers hand over",
    "start": "starting", "taking": "taking chunks that have come", "answer": "answering workers",
}  # fmt: skip
_THREADS = 2  # of a daemon that are busy at once: its event loop, and ZeroMQ's or a kernel's
_MOST_SUSPECTS = 32
_MOST_COUNTED = 16  # of a kind: draws are not enough to tell smaller chances
_MOST_AT_ONCE = 6  # between which costs are divided: 64 variants
_WINDOW = 21  # steps of a running median
_FAR = 3.5  # standard deviations
_SMALL = 0.02  # of a step: less is never told from noise
_DRAWS = 1999
_MOST_BLOCKS = 1000
_TO_SIGMA = 1.4826
_OF_MEDIAN = 1.2533  # standard error of a median, in those of a mean


@dataclass(frozen=True)
class Finding:
    """Something that was slower than the others.

    Attributes:
        cause: one of `CAUSES`.
        rank, node, link: where; one of them is set. A link is (source, target). A node with the cause compute stands
            for all its ranks, with the cause wire for its links.
        lost: how much longer the steps took because of it, ns, all together.
        share: of the time of all steps.
        steps: numbers of the steps in which it was slow.
        of: how many steps were looked at.
        extra: by how much it was slower in these, ns, the median; most: in the worst one.
        every: n if it is slow in every n-th step; 0 if it is not regular.
        typical: its time in these steps, ns, the median; `usual`: that of the others.
        chance: the probability of such a cost by chance alone.
        detail: where in the step, in words; "" if there is nothing to add.
    """

    cause: str
    rank: int | None
    node: int | None
    link: tuple[int, int] | None
    lost: int
    share: float
    steps: tuple[int, ...]
    of: int
    extra: int
    most: int
    every: int
    typical: int
    usual: int
    chance: float
    detail: str = ""


@lru_cache(maxsize=4)
def find(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> tuple[Finding, ...]:
    """Returns all that were slower than the others, the most expensive first."""
    book = ledger(trace, chosen)
    if book is None or len(book.steps) < 4:
        return ()
    return _Inquiry(trace, book, resources(trace, book)).findings()


@dataclass(frozen=True, eq=False)
class Suspect:
    """Something that may be slow, and by how much in each event: ns, float64.

    Attributes:
        cause: compute, daemon, negotiation or wire.
        column: of the ledger's ranks, or of the resources' nodes or links.
        signal: its excess in each step, without chance; shape (s,).
        own, lag: of a rank, the parts of its durations that would go; shape (e,). None: it is no rank.
        took: of a daemon or link, the part of each operation's time that would go; shape (o,).
    """

    cause: str
    column: int
    signal: Floats
    own: Floats | None = None
    lag: Floats | None = None
    took: Floats | None = None


@dataclass(frozen=True, eq=False)
class _Unit:
    """Suspects that are one. `node`: whose they all are; None: there is one, or both directions of a link."""

    members: tuple[Suspect, ...]
    chance: float
    node: int | None = None


class _Inquiry:
    """One look at a job: suspects, their costs, and those that are reported.

    Args:
        book, used: the activities of all.
    """

    def __init__(self, trace: JobTrace, book: Ledger, used: Resources) -> None:
        self.trace, self.book, self.used = trace, book, used
        self.step_of = book.step_of_operation()
        self.whole = float(book.end[-1] - book.begin[0])
        self.totals: dict[str, tuple[Floats, Floats]] = {}  # by cause: each one's time in each step, and the others'
        self.least = 0.0  # ns that the steps take at least, since a shaper passes no more bytes in less

    def findings(self) -> tuple[Finding, ...]:
        suspects = [*self._ranks(), *self._daemons(), *self._negotiations(), *self._links()]
        suspects = sorted(suspects, key=lambda each: -each.signal.sum())[:_MOST_SUSPECTS]
        suspects = [each for each in suspects if each.signal.sum() >= 0.5 * WORTH_TELLING * self.whole]
        if not suspects:
            return ()
        units = self._units(self._standing_out(suspects))
        if not units:
            return ()
        costs = self._shared(units)
        found = [self._finding(unit, cost) for unit, cost in zip(units, costs, strict=True)]
        if _on_one_full_machine(self.trace.processes):  # which daemon waits for a processor is the kernel's choice
            found = [each for each in found if each.cause != "daemon"]
        worth = [each for each in found if each.lost >= WORTH_TELLING * self.whole]
        return tuple(sorted(worth, key=lambda each: -each.lost))

    # --- suspects -----------------------------------------------------------------------------------------------------

    def _ranks(self) -> Iterable[Suspect]:
        book = self.book
        if len(book.ranks) < 2 or not book.coupled.any() or unseen(self.trace).ranks_may_be_missing:
            return
        took = np.stack(
            [
                self._by_step(book.step_of[:, column], book.own[:, column] + book.lag[:, column])
                for column in range(len(book.ranks))
            ],
            1,
        )
        usual = lower_middle_of_others(took)
        self.totals["compute"] = took, usual
        found = _signals(took - usual, book.lengths)
        if not found.any():
            return
        more = np.maximum(book.own - lower_middle_of_others(book.own), 0)
        more_lag = np.maximum(book.lag - lower_middle_of_others(book.lag), 0)
        for column in np.flatnonzero(found.any(0)).tolist():
            step = book.step_of[:, column]
            own, lag = (np.where(book.there[:, column], each[:, column], 0) for each in (more, more_lag))
            all_of_it = self._by_step(step, own + lag)
            part = np.where(all_of_it > 0, found[:, column] / np.maximum(all_of_it, 1), 0)
            part = np.where(step >= 0, part[step], 0)
            own = np.minimum(own * part, np.maximum(book.own[:, column], 0))
            lag = np.minimum(lag * part, np.maximum(book.lag[:, column], 0))
            yield Suspect("compute", column, found[:, column], own=own, lag=lag)

    def _daemons(self) -> Iterable[Suspect]:
        work = self.used.work
        yield from self._resource("daemon", work, lower_middle_of_others(work), self.used.daemon)

    def _negotiations(self) -> Iterable[Suspect]:
        asked = self.used.negotiation
        yield from self._resource("negotiation", asked, lower_middle_of_others(asked), asked)

    def _links(self) -> Iterable[Suspect]:
        wire = self.used.wire
        if not wire.shape[1]:
            return
        carried = np.stack([self._by_step(self.step_of, its) for its in self.used.nbytes.T], 1)
        # Small messages are short of latency, not of bandwidth: how long a byte of theirs takes says nothing of others.
        alike = carried >= _ALIKE * carried.max(1, keepdims=True)
        rate = np.vstack(
            [
                _usual_rate(np.where(alike, self.used.rate, np.nan), self.used.links),
                np.full((1, wire.shape[1]), np.nan),  # for those of no step
            ]
        )
        usual = rate[self.step_of] * self.used.nbytes
        slow = list(self._resource("wire", wire, usual, wire, self.used.error))
        if slow and (shaper := self._shaper()) is not None:
            sources = np.array([source for source, _ in self.used.links])
            busiest = np.max([carried[:, sources == node].sum(1) for node in set(sources.tolist())], 0)
            self.least = float(busiest.sum()) / shaper.bandwidth * 1e9
            return
        yield from slow

    def _shaper(self) -> Link | None:
        """Returns the common value of all links, if they seem to differ only since some use up the burst that they may
        send at once after a pause."""
        chunks = operations(self.trace).chunks
        flown = chunks.kept((chunks.sent != NEVER) & (chunks.received != NEVER))
        flown = flown.kept(np.argsort(flown.sent, kind="stable"))
        its = [flown.kept((flown.source == source) & (flown.target == target)) for source, target in self.used.links]
        return one_shaper([(each.sent, each.received, each.nbytes) for each in its])

    def _resource(
        self, cause: str, took: Floats, usual: Floats, most: Floats, error: Floats | None = None
    ) -> Iterable[Suspect]:
        """Yields the daemons or links that are slow. `error`: by how much `took` may be wrong."""
        if took.shape[1] < 2 or not len(took):
            return
        usual = np.where(np.isnan(usual), took, usual)
        excess = took - usual
        sums = [
            np.stack([self._by_step(self.step_of, each[:, c]) for c in range(took.shape[1])], 1)
            for each in (took, usual)
        ]
        self.totals[cause] = sums[0], sums[1]
        found = _signals(sums[0] - sums[1], self.book.lengths)
        # How a link is used matters a little: bursts are faster than streams, and the last one sends all at once.
        slow = found > 0
        found = found * ((sums[0] * slow).sum(0) > (1 + CLEARLY) * (sums[1] * slow).sum(0))
        if error is not None:
            doubt = np.stack([self._by_step(self.step_of, error[:, c]) for c in range(took.shape[1])], 1)
            found = np.where(found > 2 * doubt, found, 0)  # those that it is compared with may be wrong as well
        for column in np.flatnonzero(found.any(0)).tolist():
            more = np.maximum(excess[:, column], 0)
            all_of_it = self._by_step(self.step_of, more)
            part = np.where(all_of_it > 0, np.minimum(found[:, column] / np.maximum(all_of_it, 1), 1), 0)
            cut = more * np.where(self.step_of >= 0, part[self.step_of], 0)
            yield Suspect(cause, column, found[:, column], took=np.minimum(cut, most[:, column]))

    def _by_step(self, step: Ints, values: Floats) -> Floats:
        inside = step >= 0
        return np.bincount(step[inside], values[inside], len(self.book.steps)).astype(float)

    # --- costs --------------------------------------------------------------------------------------------------------

    def _standing_out(self, suspects: Sequence[Suspect]) -> list[tuple[Suspect, float]]:
        """Returns those that stand out, each with the probability of that by chance.

        The cost of each where no other is slow is compared with the costs of the others of its kind.
        """
        count = len(suspects)
        without = np.ones((count + 1, count), bool)
        without[np.arange(count), np.arange(count)] = False
        ends = _replay(self.book, self.used, suspects, without)
        later = ends[:-1] - ends[-1]
        costs = np.maximum(np.diff(later, axis=1, prepend=0), 0)
        found = []
        for cause in CAUSES:
            places = [place for place, suspect in enumerate(suspects) if suspect.cause == cause]
            if not places:
                continue
            width = self.totals[cause][0].shape[1]
            matrix = np.zeros((len(self.book.steps), width))
            for place in places:
                matrix[:, suspects[place].column] = costs[place]
            for place in places:
                if later[place, -1] >= 0.5 * WORTH_TELLING * self.whole:
                    likely, singular = self._against_others(cause, matrix, suspects[place].column)
                    if likely <= LIKELY or (singular and later[place, -1] >= SINGULAR_COST * self.whole):
                        found.append((suspects[place], likely))
        return found

    def _against_others(self, cause: str, costs: Floats, column: int) -> tuple[float, bool]:
        """Returns the probability of a column's costs by chance, and whether no other's are anywhere near them.

        Those of the same host do not count as others, since the host may be what is slow; nor do daemons with fewer
        ranks, which have less to do.
        """
        likely, singular = 1.0, False
        for fellows in self._fellows(cause, column):
            rest = [place for place in range(costs.shape[1]) if place not in fellows]
            if len(rest) < 2:
                continue
            left = costs[:, rest]
            likely = min(likely, _chance(left, rest.index(column)) * min(len(rest), _MOST_COUNTED))
            sums = left.sum(0)
            others = float(np.delete(sums, rest.index(column)).max(initial=0.0))
            singular = singular or bool(costs[:, column].sum() >= SINGULAR * others)
        return min(likely, 1.0), singular

    def _fellows(self, cause: str, column: int) -> list[set[int]]:
        """Returns sets of columns that may be slow for the same reason, or, of daemons, have less to do."""
        book, links = self.book, self.used.links
        if cause == "daemon":
            ranks = Counter(book.node_of.values())
            own = ranks[self.used.nodes[column]]
            return [{place for place, node in enumerate(self.used.nodes) if ranks[node] < own}]
        found: list[set[int]] = [set()]
        if cause == "compute":
            node = book.node_of[book.ranks[column]]
            found.append({place for place, rank in enumerate(book.ranks) if book.node_of[rank] == node} - {column})
        if cause == "wire":
            found += [{place for place, link in enumerate(links) if node in link} - {column} for node in links[column]]
        return found

    def _units(self, named: Sequence[tuple[Suspect, float]]) -> list[_Unit]:
        """Joins those that are one: all ranks of a host, all links of one, both directions of a link, a daemon and the
        links to it, for which it is as slow."""
        left = [_Unit((suspect,), chance) for suspect, chance in named]
        book, links = self.book, self.used.links
        nodes = sorted(set(book.node_of.values()))

        def join(its: list[_Unit], **where: Any) -> None:
            left[:] = [each for each in left if each not in its]
            members = tuple(member for each in its for member in each.members)
            left.append(_Unit(members, min(each.chance for each in its), **where))

        def of(cause: str) -> list[_Unit]:
            return [each for each in left if each.members[0].cause == cause and len(each.members) == 1]

        for node in nodes:
            columns = {column for column, rank in enumerate(book.ranks) if book.node_of[rank] == node}
            its = [each for each in of("compute") if each.members[0].column in columns]
            if len(nodes) > 1 and len(columns) > 1 and len(its) == len(columns):
                join(its, node=node)
        for daemon in of("daemon"):
            node = self.used.nodes[daemon.members[0].column]
            its = [each for each in of("wire") if node in links[each.members[0].column]]
            if its:
                join([daemon, *its], node=node)
        wires = of("wire")
        for node in nodes:
            its = [each for each in wires if node in links[each.members[0].column]]
            peers = {peer for each in its for peer in links[each.members[0].column]} - {node}
            both_ways = {links[each.members[0].column][0] == node for each in its} == {True, False}
            if len(peers) > 1 and len(its) == len(wires) and both_ways:
                join(its, node=node)
                break
        by_link = {links[each.members[0].column]: each for each in of("wire")}
        for source, target in by_link:
            if source < target and (target, source) in by_link:
                join([by_link[source, target], by_link[target, source]])
        return left

    def _shared(self, units: Sequence[_Unit]) -> list[float]:
        """Returns the cost of each, ns: Shapley values of the time saved without some of them."""
        divided = sorted(units, key=lambda each: -each.members[0].signal.sum())[:_MOST_AT_ONCE]
        subsets = np.array(list(product((False, True), repeat=len(divided))))
        suspects = [member for unit in divided for member in unit.members]
        of_unit = [place for place, unit in enumerate(divided) for _ in unit.members]
        ends = _replay(self.book, self.used, suspects, subsets[:, of_unit])[:, -1]
        ends = np.maximum(ends, ends[0] - max(self.whole - self.least, 0.0))
        saved = {tuple(subset): float(ends[0] - end) for subset, end in zip(subsets.tolist(), ends, strict=True)}
        places = {id(unit): place for place, unit in enumerate(divided)}
        return [_shapley(saved, places[id(unit)], len(divided)) if id(unit) in places else 0.0 for unit in units]

    # --- words --------------------------------------------------------------------------------------------------------

    def _finding(self, unit: _Unit, cost: float) -> Finding:
        book, first = self.book, unit.members[0]
        took, usual = (each[:, [member.column for member in unit.members if member.cause == first.cause]].max(1)
                       for each in self.totals[first.cause])  # fmt: skip
        signal = np.max([member.signal for member in unit.members], 0)
        slow = signal >= max(_SMALL * np.median(book.lengths), 0.25 * np.percentile(signal[signal > 0], 90))
        if not slow.any():
            slow = signal >= signal.max() * 0.5
        alone = unit.node is None
        rank = book.ranks[first.column] if alone and first.cause == "compute" else None
        link = self.used.links[first.column] if alone and first.cause == "wire" else None
        node = self.used.nodes[first.column] if alone and first.cause in ("daemon", "negotiation") else unit.node
        return Finding(
            cause=first.cause,
            rank=rank,
            node=node,
            link=link,
            lost=round(cost),
            share=cost / self.whole,
            steps=tuple(book.steps[slow].tolist()),
            of=len(book.steps),
            extra=round(float(np.median(signal[slow]))),
            most=round(float(signal[slow].max())),
            every=_period_of(book.steps[slow]),
            typical=round(float(np.median(took[slow]))),
            usual=round(float(np.median(usual[slow]))),
            chance=unit.chance,
            detail=self._detail(unit, slow),
        )

    def _detail(self, unit: _Unit, slow: Ints) -> str:
        """Says in which phase a rank is slower than the others, or in which work a daemon is."""
        suspect = unit.members[0]
        column = suspect.column
        if suspect.cause == "compute":
            known = {name: _more(its)[slow, column].sum() for name, its in self.book.phases.items()}
            known["outside of forward and backward"] = suspect.signal[slow].sum() - sum(known.values())
        elif suspect.cause == "daemon":
            known = {
                name: self._by_step(self.step_of, _more(took)[:, column])[slow].sum()
                for name, took in self.used.parts.items()
            }
        elif suspect.cause == "wire" and len(unit.members) > 1:
            if unit.node is None:
                return "in both directions"
            links = (self.used.links[member.column] for member in unit.members)
            return "its links: " + ", ".join(self.trace.link_of(*link) for link in links)
        else:
            return ""
        positive = sum(value for value in known.values() if value > 0)
        named = " and ".join(_WORDS.get(name, name) for name, value in known.items() if 0 < value >= 0.3 * positive)
        return ", ".join(
            filter(None, ("all its ranks" if suspect.cause == "compute" and len(unit.members) > 1 else "", named))
        )


def _more(values: Floats) -> Floats:
    return values - lower_middle_of_others(values)


def _shapley(saved: dict[tuple[bool, ...], float], place: int, count: int) -> float:
    """Returns the mean, over all orders, of the time saved besides when this one is taken away too."""
    value = 0.0
    for subset, before in saved.items():
        if subset[place]:
            continue
        gone = sum(subset)
        weight = factorial(gone) * factorial(count - gone - 1) / factorial(count)
        with_it = (*subset[:place], True, *subset[place + 1 :])
        value += weight * (saved[with_it] - before)
    return value


def _usual_rate(rate: Floats, links: Sequence[tuple[int, int]]) -> Floats:
    """Returns the usual value of the other links in each step, shape (s, links); NaN where there is no other.

    All links of a host may be slow, which can be most of them.
    """
    used = ~np.isnan(rate)
    usual = np.full(rate.shape, np.nan)
    for pattern in np.unique(used, axis=0):
        if pattern.sum() > 1:
            part = np.ix_((used == pattern).all(1), pattern)
            its = [link for link, seen in zip(links, pattern, strict=True) if seen]
            together = max(sum(node in link for link in its) for node in {node for link in its for node in link})
            usual[part] = lower_middle_of_others(rate[part], together)
    return usual


def _on_one_full_machine(processes: Sequence[Process]) -> bool:
    """Says whether all processes are known to be on one machine that has fewer processors than they may want."""
    machines = {process.machine for process in processes}
    if len(machines) != 1 or "" in machines or not all(process.processors for process in processes):
        return False
    wanted = sum(1 if process.role == Role.WORKER else _THREADS for process in processes)
    there = max(1, round(max(process.processors for process in processes)))
    return wanted > there


def lower_middle_of_others(values: NDArray[Any], together: int = 1) -> Floats:
    """Returns the usual value of the others, by the rule of `fusiond.live.rates`, for each element of rows of
    shape (n, q); NaN if q is 1.

    Args:
        together: how many may be slow for one reason.
    """
    count = values.shape[1]
    if count < 2:
        return np.full(values.shape, np.nan)
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, 1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(count), values.shape), 1)
    k = max(0, min((count - 2) // 2, count - 1 - together))
    return np.where(place > k, ordered[:, k : k + 1], ordered[:, k + 1 : k + 2])


def document(trace: JobTrace, found: Sequence[Finding]) -> dict[str, object]:
    """Returns what `--json` shows; all times in ns."""
    return {"job": trace.job, "stragglers": [asdict(finding) for finding in found], "problems": list(trace.problems)}


# --- the steps without it ---------------------------------------------------------------------------------------------
# With nothing taken away, every step comes out as long as it was. All variants are reckoned at once, event by event.


def _replay(book: Ledger, used: Resources, suspects: Sequence[Suspect], without: NDArray[np.bool_]) -> Floats:
    """Returns when each step ends, the mean over ranks, in several variants.

    Args:
        without: of shape (variants, suspects): those that are not slow there.

    Returns: ns, of shape (variants, steps).
    """
    variants = len(without)
    own_of = np.zeros((variants, len(book.ranks)), bool)
    cut = np.zeros(book.own.shape)
    cut_lag = np.zeros(book.own.shape)
    for place, suspect in enumerate(suspects):
        if suspect.own is not None and suspect.lag is not None:
            own_of[:, suspect.column] = without[:, place]
            cut[:, suspect.column], cut_lag[:, suspect.column] = suspect.own, suspect.lag
    took = _took(book, used, suspects, without)
    now = np.repeat(book.start[None, :], variants, 0)
    last = np.full((len(book.took), variants), -np.inf)
    through = np.full((len(book.took), variants), -np.inf)
    ends = np.zeros((len(book.steps), variants))
    mine = own_of.astype(float)
    absent = np.where(np.isfinite(book.spread), 0.0, -np.inf)
    full: list[bool] = np.atleast_1d(np.isfinite(book.spread).all(1)).tolist()
    kinds: list[int] = book.kind.tolist()
    abouts: list[int] = book.about.tolist()
    coupled: list[bool] = book.coupled.tolist()
    before: list[int] = book.before.tolist()
    own, lag, spread = book.own, book.lag, book.spread
    submitted: dict[int, Floats] = {}
    done = 0  # operations whose end is known; they are in order of their last part
    any_cut: list[bool] = np.atleast_1d(cut.any(1)).tolist()
    any_lag: list[bool] = np.atleast_1d(cut_lag.any(1)).tolist()
    for event in range(len(kinds)):
        kind, about = kinds[event], abouts[event]
        now += own[event]
        if any_cut[event]:
            now -= mine * cut[event]
        if kind == SUBMIT:
            if not coupled[about]:
                submitted[about] = now.copy()
            last[about] = now.max(1) if full[about] else (now + absent[about]).max(1)
        elif kind == WAIT:
            if coupled[about]:
                while done <= about:
                    earlier = before[done]
                    begun = last[done] if earlier < 0 else np.maximum(last[done], through[earlier])
                    through[done] = begun + took[:, done]
                    done += 1
                ready = through[about][:, None] + spread[about]
            else:
                # The answer to one rank depends on no other rank's part.
                ready = submitted.pop(about) + book.through[about] + spread[about] - book.last[about]
            np.maximum(now, ready, out=now, where=book.there[event])
            now += lag[event]
            if any_lag[event]:
                now -= mine * cut_lag[event]
        elif about >= 0:
            ends[about] = now.mean(1)
    by_variant: Floats = ends.T
    return by_variant


def _took(book: Ledger, used: Resources, suspects: Sequence[Suspect], without: NDArray[np.bool_]) -> Floats:
    """Returns how long each operation takes in each variant; shape (variants, o).

    The saved time is at most the sum of these parts, and an operation lasts at least as long as the busiest of its
    daemons and links still is.
    """
    took = np.repeat(book.took[None, :], len(without), 0)
    slow = [(place, suspect) for place, suspect in enumerate(suspects) if suspect.took is not None]
    if not slow:
        return took
    every = {"daemon": used.daemon, "negotiation": used.negotiation, "wire": used.wire}
    for variant, gone in enumerate(without):
        if not gone.any():
            continue
        saved = np.zeros(len(book.took))
        left = {cause: times for cause, times in every.items()}
        for place, suspect in slow:
            if gone[place] and suspect.took is not None:
                saved += suspect.took
                left[suspect.cause] = left[suspect.cause].copy()
                left[suspect.cause][:, suspect.column] -= suspect.took
        busiest = np.max([times.max(1) for times in left.values() if times.shape[1]], 0)
        took[variant] = np.clip(np.maximum(book.took - saved, busiest), 0, book.took)
    return took


# --- more than chance -------------------------------------------------------------------------------------------------
# Noise of machines is neither normal nor even, so that all of this goes by medians and ranks: a level is a running
# median that is far from zero for the scatter of the series; a spike is far from the level; and which columns have
# levels and spikes more often than chance would give them is found by dealing them anew.


def _signals(excess: Floats, lengths: Floats) -> Floats:
    """Returns the part of each excess that is no chance: at least 0, of shape (steps, columns) as `excess` is.

    Args:
        excess: ns by which each was slower than the others, in each step.
        lengths: of the steps, ns.
    """
    count, width = excess.shape
    found = np.zeros(excess.shape)
    if count < 4 or not width:
        return found
    typical = float(np.median(lengths))
    levels = np.stack([_running_median(excess[:, column]) for column in range(width)], 1)
    # From one step to the next a level seldom changes, and spikes are seldom side by side: the lower one is the noise.
    changes = np.median(np.abs(np.diff(excess, axis=0)), 0) / np.sqrt(2)
    scatter = _TO_SIGMA * np.minimum(np.median(np.abs(excess - levels), 0), changes) * (1 + 4 / count)
    scatter = np.maximum(np.maximum(scatter, 0.5 * np.median(scatter)), 1e-5 * typical)
    window = _window(count)
    for column in range(width):
        its, level, sigma = excess[:, column], levels[:, column], scatter[column]
        middle = float(np.median(its))
        always = middle > max(_FAR * _OF_MEDIAN * sigma / np.sqrt(count), 0.01 * typical)
        base = middle if always else 0.0
        raised = level > max(base, 0.0) + max(_FAR * _OF_MEDIAN * sigma / np.sqrt(window), 0.5 * _SMALL * typical)
        lowered = always & (level < base - _FAR * _OF_MEDIAN * sigma / np.sqrt(window))
        found[:, column] = np.maximum(np.where(raised | lowered, level, base), 0)
        centre = np.where(raised | lowered, level, middle)
        over = its - centre
        spikes = over > max(_FAR * sigma, _SMALL * typical)
        found[spikes, column] = np.maximum(its[spikes] - min(middle, 0.0 if not always else middle), 0)
        rhythm = _rhythm(np.where(spikes, 0.0, over), sigma, _SMALL * typical)
        if rhythm is not None:
            period, phase, more = rhythm
            beats = np.arange(count) % period == phase
            found[beats & ~spikes, column] += more
    bounded: Floats = np.clip(found, 0, np.maximum(excess + 2 * scatter, 0))
    return bounded


def _window(count: int) -> int:
    return min(_WINDOW, count - 1 + count % 2)


def _running_median(values: Floats) -> Floats:
    window = _window(len(values))
    padded = np.pad(values, window // 2, "reflect" if len(values) > window // 2 else "edge")
    middle: Floats = np.median(sliding_window_view(padded, window), axis=1)
    return middle


def _rhythm(over: Floats, sigma: float, least: float) -> tuple[int, int, float] | None:
    """Returns the period, phase and mean excess of steps that come again and again and are slower than the others, but
    not so much that a single one would stand out."""
    count = len(over)
    best: tuple[float, int, int, float] | None = None
    calm = np.clip(over, -3 * sigma, 6 * sigma)
    for period in range(2, min(64, count // 4) + 1):
        whole = count // period * period
        means = calm[:whole].reshape(-1, period).mean(0)
        phase = int(means.argmax())
        repeats = count // period
        rest = float(np.delete(means, phase).mean())
        score = (means[phase] - rest) / (sigma / np.sqrt(repeats))
        # Of all periods and phases the best one was taken.
        if score > 5.5 and means[phase] - rest > least and (best is None or score > best[0]):
            best = float(score), period, phase, float(means[phase] - rest)
    return None if best is None else best[1:]


def _chance(signal: Floats, column: int) -> float:
    """Returns how likely a column would have at least its sum by chance, if whoever is slow in a run of steps were
    drawn anew each time.

    Runs are as long as those of the others usually are: a machine that is busy for a while makes one rank slow in many
    steps that follow each other.
    """
    count, width = signal.shape
    if width < 2 or not signal[:, column].any():
        return 1.0
    others = np.delete(signal, column, 1) > 0
    starts = (others & ~np.vstack([np.zeros((1, width - 1), bool), others[:-1]])).sum(0)
    runs = np.sort(np.where(starts > 0, others.sum(0) / np.maximum(starts, 1), 1.0))
    size = min(max(round(float(runs[(width - 2) // 2])), -(-count // _MOST_BLOCKS)), count)
    blocks = np.add.reduceat(signal, np.arange(0, count, size), axis=0)
    blocks = blocks[blocks.any(1)]
    drawn = np.random.default_rng(0).integers(0, width, (_DRAWS, len(blocks)))
    sums = blocks[np.arange(len(blocks)), drawn].sum(1)
    return float((1 + (sums >= blocks[:, column].sum() * (1 - 1e-9)).sum()) / (_DRAWS + 1))


def _period_of(steps: Ints) -> int:
    """Returns n if these increasing numbers are every n-th, but for a few; 0 if they are not."""
    if len(steps) < 3:
        return 0
    apart = np.diff(steps)
    values, counts = np.unique(apart, return_counts=True)
    period = int(values[counts.argmax()])
    regular = counts.max() >= 0.6 * len(apart) and (apart % period == 0).mean() >= 0.85
    return period if period > 1 and regular else 0
