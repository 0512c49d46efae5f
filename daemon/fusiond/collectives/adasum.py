"""Adasum: gradients are added where they are orthogonal, averaged where they are parallel, tensor by tensor.

Two vectors are combined into (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b, and more than two along a binary tree (`tree`)
whose leaves are the ranks: first a node's local members, through shared memory, then the nodes. Dot products, norms
and the combination are computed in float64; every level is stored, and sent, in the bucket's type. Source: Maleki et
al., "Scaling Distributed Training with Adaptive Summation", 2020.

Between nodes it is recursive doubling with full vectors (see `doubling` for the rounds). Both of a pair compute the
same from the same, in an order that depends on the chunk size alone, and without BLAS, whose sums differ between
processors: so all ranks get the same bits. Vector-halving, the paper's way, moves 2 n (N - 1) / N elements
instead of n log2 N, which is as much for 2 nodes, and 3/4 of it for 4; but it tears tensors apart, so that every level
needs an all-reduce of dot products before anything can go on.

The chunk i + 4 of a round is sent when the partner's chunk i has come. So a partner that is ahead sends 4 chunks and
then waits, and a node that has all chunks of a round knows that the partner has all of its own but the last 4, which
were copied when they were sent: the vector they came from can be overwritten with the combination. Apart from the arena
this takes one vector a node, the partner's as it came (1.5 with a lossy codec), and these few chunks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fusion_rt import wire
from fusion_rt.codecs.base import BucketCodec
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import cpu
from fusiond.collectives.base import Array, Exchange, ExchangeError, Job, Once, Port, Reducer, chunk_starts

_FOLD = 0
_UNFOLD = 255  # hop of the result on its way back; rounds are hops 1 to log2 N
_AHEAD = 4  # chunks that are sent before anything has come from the partner
_BLOCK = 128 * 1024  # elements computed at a time; with 16 Ki, two threads only fought over the interpreter's lock
_FLOAT64 = DTYPES["float64"]
_NO_NORM = math.sqrt(sys.float_info.min)  # a squared norm below it has lost its digits, or is zero

Products = tuple[float, float, float]


def tree(members: int) -> tuple[int, list[int]]:
    """Returns the shape of the tree, for local members and for nodes.

    Returns: P, the largest power of two that is not above `members`, and distances 1, 2, 4, ... P / 2. First member
        i + P, wherever there is one, is folded into member i. Then, distance by distance, i and i ^ distance combine
        what they have, for all i < P. So neighbours meet first, and for powers of two the tree is Horovod's.
    """
    levels = members.bit_length() - 1
    return 1 << levels, [1 << level for level in range(levels)]


def products(a: Array, b: Array, dtype: DType) -> Products:
    """Returns a·b, ‖a‖² and ‖b‖² of two vectors of `dtype`, in float64 and in the same order on every processor."""
    total = [0.0, 0.0, 0.0]
    x, y, product = np.empty((3, min(_BLOCK, len(a))))
    with np.errstate(all="ignore"):  # an overflow or a NaN stays one in the result
        for low in range(0, len(a), _BLOCK):
            size = min(_BLOCK, len(a) - low)
            u, v, w = x[:size], y[:size], product[:size]
            _load(a[low : low + size], dtype, u)
            _load(b[low : low + size], dtype, v)
            for which, (left, right) in enumerate(((u, v), (u, u), (v, v))):
                np.multiply(left, right, out=w)
                total[which] += float(np.add.reduce(w))
    return total[0], total[1], total[2]


def combine(a: Array, b: Array, found: Products, dtype: DType, target: Array) -> None:
    """Writes the combination of two vectors of `dtype`, whose products are `found`; `target` may be one of them."""
    dot, norm_a, norm_b = found
    weight_a = 1.0 if norm_a < _NO_NORM else 1.0 - dot / norm_a * 0.5
    weight_b = 1.0 if norm_b < _NO_NORM else 1.0 - dot / norm_b * 0.5
    x, y = np.empty((2, min(_BLOCK, len(a))))
    with np.errstate(all="ignore"):
        for low in range(0, len(a), _BLOCK):
            size = min(_BLOCK, len(a) - low)
            u, v = x[:size], y[:size]
            _load(a[low : low + size], dtype, u)
            _load(b[low : low + size], dtype, v)
            u *= weight_a
            v *= weight_b
            u += v
            _store(u, dtype, target[low : low + size])


def _load(values: Array, dtype: DType, out: Array) -> None:
    if dtype.is_half:
        cpu.convert(values, dtype, out, _FLOAT64)
    else:
        np.copyto(out, values)


def _store(values: Array, dtype: DType, out: Array) -> None:
    if dtype.is_half:
        cpu.convert(values, _FLOAT64, out, dtype)
    else:
        np.copyto(out, values, casting="same_kind")


class Adasum(Exchange):
    """Adasum of equal arrays of floating-point numbers on every node.

    Args:
        port: N >= 1 nodes.
        reducer: dtype, and the scales applied to each rank's elements and to the result; its op is of no meaning.
        codec: of chunks on the wire; not one that selects, or has a memory.
        sources, outputs: n elements each, of the local members; an output may be a source, and is then overwritten
            before the result is known.
        parts: first element and number of elements of each tensor, not overlapping. Elements between them are padding:
            the contents of the outputs there are undefined.
    """

    def __init__(
        self,
        port: Port,
        reducer: Reducer,
        codec: BucketCodec,
        sources: Sequence[Array],
        outputs: Sequence[Array],
        parts: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(port)
        self._scaler = replace(reducer, op="sum")  # a sum of one vector only scales it
        self._dtype = reducer.dtype
        self._codec = codec
        self._sources = sources
        self._outputs = outputs
        places = {output.ctypes.data for output in outputs}  # views of one place are different objects
        self._vectors = [source if source.ctypes.data in places else np.zeros_like(source) for source in sources]
        self._value = self._vectors[0]
        self._parts = [(start, start + count) for start, count in parts if count]
        n, position = len(self._value), port.position
        self.local_nbytes = n * self._dtype.itemsize * len(sources)
        self._step = max(1, port.chunk_bytes // self._dtype.itemsize)
        self._chunks = len(chunk_starts(n, self._step))
        self._pieces = self._cut()
        self._found: list[list[Products]] = [[] for _ in range(self._chunks)]  # of each piece, in this round

        self._pairs, distances = tree(port.nodes)
        self._folded = port.nodes - self._pairs
        self._partners = {hop: position ^ distance for hop, distance in enumerate(distances, 1)}
        if position < self._folded:
            self._partners[_FOLD] = position + self._pairs
        if position >= self._pairs:
            self._partners = {_UNFOLD: position - self._pairs}
        self._awaited = sorted(self._partners)
        self._received: dict[int, dict[int, Array]] = {hop: {} for hop in self._awaited}  # decoded, by hop and chunk
        self._payloads: list[memoryview] = []  # of this round
        self._once = Once(len(self._awaited) * self._chunks)

    # --- within the node ----------------------------------------------------------------------------------------------

    def jobs(self, threads: int) -> Sequence[Job]:
        """A tensor is one job's, since nothing can be combined before all of it has been read."""
        in_place = len(self._sources) == 1 and self._value is self._sources[0] and self._scaler.prescale == 1.0
        if in_place and self.port.nodes > 1:
            return ()
        groups: list[list[tuple[int, int]]] = [[] for _ in range(min(threads, len(self._parts)))]
        filled = [0] * len(groups)
        for low, high in sorted(self._parts, key=lambda part: part[0] - part[1]):
            least = filled.index(min(filled))
            groups[least].append((low, high))
            filled[least] += high - low
        return [partial(self._combine_local, group) for group in groups]

    def _combine_local(self, parts: Sequence[tuple[int, int]]) -> None:
        pairs, distances = tree(len(self._vectors))
        edges = [(i, i + pairs) for i in range(len(self._vectors) - pairs)]
        edges += [(i, i + distance) for distance in distances for i in range(0, pairs, 2 * distance)]
        for low, high in parts:
            for source, vector in zip(self._sources, self._vectors, strict=True):
                if vector is not source or self._scaler.prescale != 1.0:
                    self._scaler.local([source[low:high]], vector[low:high])
            for first, second in edges:
                a, b = self._vectors[first][low:high], self._vectors[second][low:high]
                combine(a, b, products(a, b, self._dtype), self._dtype, a)
            if self.port.nodes == 1:
                self._scaler.final([self._value[low:high]], [output[low:high] for output in self._outputs])

    # --- between nodes ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.port.nodes == 1 or not self._chunks:
            self.port.finish()
            return
        if self.port.position >= self._pairs:
            for index, payload in enumerate(self._pack([self._value])):
                self._send(self.port.position - self._pairs, index, _FOLD, payload)
        self._begin(self._awaited[0])

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        hop = chunk.hop
        due = bool(self._awaited) and hop == self._awaited[0]
        index, offset = divmod(chunk.start, self._step)
        if (
            position != self._partners.get(hop)
            or chunk.part
            or offset
            or index >= self._chunks
            or (index >= _AHEAD and not due)
        ):
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} does not belong to this adasum")
        self._once.note(chunk)
        low, high = self._range(index)
        self._received[hop][index] = self._codec.decoded(low, payload, high - low)
        if due:
            self._take(hop, index)
            self._advance()

    def _begin(self, hop: int) -> None:
        """Begins a round, and takes the chunks of it that have come before."""
        if hop not in (_FOLD, _UNFOLD):
            self._payloads = self._pack([self._value])
            for index in range(min(_AHEAD, self._chunks)):
                self._send_in_round(hop, index)
        for index in list(self._received[hop]):
            self._take(hop, index)

    def _take(self, hop: int, index: int) -> None:
        theirs = self._received[hop][index]
        low, high = self._range(index)
        if hop == _UNFOLD:
            for output in self._outputs:
                output[low:high] = theirs
            return
        if hop != _FOLD and index + _AHEAD < self._chunks:
            self._send_in_round(hop, index + _AHEAD)
        self._found[index] = [
            products(*self._ordered(hop, self._value[start:end], theirs[start - low : end - low]), self._dtype)
            for _, start, end in self._pieces[index]
        ]

    def _advance(self) -> None:
        """Ends every round of which all chunks have come."""
        while len(self._received[self._awaited[0]]) == self._chunks:
            hop = self._awaited.pop(0)
            if hop != _UNFOLD:
                self._combine(hop)
            del self._received[hop]
            if not self._awaited:
                self._end(hop)
                return
            self._begin(self._awaited[0])

    def _combine(self, hop: int) -> None:
        total = [(0.0, 0.0, 0.0)] * len(self._parts)
        for pieces, found in zip(self._pieces, self._found, strict=True):
            for (part, _, _), (dot, norm_a, norm_b) in zip(pieces, found, strict=True):
                total[part] = (total[part][0] + dot, total[part][1] + norm_a, total[part][2] + norm_b)
        for index, theirs in self._received[hop].items():
            low = index * self._step
            for part, start, end in self._pieces[index]:
                mine = self._value[start:end]
                a, b = self._ordered(hop, mine, theirs[start - low : end - low])
                combine(a, b, total[part], self._dtype, mine)

    def _end(self, hop: int) -> None:
        if hop != _UNFOLD:
            self._scaler.final([self._value], self._outputs)
            if self._folded:  # packed also where no rank folded: all ranks get the same bits
                payloads = self._pack(self._outputs)
                if self.port.position < self._folded:
                    for index, payload in enumerate(payloads):
                        self._send(self._partners[_FOLD], index, _UNFOLD, payload)
        self.port.finish()

    # --- chunks -------------------------------------------------------------------------------------------------------

    def _pack(self, arrays: Sequence[Array]) -> list[memoryview]:
        """Encodes equal arrays, by chunk; a lossy codec changes them into the receiver's values."""
        payloads = []
        for index in range(self._chunks):
            low, high = self._range(index)
            payloads.append(self._codec.encode(low, arrays[0][low:high]))
            if not self._codec.lossless:
                values = self._codec.decoded(low, payloads[-1], high - low)
                for array in arrays:
                    array[low:high] = values
        return payloads

    def _send_in_round(self, hop: int, index: int) -> None:
        payload: memoryview | bytes = self._payloads[index]
        if self._codec.lossless and index >= self._chunks - _AHEAD:
            payload = bytes(payload)  # it may be read after the round, when its place has been overwritten
        self._send(self._partners[hop], index, hop, payload)

    def _send(self, position: int, index: int, hop: int, payload: memoryview | bytes) -> None:
        self.port.send(position, 0, index * self._step, hop, payload)

    def _range(self, index: int) -> tuple[int, int]:
        """Returns the first and last element (exclusive) of a chunk."""
        return index * self._step, min((index + 1) * self._step, len(self._value))

    def _ordered(self, hop: int, mine: Array, theirs: Array) -> tuple[Array, Array]:
        return (mine, theirs) if self.port.position < self._partners[hop] else (theirs, mine)

    def _cut(self) -> list[list[tuple[int, int, int]]]:
        """Returns, for each chunk, the pieces of tensors in it: number of the tensor, first and last element
        (exclusive)."""
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(self._chunks)]
        for number, (low, high) in enumerate(self._parts):
            for index in range(low // self._step, (high - 1) // self._step + 1):
                start, end = self._range(index)
                pieces[index].append((number, max(low, start), min(high, end)))
        return pieces
