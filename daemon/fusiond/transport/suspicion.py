"""When a peer that is silent is given up: an adaptive time-out for each. No I/O.

A peer's heartbeats are sent by its event loop, so silence means that its loop, its host or the way there stands still.
How long is too long is learnt from the times between heartbeats (Hayashibara, Defago, Yared and Katayama: The phi
accrual failure detector, SRDS 2004). With these times taken as normally distributed,

    phi(t) = -log10 P(a heartbeat comes later than t after the last one)

and a peer is given up when phi reaches `PHI`: at the mean plus 7 standard deviations. That is never more than the
time-out that the settings name, and never less than half of it, nor than `INTERVALS` heartbeats: processes are
scheduled late, and links come back, in ways that no time between heartbeats tells of.

Time counts only while this loop runs (`AwakeClock`): after a pause of its own, a peer first has to be heard again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import NormalDist

PHI = 12.0  # at most one heartbeat in 10**12 comes that late
INTERVALS = 5  # heartbeats that are missed at least
_WINDOW = 100  # times between heartbeats that are remembered
_ENOUGH = 10  # and the first that mean something
_LEAST_DEVIATION = 0.25  # of an interval: a peer that was very regular may still be scheduled late
_DEVIATIONS = -NormalDist().inv_cdf(10**-PHI)


class AwakeClock:
    """Seconds in which this process's loop has run.

    Args:
        clock: seconds, from any origin.
        period: the loop asks for the time at least this often (s); what is longer by more than another one is a pause.

    Attributes:
        paused: seconds that did not count, so far.
    """

    def __init__(self, clock: Callable[[], float], period: float) -> None:
        self._clock = clock
        self._period = period
        self._last = clock()
        self.paused = 0.0

    def __call__(self) -> float:
        now = self._clock()
        if now - self._last > 2 * self._period:
            self.paused += now - self._last - self._period
        self._last = now
        return now - self.paused


class Suspicion:
    """What is thought of one peer. All times are an `AwakeClock`'s, in seconds.

    Args:
        interval: between its heartbeats.
        most: silence after which it is given up in any case.
        now: it counts as heard.

    Attributes:
        limit: silence after which it is to be given up.
        longest: the longest silence so far that ended.
    """

    def __init__(self, interval: float, most: float, now: float) -> None:
        self._interval = interval
        self._most = most
        self._heard_at = now
        self._beat_at = math.nan
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self.limit = most
        self.longest = 0.0

    def heard(self, now: float) -> None:
        """Anything has come from it."""
        silence = now - self._heard_at
        if silence > self.longest:
            self.longest = silence
        self._heard_at = now

    def beat(self, now: float) -> None:
        """A heartbeat has come from it."""
        if not math.isnan(self._beat_at):
            self._times.append(now - self._beat_at)
            if len(self._times) >= _ENOUGH:
                self.limit = self._learnt()
        self._beat_at = now

    def silence(self, now: float) -> float:
        """Seconds since anything came from it."""
        return now - self._heard_at

    def _learnt(self) -> float:
        count = len(self._times)
        mean = sum(self._times) / count
        variance = sum((seconds - mean) ** 2 for seconds in self._times) / count
        deviation = max(math.sqrt(variance), _LEAST_DEVIATION * self._interval)
        least = max(INTERVALS * self._interval, self._most / 2)
        return min(self._most, max(mean + _DEVIATIONS * deviation, least))
