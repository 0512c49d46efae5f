"""Trouble with a connection that people should read of once, and not every time: it breaks again and again, or its peer
does not take what is sent. No I/O; times are seconds from any origin."""

from __future__ import annotations

from collections import deque
from enum import Enum

_SPAN = 60.0  # seconds in which breaks belong together
MANY = 3  # breaks that make an episode


class Break(Enum):
    """What a break of a connection is: one of its own, the one that begins an episode, or a further one of that."""

    SINGLE = "single"
    BEGINS = "begins"
    FURTHER = "further"


class Flapping:
    """How often the connections to a peer break.

    Attributes:
        episodes: how often they began to break again and again.
        under_way: whether they do, as of the last break.
    """

    def __init__(self) -> None:
        self._breaks: deque[float] = deque(maxlen=MANY)
        self.under_way = False
        self.episodes = 0

    def broke(self, now: float) -> Break:
        """One has broken."""
        if self._breaks and now - self._breaks[-1] > _SPAN:
            self._breaks.clear()
            self.under_way = False
        self._breaks.append(now)
        if self.under_way:
            return Break.FURTHER
        if len(self._breaks) < MANY or now - self._breaks[0] > _SPAN:
            return Break.SINGLE
        self.under_way = True
        self.episodes += 1
        return Break.BEGINS


class Slowness:
    """Whether a peer takes what is sent to it.

    Args:
        after: seconds without an acknowledgement, while some are due, that make an episode.

    Attributes:
        episodes: how many there have been.
        since: when the last acknowledgement came, or nothing was due.
    """

    def __init__(self, after: float, now: float) -> None:
        self._after = after
        self._acknowledged = 0
        self._under_way = False
        self.since = now
        self.episodes = 0

    def look(self, now: float, acknowledged: int, due: int) -> bool:
        """To be called again and again, with the serial acknowledged last and how many are due: whether an episode
        begins."""
        if not due or acknowledged != self._acknowledged:
            self._acknowledged = acknowledged
            self._under_way = False
            self.since = now
        elif not self._under_way and now - self.since > self._after:
            self._under_way = True
            self.episodes += 1
            return True
        return False
