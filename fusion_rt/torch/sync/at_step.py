"""Exchanges at `step()`: gradients go to homes, which take the steps; or ranks take local steps, and exchange
parameters, or by how much they have moved.

Until `step()`, `p.grad` is what it is in one process, so that it can be accumulated, unscaled and clipped as there. A
`GradScaler` has `step()` called in any case, as with torch's fused optimizers (`_step_supports_amp_scaling`), so that a
step in which this rank's gradients overflowed still counts for whoever counts steps.

With an algorithm that overlaps, what was posted after one step (a *flight*) is answered some steps later: by then the
worker has moved, so it gets a change, which is added, or mixes what it gets with what it has. All others wait for the
answer. A model that is sent in fragments has a flight for each.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import msgspec
import torch

from fusion_rt import wire
from fusion_rt.client import terms
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch import ops
from fusion_rt.torch.core.own_models import OwnModel
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.sync import backward
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.parameters import arguments_of, optimizer_spec
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.synchroniser import Synchroniser
from fusion_rt.torch.sync.weights import Weights, not_finite
from fusion_rt.torch.sync.when import TOO_MANY, Closure, When
from fusion_rt.tracing.format import Kind

_GRADIENT = int(Kind.GRADIENT)
_MAX_WEIGHT = (1 << 48) - 1  # that a message holds: of 16 million samples at once


@dataclass(frozen=True)
class Outstanding:
    """Operations posted at one `step()` and not answered yet.

    Attributes:
        buckets: those that were posted.
        due: the number of local steps after which the answer is taken.
        contributors: the handle of the sum of ones of all ranks that post, where that is asked for.
    """

    buckets: Sequence[Bucket]
    due: int = 0
    contributors: int | None = None


class AtStep(When):
    """Exchanges when the script calls `step()`, or every so many times: what both kinds of that have in common."""

    sync: Synchroniser
    own_gradients = True

    def __init__(self, sync: Synchroniser, passes: int) -> None:
        super().__init__(sync, passes)
        self._algorithm = sync.options.algorithm
        # Homes are dealt anew in another membership, empty; and of what is answered later, ranks may have taken
        # different parts when one is lost.
        self.survives = not (self._algorithm.at_homes or self._algorithm.overlaps)
        self._weights = Weights()  # as the last step left them; noted where something else depends on them
        self._flights: list[Outstanding] = []  # in the order in which they were posted
        self._said = terms()  # with each bucket
        self._graph_task = -1  # of the last gradient

    # --- a step -------------------------------------------------------------------------------------------------------

    def arrived(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Only records the gradient: `step()` takes it as the script has left it by then."""
        steps = self.sync.steps
        if (task := torch._C._current_graph_task_id()) != self._graph_task:
            self._graph_task = task
            steps.first_gradient()
        steps.trace.record(_GRADIENT, slot.name, slot.nbytes, steps.number)

    def _follow(self) -> None:
        """Updates slots to the parameters that are trained now, before the step that changes them is taken. If they
        have changed this is an operation on all ranks."""
        sync = self.sync
        if not sync.trained.has_changed(sync.ids):
            return
        if sync.is_of(runtime()):
            self._collect()
            sync.checkpoint.move()
        sync.give_up_plan(runtime())
        sync.watch()

    def _post(self, values: bool, piece: int = 0) -> None:
        """Posts this rank's values of a fragment; or, without any, a contribution that only counts. Of a bucket that is
        under way nothing is posted."""
        began, sync, pieces = time.perf_counter(), self.sync, self._algorithm.pieces
        sync.begin()
        sync.idle = True  # nothing of a step is done before its `step()`
        if not sync.plan.made:
            sync.make_plan()
        self._said = self._contribution(values, piece)
        buckets = [bucket for bucket in sync.plan.buckets[piece::pieces] if not bucket.sent]
        sync.submit(values, buckets)
        if buckets:
            self._flights.append(self._flight(buckets, piece))
        sync.note_waited(began)

    def _exchange_now(self, values: bool, pieces: Sequence[int] = (0,)) -> None:
        """Posts these fragments, and takes the answers."""
        try:
            for piece in pieces:
                self._post(values, piece)
        except HorovodInternalError:
            if self._flights:  # of fragments before the one that failed
                self._flights.clear()
                self.sync.end_step()
            raise
        self._collect()

    def _flight(self, buckets: Sequence[Bucket], piece: int) -> Outstanding:
        """Returns the record of what has been posted."""
        return Outstanding(buckets)

    def _contribution(self, values: bool, piece: int) -> wire.Ready:
        """Returns the terms that are sent with this rank's values of a fragment."""
        return terms(samples=self.samples if values else 0)

    def _share_of_mean(self, flight: Outstanding) -> float:
        """Returns the factor by which results are multiplied."""
        return 1.0

    def _collect(self) -> None:
        """Waits for the answers to what is under way, and has parameters take them."""
        for flight in list(self._flights):
            self._land(flight)

    def _land(self, flight: Outstanding) -> None:
        """Waits for the answers to a flight, and has parameters take them."""
        began = time.perf_counter()
        self._flights.remove(flight)
        try:
            self._await_answers(flight)
            share = self._share_of_mean(flight)
            if self.survives and exchanges.survive is not None:  # then nobody may have taken a part of what is left out
                self.sync.await_results()
            self.sync.receive(share, flight.buckets)
        except BaseException as error:
            if isinstance(error, HorovodInternalError):
                self.sync.await_sent()
            self._flights.clear()
            self.sync.end_step()
            raise
        self.sync.end_step(flight.buckets)
        self.sync.note_waited(began, again=True)

    def _await_answers(self, flight: Outstanding) -> None:
        """Waits for the homes that do not expect that, where the algorithm's workers usually go on."""
        if not self._algorithm.waits_for_answers:
            for bucket in flight.buckets:
                bucket.await_answer()

    # --- parameters that the script sets ------------------------------------------------------------------------------

    def note_weights(self) -> None:
        if self._algorithm.remembers_weights and self.sync.is_of(runtime()):
            self._weights.note(self.sync.slots)

    def _check_weights(self) -> None:
        """Raises `ValueError` if the script has set a parameter since the last step."""
        if self.sync.is_of(runtime()) and (name := self._weights.changed()):
            raise ValueError(
                f"the parameter {name!r} was set since the last step, and {self._algorithm} would go on from what it "
                "was before; if all ranks have set the same (or after hvd.broadcast_parameters), call "
                "optimizer.reseed() on all of them before the next step"
            )

    # --- what the script calls ----------------------------------------------------------------------------------------

    def agree(self) -> None:
        if self._algorithm.at_shards:
            self._exchange(terms(kind="ask"), take=True)

    def settled(self) -> None:
        self.note_weights()

    def discard(self) -> None:
        if not self._flights:
            return
        flights, self._flights = self._flights, []
        for flight in flights:
            with contextlib.suppress(HorovodInternalError):  # whatever becomes of it: nobody is interested any more
                self._await_answers(flight)
                self._share_of_mean(flight)
        self.sync.await_sent()
        self.sync.end_step()

    def reseed(self) -> None:
        """Has the homes go on with the parameters of the first rank; what is under way is forgotten."""
        if not self.sync.is_of(runtime()):  # else they are what it begins with
            return
        self.discard()
        if self._algorithm.at_shards:
            ops.barrier(self.sync.options.process_set)  # nobody posts any more
            self._give_parameters("reseed")
            ops.barrier(self.sync.options.process_set)
        self.settled()

    # --- in checkpoints, and what the synchroniser says --------------------------------------------------------------

    def homes_are_loaded(self) -> None:
        self._weights.forget()

    def planned(self) -> None:
        if self._algorithm.at_shards:
            self._give_parameters("seed")  # the others have the same, as scripts see to

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        return self._said  # residuals of parameters, or of their changes, are not rescaled when the rate changes

    def plan_given_up(self, anew: bool) -> None:
        self._flights = []
        self._weights.forget()

    def _give_parameters(self, kind: wire.PostKind) -> None:
        """Gives the homes this rank's parameters, if it is the first."""
        if self.sync.plan.is_first():
            for slot in self.sync.slots:
                assert slot.view is not None
                slot.view.copy_(slot.first_value() if kind == "seed" else slot.parameter.detach())
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
                bucket.abandon()
            bucket.rewind()


