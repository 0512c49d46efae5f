"""Decoupled DiLoCo: learners post how far they have come, and an outer step is taken when enough of them have."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fusion_rt import algorithms
from fusiond.algorithms.home import Home, HomeAlgorithm, Step, Wake, combined
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution

_NEVER: Array = np.array([math.inf])
_PATIENCE = 1.0  # seconds for which a learner that waits for its answer is kept waiting for a quorum
_REMEMBERED = 16  # times between outer steps that the grace window is learned from


class Decoupled(HomeAlgorithm[algorithms.Decoupled]):
    """An outer step of SGD with Nesterov momentum on the weighted mean of the changes that have come, once there is a
    quorum and the grace window is over, or all who are expected have posted (arXiv 2604.21428).

    The mean of k of n learners counts k/n: all that they do is posted, so that there are n/k times as many steps.

    Contributions are answered with the result of the step. Their senders do not wait for that; so each home decides
    alone, and slow or lost learners are not waited for, unless the quorum cannot do without. A sender that does wait,
    as before a checkpoint, gets a step without a quorum before long.

    `slots`: 0 has the contributions of the next step. `aux`: the outer momentum. `scratch`: when the quorum was there,
    when the last steps were taken, and when the window is over (s).
    """

    waits = True
    answers_all = True

    def __init__(self, spec: algorithms.Decoupled, ranks: int) -> None:
        super().__init__(spec, ranks)
        self.quorum = spec.quorum or ranks // 2 + 1

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        home.slots.setdefault(0, {})[part.rank] = part
        yield from self._advance(home, part.arrived)

    def elapsed(self, home: Home, now: float) -> Iterator[Step]:
        if "window" in home.scratch and now >= home.scratch["window"][0]:
            yield from self._step(home, now)

    def without(self, home: Home, rank: int) -> Iterator[Step]:
        del rank
        slot = home.slots.get(0, {})
        yield from self._advance(home, max((part.arrived for part in slot.values()), default=0.0))

    def awaited(self, home: Home) -> list[int]:
        return sorted(_missing(home))

    def _advance(self, home: Home, now: float) -> Iterator[Step]:
        """Takes a step if it is time to, or opens the grace window."""
        slot = home.slots.get(0)
        if not slot:
            return
        until = math.inf
        if len(slot) >= self.quorum:
            until = now + self._grace(home)
        elif slot.keys() & home.occupied.keys():
            until = now + _PATIENCE
        if not _missing(home) or until <= now:
            yield from self._step(home, now)
        elif until < home.scratch.get("window", _NEVER)[0]:
            home.scratch["window"] = np.array([until])
            yield Wake(until)

    def _grace(self, home: Home) -> float:
        """Returns for how long a quorum waits for others (s): a share of the median time between outer steps; without
        two of them, not at all."""
        times = home.scratch.get("steps", np.zeros(0))
        return self.spec.grace * float(np.median(np.diff(times))) if len(times) > 1 else 0.0

    def _step(self, home: Home, now: float) -> Iterator[Step]:
        home.scratch.pop("window", None)
        parts = [part for _, part in sorted(home.slots.pop(0).items())]
        learners = home.present | {part.rank for part in parts}
        total = math.fsum(part.samples for part in parts) * len(learners) / len(parts)
        change = home.zeros()
        for part in parts:
            change += home.scaled(part.values, part.samples / total)
        self.apply(home, combined(parts, change))
        home.scratch["steps"] = np.append(home.scratch.get("steps", np.zeros(0)), now)[-_REMEMBERED:]
        for part in parts:
            yield self.answer(home, part)

    def change(self, home: Home, part: Contribution) -> None:
        """Takes an outer step."""
        assert home.value is not None
        kind = home.dtype.storage.type
        rate, momentum = self.spec.outer
        velocity = home.aux.setdefault("velocity", np.zeros(home.elements, home.dtype.storage))
        velocity *= kind(momentum)
        velocity += part.values
        move = home.scaled(velocity, momentum)
        move += part.values
        move *= kind(rate)
        home.value -= move
        home.updated()

    def reseeded(self, home: Home) -> None:
        home.aux.pop("velocity", None)


def _missing(home: Home) -> set[int]:
    """Returns the ranks that may post before they hear from this home: neither those that have, nor those that wait in
    another operation, or for homes. Their earlier posts may still come; these count in the next step then."""
    return home.present - home.occupied.keys() - home.slots.get(0, {}).keys()
