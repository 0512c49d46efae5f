"""Partial synchronisation: the home goes on without the last ones, whose work counts in the next update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fusion_rt import algorithms
from fusiond.algorithms.home import Home, Part, ShardAlgorithm, Step, Tell, Wake
from fusiond.collectives.base import Array

_REMEMBERED = 64  # arrival times that the deadline is learned from
_PATIENCE = 1.0  # seconds that an update without a deadline waits at least


_LATE, _FIRE = 0, 1  # what an order is about


class Partial(ShardAlgorithm[algorithms.Partial]):
    """Backup workers (arXiv 1604.00981), with two differences: what comes late is carried over to the next update
    instead of being dropped, so that no gradient is lost; and hence the sum is divided by all ranks.

    A worker waits for all its buckets. If each home chose for itself whom it leaves behind, two of them could wait for
    ranks that wait for the other one. So the home of the first bucket decides, and gives orders, itself included: which
    contributions (rank, clock) are late, and which ones are an update. The number of an update keeps those in order.

    `slots`: 0 has all that has come, 1 what counts towards the next update, at the first home. `aux`: what is carried,
    and the last arrival times, in seconds after the first of their update. `scratch`: when this update, and the one
    before, had their first; how many updates were ordered, and made.
    """

    def received(self, home: Home, part: Part) -> Iterator[Step]:
        if part.kind == "told":
            home.orders.append((part.clock, tuple(part.values.tolist())))
        else:
            home.slots.setdefault(0, {})[part.rank] = part
        if home.leads:
            self._note_arrival(home, part)
            if part.version < home.version:
                home.noticed["late", part.rank] += 1
                yield self._order(home, _LATE, [part])
            else:
                slot = home.slots.setdefault(1, {})
                slot[part.rank] = part
                yield from self._decide(home, self.ready(home, slot))
                if len(slot) == 1 and home.slots.get(1) is slot and (limit := self._limit(home)) < math.inf:
                    yield Wake(part.arrived + limit)
        yield from self._follow(home)

    def ready(self, home: Home, slot: dict[int, Part]) -> bool:
        return len(slot) >= max(len(home.present) - self.spec.backup, 1)

    def combine(self, home: Home, parts: Sequence[Part]) -> Array:
        carried = home.aux.pop("carried", None)
        values = [part.values for part in parts]
        return home.mean(values if carried is None else [*values, carried], self.ranks)

    def elapsed(self, home: Home, now: float) -> Iterator[Step]:
        if slot := home.slots.get(1):
            due = min(part.arrived for part in slot.values()) + self._limit(home)
            if now < due < math.inf:  # it was asked for by an update that is over
                yield Wake(due)
            yield from self._decide(home, now >= due)
            yield from self._follow(home)

    def gone(self, home: Home, rank: int) -> Iterator[Step]:
        del rank
        if slot := home.slots.get(1):
            yield from self._decide(home, self.ready(home, slot))
        yield from self._follow(home)

    def _decide(self, home: Home, fires: bool) -> Iterator[Step]:
        """Orders an update, of those who have come in time."""
        if fires:
            yield self._order(home, _FIRE, [part for _, part in sorted(home.slots.pop(1).items())])

    def _order(self, home: Home, kind: int, parts: Sequence[Part]) -> Step:
        counts = home.scratch.setdefault("counts", np.zeros(2, np.int64))  # of updates: ordered, made
        numbers = np.array([kind, *(number for part in parts for number in (part.rank, part.clock))], np.int64)
        home.orders.append((int(counts[0]), tuple(numbers.tolist())))
        counts[0] += kind == _FIRE
        return Tell(numbers, home.orders[-1][0])

    def _follow(self, home: Home) -> Iterator[Step]:
        """Carries out the orders for which everything is here."""
        counts = home.scratch.setdefault("counts", np.zeros(2, np.int64))
        came = home.slots.setdefault(0, {})
        done = True
        while done:
            done = False
            for order in list(home.orders):
                number, (kind, *pairs) = order
                wanted = dict(zip(pairs[::2], pairs[1::2], strict=True))
                here = {
                    rank: came[rank] for rank, clock in wanted.items() if rank in came and came[rank].clock == clock
                }
                missing = [rank for rank in wanted if rank not in here and rank in home.present]
                if missing or (kind == _FIRE and number != counts[1]):
                    continue
                home.orders.remove(order)
                for rank in here:
                    del came[rank]
                yield from self._carry(home, here) if kind == _LATE else self._update(home, here)
                counts[1] += kind == _FIRE
                done = True

    def _carry(self, home: Home, parts: dict[int, Part]) -> Iterator[Step]:
        for part in parts.values():
            carried = home.aux.setdefault("carried", np.zeros(home.elements, home.dtype.storage))
            carried += part.values
            yield self.answer(home, part)

    def _update(self, home: Home, parts: dict[int, Part]) -> Iterator[Step]:
        if parts:
            self.apply(home, self.combine(home, list(parts.values())), list(parts.values()))
        for part in parts.values():
            yield self.answer(home, part)

    def _note_arrival(self, home: Home, part: Part) -> None:
        """How long after the first part of the update it belongs to this one has come."""
        opened = home.scratch.setdefault("opened", np.full(2, math.nan))
        if part.version >= home.version:
            if not home.slots.get(1):
                opened[:] = part.arrived, opened[0]
            since = opened[0]
        else:
            since = opened[1]
        if not math.isnan(since):
            times = home.aux.get("arrivals", np.zeros(0))
            home.aux["arrivals"] = np.append(times, part.arrived - since)[-_REMEMBERED:]

    def _limit(self, home: Home) -> float:
        """How long after its first part an update waits for the others: median + deadline * MAD of what is usual; with
        no deadline, far longer than it ever took: then the others do something else than to contribute."""
        if not self.spec.backup and not self.spec.deadline:
            return math.inf
        times = home.aux.get("arrivals", np.zeros(1))
        if not self.spec.deadline or len(times) < 2 * self.ranks:
            return max(_PATIENCE, 10 * float(times.max()))
        median = float(np.median(times))
        return median + self.spec.deadline * float(np.median(np.abs(times - median)))
