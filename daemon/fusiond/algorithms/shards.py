"""Gradients to parameter shards: synchronous, with bounded staleness, asynchronous, and when enough have come."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from fusion_rt import algorithms
from fusiond.algorithms.home import Answer, Home, ShardAlgorithm, Step, combined, refuse_without
from fusiond.collectives.base import Array
from fusiond.core.contribution import NO_VALUES, Contribution


class BSP(ShardAlgorithm[algorithms.BSP]):
    """The mean of all ranks' gradients of a clock is applied: the same bits on all ranks, wherever the shard is.

    A rank that has joined counts as one with a gradient of zeros, as in an all-reduce; one without a gradient does not
    count.
    """

    answers_all = True

    def combine(self, home: Home, parts: Sequence[Contribution]) -> Array:
        """Returns the gradient to be applied, of the parts of a clock that have one, in the order of their ranks."""
        contributors = {part.rank for part in parts} | home.joined
        return home.mean([part.values for part in parts], len(contributors))

    def nothing(self, home: Home, part: Contribution) -> Iterator[Step]:
        return self.received(home, part)

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        home.slots.setdefault(part.clock, {})[part.rank] = part
        yield from self.without(home, part.rank)

    def without(self, home: Home, rank: int) -> Iterator[Step]:
        for clock, slot in list(home.slots.items()):
            if len(slot.keys() | home.joined) == self.ranks:
                del home.slots[clock]
                yield from self._update(home, [slot[rank] for rank in sorted(slot)])
        yield from refuse_without(home, "a rank has left, and bsp needs all of them in every step")

    def _update(self, home: Home, parts: Sequence[Contribution]) -> Iterator[Step]:
        """Makes the update of a clock, and answers all its contributors."""
        if given := [part for part in parts if part.samples]:
            self.apply(home, combined(given, self.combine(home, given)))
        for part in parts:
            yield self.answer(home, part)


class ASP(ShardAlgorithm[algorithms.ASP | algorithms.SSP]):
    """Each gradient is applied on arrival; `aware`: divided by its staleness (arXiv 1511.05950, eq. 3)."""

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        self.apply(home, combined([part], self._divided(home, part)))
        yield from self.follow(home, part)

    def follow(self, home: Home, part: Contribution) -> Iterator[Step]:
        """Yields the steps after a part that counts already."""
        yield self.answer(home, part)

    def _divided(self, home: Home, part: Contribution) -> Array:
        stale = home.version - part.version
        if not self.spec.aware or stale <= 1:
            return part.values
        return np.divide(part.values, stale, out=home.empty())


class SSP(ASP):
    """ASP in which a rank too far ahead of the slowest one is answered when that has caught up, with the home as it is
    then (pull after the gate). A rank that waits in another operation holds no other back."""

    waits = True
    answers_all = True

    def follow(self, home: Home, part: Contribution) -> Iterator[Step]:
        home.waiting.append(part)
        yield from self._release(home)

    def nothing(self, home: Home, part: Contribution) -> Iterator[Step]:
        return self.follow(home, part)

    def without(self, home: Home, rank: int) -> Iterator[Step]:
        return self._release(home)

    def _release(self, home: Home) -> Iterator[Step]:
        """Answers workers that may go on."""
        assert isinstance(self.spec, algorithms.SSP)
        furthest = home.slowest + self.spec.staleness
        waiting, home.waiting = home.waiting, []
        for part in waiting:
            if home.done[part.rank] <= furthest:
                yield self.answer(home, part)
            else:
                home.waiting.append(part)


class Collecting(ShardAlgorithm[algorithms.Softsync | algorithms.Collaborative]):
    """Gradients add up at the home until enough are there; their senders go on at once. `aux`: the sum, and what it
    has come from."""

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        self.apply(home, combined([part], self.weighted(home, part), self.counts(part)))
        yield self.answer(home, part)

    def change(self, home: Home, part: Contribution) -> None:
        total = home.aux.setdefault("sum", np.zeros(home.elements, home.dtype.storage))
        count = home.aux.setdefault("count", np.zeros(1, np.int64))
        total += part.values
        count += part.samples
        if count[0] >= self.target():
            home.step(np.divide(total, home.dtype.storage.type(count[0]), out=home.empty()), part.rates)
            total[:], count[:] = 0, 0

    def reseeded(self, home: Home) -> None:
        home.aux.pop("sum", None)
        home.aux.pop("count", None)

    @abstractmethod
    def weighted(self, home: Home, part: Contribution) -> Array:
        """Returns the term of a part in the sum."""

    @abstractmethod
    def counts(self, part: Contribution) -> int:
        """Returns the number that a part adds to the count."""

    @abstractmethod
    def target(self) -> int:
        """Returns the count at which the sum is applied."""


class Softsync(Collecting):
    """n contributions, each divided by its staleness (arXiv 1511.05950, eqs. 3 and 5)."""

    spec: algorithms.Softsync

    def weighted(self, home: Home, part: Contribution) -> Array:
        stale = max(home.version - part.version, 1)
        return np.divide(part.values, stale, out=home.empty()) if self.spec.aware else part.values

    def counts(self, part: Contribution) -> int:
        return 1

    def target(self) -> int:
        return self.spec.contributions


class Collaborative(Collecting):
    """The mean over so many samples, of any ranks (arXiv 2106.10207, section 3)."""

    spec: algorithms.Collaborative

    def weighted(self, home: Home, part: Contribution) -> Array:
        return home.scaled(part.values, part.samples)

    def counts(self, part: Contribution) -> int:
        return part.samples

    def target(self) -> int:
        return self.spec.samples


class DCASGD(ShardAlgorithm[algorithms.DCASGD]):
    """g + lambda g * g * (w - w_bak) on arrival (arXiv 1609.08326, eqs. 10 and 14). `aux`: w_bak of each rank, which is
    what it has since it was answered last, and the mean square of g."""

    carries = True

    def change(self, home: Home, part: Contribution) -> None:
        """Takes a step; or, of a part without rates, notes that its rank has these values."""
        assert home.value is not None
        if part.samples and not part.rates:
            np.copyto(home.aux[f"w_bak/{part.rank}"], part.values)
            return
        if part.samples:
            compensated = self._compensated(home, part)
            if not _has_backups(home):  # all ranks began with the seed
                for rank in range(self.ranks):
                    home.aux[f"w_bak/{rank}"] = home.copy(home.value)
            home.step(compensated, part.rates)
        np.copyto(home.aux[f"w_bak/{part.rank}"], home.value)  # its sender is answered with this

    def _compensated(self, home: Home, part: Contribution) -> Array:
        spec = self.spec
        assert home.value is not None
        g, kind = part.values, home.dtype.storage.type
        strength: Array | float = kind(spec.variance)
        if spec.adaptive:
            square = home.aux.setdefault("square", np.zeros(home.elements, home.dtype.storage))
            square *= kind(spec.decay)
            added = home.scaled(g, 1 - spec.decay)
            added *= g
            square += added
            np.add(square, kind(1e-7), out=added)
            strength = np.divide(kind(spec.variance), np.sqrt(added, out=added), out=added)
        backup = home.aux.get(f"w_bak/{part.rank}")  # None: it has the seed, as the home does
        if backup is None:
            return g
        compensated: Array = np.multiply(strength, g, out=home.empty())
        compensated *= g
        compensated *= np.subtract(home.value, backup, out=home.empty())
        compensated += g
        return compensated

    def told(self, home: Home, part: Contribution, values: Array) -> None:
        if _has_backups(home):  # else all ranks have the seed
            self.apply(home, Contribution(part.rank, values[:], clock=home.clock - 1))  # a view: they are not its own

    def reseeded(self, home: Home) -> None:
        assert home.value is not None
        for key, kept in home.aux.items():
            if key.startswith("w_bak/"):
                np.copyto(kept, home.value)

    def asked(self, home: Home, part: Contribution) -> Answer:
        if _has_backups(home):  # else all ranks have the values of the home
            self.apply(home, combined([part], NO_VALUES, samples=0))
        return super().asked(home, part)


def _has_backups(home: Home) -> bool:
    return any(key.startswith("w_bak/") for key in home.aux)


class Hogwild(ShardAlgorithm[algorithms.Hogwild]):
    """ASP by several threads at once, without a lock (arXiv 1106.5730)."""

    exclusive = False
