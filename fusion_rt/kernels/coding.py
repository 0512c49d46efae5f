"""Ascending indices as few bits: Golomb-Rice codes of the gaps between them, in two streams.

The gap before an index is the number of elements since the one before it (since `low` for the first). Its lowest `bits`
bits go to the low part, one after the other; the rest goes to the high part, as that many zeros and a one. Bits fill
bytes from the lowest on. The best number of bits is near log2 of the mean gap; with 0 the high part is a bitmap of the
range, without the bits behind the last one. Two streams, so that decoding finds ones in whole words.

`reference` computes the same, plainly.
"""

from __future__ import annotations

import math

import numpy as np

from fusion_rt.kernels import cpu
from fusion_rt.kernels.cpu import Array, Routine

MAX_BITS = 31

_size, _encode, _decode = Routine("rice-size"), Routine("rice-encode"), Routine("rice-decode")
ROUTINES = tuple(routine.name for routine in (_size, _encode, _decode))


def best_bits(indices: Array, low: int, high: int) -> tuple[int, int]:
    """The number of low bits that takes the fewest bytes, among four near the expected one, and how many bytes.

    Args:
        indices: int32, contiguous, ascending, at least one, within [low, high).
    """
    n = len(indices)
    expected = int(math.log2(max(1.0, (high - low) / n * math.log(2))))  # best where each element is as likely
    first = max(0, min(MAX_BITS - 3, expected - 2))
    highs = _size(indices.ctypes.data, n, low, first, 0, 0, 0, 0)[4:]
    sizes = [_bytes(int(total) + n) + _bytes(n * (first + i)) for i, total in enumerate(highs)]
    best = sizes.index(min(sizes))
    return first + best, sizes[best]


def encode(indices: Array, low: int, bits: int) -> tuple[Array, Array]:
    """The high part and the low part (uint8). `indices` as for `best_bits`."""
    n = len(indices)
    total = int(_size(indices.ctypes.data, n, low, bits, 0, 0, 0, 0)[4])
    high_part, low_part = np.zeros(_bytes(total + n), np.uint8), np.zeros(_bytes(n * bits), np.uint8)
    _encode(indices.ctypes.data, n, low, bits, high_part.ctypes.data, low_part.ctypes.data)
    return high_part, low_part


def decode(high_part: Array, low_part: Array, n: int, bits: int, low: int, high: int) -> Array | None:
    """The indices (int32, ascending, within [low, high)); None when this is not exactly what `encode` gives for some.

    Args:
        high_part, low_part: uint8, contiguous; any bytes at all, the low part of the right length for `n`.
        bits: from 0 to `MAX_BITS`.
    """
    if len(low_part) != _bytes(n * bits):
        raise ValueError(f"the low part of {n} indices has {_bytes(n * bits)} bytes, not {len(low_part)}")
    if not _bytes(n) <= len(high_part) <= _bytes(n + ((high - low) >> bits)):
        return None
    indices = np.empty(n, np.int32)
    words = _decode(
        high_part.ctypes.data, len(high_part), low_part.ctypes.data, len(low_part), n, bits, low, high,
        indices.ctypes.data, 0,
    )  # fmt: skip
    return indices if words[9] == n else None


def prepare() -> None:
    """Makes the kernels ready before they are needed in a hurry."""
    cpu.prepare([], others=ROUTINES)


def _bytes(bits: int) -> int:
    return -(-bits // 8)
