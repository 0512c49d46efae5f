"""`int8`: integers from -127 to 127 times a scale for each block, rounded at random so that they are right on average.

Rounding up or down with the probability of the distance is that of QSGD (Alistarh et al. 2017). What is drawn follows
from the seed, the step, the node, and the element, so the same job gives the same bits. What is not finite arrives as
NaN; the rest of its block is not affected.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_rt.codecs.base import Array, check_seed
from fusion_rt.codecs.quantising import Quantising, QuantisingBucketCodec
from fusion_rt.kernels.quantisation import INT8, LEAST_STEP, MOST_STEP, Draw
from fusion_rt.kernels.random_bits import key


class Int8Bucket(QuantisingBucketCodec):
    codec: Int8

    def _possible(self, scales: Array) -> Array:
        possible: Array = (scales >= LEAST_STEP) & (scales <= MOST_STEP)
        return possible

    def _draw(self, what: int) -> Draw:
        bits = key(self.codec.seed, self.step, self.node, what)
        return Draw(bits >> 32, bits & 0xFFFFFFFF)


@dataclass(frozen=True)
class Int8(Quantising):
    """A byte an element.

    Args:
        seed: from 0 to 2**63 - 1.
    """

    name = "int8"
    bucket = Int8Bucket
    quantiser = INT8

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed, self.name)
