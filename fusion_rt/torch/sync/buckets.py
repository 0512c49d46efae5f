"""The buckets of an optimizer's plan, on the side of the worker.

Gradients are copied when their bucket is complete rather than in each hook: that was measured at half the time. It is
one call of `_foreach_copy_` instead of a `copy_` from Python for each tensor, and skips what lies in the arena already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from fusion_rt import wire
from fusion_rt.client import Operation, Terms
from fusion_rt.errors import HorovodInternalError, failure_of
from fusion_rt.torch import ops
from fusion_rt.torch.core import device
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.trace_format import Flush, Kind

if TYPE_CHECKING:
    from fusion_rt.torch.node.reduction import Combining, NodeReduction

# As plain integers: asking an enumeration for a member, and packing it, costs as much as recording a number.
_FULL, _COPY_BEGIN, _COPY_END = int(Kind.FULL), int(Kind.COPY_BEGIN), int(Kind.COPY_END)
_APPLY_BEGIN, _APPLY_END = int(Kind.APPLY_BEGIN), int(Kind.APPLY_END)
_NOTHING = nullcontext()


class Bucket(ABC):
    """Parameters that are reduced together.

    Attributes:
        slots: its parameters.
        missing: how many of them still wait for their gradient in this step.
        patient: it is sent at the end of the backward pass, which computes one of its gradients in parts.
        sent: its part of this step is on its way.
        flush: why it is sent when it is.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.missing = len(slots)
        self.patient = False
        self.sent = False
        self.flush = Flush.STEP

    def rewind(self) -> None:
        """The next step begins."""
        self.missing = len(self.slots) + self.patient
        self.sent = False
        self.flush = Flush.STEP

    def fill(self) -> None:
        """The last gradient of this step has come. By default there is nothing to be done about it."""
        return

    def send(self) -> None:
        """Submits this step's part; a parameter without gradient contributes zeros."""
        self._send()
        self.sent = True

    @abstractmethod
    def _send(self) -> None: ...

    def post(self, wait: bool) -> bool:
        """Goes on with what could not be submitted at once, having waited for it or if it is ready; whether it was."""
        return True

    def give_up(self, why: str) -> None:
        """This rank has no part of this step: where it can be said, the step fails on all ranks. `why`: a sentence."""
        self.send()

    @abstractmethod
    def receive(self) -> None:
        """Waits for the reduction, and puts its results where they belong. Raises `HorovodInternalError`."""

    @abstractmethod
    def abandon(self) -> None:
        """Waits for the reduction, whatever comes of it."""


