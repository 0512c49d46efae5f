"""`dense`: elements as they are. The payload is the memory of the elements, not a copy of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion_rt.codecs.base import Array, BucketCodec, Codec, check_length
from fusion_rt.core.dtypes import DType


class DenseBucket(BucketCodec):
    lossless = True
    is_pure = True

    def encode(self, start: int, values: Array) -> memoryview:
        return values.view(np.uint8).data

    def decode(self, start: int, payload: memoryview | bytes, out: Array) -> None:
        check_length(payload, out.nbytes, len(out), self.layout.dtype, "dense")
        out.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)

    def decoded(self, start: int, payload: memoryview | bytes, count: int) -> Array:
        if len(payload) != (nbytes := count * self.layout.dtype.itemsize):
            check_length(payload, nbytes, count, self.layout.dtype, "dense")
        return np.frombuffer(payload, self.layout.dtype.storage)

    def max_encoded_nbytes(self, n: int) -> int:
        return n * self.layout.dtype.itemsize


@dataclass(frozen=True)
class Dense(Codec):
    """All elements, all bits."""

    name = "dense"
    bucket = DenseBucket
    lossless = True

    def applies_to(self, dtype: DType) -> bool:
        return True
