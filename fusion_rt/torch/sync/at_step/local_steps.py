"""The strategies of local steps, after which ranks exchange parameters, or by how much they have moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from fusion_rt import wire
from fusion_rt.algorithms import Signal
from fusion_rt.client import terms
from fusion_rt.torch.core.own_models import OwnModel
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.ops.handles import synchronize
from fusion_rt.torch.ops.reduce import allreduce_async
from fusion_rt.torch.ops.signatures import Sum
from fusion_rt.torch.sync import backward
from fusion_rt.torch.sync.at_step.at_step import AtStep, Outstanding
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.synchroniser import Synchroniser
from fusion_rt.torch.sync.when import TOO_MANY, Closure, When

_MAX_WEIGHT = (1 << 48) - 1  # that a message holds: of 16 million samples at once


class LocalSteps(AtStep):
    """Takes local steps, and exchanges parameters every so many times, or by how much they have moved."""

    local = True

    def __init__(self, sync: Synchroniser, passes: int) -> None:
        super().__init__(sync, passes)
        self._taken = 0  # steps that the script has called for, also those that a `GradScaler` skips
        self._seen = 0  # samples in these steps
        self._sent: dict[str, tuple[int, int]] = {}  # of each parameter: both numbers, as of its last post
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
        overflowed = optimizer._overflowed()
        loss = None if overflowed else optimizer._step(closure)
        self._taken += 1
        self._seen += 0 if overflowed else self.samples
        due = algorithm.due(self._taken)
        self.behind = self.behind and not due  # as soon as it takes part again
        self._own.steps, self._own.shared = self._taken, self._own.shared or bool(due)
        self._agreed = bool(due) and algorithm.agrees
        if due and not algorithm.overlaps:
            exchanges.run([self], partial(self._exchange_now, True, due))
            if sync.replanning is not None:
                sync.note_step(all_here=False, steps=algorithm.period)
        elif self.survives:  # in each step, since all ranks have to count alike
            exchanges.run([self], partial(self._go_on, due))
        else:
            self._go_on(due)
        self.note_weights()
        sync.steps.end()
        return loss

    def _go_on(self, due: Sequence[int]) -> None:
        """Takes the answers that are due, and posts these fragments, whose answers are not waited for."""
        if not self._algorithm.waits_for_answers and not self.sync.plan.made:
            self._plan()  # now, when all ranks begin, since it takes all of them
        self._take_answers()
        for piece in due:
            self._post(values=True, piece=piece)

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
        """After a loss: the steps of this rank were its own, and stay; a home may have what it has posted of them."""
        self._agreed = False
        self.sync.options.posted.leave_out(self.sync.slots)

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        """Returns terms that weigh what was done since these slots' last post, by its samples, and by its samples a
        step."""
        if self._said.kind != "post":
            return self._said
        taken, seen = self._sent.get(slots[0].name, (0, 0))
        samples = self._seen - seen
        weight = samples * samples // max(self._taken - taken, 1)
        return terms(samples=min(max(weight, 1), _MAX_WEIGHT))

    def _flight(self, buckets: Sequence[Bucket], piece: int) -> Outstanding:
        self._note_sent(slot for bucket in buckets for slot in bucket.slots)
        contributors = None
        if self._leaves_out_joined:
            name, whose = f"{self.sync.name}.contributors", self.sync.options.process_set
            name += f".{piece}" if piece else ""
            contributors = allreduce_async(torch.ones(1), name=name, op=Sum, process_set=whose)
        return Outstanding(buckets, self._taken + self._algorithm.lag, contributors)

    def _note_sent(self, slots: Iterable[Slot]) -> None:
        """Notes that what was done before does not count in the weight of these slots' next post."""
        if self._algorithm.at_shards:  # which weigh contributions
            self._sent |= {slot.name: (self._taken, self._seen) for slot in slots}

    @property
    def _leaves_out_joined(self) -> bool:
        """True if a mean is taken over all ranks, of which some may have joined and post zeros."""
        return not self._algorithm.at_homes

    def _share_of_mean(self, flight: Outstanding) -> float:
        """Returns the factor that turns a mean over all ranks into one over those that have not joined."""
        if flight.contributors is None:
            return 1.0
        return (self.sync.options.process_set.size() or 1) / float(synchronize(flight.contributors))

    def drain(self) -> None:
        if self._flights:
            self._forget_left()
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

    def _begin_anew(self) -> None:
        for slot in self.sync.slots:
            slot.velocity = None
        self._anchor(anew=True)
        self._note_sent(self.sync.slots)

    def settled(self) -> None:
        self._anchor(anew=True)
        self._own.shared = True
        if self._has_replicas and self.sync.is_of(runtime()):
            self._reseed_homes()
        super().settled()

    @property
    def _has_replicas(self) -> bool:
        return self._algorithm.at_homes and not self._algorithm.at_shards

    def weights(self) -> list[float]:
        """Takes what this rank's homes have for it, and returns how much each parameter counts in a mean of all ranks;
        nothing where all count alike. To be called on all ranks, when nobody posts."""
        mixes = self._has_replicas and self._algorithm.signal is Signal.PARAMETER
        if not (mixes and self.sync.is_of(runtime())):
            return []
        self._exchange(terms(kind="ask"), take=True)
        return [1.0 if slot.bucket is None else slot.bucket.weight for slot in self.sync.slots]

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
                slot.start, slot.moved, slot.posted = start.to(slot.parameter, copy=True), None, None
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

    def arrived(self, slot: Slot) -> None:
        super().arrived(slot)
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
