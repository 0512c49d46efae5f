"""The protocol of codecs whose factors are summed: an all-reduce is two dense ones, of arrays that are much smaller.

A step is

    first = codec.start(values)      # float32, `first_elements`; to be summed over all nodes
    second = codec.second(first)     # given the sum; float32, `second_elements`; to be summed over all nodes
    codec.finish(second, outputs)    # given the sum

Sums have to be the same on all nodes, bit by bit; where one is not `usable`, the step is not finished but undone.
Arrays that are returned belong to the caller, and those that are given are left as they are. A step that is not
finished has lost nothing: its gradient waits in the residual for the next `start`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from fusion_rt.codecs.base import Array, BucketCodec, Codec, Layout


class FactoringCodec(Codec):
    """A codec whose buckets are `FactoringBucketCodec`."""

    only_all_reduced = "all-reduces its factors"

    @abstractmethod
    def factor_elements(self, layout: Layout) -> tuple[int, int]:
        """Elements of the two sums of a bucket."""


class FactoringBucketCodec(BucketCodec):
    """One bucket's codec on one node.

    Attributes:
        first_elements, second_elements: of the two sums; with 0 elements one need not take place.
    """

    exchange = "factors"
    first_elements: int
    second_elements: int

    def scratch_nbytes(self, nodes: int) -> int:
        """See `BucketCodec`: factors, as they are here and as they are passed on."""
        return 8 * (self.first_elements + self.second_elements)

    @abstractmethod
    def start(self, values: Array) -> Array:
        """Adds a gradient to the residual. Returns the first factors of this node.

        Args:
            values: all elements of the bucket, 1-D, contiguous, of its storage dtype; left as they are.
        """

    @abstractmethod
    def second(self, total: Array) -> Array:
        """Returns the second factors of this node.

        Args:
            total: the sum over all nodes of the results of `start`.
        """

    def usable(self, total: Array) -> bool:
        """Says whether a step can go on with this sum of factors; the same on all nodes."""
        return bool(np.isfinite(total).all())

    @abstractmethod
    def undo(self, values: Array) -> None:
        """The opposite of `start`: the residual becomes that of before, as exactly as float32 adds up.

        Args:
            values: the gradient that `start` was given.
        """

    @abstractmethod
    def finish(self, total: Array, outputs: Sequence[Array], scale: float = 1.0, divisor: int = 1) -> None:
        """Keeps the unsent rest, and writes the sum over all nodes, times `scale` and divided by `divisor`.

        Args:
            total: the sum over all nodes of the results of `second`.
            outputs: 1-D, contiguous, writable, of the bucket's storage dtype, all its elements each, at least one; the
                input of `start` may be among them. Padding becomes zero.
        """
