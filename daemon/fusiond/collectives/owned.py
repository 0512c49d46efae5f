"""All-reduce with a codec that has error feedback: every node owns a range of the bucket, and sums all contributions
to it. A codec is applied once to each contribution and once to the sum, not at every hop as in a ring.

1. Each node compresses its gradient, once, and sends every owner the part in the owner's range (part 0).
2. The owner adds up the parts, in the order of the nodes, so that the result is the same in every run; compresses the
   sum, of selections only its share; and sends it to all (part 1). The rest goes into its own residual.

With k selected values a node sends at most k (N - 1) / N of them in the first step, and k / N to each of N - 1 nodes in
the second, so less than 2 k values with their indices however many nodes there are. Source: Li and Hoefler,
"Near-Optimal Sparse Allreduce for Distributed Deep Learning", 2022 (there: at most 6 k words); unlike there, an owner
sends its share exactly, instead of the elements above a threshold. Ranges are adapted every 64 steps to where the
selected values were; the owners say so with their results, in 128 bytes.

A node whose gradient is not finite says so in the tag of its payload, and sends nothing else; owners that hear of it
say so instead of results. Until its step is known to count, each node can undo it: its gradient stays where it is.
A result that comes tells that all contributions were finite, because a node tells all owners the same.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from fusion_rt import wire
from fusion_rt.codecs.base import CodecError
from fusion_rt.codecs.summing import Portion, SummingBucketCodec
from fusion_rt.core import scratch
from fusiond.collectives.base import Array, Exchange, ExchangeError, Job, Port, Reducer, local_jobs, spoil
from fusiond.core.contribution import WorkerSelection

_TAG = struct.Struct("<I")  # begins every payload: of the step and the ranges that its sender is at
_COUNTS = np.dtype("<u4")
_ADAPT_EVERY = 64  # steps
_CONTRIBUTION, _RESULT = 0, 1
_BINS = 32  # into so many parts of equal length an owner divides its range when it says where the values are

_Masses: TypeAlias = Sequence[tuple[int, int, float]]  # of disjoint ascending ranges: begin, end, mass


# A payload whose length the receiver does not know travels as chunks of `port.chunk_bytes`, the last one shorter. A
# chunk's `start` is where the piece begins in the payload, in bytes. Pieces may come in any order.


def send_pieces(port: Port, position: int, part: int, payload: memoryview | bytes) -> None:
    """Sends a payload to a peer. It is empty pieces that end one whose length is a multiple of a chunk's."""
    view = memoryview(payload)
    for start in range(0, view.nbytes + 1, port.chunk_bytes):
        port.send(position, part, start, 0, view[start : start + port.chunk_bytes])


class Assembly:
    """A payload that comes piece by piece.

    Args:
        limit: the most bytes that it can have.
        piece: bytes of every piece but the last.
    """

    def __init__(self, limit: int, piece: int) -> None:
        self._limit, self._piece = limit, piece
        self._pieces: dict[int, bytes | memoryview] = {}
        self._expected = 0  # pieces; 0 until the last has come

    def add(self, start: int, payload: memoryview) -> bool:
        """Takes a piece; returns whether the payload is complete. One that is a single piece is not copied.

        Raises:
            ExchangeError: the piece is not part of a payload of that limit, or came before.
        """
        last = payload.nbytes < self._piece
        number, odd = divmod(start, self._piece)
        beyond = bool(self._expected) and (last or number >= self._expected)
        too_soon = last and any(other >= start for other in self._pieces)
        if odd or payload.nbytes > self._piece or start + payload.nbytes > self._limit or beyond or too_soon:
            raise ExchangeError(f"{payload.nbytes} bytes at {start} are no piece of at most {self._limit} bytes")
        if start in self._pieces:
            raise ExchangeError(f"the piece at {start} came twice")
        if last:
            self._expected = number + 1
        self._pieces[start] = payload if last and number == 0 else bytes(payload)
        return len(self._pieces) == self._expected

    def whole(self) -> memoryview:
        """Returns the complete payload, and forgets its pieces."""
        found = [self._pieces[at] for at in sorted(self._pieces)]
        self._pieces.clear()
        if len(found) == 1:
            return memoryview(found[0])
        whole = scratch.empty(sum(map(len, found)), np.uint8)
        np.concatenate([np.frombuffer(piece, np.uint8) for piece in found], out=whole)
        return whole.data


