"""Selections, and their encoding as bytes.

A payload is a header of 8 bytes, the indices, their values, and the values of the elements that are always sent. The
header: a byte with how indices (low half) and values (high half) are written, the number of low bits of a code, the two
phases (see `values`), and the number of indices (uint32); everything is little-endian. Neither the range nor the
lengths of the parts are in there, because both sides know them.

Indices are written in one of these ways, chosen for each payload:

* `ALL`: not at all, since every element is there;
* `SHARED`: as a step number (uint64), from which both sides work them out (`randomk`);
* `RAW`: as uint32 from the beginning of the range;
* `DELTA`: as Golomb-Rice codes of the gaps between them (`kernels.coding`), with as many low bits as take the least
  space; with none it is a bitmap.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fusion_rt.codecs.base import Array, CodecError
from fusion_rt.codecs.values import BLOCK, FORMATS, format_of_whole
from fusion_rt.kernels import coding, selection
from fusion_rt.kernels.selection import Range

INDEX_CODINGS = ("auto", "delta", "bitmap", "raw")

HEADER = struct.Struct("<BBBBI")
_STEP = struct.Struct("<Q")
_ALL, _SHARED, _RAW, _DELTA = range(4)

SharedIndices = Callable[[int, int, int], Array]
"""(step, low, high) to the indices that `randomk` selects there."""


@dataclass(frozen=True)
class Selection:
    """Some elements of the range [low, high) of a bucket; the others are zero.

    Attributes:
        indices: int32, ascending, counted from the start of the bucket.
        values: float32, of these elements.
        dense: float32, of the elements of the range that are always sent, in their order; none is among the indices.
        step: of the codec that selected it; matters where indices follow from the step.
    """

    low: int
    high: int
    indices: Array
    values: Array
    dense: Array
    step: int = 0

    def __len__(self) -> int:
        """The number of elements that it has."""
        return len(self.indices) + len(self.dense)


class Spans:
    """Ascending ranges of elements, that do not touch each other's elements."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges: tuple[Range, ...] = tuple((low, high) for low, high in ranges if low < high)
        self._lows = np.array([low for low, _ in self.ranges], np.int64)
        self._highs = np.array([high for _, high in self.ranges], np.int64)
        self._before = np.concatenate([[0], np.cumsum(self._highs - self._lows)])
        self.size = int(self._before[-1])

    def within(self, low: int, high: int) -> list[Range]:
        """Returns the parts of them in [low, high)."""
        first, end = np.searchsorted(self._highs, low, "right"), np.searchsorted(self._lows, high, "left")
        return [(max(low, begin), min(high, stop)) for begin, stop in self.ranges[first:end]]

    def rank(self, element: int) -> int:
        """Counts their elements before this one."""
        i = int(np.searchsorted(self._lows, element, "right")) - 1
        return int(self._before[i] + min(element, self._highs[i]) - self._lows[i]) if i >= 0 else 0

    def elements(self, ranks: Array) -> Array:
        """The elements (int64) with these ranks."""
        i = np.searchsorted(self._before, ranks, "right") - 1
        elements: Array = ranks - self._before[i] + self._lows[i]
        return elements

    def hold(self, indices: Array) -> bool:
        """Says whether all of these ascending indices are among their elements."""
        lows, highs = (np.searchsorted(indices, e.astype(indices.dtype)) for e in (self._lows, self._highs))
        return int((highs - lows).sum()) == len(indices)

    def all_indices(self, low: int, high: int) -> Array:
        """Returns their elements in [low, high), int32."""
        ranges = self.within(low, high)
        return np.concatenate([np.arange(*r, dtype=np.int32) for r in ranges]) if ranges else np.empty(0, np.int32)

    def gather(self, values: Array, low: int, high: int) -> Array:
        """Their elements in [low, high) of an array, one after the other; a copy."""
        ranges = self.within(low, high)
        return np.concatenate([values[r[0] : r[1]] for r in ranges]) if ranges else np.empty(0, values.dtype)

    def scatter(self, values: Array, low: int, out: Array) -> None:
        """The opposite of `gather`: `out` is the range that begins at `low`."""
        done = 0
        for begin, end in self.within(low, low + len(out)):
            out[begin - low : end - low] = values[done : done + end - begin]
            done += end - begin


