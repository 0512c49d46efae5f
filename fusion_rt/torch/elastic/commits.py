"""Numbers of commits, and the one from which all ranks go on after a loss.

A rank keeps its last saved state until it knows that all ranks have the new commit: a loss in the midst of one
finds ranks that have it and ranks that have not. A rank that has completed it waits for all others, and drops the one
before then. So whenever one has dropped it, all have the new one; else all have the old one. That is two-phase commit,
whose coordinator is the barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Commits:
    """The commits that a rank has.

    Attributes:
        held: their numbers, the last one at the end; none of a rank that has not been in any epoch.
        is_open: another one is under way, and not complete here.
    """

    def __init__(self) -> None:
        self.held: tuple[int, ...] = ()
        self.is_open = False

    def begin(self) -> None:
        """A commit begins; the state saved before is kept."""
        self.is_open = True

    @property
    def last(self) -> int:
        """Number of the last one; 0 before any."""
        return self.held[-1] if self.held else 0

    def complete(self) -> None:
        """This rank has done its part of it."""
        self.is_open, self.held = False, (self.last, self.last + 1)

    def settle(self, number: int) -> None:
        """Only this commit counts from now on."""
        self.is_open, self.held = False, (number,)


def agreed(held: Sequence[tuple[int, ...]], root: int) -> int:
    """Returns the number of the commit from which all ranks go on.

    Args:
        held: the numbers that each rank holds. A rank that holds none of the root's is new, or was away.
        root: the rank that has been there before.
    """
    common = set(held[root])
    if not common:
        return 0  # the job begins
    for each in held:
        common = common & set(each) or common if set(each) & set(held[root]) else common
    return max(common)


class Saver:
    """A part of the state that saves, and that keeps, while a commit is under way, the state saved before."""

    _saves: tuple[str, ...] = ("_saved",)  # names of attributes, whose values are replaced and never changed
    _before: dict[str, Any] | None = None

    def set_aside(self) -> None:
        """Keeps the state saved last, while a new one is saved."""
        self._before = {name: getattr(self, name) for name in self._saves}

    def take_back(self) -> None:
        """Has the state again that was set aside."""
        for name, value in (self._before or {}).items():
            setattr(self, name, value)

    def drop_aside(self) -> None:
        """Drops the state that was set aside, which is needed no more."""
        self._before = None
