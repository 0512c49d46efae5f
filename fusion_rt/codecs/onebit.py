"""`onebit`: the sign of each element, times the mean magnitude of its block.

Seide et al., "1-Bit Stochastic Gradient Descent" (2014), with the scale of signSGD with error feedback (Karimireddy et
al. 2019). It needs the feedback: without, small elements never have a say. Zeros are sent as their sign, and corrected
by the feedback. A block with an element that is not finite arrives as NaN, all of it, and its finite elements stay in
the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion_rt.codecs.base import Array
from fusion_rt.codecs.quantising import Quantising, QuantisingBucketCodec
from fusion_rt.kernels.quantisation import ONEBIT


class OneBitBucket(QuantisingBucketCodec):
    def _possible(self, scales: Array) -> Array:
        possible: Array = ((scales >= 0) & (scales < np.inf)) | np.isnan(scales)
        return possible


@dataclass(frozen=True)
class OneBit(Quantising):
    """A bit an element."""

    name = "onebit"
    bucket = OneBitBucket
    quantiser = ONEBIT

    block: int = 1024

    def contraction(self) -> float:
        return 1 / self.block  # of a block with one element that is not zero
