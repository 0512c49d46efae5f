"""`fusion-trace stragglers` says which rank, host or link is slow, why, and the loss of the others by it.

Each rank, daemon and link is compared with the others of its kind in the same step. The part of its excess that is more
than chance (`evidence`) is taken away, and the steps are added up again (`counterfactual`): by how much they would have
been shorter is the loss. Of several at once, each gets the mean of its share in any order (its Shapley
value), so that all of them together have cost as much as would be saved without all of them, and never more.

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

from fusion_rt.tracing.format import Role
from fusion_trace.analyse import evidence
from fusion_trace.analyse.columns_of_spans import Floats, Ints, lower_middle_of_others
from fusion_trace.analyse.counterfactual import Suspect, replay
from fusion_trace.analyse.gaps import unseen
from fusion_trace.analyse.ledger import Ledger, ledger
from fusion_trace.analyse.link_figures import Link, one_shaper
from fusion_trace.analyse.resources import Resources, resources
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import operations
from fusion_trace.read.rows import NEVER

WORTH_TELLING = 0.02  # of the time of all steps, that a finding costs
CLEARLY = 0.3  # of what is usual: daemons and links that differ by less are alike
_ALIKE = 0.1  # of the bytes of the link that carries most in a step: links that carry less are not compared with it
LIKELY = 0.01  # chance, of any of its kind, up to which a finding is told
SINGULAR = 5.0  # times what anybody else costs, and
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
        self.totals: dict[str, tuple[Floats, Floats]] = {}  # by cause: what each took in each step, and the others
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
        found = evidence.signals(took - usual, book.lengths)
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
        found = evidence.signals(sums[0] - sums[1], self.book.lengths)
        # How a link is used matters a little: bursts are faster than streams, and who is last sends all at once.
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
        ends = replay(self.book, self.used, suspects, without)
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
            likely = min(likely, evidence.chance(left, rest.index(column)) * min(len(rest), _MOST_COUNTED))
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
        ends = replay(self.book, self.used, suspects, subsets[:, of_unit])[:, -1]
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
        slow = signal >= max(evidence.SMALL * np.median(book.lengths), 0.25 * np.percentile(signal[signal > 0], 90))
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
            every=evidence.period_of(book.steps[slow]),
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


def document(trace: JobTrace, found: Sequence[Finding]) -> dict[str, object]:
    """Returns what `--json` shows; all times in ns."""
    return {"job": trace.job, "stragglers": [asdict(finding) for finding in found], "problems": list(trace.problems)}
