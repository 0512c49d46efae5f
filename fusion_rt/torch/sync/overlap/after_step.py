"""Gradients that are under way when `step()` has returned, and their application.

`step()` does not wait: it sends the unsent rest, and leaves each bucket as `PendingGradients`. Until these have
*landed*, which waits for the reduction and applies the update, nothing else may be written to the bucket's place in the
arena, and its parameters have no gradient (`p.grad` is None), so that neither `zero_grad` nor the next backward pass
can touch it.

When they land: with `overlap="forward"` when a module's forward pass is about to need one of its parameters; with
"stale" in the next `step()`, before the next gradients go into the same place. In both, sooner if the script reads or
writes parameters otherwise.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_rt import wire
from fusion_rt.core.errors import HorovodInternalError, StepGivenUp
from fusion_rt.torch.core import watching
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.exchanges import Exchange, exchanges
from fusion_rt.torch.sync.in_backward import InBackward
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.overlap.pending_gradients import PendingGradients, make_guard
from fusion_rt.torch.sync.overlap.updates import Update
from fusion_rt.torch.sync.overlap.uses import Uses
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.step_schedule import Closure, Outcome
from fusion_rt.tracing.format import Kind


class AfterStep(InBackward):
    """Reduces gradients while the script goes on, and applies them when the next forward pass needs them."""

    delays = True
    asked_late = False  # updates are applied one step late

    def __init__(self, options: Options, trained: Trained, passes: int) -> None:
        super().__init__(options, trained, passes)
        self._late = self.asked_late
        self.eager = self.may_be_late = not self._late
        self._stepped = False  # a step has been asked for, and, as far as is known, nothing computed for the next one
        self._guarded: list[tuple[Slot, torch.Tensor | None]] = []  # whose `p.grad` is a guard, and their gradients
        self._uses = Uses()
        self._update: Update | None = None  # that waits
        self._pending: dict[int, PendingGradients] = {}  # by id of each of their parameters
        self._last: PendingGradients | None = None  # the plan's last, which fails if a rank has given the step up
        self._under_way: Exchange | None = None  # in which they are reduced, until it is known how that has ended
        self._applying = False
        self._marks = self.sync.marks  # of the parameters whose uses are known
        self._marked = 0  # times that parameters were marked
        self._lock = threading.RLock()  # forward passes may run on several threads
        watching.watch(self)

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Any, closure: Closure | None) -> Any:
        """Asks for the script's optimizer's step, and returns; it is taken as docs/overlap.md says. Afterwards `p.grad`
        is None, as after `zero_grad`.

        Raises:
            HorovodInternalError: the reduction of an earlier step failed, on all ranks.
            ValueError: there is a closure, which would have to see the parameters at once; or a gradient is sparse.
        """
        if closure is not None:
            raise ValueError("step(closure) evaluates the model while the step is being taken, so that nothing can "
                             "overlap; use overlap='none' for this optimizer")  # fmt: skip
        steps = self.sync.steps
        steps.begin()
        optimizer._note_step()
        if self._is_left_out:
            self._step_left_out(optimizer)
        elif self._skipping or (self.reduced and self.sync.idle):
            self._hold(optimizer)
        else:
            self._launch(optimizer)
        self.reduced, self.outcome = 0, Outcome.TAKEN
        steps.end()
        return None

    def _launch(self, optimizer: Any) -> None:
        """Sends the rest of this step, and has the optimizer's step taken when all of it has been reduced."""
        sync = self.sync
        self.check_pass()
        self.finish()
        self.sync.compare()
        began = time.perf_counter()
        exchange = exchanges.begin([self])
        if exchanges.is_left_out(exchange):
            self._leave_out(exchange)
            return
        try:
            if sync.idle:
                self._admit_own()
                sync.begin()
            self._submit()
            pending = [PendingGradients([s.parameter for s in b.slots], b, b.hand_over()) for b in sync.plan.buckets]
            sync.stepped()
        except HorovodInternalError as error:
            sync.end_step()
            exchanges.lose(exchange, error)
            self._leave_out(exchange)
            return
        finally:
            sync.end_step()
        self._under_way = exchange if pending else None
        if not pending:
            exchanges.end(exchange)
        self._stepped = True
        sync.note_waited(began)
        if sync.replanning is not None:
            sync.note_step(all_here=False)
        update = Update(optimizer)
        taken = {id(parameter) for each in pending for parameter in each.parameters}
        self._last = pending[-1] if pending else None
        rest = [p for p in update.parameters() if p.grad is not None and id(p) not in taken]
        if rest:  # parameters that are not trained any more, and still have a gradient
            pending.append(PendingGradients(rest, gradients=[parameter.grad for parameter in rest]))
        self._wait_for(pending, update)

    def _leave_out(self, exchange: Exchange) -> None:
        """Takes no step in place of the one that was asked for."""
        exchanges.end(exchange)
        if not self.sync.idle:
            self.sync.end_step()
        for parameter in Update(self.sync.trained.optimizer()).parameters():
            parameter.grad = None
        self._stepped, self._is_left_out = True, False

    def _hold(self, optimizer: Any) -> None:
        """Has the optimizer's step taken with the gradients that there are."""
        self.finish()
        self.sync.compare(ahead=self.reduced)
        self._stepped = True
        update = Update(optimizer)
        parameters = [parameter for parameter in update.parameters() if parameter.grad is not None]
        if parameters:
            held = PendingGradients(parameters, gradients=[parameter.grad for parameter in parameters])
            self._wait_for([held], update)

    def _wait_for(self, pending: Sequence[PendingGradients], update: Update) -> None:
        if not pending:
            return
        self._update = update
        self._pending = {id(parameter): each for each in pending for parameter in each.parameters}
        for each in pending:
            for parameter in each.parameters:
                parameter.grad = None
            each.mark(self.finish, self._marked)
        self._marked += 1
        watching.watch(self)
        marks, self._marks = self._marks, self.sync.marks
        if marks and marks is not self._marks:  # the set of parameters has changed
            self._uses.restart()
        if self._uses.recording:
            self._uses.conclude([slot.parameter for slot in self.sync.slots])
            self.sync.prioritise()
        if not self._late:
            for key in self._uses.unseen & self._pending.keys():
                self._land_of(key)

    # --- applying it --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Applies the update that waits.

        Raises:
            HorovodInternalError: its reduction failed, on all ranks. Nothing waits any more.
        """
        with self._lock:
            while self._pending:
                self._land(next(iter(self._pending.values())))

    def finish_or_drop(self) -> None:
        """Applies the update that waits, or warns that its reduction failed."""
        try:
            self.finish()
        except HorovodInternalError as error:
            warnings.warn(f"the last update of an optimizer is lost, since its gradients could not be reduced: {error}",
                          stacklevel=3)  # fmt: skip

    def _land_of(self, key: int) -> None:
        with self._lock:
            found = self._pending.get(key)
            if found is not None:
                self._land(found)

    def _land(self, first: PendingGradients) -> None:
        update = self._update
        assert update is not None
        began = time.perf_counter()
        if self._is_given_up():
            return
        pending = list(dict.fromkeys(self._pending.values())) if update.whole else [first]
        try:
            for one in pending:
                one.receive()
            self.sync.note_waited(began, again=True)
            self._check_untouched(update, pending)
            steps = self.sync.steps
            steps.trace.record(Kind.APPLY_BEGIN, "", 0, steps.number)
            self._apply(update, pending)
            steps.trace.record(Kind.APPLY_END, "", 0, steps.number)
        except BaseException:
            self._drop()
            raise
        for one in pending:
            one.unmark()
            for parameter in one.parameters:
                self._pending.pop(id(parameter), None)
        if not self._pending:
            self._rest()

    def _is_given_up(self) -> bool:
        """Waits for the step to be reduced, and tells whether a rank has cancelled it, so that no rank takes it.
        No part of an update is applied before: ranks would have different parts."""
        if self._last is None:
            return False
        try:
            if exchanges.survive is not None:  # then no rank may have a part of an update that others have not
                for each in dict.fromkeys(self._pending.values()):
                    each.await_end()
            self._last.await_end()
        except StepGivenUp as error:
            self._drop()
            self._has_ended()
            if self.sync.plan.made:  # else it was counted in another membership
                self.sync.stepped(-1)
            exchanges.note_given_up()
            warnings.warn(f"an update is left out, on all ranks: {error}", stacklevel=2)
            return True
        except HorovodInternalError as error:
            self._drop()
            if self._under_way is None:
                raise
            exchanges.lose(self._under_way, error)
            self._under_way = None
            return True
        except BaseException:
            self._drop()
            raise
        self._last = None
        self._has_ended()
        return False

    def _has_ended(self) -> None:
        """Notes that the exchange of the pending gradients has ended well."""
        if self._under_way is not None:
            exchanges.last = self._under_way.parts
            exchanges.end(self._under_way)
            self._under_way = None

    def alike(self) -> Mapping[str, torch.Tensor]:
        """Returns the parameters, all of which have the last update."""
        return {slot.name: slot.parameter for slot in self.sync.slots}

    def drop_under_way(self) -> None:
        self._drop()
        self._under_way = None

    def _check_untouched(self, update: Update, pending: Sequence[PendingGradients]) -> None:
        for each in pending:
            for parameter in each.touched():
                name = update.optimizer._parameter_names.get(parameter, "")
                raise ValueError(
                    f"parameter {name!r} was changed between step() and the end of that step, which with overlap comes "
                    "later; call optimizer.synchronize_parameters() before changing parameters, or use overlap='none'"
                )

    def _apply(self, update: Update, pending: Sequence[PendingGradients]) -> None:
        """Takes the step, with the gradients in their parameters' `grad` meanwhile."""
        parameters = [parameter for each in pending for parameter in each.parameters]
        gradients = [gradient for each in pending for gradient in each.gradients]
        affected = update.parameters() if update.whole else parameters
        kept = [parameter.grad for parameter in affected]
        self._applying = True
        try:
            if update.whole:
                for parameter in affected:
                    parameter.grad = None
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            update.apply(parameters)
        finally:
            self._applying = False
            for parameter, gradient in zip(affected, kept, strict=True):
                parameter.grad = gradient

    def _drop(self) -> None:
        """Drops the waiting update, and waits until its place in the arena is not written to any more."""
        pending = list(dict.fromkeys(self._pending.values()))
        self._pending = {}
        self._rest()
        for each in pending:
            each.unmark()
            with contextlib.suppress(HorovodInternalError):  # the first one has been raised
                each.await_end()

    def await_pending(self) -> None:
        if self._pending and not self._is_given_up():
            for each in dict.fromkeys(self._pending.values()):
                each.await_end()

    def _rest(self) -> None:
        self._update = self._last = None
        if not self._uses.recording:
            watching.unwatch(self)

    # --- when ---------------------------------------------------------------------------------------------------------

    def before_forward(self, module: torch.nn.Module) -> None:
        """Lands the parameters that the module's forward pass needs.

        Without gradients and in evaluation mode that is all it has: modules take shortcuts then, past the forward
        passes of those inside. (Forward passes without gradients alone are part of training with checkpoints.) So it is
        for compiled modules, whose code would depend on whether there are hooks.
        """
        evaluating = not (module.training or torch.is_grad_enabled())
        if self._uses.recording and not evaluating:
            self._uses.called(module)
        if not self._pending:
            return
        if evaluating:
            self._land_all_of(module)
            return
        needed = [id(parameter) for parameter in module._parameters.values() if id(parameter) in self._pending]
        self._stepped = self._stepped and not needed
        if self._late:
            return
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            self._land_all_of(module)
            return
        for key in (*needed, *self._uses.beneath(module)):
            self._land_of(key)

    def before_saving(self, module: torch.nn.Module) -> None:
        """Lands all, if the module has any of it."""
        if self._pending:
            self._land_all_of(module)

    def before_loading(self, module: torch.nn.Module) -> None:
        """Applies the update that waits before a module is loaded. One that failed has nothing to spoil, and only
        warns."""
        if any(id(parameter) in self._pending for parameter in module._parameters.values()):
            self.finish_or_drop()

    def _land_all_of(self, module: torch.nn.Module) -> None:
        if any(id(parameter) in self._pending for parameter in module.parameters()):
            self.finish()

    def arrived(self, slot: Slot) -> None:
        if self._pending and not self._late and id(slot.parameter) in self._pending:
            self._used_too_early(slot)
        super().arrived(slot)

    def _used_too_early(self, slot: Slot) -> None:
        """Handles a gradient that came before its parameter's last update was applied: it is that of an older value."""
        warnings.warn(
            f"parameter {slot.name!r} was used before its last update had been applied, because no module with this "
            "parameter has run its forward pass; call optimizer.synchronize() before such a use. From now on step() "
            "waits for this parameter",
            stacklevel=2,
        )
        self._uses.unseen.add(id(slot.parameter))
        self._land_of(id(slot.parameter))

    # --- a backward pass, and the script's work with gradients --------------------------------------------------------

    def synchronize(self) -> None:
        """Reduces the gradients after a backward pass, and waits for it, so that they can be looked at and changed; to
        be used with `skip_synchronize`. Between `step()` and the next forward pass applies the update, as
        `synchronize_parameters` does anywhere. Raises `HorovodInternalError`."""
        if self.sync.idle and self._stepped and all(slot.parameter.grad is None for slot in self.sync.slots):
            self.finish()
        else:
            super().synchronize()

    def _reduce(self) -> None:
        self.finish()
        super()._reduce()

    def _backward_begins(self) -> None:
        if self.reduced or (self.passes_left <= 0 and not self._pass_failed):
            self._refuse_pass()
        super()._backward_begins()

    def _reopen(self, slot: Slot) -> None:
        if not self._pass_failed and (self.reduced or self.passes_left <= 0):
            self._refuse_pass()
        super()._reopen(slot)

    def _refuse_pass(self) -> None:
        way = "stale" if self._late else "forward"
        raise ValueError(
            f"overlap={way!r} allows one backward pass before step(), and its gradients are being reduced already; "
            "add up losses for one backward pass, set backward_passes_per_step, or use overlap='none'"
        )

    def backward_returns(self) -> None:
        """Puts guards where gradients are, instead of waiting for them."""
        if self.eager and not exchanges.next_is_left_out:
            self._submit_early()
        self.backward = None
        for slot in self.sync.slots:
            if slot.guard is None:
                slot.guard = make_guard(slot, self._await_gradients)
            self._guarded.append((slot, slot.parameter.grad))
            slot.parameter.grad, slot.closed = slot.guard, True

    def _submit_early(self) -> None:
        try:
            self._submit()
        except HorovodInternalError as error:
            if exchanges.survive is None:
                raise
            self.sync.idle, self.sync.failure = False, error  # for `step()`, which leaves it out

    def _await_gradients(self) -> None:
        """Waits for a step's gradients, one of which is touched, if they have been computed and are under way."""
        if not (self.sync.idle or self._applying) and self.passes_left <= 0:
            self._reduce()

    def _submit(self) -> None:
        if self._guarded and self.sync.failure is None:
            self._unguard()
        super()._submit()

    def _unguard(self) -> None:
        """Puts this rank's gradients back where guards are, before the unsent rest of this step is sent."""
        while self._guarded:
            slot, gradient = self._guarded.pop()
            if slot.parameter.grad is slot.guard:
                slot.parameter.grad = gradient
                slot.closed = slot.bucket is not None and slot.bucket.sent
            elif slot.bucket is not None and slot.bucket.sent:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} was replaced or forgotten while it was being reduced; with "
                    "overlap, call optimizer.synchronize() after backward() first"
                )

    # --- answers to the synchroniser ----------------------------------------------------------------------------------

    def ended(self) -> None:
        self._stepped = self._stepped and self.sync.idle
        guarded, self._guarded = self._guarded, []
        for slot, gradient in guarded:
            if slot.parameter.grad is slot.guard:
                slot.parameter.grad = gradient
        super().ended()

    def release(self) -> None:
        watching.unwatch(self)
        self._uses.release()
        super().release()

    def before_send(self, bucket: Bucket) -> None:
        self._land_of(id(bucket.slots[0].parameter))  # if no forward pass has asked for it: its place is needed now
        super().before_send(bucket)

    def urgencies(self, buckets: Sequence[Bucket]) -> Sequence[int]:
        """Orders buckets as the next forward pass needs them; `step()` waits for those of no known use. Until
        that is known, the buckets whose gradients arrive last count as those of the first layers."""
        if self._late:
            return super().urgencies(buckets)
        needed_at = self._uses.needed_at
        first = [min(needed_at.get(id(slot.parameter), -1) for slot in bucket.slots) for bucket in buckets]
        order = sorted(range(len(buckets)), key=lambda index: (first[index], -index))
        return [1 + order.index(index) for index in range(len(buckets))]

    def agreed(self, plan: wire.Plan) -> None:
        late = None if plan.tuning is None else plan.tuning.late
        self._late = self.asked_late if late is None else late
        self.eager = not self._late
        if plan.sparse:
            raise ValueError(
                f"the gradient of {plan.sparse[0].name!r} is sparse, and overlap cannot apply sparse gradients later; "
                "use sparse_as_dense=True, or overlap='none' for this optimizer"
            )

    def plan_given_up(self, anew: bool) -> None:
        with self._lock:
            for each in dict.fromkeys(self._pending.values()):
                each.leave_arena()
        super().plan_given_up(anew)


class OneStepLate(AfterStep):
    """Applies updates one step late."""

    asked_late = True
