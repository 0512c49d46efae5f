"""The kernels that quantise blocks, which Numba compiles: `quantisation`, which calls them, describes them.

Each gets the address of a block of 64-bit words. Elements are handled by the dozen (`llvm.lanes`), and one by one where
a block ends.
"""

from __future__ import annotations

from typing import Any

import numba

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels.llvm.codes import (
    EIGHT,
    FOUR,
    TWO,
    Code,
    add_magnitudes,
    doubles,
    finite_magnitudes,
    float_of,
    from_signs,
    get,
    left_over,
    magnitudes,
    put,
    round_to,
    signs_of,
    total_of,
    without,
)
from fusion_rt.kernels.llvm.lanes import (
    INFINITE,
    Wire,
    add,
    lanes,
    largest_of,
    load,
    maximum,
    scale,
    store,
    where_finite,
    zeros,
)
from fusion_rt.kernels.llvm.memory import peek8, peek64, peek_double, peek_float, poke8, poke32, poke64, poke_float

# Numba's annotations describe ordinary functions; what this makes of a function has another signature.
njit: Any = numba.njit

_WIDE, _SINGLE = Wire.wide(DTYPES["float32"]), Wire(DTYPES["float32"], 1)
_WIDE_INTEGERS, _SINGLE_INTEGER = Wire(DTYPES["int32"], _WIDE.lanes), Wire(DTYPES["int32"], 1)
_SCALE_BYTES = 4
_LEAST_STEP = 2.0**-126
# Of the mean magnitude, with int2: the best step for normal numbers, and no step leaves more than there was.
_OF_MEAN = 1.25


@njit
def _accumulate(wire, residual, gradient, i, tops, decay):  # type: ignore[no-untyped-def]
    """Adds where the sum is finite. Gives it, and the largest magnitudes of all sums."""
    value = load(wire, residual, i)
    if gradient != 0:
        if decay != 1.0:
            value = scale(wire, value, decay)
        wanted = add(value, load(wire, gradient, i))
        tops = maximum(tops, magnitudes(wire, wanted))
        value = where_finite(wire, wanted, wanted, value)
        store(wire, residual, i, value)
    return value, tops


@njit
def _block_end(low, size, block, phase):  # type: ignore[no-untyped-def]
    """The end of the block that begins at element `low`; of the first one, `phase` elements come before these."""
    return min(low + block - (phase if low == 0 else 0), size)


def _encoding(name: str, code: Code) -> Any:
    """The kernel that rounds to the integers of a format."""
    by_mean, fraction, most, longest = code.missing is None, code.bits, code.most, code.longest
    per_byte = 8 // code.bits

    def encode(request):  # type: ignore[no-untyped-def]
        residual, gradient, size, block = peek64(request, 0), peek64(request, 1), peek64(request, 2), peek64(request, 3)
        out, keep, phase, base = peek64(request, 4), peek64(request, 5), peek64(request, 6), peek64(request, 7)
        left, right = peek64(request, 8), peek64(request, 9)
        decay, nearest = peek_double(request, 11), peek64(request, 12)
        low, tops, top = 0, zeros(_WIDE_INTEGERS), zeros(_SINGLE_INTEGER)
        while low < size:
            high = _block_end(low, size, block, phase)
            peaks, sums, i = zeros(_WIDE_INTEGERS), doubles(_WIDE), low
            while i + lanes(_WIDE) <= high:
                value, tops = _accumulate(_WIDE, residual, gradient, i, tops, decay)
                if by_mean:
                    peaks, sums = maximum(peaks, magnitudes(_WIDE, value)), add_magnitudes(_WIDE, sums, value)
                else:
                    peaks = maximum(peaks, finite_magnitudes(_WIDE, value))
                i += lanes(_WIDE)
            peak, total = largest_of(peaks), 0.0
            if by_mean:
                total = total_of(sums)
            while i < high:
                single, top = _accumulate(_SINGLE, residual, gradient, i, top, decay)
                if by_mean:
                    peak = max(peak, largest_of(magnitudes(_SINGLE, single)))
                    total += total_of(add_magnitudes(_SINGLE, doubles(_SINGLE), single))
                else:
                    peak = max(peak, largest_of(finite_magnitudes(_SINGLE, single)))
                i += 1
            if by_mean:
                size_of_one = numba.float32(_OF_MEAN * total / (high - low))
            else:
                size_of_one = float_of(peak) / numba.float32(most)
            size_of_one = numba.float32(min(max(size_of_one, _LEAST_STEP), longest))
            good = not by_mean or peak < INFINITE
            told = size_of_one if good else float_of(0x7FC00000)
            if by_mean and peak == 0:
                told = numba.float32(0)
            poke_float(out, 0, told)
            out += _SCALE_BYTES
            i = low
            while i + lanes(_WIDE) <= high:
                value = load(_WIDE, residual, i)
                whole = round_to(_WIDE, code, value, size_of_one, base + i, left, right, nearest)
                put(_WIDE, code, value, whole, out)
                if keep == 0:
                    store(_WIDE, residual, i, zeros(_WIDE))
                elif good:
                    store(_WIDE, residual, i, left_over(_WIDE, code, value, whole, told))
                else:
                    store(_WIDE, residual, i, where_finite(_WIDE, value, value, zeros(_WIDE)))
                out += lanes(_WIDE) * fraction >> 3
                i += lanes(_WIDE)
            bits, filled = 0, 0
            while i < high:
                single = load(_SINGLE, residual, i)
                one = round_to(_SINGLE, code, single, size_of_one, base + i, left, right, nearest)
                bits |= put(_SINGLE, code, single, one, out) << (filled * fraction)
                if keep == 0:
                    store(_SINGLE, residual, i, zeros(_SINGLE))
                elif good:
                    store(_SINGLE, residual, i, left_over(_SINGLE, code, single, one, told))
                else:
                    store(_SINGLE, residual, i, where_finite(_SINGLE, single, single, zeros(_SINGLE)))
                filled += 1
                i += 1
                if filled == per_byte or i == high:
                    poke8(out, 0, bits)
                    out += 1
                    bits, filled = 0, 0
            low = high
        poke64(request, 10, max(largest_of(tops), largest_of(top)) >= INFINITE)

    encode.__name__ = f"{name}_encode"
    return encode


