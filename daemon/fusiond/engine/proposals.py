"""Plans before they are active: the local workers' proposals, and their outcome. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from fusion_rt import codecs, wire
from fusion_rt.algorithms import parse
from fusion_rt.core import plugins
from fusion_rt.core.errors import FusionError
from fusion_rt.wire import OpKey
from fusiond import algorithms
from fusiond.buckets.recipes import check_proposal
from fusiond.control import planning
from fusiond.control.coordination import Coordination
from fusiond.control.negotiation import PlanKey, subject_of
from fusiond.core.tracing import record_plan
from fusiond.engine.codec_service import CodecService
from fusiond.engine.keeper import Keeper
from fusiond.engine.snapshots import Snapshots
from fusiond.operations.operation import NodeOperations
from fusiond.operations.thread_work import INLINE_WORK

_REMEMBERED = 64  # proposals that were refused, so that a new coordinator can tell nodes that have not heard of it


class Proposals:
    """The proposals of plans by local workers, and the plans made of them.

    Args:
        operations, coordination, codec_service, keeper, snapshots: the engine's.

    Attributes:
        waiting: the workers' handles of proposals without an answer, by rank.
    """

    def __init__(
        self,
        operations: NodeOperations,
        coordination: Coordination,
        codec_service: CodecService,
        keeper: Keeper,
        snapshots: Snapshots,
    ) -> None:
        self.waiting: dict[PlanKey, dict[int, int]] = {}
        self._since: dict[PlanKey, float] = {}
        self._operations = operations
        self._context = operations.context
        self._coordination = coordination
        self._codecs = codec_service
        self._keeper = keeper
        self._snapshots = snapshots
        self._proposed: dict[PlanKey, dict[int, wire.Proposal]] = {}  # those of `waiting`
        self._untold: dict[PlanKey, dict[int, int]] = {}  # handles for plans that wait for the state of their homes
        self._made: dict[tuple[int, str], wire.MadePlan] = {}  # by process set and group
        self._refused: OrderedDict[PlanKey, wire.PlanVerdict] = OrderedDict()
        self._last = 0  # id of a plan

    def propose(self, rank: int, handle: int, proposal: wire.Proposal) -> None:
        """A worker asks for a plan."""
        if self._operations.failure:
            self._operations.refuse(rank, handle, self._operations.failure)
            return
        try:
            self._check_packages(proposal.reduction)
            codec = codecs.parse(proposal.reduction.codec)
            members = self._context.participants.members(proposal.process_set)
            check_proposal(proposal, len(members.set.ranks))
            algorithms.make(proposal.reduction.algorithm, len(members.set.ranks))
        except FusionError as error:
            self._operations.refuse(rank, handle, f"rank {rank} cannot plan {proposal.group!r}: {error}")
            return
        if rank not in members.local:
            self._operations.refuse(rank, handle, f"rank {rank} is not in process set {proposal.process_set}")
            return
        if len(members.nodes) > 1 or parse(proposal.reduction.algorithm).encodes:
            dtypes = {tensor.dtype for tensor in proposal.tensors}
            if not self._codecs.kernels_of(codec, dtypes, partial(self.propose, rank, handle, proposal)):
                return
        key = (proposal.process_set, proposal.group, proposal.clock)
        self._since.setdefault(key, self._context.outside.clock())
        self.waiting.setdefault(key, {})[rank] = handle
        proposed = self._proposed.setdefault(key, {})
        like = _like(rank, proposal, proposed)
        proposed[rank] = proposal
        self._coordination.ask(
            wire.PlanRequest(rank, proposal) if like is None else wire.PlanRequestAlike(rank, *key, like)
        )

    def waits(self) -> Iterator[tuple[OpKey, float, Collection[int]]]:
        """The plans that are not there yet: key, when it was first proposed here (s), and by which ranks."""
        for plan_key, ranks in self.waiting.items():
            yield subject_of(plan_key), self._since[plan_key], ranks

    def verdict(self, verdict: wire.PlanVerdict) -> None:
        """The coordinator has made a plan, or says why there is none."""
        key = (verdict.process_set, verdict.group, verdict.clock)
        if verdict.process_set not in self._context.participants:  # it has been removed since
            return
        if verdict.plan is not None:
            try:
                self._check_packages(verdict.plan.reduction)  # this node may have homes, and no rank that has proposed
            except FusionError as error:
                self._context.outside.job_failed(f"no plan for {verdict.group!r}: {error}")
                return
            again = partial(self.verdict, verdict)
            if not (self._has_kernels(verdict.plan, again) and self._is_open(verdict.plan, again)):
                return
        waiting = self.waiting.pop(key, {})
        self._since.pop(key, None)
        proposed = self._proposed.pop(key, {})
        plan = verdict.plan
        if plan is None:
            self._refused[key] = verdict
            if len(self._refused) > _REMEMBERED:
                self._refused.popitem(last=False)
            for rank, handle in waiting.items():
                self._operations.refuse(rank, handle, verdict.error)
            return
        self._last = max(self._last, plan.id)
        before = self._made.get(key[:2])
        if before is not None and before.plan.id == plan.id:
            proposed = {**before.proposals, **proposed}
        lowest = sorted(proposed)[:1]  # whose proposal a new coordinator compares later ones with
        self._made[key[:2]] = wire.MadePlan(verdict.clock, plan, {rank: proposed[rank] for rank in lowest})
        self._install(plan)

        self._untold[key] = waiting

        def tell() -> None:
            for rank, handle in self._untold.pop(key, {}).items():  # unless it has ended meanwhile
                self._context.outside.to_worker(rank, wire.Planned(handle, plan))

        self._keeper.homes.when_quiet(plan.id, tell)  # which may have to load a state, clocks included
        for operation in [r for r in self._operations.under_way.values() if r.key.plan == plan.id]:
            self._operations.engine.advance(operation)

    def _check_packages(self, reduction: wire.Reduction) -> None:
        """Raises `PluginError`, with the name of this node, when a package is not here."""
        lacking = plugins.missing(reduction.packages)
        if lacking:
            raise plugins.PluginError(f"on node {self._context.node} (host {self._context.host}) {lacking}")

    def _has_kernels(self, plan: wire.Plan, again: Callable[[], None]) -> bool:
        """Returns whether the kernels of a plan's homes are there, and, if it was not proposed here, of its codec; else
        calls back."""
        dtypes = {bucket.dtype for bucket in plan.buckets}
        if parse(plan.reduction.algorithm).at_homes and not self._codecs.reductions_of(dtypes, again):
            return False
        if plan.tuning is None or not plan.tuning.codec:
            return True
        if len(self._context.participants.members(plan.process_set).nodes) == 1:
            return True
        return self._codecs.kernels_of(codecs.parse(plan.reduction.codec), dtypes, again)

    def _is_open(self, plan: wire.Plan, again: Callable[[], None]) -> bool:
        """Returns whether the codecs of a plan may be opened at once, or have been; else opens them beside the event
        loop, and calls back."""
        job = self._keeper.opening(plan)
        if job is None or plan.nbytes <= INLINE_WORK:
            return True
        return self._codecs.prepare(job, f"the plan of {plan.group!r}", again)

    def _install(self, plan: wire.Plan) -> None:
        record_plan(self._context.trace, plan)
        if self._keeper.install(plan):
            try:
                self._snapshots.open(self._keeper.plans.get(plan.id))
            except FusionError as error:
                self._context.outside.job_failed(f"node {self._context.node} (host {self._context.host}): {error}")

    def remove_set(self, process_set: int) -> None:
        """Forgets the plans of a process set; workers that wait for one are told."""
        for plan_key in [key for key in self.waiting if key[0] == process_set]:
            del self._proposed[plan_key], self._since[plan_key]
            for rank, handle in self.waiting.pop(plan_key).items():
                self._operations.refuse(rank, handle, f"process set {process_set} was removed")
        for made in [key for key in self._made if key[0] == process_set]:
            del self._made[made]

    def end(self, error: str) -> None:
        """Tells all workers that wait that nothing will come."""
        for waiting in (*self.waiting.values(), *self._untold.values()):
            for rank, handle in waiting.items():
                self._operations.refuse(rank, handle, error)
        self.clear()

    def clear(self) -> None:
        """Forgets all workers that wait for a plan."""
        self.waiting.clear()
        self._untold.clear()
        self._since.clear()
        self._proposed.clear()

    # --- for the coordinator of a new view ----------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The highest id of a plan that was ever active here."""
        return self._last

    @property
    def made(self) -> tuple[wire.MadePlan, ...]:
        """The active plans."""
        return tuple(self._made.values())

    @property
    def refused(self) -> tuple[wire.PlanVerdict, ...]:
        """The latest that said why there is no plan."""
        return tuple(self._refused.values())

    @property
    def unanswered(self) -> tuple[wire.PlanRequest, ...]:
        """Proposals that wait for the coordinator."""
        return tuple(wire.PlanRequest(rank, p) for ranks in self._proposed.values() for rank, p in ranks.items())


def _like(rank: int, proposal: wire.Proposal, others: Mapping[int, wire.Proposal]) -> int | None:
    """Returns another rank that has proposed the same, so that the coordinator need not be told twice; None if there is
    none. The order of tensors counts on the lowest rank only."""
    for other, theirs in others.items():
        if theirs == proposal and other != rank:
            return other
        if other < rank and planning.kind_of(theirs) == planning.kind_of(proposal):
            return other
    return None
