"""The base of codecs that send every element in fewer bits: blocks with a scale, error feedback, rules.

Each node adds its gradient to the residual, sends the sum rounded, and keeps the difference. This holds in float32,
element by element, for finite numbers:

    residual afterwards = (residual before * decay + gradient) - sent

with one rounding of the difference. It is exact wherever the sent value lies between half and twice the sum (Sterbenz);
elsewhere it is off by half a unit in the last place of the difference. Tensors that are sent whole go as float32, and
leave nothing. Values that are not finite are never added (`summing`); a sum that is not finite arrives as NaN and
leaves nothing. Padding is neither read nor sent. A bucket of float64, float16 or bfloat16 is converted to float32 when
it comes in.

A payload of a range is the records of its blocks (`kernels.quantisation`), and then the elements that are sent whole.
Blocks begin at multiples of their size from the start of the bucket, and where a range of tensors begins. So a bucket
that is divided at multiples of a block has the same blocks, whatever the division.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

import numpy as np

from fusion_rt.codecs.base import Array, CodecError, Layout, check_length
from fusion_rt.codecs.error_feedback import F32, FeedbackBucketCodec, FeedbackCodec
from fusion_rt.codecs.packing import Spans
from fusion_rt.codecs.summing import SummingBucketCodec
from fusion_rt.codecs.tensor_rules import TensorRules
from fusion_rt.core import scratch
from fusion_rt.kernels import cpu, selection
from fusion_rt.kernels.quantisation import Draw, Quantiser
from fusion_rt.kernels.selection import NOTHING, Found, Memory, Range
from fusion_rt.kernels.team import ALONE, Team

_ALIGNMENT = 4096  # elements; the largest block
_TEAM_ELEMENTS = 1 << 20  # from here on more than one thread is worth it
CONTRIBUTION, SUM = range(2)
"""Values that are rounded: a rank's contribution, or the sum of all."""


@dataclass(frozen=True)
class Quantising(FeedbackCodec):
    """Arguments of every codec that sends all elements in fewer bits.

    Args:
        block: how many elements share a scale; a power of two from 32 to 4096.
        feedback: the rounding error is added to the next gradient; without, it is lost.
        decay: of the residual, in each step; above 0 and at most 1.
        minimum: tensors with fewer elements are sent as they are.
        exclude: tensors whose name fits one of these patterns, with commas between them, are sent as they are.
        momentum: of the velocity that is added instead of the gradient (the optimizer then applies none); 0 for none.
        nesterov: the velocity looks ahead.
    """

    quantiser: ClassVar[Quantiser]

    block: int = 256
    feedback: bool = True
    decay: float = 1.0
    minimum: int = 1024
    exclude: str = "*bias,*norm*,*.bn*"
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _ = self.rules
        if self.block.bit_count() != 1 or not 32 <= self.block <= _ALIGNMENT:
            raise CodecError(
                f"a block of the codec {self.name} is a power of two from 32 to {_ALIGNMENT}, not {self.block}"
            )
        self._check_memory()

    @property
    def rules(self) -> TensorRules:
        return TensorRules(minimum=self.minimum, exclude=self.exclude)


@dataclass(frozen=True)
class Quantised:
    """The elements of the range [low, high) of a bucket, as they are sent.

    Attributes:
        records: uint8, of the blocks.
        dense: float32, the elements that are sent whole.
    """

    low: int
    high: int
    records: Array
    dense: Array


@dataclass(frozen=True)
class Total:
    """A sum of the elements of the range [low, high): float32, with zeros for padding."""

    low: int
    high: int
    values: Array


Portion: TypeAlias = Quantised | Total


