"""Error feedback, which stateful codecs share: the residual of a bucket on one node, and how it is saved and moved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from fusion_rt.codecs.base import Array, BucketCodec, Codec, CodecError, Layout
from fusion_rt.codecs.tensor_rules import joined
from fusion_rt.core import scratch
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import cpu, selection
from fusion_rt.kernels.selection import Range
from fusion_rt.kernels.team import ALONE, Team

F32 = DTYPES["float32"]

NODE_TENSORS = ("residual", "velocity")
"""Kinds of a state's entries that are one node's alone, float32, for each tensor: `KIND/NAME`."""

NODE_STATE = (*NODE_TENSORS, "thresholds")
"""All kinds and names of entries that are one node's alone. All others are the same on all nodes, and have to be."""


class FeedbackCodec(Codec):
    """A codec whose buckets keep a residual. Those with a field `momentum` keep a velocity, too. With a
    field `decay`, the residual is multiplied by that before a gradient is added."""

    def applies_to(self, dtype: DType) -> bool:
        return dtype.is_floating

    def memory(self) -> float:
        return 2.0 if self.has_momentum() else 1.0

    def has_momentum(self) -> bool:
        return getattr(self, "momentum", 0.0) > 0

    def without_memory(self) -> Codec:
        forgetful = {"feedback": False, "momentum": 0.0, "nesterov": False, "clip": 0.0}
        return dataclasses.replace(self, **{name: value for name, value in forgetful.items() if hasattr(self, name)})

    def _check_memory(self) -> None:
        """Raises `CodecError` for a decay or a momentum that is none."""
        decay, momentum = getattr(self, "decay", 1.0), getattr(self, "momentum", 0.0)
        if not 0 < decay <= 1:
            raise CodecError(
                f"the decay of the codec {self.name} is the share of the residual that a step keeps, above 0 and at "
                f"most 1, not {decay}"
            )
        if not 0 <= momentum < 1:
            raise CodecError(f"the momentum of the codec {self.name} is from 0 to below 1, not {momentum}")
        if getattr(self, "nesterov", False) and not momentum:
            raise CodecError(f"nesterov needs a momentum; write {self.name}(momentum=0.9, nesterov=True)")


