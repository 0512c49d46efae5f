"""`int8`, `int4` and `int2`: small integers times a scale for each block.

They are rounded to the nearest, or at random so that they are right on average: up or down with the probability of the
distance, as in QSGD (Alistarh et al. 2017). A draw follows from the seed, the step, the node, and the element,
so the same job gives the same bits. The fewer the bits, the more rounding at random adds, so that `int4` and `int2`
round to the nearest unless they are told otherwise, and need the feedback: the nearest never leaves more than there
was.

A value that is not finite arrives as NaN. With `int8` and `int4` the rest of its block is not affected; with `int2`,
whose four numbers leave none for it, the block arrives as NaN, and its finite elements stay in the residual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fusion_rt.codecs.base import Array, CodecError, check_seed
from fusion_rt.codecs.quantising import Quantising, QuantisingBucketCodec
from fusion_rt.kernels.quantisation import INT2, INT4, INT8, LEAST_STEP, Draw
from fusion_rt.kernels.random_bits import key


class IntegersBucket(QuantisingBucketCodec):
    codec: Integers

    def _possible(self, scales: Array) -> Array:
        possible: Array = (scales >= LEAST_STEP) & (scales <= np.float32(self._kernel.longest))
        return possible

    def _draw(self, what: int) -> Draw | None:
        if self.codec.rounding == "nearest":
            return None
        bits = key(self.codec.seed, self.step, self.node, what)
        return Draw(bits >> 32, bits & 0xFFFFFFFF)


class Int2Bucket(IntegersBucket):
    def _possible(self, scales: Array) -> Array:
        possible: Array = super()._possible(scales) | (scales == 0) | np.isnan(scales)
        return possible


@dataclass(frozen=True)
class Integers(Quantising):
    """Integers of a few bits.

    Args:
        rounding: "random" or "nearest".
        seed: of the random bits, from 0 to 2**63 - 1.
    """

    bucket = IntegersBucket
    largest: ClassVar[int]

    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("random", "nearest"):
            raise CodecError(f'the codec {self.name} rounds to "nearest" or at "random", not {self.rounding!r}')
        check_seed(self.seed, self.name)

    def contraction(self) -> float:
        """Returns the share that is taken away of the worst block: one element is the largest, and the others are
        halfway between 0 and 1; or, rounded at random, where between these most is left of them on average."""
        others = (self.block - 1) / self.largest**2
        if self.rounding == "nearest":
            return 1 / (1 + others / 4)
        return max(0.0, 1 - (math.sqrt(1 + others) - 1) / 2)


@dataclass(frozen=True)
class Int8(Integers):
    """A byte an element, from -127 to 127."""

    name = "int8"
    quantiser = INT8
    largest = 127

    rounding: str = "random"


@dataclass(frozen=True)
class Int4(Integers):
    """Four bits an element, from -7 to 7."""

    name = "int4"
    quantiser = INT4
    largest = 7


@dataclass(frozen=True)
class Int2(Integers):
    """Two bits an element: -1.5, -.5, .5 or 1.5."""

    name = "int2"
    bucket = Int2Bucket
    quantiser = INT2

    def contraction(self) -> float:
        return 3 / self.block if self.rounding == "nearest" else 0.0  # most is left of a block with one element
