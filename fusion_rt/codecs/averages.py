"""The place of the division in averages, and the range of halves in sums.

Halves are divided by the number of ranks before they are added up, as torch's DDP does it. But for rounding, no partial
sum is larger than the largest element then, so that the average of finite halves is finite, however many hosts it comes
through. The price: of float16 elements below 6e-8 times the number of ranks nothing may be left, which a loss scale
avoids. Wider elements are divided last, and rounded once.

So are sums by codecs with a residual: these add up in float32, and their memory is in the unit of one rank's
contribution, whatever the number of ranks. But their input is the sum of a node's ranks, as halves.
That sum is made smaller by a power of two, which rounds nothing, and the codec takes the power as a part of the loss
scale. So nothing leaves the range of halves on its way but a result that is outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_rt import codecs
from fusion_rt.core.dtypes import DType

if TYPE_CHECKING:
    from fusion_rt import wire


def scaling(how: wire.Reduction | wire.Signature, dtype: DType, ranks: int) -> tuple[float, int]:
    """Returns the factor of each rank's elements before they are combined, and the divisor of the result.

    Args:
        how: the reduction.
        dtype: of the elements.
        ranks: how many are combined.
    """
    if how.op != "average":
        return how.prescale, 1
    if dtype.is_half and not _remembers(how, dtype):
        return how.prescale / ranks, 1
    return how.prescale, ranks


def headroom(how: wire.Reduction | wire.Signature, dtype: DType, local: int) -> float:
    """Returns the power of two by which a node's sum is smaller than it should be, until a codec has it as float32.

    Args:
        how: the reduction.
        dtype: of the elements.
        local: how many ranks of the node are combined.
    """
    if local < 2 or not dtype.is_half or not _remembers(how, dtype):
        return 1.0
    return float(1 << (local - 1).bit_length())


def _remembers(how: wire.Reduction | wire.Signature, dtype: DType) -> bool:
    codec = codecs.parse(how.codec)
    return codec.stateful and codec.applies_to(dtype)