class Compressed(Exchange):
    """An all-reduce in which this node's gradient is compressed as a whole before anything is sent.

    Args:
        port: N nodes, N >= 2.
        reducer: a sum, or an average.
        codec: the bucket's, with its residual.
        sources, outputs: all elements of the bucket each, of the local members; an output may be a source.
        chosen: the selection of the only local member, instead of `sources`.
    """

    def __init__(
        self,
        port: Port,
        reducer: Reducer,
        codec: SummingBucketCodec,
        sources: Sequence[Array],
        outputs: Sequence[Array],
        chosen: WorkerSelection | None = None,
    ) -> None:
        super().__init__(port)
        self._reducer, self._scale = reducer, reducer.postscale * codec.loss_scale
        self._codec, self._chosen = codec, chosen
        codec.node, codec.nodes = port.position, port.nodes
        self._sources, self._outputs = sources, outputs
        self._mine: Portion = None
        self._revoke: Callable[[], None] = lambda: None  # this node's rest, left out of a sum
        self._values = outputs[0]
        self._spoiled = False  # a contribution is not finite
        self._blanked = False  # outputs are zeros where nothing is written
        self._written = False
        self._tag = self._spoiled_tag = b""
        self._sent_nbytes = 0
        self._assemblies: dict[tuple[int, int], Assembly] = {}
        self._received: set[tuple[int, int]] = set()
        passes = 1 if chosen else len(sources) + 3  # the input of compression
        self._nbytes = len(outputs[0]) * reducer.dtype.itemsize
        self.local_nbytes = self._nbytes * passes

    def jobs(self, threads: int) -> Sequence[Job]:
        return [self._contribute]

    def _contribute(self) -> None:
        if self._chosen is not None:
            self._codec.go_back = None
            self._mine = self._chosen.contribute()
        else:
            if len(self._sources) == 1 and self._reducer.prescale == 1.0:
                self._values = self._sources[0]
            for job in local_jobs(self._reducer, self._sources, self._values, 1):
                job()
            self._codec.keep()
            self._mine = self._codec.contribute(self._values)
        self._spoiled = self._codec.spoiled

    def abandon(self) -> None:
        """No rank takes this step. The codec goes back to its state of before if it has kept that, or as long as
        nothing is written where the gradient was. Else this node's payload, which is no part of any result, goes back
        to the residual."""
        if self._mine is not None and self._codec.go_back is not None:
            self._codec.go_back()
        elif self._mine is not None:
            self._revoke()
            if self._written or self._chosen is not None:
                self._codec.reclaim(self._mine)
            else:
                self._codec.undo(self._mine, self._values)
            self._codec.step -= 1  # which nodes that had not begun have not counted
        self._mine = None

    def _begin(self) -> None:
        """Sets the ranges, and the tag that tells that two nodes are at the same point, after `contribute`."""
        codec = self._codec
        if len(codec.bounds) != self.port.nodes + 1:
            codec.bounds = expected_bounds(codec, self.port.nodes)
        self._tag, self._spoiled_tag = (
            _TAG.pack(zlib.crc32(repr((codec.step, codec.bounds, spoiled)).encode())) for spoiled in (False, True)
        )

    def _tagged(self, payload: memoryview | bytes) -> bytes:
        """Returns a payload as it is sent."""
        return self._spoiled_tag if self._spoiled else self._tag + bytes(payload)

    def _send(self, position: int, part: int, whole: bytes) -> None:
        self._sent_nbytes += len(whole)
        send_pieces(self.port, position, part, whole)

    def _complete(self, position: int, chunk: wire.Chunk, payload: memoryview, limit: int) -> Assembly | None:
        """Takes a chunk; returns a peer's payload when all of it is there."""
        key = chunk.part, position
        if position == self.port.position or chunk.hop or key in self._received:
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} does not belong to this exchange")
        assembly = self._assemblies.setdefault(key, Assembly(limit + _TAG.size, self.port.chunk_bytes))
        if not assembly.add(chunk.start, payload):
            return None
        self._received.add(key)
        return self._assemblies.pop(key)

    def _opened(self, position: int, name: str, assembly: Assembly) -> memoryview:
        """Returns a peer's payload, without its tag; nothing where it is `_spoiled`."""
        view = assembly.whole()
        if view == self._spoiled_tag:
            self._spoiled = True
            return view[_TAG.size :]
        if view[: _TAG.size] != self._tag:
            raise ExchangeError(
                f"node {position} has compressed {name!r} in another number of steps, or in other ranges, "
                f"than this one ({self._codec.step}); load a checkpoint on all ranks, or on none"
            )
        return view[_TAG.size :]

    def _write(self, portion: Portion) -> None:
        self._written = True
        if self._codec.blank and not self._blanked:
            for output in self._outputs:
                output[:] = 0
            self._blanked = True
        self._codec.write(portion, self._outputs, self._scale, self._reducer.divisor)

    def _finish(self) -> None:
        """All is written, or the step is spoiled."""
        self.port.work(self._nbytes, self._end, self._ended)

    def _end(self) -> None:
        if not self._spoiled:
            self._codec.complete(self._outputs, self._scale, self._reducer.divisor)
            return
        self._codec.undo(self._mine, self._values)
        self._mine = None
        spoil(self._outputs, self._codec.layout)

    def _ended(self) -> None:
        nodes = self.port.nodes
        if self._codec.keeps_before and self._chosen is not None and not self._spoiled:
            self._codec.go_back = partial(_put_back, self._codec, self._mine, self._revoke)
        self._mine = None
        dense = 2 * self._nbytes * (nodes - 1) // nodes
        self._codec.note_sent(self._sent_nbytes, dense)
        if self._chosen is not None:
            self._chosen.correct(self._spoiled)
        self.port.finish()


