"""Elastic averaging: workers and home pull each other by a share of their difference."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_rt import algorithms
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Part, Step, refuse_without
from fusiond.collectives.base import Array


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
    """All ranks' differences to the same home, added up (arXiv 1412.6651, eqs. 3 and 4)."""

    def received(self, home: Home, part: Part) -> Iterator[Step]:
        slot = home.slots.setdefault(part.clock, {})
        slot[part.rank] = part
        if len(slot) < self.ranks:
            yield from self.gone(home, part.rank)
            return
        del home.slots[part.clock]
        parts = [slot[rank] for rank in sorted(slot)]
        differences = [self.difference(home, part) for part in parts]
        for difference in differences:
            home.value += difference
        home.updated()
        for part, difference in zip(parts, differences, strict=True):
            yield Answer(part, -difference, added=True)

    def gone(self, home: Home, rank: int) -> Iterator[Step]:
        del rank
        return refuse_without(home, "a rank has left, and synchronous elastic averaging needs all of them")


class EAWild(EASGD):
    """By several threads at once, without a lock."""

    exclusive = False
