"""`kernels.cpu` against `reference`, which is plain numpy."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import cpu
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]

ALL = list(DTYPES.values())
FLOATING = [dtype for dtype in ALL if dtype.is_floating]
INTEGERS = [dtype for dtype in ALL if not dtype.is_floating and dtype.name != "bool"]
OPS = ("sum", "product", "min", "max")
BITWISE = ("band", "bor", "bxor")
F32 = DTYPES["float32"]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    cpu.prepare(ALL)  # in one go, so that no example below takes the seconds of compiling


def random_array(dtype: DType, n: int, rng: np.random.Generator) -> Array:
    """Any bits at all, and among them many special values: zeros, infinities, NaN, denormals, the ends of the range."""
    array: Array = np.frombuffer(rng.bytes(n * dtype.itemsize), dtype.storage).copy()
    if dtype.is_floating:
        specials = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-7, 65504.0, 65520.0, 1 + 2**-9])
        values = reference.narrow(dtype, specials.astype(np.float32 if dtype.is_half else dtype.storage))
    elif dtype.name == "bool":
        values = np.array([0, 1, 2, 255], np.uint8)
    else:
        ends = np.iinfo(dtype.storage)
        values = np.array([0, 1, 2, 3, ends.min, ends.max, ends.min + 1, ends.max - 1], dtype.storage)
    chosen = rng.random(n) < 0.5
    array[chosen] = rng.choice(values, int(chosen.sum()))
    return array


def assert_same_bits(dtype: DType, actual: Array, expected: Array) -> None:
    """Equal bit by bit, but any NaN will do for a NaN."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    different = actual.view(unsigned) != expected.view(unsigned)
    if dtype.is_floating:
        different &= ~(np.isnan(reference.widen(dtype, actual)) & np.isnan(reference.widen(dtype, expected)))
    where = np.flatnonzero(different)
    assert not where.size, f"element {where[0]}: {actual[where[0]]!r}, expected {expected[where[0]]!r}"


def ordinary(dtype: DType, n: int, seed: int) -> Array:
    """Numbers without NaN, which can be compared bit by bit."""
    rng = np.random.default_rng(seed)
    if not dtype.is_floating:
        return random_array(dtype, n, rng)
    return reference.narrow(dtype, rng.standard_normal(n).astype(np.float32 if dtype.is_half else dtype.storage))


