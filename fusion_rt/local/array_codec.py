"""Encodes arrays with names as bytes, between a worker and its daemon: a checked header, and the arrays as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from fusion_rt import wire
from fusion_rt.core.errors import WireError

_DTYPES = ("float32", "float64", "int32", "int64", "uint8")
_LENGTH_BYTES = 8
_ALIGNMENT = 8  # bytes; the largest element


class _Entry(msgspec.Struct, array_like=True):
    name: wire.Text
    dtype: str
    shape: wire.Shape


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Entry])


def nbytes_of(arrays: Mapping[str, npt.NDArray[np.generic]]) -> int:
    """Returns the number of bytes that `write` needs."""
    return _LENGTH_BYTES + _padded(len(_header(arrays))) + sum(_padded(array.nbytes) for array in arrays.values())


def write(arrays: Mapping[str, npt.NDArray[np.generic]], out: npt.NDArray[np.uint8]) -> None:
    """Writes arrays to `out`.

    Args:
        arrays: of float32, float64, int32, int64 or uint8; any shape.
        out: uint8, of `nbytes_of(arrays)` elements.

    Raises:
        ValueError: an array is of another dtype.
    """
    header = _header(arrays)
    out[:_LENGTH_BYTES] = np.frombuffer(len(header).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
    out[_LENGTH_BYTES : _LENGTH_BYTES + len(header)] = np.frombuffer(header, np.uint8)
    start = _LENGTH_BYTES + _padded(len(header))
    for array in arrays.values():
        out[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _padded(array.nbytes)


def read(data: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.generic]]:
    """Reads the arrays that `write` wrote, as views of `data`.

    Raises:
        WireError: the bytes are not such a state. Nothing is allocated by the sizes that they claim.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    if len(data) < _LENGTH_BYTES or length > min(len(data) - _LENGTH_BYTES, wire.MAX_MESSAGE):
        raise WireError(f"a state of {len(data)} bytes has no header of {length} bytes; it is cut short or damaged")
    try:
        entries = _decoder.decode(data[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"the header of a state is damaged: {error}") from None
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    start = _LENGTH_BYTES + _padded(length)
    for entry in entries:
        if entry.dtype not in _DTYPES or entry.name in arrays:
            raise WireError(f"{entry.name!r} is in a state twice, or of the type {entry.dtype!r}, which is none of "
                            f"{', '.join(_DTYPES)}")  # fmt: skip
        dtype = np.dtype(entry.dtype)
        nbytes = math.prod(entry.shape) * dtype.itemsize
        if nbytes > len(data) - start:
            raise WireError(f"{entry.name!r} takes {nbytes} bytes, more than a state of {len(data)} bytes has left")
        try:
            arrays[entry.name] = data[start : start + nbytes].view(dtype).reshape(entry.shape)
        except ValueError as error:  # too many dimensions for numpy, or, beside one of 0, too long ones
            raise WireError(f"{entry.name!r} cannot have the shape {list(entry.shape)}: {error}") from None
        start += _padded(nbytes)
    return arrays


def _header(arrays: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"{name!r} is of {array.dtype}; a state has arrays of {', '.join(_DTYPES)}")
    return _encoder.encode([_Entry(name, array.dtype.name, array.shape) for name, array in arrays.items()])


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