@njit
def _deliver(wire, out, i, value, adding):  # type: ignore[no-untyped-def]
    store(wire, out, i, add(load(wire, out, i), value) if adding != 0 else value)


def _decoding(name: str, code: Code) -> Any:
    """The opposite of `_encoding`."""
    fraction, per_byte = code.bits, 8 // code.bits

    def decode(request):  # type: ignore[no-untyped-def]
        payload, size, block = peek64(request, 0), peek64(request, 1), peek64(request, 2)
        out, adding, phase = peek64(request, 3), peek64(request, 4), peek64(request, 5)
        low = 0
        while low < size:
            high = _block_end(low, size, block, phase)
            size_of_one, i = peek_float(payload, 0), low
            payload += _SCALE_BYTES
            while i + lanes(_WIDE) <= high:
                _deliver(_WIDE, out, i, get(_WIDE, code, payload, size_of_one), adding)
                payload += lanes(_WIDE) * fraction >> 3
                i += lanes(_WIDE)
            first = i
            while i < high:
                place = i - first
                bits = peek8(payload, place // per_byte) >> (place % per_byte * fraction)
                _deliver(_SINGLE, out, i, get(_SINGLE, code, bits, size_of_one), adding)
                i += 1
            payload += ((high - first) * fraction + 7) >> 3
            low = high

    decode.__name__ = f"{name}_decode"
    return decode


def onebit_encode(request):  # type: ignore[no-untyped-def]
    residual, gradient, size, block = peek64(request, 0), peek64(request, 1), peek64(request, 2), peek64(request, 3)
    out, keep, phase, decay = peek64(request, 4), peek64(request, 5), peek64(request, 6), peek_double(request, 11)
    low, tops, top = 0, zeros(_WIDE_INTEGERS), zeros(_SINGLE_INTEGER)
    while low < size:
        high = _block_end(low, size, block, phase)
        peaks, sums, i = zeros(_WIDE_INTEGERS), doubles(_WIDE), low
        while i + lanes(_WIDE) <= high:
            value, tops = _accumulate(_WIDE, residual, gradient, i, tops, decay)
            peaks = maximum(peaks, magnitudes(_WIDE, value))
            sums = add_magnitudes(_WIDE, sums, value)
            i += lanes(_WIDE)
        peak, total = largest_of(peaks), total_of(sums)
        while i < high:
            single, top = _accumulate(_SINGLE, residual, gradient, i, top, decay)
            peak = max(peak, largest_of(magnitudes(_SINGLE, single)))
            total += total_of(add_magnitudes(_SINGLE, doubles(_SINGLE), single))
            i += 1
        mean = numba.float32(total / (high - low))
        good = peak < INFINITE
        poke_float(out, 0, mean if good else float_of(0x7FC00000))
        taken = mean if good else numba.float32(0)
        out += _SCALE_BYTES
        i = low
        while i + lanes(_WIDE) <= high:
            value = load(_WIDE, residual, i)
            poke32(out, 0, signs_of(_WIDE, value))
            rest = without(_WIDE, value, taken)
            store(_WIDE, residual, i, rest if keep != 0 else zeros(_WIDE))
            out += lanes(_WIDE) >> 3
            i += lanes(_WIDE)
        bits, filled = 0, 0
        while i < high:
            value = load(_SINGLE, residual, i)
            bits |= signs_of(_SINGLE, value) << filled
            rest = without(_SINGLE, value, taken)
            store(_SINGLE, residual, i, rest if keep != 0 else zeros(_SINGLE))
            filled += 1
            i += 1
            if filled == 8 or i == high:
                poke8(out, 0, bits)
                out += 1
                bits, filled = 0, 0
        low = high
    poke64(request, 10, max(largest_of(tops), largest_of(top)) >= INFINITE)


def onebit_decode(request):  # type: ignore[no-untyped-def]
    payload, size, block = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    out, adding, phase = peek64(request, 3), peek64(request, 4), peek64(request, 5)
    low = 0
    while low < size:
        high = _block_end(low, size, block, phase)
        mean, i = peek_float(payload, 0), low
        payload += _SCALE_BYTES
        while i + lanes(_WIDE) <= high:
            _deliver(_WIDE, out, i, from_signs(_WIDE, payload, mean), adding)
            payload += lanes(_WIDE) >> 3
            i += lanes(_WIDE)
        first = i
        while i < high:
            bit = (peek8(payload, (i - first) >> 3) >> ((i - first) & 7)) & 1
            value = -mean if bit != 0 else mean
            if adding != 0:
                value += peek_float(out, i)
            poke_float(out, i, value)
            i += 1
        payload += (high - first + 7) >> 3
        low = high


KERNELS = (
    *(make(*each) for each in (("int8", EIGHT), ("int4", FOUR), ("int2", TWO)) for make in (_encoding, _decoding)),
    onebit_encode,
    onebit_decode,
)
