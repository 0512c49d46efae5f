"""`demo`: the largest coefficients of a cosine transform of the residual, which decays.

Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization" (arXiv 2411.19870). For each tile of a matrix (a
tensor's first dimension by all others), with momentum m:

    m = decay * m + gradient;  q = the k largest coefficients of m;  m -= q, transformed back;  result: the sum of all q

of which the tensor is made again, and, where it is `signed`, its signs (their code does so; the optimizer is then SGD
with a small rate and no momentum). The momentum is a residual by another name, and so it is one here: saved, moved,
rescaled and given back as those of all codecs.

The transform is linear and orthonormal (`kernels.cosines`). So the residual is kept as coefficients, from which the
selected ones are taken exactly, nodes sum coefficients, and only a result is transformed back. A saved state has
elements again, as with any other codec, so that a restored job goes on to within rounding, and not bit by bit. A
gradient that is not finite makes its tile so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion_rt.codecs.base import Array, CodecError, Layout, Span
from fusion_rt.codecs.error_feedback import F32
from fusion_rt.codecs.packing import Selection, Spans
from fusion_rt.codecs.selecting import Selecting, SelectingBucketCodec
from fusion_rt.codecs.tensor_rules import TensorRules
from fusion_rt.codecs.worker_selection import Shape
from fusion_rt.core import scratch
from fusion_rt.kernels import cosines, cpu, selection
from fusion_rt.kernels.selection import Memory, Range, prepare_chunks, take_of_chunks
from fusion_rt.kernels.team import ALONE, Team


class DemoBucket(SelectingBucketCodec):
    """One bucket's codec on one node. Values, selections and the residual are of coefficients, in the places of their
    tensor's elements; those of tensors that are always sent are elements."""

    codec: Demo
    blank = False

    def __init__(self, layout: Layout, codec: Demo, team: Team = ALONE) -> None:
        super().__init__(layout, codec, team)
        rules = codec.rules
        self._transformed = [span for span in layout.spans if span.numel and not rules.is_dense(span)]
        self._plain = Spans(_between([(span.start, span.end) for span in self._transformed], layout.elements))
        self._edges = [span.start + cosines.tiles(*_shape(span), codec.chunk) for span in self._transformed]
        self._sums: Array | None = None  # the written part of a result
        cosines.prepare()
        prepare_chunks()

    def accumulate_and_select(self, values: Array) -> Selection:
        self._sums = None
        return super().accumulate_and_select(values)

    def write(self, selected: Selection, outputs: Sequence[Array], scale: float, divisor: int) -> None:
        """Keeps a part of a result until it is complete."""
        if self._sums is None:
            self._sums = scratch.zeros(self.layout.elements, np.float32)
        selection.put(selected.indices, selected.values, self._sums)
        self.dense.scatter(selected.dense, selected.low, self._sums[selected.low : selected.high])

    def scratch_nbytes(self, nodes: int) -> int:
        return super().scratch_nbytes(nodes) + 4 * self.layout.elements  # of the result's coefficients

    def complete(self, outputs: Sequence[Array], scale: float, divisor: int) -> None:
        sums, self._sums = self._sums, None
        wide = outputs[0] if self.layout.dtype == F32 else scratch.empty(self.layout.elements, np.float32)
        for low, high in self._plain.ranges:
            wide[low:high] = 0 if sums is None else sums[low:high]
        for span in self._transformed:
            part = slice(span.start, span.end)
            if sums is None:
                wide[part] = 0
            else:
                cosines.transform_back(sums[part], wide[part].reshape(_shape(span)), self.codec.chunk, self._team)
        if self.codec.signed:
            np.sign(wide, out=wide)
            scale, divisor = self.loss_scale, 1
        if scale != 1.0 or divisor != 1:
            cpu.reduce("sum", F32, [wide], [wide], postscale=scale, divisor=divisor)
        for output in outputs:
            if output is not wide:
                output[:] = self._as_stored(wide)

    def decode(self, start: int, payload: memoryview | bytes, out: Array) -> None:
        if start != 0 or len(out) != self.layout.elements:
            raise CodecError("the codec demo transforms whole tensors, so it cannot decode parts of a bucket")
        self._sums = None
        self.write(self.unpack(payload, 0, len(out)), [out], 1.0, 1)
        self.complete([out], 1.0, 1)

    def give_back(self, start: int, values: Array) -> None:
        """Adds all elements of the bucket to the residual; see `FeedbackBucketCodec`."""
        if start != 0 or len(values) != self.layout.elements:
            raise CodecError("the codec demo transforms whole tensors, so it cannot be given back parts of a bucket")
        wide = values if values.dtype == np.float32 else super()._as_float32(values)
        super().give_back(0, self._coefficients(wide))

    def tray(self) -> Shape:
        raise CodecError("workers cannot select for the codec demo, of which daemons have the transform")

    def state_dict(self, copies: bool = True) -> dict[str, Array]:
        state = super().state_dict(copies)
        for span in self._transformed:
            key = f"residual/{span.name}"
            matrix = np.empty(_shape(span), np.float32)
            cosines.transform_back(state[key], matrix, self.codec.chunk, self._team)
            state[key] = matrix.reshape(-1)
        return state

    def load_state_dict(self, state: Mapping[str, Array], partial: bool = False) -> None:
        super().load_state_dict(state, partial)
        self._residual[:] = self._coefficients(self._residual)

    # The parts of a selection.

    def _widened(self, values: Array) -> Array:
        return self._coefficients(super()._widened(values))

    def _ks(self) -> list[int]:
        return [int(self._wanted_of(number).sum()) for number in range(len(self._groups))]

    def _select(self, memory: Memory, group: int, k: int, team: Team) -> tuple[Array, Array]:
        return take_of_chunks(memory, self._edges[group], self._wanted_of(group), team)

    def _wanted_of(self, group: int) -> Array:
        """Returns how many coefficients of each tile the next step sends (int64); at least one."""
        density = self._groups[group].densities(self.step, self.codec.warmup)[0]
        wanted: Array = np.rint(np.diff(self._edges[group]) * density).clip(1).astype(np.int64)
        return wanted

    def _coefficients(self, values: Array) -> Array:
        """The coefficients of all elements of the bucket (float32); ranges without a transform stay."""
        out: Array = np.empty_like(values)
        for low, high in self._plain.ranges:
            out[low:high] = values[low:high]
        for span in self._transformed:
            part = slice(span.start, span.end)
            cosines.transform(values[part].reshape(_shape(span)), out[part], self.codec.chunk, self._team)
        return out


