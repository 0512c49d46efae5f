"""The families of means and of gossip: ranks take local steps, and then exchange parameters.

All of them send x, a rank's parameters, and the answer is x, or a change of x. All-reduces and homes compute it, by the
equations in fusion_rt/algorithms::

    x_i = mean of x_j              local SGD (arXiv 1805.09767)
    x_i = x_i - alpha (x_i - x)    elastic averaging (arXiv 1412.6651); x is the home's
    x_i = sum of W_ij x_j          D-PSGD (arXiv 1705.09056), AD-PSGD, SGP, CHOCO-SGD: gossip
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fusion_rt import wire
from fusion_rt.algorithms import Signal
from fusion_rt.client import terms
from fusion_rt.torch.core.own_models import OwnModel
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.ops.handles import synchronize
from fusion_rt.torch.ops.reduce import allreduce_async
from fusion_rt.torch.ops.signatures import Sum
from fusion_rt.torch.sync.at_step.at_step import AtStep, UnansweredPost
from fusion_rt.torch.sync.buckets import Bucket
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.step_schedule import Closure
from fusion_rt.torch.sync.update_rule import ToParameters

_MAX_WEIGHT = (1 << 48) - 1  # that a message holds: of 16 million samples at once


class OfParameters(ToParameters):
    """Sends x, and takes the answer as x, or adds it to x."""

    def value(self, slot: Slot) -> torch.Tensor | None:
        return slot.parameter.detach()


class LocalSteps(AtStep):
    """Takes local steps, and exchanges by the optimizer's rule every so many times."""

    local = True

    def __init__(self, options: Options, trained: Trained, passes: int) -> None:
        super().__init__(options, trained, passes)
        self._taken = 0  # steps that the script has called for, also those that a `GradScaler` skips
        self._seen = 0  # samples in these steps
        self._sent: dict[str, tuple[int, int]] = {}  # of each parameter: both numbers, as of its last post
        self._agreed = False  # the last step ended with an exchange after which all ranks are alike
        self._own = OwnModel.of(self._algorithm)

    def step(self, optimizer: Any, closure: Closure | None) -> Any:
        """Takes the script's optimizer's step, unless a `GradScaler` found that this rank's gradients are not finite,
        and exchanges parameters, if it is time to. Raises `ValueError` if the script has set a parameter.
        """
        sync, algorithm = self.sync, self._algorithm
        sync.steps.begin()
        self._follow()
        self._begin_local_step()
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

    def _begin_local_step(self) -> None:
        """Looks at the parameters before the step that changes them. Raises `ValueError` if the script has set one."""
        self._check_weights()

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
        for posted in list(self._unanswered):
            if self._taken < posted.due:
                continue
            if self._algorithm.waits_for_answers or all(bucket.has_answer() for bucket in posted.buckets):
                self._land(posted)

    def note_left_out(self) -> None:
        """After a loss: the steps of this rank were its own, and stay; a home may have had a post of them."""
        self._agreed = False

    def terms(self, slots: Sequence[Slot]) -> wire.Ready:
        """Returns terms that weigh the steps since these slots' last post, by their samples, and by their samples a
        step."""
        if self._said.kind != "post":
            return self._said
        taken, seen = self._sent.get(slots[0].name, (0, 0))
        samples = self._seen - seen
        weight = samples * samples // max(self._taken - taken, 1)
        return terms(samples=min(max(weight, 1), _MAX_WEIGHT))

    def _note_posted(self, buckets: Sequence[Bucket], piece: int) -> UnansweredPost:
        self._note_sent(slot for bucket in buckets for slot in bucket.slots)
        contributors = None
        if self._leaves_out_joined:
            name, whose = f"{self.sync.name}.contributors", self.sync.options.process_set
            name += f".{piece}" if piece else ""
            contributors = allreduce_async(torch.ones(1), name=name, op=Sum, process_set=whose)
        return UnansweredPost(buckets, self._taken + self._algorithm.lag, contributors)

    def _note_sent(self, slots: Iterable[Slot]) -> None:
        """Notes that steps up to now do not count in the weight of these slots' next post."""
        if self._algorithm.at_shards:  # which weigh contributions
            self._sent |= {slot.name: (self._taken, self._seen) for slot in slots}

    @property
    def _leaves_out_joined(self) -> bool:
        """True if a mean is taken over all ranks, of which some may have joined and post zeros."""
        return not self._algorithm.at_homes

    def _share_of_mean(self, posted: UnansweredPost) -> float:
        """Returns the factor that turns a mean over all ranks into one over those that have not joined."""
        if posted.contributors is None:
            return 1.0
        return (self.sync.options.process_set.size() or 1) / float(synchronize(posted.contributors))

    def drain(self) -> None:
        if self._unanswered:
            self._forget_left()
        if self._unanswered:
            self._check_weights()
            self._collect()
            self.note_weights()

    def _begin_anew(self) -> None:
        self._note_sent(self.sync.slots)

    def settled(self) -> None:
        self._own.shared = True
        if self._has_replicas and self.sync.is_of(runtime()):
            self._reseed_homes()
        super().settled()

    @property
    def _has_replicas(self) -> bool:
        return self._algorithm.at_homes and not self._algorithm.at_shards

    def weights(self) -> list[float]:
        """Takes the parameters that this rank's homes have, and returns how much each counts in a mean of all ranks;
        nothing where all count alike. To be called on all ranks, when no rank posts."""
        mixes = self._has_replicas and self._algorithm.signal is Signal.PARAMETER
        if not (mixes and self.sync.is_of(runtime())):
            return []
        self._exchange(terms(kind="ask"), take=True)
        return [1.0 if slot.bucket is None else slot.bucket.weight for slot in self.sync.slots]

    def alike(self) -> Mapping[str, torch.Tensor]:
        """Returns the parameters after an exchange that makes them alike."""
        return super().alike() if self._agreed else {}

    def own_state(self) -> dict[str, Any] | None:
        """Returns the numbers of steps and samples, in all and at the last post of each parameter."""
        self.drain()
        return {"taken": self._taken, "seen": self._seen, "sent": dict(self._sent)}

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        self._taken, self._agreed = int(own["taken"]), False
        self._seen, self._sent = int(own.get("seen", 0)), dict(own.get("sent", {}))
        self._weights.forget()

    def rejoin(self, own: Mapping[str, Any]) -> None:
        """Goes on after a join of all ranks, with the `own_state` of the one that joined last."""
        if not self._algorithm.synchronous:  # each rank has an outer state of its own
            own = {"taken": own["taken"]}
        self.load_own_state(own)
