"""The one keeper of state on a node: it exports and imports the state of a group of tensors, whoever asks for it.

That state is the residuals of codecs, and all that homes, their mirrors, and contributions to homes have. One form
(`fusion_rt.local.saved_state`) serves every way that it goes:

| to, or from | when | functions |
| --- | --- | --- |
| a worker, for a checkpoint or a commit (`CodecService`) | between two steps | `save`, `load` |
| files of all nodes (`Snapshots`) | every so often; when a job begins | `ParameterService.save`, `load` |
| the next plan of the group | when it is made | `opening`, `install` |
| the next formation | when this one ends: a rank is lost, or comes | `remember`, then `install` or `recall` |
| the mirror of a shard on another node (`shards.mirrors`) | at each update | `Home.saved`, `Home.load` |

So a residual of an all-reduce stays on its node when a rank is lost. `remember` takes it, as it was before the step
that is dropped, and the group's next plan goes on from it, tensor by tensor. If there is no other node any more, it
waits until there is. If the ranks return to a commit, the state that their workers `load` takes its place. `recall`
returns a residual of contributions to shards, with the shards, as of the clock on which the workers have agreed, and
these `load` it into the next plan. A residual on a lost node is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.local.saved_state import State, by_owner
from fusiond.buckets import codec_state
from fusiond.buckets.codec_state import Remembered
from fusiond.buckets.plans import Group, Plans, PlanState
from fusiond.collectives.base import Array, Job
from fusiond.core.participants import Members
from fusiond.operations.operation import NodeOperations
from fusiond.shards import EndedShards, ParameterService, Then

Get: TypeAlias = Callable[[], State]
"""Returns a state; to be called by a thread."""


@dataclass(frozen=True)
class LeftPlan:
    """The state that a plan has left when its formation ended.

    Attributes:
        epoch, plan: its membership epoch, and its id.
        codecs: of its buckets, if they remember anything.
        shards: those that outlive their formation, if it had any.
    """

    epoch: int
    plan: int
    codecs: Remembered | None
    shards: EndedShards | None


Left: TypeAlias = dict[Group, LeftPlan]
"""State that goes from one formation to the next."""


@dataclass(frozen=True)
class OpenedPlan:
    """The buckets of a plan that is not active yet.

    Attributes:
        state: the plan, with all that its codecs take over.
        loads: how many states had been loaded for its group when it was opened.
        why: why a state that had been loaded is not used; empty if there is nothing to say.
    """

    state: PlanState
    loads: int
    why: str


@dataclass(frozen=True)
class WaitingState:
    """A state that was loaded before there was a plan: of codecs, and of homes and contributions to homes."""

    of_codecs: State
    of_homes: State


_NOTHING = WaitingState({}, {})


class Keeper:
    """The keeper of one engine.

    Args:
        operations: the engine's.
        plans, homes: those whose state it is.
        epoch: the membership epoch.
        left: by the formation before, and then by this one; None if there is only one.
    """

    def __init__(
        self, operations: NodeOperations, plans: Plans, homes: ParameterService, epoch: int, left: Left | None
    ) -> None:
        self.plans, self.homes = plans, homes
        self._operations = operations
        self._epoch = epoch
        self._left = left
        self._waiting: dict[Group, WaitingState] = {}
        self._loads: Counter[Group] = Counter()  # states loaded
        self._opened: dict[int, OpenedPlan] = {}

    # --- asked for, and given back ------------------------------------------------------------------------------------

    def save(self, group: Group, common: bool, then: Callable[[BaseException | None, Get], None]) -> None:
        """Exports the state of a group: of its plan, or what is kept for it until there is one.

        Args:
            common: only the part that is the same on all nodes.
            then: called in the event loop, when no thread is at work for the plan, with the exception if that fails.
        """
        plan, of_homes = self.plans.of_group(group), State()
        id = 0 if plan is None else plan.plan.id
        if plan is None and not common:
            of_homes.update(self._waiting.get(group, _NOTHING).of_homes)

        def saved(error: BaseException | None) -> None:
            then(error, lambda: self.state_of_codecs(group, common) | of_homes)

        if common:
            self.homes.when_quiet(id, partial(saved, None))
        else:
            self.homes.save(id, of_homes, saved)

    def state_of_codecs(self, group: Group, common: bool = False) -> State:
        """Returns copies of the state of the codecs of a group's plan, or the state that waits for it. To be called by
        a thread."""
        plan = self.plans.of_group(group)
        if plan is not None:
            return codec_state.saved(plan.codecs, common)
        waiting = self._waiting.get(group, _NOTHING).of_codecs
        return codec_state.only_common(waiting) if common else dict(waiting)

    def load(self, group: Group, state: Mapping[str, Array], common: bool, then: Then) -> None:
        """Imports a state into the active plan of a group, or keeps it for the next one. It takes the place of what the
        formation before has left of codecs. An empty state has all codecs begin anew.

        Args:
            state: stays as it is until `then` is called.
            common: state of another node is left out; does nothing where as many steps have been taken.
            then: called in the event loop, with a `FusionError` if the state is of other tensors or buckets, or
                damaged, or something is under way. If it has homes, it is not called once the job cannot go on.
        """
        try:
            of_codecs, of_homes = _parts(state)
        except FusionError as error:
            then(error)
            return
        copies = State()

        def take() -> None:
            self._load_codecs(group, of_codecs, common)
            copies.update({} if common else {key: value.copy() for key, value in of_homes.items()})

        def taken(error: BaseException | None) -> None:
            plan = self.plans.of_group(group)
            if error is None and copies:
                if self._operations.failure:
                    return
                if plan is not None:
                    self.homes.restore(plan, copies, then)
                    return
                self._waiting[group] = WaitingState(self._waiting.get(group, _NOTHING).of_codecs, copies)
            elif error is None and not state and not common:
                error = self._forgotten(plan)
            then(error)

        self._operations.work.do(0, [take], sum(value.nbytes for value in state.values()), taken)

    def _load_codecs(self, group: Group, state: State, common: bool) -> None:
        if common:
            if codec_state.steps_of(state) == codec_state.steps_of(self.state_of_codecs(group, common)):
                return
            state = codec_state.only_common(state)
        elif self._left is not None and group in self._left and self._left[group].codecs is not None:
            del self._left[group]
        plan = self.plans.of_group(group)
        self._loads[group] += 1
        if plan is not None:
            codec_state.restore(plan.codecs, state, strict=True)
        else:
            copies = {key: value.copy() for key, value in state.items()}
            self._waiting[group] = WaitingState(copies, self._waiting.get(group, _NOTHING).of_homes)

    def _forgotten(self, plan: PlanState | None) -> FusionError | None:
        """Has the codecs of contributions to homes begin anew; returns why that is not possible."""
        try:
            if plan is not None:
                self.homes.forget_unsent(plan.plan.id)
        except FusionError as error:
            return error
        return None

    # --- from plan to plan --------------------------------------------------------------------------------------------

    def opening(self, plan: wire.Plan) -> Job | None:
        """Returns a job that opens the codecs of a plan before it is installed, and has them take over what those of
        the plan before remember; None if that takes no time, or has been done.

        It writes all of the codecs' memory, so it takes seconds with a billion parameters. It may run beside the event
        loop, because no step of a group is under way when the group's next plan has been made.
        """
        members = self._members(plan)
        is_done = plan.id in self.plans or plan.id in self._opened
        return None if is_done or not self.plans.has_memory(plan, members) else self._opener(plan, members)

    def install(self, plan: wire.Plan) -> bool:
        """A plan becomes active; it replaces the one that its group had, and goes on from what was loaded for it, or
        else from what that one, or the one of the formation before, has left. Does nothing when it is active already.

        Returns: whether it has homes that begin here.
        """
        if plan.id in self.plans:
            return False
        group, members = (plan.process_set, plan.group), self._members(plan)
        opened = self._opened.pop(plan.id, None)
        if opened is None or opened.loads != self._loads[group]:  # a state has been loaded meanwhile
            self._opener(plan, members)()
            opened = self._opened.pop(plan.id)
        if opened.why:
            self._operations.context.outside.warn(opened.why)
        waiting, state = self._waiting.pop(group, _NOTHING), opened.state
        self.plans.put(state)
        if self._left is not None and (state.at_homes or len(members.nodes) > 1):
            left = self._left.pop(group, None)
            if left is not None and left.codecs is not None:
                left.codecs.release()
        return state.at_homes and self.homes.install(state, waiting.of_homes)

    def _opener(self, plan: wire.Plan, members: Members) -> Job:
        """Returns a job that opens a plan. All that it reads is looked up now: it may run on a thread."""
        group = plan.process_set, plan.group
        old, loads = self.plans.of_group(group), self._loads[group]
        before: Remembered | None = None
        if old is not None:
            before = Remembered(old.codecs)
        elif self._left is not None and group in self._left and len(members.nodes) > 1:  # else it waits for others
            before = self._left[group].codecs
        waiting = self._waiting.get(group)

        def open_plan() -> None:
            state, why = self.plans.open(plan, members, old), ""
            if waiting is not None:
                try:
                    codec_state.restore(state.codecs, waiting.of_codecs, strict=True)
                except FusionError as error:
                    why = f"a state was loaded for {plan.group!r}, and it starts without: {error}"
            if before is not None and (waiting is None or why):
                codec_state.restore(state.codecs, before.state(bounds=old is not None))
            self._opened[plan.id] = OpenedPlan(state, loads, why)

        return open_plan

    def _members(self, plan: wire.Plan) -> Members:
        return self._operations.context.participants.members(plan.process_set)

    def remove_set(self, process_set: int) -> None:
        """Drops the plans of a process set that has been removed, and what was kept for them."""
        self.plans.remove_set(process_set)
        self.homes.remove_set(process_set)
        self._waiting = {group: state for group, state in self._waiting.items() if group[0] != process_set}

    # --- from formation to formation ----------------------------------------------------------------------------------

    def remember(self) -> None:
        """Leaves to the next formation what codecs remember, and the shards that outlive this one. To be called once
        the job has failed, and no thread is at work.

        Of a step that is complete in some buckets of a plan and not in all, and so is dropped, codecs remember nothing.
        The ranges of nodes are left behind.
        """
        if self._left is None:
            return
        clocks = self._operations.clocks()
        for state in self.plans:
            stateful = any(codec.codec.stateful for codec in state.codecs)
            codecs = _remembered(state, clocks.get(state.plan.id, {})) if stateful else None
            shards = self.homes.ended.get(state.plan.id)
            if codecs is not None or shards is not None:
                self._left[state.group] = LeftPlan(self._epoch, state.plan.id, codecs, shards)

    def recall(self, group: Group, ended: wire.EndedPlan) -> State:
        """Returns the state of shards, mirrors and contributions to shards that the formation before has left, as of a
        clock; empty if it had another plan. To be called by a thread."""
        left = (self._left or {}).get(group)
        if left is None or left.shards is None or (left.epoch, left.plan) != (ended.epoch, ended.plan):
            return {}
        return left.shards.saved_at(ended.clock)


def _parts(state: Mapping[str, Array]) -> tuple[State, State]:
    """Returns the entries of codecs of an all-reduce, and those of homes and contributions to homes. Raises `WireError`
    if there are others."""
    of_codecs, of_homes = State(), State()
    for owner, entries in by_owner(state).items():
        if owner.kind == "mirror":
            raise WireError(f"the state of a mirror, of bucket {owner.bucket}, is given back as that of its home")
        (of_codecs if owner.kind == "codec" else of_homes).update(owner.keyed(entries))
    return of_codecs, of_homes


def _remembered(state: PlanState, done: Mapping[str, int]) -> Remembered:
    """Returns the memory of the codecs of a plan that is over. `done`: the clocks of buckets that were completed last,
    by name."""
    last = max(done.values(), default=0)
    begun = [bucket.codec for bucket in state.buckets if done.get(bucket.name) == last]
    return Remembered(state.codecs, begun if len(begun) < len(state.buckets) else [])
