"""The schedule of an optimizer: when its synchroniser exchanges, in `step()` and other calls of the script.

Schedules are in `in_backward.py`, `overlap/after_step.py`, `at_step/` and `handed.py`.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch

from fusion_rt import wire
from fusion_rt.client import terms
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.synchroniser import Synchroniser

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
Closure: TypeAlias = Callable[[], Any]
_serial = itertools.count()
_all: weakref.WeakSet[Schedule] = weakref.WeakSet()


class Outcome(enum.Enum):
    """The use that was made of an exchange's results: a step was taken, none was, or that is not known yet."""

    TAKEN = "taken"
    REFUSED = "refused"
    OPEN = "open"


class ShardClock(NamedTuple):
    """Records the last clock that a rank has all answers of, at the shards of a plan.

    Attributes:
        epoch, plan: the membership epoch, and the id, of the plan; 0: there was none yet.
        clock: how many of its contributions have been answered by all of them.
        in_step: all ranks have come equally far, or one contribution farther.
        recalled: how many contributions count in the state of these shards that was recalled after a loss; -1: none.
    """

    epoch: int
    plan: int
    clock: int
    in_step: bool
    recalled: int = -1


class Schedule:
    """Takes the steps of an optimizer, together with other ranks. It calls its synchroniser, which asks it no more than
    `synchroniser.ScheduleAnswers`; those have their docstrings there.

    Args:
        options: how the optimizer's parameters are exchanged.
        trained: these.
        passes: backward passes that make up a gradient.

    Attributes:
        slot_type: of the slots of parameters.
        hears, hears_before: autograd tells it of gradients; see `slots.GradientHooks`.
        own_gradients: `p.grad` is this rank's own until `step()`, so that a `GradScaler` has to call that in any case.
        eager: buckets are sent as soon as they are complete.
        may_be_late: updates can be applied one step late.
        local: ranks have parameters of their own.
        behind: this rank has joined before exchanges of others, which nothing has made up for.
        leader: a rank that is not, where some are; the same on all ranks.
        delays: updates are applied later than `step()`, which `finish` puts an end to.
        survives: an exchange that a loss leaves unfinished can be left out, so that the ranks that are left go on.
        outcome: the use of the last exchange that ended well; see `Outcome`.
        sync: the synchroniser.
        serial: in the order in which schedules were made.
        passes: backward passes that make up a gradient.
        samples: how many samples the next gradients come from, for algorithms that weigh them.
        passes_left: backward passes until gradients are complete, where they are counted.
        backward: a reference to the backward pass that runs, or has failed; else None.
        released: the optimizer is gone.
    """

    slot_type = Slot
    hears = True
    hears_before = eager = own_gradients = may_be_late = local = behind = delays = survives = released = False
    outcome = Outcome.TAKEN
    leader: int | None = None

    def __init__(self, options: Options, trained: Trained, passes: int) -> None:
        self.passes = self.passes_left = passes
        self.backward: Callable[[], object | None] | None = None
        self.samples = 1
        self.sync = Synchroniser(options, trained, self)
        self.serial = next(_serial)
        _all.add(self)

    def release(self) -> None:
        """Releases all slots of a deleted optimizer. Called by a finalizer, and so at any moment: sends nothing."""
        self.released = True
        self.sync.release()

    # --- calls of autograd; see `slots.GradientHooks` -----------------------------------------------------------------

    def arriving(self, slot: Slot, gradients: Any) -> None:
        """Called when autograd is about to add to `p.grad`."""

    def arrived(self, slot: Slot) -> None:
        """Called when autograd has added to `p.grad`, and the script's hooks have changed it."""
        raise NotImplementedError

    def lose(self, slot: Slot) -> None:
        """Called when the parameter belongs to another optimizer from now on."""
        self.sync.lost = slot.name

    def backward_ends(self) -> bool:
        """Ends a backward pass that this schedule has entered. Returns whether gradients are to be reduced now."""
        self.passes_left -= 1
        self.backward = None
        return False

    def backward_returns(self) -> None:
        """Reduces gradients, all of which have been computed. Raises `HorovodInternalError`."""

    def pass_is_gone(self) -> None:
        """Called when a backward pass that this schedule has entered has ended, well or not."""

    # --- calls of the script ------------------------------------------------------------------------------------------

    def step(self, optimizer: Any, closure: Closure | None) -> Any:
        """Takes a step. See `Wrapped.step`."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Sees to it that gradients are reduced, where that is done before `step()`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """A context in which `step()` does not synchronise, where it would."""
        return contextlib.nullcontext()

    def zeroed(self) -> None:
        """Called when the script resets its gradients."""

    def discard(self) -> None:
        """Forgets gradients since the last exchange, and exchanges under way."""

    def finish(self) -> None:
        """Applies updates that wait for the next forward pass. Raises `HorovodInternalError`."""

    def finish_or_drop(self) -> None:
        """Applies updates that wait, or warns that their reduction failed."""

    def drain(self) -> None:
        """Takes the answers to posts under way. Raises `ValueError` if the script has set a parameter since."""

    def settled(self) -> None:
        """Called when parameters have become those that all ranks have agreed upon."""
        self.behind, self.leader = False, None

    def note_weights(self) -> None:
        """Called when parameters were set back to earlier values."""

    def reseed(self) -> None:
        """Goes on from the parameters as they are: gradients of those before that have not been applied are forgotten.
        To be called on all ranks."""
        self.finish()
        self.discard()
        self.sync.checkpoint.forget_unsent()

    def set_passes(self, passes: int) -> None:
        """Sets how many backward passes make up a gradient, from the next step on."""
        self.passes = passes

    # --- after a loss, where the ranks that are left go on; see `exchanges.py` ----------------------------------------

    def note_left_out(self) -> None:
        """Called when the exchange that the script waits for was left out, in the membership that follows: parameters
        and optimizer stay as they were before it."""

    def note_known(self, outcome: Outcome) -> None:
        """Called instead where other ranks have had its results. If these have made them take a step, parameters and
        optimizer have been set to the result."""
        self.note_left_out()

    def drop_under_way(self) -> None:
        """Called when an exchange was left out that the script does not wait for."""

    def shard_clock(self) -> ShardClock | None:
        """Returns how far this rank has come at shards that outlive a loss; None if it is at none."""
        return None

    # --- in checkpoints, and after a join -----------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any] | None:
        """Returns this schedule's state for checkpoints, the same on all ranks; None if there is none."""
        return None

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        """Resumes from an `own_state` and the parameters that belong to it."""

    def homes_are_loaded(self) -> None:
        """Called when homes have a checkpoint's parameters, which the model has, too, or is about to."""

    def joined(self) -> None:
        """Called when all ranks have joined, and go on together."""

    def note_missed(self, counts: Mapping[int, int], mine: int) -> None:
        """Notes, when all ranks have joined, which of them have missed exchanges of all ranks.

        Args:
            counts: how many exchanges each rank has taken part in since all ranks had the same number.
            mine: this rank.
        """
        most = max(counts.values())
        if min(counts.values()) < most:
            self.behind = self.behind or counts[mine] < most
            if self.leader is None or counts[self.leader] < most:
                self.leader = min(rank for rank, count in counts.items() if count == most)

    # --- answers to the synchroniser; see `ScheduleAnswers` -----------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self.sync.checkpoint.units.loss_scale

    def reduction(self) -> wire.Reduction:
        return msgspec.structs.replace(self.sync.options.reduction, survives=self.sync.checkpoint.outlives)

    def agreed(self, plan: wire.Plan) -> None: ...

    def planned(self) -> None: ...

    def plan_given_up(self, anew: bool) -> None: ...

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        checkpoint = self.sync.checkpoint
        return terms(checkpoint.units.factors(slots) if checkpoint.converts else (), loss_scale=self.loss_scale)

    def urgencies(self, buckets: Sequence[Bucket]) -> Sequence[int]:
        """Returns 1 for all of them, since `step()` waits for all, and operations that a script waits for by themselves
        are more urgent."""
        return [1] * len(buckets)

    def before_send(self, bucket: Bucket) -> None: ...

    def ended(self) -> None: ...

    def await_pending(self) -> None: ...

    def alike(self) -> Mapping[str, torch.Tensor]:
        """Returns the parameters between steps; nothing within one."""
        return {slot.name: slot.parameter for slot in self.sync.slots} if self.sync.idle else {}


def everyone() -> list[Schedule]:
    """Returns the schedules of all optimizers in the order of their creation, the same on all ranks."""
    return [schedule for schedule in _in_order() if schedule.sync.plan.is_named]


def enter_all(here: Runtime) -> None:
    """Moves all optimizers to a membership, in the order of their creation, which names their plans: a new worker makes
    its own in the same order."""
    for schedule in _in_order():
        if list(schedule.sync.slots):
            schedule.sync.enter(here)


def _in_order() -> list[Schedule]:
    return sorted((schedule for schedule in _all if not schedule.released), key=lambda schedule: schedule.serial)