def _put_back(codec: SummingBucketCodec, mine: Portion, revoke: Callable[[], None]) -> None:
    """Puts a worker's selection of a step that was complete back to its residual, with the next corrections. Only
    the worker has the residual: the rest of the step's gradient stays there."""
    revoke()
    codec.reclaim(mine)
    codec.step -= 1


class Owned(Compressed):
    """An all-reduce through the owners of ranges."""

    def start(self) -> None:
        self._begin()
        codec, nodes = self._codec, self.port.nodes
        self._adapting = codec.adapts and (codec.step - 1) % _ADAPT_EVERY == 0
        self._counts: dict[int, list[int]] = {}
        self._contributions: dict[int, Portion] = {}
        self._packed: list[tuple[int, bytes]] = []  # with the position that it goes to
        self._total: Portion = None
        self._result = b""
        self._added = 0
        self._has_concluded = self._has_sent = False
        assert nodes > 1
        self.port.work(self._nbytes, self._pack, self._begun)

    def _pack(self) -> None:
        """Packs this node's contribution to each owner; its own goes to the sum."""
        codec, here, nodes = self._codec, self.port.position, self.port.nodes
        for distance in range(1, nodes):  # so that no node is everybody's first target
            position = (here + distance) % nodes
            self._packed.append((position, self._tagged(codec.pack(self._mine, *self._range(position)))))
        low, high = self._range(here)
        self._contributed(here, codec.unpack(codec.pack(self._mine, low, high), low, high))

    def _begun(self) -> None:
        for position, whole in self._packed:
            self._send(position, _CONTRIBUTION, whole)
        self._packed.clear()
        self._go_on()

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        if chunk.part not in (_CONTRIBUTION, _RESULT):
            raise ExchangeError(
                f"a chunk of {chunk.key.name!r} from node {position} is neither contribution nor result"
            )
        result = chunk.part == _RESULT
        low, high = self._range(position if result else self.port.position)
        extra = _BINS * _COUNTS.itemsize if result and self._adapting else 0
        assembly = self._complete(position, chunk, payload, self._codec.max_encoded_nbytes(high - low) + extra)
        if assembly is not None:
            take = self._take_result if result else self._take_contribution
            self.port.work(self._nbytes, partial(take, position, chunk.key.name, assembly), self._go_on)

    def _take_contribution(self, position: int, name: str, assembly: Assembly) -> None:
        packed = self._opened(position, name, assembly)
        portion = None if self._spoiled else self._codec.unpack(packed, *self._range(self.port.position))
        self._contributed(position, portion)

    def _take_result(self, position: int, name: str, assembly: Assembly) -> None:
        packed = self._opened(position, name, assembly)
        if self._spoiled:
            return
        extra = _BINS * _COUNTS.itemsize if self._adapting else 0
        if len(packed) < extra:
            raise CodecError(f"node {position} did not say where the values of its range are")
        portion = self._codec.unpack(packed[extra:], *self._range(position))
        if extra:
            self._counts[position] = np.frombuffer(packed[:extra], _COUNTS).tolist()
        self._write(portion)

    def _contributed(self, position: int, portion: Portion) -> None:
        """Adds up received parts, as far as they are next in the order of the nodes; then the sum is concluded."""
        self._contributions[position] = portion
        while self._added in self._contributions:
            portion = self._contributions.pop(self._added)
            if not self._spoiled:
                self._total = portion if self._added == 0 else self._codec.add(self._total, portion)
            self._added += 1
        if self._added == self.port.nodes:
            self._conclude()

    def _conclude(self) -> None:
        here, codec = self.port.position, self._codec
        low, high = self._range(here)
        said = payload = b""
        if not self._spoiled:
            if self._adapting:
                self._counts[here] = codec.counts(self._total, _bins(low, high))
                said = np.array(self._counts[here], _COUNTS).tobytes()
            kept = codec.conclude(self._total, self.port.nodes)
            self._revoke = partial(codec.revoke, self._total, kept)
            payload = bytes(codec.pack(kept, low, high))
        self._result = self._tagged(said + payload)
        self._payload = payload
        self._has_concluded = True

    def _go_on(self) -> None:
        """Sends this node's sum once it is there, writes it, and finishes when all others have come."""
        here, nodes = self.port.position, self.port.nodes
        if self._has_concluded and not self._has_sent:
            self._has_sent = True
            for distance in range(1, nodes):
                self._send((here + distance) % nodes, _RESULT, self._result)
            self.port.work(self._nbytes, self._write_own, self._go_on)
        elif self._has_sent and sum(part == _RESULT for part, _ in self._received) == nodes - 1:
            if self._adapting and not self._spoiled:
                self._codec.bounds = _adapted_bounds(self._codec, [self._counts[node] for node in range(nodes)])
            self._finish()

    def _write_own(self) -> None:
        if not self._spoiled:
            self._write(self._codec.unpack(self._payload, *self._range(self.port.position)))

    def _range(self, position: int) -> tuple[int, int]:
        return self._codec.bounds[position], self._codec.bounds[position + 1]


