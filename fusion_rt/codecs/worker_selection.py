"""Selection by a worker, on a GPU, in place of its daemon: its selection from a bucket lies in a *tray*, memory
that both share, and so do the daemon's corrections.

The residual is the worker's then. Values that it takes out of that and the daemon does not send, because values are
rounded or an owner cuts a sum, comes back as *corrections*, which the worker adds to its residual before it selects
again. So the sum of all residuals, corrections and results is the sum of all gradients, as it is where the daemon
selects. Should the daemon have to select in between, or be asked for its state, corrections become a residual there.

A tray is words (int32, or float32 where they are values), one part after the other:

* how many corrections there are; a word that the worker sets to `SPOILED` where its gradient could not be added to
  elements that are always sent, and the daemon to `UNDONE` where some node's gradient was not finite: then the worker
  takes its own out of its residual again, after the corrections, which have all that was selected; and the number of
  steps that the codec has taken (int64);
* for each group of elements that are compared with each other: how many are selected, two words that the daemon does
  not read, whether there are elements to which the gradient could not be added (0 or 1), indices (ascending, as many
  as there is room for), and values;
* the values of the elements that are always sent;
* indices and values of the corrections.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fusion_rt.codecs.base import Array, CodecError, Span
from fusion_rt.codecs.error_feedback import FeedbackBucketCodec
from fusion_rt.codecs.packing import Selection, Spans
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import selection

HEADER = 4
"""Words before the indices of a group, and before everything."""

SPOILED, UNDONE = 1, 2

ALIGNMENT = 64  # bytes; trays begin at a multiple
_WORD = 4
_SPOILED_WORD = 3  # of a group
_SPARE = 64  # corrections for which there is room besides


def is_selected_from(dtype: DType) -> bool:
    """Says whether workers select from buckets of this element type: float32, or a type that becomes it exactly."""
    return dtype.is_half or dtype is DTYPES["float32"]


@dataclass(frozen=True)
class Shape:
    """The room in a tray, which follows from the codec and the layout.

    Attributes:
        groups: the ranges of elements of each group.
        rooms: the most that can be selected of each group.
        dense: elements that are always sent.
        elements: of the bucket.
    """

    groups: tuple[tuple[selection.Range, ...], ...]
    rooms: tuple[int, ...]
    dense: int
    elements: int

    @property
    def corrections(self) -> int:
        """The number of corrections for which there is room: those of elements selected here, and elements that an
        owner cuts off all nodes' sum, which is about as many. The rest comes with the next ones."""
        return min(self.elements, 4 * sum(self.rooms) + self.dense + _SPARE)

    @property
    def starts(self) -> tuple[int, ...]:
        """The words at which each group begins, then the values that are always sent, the corrections' indices, and
        their values, and the end; in words."""
        starts = [HEADER]
        for size in (*(HEADER + 2 * room for room in self.rooms), self.dense, self.corrections, self.corrections):
            starts.append(starts[-1] + size)
        return tuple(starts)

    @property
    def nbytes(self) -> int:
        return self.starts[-1] * _WORD


class Tray:
    """One bucket's.

    Args:
        shape: the numbers of elements that it has room for.
        memory: its bytes (uint8), at least `shape.nbytes`, which begin at a multiple of `ALIGNMENT`.

    Attributes:
        groups: the words of each group.
        all_groups: those of all, one after the other.
        dense: the values that are always sent, float32.
        verdict: `SPOILED`, `UNDONE` or neither; one int32.
    """

    def __init__(self, shape: Shape, memory: Array) -> None:
        self.shape = shape
        words = memory[: shape.nbytes].view(np.int32)
        parts = [words[first:end] for first, end in pairwise(shape.starts)]
        *self.groups, dense, self._indices, values = parts
        self.all_groups = words[HEADER : shape.starts[len(self.groups)]]
        self.dense: Array = dense.view(np.float32)
        self._values: Array = values.view(np.float32)
        self._count, self.verdict = words[:1], words[1:2]
        self._step = words[2:4].view(np.int64)

    def clear(self) -> None:
        """There are no corrections."""
        self._count[0] = self.verdict[0] = 0

    @property
    def spoiled(self) -> bool:
        """Says whether the worker has found its gradient not to be finite."""
        return int(self.verdict[0]) == SPOILED or any(words[_SPOILED_WORD] for words in self.groups)

    def selected(self) -> tuple[Array, Array, Array]:
        """Returns the worker's selection: indices, values, and the values that are always sent; copies.

        Raises:
            CodecError: it is no selection of this bucket.
        """
        indices, values = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
        for number, (words, ranges, room) in enumerate(
            zip(self.groups, self.shape.groups, self.shape.rooms, strict=True)
        ):
            count = int(words[0])
            if not 0 <= count <= room:
                raise CodecError(f"group {number} has {count} elements, with room for {room}")
            chosen = words[HEADER : HEADER + count].copy()  # before it is checked: nobody can change it then
            if count and not (bool((np.diff(chosen) > 0).all()) and Spans(ranges).hold(chosen)):
                raise CodecError(f"the {count} indices of group {number} are not ascending elements of it")
            indices.append(chosen)
            values.append(words[HEADER + room : HEADER + room + count].view(np.float32).copy())
        return np.concatenate(indices), np.concatenate(values), self.dense.copy()

    def answer(self, indices: Array, values: Array, step: int, undone: bool) -> None:
        """Puts corrections in, for which there is room."""
        self.verdict[0] = UNDONE if undone else 0
        self._indices[: len(indices)] = indices
        self._values[: len(values)] = values
        self._step[0] = step
        self._count[0] = len(indices)

    def answered(self) -> tuple[Array, Array, int, bool]:
        """The corrections' indices (int32) and values (float32), views of the tray; the number of steps; and whether
        the last one is undone."""
        count = int(self._count[0])
        return self._indices[:count], self._values[:count], int(self._step[0]), int(self.verdict[0]) == UNDONE