class QuantisingBucketCodec(FeedbackBucketCodec, SummingBucketCodec):
    """One bucket's codec on one node.

    Portions are `Quantised`, and sums of them `Total`. Or chunks are encoded and decoded piece by piece: a step begins
    with the chunk that has element 0, and then ranges that do not overlap may be encoded by several threads.

    Attributes:
        node: which of the nodes this is, so that each rounds by draws of its own.
        quantised, dense: the elements that are sent in fewer bits, and those that are sent whole.
    """

    alignment = _ALIGNMENT
    codec: Quantising

    def __init__(self, layout: Layout, codec: Quantising, team: Team = ALONE) -> None:
        super().__init__(layout, codec, team, codec.momentum > 0)
        self._kernel = codec.quantiser
        self.dense = Spans(codec.rules.dense(layout))
        self.quantised = Spans([r for group in codec.rules.groups(layout) for r in group.ranges])
        self._all = Spans(self._ranges)
        self._kernel.prepare()
        cpu.prepare([F32])

    @property
    def encoded_elements(self) -> int:
        return self.quantised.size

    def contractions(self) -> list[tuple[int, int, float]]:
        found = [(low, high, self.codec.contraction()) for low, high in self.quantised.ranges]
        return sorted([*found, *((low, high, 1.0) for low, high in self.dense.ranges)])

    # As a part of an exchange in which owners sum.

    def contribute(self, values: Array) -> Quantised:
        self._check_whole(values)
        began = time.perf_counter()
        portion = self._accumulate(0, values)
        self._seconds += time.perf_counter() - began
        return portion

    def undo(self, portion: Quantised, values: Array) -> None:
        part, codec = slice(portion.low, portion.high), self.codec
        if codec.feedback:
            self.give_back(portion.low, self._values(portion))
        velocity = None if self._velocity is None else self._velocity[part]
        gradient = self._as_float32(values)
        memory = Memory(self._residual[part], gradient, velocity, codec.momentum, codec.nesterov, decay=codec.decay)
        selection.withdraw(memory, _from(portion.low, self._all.within(portion.low, portion.high)))
        self._lose_rest()

    def missing(self) -> Quantised:
        return self._missing(0, self.layout.elements)

    def _missing(self, low: int, high: int) -> Quantised:
        records = self._round(np.full(high - low, np.nan, np.float32), None, low, CONTRIBUTION)
        return Quantised(low, high, records, np.full(self._whole(low, high), np.nan, np.float32))

    def pack(self, portion: Quantised, low: int, high: int) -> memoryview:
        """See `SummingBucketCodec.pack`. Both ends are multiples of `alignment`, or ends of the portion."""
        first, skipped = self._records_nbytes(portion.low, low), self._whole(portion.low, low)
        records = portion.records[first : first + self._records_nbytes(low, high)]
        whole = portion.dense[skipped : skipped + self._whole(low, high)].view(np.uint8)
        return (np.concatenate([records, whole]) if len(whole) else records).data

    def unpack(self, payload: memoryview | bytes, low: int, high: int) -> Quantised:
        nbytes, whole = self._records_nbytes(low, high), self._whole(low, high)
        check_length(payload, nbytes + 4 * whole, high - low, self.layout.dtype, self.codec.name)
        raw: Array = np.frombuffer(payload, np.uint8)
        portion = Quantised(low, high, raw[:nbytes], np.frombuffer(raw[nbytes:].tobytes(), np.float32))
        block = self.codec.block
        for a, b, first, end in self._pieces(low, high):
            if not self._possible(self._kernel.scales(raw[first:end], b - a, block, a % block)).all():
                raise CodecError(
                    f"a peer sent a block with a scale that is none of the codec {self.codec.name}; it is faulty or "
                    f"runs another version"
                )
        return portion

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, first: Portion, second: Portion) -> Total:
        total = first if isinstance(first, Total) else Total(first.low, first.high, self._values(first))
        if isinstance(second, Total):
            np.add(total.values, second.values, out=total.values)
        else:
            self._expand(second, total.values, add=True)
        return total

    @np.errstate(over="ignore", invalid="ignore")
    def conclude(self, total: Portion, nodes: int) -> Quantised:
        """Rounds a sum, of which the rest is left."""
        if isinstance(total, Quantised):
            return total
        low, high, values = total.low, total.high, total.values
        dense = _gathered(values, _from(low, self.dense.within(low, high)))
        records = self._round(values, None, low, SUM)
        if self.codec.feedback:
            for a, b in self.quantised.within(low, high):
                self._residual[a:b] += values[a - low : b - low]
        return Quantised(low, high, records, dense)

    @np.errstate(over="ignore", invalid="ignore")
    def revoke(self, total: Portion, sent: Portion) -> None:
        if self.codec.feedback and isinstance(total, Total):
            for a, b in self.quantised.within(total.low, total.high):
                self._residual[a:b] -= total.values[a - total.low : b - total.low]

    def write(self, portion: Portion, outputs: Sequence[Array], scale: float, divisor: int) -> None:
        low, high, values = portion.low, portion.high, self._values(portion)
        places = [output[low:high] for output in outputs]
        if self.layout.dtype == F32:
            cpu.reduce("sum", F32, [values], places, postscale=scale, divisor=divisor)
            return
        cpu.reduce("sum", F32, [values], [values], postscale=scale, divisor=divisor)
        for place in places:
            cpu.convert(values, F32, place, self.layout.dtype)

    def reclaim(self, portion: Portion) -> None:
        if self.codec.feedback:
            self.give_back(portion.low, self._values(portion))

    def wanted(self) -> int:
        return self._all.size

    def weights(self) -> list[tuple[int, int, float]]:
        weight = self._kernel.nbytes(self.codec.block, self.codec.block) / self.codec.block / 4
        return sorted([(*r, weight) for r in self.quantised.ranges] + [(*r, 1.0) for r in self.dense.ranges])

    # Piece by piece.

    def encode(self, start: int, values: Array) -> memoryview:
        portion = self._accumulate(start, values)
        if self.spoiled:
            self.undo(portion, values)
            portion = self._missing(portion.low, portion.high)
        return self.pack(portion, portion.low, portion.high)

    def decode(self, start: int, payload: memoryview | bytes, out: Array) -> None:
        portion = self.unpack(payload, start, start + len(out))
        if self.layout.dtype == F32:
            self._expand(portion, out)
        else:
            cpu.convert(self._values(portion), F32, out, self.layout.dtype)

    def max_encoded_nbytes(self, n: int) -> int:
        records = min(n, n // self.codec.block + 2 * len(self.quantised.ranges))  # each ends with a byte in part
        quantised = 5 * records + n * self._kernel.bits // 8
        return quantised + 4 * min(n, self.dense.size) if n else 0

    # For subclasses.

    @abstractmethod
    def _possible(self, scales: Array) -> Array:
        """Says which of these (float32) can be in a payload."""

    def _draw(self, what: int) -> Draw | None:
        """The random bits for one rounding of this step, `CONTRIBUTION` or `SUM`; None to round to the nearest."""
        return None

    # Operations on the elements of a range.

    def _accumulate(self, start: int, values: Array) -> Quantised:
        """Adds to the residual, and takes the sent part from it."""
        self._check_range(start, values)
        low, high = start, start + len(values)
        self.step += low == 0
        gradient: Array | None = self._as_float32(values)
        residual, whole = self._residual[low:high], _from(low, self.dense.within(low, high))
        if self._velocity is None:
            memory = Memory(residual, gradient)
            selection.collect(memory, whole, NOTHING, Found(0))
        else:
            codec = self.codec
            velocity = self._velocity[low:high]
            memory = Memory(residual, gradient, velocity, codec.momentum, codec.nesterov, decay=codec.decay)
            selection.collect(memory, _from(low, self._all.within(low, high)), NOTHING, Found(0))
            gradient = None
        dense = _gathered(residual, whole)
        for a, b in whole:
            residual[a:b] = 0
        records = self._round(residual, gradient, low, CONTRIBUTION, memory)
        self.spoiled = memory.spoiled
        if high == self.layout.elements:
            self._lose_rest()
        return Quantised(low, high, records, dense)

    def _round(self, values: Array, gradient: Array | None, low: int, what: int, memory: Memory | None = None) -> Array:
        """The records of values from element `low` on, after the gradient was added; their rounding errors stay.

        Args:
            memory: is spoiled where a part of the gradient could not be added.
        """
        records = scratch.empty(self._records_nbytes(low, low + len(values)), np.uint8)
        block, draw = self.codec.block, self._draw(what)

        def work(a: int, b: int, first: int, end: int) -> None:
            added = None if gradient is None else gradient[a - low : b - low]
            all_added = self._kernel.encode(
                values[a - low : b - low], added, block, records[first:end],
                phase=a % block, keep=self.codec.feedback, base=a, draw=draw, decay=self.codec.decay,
            )  # fmt: skip
            if not all_added and memory is not None:
                memory.spoiled = True

        self._run(work, low, low + len(values))
        return records

    def _values(self, portion: Portion) -> Array:
        """The elements of a portion, with zeros for padding; those of a `Total` are not a copy."""
        if isinstance(portion, Total):
            return portion.values
        values = scratch.empty(portion.high - portion.low, np.float32)
        self._expand(portion, values)
        return values

    def _expand(self, portion: Quantised, out: Array, add: bool = False) -> None:
        """Writes a portion to an array of its range (float32), or adds it."""
        low, high, block = portion.low, portion.high, self.codec.block
        if not add and sum(b - a for a, b in self._all.within(low, high)) < high - low:
            out[:] = 0

        def work(a: int, b: int, first: int, end: int) -> None:
            part = out[a - low : b - low]
            self._kernel.decode(portion.records[first:end], block, part, phase=a % block, add=add)

        self._run(work, low, high)
        done = 0
        for a, b in _from(low, self.dense.within(low, high)):
            values = portion.dense[done : done + b - a]
            out[a:b] = out[a:b] + values if add else values
            done += b - a

    def _run(self, work: Callable[[int, int, int, int], None], low: int, high: int) -> None:
        team = self._team if high - low >= _TEAM_ELEMENTS else ALONE
        team.run([partial(work, *piece) for piece in self._pieces(low, high, -(-(high - low) // team.threads))])

    def _pieces(self, low: int, high: int, most: int = 0) -> list[tuple[int, int, int, int]]:
        """The ranges of quantised elements in [low, high), and where their records begin and end; divided at blocks
        into some of about `most` elements, if that is given."""
        block, done = self.codec.block, 0
        pieces = []
        step = max(block, most // block * block) if most else self.layout.elements
        for first, end in self.quantised.within(low, high):
            a = first
            while a < end:
                b = min(end, (a + step) // block * block) if step < end - a else end
                nbytes = self._kernel.nbytes(b - a, block, a % block)
                pieces.append((a, b, done, done + nbytes))
                done += nbytes
                a = b
        return pieces

    def _records_nbytes(self, low: int, high: int) -> int:
        block = self.codec.block
        return sum(self._kernel.nbytes(b - a, block, a % block) for a, b in self.quantised.within(low, high))

    def _whole(self, low: int, high: int) -> int:
        """Counts the elements of a range that are sent whole."""
        return sum(b - a for a, b in self.dense.within(low, high))


def _from(low: int, ranges: Sequence[Range]) -> list[Range]:
    """Ranges, counted from element `low`."""
    return [(a - low, b - low) for a, b in ranges]


def _gathered(values: Array, ranges: Sequence[Range]) -> Array:
    """Ranges of an array (float32), one after the other; a copy."""
    return np.concatenate([np.empty(0, np.float32), *(values[a:b] for a, b in ranges)])
