"""Reduce-scatter: every rank gets its rows of the reduction, from slots at its node in which the parts meet.

Each node sends its part of a rank's rows straight to that rank's node, their *home*. A chunk of the rows is complete
when all N parts of it lie in its slot; they are then combined at once and in the order of the nodes, whatever order
they came in, so results do not depend on timing. Parts that wait are bounded by the length of the input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fusion_rt import wire
from fusion_rt.codecs.base import BucketCodec
from fusion_rt.codecs.dense import Dense
from fusion_rt.core import scratch
from fusion_rt.kernels.ordinary import Operand, Remote
from fusiond.collectives.agreed import Agreed, Maker
from fusiond.collectives.base import (
    Array,
    Exchange,
    ExchangeError,
    Job,
    Once,
    Port,
    Reducer,
    chunk_starts,
    local_jobs,
    of_partials,
    shared_jobs,
)
from fusiond.core.result import Result


class ReduceScatter(Exchange):
    """Reduces equal arrays of n elements and gives each member its range of the result.

    Args:
        port: N >= 1 nodes.
        reducer, codec: as for `Ring`.
        sources: n elements of each local member; they are not changed.
        places: where in the arena the result of each local member goes; None: into memory of its own.
        ranges: for each member of the process set, by its index, first and last element (exclusive) of its part.
        homes: position of each member's node.
        local: indices of the local members, in rank order.
    """

    def __init__(
        self,
        port: Port,
        reducer: Reducer,
        codec: BucketCodec,
        sources: Sequence[Operand],
        places: Sequence[Array | None],
        ranges: Sequence[tuple[int, int]],
        homes: Sequence[int],
        local: Sequence[int],
    ) -> None:
        super().__init__(port)
        self._reducer = reducer
        self._codec = of_partials(reducer, codec)
        self._sources = sources
        self._places = places
        self._ranges = ranges
        self._homes = homes
        self._local = local
        self._step = max(1, port.chunk_bytes // reducer.partial.itemsize)
        self._slots: dict[tuple[int, int], dict[int, Array]] = {}
        self._mine: Array = np.empty(0, reducer.partial.storage)
        self._outputs: Mapping[int, Array] = {}
        self.local_nbytes = len(sources[0]) * reducer.dtype.itemsize * len(sources)
        chunks = sum(len(self._starts(member)) for member in local)
        self._once = Once(chunks * (port.nodes - 1))

    def jobs(self, threads: int) -> Sequence[Job]:
        if self.port.nodes > 1:
            return self._local_jobs(threads)
        if any(place is None for place in self._places):
            return [self._reduce_all]
        self._allocate()
        return shared_jobs(self._whole(), threads)

    def _local_jobs(self, threads: int) -> Sequence[Job]:
        """Returns jobs that leave this node's part in `_mine`."""
        first, reducer = self._sources[0], self._reducer
        if len(self._sources) == 1 and not isinstance(first, Remote) and reducer.prescale == 1 and not reducer.widens:
            self._mine = first
        else:
            self._mine = scratch.empty(len(first), reducer.partial.storage)
        return local_jobs(reducer, self._sources, self._mine, threads)

    def _allocate(self) -> None:
        itemsize = self._reducer.dtype.itemsize
        for member, place in zip(self._local, self._places, strict=True):
            low, high = self._ranges[member]
            self.results.append(Result.allocate((high - low) * itemsize, place=place))
        self._outputs = {
            member: result.array.view(self._reducer.dtype.storage)
            for member, result in zip(self._local, self.results, strict=True)
        }

    def _whole(self) -> list[tuple[Callable[[int, int], None], int, int]]:
        """Returns each member's reduction as a piece of work (`shared_jobs`), where all members are on this node."""

        def work(start: int, output: Array) -> Callable[[int, int], None]:
            return lambda low, high: self._reducer.whole(
                [source[start + low : start + high] for source in self._sources], [output[low:high]]
            )

        itemsize = self._reducer.dtype.itemsize
        return [(work(self._ranges[m][0], out), len(out), itemsize) for m, out in self._outputs.items()]

    def _reduce_all(self) -> None:
        self._allocate()
        for work, length, _ in self._whole():
            work(0, length)

    def start(self) -> None:
        nodes, here = self.port.nodes, self.port.position
        if nodes == 1:
            self.port.finish()
            return
        self._allocate()
        for member in sorted(range(len(self._ranges)), key=lambda m: ((self._homes[m] - here) % nodes, m)):
            for start in self._starts(member):
                if self._homes[member] == here:
                    self._fill(member, start, here, self._mine[slice(*self._range(member, start))])
                else:
                    low, high = self._range(member, start)
                    packed = self._codec.encode(low, self._mine[low:high])
                    self.port.send(self._homes[member], member, start, 0, packed)
        if self._once.complete:
            self.port.finish()

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        member = chunk.part
        if member not in self._outputs or chunk.start not in self._starts(member) or chunk.hop != 0:
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} is no part of this operation")
        self._once.note(chunk, position)
        low, high = self._range(member, chunk.start)
        self._fill(member, chunk.start, position, self._codec.decoded(low, payload, high - low))
        if self._once.complete:
            self.port.finish()

    def _fill(self, member: int, start: int, position: int, part: Array) -> None:
        slot = self._slots.setdefault((member, start), {})
        slot[position] = part
        if len(slot) == self.port.nodes:
            output = self._outputs[member][start : start + len(part)]
            self._reducer.final([slot[p] for p in range(self.port.nodes)], [output])
            slot.clear()

    def _starts(self, member: int) -> range:
        low, high = self._ranges[member]
        return chunk_starts(high - low, self._step)

    def _range(self, member: int, start: int) -> tuple[int, int]:
        """Elements of the input in the chunk at `start` of a member's range."""
        low, high = self._ranges[member]
        return low + start, min(low + start + self._step, high)


def rows_of_members(rows: int, members: int) -> list[tuple[int, int]]:
    """Returns the first and last row (exclusive) of each member: as equal as possible, the first ones get one more."""
    each, more = divmod(rows, members)
    bounds = [m * each + min(m, more) for m in range(members + 1)]
    return list(itertools.pairwise(bounds))


def _reduce_scatter(agreed: Agreed) -> ReduceScatter:
    bounds = [row * agreed.row_elements for row in itertools.accumulate(agreed.rows, initial=0)]
    places = [part.place for part in agreed.local]
    return _scatter(agreed, places, list(itertools.pairwise(bounds)))


def _reduce(agreed: Agreed) -> ReduceScatter:
    """Makes a reduce-scatter of which one member gets all."""
    root = agreed.ranks.index(agreed.signature.root)
    ranges = [(0, agreed.layout.elements if member == root else 0) for member in range(len(agreed.ranks))]
    empty: Array = np.empty(0, agreed.layout.dtype.storage)
    places = [part.place if member == root else empty for member, part in zip(agreed.here, agreed.local, strict=True)]
    return _scatter(agreed, places, ranges)


def _scatter(agreed: Agreed, places: Sequence[Array | None], ranges: Sequence[tuple[int, int]]) -> ReduceScatter:
    sources = [part.values for part in agreed.local]
    # One node encodes nothing, so the codec's kernels are not prepared.
    opened = (agreed.codec if agreed.port.nodes > 1 else Dense()).open(agreed.layout)
    return ReduceScatter(agreed.port, agreed.reducer, opened, sources, places, ranges, agreed.homes, agreed.here)


EXCHANGES: dict[wire.Kind, Maker] = {"reducescatter": _reduce_scatter, "reduce": _reduce}