@dataclass(frozen=True)
class Demo(Selecting):
    """The largest coefficients of each tile. It takes the arguments of all codecs that select, but `momentum` and
    `scope`.

    Args:
        chunk: rows and columns of a tile, a power of two up to 64; at its edges a matrix has smaller ones.
        signed: the result is the signs of the sum, whatever it is divided by.
    """

    name = "demo"
    bucket = DemoBucket

    density: float = 32 / 4096
    decay: float = 0.999
    chunk: int = 64
    signed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum:
            raise CodecError("the momentum of the codec demo is its decay; write demo(decay=0.999)")
        if self.scope != "bucket":
            raise CodecError("the codec demo selects from each tile by itself; leave out scope")
        if self.chunk.bit_count() != 1 or not 2 <= self.chunk <= cosines.MOST:
            raise CodecError(f"a chunk of the codec demo is a power of two from 2 to {cosines.MOST}, not {self.chunk}")

    @property
    def signs(self) -> bool:
        return self.signed

    @property
    def rules(self) -> TensorRules:
        return replace(super().rules, scope="tensor")


def _between(ranges: Sequence[Range], end: int) -> list[Range]:
    """Returns the gaps between ascending ranges in [0, end)."""
    lows = [0, *(high for _, high in ranges)]
    return list(zip(lows, [*(low for low, _ in ranges), end], strict=True))


def _shape(span: Span) -> tuple[int, int]:
    """The matrix that a tensor is."""
    return (span.shape[0], span.numel // span.shape[0]) if len(span.shape) > 1 else (1, span.numel)
