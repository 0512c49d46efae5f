"""Elastic averaging: workers and home pull each other by a share of their difference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fusion_rt import algorithms
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Part, Step, refuse_without
from fusiond.collectives.base import Array

_BEGIN: Array = np.zeros(1, np.int64)


class EASGD(HomeAlgorithm[algorithms.EASGD]):
    """d = alpha (x_i - x); x_i -= d; x += d, in order of arrival (arXiv 1412.6651, algorithm 1)."""

    def received(self, home: Home, part: Part) -> Iterator[Step]:
        difference = self.difference(home, part)
        home.value += difference
        home.updated()
        yield Answer(part, -difference, added=True)

    def difference(self, home: Home, part: Part) -> Array:
        """alpha (x_i - x)."""
        assert home.value is not None
        alpha = self.spec.alpha or 0.9 / self.ranks
        difference: Array = part.values - home.value
        difference *= home.dtype.storage.type(alpha)
        return difference


class SynchronousEASGD(EASGD):
    """All ranks' differences to the same home, added up (arXiv 1412.6651, eqs. 3 and 4).

    A rank that has joined has no difference. Its last one, which the others may have gone on without, counts when it
    comes. `scratch`: the clock that is next.
    """

    def received(self, home: Home, part: Part) -> Iterator[Step]:
        if part.clock < home.scratch.get("clock", _BEGIN)[0]:
            yield from super().received(home, part)
            return
        home.slots.setdefault(part.clock, {})[part.rank] = part
        yield from self.gone(home, part.rank)

    def gone(self, home: Home, rank: int) -> Iterator[Step]:
        del rank
        for clock in sorted(home.slots):
            if len(home.slots[clock].keys() | home.joined) == self.ranks:
                yield from self._fire(home, clock)
        yield from refuse_without(home, "a rank has left, and synchronous elastic averaging needs all of them")

    def _fire(self, home: Home, clock: int) -> Iterator[Step]:
        parts = [part for _, part in sorted(home.slots.pop(clock).items())]
        differences = [self.difference(home, part) for part in parts]
        for difference in differences:
            home.value += difference
        home.scratch["clock"] = np.array([clock + 1])
        home.updated()
        for part, difference in zip(parts, differences, strict=True):
            yield Answer(part, -difference, added=True)


class EAWild(EASGD):
    """By several threads at once, without a lock."""

    exclusive = False
