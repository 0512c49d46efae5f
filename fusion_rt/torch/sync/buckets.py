"""Buckets: parameters whose gradients, or values, are exchanged together.

Values are copied when their bucket is complete rather than in each hook: that was measured at half the time. It is one
call of `_foreach_copy_` instead of a `copy_` from Python for each tensor, and skips what lies in the arena already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_rt import wire
from fusion_rt.client import Operation, terms
from fusion_rt.core.errors import HorovodInternalError, failure_of
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.node.reduction import Combining, Gathering, NodeReduction
from fusion_rt.torch.node.staging import Packed, are_together
from fusion_rt.torch.sync.selections import BucketSelector
from fusion_rt.torch.sync.slots import Slot, SparseGradient
from fusion_rt.torch.sync.update_rule import UpdateRule
from fusion_rt.tracing.format import Flush, Kind

# As plain integers: asking an enumeration for a member, and packing it, costs as much as recording a number.
_FULL, _COPY_BEGIN, _COPY_END = int(Kind.FULL), int(Kind.COPY_BEGIN), int(Kind.COPY_END)
_APPLY_BEGIN, _APPLY_END = int(Kind.APPLY_BEGIN), int(Kind.APPLY_END)
_AT_STEP = Flush.STEP
_is_grad_enabled = torch.is_grad_enabled


@dataclass(frozen=True)
class Carriage:
    """Rules for moving values from parameters into buckets, and results back.

    Attributes:
        rule: what is sent of each parameter, and the use of the answer.
        compressor: a script's own, applied to each gradient before and after; None if there is none.
        terms: returns the terms that are sent with a bucket.
        at_once: all ranks take the results of a step together, in the plan's order, before they send anything else.
        loss_scale: returns that of the gradients of this step.
    """

    rule: UpdateRule
    compressor: Any
    terms: Callable[[Sequence[Slot]], wire.Ready]
    at_once: bool
    loss_scale: Callable[[], float]

    def is_direct(self, slot: Slot) -> bool:
        """Tells whether a slot's `p.grad` may be its place in the arena."""
        return self.rule.to_gradients and self.compressor is None and device.layer.is_host(slot.parameter)


