"""The kernels that pack indices, which Numba compiles: `coding`, which calls them, describes them.

Each gets the address of a block of 64-bit words, in which it also leaves its results.
"""

from __future__ import annotations

from typing import Any

import numba

from fusion_rt.kernels.llvm.memory import peek8, peek32, peek64, poke8, poke32, poke64, shift_right, trailing_zeros

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
njit: Any = numba.njit


def rice_size(request):  # type: ignore[no-untyped-def]
    """The sum of the high parts of the gaps, for four numbers of low bits."""
    indices, size, low, bits = peek64(request, 0), peek64(request, 1), peek64(request, 2), peek64(request, 3)
    first, second, third, fourth = 0, 0, 0, 0
    expected = low
    for j in range(size):
        i = peek32(indices, j)
        gap = (i - expected) >> bits
        expected = i + 1
        first += gap
        second += gap >> 1
        third += gap >> 2
        fourth += gap >> 3
    poke64(request, 4, first)
    poke64(request, 5, second)
    poke64(request, 6, third)
    poke64(request, 7, fourth)


def rice_encode(request):  # type: ignore[no-untyped-def]
    indices, size, low, bits = peek64(request, 0), peek64(request, 1), peek64(request, 2), peek64(request, 3)
    high_part, low_part = peek64(request, 4), peek64(request, 5)  # of zeros
    expected, position, word, filled, at = low, -1, 0, 0, 0
    mask = (1 << bits) - 1
    for j in range(size):
        i = peek32(indices, j)
        gap = i - expected
        expected = i + 1
        position += (gap >> bits) + 1
        poke8(high_part, position >> 3, peek8(high_part, position >> 3) | (1 << (position & 7)))
        word |= (gap & mask) << filled
        filled += bits
        if filled >= 32:
            poke32(low_part, at, word)
            at += 1
            word = shift_right(word, 32)
            filled -= 32
    at *= 4
    while filled > 0:
        poke8(low_part, at, word)
        at += 1
        word = shift_right(word, 8)
        filled -= 8


@njit
def _word(address, size, i):  # type: ignore[no-untyped-def]
    """The 8 bytes from byte i on; those beyond `size` are 0."""
    if i + 8 <= size:
        return peek64(address + i, 0)
    word = 0
    for j in range(size - i):
        word |= peek8(address, i + j) << (8 * j)
    return word


def rice_decode(request):  # type: ignore[no-untyped-def]
    high_part, high_size = peek64(request, 0), peek64(request, 1)
    low_part, low_size = peek64(request, 2), peek64(request, 3)
    size, bits, low, high = peek64(request, 4), peek64(request, 5), peek64(request, 6), peek64(request, 7)
    indices = peek64(request, 8)
    mask = (1 << bits) - 1
    expected, previous, j, at = low, -1, 0, 0
    good = True
    while good and at < high_size:
        word = _word(high_part, high_size, at)
        while word != 0:
            position = 8 * at + trailing_zeros(word)
            word &= word - 1
            if j == size:
                good = False
                break
            where = j * bits
            rest = shift_right(_word(low_part, low_size, where >> 3), where & 7) & mask
            expected += ((position - previous - 1) << bits) + rest
            if expected >= high:
                good = False
                break
            poke32(indices, j, expected)
            previous = position
            expected += 1
            j += 1
        at += 8
    where = size * bits
    if where & 7 != 0 and peek8(low_part, where >> 3) >> (where & 7) != 0:
        good = False
    if previous >> 3 != high_size - 1:
        good = False
    poke64(request, 9, j if good else -1)


KERNELS = (rice_size, rice_encode, rice_decode)
