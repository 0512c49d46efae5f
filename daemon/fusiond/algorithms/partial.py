"""Partial synchronisation: the home goes on without the last ones, whose work counts in the next update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fusion_rt import algorithms
from fusiond.algorithms.home import Home, Step, Wake, combined
from fusiond.algorithms.ordered import IN_TIME, LATE, Ordered
from fusiond.core.contribution import Contribution

_REMEMBERED = 64  # arrival times that the deadline is learned from
_PATIENCE = 1.0  # seconds that an update waits at least while the deadline is being learned


class Partial(Ordered[algorithms.Partial]):
    """Backup workers (arXiv 1604.00981), with two differences: late gradients are carried over to the next update
    instead of being dropped, so that no gradient is lost; and hence the sum is divided by all ranks.

    Whoever waits in another operation is a backup, and if these are more than `backup`, all of them are.

    `aux`: the carried sum.
    """

    carries = True

    def decide(self, home: Home, part: Contribution) -> Iterator[Step]:
        _note_arrival(home, part)
        if part.version < home.version:
            home.noticed["late", part.rank] += 1
            yield self.order(home, LATE, [part])
            return
        yield from super().decide(home, part)
        if len(home.slots.get(IN_TIME, ())) == 1 and (limit := self._limit(home)) < math.inf:
            yield Wake(part.arrived + limit)

    def ready(self, home: Home, slot: dict[int, Contribution]) -> bool:
        missing = home.present - slot.keys()
        return len(missing) <= max(self.spec.backup, len(missing - home.expected))

    def update(self, home: Home, parts: Sequence[Contribution]) -> Iterator[Step]:
        values, carried = [part.values for part in parts], home.aux.get("carried")
        gradient = home.mean(values if carried is None else [*values, carried], self.ranks)
        self.apply(home, combined(parts, gradient))
        for part in parts:
            yield self.answer(home, part)

    def carry(self, home: Home, part: Contribution) -> Iterator[Step]:
        self.apply(home, Contribution(part.rank, part.values, clock=part.clock))
        yield self.answer(home, part)

    def change(self, home: Home, part: Contribution) -> None:
        """Takes a step by received and carried parts; or, of a part without rates, carries that."""
        if part.rates:
            home.aux.pop("carried", None)
            home.step(part.values, part.rates)
        else:
            carried = home.aux.setdefault("carried", np.zeros(home.elements, home.dtype.storage))
            carried += part.values

    def reseeded(self, home: Home) -> None:
        home.aux.pop("carried", None)

    def elapsed(self, home: Home, now: float) -> Iterator[Step]:
        if slot := home.slots.get(IN_TIME):
            due = min(part.arrived for part in slot.values()) + self._limit(home)
            if now >= due:
                yield self.order_update(home)
            elif due < math.inf:  # it was asked for by an update that is over
                yield Wake(due)
        yield from self.follow(home)

    def _limit(self, home: Home) -> float:
        """Returns for how long after its first part an update waits for the others (s): median + deadline * MAD of what
        is usual, and far longer than it ever took while that is being learned."""
        if not self.spec.deadline:
            return math.inf
        times = home.aux.get("arrivals", np.zeros(1))
        if len(times) < 2 * self.ranks:
            return max(_PATIENCE, 10 * float(times.max()))
        median = float(np.median(times))
        return median + self.spec.deadline * float(np.median(np.abs(times - median)))


def _note_arrival(home: Home, part: Contribution) -> None:
    """Remembers, in `aux`, how long after the first part of the update it belongs to this one has come. `scratch`: when
    this update, and the one before, had their first."""
    opened = home.scratch.setdefault("opened", np.full(2, math.nan))
    if part.version >= home.version and not home.slots.get(IN_TIME):
        opened[:] = part.arrived, opened[0]
    since = opened[0] if part.version >= home.version else opened[1]
    if not math.isnan(since):
        times = home.aux.get("arrivals", np.zeros(0))
        home.aux["arrivals"] = np.append(times, part.arrived - since)[-_REMEMBERED:]
