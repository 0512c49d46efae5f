"""Selection from gradients where they are, on a GPU: from which buckets, and the way of what is selected to the daemon.

A node's daemon selects from the sum of its workers' gradients. Where one worker has this sum, because it is alone or
the node's gradients are combined on its GPU (`node`), it can select itself, and has the residual then. What the daemon
knows how to do with residuals (keep them through new plans, save and load them) it goes on doing: for that, residuals
move to the daemon (`lay_down`), and back before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from msgspec.structs import replace

from fusion_rt import algorithms, codecs, wire
from fusion_rt.codecs import layout_of
from fusion_rt.codecs.selecting import Selecting
from fusion_rt.codecs.worker_selection import ALIGNMENT, Shape, Tray, is_selected_from
from fusion_rt.core.dtypes import DType
from fusion_rt.host.arena import Segment
from fusion_rt.torch.core import device
from fusion_rt.torch.node.reduction import NodeReduction
from fusion_rt.torch.sync.gpu_selection import BucketSelection
from fusion_rt.torch.sync.options import Where
from fusion_rt.torch.sync.slots import Slot, shaped


class BucketSelector:
    """Selects from one bucket's gradients where they are; results come as those of any other bucket.

    Args:
        selections: say whether this worker selects in this step.
        memory: its residual, and what selects from it.
        starts: the first element of each of its parameters.
        prescale: gradients are multiplied by it.
        headroom: the sum of the node's ranks is divided by it; see `codecs.averages`.
    """

    def __init__(
        self,
        selections: Selections,
        memory: BucketSelection,
        starts: Sequence[int],
        prescale: float,
        headroom: float,
    ) -> None:
        self._selections, self._memory = selections, memory
        self._starts, self._prescale, self._headroom = starts, prescale, headroom
        self._gradient: torch.Tensor | None = None  # all of them, on the device
        self._places: list[torch.Tensor] = []
        self._now: wire.Ready | None = None  # what is said of what has been selected

    @property
    def here(self) -> bool:
        """True if this worker selects in this step."""
        return self._selections.here

    def places(self, flat: torch.Tensor, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """Returns the tensors into which gradients are put, on their device.

        Args:
            flat: the bucket's place in the arena (1-D).
            slots: of the bucket.
        """
        if self._gradient is None:
            like = slots[0].parameter.detach().float()  # halves are selected from as float32, as daemons do
            self._gradient = device.layer.empty([len(flat)], like).zero_()
            self._places = [
                shaped(self._gradient[start : start + slot.parameter.numel()], slot.parameter, slot.order)
                for slot, start in zip(slots, self._starts, strict=True)
            ]
        return self._places

    def start(self, add_owed: Callable[[torch.Tensor], None], terms: wire.Ready) -> device.Copying:
        """Queues a step with what has been put there, and what is owed."""
        assert self._gradient is not None
        add_owed(self._gradient)
        if self._prescale != 1.0:
            self._gradient.mul_(self._prescale)
        return self._queue(self._gradient, terms, terms.loss_scale)

    def follow(self, values: torch.Tensor, terms: wire.Ready) -> device.Copying:
        """Queues a step with the sum of the node's ranks (1-D), which have scaled it."""
        return self._queue(values, terms, terms.loss_scale / self._headroom)

    def _queue(self, values: torch.Tensor, terms: wire.Ready, loss_scale: float) -> device.Copying:
        self._now = replace(terms, tray=self._memory.offset)
        with torch.no_grad():
            self._memory.start(values, terms.rescale, loss_scale)
        return self._memory

    def terms(self) -> wire.Ready | None:
        """Returns the terms of the last selection, once; None if there is none."""
        now, self._now = self._now, None
        return now

    def correct(self) -> None:
        """Ends the step; see `BucketSelection.correct`."""
        self._memory.correct()

    def withdraw(self, node: NodeReduction, why: str) -> None:
        """Takes back the step that was queued, if one was, before it is announced; see `BucketSelection.withdraw`.

        Args:
            node: the reduction that has failed.
            why: the reason.
        """
        if self.terms() is not None:
            node.give_up(why)  # or the selection might wait for the rest of it, on the device
            self._memory.withdraw()


@dataclass(frozen=True)
class _Chosen:
    """A bucket whose worker will select: how, and from which byte of the segment on its tray lies."""

    side: Any
    layout: codecs.Layout
    shape: Shape
    offset: int


