"""The place of the division in averages.

Halves are divided by the number of ranks before they are added up, as torch's DDP does it. But for rounding, no partial
sum is larger than the largest element then, so that the average of finite halves is finite, however many hosts it comes
through. The price: of float16 elements below 6e-8 times the number of ranks nothing may be left, which a loss scale
avoids. Wider elements are divided last, and rounded once. So are sums by codecs that remember what they have not sent:
these add up in float32, and their memory is in the unit of what a rank contributes, whatever the number of ranks.
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
    if dtype.is_half and not codecs.parse(how.codec).stateful:
        return how.prescale / ranks, 1
    return how.prescale, ranks