class Gathered(Compressed):
    """An all-reduce in which each node sends its selection to all others: k (N - 1) values in one round."""

    def start(self) -> None:
        self._begin()
        self._portions: dict[int, Portion] = {}
        self._whole = b""
        self.port.work(self._nbytes, self._pack, self._begun)

    def _pack(self) -> None:
        elements = self._codec.layout.elements
        payload = self._codec.pack(self._mine, 0, elements)
        self._whole = self._tagged(payload)
        self._portions[self.port.position] = self._codec.unpack(payload, 0, elements)

    def _begun(self) -> None:
        here, nodes = self.port.position, self.port.nodes
        for distance in range(1, nodes):
            self._send((here + distance) % nodes, _CONTRIBUTION, self._whole)
        self._add_if_complete()

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        if chunk.part != _CONTRIBUTION:
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} is no contribution")
        assembly = self._complete(position, chunk, payload, self._codec.max_encoded_nbytes(self._codec.layout.elements))
        if assembly is not None:
            take = partial(self._take, position, chunk.key.name, assembly)
            self.port.work(self._nbytes, take, self._add_if_complete)

    def _take(self, position: int, name: str, assembly: Assembly) -> None:
        packed = self._opened(position, name, assembly)
        elements = self._codec.layout.elements
        self._portions[position] = None if self._spoiled else self._codec.unpack(packed, 0, elements)

    def _add_if_complete(self) -> None:
        if len(self._portions) == self.port.nodes:
            self.port.work(self._nbytes, self._add, self._finish)

    def _add(self) -> None:
        if not self._spoiled:
            total = self._portions.pop(0)
            for position in range(1, self.port.nodes):
                total = self._codec.add(total, self._portions.pop(position))
            self._write(total)


# --- ranges -----------------------------------------------------------------------------------------------------------


# All nodes come to the same ranges without a message about them: they follow from the codec, and from what the owners
# say with their results.


def expected_bounds(codec: SummingBucketCodec, nodes: int) -> tuple[int, ...]:
    """Returns N + 1 bounds of ranges for the first steps."""
    return _divided(codec, nodes, [[(low, high, (high - low) * weight) for low, high, weight in codec.weights()]])


def _adapted_bounds(codec: SummingBucketCodec, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns N + 1 bounds of ranges that would have had the same number of values.

    Args:
        counts: the number of selected values in each bin of the range that each node owns, by `codec.bounds`. Within a
            bin they are taken to be spread evenly.
    """
    edges = [edge for low, high in pairwise(codec.bounds) for edge in pairwise(_bins(low, high))]
    found = [count for owner in counts for count in owner]
    selected = [(low, high, count) for (low, high), count in zip(edges, found, strict=True)]
    return _divided(codec, len(counts), [selected, [(low, high, high - low) for low, high in codec.always]])


def _bins(low: int, high: int) -> list[int]:
    """Returns the _BINS + 1 edges of the bins of a range."""
    return [low + (high - low) * i // _BINS for i in range(_BINS + 1)]


def _divided(codec: SummingBucketCodec, nodes: int, masses: Sequence[_Masses]) -> tuple[int, ...]:
    """Returns bounds between which there is the same mass."""
    elements, step = codec.layout.elements, codec.alignment
    # Not `np.unique`, which imports masked arrays at its first use.
    edges = np.array(sorted({0, elements, *(edge for part in masses for low, high, _ in part for edge in (low, high))}))
    total = sum((_cumulative(part, edges) for part in masses), np.zeros(len(edges)))
    if total[-1] == 0:
        total = edges.astype(np.float64)
    inner = np.interp(total[-1] * np.arange(1, nodes) / nodes, total, edges)
    return (0, *(int(bound) // step * step for bound in inner), elements)


def _cumulative(masses: _Masses, at: Array) -> Array:
    """Returns the mass before each of these elements."""
    if not masses:
        return np.zeros(len(at))
    edges = [edge for low, high, _ in masses for edge in (low, high)]
    heights: Array = np.interp(at, edges, np.cumsum([mass for *_, mass in masses for mass in (0, mass)]))
    return heights