class Packer:
    """Selections of one bucket to bytes, and back.

    Args:
        sparse: elements that may be selected.
        dense: elements that are always sent.
        value: a name of `values.FORMATS`.
        index: one of `INDEX_CODINGS`.
        shared: where indices are not sent, how they follow from the step.
    """

    def __init__(
        self, sparse: Spans, dense: Spans, value: str, index: str = "auto", shared: SharedIndices | None = None
    ) -> None:
        self._sparse, self._dense = sparse, dense
        self._format, self._value = FORMATS[value], value
        self._whole = FORMATS[format_of_whole(value)]
        self._index = index
        self._shared = shared

    def max_nbytes(self, n: int) -> int:
        """The most bytes that a range of n elements can take."""
        indices = 4 * n if self._index == "raw" else n // 2
        values = n * 4 if self._value == "fp32" else 2 * n if self._value in ("fp16", "bf16") else n + n // BLOCK
        return HEADER.size + _STEP.size + indices + values + 8

    def pack(self, selected: Selection, low: int, high: int) -> memoryview:
        """Packs the part of a selection in [low, high), which lies within its own range.

        Its values have to be `rounded` (see `values`); then `unpack` gives the same bits.
        """
        first, end = np.searchsorted(selected.indices, np.array([low, high], np.int32))
        indices, values = selected.indices[first:end], selected.values[first:end]
        skipped = self._dense.rank(low) - self._dense.rank(selected.low)
        dense = selected.dense[skipped : skipped + self._dense.rank(high) - self._dense.rank(low)]
        phase, dense_phase = int(first) % BLOCK, skipped % BLOCK
        kind, bits, parts = self._pack_indices(indices, low, high, selected.step)
        header = HEADER.pack(kind | self._format.code << 4, bits, phase, dense_phase, len(indices))
        parts = [
            np.frombuffer(header, np.uint8),
            *parts,
            *self._format.pack(values, phase),
            *self._whole.pack(dense, dense_phase),
        ]
        payload: memoryview = np.concatenate(parts).data
        return payload

    def _pack_indices(self, indices: Array, low: int, high: int, step: int) -> tuple[int, int, list[Array]]:
        n = len(indices)
        if n == self._sparse.rank(high) - self._sparse.rank(low):
            return _ALL, 0, []
        if self._shared is not None and np.array_equal(indices, self._shared(step, low, high)):
            return _SHARED, 0, [np.frombuffer(_STEP.pack(step), np.uint8)]
        if n == 0:
            return _RAW, 0, []
        bits, nbytes = (0, 0) if self._index == "bitmap" else coding.best_bits(indices, low, high)
        if self._index == "raw" or (self._index == "auto" and nbytes >= 4 * n):
            return _RAW, 0, [(indices - low).astype(np.uint32).view(np.uint8)]
        return _DELTA, bits, list(coding.encode(indices, low, bits))

    def unpack(self, payload: memoryview | bytes, low: int, high: int) -> Selection:
        """Reads bytes that `pack` wrote, on any node; takes memory only for as many elements as the bytes can hold.

        Raises:
            CodecError: no selection of that range is written like this.
        """
        received = np.frombuffer(payload, np.uint8)
        if len(received) < HEADER.size:
            raise _wrong(low, high, f"it has {len(received)} bytes, and the header alone {HEADER.size}")
        kinds, bits, phase, dense_phase, count = HEADER.unpack(received[: HEADER.size].tobytes())
        kind, code = kinds & 15, kinds >> 4
        if code != self._format.code:
            raise _wrong(low, high, f"its values are not {self._value}")
        room = self._sparse.rank(high) - self._sparse.rank(low)
        n_dense = self._dense.rank(high) - self._dense.rank(low)
        if count > room or phase >= BLOCK or dense_phase >= BLOCK:
            raise _wrong(low, high, f"it has {count} indices at phases {phase} and {dense_phase}, with room for {room}")
        value_bytes, dense_bytes = self._format.nbytes(count, phase), self._whole.nbytes(n_dense, dense_phase)
        index_bytes = len(received) - HEADER.size - value_bytes - dense_bytes
        if index_bytes < 0:
            raise _wrong(low, high, f"its {len(received)} bytes are too few for {count} indices")
        position = HEADER.size + index_bytes
        indices, step = self._unpack_indices(kind, received[HEADER.size : position], count, bits, low, high)
        values = self._format.unpack(received[position : position + value_bytes], count, phase)
        dense = self._whole.unpack(received[position + value_bytes :], n_dense, dense_phase)
        return Selection(low, high, indices, values, dense, step)

    def _unpack_indices(self, kind: int, part: Array, n: int, bits: int, low: int, high: int) -> tuple[Array, int]:
        room = self._sparse.rank(high) - self._sparse.rank(low)
        if kind == _ALL and n == room and not len(part):
            return self._sparse.all_indices(low, high), 0
        if kind == _SHARED and self._shared is not None and len(part) == _STEP.size:
            step = int(_STEP.unpack(part.tobytes())[0])
            indices = self._shared(step, low, high)
            if len(indices) == n:
                return indices, step
        elif kind == _RAW and len(part) == 4 * n:
            raw = np.frombuffer(part.tobytes(), np.uint32).astype(np.int64)
            if not n or (int(raw[-1]) < high - low and bool((np.diff(raw) > 0).all())):
                return self._checked((raw + low).astype(np.int32), low, high), 0
        elif kind == _DELTA and n and bits <= coding.MAX_BITS and len(part) > (low_bytes := -(-n * bits // 8)):
            at = len(part) - low_bytes
            decoded = coding.decode(part[:at], part[at:], n, bits, low, high)
            if decoded is not None:
                return self._checked(decoded, low, high), 0
        raise _wrong(low, high, f"its {n} indices, in {len(part)} bytes, are not ascending elements of the range")

    def _checked(self, indices: Array, low: int, high: int) -> Array:
        if not self._sparse.hold(indices):
            raise _wrong(low, high, "it has indices of elements that are not selected but always or never sent")
        return indices


@np.errstate(over="ignore", invalid="ignore")
def merged(selections: Sequence[Selection]) -> Selection:
    """The sum of selections of one range, added one after the other; where only one has an element, that is the sum."""
    first, *others = selections
    pair, dense = (first.indices, first.values), first.dense
    for other in others:
        if (other.low, other.high) != (first.low, first.high):
            raise ValueError(f"[{other.low}, {other.high}) cannot be added to [{first.low}, {first.high})")
        pair = selection.merge(pair, (other.indices, other.values))
        dense = dense + other.dense
    return Selection(first.low, first.high, *pair, dense, first.step)


def strongest(selected: Selection, k: int) -> tuple[Selection, Selection]:
    """Divides a selection into its k largest values, of equal ones the first, and the rest. Zeros are in neither;
    elements that are always sent stay with the first, and are zero in the rest."""
    indices, values = selected.indices, np.ascontiguousarray(selected.values)
    if k <= 0:
        kept = np.zeros(len(indices), bool)
    elif k >= len(indices):
        kept = values != 0
    else:
        cut = selection.largest([[values]], k)
        magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
        kept = magnitudes > cut.threshold
        kept[np.flatnonzero(magnitudes == cut.threshold)[: cut.quotas[0]]] = True
    rest = ~kept & (values != 0)
    low, high, step = selected.low, selected.high, selected.step
    return (
        Selection(low, high, indices[kept], values[kept], selected.dense, step),
        Selection(low, high, indices[rest], values[rest], np.zeros_like(selected.dense), step),
    )


def _wrong(low: int, high: int, why: str) -> CodecError:
    return CodecError(
        f"a peer sent an invalid selection of elements {low} to {high}: {why}; it is faulty or runs another version"
    )
