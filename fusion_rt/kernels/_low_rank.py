"""The kernels for low-rank approximations, which Numba compiles: `low_rank`, which calls them, describes them.

Each gets the address of a block of 64-bit words. Sums are in a fixed order, whatever the processor and the number of
threads, because all nodes have to get the same bits. Matrices are row after row; their factors vector after vector.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import extending, types

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels.llvm import vectors
from fusion_rt.kernels.llvm.lanes import Wire, add, lanes, load, multiply, scale, store, total, zeros
from fusion_rt.kernels.llvm.memory import peek64, peek_float, poke_float

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
njit: Any = numba.njit
intrinsic: Any = extending.intrinsic

_WIDE, _SINGLE = Wire.wide(DTYPES["float32"]), Wire(DTYPES["float32"], 1)
_TINY = 1e-7  # of a vector's length, that is left when others were taken out: rounding, and nothing else


@njit
def _dot(left, right, size):  # type: ignore[no-untyped-def]
    sums, i = zeros(_WIDE), 0
    while i + lanes(_WIDE) <= size:
        sums = add(sums, multiply(load(_WIDE, left, i), load(_WIDE, right, i)))
        i += lanes(_WIDE)
    result = total(_WIDE, sums)
    while i < size:
        result += numba.float64(peek_float(left, i)) * peek_float(right, i)
        i += 1
    return result


def low_rank_left(request):  # type: ignore[no-untyped-def]
    """left[k, i] = matrix[i] . right[k], for rows first to end."""
    matrix, first, end = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    rows, columns, rank = peek64(request, 3), peek64(request, 4), peek64(request, 5)
    left, right = peek64(request, 6), peek64(request, 7)
    for i in range(first, end):
        for k in range(rank):
            product = _dot(matrix + 4 * columns * i, right + 4 * columns * k, columns)
            poke_float(left, rows * k + i, numba.float32(product))


@njit
def _add_multiple(wire, target, source, first, end, factor):  # type: ignore[no-untyped-def]
    i = first
    while i + lanes(wire) <= end:
        store(wire, target, i, add(load(wire, target, i), scale(wire, load(wire, source, i), factor)))
        i += lanes(wire)
    return i


def low_rank_right(request):  # type: ignore[no-untyped-def]
    """right[k, j] = sum over i of left[k, i] * matrix[i, j], for columns first to end; `right` is zeros."""
    matrix, first, end = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    rows, columns, rank = peek64(request, 3), peek64(request, 4), peek64(request, 5)
    left, right = peek64(request, 6), peek64(request, 7)
    for i in range(rows):
        for k in range(rank):
            factor = numba.float64(peek_float(left, rows * k + i))
            source, target = matrix + 4 * columns * i, right + 4 * columns * k
            done = _add_multiple(_WIDE, target, source, first, end, factor)
            _add_multiple(_SINGLE, target, source, done, end, factor)


@njit
def _product(wire, request, i, first):  # type: ignore[no-untyped-def]
    rows, columns, rank = peek64(request, 3), peek64(request, 4), peek64(request, 5)
    left, right, mode = peek64(request, 6), peek64(request, 7), peek64(request, 8)
    row, j = peek64(request, 0) + 4 * columns * i, first
    while j + lanes(wire) <= columns:
        value = load(wire, row, j) if mode != 0 else zeros(wire)
        for k in range(rank):
            factor = numba.float64(peek_float(left, rows * k + i))
            value = add(value, scale(wire, load(wire, right + 4 * columns * k, j), -factor if mode < 0 else factor))
        store(wire, row, j, value)
        j += lanes(wire)
    return j


def low_rank_product(request):  # type: ignore[no-untyped-def]
    """matrix[i, j] = sum over k of left[k, i] * right[k, j], for rows first to end; added to what is there with mode 1,
    and taken away with mode -1."""
    for i in range(peek64(request, 1), peek64(request, 2)):
        _product(_SINGLE, request, i, _product(_WIDE, request, i, 0))


@intrinsic
def _root(typing: Any, square: Any) -> Any:
    """The square root of a float64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = vectors.splat(builder, arguments[0], 1)
        return builder.extract_element(vectors.call(builder, "sqrt", vector.type, vector), vectors.I32(0))

    return types.float64(types.float64), generate


@njit
def _squares(vector, size):  # type: ignore[no-untyped-def]
    result = 0.0
    for i in range(size):
        value = numba.float64(peek_float(vector, i))
        result += value * value
    return result


def low_rank_orthonormalise(request):  # type: ignore[no-untyped-def]
    """Modified Gram-Schmidt in float64, each vector twice; a vector that depends on those before it becomes zero."""
    vectors, size, rank = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    for k in range(rank):
        vector = vectors + 4 * size * k
        before = _root(_squares(vector, size))
        for j in range(2 * k):
            other = vectors + 4 * size * (j % k)
            dot = 0.0
            for i in range(size):
                dot += numba.float64(peek_float(other, i)) * peek_float(vector, i)
            for i in range(size):
                poke_float(vector, i, numba.float32(peek_float(vector, i) - dot * peek_float(other, i)))
        after = _root(_squares(vector, size))
        dependent = after <= _TINY * before  # not so for NaN
        factor = 0.0 if dependent else 1.0 / after
        for i in range(size):
            poke_float(vector, i, numba.float32(peek_float(vector, i) * factor))


KERNELS = (low_rank_left, low_rank_right, low_rank_product, low_rank_orthonormalise)
