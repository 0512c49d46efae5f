"""How a selecting codec writes values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.codecs import CodecError
from fusion_rt.codecs.values import BLOCK, FORMATS
from tests.for_each import for_each

Array = npt.NDArray[Any]

SPECIALS = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-40,
        3.4028235e38,
        -3.4e38,
        2.0**100,
        65520,
        2**-14,
        127.6,
    ],
    np.float32,
)
RELATIVE_ERROR = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8}
numbers = st.lists(st.floats(width=32) | st.sampled_from(SPECIALS.tolist()), max_size=200)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    for chosen in FORMATS.values():
        chosen.prepare()


def there_and_back(name: str, values: Array, phase: int = 0) -> Array:
    chosen = FORMATS[name]
    packed = np.concatenate([np.empty(0, np.uint8), *chosen.pack(values, phase)])
    assert len(packed) == chosen.nbytes(len(values), phase)
    return chosen.unpack(packed, len(values), phase)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(numbers=numbers, low=st.integers(0, 200), high=st.integers(0, 200))
def test_rounded_values_and_any_part_of_them_come_back_bit_by_bit(
    name: str, numbers: list[float], low: int, high: int
) -> None:
    values = np.array(numbers, np.float32)
    before = values.tobytes()
    rounded = FORMATS[name].rounded(values)
    assert values.tobytes() == before
    low, high = sorted((min(low, len(values)), min(high, len(values))))
    part = np.ascontiguousarray(rounded[low:high])
    assert there_and_back(name, part, low % BLOCK).tobytes() == part.tobytes()
    assert there_and_back(name, rounded).tobytes() == rounded.tobytes()
    assert FORMATS[name].rounded(rounded).tobytes() == rounded.tobytes()


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(numbers=numbers)
def test_what_rounding_takes_away_is_a_float32_and_what_is_not_finite_stays_so(name: str, numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    rounded = FORMATS[name].rounded(values)
    finite = np.isfinite(values)
    if name == "int2":
        for low in range(0, len(values), BLOCK):
            part = slice(low, low + BLOCK)
            assert (np.isfinite(rounded[part]) == finite[part].all()).all()
        return  # what is left is rounded
    assert (np.isfinite(rounded) == finite).all()
    kept, sent = values[finite], rounded[finite]
    left = kept - sent
    assert (sent.astype(np.float64) + left.astype(np.float64) == kept.astype(np.float64)).all()
    if name in ("int8", "int4"):
        assert np.isnan(rounded[~finite]).all()
    else:
        assert np.array_equal(rounded[~finite], values[~finite], equal_nan=True)


@for_each("name", RELATIVE_ERROR)
@for_each("scale", [1e-30, 1e-9, 1.0, 1e30])
def test_ordinary_values_keep_their_digits_at_any_scale(name: str, scale: float) -> None:
    rng = np.random.default_rng(1)
    values = (rng.uniform(1, 1000, 5000) * rng.choice([-1, 1], 5000) * scale).astype(np.float32)
    error = np.abs(FORMATS[name].rounded(values) - values) / np.abs(values)
    assert error.max() <= RELATIVE_ERROR[name]


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int4", 7)])
def test_integers_are_off_by_at_most_their_part_of_the_largest_of_their_block(name: str, most: int) -> None:
    values = (
        np.random.default_rng(1).standard_normal(50 * BLOCK) * np.repeat(10.0 ** np.arange(-25, 25), BLOCK)
    ).astype(np.float32)
    error = np.abs(FORMATS[name].rounded(values) - values).reshape(-1, BLOCK)
    assert (error.max(axis=1) <= np.abs(values).reshape(-1, BLOCK).max(axis=1) / most).all()


def test_two_bits_are_a_sign_and_the_nearer_of_two_powers_of_two() -> None:
    values = np.array([5.0, -2.9, 3.1, -4.0, 0.01, 0.0, -0.0] + [1.0] * 57 + [-1.4, 1.5, 2.9] + [1.0] * 61, np.float32)
    rounded = FORMATS["int2"].rounded(values)
    assert rounded[:7].tolist() == [4.0, -2.0, 4.0, -4.0, 2.0, 2.0, -2.0]
    assert rounded[BLOCK : BLOCK + 4].tolist() == [-1.0, 2.0, 2.0, 1.0]
    assert FORMATS["int2"].nbytes(1000, 0) == 250 + 16
    assert not FORMATS["int2"].rounded(np.full(100, 1e-40, np.float32)).any()
    assert not FORMATS["int2"].rounded(np.zeros(100, np.float32)).any()
    selected = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
    selected = selected[np.abs(selected) > 2]  # as topk at 5 % selects
    left = selected - FORMATS["int2"].rounded(selected)
    assert np.square(left).sum() < 0.1 * np.square(selected).sum()


def test_a_scale_that_cannot_be_is_refused() -> None:
    with pytest.raises(CodecError, match=r"fp16 times 2\*\*127, which is out of range"):
        FORMATS["fp16"].unpack(np.array([127, 0, 0], np.uint8), 1, 0)
    with pytest.raises(CodecError, match=r"int4 times 2\*\*126, which is out of range"):
        FORMATS["int4"].unpack(np.array([126, 1], np.uint8), 1, 0)
    with pytest.raises(CodecError, match=r"int8 times 2\*\*122, which is out of range"):
        FORMATS["int8"].unpack(np.array([122, 1], np.uint8), 1, 0)


def test_each_format_has_a_code_by_which_a_payload_of_another_is_refused() -> None:
    assert [each.code for each in FORMATS.values()] == list(range(len(FORMATS)))


@pytest.mark.parametrize(("name", "expected"), [("int8", 113 * 2.0**121), ("int4", 7 * 2.0**125)])
def test_the_largest_numbers_are_off_by_half_a_unit_too(name: str, expected: float) -> None:
    values = np.array([3e38, -3e38], np.float32)
    assert there_and_back(name, FORMATS[name].rounded(values)).tolist() == [expected, -expected]
