"""Buckets: parameters whose gradients, or values, are exchanged together.

This file has the plain way of a bucket, in the order of a step: *fill* copies values into the arena, *submit* sends one
message to the daemon, *wait* returns when its results are in the arena, and *apply* puts them where they belong. Other
buckets have further stages, which are chosen when the plan is made: `in_node.py` (ranks of a node combine gradients),
`gpu_selection.py` (a worker selects on its GPU), `on_device.py` (values lie on a device). Sparse gradients have buckets
of their own (`sparse_gradients.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusion_rt import wire
from fusion_rt.client import Operation, terms
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.update_rule import UpdateRule
from fusion_rt.tracing.format import Flush, Kind

# As plain integers: asking an enumeration for a member, and packing it, costs as much as recording a number.
_FULL, _COPY_BEGIN, _COPY_END = int(Kind.FULL), int(Kind.COPY_BEGIN), int(Kind.COPY_END)
_APPLY_BEGIN, _APPLY_END = int(Kind.APPLY_BEGIN), int(Kind.APPLY_END)
_AT_STEP = Flush.STEP
_OWN, _WEIGHT_UNIT = wire.OWN, wire.WEIGHT_UNIT
_is_grad_enabled = torch.is_grad_enabled


class BucketSchedule(Protocol):
    """The part of an optimizer's schedule that its buckets ask.

    Attributes:
        delays: results are applied when they are needed, and not all together.
    """

    delays: bool

    @property
    def loss_scale(self) -> float:
        """The loss scale of the gradients of this step."""

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        """Returns the terms that are sent with a bucket of these slots."""


@dataclass(frozen=True)
class BucketIO:
    """Rules for moving values from parameters into buckets, and results back.

    Attributes:
        rule: the value sent of each parameter, and the use of the answer.
        compressor: a script's own, applied to each gradient before and after; None if there is none.
        schedule: asked for the terms of a step.
    """

    rule: UpdateRule
    compressor: Any
    schedule: BucketSchedule

    def is_direct(self, slot: Slot) -> bool:
        """Tells whether a slot's `p.grad` may be its place in the arena."""
        return self.rule.to_gradients and self.compressor is None and device.layer.is_host(slot.parameter)


