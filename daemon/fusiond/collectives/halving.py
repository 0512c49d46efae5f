"""All-reduce by reduce-scatter and all-gather in ceil(log2 N) rounds each: a ring's bytes in few messages, for any N.

The bucket is divided into N blocks, of which each position owns one. In a round of the reduce-scatter a position sends
the farther half of the blocks that it still has to the position that many ahead, and adds the same number of blocks
that come to those that it keeps. With N = 7 it has 7, 4, 2 and 1 block: the distances are 4, 2 and 1. The
all-gather is the same backwards. Each of them moves N - 1 blocks out and in, the least there are, and needs no fold
where N is no power of two. Source: Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms",
arXiv 2410.14234, 2024, algorithms 1 and 2; where N is a power of two it is Rabenseifner's (Thakur et al., 2005).

An owner computes the final value of its block, once, and others pass it on, so all ranks get the same bits. Chunks that
are a round ahead wait, so the order in which parts are added depends on the topology alone. Blocks of a round lie next
to each other and travel together, as one or two ranges in chunks. The reduction is in place as that of a ring is, for
the same reason: blocks that were sent are overwritten with values that contain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fusion_rt import wire
from fusion_rt.codecs.base import BucketCodec
from fusiond.collectives.base import Array, Exchange, ExchangeError, Job, Port, Reducer, local_jobs, of_partials


class _Move(NamedTuple):
    """A round of a position: blocks (the first, and how many, going round) to a position and from another."""

    target: int
    outgoing: tuple[int, int]
    source: int
    incoming: tuple[int, int]


class _Round(NamedTuple):
    """A round of one exchange.

    Attributes:
        awaited: the first element of each chunk that is to come, and its end.
        early: elements that came before the round began, by the first.
    """

    move: _Move
    awaited: dict[int, int]
    early: dict[int, Array]


class Halving(Exchange):
    """All-reduce of equal arrays on N >= 2 nodes. Arguments as for `Ring`. A chunk's `hop` is its round, and its
    `start` the first element in the bucket."""

    def __init__(
        self, port: Port, reducer: Reducer, codec: BucketCodec, sources: Sequence[Array], outputs: Sequence[Array]
    ) -> None:
        super().__init__(port)
        self._reducer, self._codec, self._partials = reducer, codec, of_partials(reducer, codec)
        self._sources, self._outputs = sources, outputs
        self._mine = np.empty(len(outputs[0]), reducer.partial.storage) if reducer.widens else outputs[0]
        self.local_nbytes = len(self._mine) * reducer.dtype.itemsize * len(sources)
        moves = _moves(port.position, port.nodes)
        self._rounds = [_Round(move, self._pieces(*move.incoming), {}) for move in moves]
        self._round = -1  # where this node is
        self._sent_nbytes = 0

    def jobs(self, threads: int) -> Sequence[Job]:
        return local_jobs(self._reducer, self._sources, self._mine, threads)

    def start(self) -> None:
        self._go_on()

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        number, low = chunk.hop, chunk.start
        found = self._rounds[number] if number < len(self._rounds) else None
        if found is None or position != found.move.source or chunk.part or low not in found.awaited:
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} does not belong to this exchange")
        codec = self._codec if self._is_gathering(number) else self._partials
        values = codec.decoded(low, payload, found.awaited[low] - low)
        del found.awaited[low]
        if number == self._round:
            self._take(low, values)
            self._go_on()
        else:
            found.early[low] = values

    def _take(self, low: int, values: Array) -> None:
        """Adds what has come in a round to this node's part, or takes it as a result."""
        high = low + len(values)
        if self._is_gathering(self._round):
            for output in self._outputs:
                output[low:high] = values
        else:
            mine = self._mine[low:high]
            self._reducer.combine(values, mine, mine)

    def _go_on(self) -> None:
        """Begins the next round when nothing of this one is awaited; after the last one, finishes."""
        if self._round >= 0 and self._rounds[self._round].awaited:
            return
        self._round += 1
        if self._round == len(self._rounds):
            dense = 2 * len(self._mine) * self._reducer.dtype.itemsize * (self.port.nodes - 1) // self.port.nodes
            self._codec.note_sent(self._sent_nbytes, dense)
            self.port.finish()
            return
        move, _, early = self._rounds[self._round]
        pieces = self._pieces(*move.outgoing)
        owns = 2 * self._round == len(self._rounds)  # its block has all parts
        own = self._pieces(self.port.position, 1) if owns else {}
        touched = own if self._codec.lossless else own | pieces  # elements as they are need no pass over memory
        encoded: list[tuple[int, memoryview]] = []

        def encode() -> None:
            for low, high in own.items():
                self._finalize(low, high)
            gathers = self._is_gathering(self._round)
            codec, values = (self._codec, self._outputs[0]) if gathers else (self._partials, self._mine)
            encoded.extend((low, codec.encode(low, values[low:high])) for low, high in pieces.items())

        def send() -> None:
            for low, payload in encoded:
                self._sent_nbytes += len(payload)
                self.port.send(move.target, 0, low, self._round, payload)
            while early:
                self._take(*early.popitem())
            self._go_on()

        nbytes = sum(high - low for low, high in touched.items()) * self._reducer.partial.itemsize
        self.port.work(nbytes, encode, send)

    def _finalize(self, low: int, high: int) -> None:
        """Computes final values, here and as they will be everywhere else."""
        outputs = [output[low:high] for output in self._outputs]
        self._reducer.final([self._mine[low:high]], outputs)
        if not self._codec.lossless:
            values = self._codec.decoded(low, self._codec.encode(low, outputs[0]), high - low)
            for output in outputs:
                output[:] = values

    def _is_gathering(self, number: int) -> bool:
        return 2 * number >= len(self._rounds)

    def _pieces(self, first: int, count: int) -> dict[int, int]:
        """Returns the elements of so many blocks as they travel: the first of each chunk, and its end."""
        elements, nodes = len(self._mine), self.port.nodes
        step = max(1, self.port.chunk_bytes // self._reducer.partial.itemsize)
        ends = [min(first + count, nodes), first + count - nodes]  # beyond the last block comes block 0
        ranges = [(elements * a // nodes, elements * b // nodes) for a, b in zip((first, 0), ends, strict=True)]
        return {low: min(low + step, high) for begin, high in ranges for low in range(begin, high, step)}


@lru_cache
def _moves(position: int, nodes: int) -> Sequence[_Move]:
    """Returns the rounds of a position: those of the reduce-scatter, then those of the all-gather."""
    scatter, gather = [], []
    has = nodes
    while has > 1:
        keeps = (has + 1) // 2
        ahead, behind = (position + keeps) % nodes, (position - keeps) % nodes
        far, near = (ahead, has - keeps), (position, has - keeps)
        scatter.append(_Move(ahead, far, behind, near))
        gather.append(_Move(behind, near, ahead, far))
        has = keeps
    return (*scatter, *reversed(gather))
