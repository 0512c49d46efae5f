"""The kernels that select elements, which Numba compiles: `selection`, which calls them, describes them.

The magnitude of a float32 is its bits without the sign, as an integer: it orders numbers by their absolute value,
infinity above them, and NaN above infinity. Each kernel gets the address of a block of 64-bit words, in which it also
leaves its results.
"""

from __future__ import annotations

from typing import Any

import numba

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels.llvm.lanes import (
    INFINITE,
    Wire,
    add,
    count_hits,
    hits,
    lanes,
    load,
    multiply,
    scale,
    store,
    sum_of,
    total,
    where_finite,
    zeros,
)
from fusion_rt.kernels.llvm.memory import (
    peek32,
    peek64,
    peek_double,
    peek_float,
    poke32,
    poke64,
    poke_double,
    poke_float,
    trailing_zeros,
)

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
njit: Any = numba.njit

_MAGNITUDE = 0x7FFFFFFF
_WIDE, _SINGLE = Wire.wide(DTYPES["float32"]), Wire(DTYPES["float32"], 1)
_WIDE_INTEGERS = Wire(DTYPES["int32"], _WIDE.lanes)
_NEAR = 1 << 19  # of magnitudes: 2**(1 / 16) times less
_BLOCK = 4096  # elements whose squares are summed in float32


@njit
def _append(request, residual, first, mask, count, quota):  # type: ignore[no-untyped-def]
    """Adds the elements whose bits are set; of those that are exactly at the threshold only as many as the quota."""
    threshold, capacity = peek64(request, 5), peek64(request, 7)
    indices, values = peek64(request, 8), peek64(request, 9)
    while mask != 0:
        i = first + trailing_zeros(mask)
        mask &= mask - 1
        bits = peek32(residual, i)
        if bits & _MAGNITUDE == threshold:
            if quota == 0:
                continue
            quota -= 1
        if count < capacity:
            poke32(indices, count, i)
            poke32(values, count, bits)
        count += 1
    return count, quota


@njit
def _collect(wire, request, first, count, quota, spoiled):  # type: ignore[no-untyped-def]
    residual, gradient, velocity = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    high, threshold = peek64(request, 4), peek64(request, 5)
    momentum, factor, nesterov = peek_double(request, 10), peek_double(request, 11), peek64(request, 12)
    decay = peek_double(request, 15)
    i = first
    while i + lanes(wire) <= high:
        value = load(wire, residual, i)
        if gradient != 0:
            if decay != 1.0:
                value = scale(wire, value, decay)
            step = load(wire, gradient, i)
            if factor != 1.0:
                step = scale(wire, step, factor)
            if velocity != 0:
                before = load(wire, velocity, i)
                if nesterov != 0:
                    speed = scale(wire, add(before, step), momentum)
                    step = add(speed, step)
                else:
                    speed = add(scale(wire, before, momentum), step)
                    step = speed
                store(wire, velocity, i, where_finite(wire, add(value, step), speed, before))
            wanted = add(value, step)
            spoiled |= hits(wire, wanted, INFINITE)
            value = where_finite(wire, wanted, wanted, value)
            store(wire, residual, i, value)
        mask = hits(wire, value, threshold)
        if mask != 0:
            count, quota = _append(request, residual, i, mask, count, quota)
        i += lanes(wire)
    return i, count, quota, spoiled


def collect(request):  # type: ignore[no-untyped-def]
    i, count, quota, spoiled = _collect(_WIDE, request, peek64(request, 3), peek64(request, 13), peek64(request, 6), 0)
    i, count, quota, spoiled = _collect(_SINGLE, request, i, count, quota, spoiled)
    poke64(request, 13, count)
    poke64(request, 6, quota)
    poke64(request, 14, spoiled)


def count(request):  # type: ignore[no-untyped-def]
    values, counts, size = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    shift, bins, above, prefix = peek64(request, 3), peek64(request, 4), peek64(request, 5), peek64(request, 6)
    for i in range(size):
        magnitude = peek32(values, i) & _MAGNITUDE
        if magnitude >> above == prefix:
            digit = (magnitude >> shift) & (bins - 1)
            poke64(counts, digit, peek64(counts, digit) + 1)


