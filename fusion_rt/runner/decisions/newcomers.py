"""The workers of an elastic job that have no place in the epoch: they begin while the others train. No I/O.

A worker that is lost is replaced in its slot, in the background, and so are slots of hosts that come filled. Such a
worker *begins* (imports, builds its model) with a provisional place, and *asks* for a real one when its script has come
to the training function. Only then other workers are interrupted for it. Workers whose daemon died wait here too, with
the state that they have.

When workers fail in one slot again and again, each waits longer than the one before, and at last the slot is given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fusion_rt.core.wording import counted
from fusion_rt.runner.decisions.outcome import Failure, in_short
from fusion_rt.runner.decisions.places import Place

STEADY_S = 60.0  # seconds in an epoch after which a worker that fails does not count as one that fails at once
_BACK_OFF_S = 1.0  # seconds before the third worker of a slot; before each later one twice as long,
_BACK_OFF_MOST_S = 60.0  # but no longer than this


@dataclass
class Newcomer:
    """A worker without a place in the epoch.

    Attributes:
        rank: which it is told that it will have.
        begun: when it was started, by the clock.
        asked: it waits for a place since then, by the clock; inf while it begins.
        has_state: it was in an epoch before.
        is_late: it has not asked in time, and is killed.
    """

    rank: int
    begun: float
    asked: float = math.inf
    has_state: bool = False
    is_late: bool = False


@dataclass
class _Slot:
    """The workers that a place has had since the first that failed."""

    failures: int = 0  # in a row
    since: float = math.inf  # when the present worker got a place in an epoch
    closed_until: float = -math.inf


class Newcomers:
    """All of them, by place.

    Args:
        clock: seconds from any moment on.
        failures: workers of a slot in a row, none after `STEADY_S` in an epoch, after which it is given up.
    """

    def __init__(self, clock: Callable[[], float], failures: int) -> None:
        self._clock = clock
        self._failures = failures
        self._slots: dict[Place, _Slot] = {}
        self.present: dict[Place, Newcomer] = {}

    @property
    def asking(self) -> list[Place]:
        """Workers that wait for a place and have no state, in the order of their requests."""
        waiting = [place for place, one in self.present.items() if one.asked < math.inf and not one.has_state]
        return sorted(waiting, key=lambda place: self.present[place].asked)

    @property
    def returning(self) -> list[Place]:
        """Workers that wait for a place and have the state, by their ranks before."""
        return sorted(
            (place for place, one in self.present.items() if one.has_state), key=lambda place: self.present[place].rank
        )

    @property
    def closed(self) -> set[Place]:
        """Slots in which no worker is started now."""
        now = self._clock()
        return {place for place, slot in self._slots.items() if now < slot.closed_until}

    @property
    def given_up(self) -> set[Place]:
        """Slots in which no worker is started ever again."""
        return {place for place, slot in self._slots.items() if slot.closed_until == math.inf}

    def are_expected(self, seconds: float) -> bool:
        """Tells whether others are about to ask, too: one began to wait less than so many seconds ago, and one still
        begins."""
        asked = [one.asked for one in self.present.values()]
        return math.inf in asked and min(asked) <= self._clock() < min(asked) + seconds

    def begin(self, place: Place, rank: int) -> None:
        """A worker is started, which will have this rank if nothing changes meanwhile."""
        self.present[place] = Newcomer(rank, self._clock())
        self._slots.setdefault(place, _Slot()).since = math.inf

    def take(self, place: Place) -> None:
        """A worker gets a place in an epoch, in which it was not before. One that had only lost its daemon has trained
        since it got its first place."""
        newcomer, slot = self.present.pop(place, None), self._slots.setdefault(place, _Slot())
        if newcomer is None or not newcomer.has_state:
            slot.since = self._clock()

    def wait(self, place: Place, rank: int) -> None:
        """A worker that had this rank cannot be in the next epoch, since its host's daemon is gone, and waits."""
        now = self._clock()
        self.present[place] = Newcomer(rank, now, now, has_state=True)

    def ask(self, place: Place) -> bool:
        """A worker has come to the training function; whether that is news."""
        if place not in self.present or self.present[place].asked < math.inf:
            return False
        self.present[place].asked = self._clock()
        return True

    def give_up(self, seconds: float) -> list[Place]:
        """Marks those that began so long ago and have not asked yet as late, and returns them, each one once."""
        now = self._clock()
        late = [
            place
            for place, one in self.present.items()
            if one.asked == math.inf and not one.is_late and now >= one.begun + seconds
        ]
        for place in late:
            self.present[place].is_late = True
        return late

    def fail(self, place: Place, failure: Failure) -> str:
        """A worker has failed, with or without a place; returns the fate of the slot if it is not used at once."""
        self.present.pop(place, None)
        now, slot = self._clock(), self._slots.setdefault(place, _Slot())
        slot.failures = slot.failures + 1 if now < slot.since + STEADY_S else 1
        if slot.failures >= self._failures:
            slot.closed_until = math.inf
            return (
                f"slot {place[1]} of host {place[0]} is abandoned: {counted(slot.failures, 'worker')} in a row failed "
                f"there, none after more than {STEADY_S:g} s of training (--restart-limit); the last: "
                f"{in_short(failure)}"
            )
        if slot.failures > 1:
            seconds = min(_BACK_OFF_S * 2.0 ** min(slot.failures - 2, 64), _BACK_OFF_MOST_S)
            slot.closed_until = now + seconds
            return f"{in_short(failure)}; another worker is started there in {seconds:g} s"
        return ""

    def close(self, place: Place) -> None:
        """A worker has ended well before it has come to the training function: no other one would do more."""
        self.present.pop(place, None)
        self._slots.setdefault(place, _Slot()).closed_until = math.inf

    def lose_one(self, place: Place) -> None:
        """There is no room for a worker any more."""
        del self.present[place]

    def lose(self, host: str) -> None:
        """A host is gone, with its workers."""
        for place in [place for place in self.present if place[0] == host]:
            del self.present[place]
