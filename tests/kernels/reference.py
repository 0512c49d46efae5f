"""The kernels `cpu`, `selection`, `coding`, `quantisation`, `low_rank` and `cosines` in plain numpy, as their
documentation says and nothing else; tests compare them with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import reduce as fold
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fusion_rt.core.dtypes import DTYPES, DType

Array: TypeAlias = npt.NDArray[Any]


@np.errstate(all="ignore")
def reduce(
    op: str,
    dtype: DType,
    sources: Sequence[Array],
    outputs: Sequence[Array],
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    divisor: int = 1,
) -> None:
    """See `cpu.reduce`."""
    values, inner = [widen(dtype, source) for source in sources], dtype
    if divisor != 1 and not dtype.is_floating:
        values, inner = [value.astype(np.int64) for value in values], DTYPES["int64"]
    combined = fold(
        lambda left, right: _combine(op, inner, left, right), [_scale(inner, value, prescale) for value in values]
    )
    result = narrow(dtype, _divide(inner, _scale(inner, combined, postscale), divisor))
    for output in outputs:
        output[...] = result


@np.errstate(all="ignore")
def convert(source: Array, source_dtype: DType, target: Array, target_dtype: DType) -> None:
    """See `cpu.convert`."""
    target[...] = narrow(target_dtype, widen(source_dtype, source))


@np.errstate(all="ignore")
def widen(dtype: DType, stored: Array) -> Array:
    """Elements as stored to what they are combined in: float64, float32, or the integer type itself; exact."""
    wide: Array = stored.copy()
    if dtype.name == "float16":
        wide = stored.view(np.float16).astype(np.float32)
    elif dtype.name == "bfloat16":
        wide = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif dtype.name == "bool":
        wide = (stored != 0).astype(np.uint8)
    return wide


@np.errstate(all="ignore")
def narrow(dtype: DType, values: Array) -> Array:
    """The opposite of `widen`: floating values rounded to the nearest, ties to even."""
    stored: Array = values.astype(np.float32 if dtype.is_half else dtype.storage)
    if dtype.name == "float16":
        stored = stored.astype(np.float16).view(np.uint16)
    elif dtype.name == "bfloat16":
        bits = stored.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        stored = np.where(np.isnan(stored), (bits >> 16) | 0x40, rounded).astype(np.uint16)
    return stored


@np.errstate(all="ignore")
def added(
    residual: Array,
    gradient: Array,
    velocity: Array | None,
    momentum: float,
    nesterov: bool,
    factor: float,
    decay: float = 1.0,
) -> tuple[Array, Array | None]:
    """The residual and the velocity after an addition, see `selection.Memory`."""
    before, residual = velocity, residual * np.float32(decay)
    step = gradient * np.float32(factor) if factor != 1.0 else gradient
    if velocity is not None:
        velocity = (velocity + step) * np.float32(momentum) if nesterov else velocity * np.float32(momentum) + step
        step = velocity + step if nesterov else velocity
    finite = np.isfinite(residual + step)
    if velocity is not None and before is not None:
        velocity = np.where(finite, velocity, before)
    return np.where(finite, residual + step, residual), velocity


def magnitudes(values: Array) -> Array:
    """The magnitudes of float32 (see `selection`); int64."""
    sizes: Array = (values.view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(np.int64)
    return sizes


def collected(values: Array, low: int, high: int, threshold: int, quota: int) -> Array:
    """The indices that `selection.collect` finds."""
    sizes = magnitudes(values[low:high])
    ties = np.flatnonzero(sizes == threshold)[:quota]
    indices: Array = low + np.sort(np.concatenate([np.flatnonzero(sizes > threshold), ties]))
    return indices


def largest(values: Array, k: int) -> Array:
    """The indices, ascending, of the k largest magnitudes, of equal ones the first, without zeros."""
    sizes = magnitudes(values)
    order = np.argsort(-sizes, kind="stable")[:k]
    return np.sort(order[sizes[order] > 0])


@np.errstate(all="ignore")
def merged(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """See `selection.merge`."""
    values = dict(zip(left[0].tolist(), left[1], strict=True))
    for i, value in zip(right[0].tolist(), right[1], strict=True):
        values[i] = values[i] + value if i in values else value
    indices = sorted(values)
    return np.array(indices, np.int32), np.array([values[i] for i in indices], np.float32)


def rice(indices: Array, low: int, bits: int) -> tuple[Array, ...]:
    """See `coding.encode`."""
    high_bits: list[int] = []
    low_bits: list[int] = []
    for gap in np.diff(indices, prepend=low - 1) - 1:
        high_bits += [0] * (int(gap) >> bits) + [1]
        low_bits += [int(gap) >> bit & 1 for bit in range(bits)]
    return tuple(np.packbits(np.array(part, np.uint8), bitorder="little") for part in (high_bits, low_bits))


@np.errstate(all="ignore")
def integers(
    bits: int, values: Array, block: int, phase: int, base: int, left: int, right: int, nearest: bool = False
) -> tuple[bytes, Array, Array]:
    """See `quantisation.INT8`, `INT4` and `INT2`: the payload of a sum, what is left of it, and what receivers get."""
    payload, rest, got = b"", np.empty_like(values), np.empty_like(values)
    most, offset = {8: (127, 0.0), 4: (7, 0.0), 2: (1, 0.5)}[bits]
    longest = np.float32(2.0**127) if bits == 2 else np.nextafter(np.float32(2.0**128 / most), np.float32(0))
    for low, high in _blocks(len(values), block, phase):
        part = values[low:high]
        finite = np.isfinite(part)
        sizes = np.abs(np.where(finite, part, 0))
        scale = np.float32(1.25 * _mean(sizes, len(part))) if bits == 2 else sizes.max() / np.float32(most)
        scale = np.clip(scale, np.float32(2.0**-126), longest)
        ratio = np.where(finite, part, 0) / scale
        if bits == 2:
            ratio = ratio.clip(-3, 2) - np.float32(0.5)
        x = np.arange(base + low, base + high, dtype=np.uint64).astype(np.uint32) + np.uint32(left)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15)) ^ np.uint32(right)
        x = x * np.uint32(0x846CA68B)
        x = x ^ (x >> np.uint32(16))
        drawn = np.float32(0.5) if nearest else (x >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
        down = np.floor(ratio)
        steps = (down + (drawn < ratio - down)).clip(-2 if bits == 2 else -most, most).astype(np.float32)
        if bits == 2:
            scale = scale * np.float32(sizes.any()) if finite.all() else np.float32(np.nan)
        arrives = (steps + np.float32(offset)) * scale
        got[low:high] = np.where(finite, arrives, np.nan)
        rest[low:high] = np.where(finite, part - (0 if np.isnan(scale) else arrives), 0)
        codes = np.where(finite, steps, steps if bits == 2 else -(1 << bits - 1)).astype(np.int64) & (1 << bits) - 1
        payload += scale.tobytes()
        for first in range(0, len(codes), 32):
            payload += _packed(codes[first : first + 32], bits)
    return payload, rest, got


def _packed(codes: Array, bits: int) -> bytes:
    """At most 32 codes: those of 32 as consecutive ones beside each other in bytes, fewer as a stream."""
    per_byte = 8 // bits
    whole = np.zeros(-(-len(codes) // per_byte) * per_byte, np.int64)
    whole[: len(codes)] = codes
    columns = whole.reshape(per_byte, -1).T if len(codes) == 32 else whole.reshape(-1, per_byte)
    return bytes(int(sum(int(code) << bits * i for i, code in enumerate(byte))) for byte in columns)


def _mean(sizes: Array, n: int) -> float:
    """The mean of float32 in float64, in the order in which a kernel adds."""
    sizes = sizes.astype(np.float64)
    whole = n // 32 * 32
    lanes = fold(np.add, sizes[:whole].reshape(-1, 32), np.zeros(32))
    return float(fold(lambda left, right: left + right, [*lanes, *sizes[whole:]], 0.0)) / n


@np.errstate(all="ignore")
def onebit(values: Array, block: int, phase: int) -> tuple[bytes, Array, Array]:
    """See `quantisation.ONEBIT`: the payload of a sum, what is left of it, and what receivers get."""
    payload, rest, got = b"", np.empty_like(values), np.empty_like(values)
    for low, high in _blocks(len(values), block, phase):
        part = values[low:high]
        finite = np.isfinite(part)
        mean = np.float32(_mean(np.abs(np.where(finite, part, 0)), len(part)) if finite.all() else np.nan)
        got[low:high] = np.copysign(mean, part)
        rest[low:high] = np.where(finite, part - np.copysign(mean if finite.all() else np.float32(0), part), 0)
        payload += mean.tobytes() + np.packbits(np.signbit(part), bitorder="little").tobytes()
    return payload, rest, got


@np.errstate(all="ignore")
def orthonormal(vectors: Array) -> Array:
    """See `low_rank.orthonormalise`, in float64."""
    result: list[Array] = []
    for vector in vectors.astype(np.float64):
        rest = vector - sum((other * (other @ vector) for other in result), np.zeros_like(vector))
        rest = rest - sum((other * (other @ rest) for other in result), np.zeros_like(vector))
        size = np.linalg.norm(rest)
        result.append(rest * 0 if size <= 1e-7 * np.linalg.norm(vector) else rest / size)
    return np.array(result).reshape(vectors.shape)


def cosines(matrix: Array, size: int) -> Array:
    """See `cosines.transform`, in float64."""
    parts = []
    for low, high in _powers(len(matrix), size):
        for first, end in _powers(matrix.shape[1], size):
            tile = matrix[low:high, first:end].astype(np.float64)
            parts.append((_cosine_matrix(high - low) @ tile @ _cosine_matrix(end - first).T).T.ravel())
    return np.concatenate([np.empty(0), *parts])


def cosines_back(coefficients: Array, rows: int, columns: int, size: int) -> Array:
    """See `cosines.transform_back`, in float64."""
    matrix, done = np.zeros((rows, columns)), 0
    for low, high in _powers(rows, size):
        for first, end in _powers(columns, size):
            height, width = high - low, end - first
            tile = coefficients[done : done + height * width].astype(np.float64).reshape(width, height).T
            matrix[low:high, first:end] = _cosine_matrix(height).T @ tile @ _cosine_matrix(width)
            done += height * width
    return matrix


def _powers(length: int, size: int) -> list[tuple[int, int]]:
    low, found = 0, []
    while low < length:
        while size > length - low:
            size //= 2
        found.append((low, low + size))
        low += size
    return found


def _cosine_matrix(n: int) -> Array:
    k, j = np.arange(n)[:, None], np.arange(n)[None, :]
    matrix: Array = np.sqrt(np.where(k == 0, 1, 2) / n) * np.cos((2 * j + 1) * k * np.pi / (2 * n))
    return matrix


def _combine(op: str, dtype: DType, left: Array, right: Array) -> Array:
    if dtype.name == "bool":
        op = {"sum": "max", "product": "min"}.get(op, op)
    functions = {
        "sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }  # fmt: skip
    result: Array = functions[op](left, right)
    if dtype.is_floating and op in ("min", "max"):  # numpy leaves open which of -0 and +0 it is
        signs = np.signbit(left), np.signbit(right)
        negative = signs[0] | signs[1] if op == "min" else signs[0] & signs[1]
        zeros = (left == 0) & (right == 0)
        result[zeros] = np.where(negative, -0.0, 0.0)[zeros]
    return result


def _scale(dtype: DType, values: Array, factor: float) -> Array:
    if factor == 1.0:
        return values
    scaled: Array
    if dtype.is_floating:
        scaled = values * values.dtype.type(factor)
    else:
        exact = np.nan_to_num(np.trunc(values.astype(np.float64) * factor), nan=0.0)
        longs = [max(-(2**63), min(2**63 - 1, int(value))) for value in exact.clip(-1e30, 1e30)]
        scaled = np.array(longs, np.int64).astype(values.dtype)
    return scaled


def _divide(dtype: DType, values: Array, divisor: int) -> Array:
    if divisor == 1:
        return values
    quotients: Array
    if dtype.is_floating:
        quotients = values / values.dtype.type(divisor)
    else:
        exact = [abs(int(value)) // divisor * (1 if value >= 0 else -1) for value in values]
        quotients = np.array(exact, values.dtype)
    return quotients


def _blocks(n: int, block: int, phase: int) -> list[tuple[int, int]]:
    edges = [0, *range(block - phase, n, block), n] if n else []
    return list(itertools.pairwise(edges))