class AtHomes(AtStep):
    """Posts gradients to homes, which take the steps, and takes the parameters that come back. The script's optimizer
    only says how: its class, its arguments, and its learning rates, which go along with each gradient."""

    def __init__(self, sync: Synchroniser, passes: int) -> None:
        super().__init__(sync, passes)
        self._arguments: list[dict[str, Any]] = []  # of the optimizer's groups, as homes have them

    def step(self, optimizer: Any, closure: Closure | None) -> Any:
        """Posts the gradients as the script has left them, and waits for the parameters. A rank of which a gradient is
        not finite contributes nothing, and takes the parameters; that is warned of, unless a `GradScaler` knows it.
        Raises `ValueError` if the script has set a parameter, or an argument that the homes have, since the last step.
        """
        sync, loss = self.sync, None
        sync.steps.begin()
        self._follow()
        self._check_weights()
        self._check_arguments()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        overflowed = optimizer._overflowed()
        if not overflowed and (name := not_finite(sync.slots)):
            overflowed = True
            warnings.warn(
                f"the gradient of {name!r} is not finite on this rank, which therefore contributes nothing to this "
                f"step of {self._algorithm}",
                stacklevel=3,
            )
        exchanges.run([self], partial(self._exchange_now, not overflowed))
        self.note_weights()
        optimizer._note_step()
        sync.steps.end()
        return loss

    def _check_arguments(self) -> None:
        """Raises `ValueError` if the script has changed what the homes know since there has been a plan."""
        optimizer = self.sync.trained.optimizer()
        if self.sync.is_of(runtime()) and arguments_of(optimizer)[: len(self._arguments)] != self._arguments:
            raise ValueError(
                f"an argument of the optimizer other than its learning rate has changed, and with {self._algorithm} "
                "the shards have what it was when the buckets were planned; leave it (as with cycle_momentum=False of "
                "schedulers), or take an algorithm whose ranks take their own steps"
            )

    def _contribution(self, values: bool, piece: int) -> wire.Ready:
        said = super()._contribution(values, piece)
        said.rates = tuple(self.sync.trained.group_rates())
        return said

    def drain(self) -> None:
        self._check_weights()  # nothing is under way after a step

    def reduction(self) -> wire.Reduction:
        optimizer = self.sync.trained.optimizer()
        self._arguments = arguments_of(optimizer)
        return msgspec.structs.replace(self.sync.options.reduction, optimizer=optimizer_spec(optimizer))

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        if self._said.kind == "post":
            self._said.rescale = self.sync.checkpoint.rescale(slots)
        return self._said


