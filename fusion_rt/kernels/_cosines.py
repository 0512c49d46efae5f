"""The kernels that transform tiles of matrices, which Numba compiles: see `cosines`, which calls them.

Each gets the address of a block of 64-bit words. Columns of a tile are transformed in vectors of `_LANES`, by straight
code for each length, and what is left undone at its edges does not count. The factors are those of Plonka and Tasche,
"Fast and numerically stable algorithms for discrete cosine transforms" (2005): nothing is divided, and nothing grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import extending, types

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels.llvm import vectors
from fusion_rt.kernels.llvm.lanes import Wire, lanes, load, store
from fusion_rt.kernels.llvm.memory import peek64, peek_float, poke_float

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
njit: Any = numba.njit
intrinsic: Any = extending.intrinsic

_STRIDE = 64  # elements of a row of a tile in the scratch memory, and the longest transform
_LANES = 16
_GROUP, _WIDE, _SINGLE = (Wire(DTYPES["float32"], count) for count in (_LANES, 32, 1))
_TURN = 8  # rows and columns that are transposed together


class _Numbers:
    """Vectors in a program that is being written."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def add(self, left: Any, right: Any) -> Any:
        return self._builder.fadd(left, right)

    def subtract(self, left: Any, right: Any) -> Any:
        return self._builder.fsub(left, right)

    def times(self, value: Any, factor: float) -> Any:
        return self._builder.fmul(value, ir.Constant(value.type, [factor] * value.type.count))


def _second(numbers: _Numbers, x: list[Any]) -> list[Any]:
    """DCT-II: y[k] = sum of x[j] cos((2j + 1) k pi / 2n)."""
    n, half = len(x), len(x) // 2
    if n == 1:
        return x
    y = [None] * n
    y[0::2] = _second(numbers, [numbers.add(x[j], x[n - 1 - j]) for j in range(half)])
    y[1::2] = _fourth(numbers, [numbers.subtract(x[j], x[n - 1 - j]) for j in range(half)])
    return y


def _fourth(numbers: _Numbers, x: list[Any]) -> list[Any]:
    """DCT-IV: y[k] = sum of x[j] cos((2j + 1) (2k + 1) pi / 4n)."""
    n, half = len(x), len(x) // 2
    if n == 1:
        return [numbers.times(x[0], math.cos(math.pi / 4))]
    sums, differences = [], []
    for j in range(half):
        angle, sign = (2 * j + 1) * math.pi / (4 * n), (-1) ** j
        cosine, sine = math.cos(angle), math.sin(angle)
        low, high = x[j], x[n - 1 - j]
        sums.append(numbers.add(numbers.times(low, cosine), numbers.times(high, sine)))
        differences.append(numbers.subtract(numbers.times(high, sign * cosine), numbers.times(low, sign * sine)))
    even, odd = _second(numbers, sums), _second(numbers, differences)
    y = [None] * n
    y[0], y[n - 1] = even[0], numbers.times(odd[0], -1.0)
    for k in range(1, half):
        y[2 * k] = numbers.add(even[k], odd[half - k])
        y[2 * k - 1] = numbers.subtract(even[k], odd[half - k])
    return y


def _third(numbers: _Numbers, y: list[Any]) -> list[Any]:
    """DCT-III, which transposes DCT-II: x[j] = sum of y[k] cos((2j + 1) k pi / 2n)."""
    if len(y) == 1:
        return y
    even, odd = _third(numbers, y[0::2]), _fourth(numbers, y[1::2])
    first = [numbers.add(u, v) for u, v in zip(even, odd, strict=True)]
    return first + [numbers.subtract(u, v) for u, v in zip(reversed(even), reversed(odd), strict=True)]