class DenseBucket(Bucket):
    """Parameters whose place in the arena is contiguous: one message submits them all.

    Args:
        here: this worker's membership.
        plan, index: of the bucket.
        name: for messages to people.
        terms: asked when it is sent; what is sent with it.

    Attributes:
        added: the result is to be added to what the worker has; known when it has come.
        urgency: the less, the sooner its result is needed.
        nbytes: its size, for the recorder.
        flat: its place in the arena (1-D).
        node: what combines it with those of other ranks of the node, in steps in which that is done.
        owed: places in the bucket, and what is to be added there (both 1-D) to what is sent next.
    """

    def __init__(
        self,
        here: Runtime,
        plan: int,
        index: int,
        name: str,
        slots: Sequence[Slot],
        terms: Callable[[], Terms],
    ) -> None:
        super().__init__(slots)
        self.added = False
        self.urgency = self.nbytes = 0
        self.flat: torch.Tensor | None = None
        self.node: NodeReduction | None = None
        self.owed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._share = wire.OWN
        self._here = here
        self._terms = terms
        self._identity = (name, plan, index)
        self._label = f"bucket {index}"
        self._operation: Operation | None = None
        self._copying: device.Copying | None = None
        self._combining: Combining | None = None  # this step's, in the node

    def rewind(self) -> None:
        super().rewind()
        self._operation = self._copying = self._combining = None

    def fill(self) -> None:
        self._record(_FULL)

    def submit(self) -> None:
        """Submits what is in the arena already."""
        self._operation = self._here.client.ready(*self._identity, self._said(), self.nbytes, self.flush)

    def _send(self) -> None:
        client = self._here.client
        ready = client.ready  # asked for first of all, because a forked child has none
        if self.node is not None and self.node.reduces:
            self._send_in_node(self.node, gradients=True)
            return
        self._share = wire.OWN
        host: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        remote: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for slot in self.slots:
            view = slot.view
            assert view is not None
            if slot.direct and (value := slot.parameter.grad) is not None and not value.is_sparse:
                if value is not view:  # as `outgoing` does; but a call for each of so many would take twice as long
                    slot.sparse = 0
                    slot.parameter.grad = view
                    host[0].append(view)
                    host[1].append(value)
                continue
            value = slot.outgoing()
            if value is view:
                continue
            if value is None:
                view.zero_()
                continue
            places, values = host if slot.direct or device.layer.is_host(value) else remote
            places.append(view)
            values.append(value)
        with _without_graph():
            if host[0]:
                self._record(_COPY_BEGIN)
                torch._foreach_copy_(*host)
                self._record(_COPY_END)
            if remote[0]:
                self._copying = device.layer.copy(*remote)
                return
        self._pay()
        self._operation = ready(*self._identity, self._said(), self.nbytes, self.flush)

    def give_up(self, why: str) -> None:
        if self.node is not None and self.node.reduces:
            self.node.give_up(why)
        self._share = wire.OWN
        self._operation = self._here.client.ready(*self._identity, Terms(gives_up=why))
        self.sent = True

    def send_nothing(self) -> None:
        """Takes part in a reduction in the node without changing its result."""
        assert self.node is not None
        self._send_in_node(self.node, gradients=False)
        self.sent = True

    def _send_in_node(self, node: NodeReduction, gradients: bool) -> None:
        assert self.flat is not None
        staging = node.staging(self._identity[2], self.flat, self.slots)
        with torch.no_grad():
            if gradients:
                self._stage(staging.places)
            else:
                node.fill_with_nothing(staging)
            for place, value in self.owed:
                start = (place.data_ptr() - self.flat.data_ptr()) // place.element_size()
                staging.values[start : start + place.numel()].add_(value.to(staging.values.device))
            self._copying = self._combining = node.reduce(staging, self._follow)
        self._share = wire.OF_NODE if node.is_leader else wire.ELSEWHERE

    def _follow(self, values: torch.Tensor) -> device.Copying:
        """Starts to bring what the node contributes, on its device (1-D), to the arena."""
        assert self.flat is not None
        return device.layer.copy([self.flat], [values.to(self.flat.dtype)])

    def _stage(self, places: Sequence[torch.Tensor]) -> None:
        """Copies this rank's gradients to their places on their device; zeros where there is none."""
        filled, values = [], []
        for slot, place in zip(self.slots, places, strict=True):
            value = slot.outgoing()
            if value is None:
                place.zero_()
            else:
                filled.append(place)
                values.append(value)
        if filled:
            self._record(_COPY_BEGIN)
            torch._foreach_copy_(filled, values)
            self._record(_COPY_END)

    def post(self, wait: bool) -> bool:
        if self._copying is not None:
            if wait:
                self._copying.wait()
            elif not self._copying.done():
                return False
            self._copying = None
            if self._combining is None:
                self._pay()
            elif self._combining.why:
                self._share = wire.ELSEWHERE  # of all ranks of the node, so that the daemon fails it everywhere at once
            else:
                self.owed.clear()
            self.submit()
        return True

    def _record(self, kind: int) -> None:
        _, plan, index = self._identity
        self._here.trace.record(kind, self._label, 0, self._here.client.next_clock(plan, index), plan)

    def _said(self) -> Terms:
        terms = self._terms()
        return terms._replace(urgency=self.urgency, share=self._share)

    def _pay(self) -> None:
        while self.owed:
            place, value = self.owed.pop()
            place.add_(value)

    def receive(self) -> None:
        assert self._operation is not None
        self.land(self._operation)

    def hand_over(self) -> Operation:
        """The reduction that is under way, which the caller has to `land` before the bucket is sent again."""
        assert self._operation is not None
        return self._operation

    def land(self, operation: Operation) -> None:
        """Waits for a reduction, and puts its results where they belong. Raises `HorovodInternalError`."""
        self.added = self._wait(operation).sizes == (1,)
        _, clock, plan = operation.about
        self._here.trace.record(_APPLY_BEGIN, self._label, 0, clock, plan)
        landings = [(slot, slot.landing()) for slot in self.slots if slot.sparse or not slot.direct]
        if landings:
            self._take(landings)
        self._here.trace.record(_APPLY_END, self._label, 0, clock, plan)

    def _take(self, landings: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        elsewhere = [(landing, slot.view) for slot, landing in landings if landing is not slot.view]
        with torch.no_grad():
            if elsewhere:
                self._here.copying.append(device.layer.copy(*zip(*elsewhere, strict=True)))
            for slot, landing in landings:
                slot.take(landing)

    def await_end(self, operation: Operation) -> None:
        """Waits until a reduction has ended; raises `HorovodInternalError` if it failed."""
        self._wait(operation)

    def abandon(self) -> None:
        if self._operation is not None and not self._operation.done:
            self._wait(self._operation)

    def _wait(self, operation: Operation) -> Operation:
        try:
            return self._here.client.wait(operation)
        except HorovodInternalError as error:
            if self.node is not None and self._share != wire.OWN:
                self.node.give_up(str(error))  # whoever waits for this rank in the node is told
                if self._combining is not None and self._combining.why:
                    raise failure_of(f"{error}: {self._combining.why}") from error
            raise


class SparseBucket(Bucket):
    """One parameter whose gradient is sparse on some rank: everybody gets the rows of all, as in Horovod.

    Args:
        slot: the parameter.
        sparse: number of sparse dimensions.
        name: of the operation.
        op: how the ranks' values are combined.
        process_set: the ranks that take part.
    """

    def __init__(self, slot: Slot, sparse: int, name: str, op: wire.Op, process_set: ProcessSet) -> None:
        super().__init__([slot])
        self._slot = slot
        self._sparse = sparse
        self._how = (name, op, process_set)
        self._handle: Callable[[], torch.Tensor] | None = None

    def rewind(self) -> None:
        super().rewind()
        self._handle = None

    def _send(self) -> None:
        gradient = self._slot.parameter.grad
        if gradient is None:
            like = self._slot.parameter
            shape = list(like.shape)
            indices = torch.empty((self._sparse, 0), dtype=torch.int64, device=like.device)
            values = torch.empty([0, *shape[self._sparse :]], dtype=like.dtype, device=like.device)
            gradient = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        elif not gradient.is_sparse:
            gradient = gradient.detach().to_sparse(self._sparse)
        name, op, process_set = self._how
        self._handle = ops.sparse_allreduce_async(gradient.coalesce(), name=name, op=op, process_set=process_set)

    def receive(self) -> None:
        assert self._handle is not None
        self._slot.parameter.grad = self._handle()

    def abandon(self) -> None:
        if self._handle is not None:
            self._handle()


def _without_graph() -> AbstractContextManager[Any]:
    """A context without autograd, which a backward pass is already: `torch.no_grad` takes 20 us with cold caches."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING
