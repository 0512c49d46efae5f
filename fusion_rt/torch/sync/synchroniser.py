"""The way of an optimizer's gradients, step after step: from the hook that sees one arrive to the reduced gradient.

With all-reduce it ends before `backward()` returns (`backward.py`): `p.grad` is the reduced gradient then, and what a
script does with it before `step()` is done on all ranks alike. A further backward pass before `step()` is reduced by
itself: what `p.grad` holds is set aside before autograd adds to it, and added to the result.

In the first step the slots only note in which order gradients arrive; that order is proposed, and the plan says which
bucket each belongs to. From then on a hook counts its bucket down, and the last one copies the bucket's gradients into
the arena at once and sends one message. Afterwards `p.grad` *is* the place in the arena: gradients that accumulate
there need no copy at all, and reduced ones never do.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from fusion_rt import wire
from fusion_rt.client import Operation, Terms
from fusion_rt.errors import HorovodInternalError, StepGivenUp
from fusion_rt.quoting import quoted
from fusion_rt.settings import Settings
from fusion_rt.torch.core import device
from fusion_rt.torch.core.compressors import NoneCompressor
from fusion_rt.torch.core.recording import Steps
from fusion_rt.torch.core.runtime import Runtime, is_initialized, runtime
from fusion_rt.torch.core.tensors import TORCH_DTYPES
from fusion_rt.torch.node.joining import stand_in
from fusion_rt.torch.node.reduction import NodeReduction, reduction_in_node
from fusion_rt.torch.ops.signatures import id_of
from fusion_rt.torch.sync import backward
from fusion_rt.torch.sync.buckets import Bucket, DenseBucket, SparseBucket
from fusion_rt.torch.sync.manner import Manner
from fusion_rt.torch.sync.memory import Memory, Place
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.selected_buckets import Selections
from fusion_rt.torch.sync.slots import Named, Slot, in_order
from fusion_rt.trace_format import Flush

_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
_KNOWN_TO = "_known_to_fusion_rt"  # of an exception: the exchanges that have seen to it; it is not to be kept alive
_MOST = 500  # characters of an exception that other ranks are told
_ZEROED_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)

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
        passes_left: backward passes until gradients are complete.
        pass_number: of the backward pass that runs, and completes gradients; 0: none does.
        eager: buckets are sent as soon as they are complete, and what is left of them at the end of the backward pass.
        backward: a reference to the backward pass that runs, or has failed; else `backward.no_pass`.
        reduced: how often gradients have been reduced since the last step.
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
        self.passes = self.passes_left = passes
        self.pass_number = self._passes = self.reduced = 0
        self.backward: Callable[[], backward.BackwardPass | None] = backward.no_pass
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
        self._kept: list[Slot] = []  # to whose next result earlier ones are added
        self._in_parts: set[str] = set()  # names of parameters whose gradient comes several times in a backward pass
        self._slots: dict[int, Slot] = {}  # by id of the parameter, which the slot keeps alive
        self._buckets: list[Bucket] | None = None
        self._closing: Bucket | None = None  # sent when a backward pass has ended, and so succeeds if all ranks' have
        self._proposed: Operation | None = None
        self._plan = 0
        self._segment: int | None = None
        self._steps = self._plans = self._nbytes = 0
        self._waited = self._last_waited = 0.0
        self._agreed: wire.Plan | None = None
        self.eager = manner.eager
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

    # --- a backward pass ----------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """The first gradient of a backward pass has come.

        Raises:
            AssertionError: there were too many before `step()`.
            HorovodInternalError: the job has failed.
            ValueError: as `begin`.
        """
        if self._pass_failed:
            self.pass_has_failed()
        if self.passes_left <= 0:
            raise AssertionError(_TOO_MANY)
        if self.idle:
            self.begin()
        backward.enter(self)
        if self.passes_left <= 1:
            self._passes += 1
            self.pass_number = self._passes

    def backward_ends(self) -> bool:
        """The backward pass is over. Returns whether gradients are to be reduced now."""
        self.passes_left -= 1
        self.pass_number = 0
        if self.passes_left <= 0 and self._manner.in_backward:
            return True
        self.backward = backward.no_pass
        return False

    def backward_returns(self) -> None:
        """All gradients of the backward pass have been sent, if they are to be: waits for them. Raises as
        `synchronize`."""
        self.synchronize()

    @property
    def _pass_failed(self) -> bool:
        return self.backward is not backward.no_pass and self.backward() is None

    def reopen(self, slot: Slot) -> None:
        """Autograd is about to add to a gradient that has been reduced, which is set aside.

        Raises:
            AssertionError, RuntimeError: it is being reduced.
            HorovodInternalError: the job has failed.
        """
        if self._pass_failed:
            self.pass_has_failed()
        if slot.parameter.grad is None:
            slot.closed = False
        elif self.passes_left <= 0:
            raise AssertionError(_TOO_MANY)
        elif slot.bucket is None or not slot.bucket.sent:
            self._keep(slot)
        else:
            raise RuntimeError(
                f"parameter {slot.name!r} gets its gradient in several parts in one backward pass, of which the first "
                "is being reduced already, as it happens with torch.utils.checkpoint(use_reentrant=True) where a "
                "module is used more than once; use use_reentrant=False"
            )

    def arrived_again(self, slot: Slot) -> None:
        """A part of a gradient has come after another one in the same backward pass: the next parts are waited for."""
        self._in_parts.add(slot.name)
        bucket = slot.bucket
        if bucket is not None and not bucket.patient:
            bucket.patient = True
            bucket.missing += 1

    def zeroed(self) -> None:
        """The script forgets its gradients.

        Raises:
            AssertionError: they are being reduced.
            HorovodInternalError: the job has failed.
        """
        failed = self._manner.in_backward and (self._pass_failed or self._pass_was_raised())
        if failed:
            self.pass_has_failed()
        elif not self.idle:
            if any(bucket.sent for bucket in self._buckets or []):
                raise AssertionError(_ZEROED_EARLY)
            else:
                self._end_step()
        for slot in self.slots:
            slot.closed = False
        self.reduced = 0

    def pass_has_failed(self) -> None:
        """A backward pass has raised, and the script goes on. If gradients were to be reduced at its end, this rank
        gives the step up for all ranks; else the pass has been made, and nobody has to know.

        Raises:
            HorovodInternalError: the job has failed.
        """
        if (error := sys.exc_info()[1]) is not None:
            error.__dict__.setdefault(_KNOWN_TO, set()).add(self.serial)
        if self.idle:
            self.begin()
        if not self._manner.in_backward:
            for bucket in self._buckets or []:
                if not bucket.sent:
                    bucket.rewind()
        elif self.passes_left > 1:
            self.passes_left -= 1
            self.backward, self.pass_number = backward.no_pass, 0
        else:
            self._give_up()

    def _pass_was_raised(self) -> bool:
        """Whether the script is handling what a backward pass of this exchange raised before any gradient came."""
        error = sys.exc_info()[1]
        if not self.idle or error is None or isinstance(error, HorovodInternalError):
            return False
        if self.serial in error.__dict__.get(_KNOWN_TO, ()):
            return False
        return any(id(parameter) in self._slots for parameter in backward.leaves_of_failed(error))

    def _give_up(self) -> str:
        """Lets this step fail on all ranks: what was sent is over when this returns. Returns why."""
        error = sys.exc_info()[1]
        what = "an exception" if error is None else quoted(f"{type(error).__name__}: {error}")[:_MOST]
        why = f"its backward pass raised {what}"
        try:
            if self._buckets is None:
                self._make_plan()
            while self.copying:
                self.copying.popleft().post(wait=True)
            for bucket in self._buckets or []:
                if not bucket.sent:
                    bucket.give_up(why)
            self._await_sent()
            for slot in self.slots:
                if slot.closed:
                    slot.parameter.grad, slot.closed = None, False
        finally:
            self._end_step()
        return why

    def _await_sent(self) -> None:
        """Waits until nothing that was sent is being reduced, whatever comes of it."""
        for bucket in self._buckets or []:
            if bucket.sent:
                with contextlib.suppress(HorovodInternalError):
                    bucket.abandon()

    def _keep(self, slot: Slot) -> None:
        slot.keep()
        self._kept.append(slot)

    # --- a step -------------------------------------------------------------------------------------------------------

    def advance(self, bucket: Bucket) -> None:
        """Sends the bucket if it is complete, and what was on its way from a device."""
        if not bucket.missing:
            bucket.fill()
            if self.eager:
                for full in self._full(bucket):
                    if full is not self._closing:
                        full.flush = Flush.FULL
                        self._send(full)
        while self.copying and self.copying[0].post(wait=False):
            self.copying.popleft()

    def synchronize(self) -> None:
        """Reduces what has not been sent yet and waits until every `p.grad` is the reduced gradient.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks, or this rank's backward pass has.
        """
        began = time.perf_counter()
        self.check_pass()
        if self.idle:
            self.begin()
        try:
            buckets = self.submit()
            for bucket in buckets:
                bucket.receive()
            with torch.no_grad():
                for slot in self._kept:
                    slot.add_kept()
            self._steps += 1
            self.reduced += 1
        except HorovodInternalError:
            self._await_sent()
            raise
        finally:
            self._end_step()
        self._last_waited = time.perf_counter() - began
        self._waited += self._last_waited
        if self._replanning is not None:
            self._replanning.stepped(self._waited, all_here=True)

    def check_pass(self) -> None:
        """A step is to be taken. Raises `StepGivenUp` if the last backward pass has failed, on all ranks."""
        if self._pass_failed and self._manner.in_backward:
            raise StepGivenUp(f"this rank {StepGivenUp.SAYS}: {self._give_up()}; all ranks have to skip this batch")

    def submit(self) -> list[Bucket]:
        """Sends what has not been sent of this step, by a new plan if there is none. Returns all buckets.

        Raises:
            HorovodInternalError: the job has failed.
            ValueError: a gradient cannot be reduced as was asked for.
        """
        try:
            if self._buckets is None:
                self._make_plan()
            buckets = self._buckets or []
            for bucket in buckets:
                if not bucket.sent:
                    self._send(bucket)
            while self.copying:
                self.copying.popleft().post(wait=True)
        except BaseException:
            self._end_step()
            raise
        return buckets

    def discard(self) -> None:
        """Forgets the gradients that have arrived since the last reduction."""
        self.reduced = 0
        if self.idle:
            return
        with contextlib.suppress(HorovodInternalError):  # whatever becomes of them: nobody is interested any more
            if self._pass_failed and self._manner.in_backward:
                self._give_up()
            while self.copying:
                self.copying.popleft().post(wait=True)
        self._await_sent()
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
        if self._manner.in_backward:
            for slot in bucket.slots:
                if slot.closed:
                    self._keep(slot)
                slot.closed = True
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
        for slot in self._kept:
            slot.kept = None
        self._kept.clear()
        self._rewind()
        self.backward, self.pass_number = backward.no_pass, 0
        self.idle = True

    def _rewind(self) -> None:
        self.passes_left = self.passes
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
        self._buckets = self._closing = self._proposed = None
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
            self.reduced = 0
        if self._segment is not None:
            here.client.arena.drop_segment(self._segment)
            self._segment = None

    def propose(self) -> None:
        """Asks for a plan if there is none, and does not wait for it."""
        if self._buckets is not None or self._proposed is not None:
            return
        here, client = self._runtime, self._runtime.client
        order = self._in_order()
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
        self._proposed = client.propose(proposal)

    def is_planned(self) -> bool:
        """Whether `submit` would not wait for a plan."""
        return self._proposed is None or self._runtime.client.poll(self._proposed)

    def _in_order(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in in_order([*self.arrivals, *self.slots])}

    def _make_plan(self) -> None:
        self.propose()
        if self._proposed is None:
            return
        here, client, order = self._runtime, self._runtime.client, self._in_order()
        proposed, self._proposed = self._proposed, None
        plan = client.wait(proposed).plan
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
        self._closing = self._buckets[-1] if self._buckets and self._manner.in_backward else None
        for made in self._buckets:
            made.patient = any(slot.name in self._in_parts for slot in made.slots)
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
        return Terms(self.memory.rescale(slots), passes=self.reduced + 1 if self._manner.in_backward else 0)

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