class Corrections:
    """Elements that have to be added to a residual elsewhere: few elements, added up in the order in which they
    come."""

    def __init__(self) -> None:
        self._pair: tuple[Array, Array] = np.empty(0, np.int32), np.empty(0, np.float32)

    @classmethod
    def of(cls, residual: Array) -> Corrections:
        """All of a residual (float32), which becomes zero."""
        made = cls()
        indices = np.flatnonzero(residual).astype(np.int32)
        made.add(indices, residual[indices])
        residual[indices] = 0
        return made

    def add(self, indices: Array, values: Array) -> None:
        """Ascending indices (int32) and values (float32)."""
        kept = values != 0
        self._pair = selection.merge(self._pair, (indices[kept], np.ascontiguousarray(values[kept])))

    def scale(self, spans: Sequence[Span], factors: Sequence[float]) -> None:
        """Multiplies those of each tensor by its factor."""
        indices, values = self._pair[0], self._pair[1].copy()
        for span, factor in zip(spans, factors, strict=True):
            first, end = np.searchsorted(indices, np.array([span.start, span.end], np.int32))
            values[first:end] *= np.float32(factor)
        self._pair = indices, values

    def take(self, most: int) -> tuple[Array, Array]:
        """The first ones, which are no longer here; at most so many."""
        indices, values = self._pair
        self._pair = indices[most:], values[most:]
        return indices[:most], values[:most]

    def norm(self) -> float:
        """The L2 norm."""
        return float(np.linalg.norm(self._pair[1].astype(np.float64)))


class WorkerSelectedBucketCodec(FeedbackBucketCodec):
    """A bucket's codec whose residual may be a worker's.

    Attributes:
        corrections: for the worker; None while the residual is here.
    """

    corrections: Corrections | None = None

    @abstractmethod
    def adopt(self, tray: Tray) -> Selection:
        """Contributes a worker's selection, in place of its gradient.

        Raises:
            CodecError: it is no selection of this bucket; nothing has changed.
        """

    @abstractmethod
    def disown(self, tray: Tray) -> None:
        """Gives back a worker's selection, for a step that did not begin. Raises as `adopt`."""

    def correct(self, tray: Tray, undone: bool) -> None:
        """Tells the worker the corrections of its residual, and whether the step is undone."""
        if self.corrections is not None:
            tray.answer(*self.corrections.take(tray.shape.corrections), self.step, undone)

    def take_back(self) -> None:
        """Makes corrections the residual again, which is here from now on."""
        if self.corrections is not None:
            selection.put(*self.corrections.take(self.layout.elements), self._residual, add=True)
            self.corrections = None

    def keep(self) -> None:
        self.take_back()
        super().keep()

    def scale_residual(self, factors: Sequence[float]) -> None:
        if self.corrections is None:
            super().scale_residual(factors)
        else:
            self.corrections.scale(self.layout.spans, factors)

    def residual_norm(self) -> float:
        """The L2 norm of the residual, without padding; of the part that is here."""
        return super().residual_norm() if self.corrections is None else self.corrections.norm()

    def state_dict(self, copies: bool = True) -> dict[str, Array]:
        self.take_back()
        return super().state_dict(copies)

    def load_state_dict(self, state: Mapping[str, Array], partial: bool = False) -> None:
        self.take_back()
        super().load_state_dict(state, partial)

    def _given(self, tray: Tray) -> Selection:
        """Returns a worker's selection; from now on the residual is the worker's. Raises `CodecError`."""
        indices, values, always = tray.selected()
        if self.corrections is None:
            self.corrections = Corrections.of(self._residual)
        return Selection(0, self.layout.elements, indices, values, always, self.step)


def left(wanted: Array, sent: Array) -> Array:
    """Returns the unsent parts of some values: all of a value whose payload is not finite; zeros where it is not finite
    itself."""
    with np.errstate(invalid="ignore"):
        rest: Array = np.where(np.isfinite(sent), wanted - sent, wanted)
    rest[~np.isfinite(wanted)] = 0
    return rest
