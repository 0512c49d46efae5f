"""The protocol of codecs whose buckets are summed by owners: each node sums one range of all nodes' contributions.

Such a codec is applied once to each contribution, and once to the sum of a range by the node that owns it; each time,
the part that does not travel goes into a residual of the node that it was lost on (Tang et al., "DoubleSqueeze", 2019;
for
selections: Li and Hoefler, "Near-Optimal Sparse Allreduce", 2022). So nothing is lost, however many nodes there are:

    sum of all nodes' residuals + result, afterwards = sum of all nodes' residuals + gradients, before

as exactly as float32 adds up.

A gradient with an element that is not finite enters neither residual nor velocity: `contribute` leaves such elements
out and says so (`spoiled`), and the exchange makes the step one that all nodes `undo`, with NaN as the result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

from fusion_rt.codecs.base import Array, BucketCodec, CodecError
from fusion_rt.core import scratch

Portion: TypeAlias = Any
"""Values of a range of the bucket, as receivers will have them, in a form of the codec's own; such as a `Selection`."""


class SummingBucketCodec(BucketCodec):
    """One bucket's codec on one node, step by step: `contribute`, then `pack` for the owner of each range. An owner
    `unpack`s, `add`s one portion after the other, `conclude`s and packs; everybody `unpack`s and `write`s all ranges,
    and `complete`s.

    Attributes:
        node, nodes: which of how many nodes this is.
    """

    exchange = "owners"
    alignment: ClassVar[int] = 1
    """Ranges begin at a multiple of this number of elements."""
    blank: ClassVar[bool] = False
    """`write` leaves elements alone that are zero, so it has to find zeros there."""
    adapts: ClassVar[bool] = False
    """How much a range has in it changes from step to step, so that nodes' ranges have to be adapted."""

    always: Sequence[tuple[int, int]] = ()
    """Ranges of elements that travel in every step; of a codec that `adapts`."""

    spoiled: bool = False
    """The gradient that was contributed last has elements that are not finite, or cannot be added to the residual."""

    node: int = 0
    nodes: int = 1

    @abstractmethod
    def contribute(self, values: Array) -> Portion:
        """Adds a gradient to the residual, and takes the portion to be sent from it; changes the state.

        Args:
            values: all elements of the bucket, 1-D, contiguous, of its storage dtype; left as they are.
        """

    @abstractmethod
    def undo(self, portion: Portion, values: Array) -> None:
        """The opposite of `contribute`: residual and velocity become those of before, as exactly as float32 adds
        up; the number of steps stays.

        Args:
            portion: the result of `contribute`.
            values: the gradient that it was given.
        """

    @abstractmethod
    def missing(self) -> Portion:
        """A portion of the whole bucket that says that its values are not finite."""

    def contribute_alone(self, values: Array) -> Portion:
        """Contributes where no other node has to know of a step that is undone: a spoiled one is at once, and its
        portion is `missing`."""
        portion = self.contribute(values)
        if self.spoiled:
            self.undo(portion, values)
            portion = self.missing()
        return portion

    def encode(self, start: int, values: Array) -> memoryview:
        """Encodes a step of the whole bucket as one payload, for a single receiver."""
        if start != 0 or len(values) != self.layout.elements:
            raise CodecError(f"the codec {self.codec.name} encodes whole buckets, so it cannot encode parts of them")
        return self.pack(self.contribute_alone(values), 0, self.layout.elements)

    def tell(self, values: Array) -> tuple[memoryview, Array]:
        portion = self.contribute(values)
        told = scratch.zeros(len(values), self.layout.dtype.storage)
        self.write(portion, [told], 1.0, 1)
        self.complete([told], 1.0, 1)
        return self.pack(portion, 0, len(values)), told

    @abstractmethod
    def pack(self, portion: Portion, low: int, high: int) -> memoryview:
        """Packs the part of a portion in [low, high), into at most `max_encoded_nbytes(high - low)` bytes."""

    @abstractmethod
    def unpack(self, payload: memoryview | bytes, low: int, high: int) -> Portion:
        """Reads bytes that `pack` wrote, on any node; changes nothing.

        Raises:
            CodecError: this is no portion of that range. No more memory was taken than the range has elements.
        """

    @abstractmethod
    def add(self, first: Portion, second: Portion) -> Portion:
        """The sum of two portions of the same range; may be done in place in the first."""

    @abstractmethod
    def conclude(self, total: Portion, nodes: int) -> Portion:
        """Returns the part of a sum that travels to all nodes, as they will have it; the rest goes into this node's
        residual.

        Args:
            total: of a range that this node owns.
            nodes: how many have ranges of their own.
        """

    @abstractmethod
    def revoke(self, total: Portion, sent: Portion) -> None:
        """The opposite of `conclude`, for a sum that did not become a result: its rest leaves the residual again.

        Args:
            total: the concluded sum, as `conclude` has left it.
            sent: the result of `conclude`.
        """

    @abstractmethod
    def write(self, portion: Portion, outputs: Sequence[Array], scale: float, divisor: int) -> None:
        """Writes a portion, times `scale` and divided by `divisor`, into arrays of the whole bucket; see `blank`."""

    def complete(self, outputs: Sequence[Array], scale: float, divisor: int) -> None:
        """Ends a result, of which all ranges have been written to these arrays with this scale and divisor. Only a
        codec whose values are no elements has something left to do."""

    @abstractmethod
    def reclaim(self, portion: Portion) -> None:
        """Adds a portion to the residual: it did not arrive where it counts."""

    def scratch_nbytes(self, nodes: int) -> int:
        """See `BucketCodec`. A contribution, its payload and the received payloads are as long as it is encoded; the
        sum of a range is float32."""
        encoded = self.max_encoded_nbytes(self.layout.elements)
        return encoded + 2 * encoded * (nodes - 1) // nodes + 4 * self.layout.elements // nodes

    @abstractmethod
    def wanted(self) -> int:
        """The number of values that the next contribution is to have, as far as all nodes know; the cost of an
        exchange follows from it."""

    def counts(self, portion: Portion, edges: Sequence[int]) -> list[int]:
        """Counts the values of a portion between each edge and the next, ascending; of a codec that `adapts`."""
        raise NotImplementedError

    def weights(self) -> list[tuple[int, int, float]]:
        """(begin, end, weight of an element) of the ranges of elements that travel, ascending: their expected
        cost."""
        return [(0, self.layout.elements, 1.0)]
