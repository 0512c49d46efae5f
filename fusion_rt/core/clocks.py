"""Estimates of the offset of another host's clock, from timestamps that go there and back.

Each exchange gives four times (NTP; Mills, RFC 5905): the request is sent here at t1 and received there at t2, the
answer is sent there at t3 and received here at t4. If both ways take equally long, the other clock is ahead by

    offset = ((t2 - t1) + (t3 - t4)) / 2,    and however long the ways take, the error is at most half of
    round trip = (t4 - t1) - (t3 - t2).

Ways are long because messages wait somewhere, so that of the last exchanges the one with the shortest round trip is the
most precise (the clock filter of RFC 5905, section 10). All times are integers, in nanoseconds.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MOST_DRIFT = 1e-4  # seconds a second by which clocks of two hosts may drift apart: twice what NTP takes clocks to be
_WINDOW = 16


class Measurement(NamedTuple):
    """One exchange: the time of its answer (ns), the other clock minus this one (ns), and the round trip (ns)."""

    time: int
    offset: int
    round_trip: int


class Estimate(NamedTuple):
    """The other clock minus this one (ns), the largest error of that (ns), and how fast it changes (s/s)."""

    offset: float
    error: float
    drift: float


def measure(t1: int, t2: int, t3: int, t4: int) -> Measurement | None:
    """Computes the measurement of four times; None if they are impossible: the round trip, or the time that the other
    side took, is negative."""
    round_trip = (t4 - t1) - (t3 - t2)
    if not 0 <= round_trip <= t4 - t1:
        return None
    return Measurement(t4, ((t2 - t1) + (t3 - t4)) // 2, round_trip)


class ClockFilter:
    """Estimates the clock of one other host from the last `window` exchanges."""

    def __init__(self, window: int = _WINDOW) -> None:
        self._latest: deque[Measurement] = deque(maxlen=window)
        self._first: Measurement | None = None

    def add(self, measurement: Measurement) -> None:
        """Adds an exchange."""
        self._latest.append(measurement)
        # The drift is seen best over a long time: from the best of the first exchanges to the best of the last.
        if len(self._latest) < (self._latest.maxlen or 0) or self._first is None:
            self._first = min(self._latest, key=lambda each: each.round_trip)

    def estimate(self, now: int) -> Estimate | None:
        """Returns the estimate at a time of this clock (ns); None before the first exchange."""
        if not self._latest or self._first is None:
            return None
        best = min(self._latest, key=lambda each: each.round_trip / 2 + MOST_DRIFT * abs(now - each.time))
        drift = 0.0
        apart = best.time - self._first.time
        uncertain = (best.round_trip + self._first.round_trip) / 2
        if apart > 0 and uncertain < MOST_DRIFT * apart:  # else it is no better than the bound
            drift = (best.offset - self._first.offset) / apart
            drift = max(-MOST_DRIFT, min(drift, MOST_DRIFT))
        age = abs(now - best.time)
        unknown = min(MOST_DRIFT, uncertain / apart) if drift else MOST_DRIFT
        return Estimate(best.offset + drift * (now - best.time), best.round_trip / 2 + unknown * age, drift)
