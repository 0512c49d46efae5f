"""Recursive doubling all-reduce for small arrays: log2 N rounds in which pairs exchange everything they have.

In round k a position exchanges its partial result with the position whose number differs in bit k. When N is no power
of two, the positions beyond the largest one first fold their part into a partner's and get the result back at the
end. Both of a pair compute the same sum, in the same order, so the bits are equal everywhere. Source: Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 4.4.

The array travels as one chunk (`hop` is the round), and is copied when it is sent. It also serves as the barrier,
with no elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from fusion_rt import wire
from fusion_rt.codecs.base import BucketCodec
from fusion_rt.core import scratch
from fusiond.collectives.base import Array, Exchange, ExchangeError, Job, Port, Reducer, local_jobs, of_partials

_FOLD = 0
_UNFOLD = 255  # hop of the result on its way back; rounds are hops 1 to log2 N


class Doubling(Exchange):
    """All-reduce of equal arrays, each at most one chunk, on N >= 2 nodes. Arguments as for `Ring`."""

    lends = False

    def __init__(
        self, port: Port, reducer: Reducer, codec: BucketCodec, sources: Sequence[Array], outputs: Sequence[Array]
    ) -> None:
        super().__init__(port)
        self._reducer = reducer
        self._codec, self._counting = of_partials(reducer, codec), codec
        self._sent_nbytes = 0
        self._sources = sources
        self._outputs = outputs
        self._value = scratch.empty(len(outputs[0]), reducer.partial.storage) if reducer.widens else outputs[0]
        self.local_nbytes = len(self._value) * reducer.dtype.itemsize * len(sources)
        self._early: dict[int, memoryview] = {}  # by hop: a partner may be a round ahead
        self._pairs, awaited, self._partner = _rounds(port.position, port.nodes)
        self._folded = port.nodes - self._pairs
        self._awaited = [*awaited]

    def jobs(self, threads: int) -> Sequence[Job]:
        return local_jobs(self._reducer, self._sources, self._value, threads)

    def start(self) -> None:
        if self._awaited[0] == _UNFOLD:
            self._send(self.port.position - self._pairs, _FOLD)
        elif self._awaited[0] == 1:
            self._send(self._partner[1], 1)
        self._advance()

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        if chunk.hop not in self._awaited or position != self._partner[chunk.hop] or chunk.part or chunk.start:
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} does not belong to this exchange")
        if chunk.hop in self._early:
            raise ExchangeError(f"chunk {chunk.hop} of {chunk.key.name!r} came twice")
        self._early[chunk.hop] = payload
        self._advance()

    def _advance(self) -> None:
        """Takes the chunk of every round that is due, as far as they have come."""
        while self._awaited and self._awaited[0] in self._early:
            hop = self._awaited.pop(0)
            theirs = self._codec.decoded(0, self._early.pop(hop), len(self._value))
            if hop == _UNFOLD:
                self._value[:] = theirs
            else:
                mine = self._mine_as_sent(hop)
                pair = [mine, theirs] if self.port.position < self._partner[hop] else [theirs, mine]
                self._reducer.combine(pair[0], pair[1], self._value)
            if self._awaited:
                self._send(self._partner[self._awaited[0]], self._awaited[0])
            else:
                self._end()

    def _mine_as_sent(self, hop: int) -> Array:
        """Returns this node's part as the partner has it: a lossy codec changes it, and both have to add the same."""
        if self._codec.lossless or hop == _FOLD:
            return self._value
        packed = memoryview(self._codec.encode(0, self._value))
        return self._codec.decoded(0, packed, len(self._value))

    def _end(self) -> None:
        if self._folded and self.port.position < self._pairs and not self._codec.lossless:
            self._value[:] = self._mine_as_sent(_UNFOLD)  # also where no rank folded: all ranks get the same bits
        if self.port.position < self._folded:
            self._send(self._partner[_FOLD], _UNFOLD)
        self._reducer.final([self._value], self._outputs)
        dense = 2 * len(self._value) * self._reducer.dtype.itemsize * (self.port.nodes - 1) // self.port.nodes
        self._counting.note_sent(self._sent_nbytes, dense)
        self.port.finish()

    def _send(self, position: int, hop: int) -> None:
        payload = bytes(self._codec.encode(0, self._value))
        self._sent_nbytes += len(payload)
        self.port.send(position, 0, 0, hop, payload)


@lru_cache
def _rounds(position: int, nodes: int) -> tuple[int, Sequence[int], Mapping[int, int]]:
    """Returns how many positions are in pairs, from which hops this one gets something, in their order, and its partner
    in each."""
    power = nodes.bit_length() - 1
    pairs = 1 << power
    rounds = range(1, power + 1)
    awaited = (*([_FOLD] if position < nodes - pairs else []), *rounds) if position < pairs else (_UNFOLD,)
    partner = {hop: position ^ (1 << (hop - 1)) for hop in rounds}
    return pairs, awaited, partner | {_FOLD: position + pairs, _UNFOLD: position - pairs}
