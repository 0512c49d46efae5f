"""Buckets whose gradients are selected from where they are, on a GPU: which ones, and their way to the daemon.

A node's daemon selects from the sum of its workers' gradients. Where one worker has this sum, because it is alone or
the node's gradients are combined on its GPU (`node`), it can select itself, and has the residual then. What the daemon
knows how to do with residuals (keep them through new plans, save and load them) it goes on doing: for that, residuals
are *laid down* in the daemon, and *picked up* before the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from fusion_rt import algorithms, codecs, wire
from fusion_rt.arena import Segment
from fusion_rt.client import Operation, Terms
from fusion_rt.codecs import layout_of
from fusion_rt.codecs.selecting import Selecting
from fusion_rt.codecs.worker_selection import ALIGNMENT, Shape, Tray
from fusion_rt.torch.core import device
from fusion_rt.torch.core.compressors import NoneCompressor
from fusion_rt.torch.sync.buckets import DenseBucket
from fusion_rt.torch.sync.gpu_selection import BucketSelection
from fusion_rt.torch.sync.slots import Slot, shaped

if TYPE_CHECKING:
    from fusion_rt.torch.node.reduction import NodeReduction
    from fusion_rt.torch.sync.memory import Place


class SelectedBucket(DenseBucket):
    """Of which the worker sends what it has selected itself; results come as those of any other bucket.

    Args:
        args: as for `DenseBucket`.
        all_of_plan: say whether this worker selects in this step.
        selection: its residual, and what selects from it.
        starts: the first element of each of its parameters.
        prescale: gradients are multiplied by it.
    """

    def __init__(
        self,
        *args: Any,
        all_of_plan: Selections,
        selection: BucketSelection,
        starts: Sequence[int],
        prescale: float,
    ) -> None:
        super().__init__(*args)
        self._all, self._selection = all_of_plan, selection
        self._starts, self._prescale = starts, prescale
        self._gradient: torch.Tensor | None = None  # all of them, on the device
        self._places: list[torch.Tensor] = []
        self._now: Terms | None = None  # what is said of what has been selected

    def _send(self) -> None:
        if not self._all.here or self.node is not None:
            super()._send()
            return
        _ = self._here.client.ready  # asked for first of all, because a forked child has none
        with torch.no_grad():
            gradient = self._filled()
            while self.owed:
                place, owed = self.owed.pop()
                assert self.flat is not None
                start = (place.data_ptr() - self.flat.data_ptr()) // place.element_size()
                gradient[start : start + len(owed)] += owed.to(gradient.device)
            if self._prescale != 1.0:
                gradient.mul_(self._prescale)
            self._copying = self._follow(gradient)

    def _filled(self) -> torch.Tensor:
        """This step's gradients as one, on their device."""
        if self._gradient is None:
            assert self.flat is not None
            gradient = self._gradient = device.layer.empty([len(self.flat)], self.slots[0].parameter.detach()).zero_()
            self._places = [
                shaped(gradient[start : start + slot.parameter.numel()], slot.parameter)
                for slot, start in zip(self.slots, self._starts, strict=True)
            ]
        self._stage(self._places)
        return self._gradient

    def _follow(self, values: torch.Tensor) -> device.Copying:
        if not self._all.here:
            return super()._follow(values)
        self._now = self._terms()._replace(tray=self._selection.offset)
        with torch.no_grad():
            self._selection.start(values, self._now.rescale)
        return self._selection

    def _said(self) -> Terms:
        now, self._now = self._now, None
        return super()._said() if now is None else now._replace(urgency=self.urgency, share=self._share)

    def land(self, operation: Operation) -> None:
        super().land(operation)
        self._selection.correct()

    def await_end(self, operation: Operation) -> None:
        super().await_end(operation)
        self._selection.correct()

    def abandon(self) -> None:
        if self._operation is not None:
            self.await_end(self._operation)


@dataclass(frozen=True)
class _Chosen:
    """A bucket whose worker will select: how, and from which byte of the segment on its tray lies."""

    side: Any
    layout: codecs.Layout
    shape: Shape
    offset: int


