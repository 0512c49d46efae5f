"""`kernels.quantisation` against `reference`, which is plain numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.kernels.quantisation import INT2, INT4, INT8, LEAST_STEP, ONEBIT, Draw, Quantiser
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]

SPECIALS = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-40, 3.4e38, -3.4e38, 127.0], np.float32
)
DRAW = Draw(0x12345678, 0x9ABCDEF0)


def numbers(n: int, seed: int, special: float, size: float = 1.0) -> Array:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n, dtype=np.float32) * np.float32(size)
    chosen = rng.random(n) < special
    values[chosen] = rng.choice(SPECIALS, int(chosen.sum()))
    return values


def same(actual: Array, expected: Array) -> None:
    """Equal bit by bit, but any NaN will do for a NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    assert ((actual.view(np.uint32) == expected.view(np.uint32)) | both_nan).all()


def expected_of(
    kind: Quantiser, total: Array, block: int, phase: int, base: int, nearest: bool
) -> tuple[bytes, Array, Array]:
    if kind is ONEBIT:
        return reference.onebit(total, block, phase)
    return reference.integers(kind.bits, total, block, phase, base, DRAW.left, DRAW.right, nearest)


KINDS = pytest.mark.parametrize("kind", [INT8, INT4, INT2, ONEBIT], ids=["int8", "int4", "int2", "onebit"])


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    for kind in (INT8, INT4, INT2, ONEBIT):
        kind.prepare()  # so that no example below takes the seconds of compiling


@KINDS
@settings(deadline=None)
@given(
    n=st.integers(0, 400),
    block=st.sampled_from([32, 64, 96, 256]),
    phase=st.integers(0, 255),
    base=st.sampled_from([0, 1, 1000, 2**32 - 7, 2**40]),
    special=st.sampled_from([0.0, 0.01, 0.5]),
    size=st.sampled_from([1e-42, 1e-30, 1.0, 1e37]),
    keep=st.booleans(),
    nearest=st.booleans(),
    decay=st.sampled_from([1.0, 0.75, 0.95]),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_are_those_of_the_reference(
    kind: Quantiser,
    n: int,
    block: int,
    phase: int,
    base: int,
    special: float,
    size: float,
    keep: bool,
    nearest: bool,
    decay: float,
    seed: int,
) -> None:
    phase %= block
    residual, gradient = numbers(n, seed, special / 2, size), numbers(n, seed + 1, special, size)
    with np.errstate(all="ignore"):
        decayed = residual * np.float32(decay)
        total = decayed + gradient
    added = np.isfinite(total)
    total = np.where(added, total, decayed)
    payload, left, got = expected_of(kind, total, block, phase, base, nearest)
    out = np.empty(kind.nbytes(n, block, phase), np.uint8)
    given_gradient = gradient.copy()
    told = kind.encode(
        residual, gradient, block, out, phase=phase, keep=keep, base=base, draw=None if nearest else DRAW, decay=decay
    )
    assert told == added.all()
    assert out.tobytes() == payload
    assert gradient.tobytes() == given_gradient.tobytes()
    same(residual, left if keep else np.zeros(n, np.float32))
    decoded = np.full(n, 7, np.float32)
    kind.decode(out, block, decoded, phase=phase)
    same(decoded, got)
    sums = numbers(n, seed + 2, 0.0)
    with np.errstate(all="ignore"):
        wanted = sums + got
    kind.decode(out, block, sums, phase=phase, add=True)
    same(sums, wanted)


@KINDS
def test_any_division_at_blocks_gives_the_same_bytes(kind: Quantiser) -> None:
    n, block, phase = 1000, 64, 10
    values = numbers(n, 1, 0.01)
    whole = np.empty(kind.nbytes(n, block, phase), np.uint8)
    kind.encode(values.copy(), None, block, whole, phase=phase, base=phase, draw=DRAW)
    parts = []
    for low, high in ((0, 54), (54, 54 + 640), (54 + 640, n)):
        part = np.empty(kind.nbytes(high - low, block, phase if low == 0 else 0), np.uint8)
        kind.encode(
            values[low:high].copy(), None, block, part, phase=phase if low == 0 else 0, base=phase + low, draw=DRAW
        )
        parts.append(part.tobytes())
    assert b"".join(parts) == whole.tobytes()


@KINDS
@for_each(("n", "phase"), [(0, 0), (0, 5), (1, 0), (3, 63), (54, 10), (55, 10), (640, 0), (700, 63)])
def test_the_scales_of_a_payload_are_found(kind: Quantiser, n: int, phase: int) -> None:
    block = 64
    payload = np.empty(kind.nbytes(n, block, phase), np.uint8)
    kind.encode(np.arange(n, dtype=np.float32), None, block, payload, phase=phase)
    edges = [0, *range(block - phase, n, block), n] if n else []
    parts = [np.arange(low, high, dtype=np.float32) for low, high in itertools.pairwise(edges)]
    most, of_mean = {INT8: 127, INT4: 7}.get(kind), 1.25 if kind is INT2 else 1.0
    expected = [part.max() / most if most else of_mean * part.mean() for part in parts]
    assert kind.scales(payload, n, block, phase) == pytest.approx(np.maximum(expected, LEAST_STEP if most else 0))


def test_rounding_is_right_on_average_and_differs_from_draw_to_draw() -> None:
    n = 50_000
    values = np.full(n, 0.3, np.float32)
    values[::256] = 127
    payload, decoded = np.empty(INT8.nbytes(n, 256), np.uint8), np.empty(n, np.float32)
    results = []
    for seed in range(2):
        INT8.encode(values.copy(), None, 256, payload, draw=Draw(seed, 77))
        INT8.decode(payload, 256, decoded)
        plain = decoded[values != 127]
        assert set(plain.tolist()) == {0.0, 1.0}
        assert plain.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / n))
        results.append(plain.copy())
    assert (results[0] != results[1]).mean() == pytest.approx(2 * 0.3 * 0.7, abs=0.02)


