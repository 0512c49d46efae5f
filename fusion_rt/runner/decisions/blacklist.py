"""Hosts that failed are left out for a while, twice as long each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_JITTER = 0.5  # hosts that failed together do not all come back at the same moment


@dataclass
class _HostFailures:
    failures: int = 0
    until: float = 0.0


class Blacklist:
    """The hosts that are left out. No host is for ever, since its fault may have been mended.

    Args:
        least: seconds that a host is left out the first time.
        most: seconds that a host is left out at most.
        clock: seconds from any moment on.
        rng: draws how much longer than the least a time is, up to half of it.
    """

    def __init__(self, least: float, most: float, clock: Callable[[], float], rng: random.Random) -> None:
        self._least = least
        self._most = most
        self._clock = clock
        self._rng = rng
        self._entries: dict[str, _HostFailures] = {}

    def add(self, host: str) -> float:
        """A host failed; how many seconds it is left out now."""
        entry = self._entries.setdefault(host, _HostFailures())
        seconds = self._least * 2.0 ** min(entry.failures, 64) * (1 + _JITTER * self._rng.random())
        seconds = min(seconds, self._most)
        entry.failures += 1
        entry.until = self._clock() + seconds
        return seconds

    def __contains__(self, host: str) -> bool:
        entry = self._entries.get(host)
        return entry is not None and self._clock() < entry.until
