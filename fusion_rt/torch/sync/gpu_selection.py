"""Selection on a worker's GPU, instead of in its daemon: memory there, the stage of buckets, and which ones have it.

A node's daemon selects from the sum of its workers' gradients. Where one worker has this sum, because it is alone or
the node's gradients are combined on its GPU (`node`), it can select itself. It keeps the residual of a bucket there,
adds gradients to it, and selects the elements to send, so that only those are copied to the host. What the daemon
knows how to do with residuals (keep them through new plans, save and load them) it goes on doing: for that, residuals
move to the daemon (`lay_down`), and back before the next step.

It computes as `codecs.topk` does, in the same order, so that results and residuals are the same bits (but for `clip`,
whose norm is added up in another order, and for what is left after a step that is undone, which is as near). All but
the selection itself is done with torch, on any device; see `Side`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from msgspec.structs import replace

from fusion_rt import algorithms, codecs, wire
from fusion_rt.codecs import layout_of
from fusion_rt.codecs.base import Array, Layout
from fusion_rt.codecs.packing import Spans
from fusion_rt.codecs.selecting import Selecting
from fusion_rt.codecs.tensor_rules import Group
from fusion_rt.codecs.worker_selection import ALIGNMENT, HEADER, SPOILED, Shape, Tray, is_selected_from
from fusion_rt.host.arena import Segment
from fusion_rt.local.saved_state import StateOwner, by_owner
from fusion_rt.torch.core import device
from fusion_rt.torch.core.sides import Side
from fusion_rt.torch.node.reduction import NodeReduction
from fusion_rt.torch.sync.buckets import Bucket, Stage
from fusion_rt.torch.sync.on_device import OnDevice
from fusion_rt.torch.sync.options import Where
from fusion_rt.torch.sync.slots import Slot, shaped


class BucketSelection(device.Copying):
    """One bucket's residual on a device, and the selection from it.

    Args:
        side: the device.
        codec, layout: of the bucket.
        tray: into which it is copied.
        offset: of the tray in the plan's segment, in bytes.
        bound: gradients that are longer are scaled down to it; 0: none are.
        where: the device, as torch calls it.

    Attributes:
        offset: as above.
    """

    def __init__(
        self,
        side: Side,
        codec: Selecting,
        layout: Layout,
        tray: Tray,
        offset: int,
        bound: float,
        where: torch.device,
    ) -> None:
        super().__init__()
        self.offset = offset
        self._side, self._codec, self._layout, self._tray = side, codec, layout, tray
        self._bound = bound
        self._groups: tuple[Group, ...] = codec.rules.groups(layout)
        self._step = 0
        self._under_way = False
        self._owes = False  # its daemon has told, or will tell, the correction of the residual
        self._given: torch.Tensor | None = None  # the gradient of the step under way
        self._masked: list[Array] = []  # the words of groups in which the velocity of selected elements starts again
        always = Spans(codec.rules.dense(layout)).all_indices(0, layout.elements)
        with side.beside():
            self._residual = side.zeros(layout.elements)
            self._velocity = side.zeros(layout.elements) if codec.momentum else None
            self._always = torch.from_numpy(always).to(where)
        self._sent_always, self._verdict = torch.from_numpy(tray.dense), torch.from_numpy(tray.verdict)
        self._selector = side.selector(
            (self._residual, self._velocity), tray.shape.groups, tray.all_groups, tray.shape.rooms, codec.momentum,
            codec.nesterov,
        )  # fmt: skip

    def start(self, gradient: torch.Tensor, factors: Sequence[float], loss_scale: float = 1.0) -> None:
        """Queues a step.

        Args:
            gradient: of the whole bucket, on the device, float32, zeros between tensors; may be scaled. It stays
                as it is from then on until `correct`.
            factors: of the residual of each tensor, applied first, if any.
            loss_scale: of the gradient; residual and selection are without it.
        """
        if loss_scale != 1.0:
            gradient.mul_(1 / loss_scale)
        if self._bound:
            norm = torch.linalg.vector_norm(gradient)
            too_long = (self._bound < norm) & (norm < math.inf)
            gradient.mul_(torch.where(too_long, self._bound / norm, torch.ones_like(norm)))
        self._tray.clear()
        self._side.follow()
        self._given, self._masked = gradient, []
        with self._side.beside():
            for span, factor in zip(self._layout.spans, factors, strict=False):
                if factor != 1.0:
                    self._residual[span.start : span.end].mul_(factor)
            if len(self._always):
                self._send_always(gradient)
        ks = [group.k(self._step, self._codec.warmup) for group in self._groups]
        self._selector.start(gradient, ks, at_once=not self._codec.feedback)
        for group, k, words in zip(self._groups, ks, self._tray.groups, strict=True):
            if self._codec.masks(k, group.size):
                self._masked.append(words)
        if not self._codec.feedback:
            with self._side.beside():
                self._residual.zero_()
        self.events = self._mark(gradient).events
        self._step += 1
        self._under_way = self._owes = True

    def _send_always(self, gradient: torch.Tensor) -> None:
        """Adds gradients to the residuals of the elements that are always sent, as selectors do, and takes the sums."""
        added, before = gradient[self._always], self._residual[self._always]
        if self._velocity is None:
            finite = torch.isfinite(before + added)
        else:
            old, momentum = self._velocity[self._always], self._codec.momentum
            if self._codec.nesterov:
                speed = (old + added).mul_(momentum)
                added = speed + added
            else:
                speed = added = (old * momentum).add_(added)
            finite = torch.isfinite(before + added)
            self._velocity[self._always] = torch.where(finite, speed, old)
        self._sent_always.copy_(torch.where(finite, before + added, before), non_blocking=True)
        self._verdict.copy_((~finite).any().to(torch.int32) * SPOILED, non_blocking=True)
        self._residual[self._always] = 0

    def done(self) -> bool:
        if self._under_way and self._selector.ready():
            self.wait()
        return not self._under_way

    def wait(self) -> None:
        if self._under_way:
            self._selector.finish()
            self._under_way = False

    def correct(self) -> None:
        """Ends the step: adds the unsent part of the selection to the residual again. Where it is undone,
        residual and velocity become those of before, as exactly as float32 adds up."""
        if not self._owes:
            return
        given, self._owes, self._given = self._given, False, None
        indices, values, self._step, undone = self._tray.answered()
        with self._side.beside():
            if len(indices):
                there = [torch.from_numpy(a).to(self._residual.device, non_blocking=True) for a in (indices, values)]
                self._residual.index_add_(0, *there)
            if undone:
                assert given is not None
                self._undo(given)
            elif self._velocity is not None:
                for words in self._masked:
                    chosen = torch.from_numpy(words[HEADER : HEADER + words[0]])
                    self._velocity[chosen.to(self._velocity.device, non_blocking=True).long()] = 0
        done = self._mark(*([] if given is None else [given]))
        if undone:
            done.precede()  # the next work queued for training is the next gradient, which takes the place of this one

    def withdraw(self) -> None:
        """Ends a step of which the daemon is not told: residual and velocity become what they were, as exactly as
        float32 adds up."""
        self.wait()
        indices, values, always = self._tray.selected()
        with self._side.beside():
            self._residual[self._always] = torch.from_numpy(always).to(self._residual.device)
        self._tray.answer(indices, values, self._step - 1, undone=True)
        self.correct()

    def _mark(self, *using: torch.Tensor) -> device.Copying:
        """Keeps the work queued beside training now, with its tensors and tray, until it is done."""
        with self._side.beside():
            marked = device.layer.mark(self._residual, using=[self._verdict, *using])
        device.layer.keep(marked)
        return marked

    def _undo(self, gradient: torch.Tensor) -> None:
        """Subtracts the selectors' sums; see `kernels.selection.withdraw`."""
        step = gradient
        added = torch.isfinite(gradient)
        if self._velocity is not None:
            velocity, momentum = self._velocity, self._codec.momentum
            if self._codec.nesterov:
                step, before = velocity + gradient, velocity / momentum - gradient
            else:
                step, before = velocity.clone(), (velocity - gradient) / momentum
            velocity.copy_(torch.where(added & torch.isfinite(before), before, velocity))
        if self._codec.feedback:
            before = self._residual - step
            self._residual.copy_(torch.where(added & torch.isfinite(before), before, self._residual))
        else:
            self._residual.zero_()

    # --- its memory, as `FeedbackBucketCodec.state_dict` has it -------------------------------------------------------

    def add_to(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the residual and velocity of a saved state of this bucket, with those here added."""
        found = {}
        for kind, tensor in self._memories():
            with self._side.beside():
                memory = tensor.cpu().numpy()
            for span in self._layout.spans:
                key = f"{kind}/{span.name}"
                found[key] = state[key] + memory[span.start : span.end]
        return found

    def take_from(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Goes on from a saved state of this bucket. Returns the daemon's part: zeros."""
        left = {}
        for kind, tensor in self._memories():
            memory = np.zeros(self._layout.elements, np.float32)
            for span in self._layout.spans:
                key = f"{kind}/{span.name}"
                memory[span.start : span.end] = state[key]
                left[key] = np.zeros_like(state[key])
            with self._side.beside():
                tensor.copy_(torch.from_numpy(memory))
        self._step = int(state["step"])
        return left

    def _memories(self) -> list[tuple[str, torch.Tensor]]:
        memories = [("residual", self._residual)]
        return memories if self._velocity is None else [*memories, ("velocity", self._velocity)]


class BucketSelector(Stage):
    """The stage of one bucket: selects from its gradients where they are. Results come as those of any other bucket.

    Args:
        selections: say whether this worker selects in this step.
        memory: its residual, and the selector from it.
        starts: the first element of each of its parameters.
        prescale: gradients are multiplied by it.
        headroom: the sum of the node's ranks is divided by it; see `codecs.averages`.
        copies: the stage for steps in which the daemon selects.
    """

    def __init__(
        self,
        selections: Selections,
        memory: BucketSelection,
        starts: Sequence[int],
        prescale: float,
        headroom: float,
        copies: OnDevice,
    ) -> None:
        self._selections, self._memory = selections, memory
        self._starts, self._prescale, self._headroom = starts, prescale, headroom
        self._copies = copies
        self._gradient: torch.Tensor | None = None  # all of them, on the device
        self._places: list[torch.Tensor] = []  # of each, in its shape
        self._now: wire.Ready | None = None  # the terms of the selection

    def is_due(self) -> bool:
        return self._selections.here

    def start(self, bucket: Bucket) -> device.Copying:
        """Queues a step with this step's gradients, and owed values."""
        self._copies.follow_gradients(bucket)
        gradient = self._gradient
        if gradient is None:
            gradient = self._gradient = self._make_places(bucket)
        bucket.put(self._places)
        bucket.add_owed(gradient)
        bucket.owed.clear()
        if self._prescale != 1.0:
            gradient.mul_(self._prescale)
        said = bucket.io.schedule.terms(bucket.slots)
        return self._queue(gradient, said, said.loss_scale)

    def _make_places(self, bucket: Bucket) -> torch.Tensor:
        """Makes the memory of the bucket's gradients on their device (1-D), and notes the places of its parameters."""
        like = bucket.slots[0].parameter.detach().float()  # halves are selected from as float32, as daemons do
        whole = device.layer.empty([len(bucket.flat)], like).zero_()
        self._places = [
            shaped(whole[start : start + slot.parameter.numel()], slot.parameter, slot.order)
            for slot, start in zip(bucket.slots, self._starts, strict=True)
        ]
        return whole

    def follow(self, bucket: Bucket, values: torch.Tensor) -> device.Copying:
        """Queues a step with the sum of the node's ranks (1-D), which have scaled it."""
        said = bucket.io.schedule.terms(bucket.slots)
        return self._queue(values, said, said.loss_scale / self._headroom)

    def _queue(self, values: torch.Tensor, said: wire.Ready, loss_scale: float) -> device.Copying:
        self._now = replace(said, tray=self._memory.offset)
        with torch.no_grad():
            self._memory.start(values, said.rescale, loss_scale)
        return self._memory

    def submit(self, bucket: Bucket) -> None:
        bucket.announce(self.terms())

    def terms(self) -> wire.Ready | None:
        """Returns the terms of the last selection, once; None if there is none."""
        now, self._now = self._now, None
        return now

    def ended(self) -> None:
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

    def results(self, bucket: Bucket, slots: Sequence[Slot]) -> list[torch.Tensor]:
        return self._copies.bring(bucket, slots)


@dataclass(frozen=True)
class _Chosen:
    """A bucket whose worker will select: how, from which byte of the segment on its tray lies, and the bound of its
    gradients; see `BucketSelection`."""

    side: Any
    layout: Layout
    shape: Shape
    offset: int
    bound: float


class Selections:
    """Selections from the buckets of one plan.

    Args:
        compressor: a script's own, which leaves nothing to select from; or None.
        allowed: workers may select at all.

    Attributes:
        buckets: that select, by index.
        here: their residuals are here, and not in the daemon; this worker selects in this step.
        led: another worker of this node does; the daemon's memory is for that one to load.
    """

    def __init__(self, compressor: Any, allowed: bool) -> None:
        self._allowed = allowed and compressor is None
        self._chosen: dict[int, _Chosen] = {}
        self._plan: wire.Plan | None = None
        self._node: NodeReduction | None = None  # combines the gradients that are selected from
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
        self._node = node
        if (
            not (self._allowed and codec.selects_in_workers)
            or not algorithms.parse(reduction.algorithm).sums_gradients
            or reduction.op not in ("sum", "average")
            or len(nodes) == 1
            or (node is None and len(nodes[place.here.client.welcome.node]) > 1)
        ):
            return nbytes
        if node is not None and (node.way.parts or not node.is_leader):
            self.led = not node.way.parts
            return nbytes
        selecting = cast(Selecting, codec)
        bound = selecting.clip / math.sqrt(len(nodes)) / reduction.weight(sum(map(len, nodes.values())))
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
                self._chosen[bucket.index] = _Chosen(side, layout, shape, offset, bound)
                nbytes = offset + shape.nbytes
        return nbytes

    def selector(
        self, bucket: wire.Bucket, segment: Segment, slots: Sequence[Slot], copies: OnDevice | None
    ) -> BucketSelector | None:
        """Makes the selector of a bucket of the plan; None if the daemon selects.

        Args:
            copies: the bucket's stage for steps in which the daemon selects.
        """
        chosen = self._chosen.get(bucket.index)
        if chosen is None:
            return None
        assert self._plan is not None
        assert copies is not None
        codec = cast(Selecting, codecs.parse(self._plan.reduction.codec))
        tray = Tray(chosen.shape, np.frombuffer(segment.view, np.uint8)[chosen.offset :])
        memory = self.buckets[bucket.index] = BucketSelection(
            chosen.side, codec, chosen.layout, tray, chosen.offset, chosen.bound, slots[0].parameter.device
        )
        starts = [tensor.start for tensor in bucket.tensors]
        headroom = 1.0 if self._node is None else self._node.headroom(chosen.layout.dtype)
        return BucketSelector(self, memory, starts, self._plan.reduction.prescale, headroom, copies)

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
        owned = by_owner(state)
        for index, selection in self.buckets.items():
            codec = StateOwner("codec", index)
            state |= codec.keyed(selection.take_from(owned.get(codec, {})))
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
            owned = by_owner(state)
            for index, selection in self.buckets.items():
                codec = StateOwner("codec", index)
                state |= codec.keyed(selection.add_to(owned.get(codec, {})))
        return state

    def forget(self) -> None:
        """Forgets the plan and the residuals that are here."""
        self._plan, self._chosen, self.buckets = None, {}, {}
        self._node = None
        self.here = self.led = False

    def _load(self, place: Where, state: Mapping[str, Any]) -> None:
        with place.here.allocating:
            place.here.client.load_state(place.process_set, place.group, state)
