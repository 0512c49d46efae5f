"""The synchroniser of one optimizer: the state of a step, from its first gradient to its last result.

It owns slots, buckets, arrived gradients, pending copies and counters. The algorithm and the options have chosen its
rule, for what is sent and how the answer is used (`update_rule.py`), and its schedule (`step_schedule.py`), which calls
it, and answers its questions (`ScheduleAnswers`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fusion_rt import codecs, wire
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.local import elastic
from fusion_rt.settings import Settings
from fusion_rt.torch.core.recording import Steps
from fusion_rt.torch.core.runtime import Runtime, is_initialized, runtime
from fusion_rt.torch.node.reduction import NodeReduction
from fusion_rt.torch.ops.digests import Digests
from fusion_rt.torch.ops.reduce import allreduce
from fusion_rt.torch.ops.signatures import Sum
from fusion_rt.torch.sync.active_plan import ActivePlan
from fusion_rt.torch.sync.buckets import Bucket, BucketIO, BucketSchedule
from fusion_rt.torch.sync.checkpoint import Checkpoint
from fusion_rt.torch.sync.gpu_selection import Selections
from fusion_rt.torch.sync.on_device import Poster
from fusion_rt.torch.sync.options import Options, Where
from fusion_rt.torch.sync.parameters import Mark, Named, Trained, are_shards
from fusion_rt.torch.sync.slots import GradientHooks, Slot, in_order
from fusion_rt.tracing.format import Flush

_WHEN_FULL = Flush.FULL


@dataclass(frozen=True)
class OptimizerStatistics:
    """Cost of an optimizer's communication to this worker so far.

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


class ScheduleAnswers(GradientHooks, BucketSchedule, Protocol):
    """The answers of a schedule to its synchroniser, and the events that it learns of.

    Attributes:
        may_be_late: updates can be applied one step late.
        slot_type: of the slots of parameters.
    """

    slot_type: type[Slot]
    may_be_late: bool

    def reduction(self) -> wire.Reduction:
        """Returns the reduction to propose."""

    def agreed(self, plan: wire.Plan) -> None:
        """Called when ranks have agreed upon a plan, before it is made. An operation on all ranks. Raises `ValueError`
        if this schedule cannot exchange its sparse gradients."""

    def planned(self) -> None:
        """Called when there is a new plan."""

    def plan_given_up(self, anew: bool) -> None:
        """Called before the plan is dropped. `anew`: because the membership has changed."""

    def urgencies(self, buckets: Sequence[Bucket]) -> Sequence[int]:
        """Returns the urgency of each bucket, in the order of their arrival."""

    def before_send(self, bucket: Bucket) -> None:
        """Called before a bucket is sent."""

    def ended(self) -> None:
        """Called when a step has ended, well or not."""

    def await_pending(self) -> None:
        """Waits until nothing of earlier steps is being reduced."""

    def finish(self) -> None:
        """Applies updates that wait for the next forward pass. Raises `HorovodInternalError`."""

    def alike(self) -> Mapping[str, torch.Tensor]:
        """Returns the tensors that are the same on all ranks now, by names that are, too."""