@settings(max_examples=300, deadline=None)
@given(
    dtype=st.sampled_from(ALL),
    op=st.sampled_from((*OPS, *BITWISE)),
    k=st.integers(1, 5),
    n=st.one_of(st.integers(0, 5), st.integers(0, 300)),
    in_place=st.sets(st.integers(0, 4)),
    others=st.integers(0, 2),
    scales=st.sampled_from(
        [(1.0, 1.0, 1), (0.5, 1.0, 1), (1.0, -3.7, 1), (1.0, 1.0, 3), (1e3, 0.1, 7), (1e300, -1e300, 2)]
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_reduction_gives_the_bits_of_the_reference(
    dtype: DType, op: str, k: int, n: int, in_place: set[int], others: int,
    scales: tuple[float, float, int], seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    if op in BITWISE and dtype.is_floating:
        op = "sum"
    prescale, postscale, divisor = (1.0, 1.0, 1) if dtype.name == "bool" or op in BITWISE else scales
    factors: dict[str, Any] = {"prescale": prescale, "postscale": postscale, "divisor": divisor}
    sources = [random_array(dtype, n, rng) for _ in range(k)]
    outputs = [sources[i] for i in sorted(in_place) if i < k] + [random_array(dtype, n, rng) for _ in range(others)]
    outputs = outputs or [sources[0]]
    untouched = [(source, source.copy()) for source in sources if not any(source is output for output in outputs)]
    expected = np.empty(n, dtype.storage)
    reference.reduce(op, dtype, sources, [expected], **factors)

    cpu.reduce(op, dtype, sources, outputs, **factors)

    for output in outputs:
        assert_same_bits(dtype, output, expected)
    for source, before in untouched:
        assert source.tobytes() == before.tobytes()


@for_each("dtype", ALL)
@for_each("op", OPS)
def test_dividing_the_range_changes_no_bit(dtype: DType, op: str) -> None:
    n = 5000
    sources = [ordinary(dtype, n, seed) for seed in range(3)]
    whole = np.empty(n, dtype.storage)
    cpu.reduce(op, dtype, sources, [whole])
    bounds = [0, 1, 2, 33, 64, 1000, 1031, 4999, n]
    parts = np.empty(n, dtype.storage)
    for low, high in itertools.pairwise(bounds):
        cpu.reduce(op, dtype, [source[low:high] for source in sources], [parts[low:high]])
    assert parts.tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", [DTYPES["float32"], DTYPES["float64"]], ids=str)
def test_sources_are_added_in_their_order(dtype: DType) -> None:
    large = 1.0 / np.finfo(dtype.storage).eps * 4
    sources = [np.full(100, value, dtype.storage) for value in (large, 1.0, -large, 1.0)]
    out = np.empty(100, dtype.storage)
    cpu.reduce("sum", dtype, sources, [out])
    assert (out == 1.0).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_halves_are_rounded_once_at_the_end(name: str) -> None:
    dtype = DTYPES[name]
    one, tiny = reference.narrow(dtype, np.array([1.0, 2.0**-12], np.float32))
    sources = [np.full(40, value, np.uint16) for value in (one, *[tiny] * 16)]
    out = np.empty(40, np.uint16)
    cpu.reduce("sum", dtype, sources, [out])
    expected = reference.narrow(dtype, np.array([1.0 + 16 * 2.0**-12], np.float32))
    assert (out == expected).all()


@for_each("dtype", FLOATING)
@for_each(("op", "zero"), [("min", -0.0), ("max", 0.0)])
def test_min_and_max_propagate_nan_and_order_zeros(dtype: DType, op: str, zero: float) -> None:
    def stored(*values: float) -> Array:
        return np.repeat(reference.narrow(dtype, np.array(values, np.float32)), 40)

    out = np.empty(160, dtype.storage)
    cpu.reduce(op, dtype, [stored(np.nan, 1.0, 0.0, -0.0), stored(1.0, np.nan, -0.0, 0.0)], [out])
    wide = reference.widen(dtype, out)
    assert np.isnan(wide[:80]).all()
    assert (wide[80:] == 0).all()
    assert (np.signbit(wide[80:]) == np.signbit(zero)).all()


def test_int64_averages_are_exact_beyond_two_to_the_53() -> None:
    values = np.array([2**62 + 1, -(2**62) - 1, 7, -7, 2**63 - 1], np.int64)
    out = np.empty_like(values)
    cpu.reduce("sum", DTYPES["int64"], [values], [out], divisor=2)
    assert out.tolist() == [2**61, -(2**61), 3, -3, 2**62 - 1]


@for_each("dtype", INTEGERS)
def test_integer_sums_wrap_around(dtype: DType) -> None:
    ends = np.iinfo(dtype.storage)
    out = np.empty(70, dtype.storage)
    cpu.reduce("sum", dtype, [np.full(70, ends.max, dtype.storage), np.ones(70, dtype.storage)], [out])
    assert (out == ends.min).all()


def test_a_bool_is_true_when_its_byte_is_not_zero() -> None:
    left, right = np.array([0, 0, 2, 255], np.uint8), np.array([0, 7, 0, 1], np.uint8)
    results = {}
    for op in OPS:
        out = np.empty(4, np.uint8)
        cpu.reduce(op, DTYPES["bool"], [left, right], [out])
        results[op] = out.tolist()
    either, both = [0, 1, 1, 1], [0, 0, 0, 1]
    assert results == {"sum": either, "max": either, "product": both, "min": both}


@for_each("factors", [{"prescale": 0.5}, {"postscale": 2.0}, {"divisor": 2}])
def test_scaling_bools_is_refused(factors: dict[str, Any]) -> None:
    flags = np.ones(3, np.uint8)
    with pytest.raises(ValueError, match="bool tensors cannot be scaled"):
        cpu.reduce("sum", DTYPES["bool"], [flags], [flags], **factors)


def test_a_source_may_be_read_only_and_begin_at_any_byte() -> None:
    received = b"x" + np.arange(100, dtype=np.float32).tobytes()
    source = np.frombuffer(received, np.float32, offset=1)
    out = np.ones(100, np.float32)
    cpu.reduce("sum", F32, [source, out], [out])
    assert out.tolist() == [float(i + 1) for i in range(100)]


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


@for_each(
    ("source", "output", "said"),
    [
        (np.zeros(4, np.float64), np.zeros(4, np.float32), "type float64"),
        (np.zeros(4, np.float32), np.zeros(5, np.float32), r"output of 4 elements.*shape \(5,\)"),
        (np.zeros((2, 2), np.float32), np.zeros(2, np.float32), "1-D"),
        (np.zeros(8, np.float32)[::2], np.zeros(4, np.float32), "source of 4 elements.*strides"),
        (np.zeros(4, np.float32), np.zeros(8, np.float32)[::2], "output of 4 elements.*strides"),
        (read_only(np.zeros(8, np.float32))[::2], np.zeros(4, np.float32), "contiguous"),
        (np.zeros(4, np.float32), read_only(np.zeros(4, np.float32)), "read-only"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(source: Array, output: Array, said: str) -> None:
    before = output.copy()
    with pytest.raises(ValueError, match=said):
        cpu.reduce("sum", F32, [source], [output])
    assert (output == before).all()


@for_each(
    ("op", "counts", "divisor", "said"),
    [
        ("average", (1, 1), 1, "no reduction 'average'"),
        ("sum", (0, 1), 1, "needs a source and an output"),
        ("sum", (1, 0), 1, "needs a source and an output"),
        ("sum", (1, 1), 0, "at least 1, not 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(op: str, counts: tuple[int, int], divisor: int, said: str) -> None:
    array = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=said):
        cpu.reduce(op, F32, [array] * counts[0], [array] * counts[1], divisor=divisor)


def test_threads_reduce_parts_of_a_bucket_side_by_side() -> None:
    n = 300_000
    arrays = [ordinary(F32, n, seed) for seed in range(2)]
    expected = arrays[0] + arrays[1]
    bounds = cpu.split(n, 4, 4)

    def part(low: int, high: int) -> None:
        slices = [array[low:high] for array in arrays]
        cpu.reduce("sum", F32, slices, slices)

    threads = [threading.Thread(target=part, args=bound) for bound in bounds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bounds) == 4
    assert all(array.tobytes() == expected.tobytes() for array in arrays)


@given(n=st.integers(0, 10**9), parts=st.integers(1, 64), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_split_covers_everything_once_at_page_boundaries(n: int, parts: int, itemsize: int) -> None:
    bounds = cpu.split(n, parts, itemsize)
    assert len(bounds) <= parts
    assert [low for low, _ in bounds] == ([0] + [high for _, high in bounds[:-1]] if bounds else [])
    assert (bounds[-1][1] if bounds else 0) == n
    assert all(low < high and low * itemsize % 4096 == 0 for low, high in bounds)
    sizes = [high - low for low, high in bounds]
    assert not sizes or max(sizes) - min(sizes) < 2 * 4096 // itemsize
