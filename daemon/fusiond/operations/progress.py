"""The progress of each local worker, and for how long it keeps others waiting. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class RankProgress:
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


class Progress:
    """The progress of the workers of one node."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = {rank: RankProgress() for rank in ranks}

    def ready(self, rank: int, bucket: int, late: float = 0.0) -> None:
        """A worker's part of a planned bucket has come, so many seconds after the first sign of that bucket."""
        progress = self.ranks[rank]
        progress.steps += bucket == 0
        progress.parts += 1
        progress.late += late
