"""Clocks of operations: the number of an operation among those of its name, by which daemons pair the ranks' ones."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from fusion_rt.core.errors import FusionError

_MAX_NAMES = 1 << 20  # in a process set; they take about 100 MB
_CLOCKS_OF_A_JOIN = 1 << 24  # clocks between one join and the next


class Clocks:
    """Counts the operations of each name in a process set, and those of each bucket in a plan.

    A name is remembered as long as its process set: the clock of its next operation has to be the same on all ranks,
    and no rank knows which names the others have under way, or are about to use again. Only the count is kept, without
    `first`, since small integers take no memory of their own. The number of names is limited, since a script that gives
    each operation a name of its own would fill the memory.

    The operations of a group are counted together, whatever their kinds, and no join begins that count anew.

    Args:
        first: the first clock of each name.

    Attributes:
        joins: number of times that all ranks have joined.
    """

    def __init__(self, first: int) -> None:
        self.joins = 0
        self._first = self._began = first
        self._groups: dict[int, Iterator[int]] = {}
        # By process set and name; or by plan, less than 0, and bucket.
        self._counts: defaultdict[int, dict[str | int, int]] = defaultdict(dict)

    def next(self, owner: int, name: str | int) -> int:
        """Returns the clock of the next operation of a name in a process set, or of a bucket in a plan (-its id).

        Raises:
            FusionError: too many names have been used.
        """
        counts = self._counts[owner]
        if len(counts) >= _MAX_NAMES and name not in counts:
            raise FusionError(
                f"operations of {_MAX_NAMES} different names have been submitted, and {name!r} would be one more; an "
                "operation that comes again and again keeps its name, without the number of a step in it, or has none"
            )
        return self._first + counts.get(name, 0)

    def count(self, owner: int, name: str | int) -> int:
        """Returns the clock of this operation, and counts it: the next one has the next clock."""
        counts = self._counts[owner]
        before = counts.get(name, 0)
        counts[name] = before + 1
        return self._first + before

    def open_group(self, group: int) -> None:
        """Begins to count the operations of a group."""
        self._groups[group] = itertools.count(self._began)

    def count_in_group(self, group: int) -> int:
        """Returns the clock of this operation of a group, and counts it. Threads may call it at the same time."""
        return next(self._groups[group])

    def joined(self) -> None:
        """Starts all counts anew once all ranks have joined, since they have not taken the same number of steps."""
        self.joins += 1
        self._first += _CLOCKS_OF_A_JOIN
        self._counts.clear()

    def remove(self, process_set: int) -> None:
        """Forgets the names of a process set that was removed, or a group that was closed; none will have its id."""
        self._counts.pop(process_set, None)
        self._groups.pop(process_set, None)
