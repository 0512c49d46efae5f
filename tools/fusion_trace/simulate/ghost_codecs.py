"""Simulated codecs of a bucket, which say how many bytes there are and take their time.

How many bytes a codec makes of each of the bucket's is measured (`CodecCosts.ratio`), on values from a normal
distribution; of a selection it depends on where the values are, and is in the end a few percent off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np

from fusion_rt import codecs
from fusion_rt.codecs import BucketCodec, Codec
from fusion_rt.codecs.base import Array, Layout, Span
from fusion_rt.codecs.factoring import FactoringBucketCodec, FactoringCodec
from fusion_rt.codecs.summing import SummingBucketCodec
from fusion_rt.codecs.tensor_rules import TensorRules
from fusion_rt.core.errors import FusionError
from fusion_trace.simulate.ghosts import F32, Spend, payload, values
from fusion_trace.simulate.model import Bucket, CodecCosts, Costs

_HEAD = 8  # bytes, of a selection's payload


@dataclass(frozen=True)
class _Portion:
    """Elements [low, high) of a bucket, of which `nbytes` travel."""

    low: int
    high: int
    nbytes: float


class ElementCodec(BucketCodec):
    """Each element for itself: dense, fp16, bf16."""

    def __init__(self, bucket: Bucket, chosen: Codec, codec: CodecCosts, costs: Costs, spend: Spend) -> None:
        super().__init__(Layout(F32, bucket.elements), chosen)
        self.lossless = chosen.lossless
        self._costs, self._codec, self._spend = costs, codec, spend

    def encode(self, start: int, values: Array) -> memoryview:
        nbytes = self.max_encoded_nbytes(len(values))
        self._spend(nbytes * self._codec.pack)
        return payload(nbytes)

    def decode(self, start: int, payload: memoryview | bytes, out: Array) -> None:
        self._spend(len(payload) * self._codec.unpack)

    def decoded(self, start: int, payload: memoryview | bytes, count: int) -> Array:
        self._spend(len(payload) * self._codec.unpack)
        return values(count, self._spend, self._costs)

    def max_encoded_nbytes(self, n: int) -> int:
        return round(4 * n * self._codec.ratio)


def _encoded(bucket: Bucket, chosen: Codec, ratio: float) -> float:
    """Returns the bytes of a bucket on the wire. Tensors that are too small for the codec travel whole."""
    rules: TensorRules | None = getattr(chosen, "rules", None)
    whole = sum(end - start for start, end in rules.dense(real_layout(bucket))) if rules is not None else 0
    return 4 * (whole + (bucket.elements - whole) * ratio)


class _NotByElements(BucketCodec):
    """A simulated codec whose exchange does not encode elements in chunks."""

    def note_sent(self, nbytes: int, dense_nbytes: int) -> None:
        pass

    def encode(self, start: int, values: Array) -> memoryview:
        raise NotImplementedError

    def decode(self, start: int, payload: memoryview | bytes, out: Array) -> None:
        raise NotImplementedError

    def max_encoded_nbytes(self, n: int) -> int:
        return 16 * n + 1024


class SummingCodec(_NotByElements, SummingBucketCodec):
    """Codecs of which owners sum ranges: selections, int8 and its like, onebit."""

    def __init__(self, bucket: Bucket, chosen: Codec, codec: CodecCosts, costs: Costs, spend: Spend) -> None:
        super().__init__(Layout(F32, bucket.elements), chosen)
        self.adapts = self.blank = chosen.selecting  # type: ignore[misc]  # of the real ones they are of the class
        self._codec, self._spend = codec, spend
        self.nbytes = _encoded(bucket, chosen, codec.ratio)  # of the whole bucket, on the wire

    def contribute(self, values: Array) -> _Portion:
        self.step += 1
        self._spend(4 * self.layout.elements * self._codec.contribute)
        return _Portion(0, self.layout.elements, self.nbytes)

    def undo(self, portion: _Portion, values: Array) -> None:
        pass

    def missing(self) -> _Portion:
        return _Portion(0, self.layout.elements, self.nbytes)

    def pack(self, portion: _Portion, low: int, high: int) -> memoryview:
        share = (high - low) / max(portion.high - portion.low, 1)
        nbytes = math.ceil(portion.nbytes * share) + _HEAD
        self._spend(nbytes * self._codec.pack)
        return payload(nbytes)

    def unpack(self, payload: memoryview | bytes, low: int, high: int) -> _Portion:
        self._spend(len(payload) * self._codec.unpack)
        return _Portion(low, high, len(payload) - _HEAD)

    def add(self, first: _Portion, second: _Portion) -> _Portion:
        nbytes = first.nbytes + second.nbytes if self.adapts else max(first.nbytes, second.nbytes)
        self._spend(min(nbytes, 4 * (first.high - first.low)) * self._codec.add)
        return _Portion(first.low, first.high, nbytes)

    def conclude(self, total: _Portion, nodes: int) -> _Portion:
        kept = self.nbytes / nodes if self.adapts else total.nbytes
        self._spend(min(total.nbytes, 4 * (total.high - total.low)) * self._codec.conclude)
        return _Portion(total.low, total.high, min(kept, total.nbytes))

    def revoke(self, total: _Portion, sent: _Portion) -> None:
        pass

    def write(self, portion: _Portion, outputs: Sequence[Array], scale: float, divisor: int) -> None:
        self._spend(portion.nbytes * self._codec.write * len(outputs))

    def reclaim(self, portion: _Portion) -> None:
        pass

    def wanted(self) -> int:
        return round(self.layout.elements * self.codec.share())

    def counts(self, portion: _Portion, edges: Sequence[int]) -> list[int]:
        return [high - low for low, high in pairwise(edges)]


class FactorCodec(_NotByElements, FactoringBucketCodec):
    """PowerSGD. Its factors are real, and all zero: they are small."""

    def __init__(self, bucket: Bucket, chosen: Codec, codec: CodecCosts, costs: Costs, spend: Spend) -> None:
        super().__init__(Layout(F32, bucket.elements), chosen)
        self.first_elements, self.second_elements = factors(bucket, chosen)
        self._cost, self._spend = codec, spend

    def start(self, values: Array) -> Array:
        self._spend(4 * self.layout.elements * self._cost.contribute)
        return np.zeros(self.first_elements, np.float32)

    def second(self, first: Array) -> Array:
        self._spend(4 * self.layout.elements * self._cost.add)
        return np.zeros(self.second_elements, np.float32)

    def finish(self, second: Array, outputs: Sequence[Array], scale: float = 1.0, divisor: int = 1) -> None:
        self._spend(4 * self.layout.elements * self._cost.write)

    def undo(self, values: Array) -> None:
        pass


def factors(bucket: Bucket, chosen: Codec) -> tuple[int, int]:
    """Elements of the two sums of a codec whose factors are summed."""
    return cast(FactoringCodec, chosen).factor_elements(real_layout(bucket))


_SIMULATED: Mapping[str, Callable[[Bucket, Codec, CodecCosts, Costs, Spend], BucketCodec]] = {
    "chunks": ElementCodec,
    "owners": SummingCodec,
    "factors": FactorCodec,
}
"""By how nodes add up what a codec encodes (`BucketCodec.exchange`)."""


def open_codec(text: str, bucket: Bucket, costs: Costs, spend: Spend) -> BucketCodec:
    """The simulated codec of a bucket on a node.

    Raises:
        CodecError: there is no such codec.
        KeyError: its costs were not measured.
    """
    chosen = codecs.parse(text)
    return _SIMULATED[chosen.bucket.exchange](bucket, chosen, costs.codec(text), costs, spend)


def wire_nbytes(text: str, bucket: Bucket, costs: Costs) -> int:
    """Bytes of a bucket that is encoded as a whole, as parcels to and from homes are."""
    chosen = codecs.parse(text)
    if chosen.lossless:
        return bucket.nbytes
    return math.ceil(_encoded(bucket, chosen, costs.codec(text).ratio)) + _HEAD


def real_layout(bucket: Bucket) -> Layout:
    """Returns the layout of a bucket as the daemon has it, with tensors.

    Raises:
        FusionError: the tensors that were recorded do not fit into it.
    """
    if sum(map(math.prod, bucket.shapes)) > bucket.elements:
        raise FusionError(f"a bucket of {bucket.elements} elements has larger tensors in this trace: it is damaged")
    spans, at = [], 0
    for number, shape in enumerate(bucket.shapes):
        spans.append(Span(f"tensor{number}", at, math.prod(shape), shape))
        at = spans[-1].end
    return Layout(F32, bucket.elements, tuple(spans))
