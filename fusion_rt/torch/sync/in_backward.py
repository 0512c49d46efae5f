"""Gradients that are reduced in the backward pass: when `backward()` returns, `p.grad` is the reduced gradient.

What a script does with it before `step()` is done on all ranks alike then. A further backward pass before `step()` is
reduced by itself: what has been reduced of `p.grad` is subtracted before, and added to the result. What the script
makes of `p.grad` between such passes, or in hooks, is this rank's own, and is reduced as a whole. Nothing is left to be
reduced by `synchronize()` and `step()`, which Horovod's scripts call, except on a rank that has computed no gradient
since the last step: there they take part in the reduction of the others with zeros.

In the first step hooks only note in which order gradients arrive; that order is proposed, and the plan says which
bucket each belongs to. From then on a hook counts its bucket down, and the last one copies the bucket's gradients into
the arena at once and sends one message. Afterwards `p.grad` *is* the place in the arena: gradients that accumulate
there need no copy at all, and reduced ones never do.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fusion_rt import wire
from fusion_rt.client import terms
from fusion_rt.core.errors import HorovodInternalError, StepGivenUp
from fusion_rt.core.traceback_format import quoted
from fusion_rt.torch.core.compressors import Compression
from fusion_rt.torch.core.process_sets import takes_part
from fusion_rt.torch.ops.reduce import allreduce
from fusion_rt.torch.sync import backward
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.scales.clipping import Clipping
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.step_schedule import TOO_MANY, Closure, Outcome, Schedule
from fusion_rt.torch.sync.update_rule import UpdateRule
from fusion_rt.tracing.format import Kind

_GRADIENT = int(Kind.GRADIENT)
_KNOWN_TO = "_known_to_fusion_rt"  # of an exception: the synchronisers that have seen to it; it is not to be kept alive
_MOST = 500  # characters of an exception that other ranks are told
_ZEROED_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


class _LeftOut(BaseException):
    """The step for which a closure was called is not taken: all of torch's optimizers but L-BFGS call it first.

    Args:
        loss: that the closure has returned.
    """

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class ReducedGradients(UpdateRule):
    """The rule of all-reduce: sends `p.grad`, and the answer becomes `p.grad`, with which the optimizer steps."""

    to_gradients = True

    def value(self, slot: Slot) -> torch.Tensor | None:
        return slot.parameter.grad

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        for slot, result in zip(slots, results, strict=True):
            slot.take(result.to_sparse(slot.sparse) if slot.sparse else result)


class InBackward(Schedule):
    """Reduces gradients while the backward pass computes them.

    Attributes:
        pass_number: of the backward pass that runs, and completes gradients; 0: none does.
        reduced: how often gradients have been reduced since the last step.
    """

    hears_before = eager = True

    def __init__(self, options: Options, trained: Trained, passes: int) -> None:
        super().__init__(options, trained, passes)
        self.pass_number = self.reduced = self._passes = 0
        self._steps = self.sync.steps
        self._kept: list[Slot] = []  # to whose next result earlier ones are added
        self._in_parts: set[str] = set()  # names of parameters whose gradient comes several times in a backward pass
        self._said = terms()  # with each bucket
        self._skipping = False  # inside skip_synchronize()
        self._is_left_out = False  # the step under way: after a loss, or it has been taken by others
        self._counts = True  # it does for a `GradScaler`
        self._clipping = Clipping()

    # --- a backward pass ----------------------------------------------------------------------------------------------

    def arriving(self, slot: Slot, gradients: Any) -> None:
        if slot.closed:
            self._reopen(slot)
        elif slot.kept is not None:
            slot.check_kept(added=False)

    def arrived(self, slot: Slot) -> None:
        number = self.pass_number
        if slot.parameter.grad is None:  # a hook of the script has used it up, or does not want it
            return
        if slot.kept is not None:
            slot.check_kept(added=True)
        if number == slot.seen or not number:
            if self.backward is None or self.backward() is None:
                self._backward_begins()
            number = self.pass_number
            if self.passes_left > 1:
                return
            if number == slot.seen:
                self._arrived_again(slot)
                return
        slot.seen = number
        sync, steps, bucket = self.sync, self._steps, slot.bucket
        steps.trace.record(_GRADIENT, slot.name, slot.nbytes, steps.number)
        if bucket is None:
            sync.arrivals.append(slot)
            return
        bucket.missing -= 1
        if not bucket.missing:
            sync.advance(bucket, self.eager, keeps=sync.plan.buckets[-1])  # which succeeds if all ranks' passes have

    def _backward_begins(self) -> None:
        """Notes the first gradient of a backward pass. Raises `AssertionError` if there were too many."""
        if self._pass_failed:
            self._pass_has_failed()
        if self.passes_left <= 0:
            raise AssertionError(TOO_MANY)
        if self.sync.idle:
            try:
                self.sync.begin()
            except HorovodInternalError as error:
                self.sync.idle, self.sync.failure = False, error
        backward.running().add(self)
        self._separate()
        if self.passes_left <= 1:
            self._passes += 1
            self.pass_number = self._passes

    def backward_ends(self) -> bool:
        self.pass_number = 0
        if self.passes_left > 1:
            return super().backward_ends()
        self.passes_left -= 1
        return True

    def pass_is_gone(self) -> None:
        self.pass_number = 0

    def backward_returns(self) -> None:
        self._reduce()

    def _reopen(self, slot: Slot) -> None:
        """Lets autograd add to a gradient that has been reduced.

        Raises:
            AssertionError, RuntimeError: it is being reduced.
            HorovodInternalError: the job has failed.
        """
        if self._pass_failed:
            self._pass_has_failed()
        if slot.parameter.grad is not None and self.passes_left <= 0:
            raise AssertionError(TOO_MANY)
        if slot.parameter.grad is None or slot.bucket is None or not slot.bucket.sent:
            slot.reopen()
        else:
            raise RuntimeError(
                f"parameter {slot.name!r} gets its gradient in several parts in one backward pass, and the first "
                "part is being reduced already. This happens with torch.utils.checkpoint(use_reentrant=True) if a "
                "module is used more than once; use use_reentrant=False"
            )

    def _arrived_again(self, slot: Slot) -> None:
        """Notes a further part of a gradient in the same backward pass, so that the next parts are waited for."""
        self._in_parts.add(slot.name)
        bucket = slot.bucket
        if bucket is not None and not bucket.patient:
            bucket.patient = True
            bucket.missing += 1

    # --- a backward pass that fails -----------------------------------------------------------------------------------

    @property
    def _pass_failed(self) -> bool:
        return self.backward is not None and self.backward() is None

    def _pass_has_failed(self) -> None:
        """Handles a backward pass that has raised, while the script goes on. If gradients were to be reduced at its
        end, this rank cancels the step for all ranks; else the pass counts, and no rank has to know.

        Raises:
            HorovodInternalError: the job has failed.
        """
        if (error := sys.exc_info()[1]) is not None:
            error.__dict__.setdefault(_KNOWN_TO, set()).add(self.serial)
        if self.sync.idle:
            self.sync.begin()
        if self.passes_left > 1:
            self.passes_left -= 1
            self.backward, self.pass_number = None, 0
        else:
            self._give_up()

    def _pass_was_raised(self) -> bool:
        """Tells whether the script handles an exception that a backward pass raised before the first gradient."""
        error = sys.exc_info()[1]
        if error is None or not self.sync.idle or isinstance(error, HorovodInternalError):
            return False
        if self.serial in error.__dict__.get(_KNOWN_TO, ()):
            return False
        leaves = {id(parameter) for parameter in backward.leaves_of_failed(error)}
        return any(id(slot.parameter) in leaves for slot in self.sync.slots)

    def _give_up(self) -> str:
        """Lets this step fail on all ranks: its operations are over when this returns. Returns why."""
        error, sync = sys.exc_info()[1], self.sync
        exchanges.note_given_up()
        what = "an exception" if error is None else quoted(f"{type(error).__name__}: {error}")[:_MOST]
        why = f"its backward pass raised {what}"
        try:
            if not sync.plan.made:
                sync.make_plan()
            sync.poster.finish()
            for bucket in sync.plan.buckets:
                if not bucket.sent:
                    bucket.give_up(why)
            sync.await_sent()
            for slot in sync.slots:
                if slot.closed:
                    slot.parameter.grad, slot.closed = None, False
        finally:
            sync.end_step()
        return why

    def check_pass(self) -> None:
        """Checks the last backward pass before a step. Raises `StepGivenUp` if it has failed, on all ranks."""
        if self._pass_failed:
            raise StepGivenUp(f"this rank {StepGivenUp.SAYS}: {self._give_up()}; all ranks have to skip this batch")

    # --- calls of the script ------------------------------------------------------------------------------------------

    def step(self, optimizer: Any, closure: Closure | None) -> Any:
        """Takes the script's optimizer's step, after `synchronize()`, unless that is skipped. The loss of a closure is
        reduced as gradients are: an optimizer that decides by it (L-BFGS) has to decide the same on all ranks."""
        sync = self.sync
        sync.steps.begin()
        self._distrust()
        if closure is None and self.reduced and sync.idle and not self._is_left_out:
            if self._clipping.result is not None:
                parameters = [slot.parameter for slot in sync.slots]
                self._clipping.stepping(parameters, sync.checkpoint.codec, self.loss_scale)
            result = optimizer._step()
        else:
            result = self._reduce_and_step(optimizer, closure)
        self.reduced, self.outcome = 0, Outcome.TAKEN
        sync.steps.end()
        return result

    def _reduce_and_step(self, optimizer: Any, closure: Closure | None) -> Any:
        """Takes a step whose gradients have not all been reduced in the backward pass, or that is to be left out."""
        if not self._skipping:
            if closure is not None:
                closure = partial(self._reduced_closure, optimizer, closure)
            if closure is None or not self.sync.idle:
                self.synchronize()
        if self._is_left_out:
            self._step_left_out(optimizer)
            return None
        try:
            return optimizer._step(closure)
        except _LeftOut as left_out:  # which the closure has found
            self._is_left_out = False
            return left_out.loss

    def _step_left_out(self, optimizer: Any) -> None:
        """Takes no step."""
        self._is_left_out = False
        optimizer._note_step()
        if not self._counts:
            uncount(optimizer)

    def _distrust(self) -> None:
        """Has gradients reduced again if a hook of the script calls this, which sees one that has not been yet."""
        if torch._C._current_graph_task_id() >= 0:
            self.reduced = 0

    def synchronize(self) -> None:
        self._distrust()
        if not self.reduced and self.sync.idle:
            self._admit_own()
        if not self.reduced or not self.sync.idle:
            self._reduce()

    def _admit_own(self) -> None:
        """Has gradients that the script has set since the last step reduced, in which no backward pass has been. In
        place of a reduced one they are seen only if they are another tensor, or if all gradients are the script's."""
        for slot in self.sync.slots:
            slot.closed = slot.closed and bool(self._passes) and not slot.has_own()
        self._separate()

    def _separate(self) -> None:
        """Gives a gradient that lies in another parameter's place, where the script has put it, memory of its own: that
        place is written to before this gradient is sent."""
        own = [slot for slot in self.sync.slots if slot.parameter.grad is not None and slot.direct and slot.has_own()]
        places = {slot.address for slot in self.sync.slots} if own else ()
        for slot in own:
            gradient = slot.parameter.grad
            if gradient is not None and not gradient.is_sparse and gradient.data_ptr() in places:
                slot.parameter.grad = gradient.clone()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def zeroed(self) -> None:
        """Called when the script resets its gradients. Raises `AssertionError` while they are being reduced."""
        sync = self.sync
        if self._pass_failed or (sys.exc_info()[1] is not None and self._pass_was_raised()):
            self._pass_has_failed()
        elif not sync.idle:
            if any(bucket.sent for bucket in sync.plan.buckets):
                raise AssertionError(_ZEROED_EARLY)
            sync.end_step()
        for slot in sync.slots:
            slot.closed = False
            if slot.kept is not None:
                slot.forget_kept()
        self.reduced, self._is_left_out = 0, False
        if self.outcome is Outcome.OPEN:
            self.outcome = Outcome.REFUSED

    def discard(self) -> None:
        self.reduced, self._is_left_out = 0, False
        if self.sync.idle:
            return
        with contextlib.suppress(HorovodInternalError):  # whatever their end: their results are not needed any more
            if self._pass_failed:
                self._give_up()
            self.sync.poster.finish()
        self.sync.await_sent()
        self.sync.end_step()

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        if self.sync.idle:
            self.passes_left = passes

    def _submit(self) -> None:
        """Sends the unsent rest of this step. Raises as `Synchroniser.submit`."""
        self.sync.submit()

    def _reduce(self) -> None:
        """Reduces the unsent rest, and waits until every `p.grad` is the reduced gradient."""
        if exchanges.survive is None:
            self._exchange()
        else:
            exchanges.run([self], self._exchange)

    def _exchange(self) -> None:
        began, sync = time.perf_counter(), self.sync
        self.check_pass()
        if sync.idle:
            sync.begin()
        try:
            self._submit()
            sync.receive()
            if self._kept:
                with torch.no_grad():
                    for slot in self._kept:
                        slot.add_kept()
            self.reduced += 1
            self.outcome = Outcome.OPEN
            if sync.checkpoint.converts:
                self._clipping.reduced([slot.parameter for slot in sync.slots] if self._clipping.looks else ())
        finally:
            sync.end_step()
        sync.note_waited(began)
        if sync.replanning is not None:
            sync.note_step(all_here=True)

    # --- after a loss -------------------------------------------------------------------------------------------------

    @property
    def survives(self) -> bool:  # type: ignore[override]
        """True unless the optimizer may have begun its step when it asks for gradients: L-BFGS."""
        return not isinstance(self.sync.trained.optimizer(), torch.optim.LBFGS)

    def note_left_out(self) -> None:
        """Has the script go on with gradients that are zeros, and with a step that is not taken."""
        self._set_gradients(0.0)
        self._is_left_out, self._counts = True, False

    def note_known(self, outcome: Outcome) -> None:
        """Has the script see the same as the other ranks: a step, or gradients that are not finite."""
        self._set_gradients(math.inf if outcome is Outcome.REFUSED else 0.0)
        self._is_left_out, self._counts = outcome is Outcome.TAKEN, True

    def _set_gradients(self, value: float) -> None:
        if not self.sync.idle:
            self.sync.end_step()
        for slot in self.sync.slots:
            slot.parameter.grad, slot.closed = torch.full_like(slot.parameter, value, requires_grad=False), False
        self.reduced, self.outcome = 1, Outcome.TAKEN

    def _reduced_closure(self, optimizer: Any, closure: Closure) -> Any:
        self.reduced = 0
        loss = closure()
        self.synchronize()
        if self._is_left_out:
            raise _LeftOut(loss)
        return self._reduced_loss(optimizer, loss) if takes_part(optimizer.process_set) else loss

    def _reduced_loss(self, optimizer: Any, loss: Any) -> Any:
        if isinstance(loss, torch.Tensor):
            factor = optimizer.gradient_predivide_factor
            return allreduce(
                loss.detach(), None, None, Compression.none, optimizer.op, 1.0 / factor, factor, optimizer.process_set
            )
        if isinstance(loss, float):
            return float(self._reduced_loss(optimizer, torch.tensor(loss, dtype=torch.float64)))
        return loss

    # --- answers to the synchroniser ----------------------------------------------------------------------------------

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        checkpoint = self.sync.checkpoint
        if checkpoint.converts:
            self._said.rescale = checkpoint.units.factors(slots)
            self._said.loss_scale = self.loss_scale
        self._said.passes = self.reduced + 1
        return self._said

    def planned(self) -> None:
        for bucket in self.sync.plan.buckets:
            bucket.patient = any(slot.name in self._in_parts for slot in bucket.slots)

    def before_send(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if slot.closed or slot.kept is not None:
                slot.split()
                self._kept.append(slot)
            slot.closed = True
        if self._clipping.looks:
            self._clipping.given([slot.parameter for slot in bucket.slots])

    def ended(self) -> None:
        for slot in self._kept:
            slot.forget_kept()
        self._kept.clear()
        self.passes_left = self.passes
        self.backward, self.pass_number = None, 0

    def plan_given_up(self, anew: bool) -> None:
        if anew and exchanges.survive is None:  # else the reduced gradients are still to be stepped with
            self.reduced = 0


def uncount(optimizer: torch.optim.Optimizer) -> None:
    """Has the `GradScaler` that calls `step()`, if one does, not count a step that is not taken.

    It scales gradients up after so many steps in succession, and adds one in its `update()`, whatever `step()` does.
    """
    step, frame = torch.amp.GradScaler.step.__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not step:
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("optimizer") is optimizer:
        frame.f_locals["self"]._growth_tracker.sub_(1)
