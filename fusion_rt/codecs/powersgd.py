"""`powersgd`: each matrix of the gradient as the product of two thin ones.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019), algorithms 1
and 2. For each matrix M (a tensor's first dimension by all others) of the sum of gradient and residual:

    P = M Q, summed over nodes;  P made orthonormal;  Q = M^T P, summed over nodes;  result P Q^T, residual M - P Q^T

with each node's own Q in the residual, so that

    sum of all nodes' residuals + result, afterwards = sum of all nodes' residuals + gradients, before

as exactly as float32 multiplies and adds up. `warm_start` begins a step with the Q of the one before, which over steps
is the power iteration; directions in which there was nothing are drawn anew. Whatever is no matrix, small, excluded, or
not at least twice as large as its factors travels whole, with P, and leaves no residual.

Everything that follows from sums is computed alike on all nodes, bit by bit. A gradient with anything not finite in it,
or so large that a product may not be, makes that node's factors NaN, and so their sum: all nodes see that, and undo the
step. Momentum correction makes no sense here: an optimizer applies its momentum to the result (there:
"post-compression momentum").
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fusion_rt.codecs.base import Array, CodecError, Layout, Span, byte_view, check_length, check_seed
from fusion_rt.codecs.error_feedback import F32, FeedbackBucketCodec, FeedbackCodec
from fusion_rt.codecs.factoring import FactoringBucketCodec, FactoringCodec
from fusion_rt.codecs.packing import Spans
from fusion_rt.codecs.tensor_rules import TensorRules, joined
from fusion_rt.core import scratch
from fusion_rt.kernels import cpu, low_rank, selection
from fusion_rt.kernels.random_bits import key, uniform
from fusion_rt.kernels.selection import NOTHING, Memory, Range, collect_shares, share
from fusion_rt.kernels.team import ALONE, Team

_GAIN = 2  # how many times smaller than the matrix its factors have to be
_MOST = 2.0**120  # the largest magnitude in a factor of which products are finite


@dataclass(frozen=True)
class _Matrix:
    """A tensor that is approximated.

    Attributes:
        residual: (rows, columns), within the bucket's residual.
        lefts, rights: where its factors P (rank, rows) and Q (rank, columns) are in flat arrays.
        start: the Q that a step begins with.
    """

    span: Span
    residual: Array
    lefts: slice
    rights: slice
    start: Array

    def left(self, factors: Array) -> Array:
        return factors[self.lefts].reshape(len(self.start), -1)

    def right(self, factors: Array) -> Array:
        return factors[self.rights].reshape(len(self.start), -1)


class PowerSGDBucket(FeedbackBucketCodec, FactoringBucketCodec):
    """One bucket's codec on one node; see `factoring`. Tensors of unknown shape travel whole.

    Attributes:
        dense: the elements that travel whole; those of the first exchange end with them.
    """

    codec: PowerSGD

    def __init__(self, layout: Layout, codec: PowerSGD, team: Team = ALONE) -> None:
        super().__init__(layout, codec, team)
        self._matrices: list[_Matrix] = []
        lefts = rights = 0
        whole: list[Range] = []
        for span in layout.spans:
            if not codec.approximates(span):
                whole.append((span.start, span.end))
                continue
            residual = self._residual[span.start : span.end].reshape(span.shape[0], -1)
            left_end, right_end = (
                start + codec.rank * n for start, n in zip((lefts, rights), residual.shape, strict=True)
            )
            start = np.zeros((codec.rank, residual.shape[1]), np.float32)
            self._matrices.append(_Matrix(span, residual, slice(lefts, left_end), slice(rights, right_end), start))
            lefts, rights = left_end, right_end
        self.dense = Spans(joined(whole))
        self.first_elements, self.second_elements = lefts + self.dense.size, rights
        self._left: Array = np.zeros(lefts, np.float32)
        self._right: Array = np.zeros(rights, np.float32)
        self._whole: Array = np.zeros(self.dense.size, np.float32)
        self._next = "start"
        self._spoiled = False  # the last gradient was not finite
        low_rank.prepare()
        cpu.prepare([F32])

    @property
    def encoded_elements(self) -> int:
        return sum(matrix.span.numel for matrix in self._matrices)

    def start(self, values: Array) -> Array:
        """See `FactoringBucketCodec`. Returns the factors P of this node, and then its elements that travel whole."""
        self._check_whole(values)
        began = time.perf_counter()
        memory = self._memory(values)
        collect_shares(memory, share(self._ranges, self._team.threads), NOTHING, 0, self._team)
        self._spoiled = memory.spoiled
        for matrix in self._matrices:
            self._prepare_start(matrix)
            low_rank.left_of(matrix.residual, matrix.start, matrix.left(self._left), self._team)
        self.step += 1
        self._next = "second"
        first: Array = np.concatenate([self._left, self.dense.gather(self._residual, 0, self.layout.elements)])
        self._seconds += time.perf_counter() - began
        return self._refused(first)

    def second(self, total: Array) -> Array:
        """See `FactoringBucketCodec`. Returns the factors Q of this node."""
        self._enter("second", total, self.first_elements)
        began = time.perf_counter()
        self._left[:], self._whole[:] = total[: len(self._left)], total[len(self._left) :]
        for matrix in self._matrices:
            left = matrix.left(self._left)
            low_rank.orthonormalise(left)
            low_rank.right_of(matrix.residual, left, matrix.right(self._right), self._team)
        self._next = "finish"
        self._seconds += time.perf_counter() - began
        right: Array = self._right.copy()
        return self._refused(right)

    def undo(self, values: Array) -> None:
        selection.withdraw(self._memory(values), self._ranges)
        self._next = "start"

    def finish(self, total: Array, outputs: Sequence[Array], scale: float = 1.0, divisor: int = 1) -> None:
        self._enter("finish", total, self.second_elements)
        began = time.perf_counter()
        self._conclude(total)
        wide = outputs[0] if self.layout.dtype == F32 else scratch.empty(self.layout.elements, np.float32)
        self._write(self._left, self._whole, total, wide)
        if scale != 1.0 or divisor != 1:
            cpu.reduce("sum", F32, [wide], [wide], postscale=scale, divisor=divisor)
        for output in outputs:
            if self.layout.dtype != F32:
                cpu.convert(wide, F32, output, self.layout.dtype)
            elif output is not wide:
                output[:] = wide
        self._seconds += time.perf_counter() - began

    # As a codec that is not asked for sums: an approximation of one node's values.

    def encode(self, start: int, values: Array) -> memoryview:
        """A step of the whole bucket in one payload: P, the elements that travel whole, and Q, all as float32."""
        if start != 0 or len(values) != self.layout.elements:
            raise CodecError("the codec powersgd approximates whole tensors, so it cannot encode parts of a bucket")
        first = self.start(values)
        right = self.second(first)
        if self.usable(first) and self.usable(right):
            self._conclude(right)
            return byte_view(np.concatenate([self._left, self._whole, right]))
        self.undo(values)
        return byte_view(np.full(len(first) + len(right), np.nan, np.float32))

    def decode(self, start: int, payload: memoryview | bytes, out: Array) -> None:
        if start != 0 or len(out) != self.layout.elements:
            raise CodecError("the codec powersgd approximates whole tensors, so it cannot decode parts of a bucket")
        check_length(payload, self.max_encoded_nbytes(len(out)), len(out), self.layout.dtype, self.codec.name)
        factors = np.frombuffer(bytes(payload), np.float32)
        wide = out if self.layout.dtype == F32 else np.empty(len(out), np.float32)
        left, whole, right = np.split(factors, [len(self._left), self.first_elements])
        self._write(left, whole, right, wide)
        if wide is not out:
            cpu.convert(wide, F32, out, self.layout.dtype)

    def max_encoded_nbytes(self, n: int) -> int:
        return 4 * (self.first_elements + self.second_elements)

    # The parts of a step.

    def _memory(self, values: Array) -> Memory:
        """Returns the array that a gradient is added to."""
        return Memory(self._residual, self._widened(values), factor=1 / self.loss_scale, decay=self.codec.decay)

    def _prepare_start(self, matrix: _Matrix) -> None:
        """Makes the vectors that a step begins with orthonormal; missing ones are drawn, alike on all nodes."""
        start = matrix.start
        if not (self.codec.warm_start and np.isfinite(start).all()):
            start[:] = 0
        low_rank.orthonormalise(start)
        missing = [k for k in range(len(start)) if not start[k].any()]
        for k in missing:
            name = zlib.crc32(matrix.span.name.encode())
            start[k] = uniform(key(self.codec.seed, self.step, name, k), start.shape[1])
        if missing:
            low_rank.orthonormalise(start)

    def _conclude(self, total: Array) -> None:
        """Takes the sent part out of this node's residual, and keeps the summed factors Q for the next step."""
        self._next = "start"
        for low, high in self.dense.ranges:
            self._residual[low:high] = 0
        for matrix in self._matrices:
            left, right, rest = matrix.left(self._left), matrix.right(self._right), matrix.residual
            if self.codec.feedback:
                low_rank.product(left, right, rest, -1, self._team)
            else:
                rest[:] = 0
            matrix.start[:] = matrix.right(total)

    def _write(self, left: Array, whole: Array, right: Array, out: Array) -> None:
        """Writes the gradient that factors and whole elements stand for; float32."""
        if sum(high - low for low, high in self._ranges) < len(out):
            out[:] = 0
        for matrix in self._matrices:
            place = out[matrix.span.start : matrix.span.end].reshape(matrix.residual.shape)
            low_rank.product(matrix.left(left), matrix.right(right), place, team=self._team)
        self.dense.scatter(whole, 0, out)

    def _refused(self, factors: Array) -> Array:
        """Factors as they are sent: NaN where they cannot be used, for all nodes to see."""
        if self._spoiled or not np.abs(factors).max(initial=0) <= _MOST:
            factors[:] = np.nan
        return factors

    def _enter(self, part: str, total: Array, elements: int) -> None:
        if self._next != part:
            raise RuntimeError(f"{part} was called where a step of powersgd goes on with {self._next}")
        if total.shape != (elements,) or total.dtype != np.float32:
            raise ValueError(f"{part} is given the sum of {elements} float32, not {total.dtype} {total.shape}")

    def _own_state(self) -> dict[str, Array]:
        return {f"factor/{matrix.span.name}": matrix.start.copy() for matrix in self._matrices}

    def _load_own_state(self, state: Mapping[str, Array], partial: bool) -> None:
        self._next = "start"
        for matrix in self._matrices:
            matrix.start[:] = state.get(f"factor/{matrix.span.name}", 0)


