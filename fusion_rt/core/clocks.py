"""Measurement of the offset of another host's clock, from timestamps that go there and back.

Each exchange gives four times (NTP; Mills, RFC 5905): the request is sent here at t1 and received there at t2, the
answer is sent there at t3 and received here at t4. If both ways take equally long, the other clock is ahead by

    offset = ((t2 - t1) + (t3 - t4)) / 2,    and however long the ways take, the error is at most half of
    round trip = (t4 - t1) - (t3 - t2).

Daemons record each exchange, and readers of the records choose among them (`fusion_trace.read.alignment`). All times
are integers, in nanoseconds.
"""

from __future__ import annotations

from typing import NamedTuple


class Measurement(NamedTuple):
    """One exchange: the other clock minus this one (ns), and the round trip (ns)."""

    offset: int
    round_trip: int


def measure(t1: int, t2: int, t3: int, t4: int) -> Measurement | None:
    """Computes the measurement of four times; None if they are impossible: the round trip, or the time that the other
    side took, is negative."""
    round_trip = (t4 - t1) - (t3 - t2)
    if not 0 <= round_trip <= t4 - t1:
        return None
    return Measurement(((t2 - t1) + (t3 - t4)) // 2, round_trip)