class Bucket:
    """Parameters that are exchanged together. Their places in the arena are contiguous: one message submits them all.

    Args:
        here: this worker's membership.
        identity: its name, for messages to people; its plan; its index there.
        slots: its parameters.
        carriage: how values get into it, and results from it.
        flat: its place in the arena (1-D).
        rows: if it has one parameter whose gradient is sparse, and no place in the arena.

    Attributes:
        missing: how many of its slots still wait for their gradient in this step.
        patient: it is sent at the end of the backward pass, which computes one of its gradients in parts.
        sent: its part of this step is on its way.
        flush: why it is sent when it is.
        urgency: the less, the sooner its result is needed.
        nbytes: its size.
        node: the reduction that combines it with those of other ranks of the node, in some steps.
        selection: the selector from it, if this worker selects.
        owed: places in the bucket, and what is to be added there (both 1-D), times the loss scale, to what is sent
            next.
        direct: results stay where they are, since that is where `p.grad` is.
        copying: what is sent is on its way to the arena, and then to be posted.
        weight: how much these parameters count in a mean of all ranks, since the last answer of their home.
    """

    def __init__(
        self,
        here: Runtime,
        identity: tuple[str, int, int],
        slots: Sequence[Slot],
        carriage: Carriage,
        flat: torch.Tensor | None = None,
        rows: SparseGradient | None = None,
    ) -> None:
        self.slots = slots
        self.carriage = carriage
        self.flat = flat
        self.rows = rows
        self.direct = all(carriage.is_direct(slot) and not slot.sparse for slot in slots)
        self.missing = len(slots)
        self.patient = self.sent = False
        self.flush = _AT_STEP
        self.urgency = 0
        self.nbytes = 0 if flat is None else flat.nbytes
        self.node: NodeReduction | None = None
        self.selection: BucketSelector | None = None
        self.owed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.weight = 1.0
        self.copying: device.Copying | None = None
        self._here = here
        self._channel, self._trace = here.client.channel, here.trace
        self._identity = identity
        self._label = f"bucket {identity[2]}"
        self._on_device = not all(device.layer.is_host(slot.parameter) for slot in slots)
        self._packs = self._on_device and len(slots) > 1 and rows is None and carriage.compressor is None
        self._packed: Packed | None = None  # gradients, and results, together on their device
        self._share = wire.OWN
        self._operation: Operation | None = None
        self._landed: device.Copying | None = None  # the last results, on their way to a device
        self._combining: Combining | None = None  # this step's, in the node
        self._gathering: Gathering | None = None
        self._rows_of_all: Callable[[], torch.Tensor] | None = None

    def rewind(self) -> None:
        """Resets the state for the next step."""
        self.missing = len(self.slots) + self.patient
        self.sent = False
        self.flush = _AT_STEP
        self._operation = self.copying = self._combining = self._gathering = self._rows_of_all = None

    def fill(self) -> None:
        """Records that the last gradient of this step has come."""
        if self.rows is None:
            _, plan, index = self._identity
            self._trace.record(_FULL, self._label, 0, self._channel.clocks.next(plan, index), plan)

    # --- to the daemon ------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Starts to submit this step's part; a parameter without value contributes zeros."""
        _ = self._here.client.channel  # asked for first, because a forked child has none
        if _is_grad_enabled():  # it is not in hooks, and `no_grad` takes 20 us with cold caches
            with torch.no_grad():
                self.send()
            return
        if self._on_device or self.node is not None or self.rows is not None:
            self._send_in_its_way()
        else:
            self._fill_arena()
        self.sent = True

    def _send_in_its_way(self) -> None:
        """Starts to submit what is sparse, on a device, or combined in the node."""
        if self._on_device:
            self._follow_gradients()
        if self.rows is not None:
            self._rows_of_all = self.rows.start(self.slots[0])
        elif self.node is not None and self.node.reduces:
            self._send_in_node(self.node, gradients=True)
        elif self.selection is not None and self.selection.here:
            self._select(self.selection)
        elif self._packs and are_together([slot.parameter for slot in self.slots]):
            self._pack()
        else:
            self._fill_arena()

    def _follow_gradients(self) -> None:
        """Has what is queued from now on come after the gradients, which may be computed on several streams, and after
        the last results have been copied from the arena, where what is sent goes."""
        if self._landed is not None:
            self._landed.precede()
        device.layer.follow([slot.stream for slot in self.slots if slot.stream is not None])
        for slot in self.slots:
            slot.stream = None

    def _pack(self) -> None:
        """Puts gradients together on their device, from where one copy brings them to the arena."""
        self._share = wire.OWN
        if self._packed is None:
            assert self.flat is not None
            self._packed = Packed(self.flat, [slot.view for slot in self.slots], self.slots[0].parameter)
        self._stage(self._packed.places())
        self.copying = self._packed.to_arena()

    def _fill_arena(self) -> None:
        self._share = wire.OWN
        views: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        remote: list[tuple[torch.Tensor, torch.Tensor]] = []
        for slot in self.slots:
            parameter, view = slot.parameter, slot.view
            assert view is not None
            if not slot.direct or (value := parameter.grad) is None or value.is_sparse:
                self._gather(slot, views, values, remote)
                continue
            if view.data_ptr() != slot.address:  # as `outgoing` does; but a call for each would take twice as long
                view = slot.return_to_arena()
            if value is not view:
                slot.sparse = 0
                parameter.grad = view
                views.append(view)
                values.append(value)
        if views:
            self._copy(views, values)
        if remote:
            self.copying = device.layer.copy(*zip(*remote, strict=True))
        elif self.owed:
            self.submit()
        else:
            self.announce()

    def _gather(
        self,
        slot: Slot,
        views: list[torch.Tensor],
        values: list[torch.Tensor],
        remote: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Adds a slot to those that are copied in this process or from elsewhere, or sets its place to zeros."""
        value, view = self.outgoing(slot), slot.view
        assert view is not None
        if value is None:
            if self._landed is not None:  # the last results may not have been copied from there yet
                self._landed.wait()
            view.zero_()
        elif value is view:
            return
        elif slot.direct or not self._on_device:
            views.append(view)
            values.append(value)
        else:
            remote.append((view, value))

    def outgoing(self, slot: Slot) -> torch.Tensor | None:
        """Returns the value to copy into a slot's view; the view itself if it is there already, None for zeros."""
        value = self.carriage.rule.value(slot)
        if slot.direct and slot.view is not None and slot.view.data_ptr() != slot.address:
            slot.return_to_arena()
        if value is not None and value is not slot.view:
            if self.carriage.rule.to_gradients:
                slot.sparse = value.sparse_dim() if value.is_sparse else 0
                self.direct = self.direct and not slot.sparse
            if value.is_sparse:
                value = value.to_dense()
        if slot.direct:
            slot.parameter.grad = slot.view
        elif self.carriage.compressor is not None:
            return slot.compressed if slot.compressed is not None else slot.compress(self.carriage.compressor, value)
        return value

    def submit(self) -> None:
        """Adds what is owed to the values in the arena, and submits them."""
        while self.owed:
            place, value = self.owed.pop()
            place.add_(value, alpha=self.carriage.loss_scale())
        self.announce()

    def announce(self) -> None:
        """Sends the message that says what this worker contributes."""
        said = None if self.selection is None else self.selection.terms()
        said = said or self.carriage.terms(self.slots)
        said.urgency, said.share = self.urgency, self._share
        said.asks_for_part = self._share == wire.PART and self._gathers()
        self._operation = self._channel.ready(*self._identity, said, self.nbytes, self.flush)

    def give_up(self, why: str) -> None:
        """Reports that this rank has no part of this step, so that all ranks fail it if possible. `why`: a sentence."""
        if self.rows is not None:
            self.send()
            return
        if self.node is not None and self.node.reduces:
            self.node.give_up(why)
        self._share = wire.OWN
        self._operation = self._channel.ready(*self._identity, terms(gives_up=why))
        self.sent = True

    def post(self, wait: bool) -> bool:
        """Submits a copied or combined bucket if it is ready, or after waiting. Returns whether it is submitted."""
        if self.copying is None:
            return True
        if wait:
            self.copying.wait()
        elif not self.copying.done():
            return False
        self.copying = None
        if self._combining is None:
            self.submit()
            return True
        if self._combining.why:
            self._share = wire.ELSEWHERE  # of all ranks of the node, so that the daemon fails it everywhere at once
            if self.selection is not None and self.node is not None:
                self.selection.withdraw(self.node, self._combining.why)
        else:
            self.owed.clear()
        self.announce()
        return True

    # --- in the node, or on a device ----------------------------------------------------------------------------------

    def send_nothing(self) -> None:
        """Takes part in a reduction in the node without changing its result."""
        assert self.node is not None
        if self._on_device:
            self._follow_gradients()
        self._send_in_node(self.node, gradients=False)
        self.sent = True

    def _select(self, selection: BucketSelector) -> None:
        assert self.flat is not None
        self._share = wire.OWN
        self._stage(selection.places(self.flat, self.slots))
        self.copying = selection.start(self._add_owed, self.carriage.terms(self.slots))
        self.owed.clear()

    def _send_in_node(self, node: NodeReduction, gradients: bool) -> None:
        assert self.flat is not None
        views = [slot.view for slot in self.slots]
        staging = node.staging(self._identity[2], self.flat, views, self.slots[0].parameter)  # type: ignore[arg-type]
        with torch.no_grad():
            if gradients:
                self._stage(staging.places)
            else:
                node.fill_with_nothing(staging)
            self._add_owed(staging.values)
            self.copying = self._combining = node.reduce(staging, self._follow)
        self._share = node.share()

    def _follow(self, values: torch.Tensor) -> device.Copying:
        """Starts to copy what this rank has of the node's sum (1-D) to the arena, or to select from it."""
        assert self.flat is not None
        assert self.node is not None
        if self.selection is not None and self.selection.here:
            return self.selection.follow(values, self.carriage.terms(self.slots))
        place = self.node.mine(self.flat)
        return device.layer.copy([place], [values[: len(place)].to(place.dtype)])

    def _gathers(self) -> bool:
        """Tells whether this rank gets a part of this step's result, and the rest from other ranks of its node."""
        return self._share == wire.PART and self.node is not None and self.node.way.gathers

    def _stage(self, places: Sequence[torch.Tensor]) -> None:
        """Copies this rank's gradients to places on their device; zeros where there is none."""
        filled, values = [], []
        for slot, place in zip(self.slots, places, strict=True):
            value = self.outgoing(slot)
            if value is None:
                place.zero_()
            else:
                filled.append(place)
                values.append(value)
        if filled:
            self._copy(filled, values)

    def _add_owed(self, values: torch.Tensor) -> None:
        """Adds what is owed to the bucket's values elsewhere than in the arena (1-D)."""
        assert self.flat is not None
        for place, value in self.owed:
            start = (place.data_ptr() - self.flat.data_ptr()) // place.element_size()
            values[start : start + place.numel()].add_(value.to(values.device), alpha=self.carriage.loss_scale())

    def _copy(self, places: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        plan = self._identity[1]
        clock = self._channel.clocks.next(plan, self._identity[2])
        self._trace.record(_COPY_BEGIN, self._label, 0, clock, plan)
        torch._foreach_copy_(places, values)
        self._trace.record(_COPY_END, self._label, 0, clock, plan)

    # --- and back -----------------------------------------------------------------------------------------------------

    def receive(self, share: float = 1.0) -> None:
        """Waits for this step's results, and puts them, multiplied by `share`, where they belong. Raises
        `HorovodInternalError`."""
        if self._rows_of_all is not None:
            self.slots[0].take(self._rows_of_all())
        elif self._operation is not None:
            self.land(self._operation, share)

    def await_result(self) -> None:
        """Waits for this step's results, and leaves them where they are. Raises `HorovodInternalError`."""
        if self._operation is not None and self.selection is None:
            self.await_end(self._operation)

    def gather(self) -> None:
        """Starts to gather the results from the ranks of the node, if each has a part. Raises `HorovodInternalError`.
        The exchanges of this step have ended well: so nobody gathers what others do not."""
        if self._gathers() and self._operation is not None:
            assert self.node is not None
            assert self.flat is not None
            self._gathering = self.node.gather(self._identity[2], self.flat)

    def await_gathered(self) -> list[torch.Tensor]:
        """Waits until the results have been gathered. Returns where they are, if they are not in the arena. Raises
        `HorovodInternalError`."""
        gathering, self._gathering = self._gathering, None
        if gathering is None:
            return [] if self._packed is None or self._share != wire.OWN else self._packed.from_arena()
        staging = gathering.wait()
        if self._on_device:
            return staging.result_places
        assert self.flat is not None
        self.flat.copy_(staging.result[: len(self.flat)])
        return []

    def has_answer(self) -> bool:
        """Tells whether nothing of this step has to be waited for any more."""
        return self._operation is None or self._channel.poll(self._operation)

    def await_answer(self) -> None:
        """Waits for the answer of a home that does not expect this worker to wait, and may do without it then."""
        if not self.has_answer():
            self._here.client.awaits_answers(self._identity[1])
            self.abandon()

    def hand_over(self) -> Operation:
        """Returns the running exchange, which the caller has to `land` before the bucket is sent again."""
        assert self._operation is not None
        return self._operation

    def land(self, operation: Operation, share: float = 1.0) -> None:
        """Waits for an operation that was handed over, and applies its results as `receive` does."""
        self.await_end(operation)
        places = self.await_gathered() if self._on_device or self._gathering is not None else ()
        _, clock, plan = operation.about
        record = self._trace.record
        record(_APPLY_BEGIN, self._label, 0, clock, plan)
        if not self.direct:
            self.weight = operation.sizes[1] * wire.WEIGHT_UNIT if len(operation.sizes) > 1 else 1.0
            self._take(share, operation.sizes[:1] == (1,), places)
        record(_APPLY_END, self._label, 0, clock, plan)

    def _take(self, share: float, added: bool, places: Sequence[torch.Tensor]) -> None:
        """Puts results where they belong. `places`: on their device, where they are if not in the arena."""
        slots = [slot for slot in self.slots if slot.sparse or not slot.direct]
        with torch.no_grad():
            if self._on_device or self.carriage.compressor is not None:
                results = self._brought(slots, places)
            else:
                results = [slot.view for slot in slots]  # type: ignore[misc]
            if share != 1.0:
                results = [result * share for result in results]
            self.carriage.rule.take(slots, results, added)

    def _brought(self, slots: Sequence[Slot], places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns results on their device, without the script's compression. `places`: as of `_take`."""
        landings = [self._landing(slot) for slot in slots]
        elsewhere = [(to, slot.view) for slot, to in zip(slots, landings, strict=True) if to is not slot.view]
        if places:
            torch._foreach_copy_(landings, list(places))
            self._landed = device.layer.mark(*places)
        elif elsewhere:
            self._landed = device.layer.copy(*zip(*elsewhere, strict=True))
        if self.carriage.compressor is None:
            return landings
        undo = self.carriage.compressor.decompress
        return [torch.as_tensor(undo(to, slot.context)) for slot, to in zip(slots, landings, strict=True)]

    def _landing(self, slot: Slot) -> torch.Tensor:
        """Returns the tensor to which results in a slot's view are copied first; the view if none is needed."""
        assert slot.view is not None
        if self.carriage.compressor is not None:
            return torch.empty_like(slot.view, device=slot.parameter.device)
        if device.layer.is_host(slot.parameter):
            return slot.view
        gradient = slot.parameter.grad
        if not self.carriage.rule.to_gradients or gradient is None or gradient.is_sparse:
            return torch.empty_like(slot.parameter)
        return gradient.detach()

    def await_end(self, operation: Operation) -> None:
        """Waits until an exchange has ended; raises `HorovodInternalError` if it failed."""
        try:
            self._channel.wait(operation)
        except HorovodInternalError as error:
            if self.node is not None and self._share != wire.OWN:
                self._fail_in_node(self.node, error)
            raise
        if self.selection is not None:
            self.selection.correct()

    def _fail_in_node(self, node: NodeReduction, error: HorovodInternalError) -> None:
        """Tells whoever waits for this rank in the node. Raises `HorovodInternalError` if that knows more."""
        node.give_up(str(error))
        if self._combining is not None and self._combining.why:
            raise failure_of(f"{error}: {self._combining.why}") from error

    def abandon(self) -> None:
        """Waits for the exchange, and ignores its results."""
        if self._rows_of_all is not None:
            self._rows_of_all()
        elif self._operation is not None and not (self._operation.done and self.selection is None):
            self.await_end(self._operation)
