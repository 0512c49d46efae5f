"""By how much another host's clock differs from this one's, from timestamps that go there and back.

Of each exchange four times are known (NTP; Mills, RFC 5905): it left here at t1, came there at t2, the answer left
there at t3 and came here at t4. If both ways took equally long, the other clock is ahead by

    offset = ((t2 - t1) + (t3 - t4)) / 2,    and whatever the ways took, it is so within half of
    round trip = (t4 - t1) - (t3 - t2).

What makes a way long is waiting somewhere, so the exchange with the shortest round trip among the last ones says most
(the clock filter of RFC 5905, section 10). All times are integers, in nanoseconds.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MOST_DRIFT = 1e-4  # seconds a second by which clocks of two hosts may drift apart: twice what NTP takes clocks to be
_WINDOW = 16


class Measurement(NamedTuple):
    """One exchange: when its answer came (ns), the other clock minus this one (ns), and the round trip (ns)."""

    time: int
    offset: int
    round_trip: int


class Estimate(NamedTuple):
    """The other clock minus this one (ns), how far off that may be (ns), and how fast it changes (s/s)."""

    offset: float
    error: float
    drift: float


def measure(t1: int, t2: int, t3: int, t4: int) -> Measurement | None:
    """What four times say; None if they cannot be true: the other side took less than no time, or longer than there
    was."""
    round_trip = (t4 - t1) - (t3 - t2)
    if not 0 <= round_trip <= t4 - t1:
        return None
    return Measurement(t4, ((t2 - t1) + (t3 - t4)) // 2, round_trip)


class ClockFilter:
    """The clock of one other host. `window`: how many of the last exchanges are looked at."""

    def __init__(self, window: int = _WINDOW) -> None:
        self._latest: deque[Measurement] = deque(maxlen=window)
        self._first: Measurement | None = None

    def add(self, measurement: Measurement) -> None:
        """There was another exchange."""
        self._latest.append(measurement)
        # The drift is seen best over a long time: from the best of the first exchanges to the best of the last.
        if len(self._latest) < (self._latest.maxlen or 0) or self._first is None:
            self._first = min(self._latest, key=lambda each: each.round_trip)

    def estimate(self, now: int) -> Estimate | None:
        """What is known at a time of this clock (ns); None before the first exchange."""
        if not self._latest or self._first is None:
            return None
        best = min(self._latest, key=lambda each: each.round_trip / 2 + MOST_DRIFT * abs(now - each.time))
        drift = 0.0
        apart = best.time - self._first.time
        uncertain = (best.round_trip + self._first.round_trip) / 2
        if apart > 0 and uncertain < MOST_DRIFT * apart:  # else it says nothing that was not known
            drift = (best.offset - self._first.offset) / apart
            drift = max(-MOST_DRIFT, min(drift, MOST_DRIFT))
        age = abs(now - best.time)
        unknown = min(MOST_DRIFT, uncertain / apart) if drift else MOST_DRIFT
        return Estimate(best.offset + drift * (now - best.time), best.round_trip / 2 + unknown * age, drift)