class LocalSteps(AtStep):
    """Takes local steps, and exchanges parameters every so many times, or by how much they have moved."""

    local = True

    def __init__(self, sync: Synchroniser, passes: int) -> None:
        super().__init__(sync, passes)
        self._taken = 0  # steps that the script has called for, also those that a `GradScaler` skips
        self._seen = 0  # samples in these steps
        self._sent: dict[int, tuple[int, int]] = {}  # of each fragment: both numbers, as of its last post
        self._agreed = False  # the last step ended with an exchange after which all ranks are alike
        self._own = OwnModel.of(self._algorithm)

    def step(self, optimizer: Any, closure: Closure | None) -> Any:
        """Takes the script's optimizer's step, unless a `GradScaler` found that this rank's gradients are not finite,
        and exchanges parameters, if it is time to. Raises `ValueError` if the script has set what cannot be taken over.
        """
        sync, algorithm = self.sync, self._algorithm
        sync.steps.begin()
        self._follow()
        if self._agreed and sync.options.applied.outer and sync.is_of(runtime()) and self._weights.changed():
            self._anchor(anew=True)  # set where all ranks have the same, and so alike on all of them
        else:
            self._check_weights()
        self._anchor()
        if not algorithm.waits_for_answers and not sync.plan.made:
            self._plan()  # now, when all ranks begin, since it takes all of them
        overflowed = optimizer._overflowed()
        loss = None if overflowed else optimizer._step(closure)
        self._taken += 1
        self._seen += 0 if overflowed else self.samples
        self._take_answers()
        due = algorithm.due(self._taken)
        self._own.steps, self._own.shared = self._taken, self._own.shared or bool(due)
        self._agreed = bool(due) and algorithm.agrees
        if due and not algorithm.overlaps:
            exchanges.run([self], partial(self._exchange_now, True, due))
            sync.note_step(all_here=False, steps=algorithm.period)
        else:
            for piece in due:
                self._post(values=True, piece=piece)
        self.note_weights()
        sync.steps.end()
        return loss

    def _plan(self) -> None:
        """Makes the plan. An operation on all ranks."""
        self.sync.begin()
        self.sync.idle = True
        self.sync.make_plan()

    def _take_answers(self) -> None:
        """Takes the answers that are due; of an algorithm that waits for none, those that are there."""
        for flight in list(self._flights):
            if self._taken < flight.due:
                continue
            if self._algorithm.waits_for_answers or all(bucket.has_answer() for bucket in flight.buckets):
                self._land(flight)

    def _anchor(self, anew: bool = False) -> None:
        self.sync.options.posted.anchor(self.sync.slots, anew)

    def note_left_out(self) -> None:
        """After a loss: the steps of this rank were its own, and stay."""
        self._agreed = False

    def _contribution(self, values: bool, piece: int) -> wire.Ready:
        """Returns terms that weigh what was done since this fragment's last post, by its samples, and by its samples a
        step."""
        taken, seen = self._sent.get(piece, (0, 0))
        self._sent[piece] = self._taken, self._seen
        samples = self._seen - seen
        weight = samples * samples // max(self._taken - taken, 1)
        return terms(samples=min(max(weight, 1), _MAX_WEIGHT))

    def _flight(self, buckets: Sequence[Bucket], piece: int) -> Outstanding:
        contributors = None
        if self._leaves_out_joined:
            name, whose = f"{self.sync.name}.contributors", self.sync.options.process_set
            name += f".{piece}" if piece else ""
            contributors = ops.allreduce_async(torch.ones(1), name=name, op=ops.Sum, process_set=whose)
        return Outstanding(buckets, self._taken + self._algorithm.lag, contributors)

    @property
    def _leaves_out_joined(self) -> bool:
        """True if a mean is taken over all ranks, of which some may have joined and post zeros."""
        return not self._algorithm.at_homes

    def _share_of_mean(self, flight: Outstanding) -> float:
        """Returns the factor that turns a mean over all ranks into one over those that have not joined."""
        if flight.contributors is None:
            return 1.0
        return (self.sync.options.process_set.size() or 1) / float(ops.synchronize(flight.contributors))

    def drain(self) -> None:
        if self._flights:
            self._check_weights()
            self._collect()
            self.note_weights()

    def agree(self) -> None:
        """Takes the homes' copy. What this rank has moved by since its last exchange still counts in the next one, if
        it gets its own parameters back."""
        starts = [(slot, slot.start.clone(), slot.moved) for slot in self.sync.slots if slot.start is not None]
        super().agree()
        if self._algorithm.at_shards:
            for slot, before, moved in starts:
                assert slot.start is not None
                slot.moved = slot.start - before if moved is None else slot.start - before + moved
                slot.parameter.detach().copy_(slot.start)

    def settled(self) -> None:
        self._anchor(anew=True)
        self._own.shared = True
        super().settled()

    def alike(self) -> Mapping[str, torch.Tensor]:
        """Returns the parameters after an exchange that makes them alike; or what outer steps have come to, which every
        rank's next one begins with."""
        if self._agreed:
            return super().alike()
        slots = self.sync.slots if self.sync.options.applied.outer and not self._algorithm.agrees else ()
        return {slot.name: slot.start for slot in slots if slot.start is not None}

    def own_state(self) -> dict[str, Any] | None:
        """Returns the number of steps, and the outer optimizer, if there is one: of each parameter where it was after
        the last exchange, and its outer momentum, if it has one."""
        self.drain()
        own: dict[str, Any] = {"taken": self._taken, "seen": self._seen, "sent": dict(self._sent)}
        if self.sync.options.applied.outer:
            outer = {slot.name: _outer_state(slot) for slot in self.sync.slots if slot.start is not None}
            own |= {"outer": outer} if outer else {}
        return own

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        self._taken, self._agreed = int(own["taken"]), False
        self._seen, self._sent = int(own.get("seen", 0)), dict(own.get("sent", {}))
        self._weights.forget()
        for slot in self.sync.slots:
            if slot.name in own.get("outer", {}):
                start, *velocity = own["outer"][slot.name]
                slot.start, slot.moved = start.to(slot.parameter, copy=True), None
                slot.velocity = velocity[0].to(slot.parameter, copy=True) if velocity else None

    def rejoin(self, own: Mapping[str, Any]) -> None:
        if not self._algorithm.synchronous:  # each rank has an outer state of its own
            own = {"taken": own["taken"]}
        super().rejoin(own)


