"""Arrays that have a length and no contents; computing with them takes simulated time only.

Exchanges and codecs of `fusiond` run on these as they do on real ones. Payloads are views of one region of memory that
nobody writes to, which therefore takes none.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, cast

from fusion_rt.core.dtypes import DTYPES
from fusion_trace.simulate.model import Costs
from fusiond.collectives.base import Array, Reducer

F32 = DTYPES["float32"]
_LARGEST = 1 << 28  # bytes; of address space only, of which kernels want to be close to each other
Spend = Callable[[float], None]

_nothing = memoryview(mmap.mmap(-1, _LARGEST, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ))


def payload(nbytes: int) -> memoryview:
    """Returns a view of so many bytes.

    Raises:
        ValueError: these are too many.
    """
    if nbytes > _LARGEST:
        raise ValueError(f"payloads of {nbytes} bytes are not simulated, {_LARGEST} are the most")
    return _nothing[:nbytes]


class Values:
    """An array of float32 elements without contents. What is written to it is a copy, and takes time.

    `spend`: takes seconds; `byte`: seconds for each byte copied.
    """

    __slots__ = ("_byte", "_length", "_spend")

    def __init__(self, length: int, spend: Spend, byte: float) -> None:
        self._length, self._spend, self._byte = length, spend, byte

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Values:
        return Values(len(range(*part.indices(self._length))), self._spend, self._byte)

    def __setitem__(self, part: slice, values: object) -> None:
        if isinstance(values, Values):
            self._spend(4 * len(values) * self._byte)


def values(elements: int, spend: Spend, costs: Costs) -> Array:
    """Returns `Values`, for those who expect an array."""
    return cast("Array", Values(elements, spend, costs.copy))


class GhostReducer(Reducer):
    """An average of float32 that takes time only."""

    def __init__(self, spend: Spend, costs: Costs, divisor: int) -> None:
        super().__init__("sum", F32, divisor=divisor)
        object.__setattr__(self, "_spend", spend)  # the class is frozen
        object.__setattr__(self, "_byte", costs.reduce)

    def _reduce(
        self, sources: Sequence[Any], outputs: Sequence[Any], prescale: float, postscale: float, divisor: int
    ) -> None:
        del outputs, prescale, postscale, divisor
        spend, byte = self.__dict__["_spend"], self.__dict__["_byte"]
        spend(4 * len(sources[0]) * byte * max(len(sources) - 1, 1))
