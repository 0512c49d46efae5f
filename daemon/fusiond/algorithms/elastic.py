"""Elastic averaging: workers and home pull each other by a share of their difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fusion_rt import algorithms
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Step, combined
from fusiond.algorithms.ordered import Ordered
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution


class EASGD(HomeAlgorithm[algorithms.EASGD]):
    """d = alpha (x_i - x); x_i -= d; x += d, in order of arrival (arXiv 1412.6651, algorithm 1)."""

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        difference = _difference(home, part, self.spec.alpha or 0.9 / self.ranks)
        self.apply(home, combined([part], difference))
        yield Answer(part, np.negative(difference, out=home.empty()), added=True)

    def change(self, home: Home, part: Contribution) -> None:
        _add(home, part)


class SynchronousEASGD(Ordered[algorithms.EASGD]):
    """All ranks' differences to the same home, added up (arXiv 1412.6651, eqs. 3 and 4); of those that have left or
    joined, or wait in another operation, none."""

    def ready(self, home: Home, slot: dict[int, Contribution]) -> bool:
        return slot.keys() >= home.expected

    def update(self, home: Home, parts: Sequence[Contribution]) -> Iterator[Step]:
        differences = [_difference(home, part, self.spec.alpha or 0.9 / self.ranks) for part in parts]
        self.apply(home, combined(parts, home.mean(differences, 1)))
        for part, difference in zip(parts, differences, strict=True):
            yield Answer(part, np.negative(difference, out=home.empty()), added=True)

    def change(self, home: Home, part: Contribution) -> None:
        _add(home, part)


class EAWild(EASGD):
    """EASGD by several threads at once, without a lock."""

    exclusive = False


def easgd(spec: algorithms.EASGD, ranks: int) -> EASGD | SynchronousEASGD:
    """Makes the algorithm of an EASGD, whose home may be synchronous."""
    return SynchronousEASGD(spec, ranks) if spec.synchronous_home else EASGD(spec, ranks)


def _add(home: Home, part: Contribution) -> None:
    """Moves a home by a difference."""
    assert home.value is not None
    home.value += part.values
    home.updated()


def _difference(home: Home, part: Contribution, alpha: float) -> Array:
    """Returns alpha (x_i - x)."""
    assert home.value is not None
    difference: Array = np.subtract(part.values, home.value, out=home.empty())
    difference *= home.dtype.storage.type(alpha)
    return home.tell(difference)[1]  # so that the home moves by the same values as the worker