class AdasumAtStep(LocalSteps):
    """Combines steps that ranks have taken by themselves, with `op=Adasum`: what all of them have moved is combined.

    Horovod does so parameter by parameter within the backward pass, and has the parameters half-changed while it runs;
    here they change in `step`, all at once, which also suits an optimizer that looks at several of them. All ranks have
    to take every step: it is not to be used with a `GradScaler`, which skips it where gradients overflow, and here that
    is decided by each rank's own.
    """

    own_gradients = local = False

    def __init__(self, sync: Synchroniser, passes: int) -> None:
        super().__init__(sync, passes)
        self.survives = False  # the steps of this rank are not taken back

    def arrived(self, slot: Slot, parameter: torch.Tensor) -> None:
        super().arrived(slot, parameter)
        if self.backward is None or self.backward() is None:
            if self.passes_left <= 0:
                raise AssertionError(TOO_MANY)
            backward.running().add(self)
        if slot.bucket is None:
            self.sync.arrivals.append(slot)

    def set_passes(self, passes: int) -> None:
        self.passes = self.passes_left = passes

    def skip_synchronize(self) -> NoReturn:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def zeroed(self) -> None:
        self.ended()

    def ended(self) -> None:
        self.passes_left = self.passes
        self.backward = None

    def own_state(self) -> None:
        return None

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        return When.terms(self, slots)

    @property
    def _leaves_out_joined(self) -> bool:
        return False

    def _anchor(self, anew: bool = False) -> None:
        super()._anchor(anew=True)


def _outer_state(slot: Slot) -> tuple[torch.Tensor, ...]:
    assert slot.start is not None
    start = slot.start.clone() if slot.moved is None else slot.start - slot.moved
    return (start, *(() if slot.velocity is None else (slot.velocity.clone(),)))