def take(request):  # type: ignore[no-untyped-def]
    indices, values, size = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    threshold, quota = peek64(request, 3), peek64(request, 4)
    out_indices, out_values = peek64(request, 5), peek64(request, 6)
    residual, taken = peek64(request, 7), 0
    for j in range(size):
        bits = peek32(values, j)
        magnitude = bits & _MAGNITUDE
        if magnitude < threshold:
            continue
        if magnitude == threshold:
            if quota == 0:
                continue
            quota -= 1
        i = peek32(indices, j)
        poke32(out_indices, taken, i)
        poke32(out_values, taken, bits)
        taken += 1
        if residual != 0:
            poke32(residual, i, 0)
    poke64(request, 8, taken)


@njit
def _reaching(values, size, threshold):  # type: ignore[no-untyped-def]
    """Counts the elements with a magnitude of at least the threshold."""
    counts, i = zeros(_WIDE_INTEGERS), 0
    while i + lanes(_WIDE) <= size:
        counts = count_hits(_WIDE, counts, load(_WIDE, values, i), threshold)
        i += lanes(_WIDE)
    found = sum_of(counts)
    while i < size:
        found += (peek32(values, i) & _MAGNITUDE) >= threshold
        i += 1
    return found


@njit
def _kth(values, size, k, most, guess):  # type: ignore[no-untyped-def]
    """A magnitude, at least 1, that at least k elements reach, and at most `most`, or no larger one; and how many. Of
    fewer that are not zero, 1. The search begins at `guess`, with steps that grow until it is between two."""
    low, high = 1, _MAGNITUDE + 1  # k elements reach the first, unless they are zeros, and not the second
    reaching = -1  # the first
    step, at = 1 << 19, max(guess, 1)
    while high - low > 1:
        found = _reaching(values, size, at)
        if k <= found <= most:
            return at, found
        if found > k:
            low, reaching = at, found
            at = low + step if high > _MAGNITUDE else 0
        else:
            high = at
            at = high - step if low == 1 else 0
        step *= 4
        if not low < at < high:
            at = low + ((high - low) >> 1)
    if reaching < 0:
        reaching = _reaching(values, size, low)
    return low, reaching


@njit
def _gather(values, size, first, threshold, indices, found):  # type: ignore[no-untyped-def]
    """Copies elements of at least that magnitude. Its indices are counted from `-first`."""
    i, count = 0, 0
    while i < size:
        wide = i + lanes(_WIDE) <= size
        if wide:
            mask = hits(_WIDE, load(_WIDE, values, i), threshold)
        else:
            mask = hits(_SINGLE, load(_SINGLE, values, i), threshold)
        while mask != 0:
            j = i + trailing_zeros(mask)
            mask &= mask - 1
            poke32(indices, count, first + j)
            poke32(found, count, peek32(values, j))
            count += 1
        i += lanes(_WIDE) if wide else 1
    return count


def chunks(request):  # type: ignore[no-untyped-def]
    """Takes the largest of each chunk. Elements are counted from the beginning of the residual. The first pass over a
    chunk that is not too far off tells which elements are looked at any more."""
    residual, edges, wanted = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    indices, values, taken, guess = peek64(request, 5), peek64(request, 6), peek64(request, 7), peek64(request, 8)
    near, near_values = peek64(request, 9), peek64(request, 10)  # of room for a chunk and some zeros
    for chunk in range(peek64(request, 3), peek64(request, 4)):
        low, high, k = peek64(edges, chunk), peek64(edges, chunk + 1), peek64(wanted, chunk)
        first = residual + 4 * low
        lowest, _ = _kth(first, high - low, k, 2 * k + lanes(_WIDE), guess)
        size = _gather(first, high - low, low, lowest, near, near_values)
        full = (size + lanes(_WIDE) - 1) // lanes(_WIDE) * lanes(_WIDE)
        for j in range(size, full):
            poke32(near_values, j, 0)
        threshold, reaching = _kth(near_values, full, k, k, lowest + _NEAR)
        guess = threshold - _NEAR
        ties = size
        if reaching > k:
            ties = k - _reaching(near_values, full, threshold + 1)
        for j in range(size):
            bits = peek32(near_values, j)
            if bits & _MAGNITUDE < threshold:
                continue
            if bits & _MAGNITUDE == threshold:
                if ties == 0:
                    continue
                ties -= 1
            i = peek32(near, j)
            poke32(indices, taken, i)
            poke32(values, taken, bits)
            poke32(residual, i, 0)
            taken += 1
    poke64(request, 7, taken)
    poke64(request, 8, guess)