class FeedbackBucketCodec(BucketCodec):
    """Keeps, in float32, the gradients that a node has not sent yet, without their loss scale.

    Args:
        velocity: whether it keeps a velocity too, for momentum correction.

    Raises:
        CodecError: the bucket is not of a floating type.
    """

    def __init__(self, layout: Layout, codec: Codec, team: Team = ALONE, velocity: bool = False) -> None:
        super().__init__(layout, codec, team)
        if not codec.applies_to(layout.dtype):
            raise CodecError(f"the codec {codec.name} is for floating types, not for {layout.dtype}")
        self._keeps = getattr(codec, "feedback", True)
        self._unsent: Array | None = np.zeros(layout.elements, np.float32) if self._keeps else None
        self._velocity: Array | None = np.zeros(layout.elements, np.float32) if velocity else None
        self._ranges: tuple[Range, ...] = joined([(s.start, s.end) for s in layout.spans if s.numel])
        self._seconds = 0.0  # that contributions took
        self._before: list[Array] = []  # the memories as the step began
        selection.prepare()
        if layout.dtype != F32:
            cpu.prepare([], [(layout.dtype, F32), (F32, layout.dtype)])

    @property
    def _residual(self) -> Array:
        """The residual; of a codec without feedback, zeros in scratch memory until the end of a step."""
        unsent = self._unsent
        if unsent is None:
            unsent = self._unsent = scratch.zeros(self.layout.elements, np.float32)
        return unsent

    @_residual.setter
    def _residual(self, values: Array) -> None:
        self._unsent = values

    def _lose_rest(self) -> None:
        """Without feedback, the rest of a step is lost."""
        if not self._keeps:
            self._unsent = None

    @np.errstate(over="ignore", invalid="ignore")
    def give_back(self, start: int, values: Array) -> None:
        """Adds elements of the bucket, from element `start` on, to the residual: they were not used after all.

        Args:
            values: 1-D, contiguous, of the bucket's storage dtype, or float32.
        """
        if values.dtype != np.float32:
            values = self._as_float32(values)
        self._residual[start : start + len(values)] += values

    @np.errstate(over="ignore", invalid="ignore")
    def scale_residual(self, factors: Sequence[float]) -> None:
        """See `BucketCodec`. The velocity stays, as that of the optimizers does."""
        for span, factor in zip(self.layout.spans, factors, strict=True):
            if factor != 1.0:
                self._residual[span.start : span.end] *= np.float32(factor)

    def keep(self) -> None:
        self.go_back = None
        if self.keeps_before:
            memories = [memory for _, memory in self._memories()]
            self._before = self._before or [np.empty_like(memory) for memory in memories]
            for before, memory in zip(self._before, memories, strict=True):
                np.copyto(before, memory)
            self.go_back = partial(self._go_back, self.step, self._own_state())

    def _go_back(self, step: int, own: Mapping[str, Array]) -> None:
        for before, (_, memory) in zip(self._before, self._memories(), strict=True):
            np.copyto(memory, before)
        self.step = step
        self._load_own_state(own, partial=False)

    def statistics(self) -> dict[str, float]:
        """Also the number of `steps`, and the `seconds` spent on contributions."""
        return {"steps": self.step, **super().statistics(), "seconds": self._seconds}

    def residual_norm(self) -> float:
        """The L2 norm of the residual, without padding."""
        return math.sqrt(selection.moments(self._residual, self._ranges, self._team)[1])

    def state_dict(self, copies: bool = True) -> dict[str, Array]:
        """The residual of each tensor as `residual/NAME`, the velocity as `velocity/NAME`, and the `step`.

        Names of tensors are all it depends on, so the states of several buckets can be united, to be taken over by the
        buckets of another plan with `partial`.
        """
        state = {"step": np.array(self.step, np.int64)}
        for kind, memory in self._memories():
            parts = {f"{kind}/{span.name}": memory[span.start : span.end] for span in self.layout.spans}
            state |= {name: part.copy() for name, part in parts.items()} if copies else parts
        return state | self._own_state()

    def load_state_dict(self, state: Mapping[str, Array], partial: bool = False) -> None:
        """Continues from a `state_dict`.

        Args:
            partial: `state` is of other buckets: its tensors that this bucket has are used, those that it lacks start
                at zero, and the rest is ignored. So a new plan takes over the tensors of an old one.

        Raises:
            CodecError: without `partial`, the state has not exactly this bucket's tensors; or a tensor has another
                size. Then nothing has changed.
        """
        places = {
            f"{kind}/{s.name}": memory[s.start : s.end] for kind, memory in self._memories() for s in self.layout.spans
        }
        own = self._own_state()
        expected = {"step", *places, *own}
        if not partial and state.keys() != expected:
            odd = ", ".join(sorted(state.keys() ^ expected))
            raise CodecError(
                f"the saved state is not of this bucket with the codec {self.codec}: {odd} is in one of them only; "
                f"use the codec and the model that the checkpoint was written with"
            )
        for key, place in (places | {key: value for key, value in own.items() if "/" in key}).items():
            if key in state and state[key].shape != place.shape:
                raise CodecError(f"{key} has shape {state[key].shape} in the saved state, and {place.shape} here")
        for key, place in places.items():
            place[:] = np.nan_to_num(state.get(key, 0), posinf=0, neginf=0)  # as earlier versions could leave behind
        self.step = int(state.get("step", 0))
        self._load_own_state(state, partial)

    # For subclasses.

    def _own_state(self) -> dict[str, Array]:
        """Returns the memory of a subclass: `KIND/NAME` of a tensor, or a name with no `/` in it of the bucket;
        copies."""
        return {}

    def _load_own_state(self, state: Mapping[str, Array], partial: bool) -> None:
        """Continues from a state; anew where that lacks entries of `_own_state`, or has them of another bucket."""

    def _check_whole(self, values: Array) -> None:
        """Raises `ValueError` unless these can be all elements of the bucket."""
        if values.shape != (self.layout.elements,) or values.dtype != self.layout.dtype.storage:
            raise ValueError(f"{values.dtype} {values.shape} is not a whole bucket of {self.layout.elements} elements")

    def _check_range(self, start: int, values: Array) -> None:
        """Raises `ValueError` unless these can be elements of the bucket from element `start` on."""
        storage, elements = self.layout.dtype.storage, self.layout.elements
        if values.ndim != 1 or values.dtype != storage or not 0 <= start <= start + len(values) <= elements:
            raise ValueError(
                f"{values.dtype} {values.shape} from element {start} on is no part of a bucket of {elements} elements "
                f"of {storage}"
            )

    def _memories(self) -> list[tuple[str, Array]]:
        memories = [("residual", self._residual)]
        return memories if self._velocity is None else [*memories, ("velocity", self._velocity)]

    def _as_float32(self, values: Array) -> Array:
        """Returns a gradient in the form of the residual: float32, without the loss scale."""
        wide = self._widened(values)
        return wide if self.loss_scale == 1.0 else wide * np.float32(1 / self.loss_scale)

    def _widened(self, values: Array) -> Array:
        """Returns an array of the residual's form as float32 with the loss scale."""
        return cpu.converted(values, self.layout.dtype, F32)

    def _as_stored(self, values: Array) -> Array:
        """The opposite of `_widened`."""
        return cpu.converted(values, F32, self.layout.dtype)
