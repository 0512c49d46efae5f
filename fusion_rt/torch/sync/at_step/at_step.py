"""The schedule of exchanges at `step()`: the part that `at_homes` and `local_steps` share.

Until `step()`, `p.grad` is what it is in one process, so that it can be accumulated, unscaled and clipped as there. A
`GradScaler` has `step()` called in any case, as with torch's fused optimizers (`_step_supports_amp_scaling`), so that a
step in which this rank's gradients overflowed still counts for whoever counts steps.

With an algorithm that overlaps, a post after one step is answered some steps later: by then the worker has moved, so it
gets a change, which is added, or mixes the answer with its own values. All others wait for the answer. A model that is
sent in fragments has several posts under way, one for each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_rt import wire
from fusion_rt.algorithms import Signal
from fusion_rt.client import terms
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.runtime import is_initialized, runtime
from fusion_rt.torch.ops.broadcast import barrier
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.step_schedule import Schedule, ShardClock
from fusion_rt.torch.sync.weights import Weights
from fusion_rt.tracing.format import Kind

_GRADIENT = int(Kind.GRADIENT)


@dataclass(frozen=True)
class UnansweredPost:
    """Operations posted at one `step()` and not answered yet.

    Attributes:
        buckets: those that were posted.
        due: the number of local steps after which the answer is taken.
        contributors: the handle of the sum of ones of all ranks that post, where that is asked for.
    """

    buckets: Sequence[Bucket]
    due: int = 0
    contributors: int | None = None


class AtStep(Schedule):
    """Exchanges when the script calls `step()`, or every so many times: the base of both kinds."""

    own_gradients = True

    def __init__(self, options: Options, trained: Trained, passes: int) -> None:
        super().__init__(options, trained, passes)
        self._algorithm = options.algorithm
        # Homes are dealt anew in another membership, empty, unless they outlive this one; and of what is answered
        # later, ranks that have to be alike may have taken different parts when one is lost.
        self.survives = self.sync.checkpoint.outlives or not (self._algorithm.at_homes or self._algorithm.overlaps)
        self._clock = ShardClock(0, 0, 0, self._algorithm.synchronous)
        self._weights = Weights()  # as the last step left them; noted where something else depends on them
        self._unanswered: list[UnansweredPost] = []  # in the order in which they were posted
        self._said = terms()  # with each bucket
        self._graph_task = -1  # of the last gradient
        self._is_restored = False  # homes may know this rank with other parameters than it has
        self._is_set_anew = False  # homes that begin with saved values are to have the parameters

    @property
    def loss_scale(self) -> float:
        """None: the script has unscaled its gradients when they leave."""
        return 1.0

    # --- a step -------------------------------------------------------------------------------------------------------

    def arrived(self, slot: Slot) -> None:
        """Only records the gradient: `step()` takes it as the script has left it by then."""
        steps = self.sync.steps
        if (task := torch._C._current_graph_task_id()) != self._graph_task:
            self._graph_task = task
            steps.first_gradient()
        steps.trace.record(_GRADIENT, slot.name, slot.nbytes, steps.number)

    def _follow(self) -> None:
        """Updates slots to the parameters that are trained now, before the step that changes them is taken. If they
        have changed this is an operation on all ranks."""
        if self._unanswered:
            self._forget_left()
        if not self.sync.trained.has_changed(self.sync.marks):
            return
        if self.sync.is_of(runtime()):
            self._collect()
            self.sync.checkpoint.move()
        self.sync.give_up_plan(runtime())
        self.sync.watch()

    def _forget_left(self) -> None:
        """Forgets posts to a job that this process has left (`hvd.shutdown`), because they are never answered."""
        if not (is_initialized() and self.sync.plan.here is runtime()):
            self._unanswered.clear()
            self.sync.end_step()

    def _post(self, values: bool, piece: int = 0) -> None:
        """Posts this rank's values of a fragment; or, without any, a contribution that only counts. Of a bucket that is
        under way nothing is posted."""
        began, sync, pieces = time.perf_counter(), self.sync, self._algorithm.pieces
        sync.begin()
        sync.idle = True  # nothing of a step is done before its `step()`
        if not sync.plan.made:
            sync.make_plan()
        if self._is_restored:
            self._give_parameters("has")
            self._is_restored = False
        self._said = self._contribution(values)
        buckets = [bucket for bucket in sync.plan.buckets[piece::pieces] if not bucket.sent]
        self._begin_post(buckets)
        sync.submit(values, buckets)
        if buckets:
            self._unanswered.append(self._note_posted(buckets, piece))
        sync.note_waited(began)

    def _begin_post(self, buckets: Sequence[Bucket]) -> None:
        """Called before this rank's values in these buckets are sent."""

    def _exchange_now(self, values: bool, pieces: Sequence[int] = (0,)) -> None:
        """Posts these fragments, and takes the answers."""
        try:
            for piece in pieces:
                self._post(values, piece)
        except HorovodInternalError:
            if self._unanswered:  # of fragments before the one that failed
                self._unanswered.clear()
                self.sync.end_step()
            raise
        self._collect()

    def _note_posted(self, buckets: Sequence[Bucket], piece: int) -> UnansweredPost:
        """Returns the record of a post of these buckets."""
        return UnansweredPost(buckets)

    def _contribution(self, values: bool) -> wire.Ready:
        """Returns the terms that are sent with this rank's values."""
        return terms(samples=self.samples if values else 0)

    def _share_of_mean(self, posted: UnansweredPost) -> float:
        """Returns the factor by which results are multiplied."""
        return 1.0

    def _collect(self) -> None:
        """Waits for the answers to all posts, and has parameters take them."""
        for posted in list(self._unanswered):
            self._land(posted)

    def _land(self, posted: UnansweredPost) -> None:
        """Waits for the answers to a post, and has parameters take them."""
        began = time.perf_counter()
        self._unanswered.remove(posted)
        try:
            self._await_answers(posted)
            share = self._share_of_mean(posted)
            if self.survives and exchanges.survive is not None:  # then no rank may have taken a part of values left out
                self.sync.await_results(posted.buckets if self._algorithm.overlaps else None)
            self.sync.receive(share, posted.buckets)
        except BaseException as error:
            if isinstance(error, HorovodInternalError):
                self.sync.await_sent()
            self._unanswered.clear()
            self.sync.end_step()
            raise
        self.sync.end_step(posted.buckets)
        self.sync.note_waited(began, again=True)

    def _await_answers(self, posted: UnansweredPost) -> None:
        """Waits for the homes that do not expect that, where the algorithm's workers usually go on."""
        if not self._algorithm.waits_for_answers:
            for bucket in posted.buckets:
                bucket.await_answer()

    # --- parameters that the script sets ------------------------------------------------------------------------------

    def note_weights(self) -> None:
        if self.sync.is_of(runtime()):
            weighted = any(bucket.weight != 1.0 for bucket in self.sync.plan.buckets)
            if self._algorithm.remembers_weights or weighted:
                self._weights.note(self.sync.slots)
            else:
                self._weights.forget()

    def _check_weights(self) -> None:
        """Raises `ValueError` if the script has set a parameter since the last step."""
        if self.sync.is_of(runtime()) and (name := self._weights.changed()):
            raise ValueError(
                f"the parameter {name!r} was set since the last step, and {self._algorithm} would go on from its old "
                "value; if all ranks have set the same (or after hvd.broadcast_parameters), call optimizer.reseed() "
                "on all of them before the next step"
            )

    # --- calls of the script ------------------------------------------------------------------------------------------

    def agree(self) -> None:
        if self._algorithm.at_shards:
            self._exchange(terms(kind="ask"), take=True)

    def settled(self) -> None:
        self.note_weights()

    def discard(self) -> None:
        if not self._unanswered:
            return
        unanswered, self._unanswered = self._unanswered, []
        for posted in unanswered:
            with contextlib.suppress(HorovodInternalError):  # whatever its end: its result is not needed any more
                self._await_answers(posted)
                self._share_of_mean(posted)
        self.sync.await_sent()
        self.sync.end_step()

    def reseed(self) -> None:
        """Has the homes go on with the parameters as they are, and forgets posts under way."""
        if self._unanswered:
            self._forget_left()
        super().reseed()
        self._begin_anew()
        if not (is_initialized() and self.sync.is_of(runtime())):
            self._is_set_anew = True  # whatever homes have by then
            return
        if self._algorithm.at_homes:
            barrier(self.sync.options.process_set)  # no rank posts any more
        if self._algorithm.at_shards:
            self._reseed_homes()
        self.settled()

    def _begin_anew(self) -> None:
        """Has outer steps begin with the parameters as they are."""

    def _reseed_homes(self) -> None:
        """Gives its own homes this rank's parameters, or shards those of the first rank, when no rank posts."""
        if self._gives:
            self._give_parameters("reseed")
        barrier(self.sync.options.process_set)

    # --- in checkpoints, and the synchroniser's report ---------------------------------------------------------------

    def homes_are_loaded(self) -> None:
        self._weights.forget()
        self._is_restored = self._algorithm.at_shards and self._algorithm.signal is not Signal.PARAMETER

    def planned(self) -> None:
        if self._gives:
            self._give_parameters("seed")  # the others have the same, as scripts see to
        if self._algorithm.at_shards:
            plan = self.sync.plan.agreed
            assert plan is not None
            self._clock = ShardClock(runtime().client.welcome.epoch, plan.id, 0, self._clock.in_step)
        if self._is_set_anew and self._algorithm.at_homes:
            self.sync.checkpoint.forget_unsent()
            self._reseed_homes()
        self._is_set_anew = False

    @property
    def _gives(self) -> bool:
        """True if homes begin with this rank's parameters."""
        return self.sync.plan.is_first() if self._algorithm.at_shards else self._algorithm.at_homes

    def note_recalled(self, clock: int) -> None:
        self._clock = self._clock._replace(recalled=clock)

    def shard_clock(self) -> ShardClock | None:
        return self._clock if self.sync.checkpoint.outlives else None

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        return self._said  # residuals of parameters, or of their changes, are not rescaled when the rate changes

    def plan_given_up(self, anew: bool) -> None:
        self._unanswered = []
        self._weights.forget()

    def _give_parameters(self, kind: wire.PostKind) -> None:
        """Gives the homes this rank's parameters, or where they were at the last exchange, where that counts."""
        for slot in self.sync.slots:
            assert slot.view is not None
            slot.view.copy_(slot.first_value())
        self._exchange(terms(kind=kind), take=False)

    def _exchange(self, said: wire.Ready, take: bool) -> None:
        """Says something about each bucket that is no contribution, and waits for the answers. All that was posted has
        to have been answered."""
        self._said = said
        buckets = self.sync.plan.buckets
        for bucket in buckets:
            bucket.announce()
        for bucket in buckets:
            if take:
                bucket.receive()
            else:
                bucket.await_result()
            bucket.rewind()
