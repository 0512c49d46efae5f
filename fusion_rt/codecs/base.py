"""What a codec is: `Codec`, the choice that a person makes, and `BucketCodec`, which does the work for one bucket.

A codec is frozen, compares equal to its like, and has a canonical text, so that it can be part of a signature. What it
has to remember lives in a `BucketCodec`, one on each node for each bucket of the plan.

Rules that collectives and algorithms rely on:

* `decode(encode(x))` depends on the payload alone. A lossy codec's sender uses the decoded value too, so that all ranks
  get the same bits.
* A stateful codec's `encode` changes its state: it is called once for each element and step. `decode` changes nothing.
* A payload comes from another host. `decode` checks it before it allocates anything, and writes nothing outside `out`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from fusion_rt import specs
from fusion_rt.dtypes import DType
from fusion_rt.errors import FusionError
from fusion_rt.kernels.team import ALONE, Team

Array: TypeAlias = npt.NDArray[Any]


class CodecError(FusionError, ValueError):
    """A codec does not exist, was given arguments that it cannot use, or received bytes that are not its own."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Where a tensor lies in a bucket: `numel` elements from element `start` on.

    `shape`: of the tensor, where that is known.

    Raises:
        ValueError: a tensor of that shape has another number of elements.
    """

    name: str
    start: int
    numel: int
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shape and math.prod(self.shape) != self.numel:
            raise ValueError(f"the tensor {self.name!r} of shape {self.shape} has not {self.numel} elements")

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a bucket holds.

    Attributes:
        dtype: of all elements.
        elements: how many there are; chunks of them are encoded and decoded separately.
        tensors: ascending, with different names; what lies between them is padding. When left out, all elements are
            one tensor without a name.

    Raises:
        ValueError: tensors overlap, are not in order, or do not fit in.
    """

    dtype: DType
    elements: int
    tensors: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for tensor in self.tensors:
            if tensor.start < end or tensor.numel < 0 or tensor.end > self.elements:
                raise ValueError(f"{tensor} does not fit between element {end} and the end at {self.elements}")
            end = tensor.end
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError(f"two tensors of a bucket have the same name: {', '.join(t.name for t in self.tensors)}")

    @property
    def spans(self) -> tuple[Span, ...]:
        """The tensors, or the one that all elements are."""
        return self.tensors or (Span("", 0, self.elements),)


@dataclasses.dataclass(frozen=True)
class Codec(ABC):
    """A way to write buckets on the wire. The fields of a subclass are the arguments in its text.

    Raises:
        CodecError: an argument is out of range (from a subclass's `__post_init__`).
    """

    name: ClassVar[str]
    """In the text: `name` or `name(field=value, ...)`."""

    lossless: ClassVar[bool]
    """Decoding gives back every bit, whatever the element type."""

    stateful: ClassVar[bool]
    """Its bucket codecs remember something, such as a residual, from step to step, and are saved with the model."""

    selecting: ClassVar[bool]
    """Sends some of the elements only; other nodes may send others, so that the sum of payloads is denser."""

    @abstractmethod
    def applies_to(self, dtype: DType) -> bool:
        """Whether buckets of this element type are encoded; all others go dense."""

    @abstractmethod
    def open(self, layout: Layout, team: Team = ALONE) -> BucketCodec:
        """The codec of one bucket on this node, with an empty residual. A stateless codec opens any bucket, and leaves
        those dense that it does not apply to; a stateful one raises `CodecError`.

        Prepares the kernels it needs, so it may take seconds on a host where they have never been compiled.

        Args:
            team: the threads that a bucket may use.
        """

    def __str__(self) -> str:
        """The canonical text: `parse` of it is equal to this codec, and equal codecs have the same."""
        return specs.write(self.name, self)


class BucketCodec(ABC):
    """One bucket's codec on one node. Not for use by two threads at the same time.

    Attributes:
        layout: of the bucket.
        lossless: decoding gives back every bit, so that what was encoded need not be decoded again by the sender.
    """

    lossless: bool

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @abstractmethod
    def encode(self, start: int, values: Array) -> memoryview:
        """Elements of the bucket, from element `start` on, as bytes.

        Args:
            values: 1-D, contiguous, of the bucket's storage dtype; left as it is.

        Returns: at most `max_encoded_nbytes(len(values))` bytes. They may be those of `values` itself, which then has
            to stay as it is until they have been sent.
        """

    @abstractmethod
    def decode(self, start: int, payload: memoryview | bytes, out: Array) -> None:
        """Writes the elements that `encode(start, ...)` turned into `payload`, on any node.

        Args:
            out: 1-D, contiguous, writable, of the bucket's storage dtype; as long as what was encoded.

        Raises:
            CodecError: this is no payload for that many elements; `out` has not been touched, or is undefined.
        """

    def decoded(self, start: int, payload: memoryview | bytes, count: int) -> Array:
        """The `count` elements in a payload, as `decode` would write them; possibly a read-only view of the payload.

        Raises:
            CodecError: this is no payload for that many elements.
        """
        out = np.empty(count, self.layout.dtype.storage)
        self.decode(start, payload, out)
        return out

    @abstractmethod
    def max_encoded_nbytes(self, n: int) -> int:
        """The most bytes that n elements can take, to be checked before a payload is received."""

    def state_dict(self) -> dict[str, Array]:
        """What has to be saved with the model; nothing when the codec is stateless. The arrays are copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Continues from a `state_dict`. Raises `CodecError` when it is of another codec or another bucket."""
        if state:
            raise CodecError(
                f"the saved state has {', '.join(sorted(state))}, which a stateless codec does not have; "
                f"use the codec that the checkpoint was written with"
            )


def byte_view(values: Array) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return values.view(np.uint8).data


def check_length(payload: memoryview | bytes, nbytes: int, n: int, dtype: DType, codec: str) -> None:
    """Raises `CodecError` unless the payload has exactly `nbytes` bytes."""
    received = memoryview(payload).nbytes
    if received != nbytes:
        raise CodecError(
            f"{n} elements of {dtype} take {nbytes} bytes in the codec {codec}, but a peer sent {received}; "
            f"it is faulty or runs another version"
        )