class Selections:
    """Those of one exchange's plan.

    Args:
        compressor: of the exchange; a script's own leaves nothing to select from.
        allowed: whether it is wanted at all.

    Attributes:
        buckets: that select, by index.
        here: their residuals are here, and not in the daemon; this worker selects in this step.
        led: another worker of this node does; what its daemon remembers is for that one to load.
    """

    def __init__(self, compressor: Any, allowed: bool) -> None:
        self._allowed = allowed and compressor is NoneCompressor
        self._chosen: dict[int, _Chosen] = {}
        self._plan: wire.Plan | None = None
        self._nodes = 1
        self.buckets: dict[int, BucketSelection] = {}
        self.here = self.led = False

    def choose(self, place: Place, plan: wire.Plan, slots: Mapping[str, Slot], node: NodeReduction | None) -> int:
        """Decides which buckets of a new plan are selected from by this worker. Returns the bytes of its segment.

        Args:
            node: what combines the gradients of its node, if that is not the daemon.
        """
        self.forget()
        self._plan = plan
        nodes, nbytes = place.nodes(), plan.nbytes
        codec, reduction = codecs.parse(plan.reduction.codec), plan.reduction
        self._nodes = len(nodes)
        if (
            not (self._allowed and codec.selects_in_workers)
            or not isinstance(algorithms.parse(reduction.algorithm), algorithms.AllReduce)
            or reduction.op not in ("sum", "average")
            or self._nodes == 1
            or (node is None and len(nodes[place.here.client.welcome.node]) > 1)
        ):
            return nbytes
        self.led = node is not None and not node.is_leader
        if self.led:
            return nbytes
        selecting = cast(Selecting, codec)
        for bucket in plan.buckets:
            parameters = [slots[tensor.name].parameter for tensor in bucket.tensors]
            layout = layout_of(bucket)
            if (
                bucket.dtype != "float32"
                or not selecting.rules.groups(layout)
                or len({parameter.device for parameter in parameters}) > 1
                or device.layer.is_host(parameters[0])
            ):
                continue
            side = device.layer.side(parameters[0])
            if side is not None:
                shape, offset = selecting.tray(layout), -(-nbytes // ALIGNMENT) * ALIGNMENT
                self._chosen[bucket.index] = _Chosen(side, layout, shape, offset)
                nbytes = offset + shape.nbytes
        return nbytes

    def open(self, bucket: wire.Bucket, segment: Segment, slots: Sequence[Slot]) -> Any:
        """What makes a bucket of the plan, from the arguments of `DenseBucket`: it, or `SelectedBucket`."""
        chosen = self._chosen.get(bucket.index)
        if chosen is None:
            return DenseBucket
        assert self._plan is not None
        codec = cast(Selecting, codecs.parse(self._plan.reduction.codec))
        memory = np.frombuffer(segment.view, np.uint8)[chosen.offset :]
        selection = self.buckets[bucket.index] = BucketSelection(
            chosen.side, codec, chosen.layout, Tray(chosen.shape, memory), chosen.offset, self._nodes,
            slots[0].parameter.device,
        )  # fmt: skip
        return partial(
            SelectedBucket, all_of_plan=self, selection=selection, starts=[tensor.start for tensor in bucket.tensors],
            prescale=self._plan.reduction.prescale,
        )  # fmt: skip

    # --- residuals, here or in the daemon -----------------------------------------------------------------------------

    def move(self, place: Place, here: bool) -> None:
        """Has the residuals here, or in the daemon. Raises as `Client.save_state`."""
        if here:
            self._pick_up(place)
        else:
            self.lay_down(place)

    def _pick_up(self, place: Place) -> None:
        if self.here or not self.buckets:
            return
        state = place.here.client.save_state(place.process_set, place.group)
        for index, selection in self.buckets.items():
            left = selection.take_from(_of_bucket(state, index))
            state |= {f"{index}:{key}": value for key, value in left.items()}
        self._load(place, state)
        self.here = True

    def lay_down(self, place: Place) -> None:
        """Gives the residuals to the daemon. Raises as `Client.save_state`."""
        if self.here:
            self._load(place, self.saved(place))
            self.here = False

    def saved(self, place: Place) -> dict[str, Any]:
        """What `Client.save_state` says, with what is here. Raises as that."""
        state = place.here.client.save_state(place.process_set, place.group)
        if self.here:
            for index, selection in self.buckets.items():
                found = selection.add_to(_of_bucket(state, index))
                state |= {f"{index}:{key}": value for key, value in found.items()}
        return state

    def forget(self) -> None:
        """The plan is over, and what is here with it."""
        self._plan, self._chosen, self.buckets = None, {}, {}
        self.here = self.led = False

    def _load(self, place: Place, state: Mapping[str, Any]) -> None:
        with place.here.allocating:
            place.here.client.load_state(place.process_set, place.group, state)


def _of_bucket(state: Mapping[str, Any], index: int) -> dict[str, Any]:
    prefix = f"{index}:"
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