class Synchroniser:
    """Exchanges the gradients, or values, of one optimizer's parameters, step after step.

    Args:
        options: how.
        trained: the parameters to exchange; asked before each step.
        schedule: calls this, and answers its questions.

    Attributes:
        idle: no gradient has arrived since the last exchange.
        arrivals: slots whose gradient has arrived in this step, in that order, while there is no plan.
        poster: submits buckets whose gradients are on their way from a device to the arena.
        lost: name of a parameter that another optimizer has taken over; empty if there is none.
        failure: an error that was raised in a hook; `submit` raises it again, because a hook must not interrupt
            `backward()`.
        plan: the active plan.
        checkpoint: the optimizer's state in the daemons.
        selections: the part of that which this worker keeps itself.
        steps: the steps that it is part of, as they are recorded.
        after_step: called after each step, where there is something to do: ranks' parameters are compared, or the job
            goes on by another algorithm.
        replanning: replaces the plan by others, if anything does.
        marks: of the parameters that are exchanged.
        slots: of all parameters that are exchanged.
    """

    def __init__(self, options: Options, trained: Trained, schedule: ScheduleAnswers) -> None:
        here, settings = runtime(), Settings.from_env()
        self.options, self.trained, self.schedule = options, trained, schedule
        self.idle = True
        self.arrivals: list[Slot] = []
        self.poster = Poster()
        self.lost = ""
        self.failure: HorovodInternalError | None = None
        self.selections = Selections(options.compressor, settings.gpu_selection == "auto")
        mirrors_updates = settings.mirror_shards == "update" and elastic.agent() is not None
        self.checkpoint = Checkpoint(self, options, trained, mirrors_updates)
        self.plan = ActivePlan(options, trained, self.checkpoint, self.selections)
        self.steps = Steps(here.trace)
        self.replanning = None if options.replanning is None else options.replanning()
        self._prioritises = settings.priority
        self._slots: dict[int, Slot] = {}  # by id of the parameter, which the slot keeps alive
        self.slots: Iterable[Slot] = ()
        self.marks: list[Mark] = []
        self._steps = self._steps_before = 0  # all, and those that ranks need not have taken together
        self._waited = self._last_waited = 0.0
        self._digests = self._made_digests(settings.check_parameters)
        self.after_step: Callable[[], None] | None = None
        if self._digests is not None and not self.schedule.delays:
            self.after_step = self.compare
        self._io = BucketIO(options.rule, options.compressor, schedule)
        self.watch()

    @property
    def name(self) -> str:
        """The synchroniser's unique name, the same on all ranks."""
        return self.plan.group

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a step, at its first gradient or, without any, its exchange; drops an outdated plan. Raises
        `ValueError` if a parameter belongs to another optimizer now."""
        here, plan = runtime(), self.plan
        if self.lost or plan.here is not here or self.trained.has_changed(self.marks):
            self._watch_anew(here)
        elif self.replanning is not None and self.replanning.due(here):
            self.give_up_plan(here)
        if self.checkpoint.converts:
            self.checkpoint.units.begin()
        if plan.node is not None and plan.made:
            plan.node.begin()
        if self.selections.buckets:
            self._move_selections()
        self.idle = False
        self.steps.first_gradient()

    def _watch_anew(self, here: Runtime) -> None:
        """Drops the plan, and follows the parameters of now. Raises `ValueError` if one is another optimizer's."""
        if self.lost:
            raise ValueError(f"parameter {self.lost!r} has been given to another DistributedOptimizer since this one "
                             "was made; a parameter can be reduced by one of them only")  # fmt: skip
        self.give_up_plan(here)
        self.watch()

    def advance(self, bucket: Bucket, sends: bool = True, keeps: Bucket | None = None) -> None:
        """Sends a bucket that is complete, in the midst of a backward pass, which is not to be cut short: `submit`
        raises what fails here.

        Args:
            sends: else it is only noted that the bucket is complete.
            keeps: this one is only sent by `submit`.
        """
        if self.failure is not None:
            return
        try:
            bucket.note_full()
            if sends:
                for full in (bucket,) if self.plan.node is None else self._full(bucket, self.plan.node):
                    if full is not keeps:
                        full.flush = _WHEN_FULL
                        self._send(full)
        except HorovodInternalError as error:
            if self.plan.made:  # else this rank has survived a loss meanwhile, and sends all by another plan
                self.failure = error

    def submit(self, values: bool = True, buckets: Sequence[Bucket] | None = None) -> None:
        """Sends the rest of this step, by a new plan if there is none; without `values` only that this
        rank has none. Raises `HorovodInternalError`; `ValueError` if a gradient cannot be reduced as was asked for.

        Args:
            buckets: those of this step; all by default.
        """
        try:
            if self.failure is not None:
                raise self.failure
            if not self.plan.made:
                self.make_plan()
            send = self._send if values else self._send_nothing
            for bucket in self.plan.buckets if buckets is None else buckets:
                if not bucket.sent:
                    send(bucket)
            if self.poster.used:
                self.poster.finish()
        except BaseException:
            self.end_step()
            raise

    def receive(self, share: float = 1.0, buckets: Sequence[Bucket] | None = None) -> None:
        """Waits for all that was sent (of these buckets), and puts results, multiplied by `share`, where they belong.
        Raises `HorovodInternalError` if an exchange failed, on all ranks."""
        buckets = self.plan.buckets if buckets is None else buckets
        in_node = self.plan.node is not None
        try:
            if in_node:
                self.gather(buckets)
            for bucket in buckets:
                bucket.receive(share)
            if in_node:
                self.gathered()
            self._steps += 1
        except HorovodInternalError:
            self.await_sent()
            raise

    def gather(self, buckets: Sequence[Bucket]) -> None:
        """Has the ranks of the node begin to exchange their parts of results, where each gets a part only; waits until
        all exchanges of these buckets have ended. Raises `HorovodInternalError` if one failed, on all ranks."""
        node = self.plan.node
        if node is not None and node.reduces and node.way.gathers:
            for bucket in buckets:
                bucket.await_result()
            for bucket in buckets:
                bucket.gather()

    def gathered(self) -> None:
        """Notes that the exchange that `gather` has begun is complete here."""
        node = self.plan.node
        if node is not None and node.reduces and node.way.gathers:
            node.note_gathered()

    def await_results(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Waits for all that was sent (of these buckets), and leaves the results where they are. Raises
        `HorovodInternalError`."""
        for bucket in self.plan.buckets if buckets is None else buckets:
            bucket.await_result()

    def await_sent(self) -> None:
        """Waits until all exchanges that were sent have ended, well or not."""
        for bucket in self.plan.buckets:
            if bucket.sent:
                with contextlib.suppress(HorovodInternalError):
                    bucket.await_result()

    def end_step(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Ends a step (of these buckets), well or not, and resets the state for the next one."""
        if self.poster.used:
            self.poster.clear()
        for bucket in self.plan.buckets if buckets is None else buckets:
            bucket.rewind()
        self.arrivals.clear()
        self.failure = None
        self.schedule.ended()
        if self.options.compressor is not None:
            self._forget_compressed()
        self.idle = True

    def _forget_compressed(self) -> None:
        for slot in self.slots:
            slot.compressed = None
            if not self.schedule.delays:  # they are needed when gradients land
                slot.context = None

    def stepped(self, steps: int = 1) -> None:
        """Counts a step whose results are not waited for here, or (-1) one that was counted and is not taken."""
        self._steps += steps

    def note_waited(self, began: float, again: bool = False) -> None:
        """Adds the time since `began` (`time.perf_counter`, s) to the wait; `again`: not the first in this step."""
        elapsed = time.perf_counter() - began
        self._last_waited = elapsed + (self._last_waited if again else 0.0)
        self._waited += elapsed

    def note_step(self, all_here: bool, steps: int = 1) -> None:
        """Reports a step, or so many local ones and their exchange, to the tuner of plans. `all_here`: its gradients
        have come."""
        assert self.replanning is not None
        self.replanning.stepped(self._waited, all_here, steps)

    def _go_on(self) -> None:
        """Goes on by the algorithm that the plan names for after its last step, if this was that."""
        assert self.replanning is not None
        if not (text := self.replanning.successor):
            return
        self.schedule.finish()
        ranks = self.options.process_set
        present = allreduce(torch.ones(1), name=f"{self.name}.successor", op=Sum, process_set=ranks)
        if int(present) < (ranks.size() or 1):  # the others have joined, and would not know of it
            self.replanning.stay()
        else:
            assert self.options.go_on is not None
            self.options.go_on(self.trained.optimizer(), text)

    def compare(self, ahead: int = 0) -> None:
        """Compares the tensors that all ranks have alike now, if that is due. `ahead`: exchanges that are not applied
        yet."""
        exchange = self.exchanges - ahead
        if self._digests is not None and exchange >= self._digests.due and self.plan.made and self._slots:
            self._digests.note(exchange, self.name, self.schedule.alike)

    def _made_digests(self, every: int) -> Digests | None:
        """Returns the comparison of tensors that ranks have alike; None if it is not asked for, or they never have."""
        optimizer, asked = self.trained.optimizer(), every != Settings().check_parameters
        if not every or not self.schedule.hears or optimizer is None or are_shards(optimizer):
            return None
        algorithm, codec = self.options.algorithm, codecs.parse(self.options.reduction.codec)
        if algorithm.at_homes and not asked:
            return None  # it would take all ranks, where one may go on, or leave, without the others
        why = algorithm.apart
        if algorithm.at_homes and not (why or codec.lossless):
            why = f"shards tell other hosts of changes by the codec {codec}, and their own host all of them"
        if why:
            if asked and self.options.process_set.rank() == 0:
                warnings.warn(f"FUSION_CHECK_PARAMETERS compares nothing with {algorithm}: {why}", stacklevel=2)
            return None
        what = "a step" if algorithm.period == 1 else "an exchange"
        every = max(1, every * algorithm.pieces // algorithm.period)
        return Digests(every, self.options.process_set, algorithm.at_homes, what)

    def statistics(self) -> OptimizerStatistics:
        """Returns the cost of communication so far."""
        plan = self.plan
        return OptimizerStatistics(
            self._steps, plan.count, len(plan.buckets), plan.nbytes, self._waited, self._last_waited
        )

    def _send(self, bucket: Bucket) -> None:
        if self.replanning is not None:
            self.replanning.sent()
        self.schedule.before_send(bucket)
        with self.poster.alone:
            bucket.send()
            if bucket.copying is not None and not bucket.post(wait=False):
                self.poster.add(bucket)

    def _send_nothing(self, bucket: Bucket) -> None:
        with self.poster.alone:
            bucket.announce()
        bucket.sent = True

    def _full(self, bucket: Bucket, node: NodeReduction) -> Iterable[Bucket]:
        """Returns the buckets to send now that this one is full; those combined in the node in the plan's order."""
        if not node.reduces or bucket.sparse:
            return (bucket,)
        unsent = (one for one in self.plan.buckets if not one.sparse and not one.sent)
        return list(itertools.takewhile(lambda one: not one.missing, unsent))

    # --- parameters, and the plan -------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Has a slot for each parameter that is trained, in their order, and for no other."""
        known, self._slots = self._slots, {}
        self.slots = self._slots.values()
        for named in self.trained.named():
            slot = known.pop(id(named.parameter), None)
            if slot is not None:
                slot.follow()
            self._slots[id(named.parameter)] = slot or self._slot(named)
        self.marks = [(key, slot.parameter.dtype) for key, slot in self._slots.items()]
        for slot in known.values():
            slot.forget()

    def _slot(self, named: Named) -> Slot:
        slot = self.schedule.slot_type(self.schedule, named)
        slot.direct = self._io.is_direct(slot)
        return slot

    def propose(self) -> None:
        """Asks for a plan if there is none, and does not wait for it."""
        if not self.plan.made:
            may_be_late = self.schedule.may_be_late
            self.plan.propose(self._in_order(), self.schedule.reduction(), self.replanning, may_be_late)

    def is_planned(self) -> bool:
        """Tells whether `submit` can go on without waiting for a plan."""
        return not self.plan.is_proposed_in_vain()

    def make_plan(self) -> None:
        """Waits for a plan, and makes its buckets. Raises `HorovodInternalError`."""
        self.propose()
        plan = self.plan.await_agreement()
        if plan is None:
            return
        if self.replanning is not None:
            self.replanning.planned(plan)
            self.checkpoint.use(plan.reduction.codec)
            if plan.tuning is not None and plan.tuning.then:
                self.after_step = self._go_on
        order = self._in_order()
        self.schedule.agreed(plan)
        self.plan.make(plan, order, self._io)
        for slot in self.slots:
            slot.follow()
        self.prioritise()
        self._move_selections()
        self.schedule.planned()

    def give_up_plan(self, here: Runtime) -> None:
        """Drops the plan. `here`: the membership that the next one will belong to."""
        anew = here is not self.plan.here
        self.schedule.plan_given_up(anew)
        for slot in self.slots:
            slot.displace()
        self.poster.clear()
        self.plan.give_up(here)
        if anew:
            self.steps.trace = here.trace
            self.count_anew()

    @property
    def exchanges(self) -> int:
        """Number of exchanges of all ranks in which this rank has taken part since they were counted anew."""
        return self._steps - self._steps_before

    def count_anew(self) -> None:
        """Counts exchanges from here on, where all ranks are: at the beginning of a membership, or after a join."""
        self._steps_before = self._steps
        if self._digests is not None:
            self._digests.count_anew()

    def enter(self, here: Runtime) -> None:
        """Moves to a membership, and drops the plan if that is another one."""
        if here is not self.plan.here:
            self.give_up_plan(here)

    def is_of(self, here: Runtime) -> bool:
        """Tells whether there is a plan in this membership."""
        return self.plan.here is here and self.plan.made

    def where(self) -> Where | None:
        """Returns where daemons keep this optimizer's state; None if there is none, or this worker is in no job.

        Raises:
            ValueError: gradients are under way.
        """
        self.schedule.finish()
        if not self.checkpoint.remembers or not self._slots or not is_initialized():
            return None
        if any(bucket.sent for bucket in self.plan.buckets):
            raise ValueError("gradients of this optimizer are being exchanged; save or load its state between step() "
                             "and the next backward()")  # fmt: skip
        self.enter(runtime())
        return self.plan.where()

    def prioritise(self) -> None:
        """Sets the buckets' urgencies by the order in which their results are needed."""
        if self._prioritises:
            dense = [bucket for bucket in self.plan.buckets if not bucket.sparse]
            for bucket, urgency in zip(dense, self.schedule.urgencies(dense), strict=True):
                bucket.urgency = urgency

    def release(self) -> None:
        """Releases all slots of a deleted optimizer. Called by a finalizer, and so at any moment: sends nothing."""
        for slot in self.slots:
            slot.forget()
        self._slots.clear()
        self.plan.release()

    def _in_order(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in in_order([*self.arrivals, *self.slots])}

    def _move_selections(self) -> None:
        """Moves selection to this worker, or to its daemon if other workers of the node contribute to it, too."""
        mine = self.plan.made and (self.plan.node is None or self.plan.node.reduces)
        if self.selections.buckets and self.selections.here != mine:
            self.schedule.await_pending()
            self.selections.move(self.plan.where(), mine)
