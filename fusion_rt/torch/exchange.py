"""The way of an optimizer's gradients, step after step: from the hook that sees one arrive to the reduced gradient.

In the first step the slots only note in which order gradients arrive; that order is proposed, and the plan says which
bucket each belongs to. From then on a hook counts its bucket down, and the last one copies the bucket's gradients into
the arena at once and sends one message. Afterwards `p.grad` *is* the place in the arena: gradients that accumulate
there need no copy at all, and reduced ones never do.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from fusion_rt import wire
from fusion_rt.client import Terms
from fusion_rt.errors import HorovodInternalError
from fusion_rt.settings import Settings
from fusion_rt.torch import device
from fusion_rt.torch.buckets import Bucket, DenseBucket, SparseBucket
from fusion_rt.torch.compression import NoneCompressor
from fusion_rt.torch.manner import Manner
from fusion_rt.torch.memory import Memory, Place
from fusion_rt.torch.node.joining import stand_in
from fusion_rt.torch.node.reduction import NodeReduction, reduction_in_node
from fusion_rt.torch.ops.signatures import id_of
from fusion_rt.torch.parameters import Trained
from fusion_rt.torch.recording import Steps
from fusion_rt.torch.runtime import Runtime, is_initialized, runtime
from fusion_rt.torch.selected_buckets import Selections
from fusion_rt.torch.slots import Named, Slot, in_order
from fusion_rt.torch.tensors import TORCH_DTYPES
from fusion_rt.trace_format import Flush

_serial = itertools.count()
_all: weakref.WeakSet[GradientExchange] = weakref.WeakSet()


@dataclass(frozen=True)
class OptimizerStatistics:
    """What an optimizer's communication has cost this worker so far.

    Attributes:
        steps: how often gradients were reduced.
        plans: how often the buckets were planned.
        buckets: messages that a step sends.
        nbytes: bytes of gradients that a step reduces, without sparse ones.
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
        manner: how.
        passes: backward passes that make up a gradient.
        trained: asked before a step; what is to be reduced.

    Attributes:
        idle: no gradient has arrived since the last reduction.
        arrivals: slots whose gradient has arrived in this step, in that order, while there is no plan.
        copying: buckets whose gradients are on their way from a device to the arena.
        node: what combines its gradients in this node, if anything but the daemon does.
        serial: in the order in which exchanges were made.
        lost: name of a parameter that another optimizer has taken over; empty if there is none.
        memory: what daemons remember of its gradients.
        selections: what of that is with this worker instead.
        steps: the steps that it is part of, as they are recorded.
    """

    memory_type: ClassVar[type[Memory]] = Memory
    """Of its `memory`."""
    may_be_late: ClassVar[bool] = False
    """Whether updates can be applied one step late."""

    def __init__(self, manner: Manner, passes: int, trained: Trained) -> None:
        self.compressor = manner.compressor
        self.sparse_as_dense = manner.sparse_as_dense
        self.passes = passes
        self.idle = True
        self.arrivals: list[Slot] = []
        self.copying: deque[Bucket] = deque()
        self.lost = ""
        self.node: NodeReduction | None = None
        self._manner = manner
        self._trained = trained
        self.memory = self.memory_type(self, manner, trained)
        self._runtime = runtime()
        self.steps = Steps(self._runtime.trace)
        self._group = self._name()
        self._slots: dict[int, Slot] = {}  # by id of the parameter, which the slot keeps alive
        self._buckets: list[Bucket] | None = None
        self._plan = 0
        self._segment: int | None = None
        self._steps = self._plans = self._nbytes = 0
        self._waited = self._last_waited = 0.0
        self._agreed: wire.Plan | None = None
        self._eager = manner.eager
        self._replanning = None if manner.replanning is None else manner.replanning()
        settings = Settings.from_env()
        self._prioritises = settings.priority
        self.selections = Selections(manner.compressor, settings.gpu_selection == "auto")
        self.serial = next(_serial)
        _all.add(self)
        self._watch(trained.named())

    def group_of(self, slot: Slot) -> int:
        """Index of the parameter group that a slot's parameter is in."""
        return self._trained.group_of(slot.parameter)

    @property
    def slots(self) -> Iterable[Slot]:
        """Of all parameters that are reduced."""
        return self._slots.values()

    def begin(self) -> None:
        """The first gradient of a step, or its reduction if there was none: makes sure that the plan is the right one.

        Raises:
            ValueError: a parameter belongs to another optimizer now.
        """
        if self.lost:
            raise ValueError(f"parameter {self.lost!r} has been given to another DistributedOptimizer since this one "
                             "was made; a parameter can be reduced by one of them only")  # fmt: skip
        here = runtime()
        if self._runtime is not here or list(map(id, self._trained.tensors())) != list(self._slots):
            self._give_up_plan(here)
            self._watch(self._trained.named())
        elif self._replanning is not None and self._replanning.due(here):
            self._give_up_plan(here)
        self.memory.begin()
        if self.node is not None and self._buckets is not None:
            self.node.begin()
        self._move_selections(here)
        self.idle = False
        self.steps.first_gradient()

    def advance(self, bucket: Bucket) -> None:
        """Sends the bucket if it is complete, and what was on its way from a device."""
        if not bucket.missing:
            bucket.fill()
            if self._eager:
                for full in self._full(bucket):
                    full.flush = Flush.FULL
                    self._send(full)
        while self.copying and self.copying[0].post(wait=False):
            self.copying.popleft()

    def synchronize(self) -> None:
        """Reduces what has not been sent yet and waits until every `p.grad` is the reduced gradient.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        began = time.perf_counter()
        if self.idle:
            self.begin()
        try:
            for bucket in self._submit():
                bucket.receive()
            self._steps += 1
        finally:
            self._end_step()
        self._last_waited = time.perf_counter() - began
        self._waited += self._last_waited
        if self._replanning is not None:
            self._replanning.stepped(self._waited, all_here=True)

    def _submit(self) -> list[Bucket]:
        """Sends what has not been sent of this step, by a new plan if there is none. Returns all buckets."""
        if self._buckets is None:
            self._make_plan()
        buckets = self._buckets or []
        for bucket in buckets:
            if not bucket.sent:
                self._send(bucket)
        while self.copying:
            self.copying.popleft().post(wait=True)
        return buckets

    def complete(self) -> bool:
        """Whether a gradient of this step is complete, so that it is being reduced or waits for that only."""
        return not self.idle and any(slot.passes_left <= 0 for slot in self.slots)

    def discard(self) -> None:
        """Forgets the gradients that have arrived since the last reduction."""
        if self.idle:
            return
        with contextlib.suppress(HorovodInternalError):  # whatever becomes of them: nobody is interested any more
            while self.copying:
                self.copying.popleft().post(wait=True)
        for bucket in self._buckets or []:
            if bucket.sent:
                with contextlib.suppress(HorovodInternalError):
                    bucket.abandon()
        self._end_step()

    def set_passes(self, passes: int) -> None:
        """Backward passes that make up a gradient, from the next step on."""
        self.passes = passes
        if self.idle:
            self._rewind()

    def release(self) -> None:
        """The optimizer is gone. Called by a finalizer, and so at any moment: nothing is sent here."""
        for slot in self.slots:
            slot.forget()
        self._slots.clear()
        if self._segment is not None:
            self._runtime.retired.append(self._segment)
            self._segment = None
        if self.node is not None:
            self.node.close()
            self.node = None

    def statistics(self) -> OptimizerStatistics:
        """What it has cost so far."""
        buckets = len(self._buckets or [])
        return OptimizerStatistics(self._steps, self._plans, buckets, self._nbytes, self._waited, self._last_waited)

    def is_of(self, here: Runtime) -> bool:
        """Whether it has a plan in this membership."""
        return self._runtime is here and self._buckets is not None

    def finish(self) -> None:
        """Applies what waits for the next forward pass; nothing does."""

    def end_standing_in(self) -> None:
        """What was sent without gradients of this rank has been reduced, and is nothing to it."""
        self._end_step()

    def enter(self, here: Runtime) -> None:
        """Belongs to another membership from now on."""
        if here is not self._runtime:
            self._give_up_plan(here)

    def place(self) -> Place | None:
        """Where its memory is; None if it remembers nothing, or this worker is no member of a job.

        Raises:
            ValueError: gradients are under way.
        """
        if not self.memory.remembers or not self._slots or not is_initialized():
            return None
        if any(bucket.sent for bucket in self._buckets or []):
            raise ValueError("gradients of this optimizer are being exchanged; save or load its state between step() "
                             "and the next backward()")  # fmt: skip
        here = runtime()
        self.enter(here)
        return self._place(here)

    def _place(self, here: Runtime) -> Place:
        return Place(here, self._manner.process_set, self._group, self._agreed)

    def _process_set(self, here: Runtime) -> int:
        return id_of(here, self._manner.process_set, "allreduce")

    def _send(self, bucket: Bucket) -> None:
        if self._replanning is not None:
            self._replanning.sent()
        bucket.send()
        if not bucket.post(wait=False):
            self.copying.append(bucket)

    def _full(self, bucket: Bucket) -> Iterable[Bucket]:
        """What can be sent now that this bucket is full. What is combined in the node goes in the plan's order."""
        if self.node is None or not self.node.reduces or not isinstance(bucket, DenseBucket):
            return (bucket,)
        return list(itertools.takewhile(lambda one: not one.missing, (one for one in self.dense if not one.sent)))

    @property
    def dense(self) -> list[DenseBucket]:
        """The plan's buckets; none while there is no plan."""
        return [bucket for bucket in self._buckets or [] if isinstance(bucket, DenseBucket)]

    def _end_step(self) -> None:
        for bucket in self._buckets or []:
            bucket.rewind()
        self.copying.clear()
        self.arrivals.clear()
        self._rewind()
        self.idle = True

    def _rewind(self) -> None:
        passes = self.passes
        for slot in self.slots:
            slot.passes_left = passes
        if self.compressor is not NoneCompressor:
            for slot in self.slots:
                slot.compressed = slot.context = None

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        """Of this exchange's plans, the same on all its ranks."""
        return self._runtime.next_group(self._manner.process_set.process_set_id)

    def _watch(self, parameters: Sequence[Named]) -> None:
        """Has a slot for each of these parameters, in their order, and for no other."""
        known, self._slots = self._slots, {}
        for named in parameters:
            slot = known.pop(id(named.parameter), None)
            self._slots[id(named.parameter)] = slot or self._manner.slot(self, named)
        for slot in known.values():
            slot.forget()

    def _give_up_plan(self, here: Runtime) -> None:
        for slot in self.slots:
            slot.bucket = slot.view = None
        self._buckets = None
        if here is self._runtime:
            self.selections.lay_down(self._place(here))
        self.selections.forget()
        if here is not self._runtime:
            if self.node is not None:
                self.node.close()
                self.node = None
            self._runtime, self._segment, self._plan, self._agreed = here, None, 0, None
            self._group = self._name()
            self.steps.trace = here.trace
        if self._segment is not None:
            here.client.arena.drop_segment(self._segment)
            self._segment = None

    def _make_plan(self) -> None:
        here, client = self._runtime, self._runtime.client
        order = {slot.name: slot for slot in in_order([*self.arrivals, *self.slots])}
        if not order:
            self._buckets = []
            return
        process_set = self._process_set(here)
        specs = tuple(slot.spec() for slot in order.values())
        # Numbered by the plan that the new one replaces, which all ranks agree about even if one of them, which had
        # joined, took no part in some of their proposals.
        proposal = wire.Proposal(self._group, process_set, self._plan, self._manner.reduction, specs)
        if self._replanning is not None:
            proposal = self._replanning.proposal(here, proposal, self.may_be_late and self._manner.eager)
        plan = client.wait(client.propose(proposal)).plan
        assert plan is not None
        if self._replanning is not None:
            self._replanning.planned(plan)
            self.memory.use(plan.reduction.codec)
            self._tuned(plan.tuning)
        self._agreed = plan
        self.memory.planned(self._place(here), plan, order)
        self.node = reduction_in_node(here, plan, [order[t.name] for b in plan.buckets for t in b.tensors], self.node)
        nbytes = self.selections.choose(self._place(here), plan, order, self.node)
        self._buckets = [self._sparse_bucket(order[tensor.name], tensor.sparse) for tensor in plan.sparse]
        with here.allocating:
            here.collect()
            self._segment, segment = client.plan_segment(plan, nbytes)
        self._plan, self._nbytes = plan.id, 0
        self._plans += 1
        for bucket in plan.buckets:
            dtype = TORCH_DTYPES[bucket.dtype]
            flat = torch.frombuffer(segment.view, dtype=dtype, count=bucket.numel, offset=bucket.offset)
            self._nbytes += flat.nbytes
            slots = [order[tensor.name] for tensor in bucket.tensors]
            name = f"{self._group}, bucket {bucket.index}"
            kind = self.selections.open(bucket, segment, slots)
            dense = kind(here, plan.id, bucket.index, name, slots, partial(self._terms, slots))
            dense.nbytes, dense.flat = flat.nbytes, flat
            for slot, tensor in zip(slots, bucket.tensors, strict=True):
                place = flat[tensor.start : tensor.start + tensor.numel]
                slot.place(dense, place)
                if (due := self.memory.pay(tensor.name)) is not None:
                    owed = torch.from_numpy(due) / self._manner.reduction.prescale
                    dense.owed.append((place, owed.to(dtype)))
            self._buckets.append(dense)
        if not all(slot.direct for slot in self.slots):
            device.layer.pin(segment)
        for dense in self.dense:
            dense.node = self.node
        self._prioritise()
        self._move_selections(here)

    def _move_selections(self, here: Runtime) -> None:
        """Has this worker select in this step, or its daemon, if others of its node contribute to it too."""
        mine = self._buckets is not None and (self.node is None or self.node.reduces)
        if self.selections.buckets and self.selections.here != mine:
            self.await_flights()
            self.selections.move(self._place(here), mine)

    def await_flights(self) -> None:
        """Waits until nothing of earlier steps is being reduced; nothing is."""

    def _tuned(self, tuning: wire.Tuning | None) -> None:
        """The plan that has been made is tuned, or not: does what of it is for workers to do."""

    def _prioritise(self) -> None:
        """Tells the buckets in which order their results are needed."""
        if not self._prioritises:
            return
        dense = [bucket for bucket in self._buckets or [] if isinstance(bucket, DenseBucket)]
        for bucket, urgency in zip(dense, self._urgencies(dense), strict=True):
            bucket.urgency = urgency

    def _urgencies(self, buckets: Sequence[DenseBucket]) -> Sequence[int]:
        """Of buckets in the order of their arrival. `step()` waits for all of them: alike, and behind operations that a
        script waits for by themselves."""
        return [1] * len(buckets)

    def _terms(self, slots: Sequence[Slot]) -> Terms:
        """What is sent with a bucket."""
        return Terms(self.memory.rescale(slots))

    def _sparse_bucket(self, slot: Slot, sparse: int) -> SparseBucket:
        op = self._manner.reduction.op
        if op not in ("average", "sum"):
            raise ValueError(f"the gradient of {slot.name!r} is sparse, and sparse gradients have no {op}; use Average "
                             "or Sum, or sparse_as_dense=True")  # fmt: skip
        bucket = SparseBucket(slot, sparse, f"{self._group}.{slot.name}", op, self._manner.process_set)
        slot.bucket = bucket
        return bucket


def stand_in_before_join(here: Runtime) -> None:
    """This worker is about to join: takes part, without gradients of its own, in the steps that other ranks of its node
    have begun and cannot take without it (`node.ledger`).

    Raises:
        HorovodInternalError: one of them failed, on all ranks.
    """
    stand_in([exchange for exchange in sorted(_all, key=lambda exchange: exchange.serial) if exchange.is_of(here)])


def enter_all(here: Runtime) -> None:
    """Lets all optimizers belong to another membership. Their plans are named by the order of their making, in which
    they have to be told: a worker that is new makes its own in that order."""
    for exchange in sorted(_all, key=lambda exchange: exchange.serial):
        if list(exchange.slots):
            exchange.enter(here)
