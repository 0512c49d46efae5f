"""Staging of the workers' ordinary memory: arrays of this process that an exchange works on in its place.

An all-reduce within a node needs none of it: its kernel goes through the workers' memory block by block. What sends to
other nodes needs the elements for longer, and gets them in scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from fusion_rt.core import scratch
from fusion_rt.kernels import ordinary
from fusion_rt.kernels.ordinary import Operand, Remote, are_same
from fusiond.collectives.base import Array, Job, Reducer, local_jobs, split_jobs
from fusiond.core.contribution import Contribution


@dataclass
class Staging:
    """The scratch memory of one operation.

    Attributes:
        reads: jobs that fill it, before the exchange begins.
        nbytes: infinite, since it takes a thread to read and write memory that may have to be paged in first.
    """

    nbytes: ClassVar[float] = math.inf
    reads: list[Job] = field(default_factory=list)
    _writes: list[tuple[Array, list[Remote]]] = field(default_factory=list)

    def source(self, operand: Operand) -> Array:
        """Returns an array that has the same elements, once the jobs are done; itself if it is of this process."""
        if not isinstance(operand, Remote):
            return operand
        array = scratch.empty(operand.size, operand.dtype)
        self.reads.append(partial(ordinary.copy, operand, [array]))
        return array

    def parts(self, local: Sequence[Contribution], root: int | None, combines: bool) -> list[Contribution]:
        """Returns the parts of the local members of an operation that is no all-reduce, in this process.

        Args:
            root: of a broadcast: the position of the member whose elements all get; None: of anything else.
            combines: the exchange's jobs combine the elements as they read them, wherever these are.
        """
        if root is not None:
            return self._parts_of_broadcast(local, root)
        staged = []
        for part in local:
            place: Operand | None = part.place
            array = part.values if combines else self.source(part.values)
            target = part.place
            if isinstance(place, Remote):
                target = scratch.empty(place.size, place.dtype)
                self._writes.append((target, [place]))
            staged.append(replace(part, values=array, place=target))
        return staged

    def _parts_of_broadcast(self, local: Sequence[Contribution], root: int) -> list[Contribution]:
        """All members whose place is in another process get the root's elements from one array."""
        sources: dict[int, Operand] = {part.rank: part.values for part in local}
        places: dict[int, Operand | None] = {part.rank: part.place for part in local}
        there = [place for place in places.values() if isinstance(place, Remote)]
        source = sources.get(root)
        if isinstance(source, Remote):
            shared = self.source(source)
            there = [place for place in there if not are_same(place, source)]
        elif there:
            shared = scratch.empty(there[0].size, there[0].dtype)
        if there:
            self._writes.append((shared, there))
        return [
            replace(
                part,
                values=shared if isinstance(sources[part.rank], Remote) else part.values,
                place=shared if isinstance(places[part.rank], Remote) else part.place,
            )
            for part in local
        ]

    def reduction(
        self, reducer: Reducer, sources: Sequence[Operand], outputs: Sequence[Operand], threads: int
    ) -> tuple[Reducer, list[Array], list[Array]]:
        """Returns the reducer, sources and outputs by which an exchange reduces memory that is partly in other
        processes.

        Where it makes no difference, the node's sources are combined as they are read.
        """
        here = [output for output in outputs if not isinstance(output, Remote)]
        there = [output for output in outputs if isinstance(output, Remote)]
        if reducer.widens or reducer.op == "adasum":
            arrays = [self.source(source) for source in sources]
            own = arrays[0] if isinstance(sources[0], Remote) else scratch.empty(len(arrays[0]), arrays[0].dtype)
        else:
            own = scratch.empty(len(sources[0]), sources[0].dtype)
            self.reads += local_jobs(reducer, sources, own, threads)
            arrays, reducer = [own], replace(reducer, prescale=1.0)
        if there:
            here = [own, *here]
            self._writes.append((own, there))
        return reducer, arrays, here

    def writes(self, threads: int) -> list[Job]:
        """Returns jobs that copy results to the workers."""
        jobs: list[Job] = []
        for array, targets in self._writes:
            jobs += split_jobs(_copying(array, targets), len(array), threads, array.itemsize)
        return jobs


def _copying(array: Array, targets: Sequence[Remote]) -> Callable[[int, int], None]:
    return lambda low, high: ordinary.copy(array[low:high], [target[low:high] for target in targets])
