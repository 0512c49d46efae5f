"""The element types of buckets: their names on the wire, and how numpy stores them.

float16 and bfloat16 are stored as uint16 and bool as uint8, so that one array type fits every transport: numpy has no
bfloat16, and the buffer protocol has neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fusion_rt.core.errors import FusionError


class DTypeError(FusionError, ValueError):
    """An element type that this project does not carry."""


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: as on the wire and in messages to people; the part of torch's name after `torch.`.
        storage: numpy dtype of the arrays that hold such elements.
        is_floating: elements are floating-point numbers, whatever they are stored as.
        is_half: two bytes wide floating point, which is accumulated in float32.
    """

    name: str
    storage: np.dtype[Any]
    is_floating: bool = False
    is_half: bool = False

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.storage.itemsize

    @classmethod
    def named(cls, name: str) -> DType:
        """Returns the element type called `name`. Raises `DTypeError` when there is none."""
        try:
            return DTYPES[name]
        except KeyError:
            raise DTypeError(
                f"tensors of element type {name!r} cannot be communicated; convert to one of {', '.join(DTYPES)}"
            ) from None

    def __str__(self) -> str:
        return self.name


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("float64", np.dtype(np.float64), is_floating=True),
        DType("float32", np.dtype(np.float32), is_floating=True),
        DType("float16", np.dtype(np.uint16), is_floating=True, is_half=True),
        DType("bfloat16", np.dtype(np.uint16), is_floating=True, is_half=True),
        DType("int64", np.dtype(np.int64)),
        DType("int32", np.dtype(np.int32)),
        DType("int16", np.dtype(np.int16)),
        DType("int8", np.dtype(np.int8)),
        DType("uint8", np.dtype(np.uint8)),
        DType("bool", np.dtype(np.uint8)),
    )
}
