"""Which operation of its name one is: by its clock the daemons pair it with those of the other ranks."""

from __future__ import annotations

from typing import TypeAlias

_CLOCKS_OF_A_JOIN = 1 << 24  # clocks between one join and the next

Identity: TypeAlias = tuple[int, str | int]  # a process set and a name; or a plan, less than 0, and its bucket


class Clocks:
    """Counts the operations of each identity.

    Args:
        first: where each count begins.

    Attributes:
        joins: all ranks have joined so many times.
    """

    def __init__(self, first: int) -> None:
        self.joins = 0
        self._first = first
        self._next: dict[Identity, int] = {}

    def next(self, identity: Identity) -> int:
        """The clock of the next operation."""
        return self._next.get(identity, self._first)

    def count(self, identity: Identity) -> int:
        """The clock of this operation, which the next one does not have any more."""
        clock = self._next.get(identity, self._first)
        self._next[identity] = clock + 1
        return clock

    def joined(self) -> None:
        """All ranks have joined, and have not taken the same number of steps: from here on they count alike again."""
        self.joins += 1
        self._first += _CLOCKS_OF_A_JOIN
        self._next.clear()
