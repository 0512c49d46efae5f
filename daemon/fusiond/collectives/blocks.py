"""Allgather(v) and alltoall(v): the block of rows of each rank goes from its node to the nodes that want it.

Each node sends its blocks straight to the others, the next one first, so that no node is everybody's first target.
That moves the least bytes there are, N - 1 blocks out and in, and needs one hop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fusion_rt import wire
from fusion_rt.kernels import ordinary
from fusiond.collectives.agreed import Agreed, Maker
from fusiond.collectives.base import Array, Exchange, ExchangeError, Job, Once, Port, chunk_starts, raw, shared_jobs
from fusiond.core.errors import RequestError
from fusiond.core.result import Result


@dataclass(frozen=True)
class Block:
    """A block: bytes that go from one node to another as one part.

    Attributes:
        part: number of the block in the operation, the same on all nodes.
        source, target: positions of the nodes.
        nbytes: its length.
    """

    part: int
    source: int
    target: int
    nbytes: int


class Blocks(Exchange):
    """Moves blocks between nodes, and within the node.

    Args:
        port: N >= 1 nodes.
        blocks: all blocks of the operation that leave or enter this node.
        outgoing: bytes of each outgoing block, by part.
        results: length in bytes, `sizes` and place in the arena, if it has one, of each local member's result; members
            may share one (allgather).
        local_copies: (result, offset in it, bytes) of each block that stays on this node.
        incoming: (result, offset in it) of each place of an incoming block, by part.
        name: of a block, by its part, in messages to people: its sender and receiver.
    """

    def __init__(
        self,
        port: Port,
        blocks: Sequence[Block],
        outgoing: Mapping[int, Array],
        results: Sequence[tuple[int, tuple[int, ...], Array | None]],
        local_copies: Sequence[tuple[int, int, Array]],
        incoming: Mapping[int, Sequence[tuple[int, int]]],
        name: Callable[[int], str] = lambda part: f"block {part}",
    ) -> None:
        super().__init__(port)
        self.lanes = True
        self._blocks = {block.part: block for block in blocks}
        self._outgoing = outgoing
        self._shapes = results
        self._local_copies = local_copies
        self._incoming = incoming
        self._name = name
        self.local_nbytes = sum(nbytes for nbytes, _, _ in results)
        step = port.chunk_bytes
        self._once = Once(sum(len(chunk_starts(self._blocks[part].nbytes, step)) for part in incoming))

    def jobs(self, threads: int) -> Sequence[Job]:
        if any(place is None for _, _, place in self._shapes):
            return [self._allocate_and_copy]
        self._allocate()
        return shared_jobs([(self._copy(data, to), len(data), 1) for data, to in self._targets()], threads)

    def _allocate(self) -> None:
        self.results = [Result.allocate(*shape) for shape in self._shapes]

    def _allocate_and_copy(self) -> None:
        self._allocate()
        for data, targets in self._targets():
            ordinary.copy(data, targets)

    def _targets(self) -> Iterable[tuple[Array, list[Array]]]:
        """Returns each block that stays on this node, with all places that it is copied to."""
        found: dict[int, tuple[Array, list[Array]]] = {}
        for result, offset, data in self._local_copies:
            place = self.results[result].array[offset : offset + len(data)]
            found.setdefault(id(data), (data, []))[1].append(place)
        return found.values()

    @staticmethod
    def _copy(data: Array, targets: Sequence[Array]) -> Callable[[int, int], None]:
        return lambda low, high: ordinary.copy(data[low:high], [target[low:high] for target in targets])

    def start(self) -> None:
        here, nodes = self.port.position, self.port.nodes
        leaving = [block for block in self._blocks.values() if block.part in self._outgoing]
        for block in sorted(leaving, key=lambda block: ((block.target - here) % nodes, block.part)):
            for start in chunk_starts(block.nbytes, self.port.chunk_bytes):
                data = self._outgoing[block.part][start : start + self.port.chunk_bytes]
                self.port.send(block.target, block.part, start, 0, raw(data))
        if self._once.complete:
            self.port.finish()

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        places = self._incoming.get(chunk.part)
        block = self._blocks.get(chunk.part)
        step = self.port.chunk_bytes
        if places is None or block is None or block.source != position or chunk.start % step or chunk.hop:
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} is no part of this operation")
        if chunk.start >= block.nbytes or len(payload) != min(step, block.nbytes - chunk.start):
            raise ExchangeError(
                f"{self._name(chunk.part)} more or fewer bytes come than the {block.nbytes} that are expected there"
            )
        self._once.came(chunk)
        targets = [self.results[result].array[offset + chunk.start :][: len(payload)] for result, offset in places]

        def take() -> None:
            data = np.frombuffer(payload, np.uint8)
            for target in targets:
                target[:] = data

        def go_on() -> None:
            self._once.taken += 1
            if self._once.complete:
                self.port.finish()

        self.port.beside(take, go_on)


def _allgather(agreed: Agreed) -> Blocks:
    """Makes the exchange of every member's block with every other node; members who did not say where their result goes
    share one."""
    homes, here, local = agreed.homes, agreed.here, agreed.local
    nodes, position = agreed.port.nodes, agreed.port.position
    nbytes = [rows * agreed.row_nbytes for rows in agreed.rows]
    offsets = [0, *itertools.accumulate(nbytes)]
    data = {m: part.values.view(np.uint8) for m, part in zip(here, local, strict=True)}
    places = [part.place for part in local]
    if all(place is None for place in places):
        places = [None]
    blocks = []
    for m in range(len(homes)):
        for target in range(nodes):
            if target != homes[m] and position in (homes[m], target):
                blocks.append(Block(m * nodes + target, homes[m], target, nbytes[m]))
    each = range(len(places))
    return Blocks(
        agreed.port,
        blocks,
        {b.part: data[b.part // nodes] for b in blocks if b.source == position},
        [(offsets[-1], tuple(agreed.rows), place) for place in places],
        [(k, offsets[m], data[m]) for k in each for m in here],
        {b.part: [(k, offsets[b.part // nodes]) for k in each] for b in blocks if b.target == position},
    )


def _alltoall(agreed: Agreed) -> Blocks:
    """Makes the exchange of rows `splits[i][j]` from member i to member j; each member has a result of its own."""
    ranks, homes, here, row_nbytes = agreed.ranks, agreed.homes, agreed.here, agreed.row_nbytes
    splits = _known_splits(agreed) if wire.is_group(agreed.signature.process_set) else agreed.splits
    members = len(homes)
    blocks = []
    outgoing: dict[int, Array] = {}
    incoming: dict[int, Sequence[tuple[int, int]]] = {}
    copies: list[tuple[int, int, Array]] = []
    results = []
    data = [part.values.view(np.uint8) for part in agreed.local]
    for k, j in enumerate(here):
        received = tuple(splits[i][j] for i in range(members))
        starts = [row * row_nbytes for row in itertools.accumulate(received, initial=0)]
        results.append((starts[-1], received, agreed.local[k].place))
        for i in range(members):
            if i not in here:
                blocks.append(Block(i * members + j, homes[i], homes[j], received[i] * row_nbytes))
                incoming[i * members + j] = [(k, starts[i])]
    for k, i in enumerate(here):
        starts = [row * row_nbytes for row in itertools.accumulate(splits[i], initial=0)]
        for j in range(members):
            block = data[k][starts[j] : starts[j + 1]]
            if j in here:
                copies.append((here.index(j), sum(splits[m][j] for m in range(i)) * row_nbytes, block))
            else:
                blocks.append(Block(i * members + j, homes[i], homes[j], len(block)))
                outgoing[i * members + j] = block
    return Blocks(
        agreed.port,
        blocks,
        outgoing,
        results,
        copies,
        incoming,
        lambda part: f"in the rows from rank {ranks[part // members]} to rank {ranks[part % members]}",
    )


def _known_splits(agreed: Agreed) -> list[list[int]]:
    """Returns the splits of an alltoall in a group as far as they are known here: of members here, as senders and
    receivers.

    Raises:
        RequestError: two of them do not agree about the rows that one sends the other.
    """
    members, ranks, here = len(agreed.ranks), agreed.ranks, agreed.here
    splits = [[0] * members for _ in range(members)]
    for j, part in zip(here, agreed.local, strict=True):
        for i, rows in enumerate(part.receives):
            splits[i][j] = rows
    for i, part in zip(here, agreed.local, strict=True):
        for j, rows in enumerate(part.splits):
            if j in here and splits[i][j] != rows:
                raise RequestError(
                    f"rank {ranks[i]} sends {rows} rows to rank {ranks[j]}, which expects {splits[i][j]} from it"
                )
            splits[i][j] = rows
    return splits


EXCHANGES: dict[wire.Kind, Maker] = {"allgather": _allgather, "alltoall": _alltoall}
