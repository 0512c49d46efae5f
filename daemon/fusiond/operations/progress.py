"""The progress of each local worker, and for how long it keeps others waiting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """The progress of one worker.

    Attributes:
        steps: how often it was ready in the first bucket of a plan.
        parts: how often it was ready in any bucket.
        late: seconds, in all: how much later its parts of buckets came than the first sign of them, from another local
            worker or from a peer.
    """

    steps: int = 0
    parts: int = 0
    late: float = 0.0
