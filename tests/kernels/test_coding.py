"""`kernels.coding` against `reference`, and codes that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusion_rt.kernels import coding
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    coding.prepare()


def drawn(n: int, low: int, density: float, seed: int) -> Array:
    """Ascending indices in [low, low + n), at least one."""
    rng = np.random.default_rng(seed)
    chosen = rng.random(n) < density
    chosen[rng.integers(n)] = True
    return (low + np.flatnonzero(chosen)).astype(np.int32)


@settings(deadline=None)
@given(
    n=st.integers(1, 400),
    low=st.sampled_from([0, 1, 1000, 2**31 - 401]),
    density=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    bits=st.integers(0, coding.MAX_BITS),
    seed=st.integers(0, 2**32 - 1),
)
def test_indices_become_the_bits_of_the_reference_and_come_back(
    n: int, low: int, density: float, bits: int, seed: int
) -> None:
    indices = drawn(n, low, density, seed)
    parts = coding.encode(indices, low, bits)
    assert [part.tobytes() for part in parts] == [part.tobytes() for part in reference.rice(indices, low, bits)]
    decoded = coding.decode(*parts, len(indices), bits, low, low + n)
    assert decoded is not None
    assert decoded.tolist() == indices.tolist()


@for_each("bits", [0, 3, 8, 16])
@for_each("density", [0.01, 0.3])
def test_nothing_is_written_behind_a_code(bits: int, density: float) -> None:
    indices = drawn(400, 0, density, 1)
    parts = coding.encode(indices, 0, bits)
    high, low = (np.append(np.zeros_like(part), np.full(8, 0xA5, np.uint8)) for part in parts)
    coding._encode(indices.ctypes.data, len(indices), 0, bits, high.ctypes.data, low.ctypes.data)
    for part, written in zip(parts, (high, low), strict=True):
        assert written[:-8].tobytes() == part.tobytes()
        assert (written[-8:] == 0xA5).all()


def test_without_low_bits_the_code_is_a_bitmap() -> None:
    indices = drawn(1000, 0, 0.5, 1)
    bitmap = np.zeros(1000, bool)
    bitmap[indices] = True
    high_part, low_part = coding.encode(indices, 0, 0)
    assert np.unpackbits(high_part, count=1000, bitorder="little").astype(bool).tolist() == bitmap.tolist()
    assert not len(low_part)


@for_each("density", [0.0005, 0.01, 0.1, 0.5, 0.99])
def test_the_number_of_low_bits_that_is_called_best_is(density: float) -> None:
    indices = drawn(100_000, 0, density, 2)
    bits, nbytes = coding.best_bits(indices, 0, 100_000)
    sizes = [sum(part.nbytes for part in coding.encode(indices, 0, b)) for b in range(16)]
    assert nbytes == sizes[bits] == min(sizes)


@settings(deadline=None, max_examples=300)
@given(
    parts=st.tuples(st.binary(max_size=12), st.binary(max_size=12)),
    n=st.integers(0, 40),
    bits=st.integers(0, 3) | st.integers(0, coding.MAX_BITS),
    low=st.sampled_from([0, 5, 2**31 - 200]),
    room=st.integers(0, 60) | st.just(199),
)
@example(parts=(b"\xff" * 9, b""), n=40, bits=0, low=0, room=60)
def test_any_bytes_are_indices_in_the_range_or_refused(
    parts: tuple[bytes, bytes], n: int, bits: int, low: int, room: int
) -> None:
    high_part = np.frombuffer(parts[0], np.uint8)
    low_part = np.resize(np.frombuffer(parts[1] or b"\0", np.uint8), -(-n * bits // 8))
    decoded = coding.decode(high_part, low_part, n, bits, low, low + room)
    if decoded is None:
        return
    assert len(decoded) == n
    assert (np.diff(decoded.astype(np.int64)) > 0).all()
    assert not n or (decoded[0] >= low and decoded[-1] < low + room)
    if n:
        again = coding.encode(decoded, low, bits)
        assert [part.tobytes() for part in again] == [high_part.tobytes(), low_part.tobytes()]


def test_a_code_that_is_changed_anywhere_is_another_code_or_none() -> None:
    indices = drawn(300, 0, 0.2, 3)
    high_part, low_part = coding.encode(indices, 0, 2)
    for part in (high_part, low_part):
        for bit in range(8 * len(part)):
            part[bit // 8] ^= 1 << bit % 8
            decoded = coding.decode(high_part, low_part, len(indices), 2, 0, 300)
            assert decoded is None or decoded.tolist() != indices.tolist()
            part[bit // 8] ^= 1 << bit % 8


def test_a_low_part_of_another_length_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="has 2 bytes, not 1"):
        coding.decode(np.ones(1, np.uint8), np.zeros(1, np.uint8), 5, 3, 0, 100)
