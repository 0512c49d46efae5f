"""The way of an optimizer's gradients: from the hook that sees one arrive to the reduced gradient in `p.grad`.

A *slot* is a parameter's place in a bucket. In the first step the slots only note in which order gradients arrive; that
order is proposed, and the plan says which bucket each belongs to. From then on a hook counts its bucket down, and the
last one copies the bucket's gradients into the arena at once and sends one message. Afterwards `p.grad` *is* the place
in the arena: gradients that accumulate there need no copy at all, and reduced ones never do.

Copying at the end of a bucket rather than in each hook was measured at half the time: one call of `_foreach_copy_`
instead of a `copy_` from Python for each tensor, and what lies there already is skipped.

A slot that is not `direct` cannot have its gradient in the arena: the parameter is on another device, or the script
compresses its gradient. There the bucket's part is written before and read after the reduction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_rt import wire
from fusion_rt.client import Operation
from fusion_rt.topology import GLOBAL_SET
from fusion_rt.torch import basics
from fusion_rt.torch.compression import NoneCompressor
from fusion_rt.torch.tensors import TORCH_DTYPES, dtype_name

_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


class Slot:
    """A parameter, and its place in the plan once there is one.

    Attributes:
        name: its name, the same on all ranks.
        parameter: the parameter.
        direct: `p.grad` may be the place in the arena itself.
        passes_left: backward passes until its gradient is complete; negative: there were too many.
        bucket: its bucket, or None while there is no plan.
        view: its place in the bucket, in the parameter's shape and memory order; in the compressed gradient's shape, if
            not direct.
        compressed, context: what the compressor made of the gradient before there was a place for it, and for its end.
    """

    __slots__ = (
        "_exchange",
        "_hook",
        "bucket",
        "compressed",
        "context",
        "direct",
        "name",
        "parameter",
        "passes_left",
        "view",
    )

    def __init__(self, exchange: GradientExchange, name: str, parameter: torch.Tensor) -> None:
        self._exchange = exchange
        self.name = name
        self.parameter = parameter
        self.direct = exchange.compressor is NoneCompressor and parameter.is_cpu
        self.passes_left = exchange.passes
        self.bucket: BucketState | None = None
        self.view: torch.Tensor | None = None
        self.compressed: torch.Tensor | None = None
        self.context: Any = None
        self._take_over(parameter)
        self._hook = parameter.register_post_accumulate_grad_hook(self.arrived)  # type: ignore[no-untyped-call]

    def arrived(self, parameter: torch.Tensor) -> None:
        """The hook: autograd has added to `p.grad`."""
        exchange = self._exchange
        if exchange.idle:
            exchange.begin()
        self.passes_left = left = self.passes_left - 1
        if left > 0:
            return
        if left < 0:
            raise AssertionError(_TOO_MANY)
        bucket = self.bucket
        if bucket is None:
            exchange.arrivals.append(self)
            return
        bucket.missing -= 1
        if not bucket.missing:
            exchange.send(bucket)

    def forget(self) -> None:
        """Takes the hook off."""
        self._hook.remove()

    def _take_over(self, parameter: torch.Tensor) -> None:
        """A parameter belongs to the optimizer made last: the owner before is told, and objects if it is used again."""
        for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, Slot):
                owner.forget()
                owner._exchange.lost = owner.name


class BucketState:
    """A bucket of the plan in force.

    Attributes:
        index: its number in the plan.
        name: for messages to people.
        slots, indirect: its parameters, direct and not.
        clock: how often it has been sent.
        missing: how many of them still wait for their gradient in this step.
        operation: its reduction, once it has been sent in this step.
    """

    __slots__ = ("clock", "index", "indirect", "missing", "name", "operation", "slots")

    def __init__(self, index: int, name: str, slots: list[Slot]) -> None:
        self.index = index
        self.name = name
        self.slots = [slot for slot in slots if slot.direct]
        self.indirect = [slot for slot in slots if not slot.direct]
        self.missing = len(slots)
        self.clock = 0
        self.operation: Operation | None = None


@dataclass(frozen=True)
class OptimizerStatistics:
    """What an optimizer's communication has cost this worker so far.

    Attributes:
        steps: how often gradients were reduced.
        plans: how often the buckets were planned.
        buckets: messages that a step sends.
        nbytes: bytes of gradients that a step reduces.
        waited_seconds: time for which `synchronize` (or `step`) kept the script waiting, in all steps together.
        last_waited_seconds: the same, in the last step.
    """

    steps: int
    plans: int
    buckets: int
    nbytes: int
    waited_seconds: float
    last_waited_seconds: float


class GradientExchange:
    """Reduces the gradients of one set of parameters, step after step.

    Args:
        reduction: how the ranks' gradients are combined.
        compressor: applied to each gradient before and after.
        passes: backward passes that make up a gradient.
        parameters: called before a step; names and parameters that are to be reduced, in a fixed order.

    Attributes:
        idle: no gradient has arrived since the last reduction.
        arrivals: slots whose gradient has arrived in this step, in that order, while there is no plan.
        lost: name of a parameter that another optimizer has taken over; empty if there is none.
    """

    def __init__(
        self,
        reduction: wire.Reduction,
        compressor: Any,
        passes: int,
        parameters: Callable[[], Sequence[tuple[str, torch.Tensor]]],
    ) -> None:
        self.compressor = compressor
        self.passes = passes
        self.idle = True
        self.arrivals: list[Slot] = []
        self.lost = ""
        self._reduction = reduction
        self._parameters = parameters
        self._runtime = basics.runtime()
        self._group = self._runtime.next_group()
        self._slots: dict[int, Slot] = {}  # by id of the parameter, which the slot keeps alive
        self._buckets: list[BucketState] | None = None
        self._plan = 0
        self._segment: int | None = None
        self._proposals = 0
        self._steps = self._plans = self._nbytes = 0
        self._waited = self._last_waited = 0.0
        self._watch(self._parameters())

    def begin(self) -> None:
        """The first gradient of a step, or its reduction if there was none: makes sure that the plan is the right one.

        Raises:
            ValueError: a parameter belongs to another optimizer now.
        """
        if self.lost:
            raise ValueError(f"parameter {self.lost!r} has been given to another DistributedOptimizer since this one "
                             "was made; a parameter can be reduced by one of them only")  # fmt: skip
        parameters = self._parameters()
        moved = self._runtime is not basics.runtime()
        if moved or [id(p) for _, p in parameters] != list(self._slots):
            self._give_up_plan(basics.runtime())
            self._watch(parameters)
        self.idle = False

    def send(self, bucket: BucketState) -> None:
        """Puts a bucket's gradients into the arena and says so; a parameter without gradient contributes zeros."""
        ready = self._runtime.client.ready  # first of all, because a forked child has none
        places, gradients = [], []
        for slot in bucket.slots:
            gradient = slot.parameter.grad
            if gradient is slot.view:
                continue
            assert slot.view is not None
            if gradient is None:
                slot.view.zero_()
            else:
                places.append(slot.view)
                gradients.append(gradient)
            slot.parameter.grad = slot.view
        if places:
            with torch.no_grad():
                torch._foreach_copy_(places, gradients)
        for slot in bucket.indirect:
            self._write(slot)
        bucket.operation = ready(bucket.name, self._plan, bucket.index, bucket.clock)
        bucket.clock += 1

    def synchronize(self) -> None:
        """Reduces what has not been sent yet and waits until every `p.grad` is the reduced gradient.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        began = time.perf_counter()
        if self.idle:
            self.begin()
        try:
            if self._buckets is None:
                self._make_plan()
            buckets = self._buckets or []
            for bucket in buckets:
                if bucket.operation is None:
                    self.send(bucket)
            self._receive(buckets)
            self._steps += 1
        finally:
            self._end_step()
        self._last_waited = time.perf_counter() - began
        self._waited += self._last_waited

    def complete(self) -> bool:
        """Whether a gradient of this step is complete, so that it is being reduced or waits for that only."""
        return not self.idle and any(slot.passes_left <= 0 for slot in self._slots.values())

    def discard(self) -> None:
        """Forgets the gradients that have arrived since the last reduction."""
        if not self.idle:
            for bucket in self._buckets or []:
                if bucket.operation is not None and not bucket.operation.done:
                    self._runtime.client.wait(bucket.operation)
            self._end_step()

    def set_passes(self, passes: int) -> None:
        """Backward passes that make up a gradient, from the next step on."""
        self.passes = passes
        if self.idle:
            self._rewind()

    def release(self) -> None:
        """The optimizer is gone. Called by a finalizer, and so at any moment: nothing is sent here."""
        for slot in self._slots.values():
            slot.forget()
        self._slots.clear()
        if self._segment is not None:
            self._runtime.retired.append(self._segment)
            self._segment = None

    def statistics(self) -> OptimizerStatistics:
        """What it has cost so far."""
        buckets = len(self._buckets or [])
        return OptimizerStatistics(self._steps, self._plans, buckets, self._nbytes, self._waited, self._last_waited)

    # --- one step -----------------------------------------------------------------------------------------------------

    def _receive(self, buckets: Sequence[BucketState]) -> None:
        client = self._runtime.client
        for bucket in buckets:
            assert bucket.operation is not None
            client.wait(bucket.operation)
            for slot in bucket.indirect:
                self._read(slot)

    def _end_step(self) -> None:
        for bucket in self._buckets or []:
            bucket.operation = None
            bucket.missing = len(bucket.slots) + len(bucket.indirect)
        self.arrivals.clear()
        self._rewind()
        self.idle = True

    def _rewind(self) -> None:
        for slot in self._slots.values():
            slot.passes_left = self.passes
            slot.compressed = None

    def _compress(self, slot: Slot) -> torch.Tensor:
        gradient = slot.parameter.grad
        if gradient is None:
            gradient = slot.parameter.grad = torch.zeros_like(slot.parameter)
        compressed, slot.context = self.compressor.compress(gradient)
        slot.compressed = compressed
        return torch.as_tensor(compressed)

    def _write(self, slot: Slot) -> None:
        compressed = self._compress(slot) if slot.compressed is None else slot.compressed
        assert slot.view is not None
        if compressed.shape != slot.view.shape or compressed.dtype != slot.view.dtype:
            raise ValueError(f"the compressor made {compressed.dtype} {list(compressed.shape)} of the gradient of "
                             f"{slot.name!r}, but {slot.view.dtype} {list(slot.view.shape)} in an earlier step; they "
                             "have to be alike")  # fmt: skip
        slot.view.copy_(compressed.detach())
        slot.compressed = None

    def _read(self, slot: Slot) -> None:
        assert slot.view is not None
        parameter = slot.parameter
        reduced = slot.view.to(parameter.device, copy=True)
        parameter.grad = self.compressor.decompress(reduced, slot.context)
        slot.context = None

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _watch(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Has a slot for each of these parameters, in their order, and for no other."""
        known, self._slots = self._slots, {}
        for name, parameter in parameters:
            slot = known.pop(id(parameter)) if id(parameter) in known else Slot(self, name, parameter)
            self._slots[id(parameter)] = slot
        for slot in known.values():
            slot.forget()

    def _give_up_plan(self, runtime: basics.Runtime) -> None:
        for slot in self._slots.values():
            slot.bucket = slot.view = None
        self._buckets = None
        if runtime is not self._runtime:
            self._runtime, self._segment, self._proposals = runtime, None, 0
            self._group = runtime.next_group()
        if self._segment is not None:
            runtime.client.arena.drop_segment(self._segment)
            self._segment = None

    def _make_plan(self) -> None:
        runtime, client = self._runtime, self._runtime.client
        order = {slot.name: slot for slot in self.arrivals}
        order.update((slot.name, slot) for slot in self._slots.values() if slot.name not in order)
        specs = tuple(self._spec(slot) for slot in order.values())
        if not specs:
            self._buckets = []
            return
        proposal = wire.Proposal(self._group, GLOBAL_SET, self._proposals, self._reduction, specs)
        self._proposals += 1
        plan = client.wait(client.propose(proposal)).plan
        assert plan is not None
        with runtime.allocating:
            runtime.collect()
            self._segment, segment = client.plan_segment(plan)
        self._plan, self._nbytes = plan.id, 0
        self._plans += 1
        self._buckets = []
        for bucket in plan.buckets:
            dtype = TORCH_DTYPES[bucket.dtype]
            flat = torch.frombuffer(segment.view, dtype=dtype, count=bucket.numel, offset=bucket.offset)
            self._nbytes += flat.nbytes
            slots = [order[tensor.name] for tensor in bucket.tensors]
            state = BucketState(bucket.index, f"{self._group}, bucket {bucket.index}", slots)
            for slot, tensor in zip(slots, bucket.tensors, strict=True):
                slot.bucket = state
                slot.view = _place(slot, flat[tensor.start : tensor.start + tensor.numel])
            self._buckets.append(state)

    def _spec(self, slot: Slot) -> wire.TensorSpec:
        gradient = slot.parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise ValueError(f"the gradient of {slot.name!r} is sparse, which is not supported; make the layer without "
                             "sparse=True")  # fmt: skip
        if slot.direct:
            parameter = slot.parameter
            shape = parameter.permute(_memory_order(parameter)).shape
            return wire.TensorSpec(slot.name, dtype_name(parameter.dtype), tuple(shape))
        compressed = self._compress(slot)
        return wire.TensorSpec(slot.name, dtype_name(compressed.dtype), tuple(compressed.shape))


def _place(slot: Slot, flat: torch.Tensor) -> torch.Tensor:
    """A slot's elements of a bucket in the shape and memory order that its gradient has."""
    if not slot.direct:
        assert slot.compressed is not None
        return flat.view(slot.compressed.shape)
    order = _memory_order(slot.parameter)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([slot.parameter.shape[dim] for dim in order]).permute(inverse)


def _memory_order(parameter: torch.Tensor) -> list[int]:
    """A parameter's dimensions from the outermost in memory to the innermost.

    Autograd gives a gradient its parameter's memory format (channels_last, say), and the update is fastest when they
    are alike, so the place in the bucket has it, too. Ranks then have to agree about it, which is checked, because the
    shape that is proposed is the one in memory.
    """
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return order if parameter.permute(order).is_contiguous() else list(range(parameter.dim()))
