"""The protocol of codecs: `Codec`, which a person chooses, and `BucketCodec`, which does the work for one bucket.

A codec is frozen, compares equal to its like, and has a canonical text, so that it can be part of a signature. Its
memory is a `BucketCodec`, one on each node for each bucket of the plan.

Everybody else asks a codec through these two classes, and never looks which one it has. How nodes add up a bucket is
one of three ways (`BucketCodec.exchange`), of which two need more methods: `summing` and `factoring`.

Rules that collectives and algorithms rely on:

* `decode(encode(x))` depends on the payload alone. A lossy codec's sender uses the decoded value too, so that all ranks
  get the same bits.
* A stateful codec's `encode` changes its state: it is called once for each element and step. `decode` changes nothing.
  So a stateful codec's exchange is not `chunks`, whose `encode` is called more often and has to give the same bytes.
* With `chunks`, decoded values are encoded without another loss, in whatever pieces: a node passes results on that way.
* A payload comes from another host. `decode` checks it before it allocates anything, and writes nothing outside `out`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fusion_rt.core import scratch, spec_parser
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.core.errors import FusionError
from fusion_rt.kernels.team import ALONE, Team

if TYPE_CHECKING:
    from fusion_rt import wire

Array: TypeAlias = npt.NDArray[Any]


Exchange: TypeAlias = Literal["chunks", "owners", "factors"]
"""How nodes add up what a codec encodes: `BucketCodec.exchange`."""


class CodecError(FusionError, ValueError):
    """A codec does not exist, was given arguments that it cannot use, or received bytes that are not its own."""


@dataclasses.dataclass(frozen=True)
class Span:
    """A tensor's place in a bucket: `numel` elements from element `start` on.

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
    """The contents of a bucket.

    Attributes:
        dtype: of all elements.
        elements: how many there are; chunks of them are encoded and decoded separately.
        tensors: ascending, with different names; the gaps between them are padding, zero in gradients and results. When
            left out, all elements are one tensor without a name.

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


def layout_of(bucket: wire.Bucket) -> Layout:
    """The layout of a planned bucket."""
    spans = tuple(Span(tensor.name, tensor.start, tensor.numel, tensor.shape) for tensor in bucket.tensors)
    return Layout(DTYPES[bucket.dtype], bucket.numel, spans)


@dataclasses.dataclass(frozen=True)
class Codec(ABC):
    """A way to write buckets on the wire. The fields of a subclass are the arguments in its text.

    Raises:
        CodecError: an argument is out of range (from a subclass's `__post_init__`).
    """

    name: ClassVar[str]
    """In the text: `name` or `name(field=value, ...)`."""

    bucket: ClassVar[type[BucketCodec]]
    """Does the work for one bucket."""

    lossless: ClassVar[bool] = False
    """Decoding gives back every bit, whatever the element type."""

    selecting: ClassVar[bool] = False
    """Sends some of the elements only; other nodes may send others, so that the sum of payloads is denser."""

    only_all_reduced: ClassVar[str] = ""
    """Work that all nodes have to do together to get at a sum (a verb in the third person), so that a payload cannot be
    decoded by a single receiver, such as the shard of a parameter server. Empty where one can."""

    @abstractmethod
    def applies_to(self, dtype: DType) -> bool:
        """Says whether buckets of this element type are encoded; all others go dense (`codecs.open_bucket`)."""

    def open(self, layout: Layout, team: Team = ALONE) -> BucketCodec:
        """The codec of one bucket on this node, with an empty residual, of an element type that it applies to.

        Prepares the kernels it needs, so it may take seconds on a host where they have never been compiled.

        Args:
            team: the threads that a bucket may use.
        """
        return self.bucket(layout, self, team)

    @property
    def stateful(self) -> bool:
        """Says whether its bucket codecs remember something from step to step (the number of steps at least), and are
        saved with the model. All do that are not for `chunks`, which are encoded more than once in a step."""
        return self.bucket.exchange != "chunks"

    @property
    def selects_in_workers(self) -> bool:
        """Says whether a worker can select from its gradient on a GPU, in place of its daemon (`worker_selection`)."""
        return False

    @property
    def signs(self) -> bool:
        """Says whether the result is the signs of a sum, and not the sum."""
        return False

    def share(self) -> float:
        """About how many of the elements a contribution has, above 0 and at most 1."""
        return 1.0

    def contraction(self) -> float:
        """Returns the share d of a vector's squared norm that a message without memory takes away at least (by a codec
        that draws: on average), of the tensors that are not sent whole: |x - Q(x)|^2 <= (1 - d) |x|^2 (Koloskova et
        al., arXiv 1902.00340, assumption 1). 0 where there is none, or it is not known."""
        return 1.0 if self.lossless else 0.0

    def memory(self) -> float:
        """Returns how many numbers (float32) a bucket's codec keeps for each element from step to step, about."""
        return 1.0 if self.stateful else 0.0

    def has_momentum(self) -> bool:
        """Says whether it applies a momentum to gradients, so that the optimizer should have none."""
        return False

    def without_memory(self) -> Codec:
        """The same codec for data other than gradients, such as differences between copies of parameters: an unsent
        rest is lost, nothing is added up from step to step, and nothing is clipped."""
        return self

    def check_use(self, op: str, dtype: DType | None = None, kind: str = "allreduce") -> None:
        """Raises `CodecError` where the codec makes no sense.

        A stateful codec adds its residual to the next gradient, which is right for sums only.

        Args:
            op: how elements are combined.
            dtype: of the elements, when the codec was asked for just these; of an optimizer's gradients,
                those to which a codec does not apply travel as they are.
            kind: the collective.
        """
        if not self.stateful:
            return
        if kind != "allreduce":
            raise CodecError(f"the codec {self.name} is for all-reduces, not for {kind}; use fp16 or bf16, or none")
        if op not in ("sum", "average"):
            raise CodecError(
                f"the codec {self.name} sends parts of sums, which cannot be combined by {op}; use Average or Sum, or "
                f"another codec"
            )
        if dtype is not None and not self.applies_to(dtype):
            raise CodecError(
                f"the codec {self.name} is for floating-point elements, not for {dtype}; use none for these"
            )

    def __str__(self) -> str:
        """The canonical text: `parse` of it is equal to this codec, and equal codecs have the same."""
        return spec_parser.write(self.name, self)


