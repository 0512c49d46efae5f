"""The base of codecs that send some of the elements: error feedback, rules, packing, state.

Each node adds its gradient to the residual, the sum of unsent gradients, and sends a part of the sum; the rest waits
(Seide et al. 2014, Stich et al. 2018). With `momentum` it is the velocity of momentum SGD that is added (Lin et al.,
"Deep Gradient Compression": the optimizer then applies no momentum of its own).

These equations hold exactly, in float32 and element by element, with `value="fp32"` and finite numbers:

    sent + residual afterwards = residual before * decay + gradient (computed once, see `selection.Memory`)

of which one of the two on the left is zero. In the other formats the residual keeps the difference between the sum and
the values that receivers get, which float32 holds exactly (but for `int2`: it is rounded once). Values that are not
finite are never added (`summing`). Zeros are not sent, so there are fewer elements than asked for where fewer differ
from zero. A bucket of float64, float16 or bfloat16 is converted to float32 when it comes in.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fusion_rt.codecs.base import Array, CodecError, Layout
from fusion_rt.codecs.error_feedback import F32, FeedbackCodec
from fusion_rt.codecs.packing import INDEX_CODINGS, Packer, Selection, SharedIndices, Spans, merged, strongest
from fusion_rt.codecs.summing import SummingBucketCodec
from fusion_rt.codecs.tensor_rules import TensorRules, joined
from fusion_rt.codecs.values import FORMATS, format_of_whole
from fusion_rt.codecs.worker_selection import Shape, Tray, WorkerSelectedBucketCodec, is_selected_from, left
from fusion_rt.core import scratch
from fusion_rt.kernels import coding, cpu, selection
from fusion_rt.kernels.selection import NOTHING, Found, Memory
from fusion_rt.kernels.team import ALONE, Team

_MAX_ELEMENTS = 2**31 - 1  # an index has 32 bits
_MASKED_DENSITY = 0.01  # above it, clearing the velocity of sent elements has been seen to hurt
_TEAM_ELEMENTS = 1 << 20  # groups from here on are worth more than one thread


@dataclass(frozen=True)
class Selecting(FeedbackCodec):
    """Arguments of every codec that sends some of the elements.

    Args:
        density: the share of elements that is sent, above 0 and at most 1.
        value: how values are sent, "fp32", "fp16", "bf16", "int8", "int4" or "int2" (`values`).
        index: how indices are sent, "delta", "bitmap", "raw", or "auto" for the shortest (`packing`).
        scope: "bucket", the largest of a bucket, or "tensor", the largest of each tensor.
        minimum: tensors with fewer elements are sent whole.
        exclude: tensors whose name fits one of these patterns are sent whole.
        densities: other densities for some tensors, as "pattern: density, ...".
        warmup: steps in which the density falls from 25 % to its own.
        momentum: of the velocity that is added instead of the gradient; 0 for none, below 1.
        nesterov: the velocity looks ahead.
        masking: the velocity of sent elements starts again at 0 (at densities up to 1 %).
        clip: about the largest L2 norm of a bucket's result, on any number of ranks and with any loss scale; 0 for
            none. This node's share in a step, as a part of the result (of a mean: the sum of its gradients divided by
            the number of all ranks), is no longer than that divided by the square root of the number of nodes, since
            a sum of independent parts is as many times longer than one (Lin et al., section 3.2).
        feedback: unsent elements wait in the residual; without, they are lost.
        decay: of the residual, in each step; above 0 and at most 1.
    """

    selecting = True
    sends_indices: ClassVar[bool] = True
    takes_largest: ClassVar[bool] = False
    """The codec sends the largest elements, exactly or about; a kernel that finds exactly k may take its place."""

    density: float = 0.01
    value: str = "fp16"
    index: str = "auto"
    scope: str = "bucket"
    minimum: int = 16384
    exclude: str = "*bias,*norm*,*.bn*"
    densities: str = ""
    warmup: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    clip: float = 0.0
    feedback: bool = True
    decay: float = 1.0

    def __post_init__(self) -> None:
        _ = self.rules
        if self.value not in FORMATS:
            raise CodecError(f"values are sent as {', '.join(FORMATS)}, not as {self.value!r}")
        if self.index not in INDEX_CODINGS:
            raise CodecError(f"indices are sent as {', '.join(INDEX_CODINGS)}, not as {self.index!r}")
        if self.warmup < 0:
            raise CodecError(f"warmup is a number of steps from 0 on, not {self.warmup}")
        self._check_memory()
        if not 0 <= self.clip < math.inf:
            raise CodecError(f"clip is an L2 norm, or 0 for none, not {self.clip}")
        if self.index != "auto" and not self.sends_indices:
            raise CodecError(f"the codec {self.name} sends no indices, so it has no choice how; leave out index")

    def masks(self, k: int, size: int) -> bool:
        """Says whether the velocity starts again where k of so many elements are taken."""
        return self.masking and k <= max(1, _MASKED_DENSITY * size)

    @property
    def rules(self) -> TensorRules:
        return TensorRules(self.density, self.scope, self.minimum, self.exclude, self.densities)

    def share(self) -> float:
        return self.density

    def contraction(self) -> float:
        if self.clip:  # of a vector of any length, no more than that is sent
            return 0.0
        return self.rules.least_density() * FORMATS[self.value].contraction

    @property
    def selects_in_workers(self) -> bool:
        return self.takes_largest and self.decay == 1.0  # as far as kernels on GPUs know

    def tray(self, layout: Layout) -> Shape:
        """Returns the shape of a tray for a bucket."""
        groups = self.rules.groups(layout)
        rooms = tuple(max(group.k(step, self.warmup) for step in (0, self.warmup)) for group in groups)
        dense = sum(high - low for low, high in self.rules.dense(layout))
        return Shape(tuple(group.ranges for group in groups), rooms, dense, layout.elements)


class SelectingBucketCodec(WorkerSelectedBucketCodec, SummingBucketCodec):
    """One bucket's codec on one node: the residual of the whole bucket, and selections from it.

    Portions are selections. `accumulate_and_select` makes a contribution; of a sum of selections, an owner keeps its
    share of the elements that were asked for.

    Attributes:
        sparse, dense: the elements that are selected from, and those that are always sent; the rest is padding, and
            never sent. They follow from the codec and the layout, so they are the same on every node.
        step: how many times it has selected.

    Raises:
        CodecError: the bucket has more elements than an index can count, or is not of a floating type.
    """

    blank = True
    adapts = True
    codec: Selecting

    def __init__(
        self, layout: Layout, codec: Selecting, team: Team = ALONE, shared: SharedIndices | None = None
    ) -> None:
        if layout.elements > _MAX_ELEMENTS:
            raise CodecError(
                f"a bucket of {layout.elements} elements is too large for the codec {codec.name}, which counts them "
                f"with 32 bits; make the fusion threshold smaller"
            )
        super().__init__(layout, codec, team, codec.momentum > 0)
        self._groups = codec.rules.groups(layout)
        self.sparse = Spans(joined(sorted(r for group in self._groups for r in group.ranges)))
        self.dense = Spans(codec.rules.dense(layout))
        self.always = self.dense.ranges
        self._format, self._whole = FORMATS[codec.value], FORMATS[format_of_whole(codec.value)]
        self._packer = Packer(self.sparse, self.dense, codec.value, codec.index, shared)
        self._asked = self._selected = self._always = self._wanted = 0
        self._factor = 1.0  # of the last gradient: after clipping, without the loss scale
        self._masked: tuple[Array, Array] = np.empty(0, np.int32), np.empty(0, np.float32)  # velocities that it cleared
        coding.prepare()
        self._format.prepare()
        self._whole.prepare()

    @property
    def encoded_elements(self) -> int:
        return self.sparse.size

    def contractions(self) -> list[tuple[int, int, float]]:
        found = [(low, high, 1.0) for low, high in self.dense.ranges]
        for group in self._groups:
            density = sum(numel * density for numel, density in group.shares) / group.size
            share = 0.0 if self.codec.clip else density * self._format.contraction
            found += [(low, high, share) for low, high in group.ranges]
        return sorted(found)

    # What a step is made of.

    def accumulate_and_select(self, values: Array) -> Selection:
        """Adds a gradient to the residual, and takes the selection from it.

        Args:
            values: all elements of the bucket, 1-D, contiguous, of its storage dtype; left as they are. Padding may be
                anything.

        Returns: the selection, with the values as receivers will have them.
        """
        began = time.perf_counter()
        self._check_whole(values)
        self.take_back()
        gradient = self._widened(values)
        self._factor = self._clip_factor(gradient) / self.loss_scale
        memory = self._memory(gradient)
        ks = self._ks()
        parts = self._select_groups(memory, ks)
        selection.collect(memory, self.dense.ranges, NOTHING, Found(0))
        self.spoiled = memory.spoiled
        self._mask(parts, ks)
        indices, wanted = parts[0] if len(parts) == 1 else _one_after_the_other(parts)
        sent = self._format.rounded(wanted)
        if sent is not wanted:
            selection.put(indices, left(wanted, sent), self._residual, team=self._team)
        always = self.dense.gather(self._residual, 0, self.layout.elements)
        sent_always = self._whole.rounded(always)
        self.dense.scatter(left(always, sent_always), 0, self._residual)
        selected = Selection(0, self.layout.elements, indices, sent, sent_always, self.step)
        self._lose_rest()
        self._count_step(selected, ks, began)
        return selected

    def undo(self, portion: Selection, values: Array) -> None:
        self.reclaim(portion)
        if self.corrections is not None:
            return  # the worker takes the gradient out of its residual
        if self._velocity is not None:
            indices, velocities = self._masked
            selection.put(indices, velocities, self._velocity)
        selection.withdraw(self._memory(self._widened(values)), self._ranges)
        self._lose_rest()

    def missing(self) -> Selection:
        first = np.array([group.ranges[0][0] for group in self._groups], np.int32)
        values, always = np.full(len(first), np.nan, np.float32), np.full(self.dense.size, np.nan, np.float32)
        return Selection(0, self.layout.elements, first, values, always, self.step - 1)

    def adopt(self, tray: Tray) -> Selection:
        began, ks = time.perf_counter(), self._ks()
        given = self._given(tray)
        self.spoiled = tray.spoiled
        sent, rest = self.rounded(given)
        self.reclaim(rest)
        self._count_step(sent, ks, began)
        return sent

    def disown(self, tray: Tray) -> None:
        self.reclaim(self._given(tray))

    def tray(self) -> Shape:
        if not (self.codec.sends_indices and is_selected_from(self.layout.dtype)):
            raise CodecError(f"workers cannot select for the codec {self.codec} in a bucket of {self.layout.dtype}")
        return self.codec.tray(self.layout)

    def _count_step(self, selected: Selection, ks: Sequence[int], began: float) -> None:
        self.step += 1
        self._wanted = sum(ks)
        self._asked += self._wanted
        self._selected += len(selected.indices)
        self._always += len(selected.dense)
        self._seconds += time.perf_counter() - began

    def pack(self, selected: Selection, low: int, high: int) -> memoryview:
        """Packs the part of a selection in [low, high), into at most `max_encoded_nbytes(high - low)` bytes.

        The selection's values are as `accumulate_and_select` or `rounded` give them.
        """
        return self._packer.pack(selected, low, high)

    def unpack(self, payload: memoryview | bytes, low: int, high: int) -> Selection:
        """Reads the payload that a node packed for the range [low, high). Changes nothing, and may be called by several
        threads.

        Raises:
            CodecError: this is no selection of that range. No more memory was taken than the range has elements.
        """
        return self._packer.unpack(payload, low, high)

    def rounded(self, selected: Selection) -> tuple[Selection, Selection]:
        """A selection whose values are sums, as receivers will have it, and its rounding errors."""
        low, high, indices, step = selected.low, selected.high, selected.indices, selected.step
        values, dense = self._format.rounded(selected.values), self._whole.rounded(selected.dense)
        rest = left(selected.values, values), left(selected.dense, dense)
        return Selection(low, high, indices, values, dense, step), Selection(low, high, indices, *rest, step)

    def expand(self, selected: Selection, out: Array) -> None:
        """Writes a selection as an array of all elements of its range, of the bucket's storage dtype."""
        wide = out if self.layout.dtype == F32 else scratch.empty(selected.high - selected.low, np.float32)
        wide[:] = 0
        selection.put(selected.indices, selected.values, wide, selected.low)
        within = Spans(
            [(a - selected.low, b - selected.low) for a, b in self.dense.within(selected.low, selected.high)]
        )
        within.scatter(selected.dense, 0, wide)
        if wide is not out:
            cpu.convert(wide, F32, out, self.layout.dtype)

    # As a part of an exchange in which owners sum.

    def contribute(self, values: Array) -> Selection:
        return self.accumulate_and_select(values)

    def add(self, first: Selection, second: Selection) -> Selection:
        return merged([first, second])

    def conclude(self, total: Selection, nodes: int) -> Selection:
        """Keeps the largest, as many as this node's share of the number asked for."""
        kept, rest = strongest(total, -(-self._wanted // nodes))
        sent, cut = self.rounded(kept)
        self.reclaim(rest)
        self.reclaim(cut)
        return sent

    def revoke(self, total: Selection, sent: Selection) -> None:
        self.reclaim(replace(total, values=-total.values, dense=-total.dense))
        self.reclaim(sent)

    def write(self, selected: Selection, outputs: Sequence[Array], scale: float, divisor: int) -> None:
        values, dense = selected.values, selected.dense
        if scale != 1.0 or divisor != 1:
            factor = np.float32(scale)
            values, dense = (np.divide(part * factor, np.float32(divisor)) for part in (values, dense))
        if self.layout.dtype != F32:
            values, dense = (self._as_stored(part) for part in (values, dense))
        for output in outputs:
            if self.layout.dtype == F32:
                selection.put(selected.indices, values, output)
            else:
                output[selected.indices] = values
            self.dense.scatter(dense, selected.low, output[selected.low : selected.high])

    def reclaim(self, selected: Selection) -> None:
        if self.codec.feedback:
            finite = np.isfinite(selected.values)  # sums of finite values need not be
            self.give_back_selection(replace(selected, values=np.where(finite, selected.values, np.float32(0))))

    def wanted(self) -> int:
        return sum(self._ks()) + self.dense.size

    def scratch_nbytes(self, nodes: int) -> int:
        """See `BucketCodec`. A value and its index take 8 bytes: in this node's selection, in its payloads, in the sum
        and its parts, and in the selections of all nodes where these are gathered."""
        return 8 * self.wanted() * (4 + nodes)

    def counts(self, selected: Selection, edges: Sequence[int]) -> list[int]:
        places = np.searchsorted(selected.indices, np.array(edges, np.int32))
        return [int(count) for count in np.diff(places)]

    def weights(self) -> list[tuple[int, int, float]]:
        density = self._wanted / max(1, self.sparse.size)
        ranges = [(*r, density) for r in self.sparse.ranges] + [(*r, 1.0) for r in self.dense.ranges]
        return sorted(ranges)

    # What comes back.

    @np.errstate(over="ignore", invalid="ignore")
    def give_back_selection(self, selected: Selection) -> None:
        """Adds a selection, or the rest of one, to the residual."""
        if self.corrections is not None:
            self.corrections.add(selected.indices, selected.values)
            if selected.dense.any():
                self.corrections.add(self.dense.all_indices(selected.low, selected.high), selected.dense)
            return
        selection.put(selected.indices, selected.values, self._residual, add=True)
        done = 0
        for low, high in self.dense.within(selected.low, selected.high):
            self._residual[low:high] += selected.dense[done : done + high - low]
            done += high - low

    def statistics(self) -> dict[str, float]:
        """Also how many elements were `asked` for, `selected`, and sent `always`."""
        found = {"asked": self._asked, "selected": self._selected, "always": self._always}
        return {**super().statistics(), **found}

    # As a codec that is not asked for selections.

    def decode(self, start: int, payload: memoryview | bytes, out: Array) -> None:
        self.expand(self.unpack(payload, start, start + len(out)), out)

    def max_encoded_nbytes(self, n: int) -> int:
        return self._packer.max_nbytes(n)

    def _ks(self) -> list[int]:
        """The number of elements of each group that the next step is to send."""
        return [group.k(self.step, self.codec.warmup) for group in self._groups]

    # For subclasses.

    @abstractmethod
    def _select(self, memory: Memory, group: int, k: int, team: Team) -> tuple[Array, Array]:
        """Adds to the elements of a group, and takes k of them out: indices and values, ascending."""

    def _memory(self, gradient: Array) -> Memory:
        """Returns the array that a gradient is added to."""
        codec = self.codec
        return Memory(
            self._residual, gradient, self._velocity, codec.momentum, codec.nesterov, self._factor, codec.decay
        )

    def _mask(self, parts: Sequence[tuple[Array, Array]], ks: Sequence[int]) -> None:
        """The velocity of selected elements starts again, where it should; it is kept until the step cannot be undone
        any more."""
        if self._velocity is None:
            return
        masked = [
            indices
            for (indices, _), k, group in zip(parts, ks, self._groups, strict=True)
            if self.codec.masks(k, group.size)
        ]
        chosen = np.concatenate([np.empty(0, np.int32), *masked])
        self._masked = chosen, self._velocity[chosen]
        selection.put(chosen, np.zeros(len(chosen), np.float32), self._velocity)

    def _select_groups(self, memory: Memory, ks: Sequence[int]) -> list[tuple[Array, Array]]:
        """One after the other. Small ones take microseconds in kernels, and threads would wait for the GIL between them
        more than they gain: two took twice as long as one."""
        return [
            self._select(memory, number, k, self._team if group.size >= _TEAM_ELEMENTS else ALONE)
            for number, (group, k) in enumerate(zip(self._groups, ks, strict=True))
        ]

    def _clip_factor(self, gradient: Array) -> float:
        if not self.codec.clip:
            return 1.0
        norm = math.sqrt(selection.moments(gradient, self._ranges, self._team)[1]) * self.weight / self.loss_scale
        bound = self.codec.clip / math.sqrt(self.nodes)
        return bound / norm if bound < norm < math.inf else 1.0


def _one_after_the_other(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    indices = np.concatenate([np.empty(0, np.int32), *(part[0] for part in parts)])
    return indices, np.concatenate([np.empty(0, np.float32), *(part[1] for part in parts)])