class Stage:
    """A further stage of one bucket, which takes the place of filling the arena in the steps in which it is due.

    The bucket sends by the first of its stages that is due. That one has started when `start` returns. As soon as the
    copies that it returns have been made, it submits the bucket.
    """

    def is_due(self) -> bool:
        """Tells whether the bucket takes this stage in this step."""
        return True

    def start(self, bucket: Bucket) -> device.Copying | None:
        """Starts to bring this step's values to the arena. Returns the copies after which they are there; None if there
        are none to wait for."""
        raise NotImplementedError

    def submit(self, bucket: Bucket) -> None:
        """Submits the bucket, whose values have been brought."""
        bucket.submit()

    def give_up(self, why: str) -> None:
        """Called instead of `start` where this rank has no part of this step. `why`: a sentence."""

    def gather(self, bucket: Bucket) -> None:
        """Starts to gather results from the ranks of the node. Raises `HorovodInternalError`."""

    def await_gathered(self, bucket: Bucket) -> None:
        """Waits until results have been gathered. Raises `HorovodInternalError`."""

    def results(self, bucket: Bucket, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """Returns the results of some of the bucket's slots, on their devices, in the order of the slots."""
        return [slot.view for slot in slots]  # type: ignore[misc]

    def failed(self, error: HorovodInternalError) -> None:
        """Called when the exchange has failed. Raises `HorovodInternalError` if this stage knows more of the reason."""

    def ended(self) -> None:
        """Called when an exchange has ended well, whichever stage was due in it."""


class Bucket:
    """Parameters that are exchanged together. Their places in the arena are contiguous: one message submits them all.

    Args:
        here: this worker's membership.
        identity: its name, for messages to people; its plan; its index there.
        slots: its parameters.
        io: how values get into it, and results from it.
        flat: its place in the arena (1-D).

    Attributes:
        sparse: the gradient of its one parameter is sparse; see `sparse_gradients.py`.
        index: as above, in its plan.
        stages: those that it goes through in place of `fill`; the first one that is due counts. None for the plain way.
        stage: the one by which it was sent last, or will be if it never was; None: the plain way.
        missing: how many of its slots still wait for their gradient in this step.
        patient: it is sent at the end of the backward pass, which computes one of its gradients in parts.
        sent: its part of this step is on its way.
        flush: why it is sent when it is.
        urgency: the less, the sooner its result is needed.
        nbytes: its size.
        owed: first elements, and values (1-D) to be added from there on, times the loss scale, to the next
            contribution.
        direct: results stay where they are, since that is where `p.grad` is.
        copying: the contribution is on its way to the arena, and then to be submitted.
        weight: how much these parameters count in a mean of all ranks, since the last answer of their home.
    """

    sparse = False

    def __init__(
        self, here: Runtime, identity: tuple[str, int, int], slots: Sequence[Slot], io: BucketIO, flat: torch.Tensor
    ) -> None:
        self.slots = slots
        self.io = io
        self.flat = flat
        self.index = identity[2]
        self.stages: Sequence[Stage] = ()
        self.stage: Stage | None = None
        self.direct = all(io.is_direct(slot) and not slot.sparse for slot in slots)
        self.missing = len(slots)
        self.patient = self.sent = False
        self.flush = _AT_STEP
        self.urgency = 0
        self.nbytes = flat.nbytes
        self.owed: list[tuple[int, torch.Tensor]] = []
        self.weight = 1.0
        self.copying: device.Copying | None = None
        self._here = here
        self._channel, self._trace = here.client.channel, here.trace
        self._identity = identity
        self._label = f"bucket {self.index}"
        self._operation: Operation | None = None

    def rewind(self) -> None:
        """Resets the state for the next step."""
        self.missing = len(self.slots) + self.patient
        self.sent = False
        self.flush = _AT_STEP
        self._operation = self.copying = None

    def note_full(self) -> None:
        """Records that the last gradient of this step has come."""
        _, plan, index = self._identity
        self._trace.record(_FULL, self._label, 0, self._channel.clocks.next(plan, index), plan)

    # --- fill ---------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Starts to submit this step's part; a parameter without value contributes zeros."""
        _ = self._here.client.channel  # asked for first, because a forked child has none
        if _is_grad_enabled():  # it is not in hooks, and `no_grad` takes 20 us with cold caches
            with torch.no_grad():
                self.send()
            return
        for stage in self.stages:
            if stage.is_due():
                self.stage, self.copying = stage, stage.start(self)
                break
        else:
            self.stage = None
            self.fill()
        if self.copying is None:
            self.submit()
        self.sent = True

    def fill(self) -> None:
        """Copies values into the arena, where they are not there already.

        That is done when the bucket is complete rather than in each hook, which was measured at half the time: one call
        of `_foreach_copy_` takes the place of a `copy_` from Python for each tensor.
        """
        views: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for slot in self.slots:
            parameter, view = slot.parameter, slot.view
            assert view is not None
            if slot.direct and (value := parameter.grad) is not None and not value.is_sparse:
                if view.data_ptr() != slot.address:  # as `outgoing` does; but a call for each would take twice as long
                    view = slot.return_to_arena()
                if value is view:
                    continue
                slot.sparse = 0
                parameter.grad = view
            else:
                sent, view = self.outgoing(slot), slot.view
                assert view is not None
                if sent is None:
                    view.zero_()
                    continue
                if sent is view:
                    continue
                value = sent
            views.append(view)
            values.append(value)
        if views:
            self.copy(views, values)

    def outgoing(self, slot: Slot) -> torch.Tensor | None:
        """Returns the value to copy into a slot's view; the view itself if it is there already, None for zeros."""
        value = self.io.rule.value(slot)
        if slot.direct and slot.view is not None and slot.view.data_ptr() != slot.address:
            slot.return_to_arena()
        if value is not None and value is not slot.view:
            if self.io.rule.to_gradients:
                slot.sparse = value.sparse_dim() if value.is_sparse else 0
                self.direct = self.direct and not slot.sparse
            if value.is_sparse:
                value = value.to_dense()
        if slot.direct:
            slot.parameter.grad = slot.view
        elif self.io.compressor is not None:
            return slot.compressed if slot.compressed is not None else slot.compress(self.io.compressor, value)
        return value

    def put(self, places: Sequence[torch.Tensor]) -> None:
        """Copies this step's values to places elsewhere than in the arena, one a slot; zeros where there is none."""
        filled, values = [], []
        for slot, place in zip(self.slots, places, strict=True):
            value = self.outgoing(slot)
            if value is None:
                place.zero_()
            else:
                filled.append(place)
                values.append(value)
        if filled:
            self.copy(filled, values)

    def copy(self, places: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Copies values to places at once, and records that."""
        plan = self._identity[1]
        clock = self._channel.clocks.next(plan, self.index)
        self._trace.record(_COPY_BEGIN, self._label, 0, clock, plan)
        torch._foreach_copy_(places, values)
        self._trace.record(_COPY_END, self._label, 0, clock, plan)

    def add_owed(self, whole: torch.Tensor) -> None:
        """Adds owed values to all of the bucket's values (1-D), in the arena or elsewhere."""
        for start, value in self.owed:
            whole[start : start + len(value)].add_(value.to(whole.device), alpha=self.io.schedule.loss_scale)

    # --- submit -------------------------------------------------------------------------------------------------------

    def post(self, wait: bool) -> bool:
        """Submits it if its values have been brought to the arena, or after waiting. Returns whether it has."""
        if self.copying is None:
            return True
        if wait:
            self.copying.wait()
        elif not self.copying.done():
            return False
        self.copying = None
        assert self.stage is not None
        self.stage.submit(self)
        return True

    def submit(self) -> None:
        """Adds owed values to the values in the arena, and submits them."""
        if self.owed:
            self.add_owed(self.flat)
            self.owed.clear()
        self.announce()

    def announce(self, said: wire.Ready | None = None, share: int = _OWN, asks_for_part: bool = False) -> None:
        """Sends the message that describes this worker's contribution.

        Args:
            said: its terms; None: those of the schedule.
            share, asks_for_part: see `wire.Ready`.
        """
        said = said or self.io.schedule.terms(self.slots)
        said.urgency, said.share, said.asks_for_part = self.urgency, share, asks_for_part
        self._operation = self._channel.ready(*self._identity, said, self.nbytes, self.flush)

    def give_up(self, why: str) -> None:
        """Reports that this rank has no part of this step, so that all ranks fail it if possible. `why`: a sentence."""
        for stage in self.stages:
            stage.give_up(why)
        self.stage = None
        self._operation = self._channel.ready(*self._identity, terms(gives_up=why))
        self.sent = True

    # --- wait ---------------------------------------------------------------------------------------------------------

    def await_end(self, operation: Operation) -> None:
        """Waits until an exchange has ended; raises `HorovodInternalError` if it failed."""
        try:
            self._channel.wait(operation)
        except HorovodInternalError as error:
            if self.stage is not None:
                self.stage.failed(error)
            raise
        for stage in self.stages:
            stage.ended()

    def await_result(self) -> None:
        """Waits for this step's results, and leaves them where they are. Raises `HorovodInternalError`."""
        if self._operation is not None:
            self.await_end(self._operation)

    def has_answer(self) -> bool:
        """Tells whether nothing of this step has to be waited for any more."""
        return self._operation is None or self._channel.poll(self._operation)

    def await_answer(self) -> None:
        """Waits for the answer of a home that does not expect this worker to wait, and may do without it then."""
        if not self.has_answer():
            self._here.client.awaits_answers(self._identity[1])
            self.await_result()

    def gather(self) -> None:
        """Starts to gather the results from the ranks of the node, if each has a part. Raises `HorovodInternalError`.
        The exchanges of this step have ended well, so that all ranks gather, or none."""
        if self._operation is not None and self.stage is not None:
            self.stage.gather(self)

    # --- apply --------------------------------------------------------------------------------------------------------

    def receive(self, share: float = 1.0) -> None:
        """Waits for this step's results, and puts them, multiplied by `share`, where they belong. Raises
        `HorovodInternalError`."""
        if self._operation is not None:
            self.land(self._operation, share)

    def hand_over(self) -> Operation:
        """Returns the running exchange, which the caller has to `land` before the bucket is sent again."""
        assert self._operation is not None
        return self._operation

    def land(self, operation: Operation, share: float = 1.0) -> None:
        """Waits for an operation that was handed over, and applies its results as `receive` does."""
        self.await_end(operation)
        if self.stage is not None:
            self.stage.await_gathered(self)
        _, clock, plan = operation.about
        record = self._trace.record
        record(_APPLY_BEGIN, self._label, 0, clock, plan)
        if not self.direct:
            self.weight = operation.sizes[1] * _WEIGHT_UNIT if len(operation.sizes) > 1 else 1.0
            with torch.no_grad():
                self._apply(share, added=operation.sizes[:1] == (1,))
        record(_APPLY_END, self._label, 0, clock, plan)

    def _apply(self, share: float, added: bool) -> None:
        """Puts results where they belong, multiplied by `share`. `added`: they are changes, and not values."""
        slots = [slot for slot in self.slots if slot.sparse or not slot.direct]
        views: list[torch.Tensor] = [slot.view for slot in slots]  # type: ignore[misc]
        results = views if self.stage is None else self.stage.results(self, slots)
        if self.io.compressor is not None:
            results = [slot.decompress(self.io.compressor, one) for slot, one in zip(slots, results, strict=True)]
        if share != 1.0:
            results = [result * share for result in results]
        self.io.rule.take(slots, results, added)