class BucketCodec(ABC):
    """One bucket's codec on one node. Not for use by two threads at the same time.

    Args:
        team: the threads that it may use.

    Attributes:
        layout: of the bucket.
        codec: the chosen one.
        exchange: how nodes add up its payloads. `chunks`: on their way around, pieces of the bucket are decoded,
            added to and encoded again. `owners`: a node sums a range of the bucket from the portions of all others
            (`SummingBucketCodec`). `factors`: two dense sums (`FactoringBucketCodec`).
        lossless: decoding gives back every bit, so that the sender need not decode its own payload again.
        is_pure: to encode and decode changes nothing of the codec, so that several threads may do it at a time.
        step: how many steps have begun; of a stateful codec.
        bounds: where the nodes' ranges begin, and the end; the same on all nodes. Empty where they have none (yet).
        keeps_before: the last step may be dropped, also after it was complete.
        go_back: undoes the last step, for which the memory of before was kept; None if that was not asked for.
        loss_scale: by which the gradients of this step are multiplied, since the script's loss is. Residuals
            and payloads are without it, so that it may change from step to step; the result has it again.
        weight: how much of a contribution the result is, such as one part in the number of ranks, so that lengths can
            be compared in the unit of the result.
    """

    exchange: ClassVar[Exchange] = "chunks"
    lossless: bool = False
    is_pure: bool = False
    step: int = 0
    bounds: tuple[int, ...] = ()
    keeps_before: bool = False
    go_back: Callable[[], None] | None = None
    loss_scale: float = 1.0
    weight: float = 1.0
    _exchanges = _packed_nbytes = _dense_nbytes = 0  # counted by `note_sent`

    def __init__(self, layout: Layout, codec: Codec, team: Team = ALONE) -> None:
        self.layout, self.codec, self._team = layout, codec, team

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
            out: 1-D, contiguous, writable, of the bucket's storage dtype; as long as the encoded range.

        Raises:
            CodecError: this is no payload for that many elements; `out` has not been touched, or is undefined.
        """

    def decoded(self, start: int, payload: memoryview | bytes, count: int) -> Array:
        """The `count` elements in a payload, as `decode` would write them; possibly a read-only view of the payload.

        Raises:
            CodecError: this is no payload for that many elements.
        """
        out = scratch.empty(count, self.layout.dtype.storage)
        self.decode(start, payload, out)
        return out

    def tell(self, values: Array) -> tuple[memoryview, Array]:
        """All elements of the bucket as bytes, and as receivers will have them; by a stateful codec, without values
        that are not finite."""
        payload = self.encode(0, values)
        return payload, self.decoded(0, payload, len(values))

    @abstractmethod
    def max_encoded_nbytes(self, n: int) -> int:
        """The most bytes that n elements can take, to be checked before a payload is received."""

    def scratch_nbytes(self, nodes: int) -> int:
        """About how many bytes an exchange of the bucket between so many nodes (two at least) holds until it is
        complete: payloads encoded and received, and their sum. Daemons begin as many buckets at a time as they have
        room for.

        Memory that a call of a method needs only until it returns is left out: only a few threads have such calls."""
        encoded = self.max_encoded_nbytes(self.layout.elements)
        if self.lossless:  # its own range travels from where it lies, and those of others are passed on as they came
            return encoded * (nodes - 2) // nodes
        return 2 * encoded * (nodes - 1) // nodes

    @property
    def encoded_elements(self) -> int:
        """Number of elements of the bucket that the codec writes in its own way. It sends all others whole."""
        return self.numel

    @property
    def numel(self) -> int:
        """Number of elements of the bucket, without padding."""
        return sum(span.numel for span in self.layout.spans)

    def note_sent(self, nbytes: int, dense_nbytes: int) -> None:
        """Bytes of payloads that an exchange of the bucket sent to other nodes, headers included, and the bytes
        of a dense bucket in its place; for the statistics."""
        self._exchanges += 1
        self._packed_nbytes += nbytes
        self._dense_nbytes += dense_nbytes

    def contractions(self) -> list[tuple[int, int, float]]:
        """Returns ranges of elements, ascending, with the `Codec.contraction` of each: 1 for ranges that are sent
        whole."""
        return [(0, self.layout.elements, self.codec.contraction())]

    def statistics(self) -> dict[str, float]:
        """Returns its counts, as sums over all exchanges: `packed_nbytes` that were sent to other nodes and
        the `dense_nbytes` that an all-reduce would have sent instead; the `elements`, and those `encoded` of them.
        Subclasses may add `asked`, `selected` and `seconds`, which are known to reports. Empty if it is lossless."""
        if self.lossless:
            return {}
        return {
            "packed_nbytes": self._packed_nbytes,
            "dense_nbytes": self._dense_nbytes,
            "elements": self._exchanges * self.numel,
            "encoded": self._exchanges * self.encoded_elements,
        }

    # Its memory.

    def keep(self) -> None:
        """Keeps a copy of its memory for `go_back`, if it is asked to. To be called when a step begins."""
        self.go_back = None
        if self.keeps_before:
            self.go_back = partial(self.load_state_dict, self.state_dict())

    def scale_residual(self, factors: Sequence[float]) -> None:  # noqa: B027 - most have nothing that waits
        """Multiplies the residual of each tensor of the layout by its factor: old / new when the learning
        rate has changed, since it will be applied with the new one."""

    def residual_norm(self) -> float:
        """The L2 norm of the residual."""
        return 0.0

    def state_dict(self, copies: bool = True) -> dict[str, Array]:
        """Returns the state to be saved with the model: the `step`; nothing when the codec is stateless.

        Args:
            copies: all arrays are copies. Else those with an entry for each element may be the codec's own, to be read
                before the codec works again.
        """
        return {"step": np.array(self.step, np.int64)} if self.codec.stateful else {}

    def load_state_dict(self, state: Mapping[str, Array], partial: bool = False) -> None:
        """Continues from a `state_dict`.

        Args:
            partial: `state` is of other buckets, and tensors that it lacks start anew.

        Raises:
            CodecError: it is of another codec or another bucket.
        """
        odd = state.keys() - self.state_dict().keys()
        if odd and not partial:
            raise CodecError(
                f"the saved state has {', '.join(sorted(odd))}, which the codec {self.codec} does not have; "
                f"use the codec that the checkpoint was written with"
            )
        self.step = int(state.get("step", 0))

    # Where a worker selects itself; see `worker_selection`.

    def tray(self) -> Any:
        """The shape of the memory in which a worker leaves its own selection; None: it takes whole gradients
        only. With a shape, it is a `WorkerSelectedBucketCodec`.

        Raises:
            CodecError: workers cannot select from such a bucket.
        """
        return None


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


def check_seed(seed: int, codec: str) -> None:
    """Raises `CodecError` unless the seed is from 0 to 2**63 - 1."""
    if not 0 <= seed < 2**63:
        raise CodecError(f"the seed of the codec {codec} is from 0 to 2**63 - 1, not {seed}")
