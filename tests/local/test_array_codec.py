"""Arrays as bytes: all come back, and nothing else gets in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import WireError
from fusion_rt.local import array_codec

ARRAYS = {
    "0:step": np.array(7, np.int64),
    "0:residual/a.weight": np.arange(5, dtype=np.float32),
    "0:factor/a": np.ones((2, 3), np.float64),
    "empty": np.zeros(0, np.uint8),
    "odd": np.arange(3, dtype=np.uint8),
}


def written() -> npt.NDArray[np.uint8]:
    out = np.full(array_codec.nbytes_of(ARRAYS), 0xA5, np.uint8)
    array_codec.write(ARRAYS, out)
    return out


def test_what_is_written_is_read() -> None:
    found = array_codec.read(written())
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="a state has arrays of float32"):
        array_codec.nbytes_of({"x": np.zeros(1, np.complex64)})


@given(end=st.integers(0, 10_000))
def test_what_is_cut_short_is_refused(end: int) -> None:
    data = written()
    with pytest.raises(WireError):
        array_codec.read(data[: min(end, len(data) - 8)])


@given(place=st.integers(0, 200), byte=st.integers(0, 255))
def test_damage_is_an_error_or_other_values(place: int, byte: int) -> None:
    data = written()
    data[place % len(data)] = byte
    try:
        found = array_codec.read(data)
    except WireError:
        return
    assert sum(array.nbytes for array in found.values()) <= len(data)
