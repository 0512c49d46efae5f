"""`fp16` and `bf16`: floating-point numbers in two bytes, rounded to the nearest, ties to even.

They apply to float32 and float64 (by way of float32); elements of any other type go dense. Infinities, NaN and the sign
of zero survive. fp16 has 11 significant bits; magnitudes of 65,520 and more become infinite, those below 2**-14 lose
bits, and those up to 2**-25 become zero. bf16 has 8 significant bits and float32's range. Decoding is exact, so
encoding a decoded payload gives the same bytes. Stateless: the rounding error is not sent later.

A sum over several nodes is rounded wherever it is put on the wire, once for each hop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fusion_rt.codecs.base import Array, BucketCodec, Codec, Layout, byte_view, check_length
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import cpu
from fusion_rt.kernels.team import ALONE, Team


class HalfBucket(BucketCodec):
    codec: _Half
    is_pure = True

    def __init__(self, layout: Layout, codec: _Half, team: Team = ALONE) -> None:
        super().__init__(layout, codec, team)
        cpu.prepare([], [(layout.dtype, codec.wire), (codec.wire, layout.dtype)])

    def encode(self, start: int, values: Array) -> memoryview:
        return byte_view(cpu.converted(values, self.layout.dtype, self.codec.wire))

    def decode(self, start: int, payload: memoryview | bytes, out: Array) -> None:
        check_length(payload, self.max_encoded_nbytes(len(out)), len(out), self.layout.dtype, self.codec.name)
        halves = np.frombuffer(payload, self.codec.wire.storage)
        cpu.convert(halves, self.codec.wire, out, self.layout.dtype)

    def max_encoded_nbytes(self, n: int) -> int:
        return n * self.codec.wire.itemsize


@dataclass(frozen=True)
class _Half(Codec):
    bucket = HalfBucket
    wire: ClassVar[DType]
    """The element type that is sent."""

    def applies_to(self, dtype: DType) -> bool:
        return dtype.is_floating and not dtype.is_half

    def contraction(self) -> float:
        return 1.0  # but for 2**-18, the square of half a unit in the last place of bf16


@dataclass(frozen=True)
class Fp16(_Half):
    """IEEE 754 half precision."""

    name = "fp16"
    wire = DTYPES["float16"]


@dataclass(frozen=True)
class Bf16(_Half):
    """The upper half of a float32."""

    name = "bf16"
    wire = DTYPES["bfloat16"]