@for_each(("kind", "most"), [(INT8, 127), (INT4, 7), (INT2, 1.5)])
def test_the_largest_numbers_stay_finite(kind: Quantiser, most: float) -> None:
    values = np.full(64, np.finfo(np.float32).max)
    payload, decoded = np.empty(kind.nbytes(64, 64), np.uint8), np.empty(64, np.float32)
    kind.encode(values.copy(), None, 64, payload)
    kind.decode(payload, 64, decoded)
    assert kind.scales(payload, 64, 64)[0] == np.float32(kind.longest)
    assert np.isfinite(decoded).all()
    if kind is not INT2:
        with np.errstate(over="ignore"):
            assert np.isinf(np.float32(most) * np.nextafter(np.float32(kind.longest), np.float32(np.inf)))


@pytest.mark.parametrize("kind", [INT4, INT2], ids=["int4", "int2"])
@settings(deadline=None, max_examples=50)
@given(power=st.floats(0.2, 6), n=st.integers(1, 600), block=st.sampled_from([32, 256]), seed=st.integers(0, 2**32 - 1))
def test_the_nearest_never_leave_more_of_a_block_than_there_was(
    kind: Quantiser, power: float, n: int, block: int, seed: int
) -> None:
    """So that an error feedback loop ends, whatever the gradients (a contraction, Karimireddy et al. 2019)."""
    values = numbers(n, seed, 0.0)
    values = np.sign(values) * np.abs(values) ** np.float32(power)
    left = values.copy()
    kind.encode(left, None, block, np.empty(kind.nbytes(n, block), np.uint8))
    for low in range(0, n, block):
        before, after = (np.square(part[low : low + block].astype(np.float64)).sum() for part in (values, left))
        assert after <= before * (1 + 1e-6)


@KINDS
def test_arrays_that_do_not_fit_are_refused(kind: Quantiser) -> None:
    values, payload = np.zeros(64, np.float32), np.empty(kind.nbytes(64, 32), np.uint8)
    with pytest.raises(ValueError, match="a multiple of 32"):
        kind.encode(values, None, 33, payload)
    for phase in (-1, 32):
        with pytest.raises(ValueError, match="a part of it before"):
            kind.encode(values, None, 32, payload, phase=phase)
    with pytest.raises(ValueError, match="64 elements take"):
        kind.encode(values, None, 32, payload[:-1])
    with pytest.raises(ValueError, match="contiguous float32 arrays are quantised"):
        kind.encode(values, values[::2], 32, payload)
    with pytest.raises(ValueError, match="65 elements take"):
        kind.decode(payload, 32, np.zeros(65, np.float32))
    with pytest.raises(ValueError, match="contiguous float32 array"):
        kind.decode(payload, 32, np.zeros(64))