class Selections:
    """Selections from the buckets of one plan.

    Args:
        compressor: a script's own, which leaves nothing to select from; or None.
        allowed: workers may select at all.

    Attributes:
        buckets: that select, by index.
        here: their residuals are here, and not in the daemon; this worker selects in this step.
        led: another worker of this node does; what its daemon remembers is for that one to load.
    """

    def __init__(self, compressor: Any, allowed: bool) -> None:
        self._allowed = allowed and compressor is None
        self._chosen: dict[int, _Chosen] = {}
        self._plan: wire.Plan | None = None
        self._nodes, self._weight = 1, 1.0
        self._headroom: Callable[[DType], float] = lambda dtype: 1.0
        self.buckets: dict[int, BucketSelection] = {}
        self.here = self.led = False

    def may_select(self, plan: wire.Plan, parameters: Sequence[torch.Tensor]) -> bool:
        """Tells whether a worker may select from gradients of a plan, as far as all ranks alike can tell."""
        selects = self._allowed and codecs.parse(plan.reduction.codec).selects_in_workers
        return selects and not all(device.layer.is_host(parameter) for parameter in parameters)

    def choose(self, place: Where, plan: wire.Plan, slots: Mapping[str, Slot], node: NodeReduction | None) -> int:
        """Decides which buckets of a new plan are selected from by this worker. Returns the bytes of its segment.

        Args:
            node: the reduction within its node; None if the daemon combines gradients.
        """
        self.forget()
        self._plan = plan
        nodes, nbytes = place.nodes(), plan.nbytes
        codec, reduction = codecs.parse(plan.reduction.codec), plan.reduction
        self._nodes, self._weight = len(nodes), reduction.weight(sum(map(len, nodes.values())))
        if node is not None:
            self._headroom = node.headroom
        if (
            not (self._allowed and codec.selects_in_workers)
            or not algorithms.parse(reduction.algorithm).sums_gradients
            or reduction.op not in ("sum", "average")
            or self._nodes == 1
            or (node is None and len(nodes[place.here.client.welcome.node]) > 1)
        ):
            return nbytes
        if node is not None and (node.way.parts or not node.is_leader):
            self.led = not node.way.parts
            return nbytes
        selecting = cast(Selecting, codec)
        for bucket in plan.buckets:
            parameters = [slots[tensor.name].parameter for tensor in bucket.tensors]
            layout = layout_of(bucket)
            if (
                not is_selected_from(layout.dtype)
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

    def selector(self, bucket: wire.Bucket, segment: Segment, slots: Sequence[Slot]) -> BucketSelector | None:
        """Makes the selector of a bucket of the plan; None if the daemon selects."""
        chosen = self._chosen.get(bucket.index)
        if chosen is None:
            return None
        assert self._plan is not None
        codec = cast(Selecting, codecs.parse(self._plan.reduction.codec))
        tray = Tray(chosen.shape, np.frombuffer(segment.view, np.uint8)[chosen.offset :])
        memory = self.buckets[bucket.index] = BucketSelection(
            chosen.side, codec, chosen.layout, tray, chosen.offset, self._nodes, self._weight, slots[0].parameter.device
        )
        starts, headroom = [tensor.start for tensor in bucket.tensors], self._headroom(chosen.layout.dtype)
        return BucketSelector(self, memory, starts, self._plan.reduction.prescale, headroom)

    # --- residuals, here or in the daemon -----------------------------------------------------------------------------

    def move(self, place: Where, here: bool) -> None:
        """Moves the residuals here, or to the daemon. Raises as `Client.save_state`."""
        if here:
            self._pick_up(place)
        else:
            self.lay_down(place)

    def _pick_up(self, place: Where) -> None:
        if self.here or not self.buckets:
            return
        state = place.here.client.save_state(place.process_set, place.group)
        for index, selection in self.buckets.items():
            left = selection.take_from(_of_bucket(state, index))
            state |= {f"{index}:{key}": value for key, value in left.items()}
        self._load(place, state)
        self.here = True

    def lay_down(self, place: Where) -> None:
        """Gives the residuals to the daemon. Raises as `Client.save_state`."""
        if self.here:
            self._load(place, self.saved(place))
            self.here = False

    def saved(self, place: Where) -> dict[str, Any]:
        """Returns the state of `Client.save_state` with the residuals that are here. Raises as that."""
        state = place.here.client.save_state(place.process_set, place.group)
        if self.here:
            for index, selection in self.buckets.items():
                found = selection.add_to(_of_bucket(state, index))
                state |= {f"{index}:{key}": value for key, value in found.items()}
        return state

    def forget(self) -> None:
        """Forgets the plan and the residuals that are here."""
        self._plan, self._chosen, self.buckets = None, {}, {}
        self._headroom = lambda dtype: 1.0
        self.here = self.led = False

    def _load(self, place: Where, state: Mapping[str, Any]) -> None:
        with place.here.allocating:
            place.here.client.load_state(place.process_set, place.group, state)


def _of_bucket(state: Mapping[str, Any], index: int) -> dict[str, Any]:
    prefix = f"{index}:"
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
