"""The strategy that decides when an optimizer's synchroniser exchanges: its interface, and what most strategies have.

Strategies are in `in_backward.py`, `overlap/after_step.py`, `at_step/` and `handed.py`.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch

from fusion_rt import wire
from fusion_rt.client import terms
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.parameters import Named
from fusion_rt.torch.sync.slots import Slot

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
Closure: TypeAlias = Callable[[], Any]


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
        recalled: how many contributions count in what was recalled of these shards after a loss; -1: nothing was.
    """

    epoch: int
    plan: int
    clock: int
    in_step: bool
    recalled: int = -1


class When:
    """A strategy that decides when an optimizer's synchroniser exchanges, and so what `step()` and its like do.

    Args:
        sync: the synchroniser (`synchroniser.py`, which imports this), which asks this one.

    Attributes:
        zeroed: called when the script resets its gradients.
        sending: called before a bucket is sent.
        ended: called when a step has ended, well or not.
        hears, hears_before: autograd tells it of gradients; see `slots.GradientHooks`.
        eager: buckets are sent as soon as they are complete.
        own_gradients: `p.grad` is this rank's own until `step()`, so that a `GradScaler` has to call that in any case.
        may_be_late: updates can be applied one step late.
        keeps_context: a script's compressor's context of a gradient is needed after the step.
        local: ranks have parameters of their own.
        behind: this rank has joined before exchanges of others, which nothing has made up for.
        leader: a rank that is not, where some are; the same on all ranks.
        delays: updates are applied later than `step()`, which `finish` puts an end to.
        survives: an exchange that a loss leaves unfinished can be left out, so that the ranks that are left go on.
        outcome: what became of the last exchange that ended well; see `Outcome`.
        passes: backward passes that make up a gradient.
        samples: how many samples the next gradients come from, for algorithms that weigh them.
        serial: the synchroniser's.
        closing: the bucket that is sent only when a backward pass has ended, and so succeeds if all ranks' have.
        stepped: a step has been asked for, and, as far as is known, nothing has been computed for the next one.
        guarded: slots whose `p.grad` is a guard now, and this rank's gradients.
        passes_left: backward passes until gradients are complete, where they are counted.
        backward: a reference to the backward pass that runs, or has failed; else None.
    """

    # Called only where a strategy has them: in each step there is nothing to do for the others.
    zeroed: Callable[[], None] | None = None
    sending: Callable[[Bucket], None] | None = None
    ended: Callable[[], None] | None = None

    hears = True
    hears_before = eager = own_gradients = may_be_late = keeps_context = local = behind = delays = survives = False
    outcome = Outcome.TAKEN
    leader: int | None = None

    def __init__(self, sync: Any, passes: int) -> None:
        self.sync = sync
        self.passes = self.passes_left = passes
        self.backward: Callable[[], object | None] | None = None
        self.samples = 1
        self.closing: Bucket | None = None
        self.stepped = False
        self.guarded: list[tuple[Slot, torch.Tensor | None]] = []
        self.serial = sync.serial

    def slot(self, named: Named) -> Slot:
        """Makes the slot of a parameter."""
        return Slot(self, named)

    # --- what autograd says; see `slots.GradientHooks` ----------------------------------------------------------------

    def arriving(self, slot: Slot, gradients: Any) -> None:
        """Called when autograd is about to add to `p.grad`."""

    def arrived(self, slot: Slot) -> None:
        """Called when autograd has added to `p.grad`, and the script's hooks have made of it what they do."""
        raise NotImplementedError

    def lose(self, slot: Slot) -> None:
        """Called when the parameter belongs to another optimizer from now on."""
        self.sync.lost = slot.name

    def backward_ends(self) -> bool:
        """Ends a backward pass that this strategy has entered. Returns whether gradients are to be reduced now."""
        self.passes_left -= 1
        self.backward = None
        return False

    def backward_returns(self) -> None:
        """Reduces gradients, all of which have been computed. Raises `HorovodInternalError`."""

    def pass_is_gone(self) -> None:
        """Called when a backward pass that this strategy has entered has ended, well or not."""

    # --- what the script calls ----------------------------------------------------------------------------------------

    def step(self, optimizer: Any, closure: Closure | None) -> Any:
        """Takes a step. See `Wrapped.step`."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Sees to it that gradients are reduced, where that is done before `step()`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """A context in which `step()` does not synchronise, where it would."""
        return contextlib.nullcontext()

    def discard(self) -> None:
        """Forgets what has arrived since the last exchange, and what is under way."""

    def finish(self) -> None:
        """Applies updates that wait for the next forward pass. Raises `HorovodInternalError`."""

    def finish_or_drop(self) -> None:
        """Applies what waits, or warns that its reduction failed."""

    def drain(self) -> None:
        """Takes the answer to what is under way. Raises `ValueError` if the script has set a parameter since."""

    def agree(self) -> None:
        """Takes the homes' copy, if there is one. To be called on all ranks, between two barriers."""

    def weights(self) -> Sequence[float]:
        """Takes what homes have for this rank, and returns how much each of its parameters counts in a mean of all
        ranks; nothing where all count alike. To be called on all ranks, when nobody posts."""
        return ()

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

    def alike(self) -> Mapping[str, torch.Tensor]:
        """Returns what is the same on all ranks now, by names that are, too: the parameters. Nothing if nothing is."""
        return {slot.name: slot.parameter for slot in self.sync.slots} if self.sync.idle else {}

    # --- after a loss, where the ranks that are left go on; see `exchanges.py` ----------------------------------------

    def note_left_out(self) -> None:
        """Called when the exchange that the script waits for was left out, in the membership that follows: parameters
        and optimizer stay as they were before it."""

    def note_known(self, outcome: Outcome) -> None:
        """Called instead where other ranks have had its results. If these have made them take a step, parameters and
        optimizer have been set to what came of it."""
        self.note_left_out()

    def drop_under_way(self) -> None:
        """Called when an exchange was left out that the script does not wait for."""

    def note_recalled(self, clock: int) -> None:
        """Called when shards go on, after a loss, from what they had when so many contributions counted."""

    def shard_clock(self) -> ShardClock | None:
        """Returns how far this rank has come at shards that outlive a loss; None if it is at none."""
        return None

    # --- in checkpoints -----------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any] | None:
        """Returns this strategy's state for checkpoints, the same on all ranks; None if there is none."""
        return None

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        """Resumes from an `own_state` and the parameters that belong to it."""

    def rejoin(self, own: Mapping[str, Any]) -> None:
        """Goes on after a join of all ranks, with the `own_state` of the one that joined last."""
        self.load_own_state(own)

    def joined(self) -> None:
        """Called when all ranks have joined, and go on together."""

    def note_missed(self, counts: Mapping[int, int], mine: int) -> None:
        """Notes, when all ranks have joined, who has missed exchanges of all ranks.

        Args:
            counts: how many exchanges each rank has taken part in since all ranks had the same number.
            mine: this rank.
        """
        most = max(counts.values())
        if min(counts.values()) < most:
            self.behind = self.behind or counts[mine] < most
            if self.leader is None or counts[self.leader] < most:
                self.leader = min(rank for rank, count in counts.items() if count == most)

    def homes_are_loaded(self) -> None:
        """Called when homes have a checkpoint's parameters, which the model has, too, or is about to."""

    # --- what the synchroniser says -----------------------------------------------------------------------------------

    def reduction(self) -> wire.Reduction:
        """Returns the reduction to propose."""
        reduction: wire.Reduction = self.sync.options.reduction
        return msgspec.structs.replace(reduction, survives=self.sync.checkpoint.outlives)

    def tuned(self, tuning: wire.Tuning | None) -> None:
        """Called before a plan with this tuning is made."""

    def agreed(self) -> None:
        """Called when ranks have agreed upon a plan, before it is made. An operation on all ranks."""

    def check_sparse(self, slot: Slot) -> None:
        """Raises `ValueError` if this strategy cannot exchange a sparse gradient."""

    def planned(self) -> None:
        """Called when there is a new plan."""

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        """Returns the terms that are sent with a bucket of these slots."""
        checkpoint = self.sync.checkpoint
        return terms(checkpoint.units.factors(slots) if checkpoint.converts else (), loss_scale=self.loss_scale)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the gradients of this step."""
        scale: float = self.sync.checkpoint.units.loss_scale
        return scale

    def urgencies(self, buckets: Sequence[Bucket]) -> Sequence[int]:
        """Returns the urgency of each bucket, in the order of their arrival: all alike, since `step()` waits for all of
        them, and less urgent than operations that a script waits for by themselves."""
        return [1] * len(buckets)

    def unguard(self) -> None:
        """Puts this rank's gradients back where guards are, before the unsent rest of this step is sent."""

    def await_pending(self) -> None:
        """Waits until nothing of earlier steps is being reduced."""

    def plan_given_up(self, anew: bool) -> None:
        """Called before the plan is dropped. `anew`: because the membership has changed."""

    def watched(self) -> None:
        """Called before the set of parameters changes."""

    def released(self) -> None:
        """Called when the optimizer is gone."""