def _columns(n: int, inverse: bool) -> Any:
    """Transforms `_LANES` columns of n elements in place, orthonormally."""
    scales = [math.sqrt((1 if k == 0 else 2) / n) for k in range(n)]

    @intrinsic
    def columns(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            numbers, vector = _Numbers(builder), ir.VectorType(vectors.F32, _LANES)
            places = [
                builder.inttoptr(builder.add(arguments[0], vectors.I64(4 * _STRIDE * i)), vector.as_pointer())
                for i in range(n)
            ]
            values = [builder.load(place, align=4) for place in places]
            if inverse:
                values = [numbers.times(value, scale) for value, scale in zip(values, scales, strict=True)]
                values = _third(numbers, values)
            else:
                values = _second(numbers, values)
                values = [numbers.times(value, scale) for value, scale in zip(values, scales, strict=True)]
            for place, value in zip(places, values, strict=True):
                builder.store(value, place, align=4)
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return columns


@intrinsic
def _turn(typing: Any, source: Any, target: Any) -> Any:
    """Transposes `_TURN` rows and columns."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(vectors.F32, _TURN)

        def place(address: Any, row: int) -> Any:
            return builder.inttoptr(builder.add(address, vectors.I64(4 * _STRIDE * row)), vector.as_pointer())

        rows = [builder.load(place(arguments[0], row), align=4) for row in range(_TURN)]
        step = 1
        while step < _TURN:  # blocks of `step` beside the diagonal change places
            for row in (row for row in range(_TURN) if not row & step):
                upper, lower = rows[row], rows[row + step]
                picks = [
                    [i if not i & step else i - step + _TURN for i in range(_TURN)],
                    [i + step if not i & step else i + _TURN for i in range(_TURN)],
                ]
                rows[row], rows[row + step] = (
                    builder.shuffle_vector(upper, lower, ir.Constant(ir.VectorType(vectors.I32, _TURN), pick))
                    for pick in picks
                )
            step *= 2
        for row in range(_TURN):
            builder.store(rows[row], place(arguments[1], row), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit
def _transpose(source, target, rows, columns):  # type: ignore[no-untyped-def]
    for i in range(0, rows, _TURN):
        for j in range(0, columns, _TURN):
            _turn(source + 4 * (_STRIDE * i + j), target + 4 * (_STRIDE * j + i))


@njit
def _copy(source, source_stride, target, target_stride, rows, columns):  # type: ignore[no-untyped-def]
    for row in range(rows):
        read, write, i = source + 4 * source_stride * row, target + 4 * target_stride * row, 0
        while i + lanes(_WIDE) <= columns:
            store(_WIDE, write, i, load(_WIDE, read, i))
            i += lanes(_WIDE)
        while i < columns:
            poke_float(write, i, peek_float(read, i))
            i += 1


def _all_columns(inverse: bool) -> Any:
    two, four, eight, sixteen, thirty_two, sixty_four = (_columns(2**power, inverse) for power in range(1, 7))

    @njit
    def transform(tile, length, columns):  # type: ignore[no-untyped-def]
        """Transforms the columns of a tile, all of which have this length."""
        for i in range(0, columns, _LANES):
            address = tile + 4 * i
            if length == 64:
                sixty_four(address)
            elif length == 32:
                thirty_two(address)
            elif length == 16:
                sixteen(address)
            elif length == 8:
                eight(address)
            elif length == 4:
                four(address)
            elif length == 2:
                two(address)

    return transform


@njit
def _size(left, most):  # type: ignore[no-untyped-def]
    """The largest power of two up to `most` and `left`."""
    size = most
    while size > left:
        size >>= 1
    return size


def _tiles(inverse: bool) -> Callable[..., None]:
    transform = _all_columns(inverse)

    def kernel(request):  # type: ignore[no-untyped-def]
        matrix, coefficients, columns, most = (
            peek64(request, 0), peek64(request, 1), peek64(request, 2), peek64(request, 3),
        )  # fmt: skip
        row, end, scratch = peek64(request, 4), peek64(request, 5), peek64(request, 6)
        other = scratch + 4 * _STRIDE * _STRIDE
        while row < end:
            height = _size(end - row, most)
            column = 0
            while column < columns:
                width = _size(columns - column, most)
                plain = matrix + 4 * (row * columns + column)
                tile = coefficients + 4 * (row * columns + height * column)
                if inverse:
                    _copy(tile, height, scratch, _STRIDE, width, height)
                    transform(scratch, width, height)
                    _transpose(scratch, other, width, height)
                    transform(other, height, width)
                    _copy(other, _STRIDE, plain, columns, height, width)
                else:
                    _copy(plain, columns, scratch, _STRIDE, height, width)
                    transform(scratch, height, width)
                    _transpose(scratch, other, height, width)
                    transform(other, width, height)
                    _copy(other, _STRIDE, tile, height, width, height)
                column += width
            row += height

    kernel.__name__ = "cosines_back" if inverse else "cosines"
    return kernel


KERNELS = (_tiles(False), _tiles(True))