@njit
def _sample(wire, request):  # type: ignore[no-untyped-def]
    residual, gradient, velocity = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    starts, runs, length, out = peek64(request, 3), peek64(request, 4), peek64(request, 5), peek64(request, 6)
    momentum, factor, nesterov = peek_double(request, 7), peek_double(request, 8), peek64(request, 9)
    decay = peek_double(request, 10)
    for run in range(runs):
        start, j = peek64(starts, run), 0
        while j + lanes(wire) <= length:
            value = load(wire, residual, start + j)
            if gradient != 0:
                if decay != 1.0:
                    value = scale(wire, value, decay)
                step = load(wire, gradient, start + j)
                if factor != 1.0:
                    step = scale(wire, step, factor)
                if velocity != 0:
                    speed = load(wire, velocity, start + j)
                    if nesterov != 0:
                        step = add(scale(wire, add(speed, step), momentum), step)
                    else:
                        step = add(scale(wire, speed, momentum), step)
                value = add(value, step)
            store(wire, out, run * length + j, value)
            j += lanes(wire)


def sample(request):  # type: ignore[no-untyped-def]
    if peek64(request, 5) % lanes(_WIDE) == 0:
        _sample(_WIDE, request)
    else:
        _sample(_SINGLE, request)


def moments(request):  # type: ignore[no-untyped-def]
    values, size = peek64(request, 0), peek64(request, 1)
    plain, squared, first = 0.0, 0.0, 0
    while first < size:
        end = min(first + _BLOCK, size)
        sums, squares, i = zeros(_WIDE), zeros(_WIDE), first
        while i + lanes(_WIDE) <= end:
            value = load(_WIDE, values, i)
            sums, squares = add(sums, value), add(squares, multiply(value, value))
            i += lanes(_WIDE)
        plain += total(_WIDE, sums)
        squared += total(_WIDE, squares)
        while i < end:
            value = numba.float64(peek_float(values, i))
            plain += value
            squared += value * value
            i += 1
        first = end
    poke_double(request, 2, plain)
    poke_double(request, 3, squared)


def merge(request):  # type: ignore[no-untyped-def]
    left_indices, left_values, left_size = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    right_indices, right_values, right_size = peek64(request, 3), peek64(request, 4), peek64(request, 5)
    indices, values = peek64(request, 6), peek64(request, 7)
    left, right, count = 0, 0, 0
    while left < left_size and right < right_size:
        i, j = peek32(left_indices, left), peek32(right_indices, right)
        value = peek_float(left_values, left) if i <= j else peek_float(right_values, right)
        if i == j:
            value += peek_float(right_values, right)
        poke32(indices, count, min(i, j))
        poke_float(values, count, value)
        count += 1
        left += i <= j
        right += j <= i
    while left < left_size:
        poke32(indices, count, peek32(left_indices, left))
        poke_float(values, count, peek_float(left_values, left))
        count += 1
        left += 1
    while right < right_size:
        poke32(indices, count, peek32(right_indices, right))
        poke_float(values, count, peek_float(right_values, right))
        count += 1
        right += 1
    poke64(request, 8, count)


def put(request):  # type: ignore[no-untyped-def]
    memory, indices, values, size = peek64(request, 0), peek64(request, 1), peek64(request, 2), peek64(request, 3)
    base, adding = peek64(request, 4), peek64(request, 5)
    for j in range(size):
        i = peek32(indices, j) - base
        value = peek_float(values, j)
        if adding != 0:
            value += peek_float(memory, i)
        poke_float(memory, i, value)


KERNELS = (put, collect, count, take, sample, moments, merge, chunks)
