"""A bucket's elements on their device, while the ranks of a node combine them; and in which way they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_rt.torch.core import device


@dataclass(frozen=True)
class NodeWay:
    """The way of a node's contribution to its daemon, and of the result back; all ranks of the node have the same.

    Attributes:
        parts: each rank submits its part; else the leader submits all.
        gathers: each rank gets its part of the result, and they are gathered; else each gets all of it.
    """

    parts: bool
    gathers: bool

    def __str__(self) -> str:
        return "parts, gathered" if self.gathers else "parts" if self.parts else "leader"


@dataclass
class Staging:
    """A bucket's elements on their device.

    Attributes:
        dtype: the bucket's.
        values: 1-D; float32 for halves, so that sums of several are rounded once. As many as make equal parts.
        places: of the bucket's tensors, in their shapes.
        part: this rank's of the sum; all of it for a leader.
        result, result_part: memory of results, likewise, in the bucket's dtype; of the sums where that is the same.
        result_places: of the bucket's tensors, in their shapes.
        gaps: the rest of `values`, in which a result may have left something.
    """

    dtype: torch.dtype
    values: torch.Tensor
    places: list[torch.Tensor]
    part: torch.Tensor
    result: torch.Tensor
    result_part: torch.Tensor
    result_places: list[torch.Tensor]
    gaps: list[torch.Tensor]


def stage(flat: torch.Tensor, views: Sequence[torch.Tensor], like: torch.Tensor, ranks: int, way: NodeWay) -> Staging:
    """Makes the staging of a bucket, whose place in the arena is `flat` (1-D).

    Args:
        views: of its tensors, in `flat`.
        like: on the device of its gradients.
        ranks: how many combine it; 1: it is only put together.
        way: in which.
    """
    half = ranks > 1 and flat.dtype in (torch.float16, torch.bfloat16)
    exact = like.new_empty(0, dtype=torch.float32 if half else flat.dtype)
    length = -(-flat.numel() // ranks)  # of a part
    elements = length * ranks if way.parts else flat.numel()
    values = device.layer.empty([elements], exact).zero_()  # there may be padding between tensors
    offsets = [(view.data_ptr() - flat.data_ptr()) // flat.element_size() for view in views]

    def places(whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.as_strided(v.shape, v.stride(), offset) for v, offset in zip(views, offsets, strict=True)]

    part = device.layer.empty([length], exact) if way.parts else values
    result, result_part, gaps = values, part, []
    if way.gathers and half:
        rounded = like.new_empty(0, dtype=flat.dtype)
        result, result_part = device.layer.empty([elements], rounded), device.layer.empty([length], rounded)
    elif way.gathers:
        gaps = _gaps(values, [(offset, view.numel()) for view, offset in zip(views, offsets, strict=True)])
    return Staging(flat.dtype, values, places(values), part, result, result_part, places(result), gaps)


class Packed:
    """A bucket's elements together on their device, where no rank of the node combines them: one copy brings them to
    the arena, and one the result back, in place of one a tensor.

    Args:
        flat: the bucket's place in the arena (1-D).
        views: of its tensors, in `flat`.
        like: on the device of its gradients.
    """

    def __init__(self, flat: torch.Tensor, views: Sequence[torch.Tensor | None], like: torch.Tensor) -> None:
        self._flat = flat
        given = [view for view in views if view is not None]
        self._staging = stage(flat, given, like, 1, NodeWay(parts=False, gathers=True))

    def places(self) -> list[torch.Tensor]:
        """Returns where gradients go, in their shapes; between them are zeros."""
        if self._staging.gaps:
            torch._foreach_zero_(self._staging.gaps)
        return self._staging.places

    def to_arena(self) -> device.Copying:
        """Starts to copy what is there to the arena."""
        return device.layer.copy([self._flat], [self._staging.values])

    def from_arena(self) -> list[torch.Tensor]:
        """Has the result come, on the current stream. Returns the places, where it is then."""
        device.layer.copy([self._staging.values], [self._flat])
        return self._staging.places


def are_together(tensors: Sequence[torch.Tensor]) -> bool:
    """Tells whether all are on one device, which has memory of its own."""
    return len({tensor.device for tensor in tensors}) == 1 and not any(map(device.layer.is_host, tensors))


def _gaps(whole: torch.Tensor, places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Returns what lies in a 1-D tensor between places (first element, length) in it, and behind them."""
    gaps, end = [], 0
    for first, length in [*sorted(places), (whole.numel(), 0)]:
        if first > end:
            gaps.append(whole[end:first])
        end = first + length
    return gaps
