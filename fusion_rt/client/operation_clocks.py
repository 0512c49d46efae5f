"""The clocks of a worker's operations: numbers that are the same on all ranks, by which operations are paired."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import GLOBAL_SET

_REMEMBERED = 1 << 17  # newer names of a process set after which one is forgotten; they take about 30 MB
_SKEW = 1 << 14  # by so many new names ranks may differ when they submit one operation, as they may do in any order


class _Names:
    """The names used in a process set, and how often: those used last at the end.

    A name is forgotten after many newer ones, so that memory has a bound also where a script gives each operation a
    name of its own. Then its count begins anew, on all ranks alike. Ranks may submit operations in different orders, so
    their numbers of newer names differ a little. Where it depends on that whether a name has been forgotten, it is
    refused.
    """

    def __init__(self) -> None:
        self._used: OrderedDict[str, tuple[int, int]] = OrderedDict()  # how often, and number of names by then
        self._names = 0  # that were new when they were used

    def count(self, name: str) -> int:
        """Returns how often a name has been used since it was new."""
        times, then = self._used.get(name, (0, self._names))
        return 0 if self._names - then > _REMEMBERED else times

    def check(self, name: str) -> None:
        """Raises `FusionError` if ranks may differ in whether they remember a name."""
        newer = self._names - self._used.get(name, (0, self._names))[1]
        if abs(newer - _REMEMBERED) <= _SKEW:
            raise FusionError(
                f"an operation named {name!r} is submitted again after {newer} operations with other names, and a name "
                f"is forgotten after about {_REMEMBERED}; an operation that comes again and again keeps its name, "
                "without the number of a step in it, or has none"
            )

    def use(self, name: str) -> None:
        """Counts a use."""
        times = self.count(name)
        self._names += times == 0
        self._used[name] = times + 1, self._names
        self._used.move_to_end(name)
        while self._names - next(iter(self._used.values()))[1] > _REMEMBERED + _SKEW:
            self._used.popitem(last=False)


class Clocks:
    """Counts the operations of each name in a process set, and those of each bucket in a plan.

    The clock of an operation has to be the same on all ranks, and no rank knows which names the others have under way,
    or are about to use again. Operations without a name are counted together, whatever their kinds, so that ranks which
    submit them in different orders notice that. That count is never forgotten.

    The operations of a group are counted together, too, and no join begins that count anew.

    Args:
        first: the first clock of each name.

    Attributes:
        joins: number of times that all ranks have joined.
    """

    def __init__(self, first: int) -> None:
        self.joins = 0
        self._first = self._began = self._free = first
        self._groups: dict[int, Iterator[int]] = {}
        self._names: defaultdict[int, _Names] = defaultdict(_Names)  # by process set
        self._unnamed: defaultdict[int, int] = defaultdict(int)  # by process set
        self._buckets: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by plan

    def next(self, plan: int, bucket: int) -> int:
        """Returns the clock of the next run of a bucket in a plan."""
        return self._first + self._buckets[plan].get(bucket, 0)

    def count(self, plan: int, bucket: int) -> int:
        """Returns the clock of this run of a bucket, and counts it: the next one has the next clock."""
        counts = self._buckets[plan]
        before = counts.get(bucket, 0)
        counts[bucket] = before + 1
        self._free = max(self._free, self._first + before + 1)
        return self._first + before

    def next_named(self, process_set: int, name: str) -> int:
        """Returns the clock of the next operation of a name.

        Raises:
            FusionError: the name comes again after so many others that ranks may differ in whether they remember it.
        """
        if name.endswith(wire.UNNAMED):
            return self._first + self._unnamed[process_set]
        names = self._names[process_set]
        names.check(name)
        return self._first + names.count(name)

    def count_named(self, process_set: int, name: str) -> None:
        """Counts an operation, which has the clock that `next_named` gave: the next one of this name has the next."""
        if name.endswith(wire.UNNAMED):
            self._unnamed[process_set] += 1
            count = self._unnamed[process_set]
        else:
            names = self._names[process_set]
            names.use(name)
            count = names.count(name)
        self._free = max(self._free, self._first + count)

    def after_join(self) -> int:
        """Returns the first clock that no operation of this rank will have had when it has joined."""
        return max(self._free, self.next_named(GLOBAL_SET, "join") + 1)

    def open_group(self, group: int) -> None:
        """Begins to count the operations of a group."""
        self._groups[group] = itertools.count(self._began)

    def count_in_group(self, group: int) -> int:
        """Returns the clock of this operation of a group, and counts it. Threads may call it at the same time."""
        return next(self._groups[group])

    def joined(self, first: int) -> None:
        """Starts all counts anew once all ranks have joined, since they have not taken the same number of steps.

        Args:
            first: the highest result of `after_join` of all ranks.
        """
        self.joins += 1
        self._first = first
        self._names.clear()
        self._unnamed.clear()
        self._buckets.clear()

    def remove(self, process_set: int) -> None:
        """Forgets the names of a process set that was removed, or a group that was closed; none will have its id."""
        self._names.pop(process_set, None)
        self._unnamed.pop(process_set, None)
        self._groups.pop(process_set, None)
