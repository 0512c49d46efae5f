"""Partial synchronisation: the home goes on without the last ones, whose work counts in the next update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fusion_rt import algorithms
from fusiond.algorithms.home import Home, Part, Step, Wake
from fusiond.algorithms.ordered import LATE, UPDATE, Ordered
from fusiond.collectives.base import Array

_REMEMBERED = 64  # arrival times that the deadline is learned from
_PATIENCE = 1.0  # seconds that an update without a deadline waits at least
_IN_TIME = 1  # the slot of what counts towards the next update, at the first home


class Partial(Ordered[algorithms.Partial]):
    """Backup workers (arXiv 1604.00981), with two differences: what comes late is carried over to the next update
    instead of being dropped, so that no gradient is lost; and hence the sum is divided by all ranks.

    `aux`: what is carried.
    """

    def decide(self, home: Home, part: Part) -> Iterator[Step]:
        _note_arrival(home, part)
        if part.version < home.version:
            home.noticed["late", part.rank] += 1
            yield self.order(home, LATE, [part])
            return
        slot = home.slots.setdefault(_IN_TIME, {})
        slot[part.rank] = part
        if self.ready(home, slot):
            yield self._update(home)
        elif len(slot) == 1 and (limit := self._limit(home)) < math.inf:
            yield Wake(part.arrived + limit)

    def ready(self, home: Home, slot: dict[int, Part]) -> bool:
        return len(slot) >= max(len(home.present) - self.spec.backup, 1)

    def combine(self, home: Home, parts: Sequence[Part]) -> Array:
        carried = home.aux.pop("carried", None)
        values = [part.values for part in parts]
        return home.mean(values if carried is None else [*values, carried], self.ranks)

    def carry(self, home: Home, part: Part) -> None:
        carried = home.aux.setdefault("carried", np.zeros(home.elements, home.dtype.storage))
        carried += part.values

    def elapsed(self, home: Home, now: float) -> Iterator[Step]:
        if slot := home.slots.get(_IN_TIME):
            due = min(part.arrived for part in slot.values()) + self._limit(home)
            if now >= due:
                yield self._update(home)
            elif due < math.inf:  # it was asked for by an update that is over
                yield Wake(due)
        yield from self.follow(home)

    def gone(self, home: Home, rank: int) -> Iterator[Step]:
        del rank
        if (slot := home.slots.get(_IN_TIME)) and self.ready(home, slot):
            yield self._update(home)
        yield from self.follow(home)

    def _update(self, home: Home) -> Step:
        return self.order(home, UPDATE, [part for _, part in sorted(home.slots.pop(_IN_TIME).items())])

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


def _note_arrival(home: Home, part: Part) -> None:
    """Remembers, in `aux`, how long after the first part of the update it belongs to this one has come. `scratch`: when
    this update, and the one before, had their first."""
    opened = home.scratch.setdefault("opened", np.full(2, math.nan))
    if part.version >= home.version and not home.slots.get(_IN_TIME):
        opened[:] = part.arrived, opened[0]
    since = opened[0] if part.version >= home.version else opened[1]
    if not math.isnan(since):
        times = home.aux.get("arrivals", np.zeros(0))
        home.aux["arrivals"] = np.append(times, part.arrived - since)[-_REMEMBERED:]
