"""The reducer: the same bits whichever way it computes them."""

from __future__ import annotations

import numpy as np

from fusion_rt.core.dtypes import DTYPES
from fusiond.collectives.base import Reducer
from tests.for_each import for_each
from tests.fusiond.collectives.group import Array
from tests.kernels import reference

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, -3.4e38, 1.0]


def arrays(dtype: str, count: int, sources: int) -> list[Array]:
    """Values of any magnitude, among them some that no sum is fond of."""
    choose = np.random.default_rng([count, sources])
    storage = DTYPES[dtype].storage
    found = []
    for _ in range(sources):
        if DTYPES[dtype].is_floating and not DTYPES[dtype].is_half:
            with np.errstate(all="ignore"):
                values = (choose.standard_normal(count) * 10.0 ** choose.integers(-44, 38, count)).astype(storage)
                values[choose.random(count) < 0.2] = choose.choice(np.array(SPECIAL, storage))
        else:
            values = choose.integers(0, 2 if dtype == "bool" else 256, count * storage.itemsize, np.uint8).view(storage)
            values = values[:count].copy() if dtype != "bool" else (values[:count] % 2).astype(storage)
        found.append(values)
    return found


def bits(array: Array, dtype: str) -> Array:
    """The array with every NaN alike: which of two survives is nobody's promise."""
    if array.dtype.kind == "f":
        return np.where(np.isnan(array), np.nan, array).astype(array.dtype).view(f"u{array.itemsize}")
    if dtype in ("float16", "bfloat16"):
        exponent, fraction = (0x7C00, 0x3FF) if dtype == "float16" else (0x7F80, 0x7F)
        nan = (array & exponent == exponent) & (array & fraction != 0)
        return np.where(nan, 0xFFFF, array)
    return array


@for_each("dtype", DTYPES)
@for_each("count", [1, 2, 63, 64, 65, 1000])
@for_each("sources", [1, 2, 5])
def test_small_and_large_arrays_get_the_same_bits(dtype: str, count: int, sources: int) -> None:
    parts = arrays(dtype, count, sources)
    for op, divisor, postscale in [("sum", 1, 1.0), ("sum", 3, 1.0), ("sum", 1, 0.3), ("max", 1, 1.0)]:
        if dtype == "bool" and (divisor, postscale) != (1, 1.0):
            continue
        found, expected = np.empty_like(parts[0]), np.empty_like(parts[0])
        with np.errstate(all="ignore"):  # as in the daemon
            Reducer(op, DTYPES[dtype], postscale=postscale, divisor=divisor).whole(parts, [found])
        reference.reduce(op, DTYPES[dtype], parts, [expected], postscale=postscale, divisor=divisor)
        np.testing.assert_array_equal(bits(found, dtype), bits(expected, dtype))


@for_each("dtype", ["float32", "float64", "int64"])
@for_each("count", [3, 1000])
def test_an_output_may_be_a_source(dtype: str, count: int) -> None:
    first, second = (np.arange(count).astype(DTYPES[dtype].storage) for _ in range(2))
    other = np.empty_like(first)
    Reducer("sum", DTYPES[dtype], divisor=2).whole([first, second], [second, other])
    np.testing.assert_array_equal(first, np.arange(count))
    np.testing.assert_array_equal(second, np.arange(count))
    np.testing.assert_array_equal(other, np.arange(count))


@for_each(
    ("op", "dtype", "postscale", "elements", "needed"),
    [
        ("sum", "float32", 1.0, 64, False),
        ("sum", "float32", 1.0, 65, True),
        ("sum", "float64", 1.0, 64, False),
        ("sum", "float32", 0.5, 1, True),
        ("max", "float32", 1.0, 1, True),
        ("sum", "float16", 1.0, 1, True),
        ("sum", "int32", 1.0, 1, True),
        ("band", "int32", 1.0, 1000, False),
    ],
)
def test_a_kernel_is_needed_for_what_numpy_is_not_asked_to_do(
    op: str, dtype: str, postscale: float, elements: int, needed: bool
) -> None:
    assert Reducer(op, DTYPES[dtype], postscale=postscale).needs_kernel(elements) == needed
