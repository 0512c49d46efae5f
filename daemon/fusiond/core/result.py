"""The record of one rank's result of an operation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion_rt import wire
from fusion_rt.host.arena import Segment
from fusiond.core.contribution import Array


@dataclass
class Result:
    """Values that a local member gets, where they do not lie where its input lay.

    `segment`: the sealed memfd around `array` (uint8) when it is too large for a message. `sizes`: rows from each rank.
    """

    array: Array
    segment: Segment | None = None
    sizes: tuple[int, ...] = ()

    @classmethod
    def allocate(cls, nbytes: int, sizes: tuple[int, ...] = (), place: Array | None = None) -> Result:
        """Makes a result of `nbytes` bytes with undefined contents.

        Args:
            place: where the worker awaits it (`Contribution.place`), of any dtype; None: in memory of its own.

        Raises:
            ArenaError: memory is out.
        """
        if place is not None:
            return cls(place.view(np.uint8), None, sizes)
        if nbytes <= wire.MAX_INLINE:
            return cls(np.empty(nbytes, np.uint8), None, sizes)
        segment = Segment.create(nbytes)
        return cls(np.frombuffer(segment.view, np.uint8), segment, sizes)