@dataclass(frozen=True)
class PowerSGD(FeedbackCodec, FactoringCodec):
    """A low-rank approximation.

    Args:
        rank: columns of the factors, at least 1.
        warm_start: a step begins with the factor of the one before; without, with a random one.
        feedback: unsent values wait in the residual; without, they are lost.
        decay: factor of the residual in each step; above 0 and at most 1.
        minimum: tensors with fewer elements travel whole.
        exclude: tensors whose name fits one of these patterns, with commas between them, travel whole.
        seed: of the random factors, from 0 to 2**63 - 1.
    """

    name = "powersgd"
    bucket = PowerSGDBucket

    rank: int = 4
    warm_start: bool = True
    feedback: bool = True
    decay: float = 1.0
    minimum: int = 1024
    exclude: str = "*bias,*norm*,*.bn*"
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.rules
        if self.rank < 1:
            raise CodecError(f"the rank of the codec powersgd is a number of columns from 1 on, not {self.rank}")
        check_seed(self.seed, self.name)
        self._check_memory()

    @property
    def rules(self) -> TensorRules:
        return TensorRules(minimum=self.minimum, exclude=self.exclude)

    def approximates(self, span: Span) -> bool:
        """Says whether a tensor travels as factors, and not whole."""
        if len(span.shape) < 2 or span.numel == 0 or self.rules.is_dense(span):
            return False
        rows = span.shape[0]
        return _GAIN * self.rank * (rows + span.numel // rows) <= span.numel

    def factor_elements(self, layout: Layout) -> tuple[int, int]:
        first = second = 0
        for span in layout.spans:
            if self.approximates(span):
                first += self.rank * span.shape[0]
                second += self.rank * (span.numel // span.shape[0])
            else:
                first += span.numel
        return first, second
