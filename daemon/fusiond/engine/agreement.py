"""Operations on their way to a start: complete on this node, agreed upon by all, and then run. No I/O."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from fusion_rt import wire
from fusion_rt.topology import GLOBAL_SET
from fusion_rt.trace_format import Kind
from fusion_rt.wire import OpKey
from fusiond.buckets.plans import Plans
from fusiond.buckets.recipes import Recipe, make_recipe
from fusiond.control.coordination import Coordination
from fusiond.control.negotiation import DIRECT_KINDS
from fusiond.core.errors import RequestError
from fusiond.core.participants import Members
from fusiond.operations.context import Context
from fusiond.operations.executor import Run, Runner
from fusiond.operations.outcomes import Failing
from fusiond.operations.thread_work import INLINE_WORK
from fusiond.shards import ParameterService

_MAX_RECIPES = 4096  # signatures remembered
_MAX_APPROVED = 4096  # those that all ranks have agreed on; of others the coordinator is asked again
_MAX_VERDICTS = 256  # the latest that the coordinator of a new view is told


class Agreeing:
    """Of one engine, whose other parts it uses.

    Attributes:
        coordination, failing, homes, plans, runner: the engine's.
        disagree: is told of a run about which the ranks do not agree.
    """

    def __init__(
        self,
        context: Context,
        coordination: Coordination,
        failing: Failing,
        homes: ParameterService,
        plans: Plans,
        runner: Runner,
        disagree: Callable[[Run], None],
    ) -> None:
        self._context = context
        self._participants = context.participants
        self._runs = context.runs
        self._outside = context.outside
        self._coordination = coordination
        self._failing = failing
        self._homes = homes
        self._plans = plans
        self._runner = runner
        self._disagree = disagree
        self._approved: OrderedDict[tuple[int, int], wire.Signature] = OrderedDict()  # by process set and digest
        self._recipes: dict[wire.Signature, Recipe] = {}
        self._verdicts: OrderedDict[OpKey, wire.Verdict] = OrderedDict()  # those that say more than "approved"

    def approve(self, process_set: int, digest: int, signature: wire.Signature) -> None:
        """All ranks have agreed on a signature: its operations start without asking as long as that is remembered."""
        self._approved[process_set, digest] = signature
        self._approved.move_to_end((process_set, digest))
        if len(self._approved) > _MAX_APPROVED:
            self._approved.popitem(last=False)

    def recipe(self, signature: wire.Signature) -> Recipe:
        """What is known of every operation with this signature. Raises FusionError when none can be submitted."""
        recipe = self._recipes.get(signature)
        if recipe is None:
            if len(self._recipes) >= _MAX_RECIPES:
                self._recipes.clear()
            members = self._participants.members(signature.process_set)
            recipe = self._recipes[signature] = make_recipe(signature, members)
        return recipe

    def run(self, key: OpKey, members: Members) -> Run:
        """The run under this key; a new one if there is none."""
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = Run(key, members, self._outside.clock())
        return run

    def advance(self, run: Run) -> None:
        """Something has changed about a run that has not started: goes on if everything local is there."""
        if run.exchange is not None or run.asked or run.disputed:
            return
        if len(run.parts) < len(run.members.local):
            if not self._participants.joined or run.kind == "join":
                return
            refusal = self._refused_after_join(run)
            if refusal:
                self._failing.everywhere(run.key, f"{run.what}: {refusal}")
                return
            away = self._participants.away(run.members)
            if any(rank not in run.parts and rank not in away for rank in run.members.local):
                return
            if not run.parts:
                self._stand_in(run)
                return
        if run.kind == "join" and any(r.parts and r is not run for r in self._global_runs()):
            return  # a rank may join before its operations are done; everybody stays joined until they are
        if run.key.plan:
            self._start_bucket(run)
        else:
            assert run.recipe is not None
            self._agree(run, run.recipe)

    def lose(self, new: Sequence[int]) -> None:
        """Ranks are lost, and the process sets know. What was under way and needs them fails on all ranks."""
        self._recipes.clear()
        for run in list(self._runs.values()):
            lost = [rank for rank in run.members.set.ranks if rank in new]
            if not lost or self._runs.get(run.key) is not run:
                continue
            if run.exchange is not None or (run.parts and run.kind != "join"):
                who, why = self._context.topology.describe(lost), self._participants.lost[lost[0]]
                self._failing.everywhere(run.key, f"{run.what} was under way when {who} was lost: {why}")
            else:  # a join, or only peers have said anything: they have begun it since, or will say that it has failed
                run.members = self._participants.members(run.key.process_set)
                run.early = deque(early for early in run.early if early[0] in run.members.nodes)

    def resume(self) -> None:
        """What waited for ranks that are lost goes on."""
        for run in [r for r in self._global_runs() if r.kind == "join" and r.parts]:
            self.advance(run)

    @property
    def approved(self) -> tuple[wire.Signature, ...]:
        """What all ranks have agreed on, of process sets that there are."""
        return tuple(s for s in self._approved.values() if s.process_set in self._participants)

    @property
    def verdicts(self) -> tuple[wire.Verdict, ...]:
        """The latest that said more than that."""
        return tuple(self._verdicts.values())

    @property
    def unanswered(self) -> tuple[wire.Request, ...]:
        """Operations that wait for the coordinator."""
        return tuple(_request(run) for run in self._runs.values() if run.asked and run.exchange is None)

    @property
    def disputed(self) -> tuple[wire.Mismatch, ...]:
        """Operations about which the coordinator has to ask all nodes."""
        return tuple(wire.Mismatch(run.key) for run in self._runs.values() if run.disputed)

    def settle_sets(self, settled: wire.Settled, removed: Callable[[int], None]) -> None:
        """The process sets are those that all nodes have; `removed` is called with the others first."""
        for process_set in [id for id in self._participants.sets() if id not in settled.sets]:
            removed(process_set)
            self._remove_set(process_set)
        self._participants.next_set = settled.next_set

    def one_less(self) -> None:
        """A run is over, which a join may have waited for."""
        for run in self._global_runs() if self._participants.joined else ():
            if run.kind == "join":
                self.advance(run)

    def _global_runs(self) -> list[Run]:
        return [run for key, run in self._runs.items() if key.process_set == GLOBAL_SET]

    def _refused_after_join(self, run: Run) -> str:
        """Why a run cannot do without the local ranks that have joined."""
        kind = run.kind
        if not run.parts:  # only peers know what it is
            signature = self._approved.get((run.key.process_set, run.peers_digest))
            kind = "allreduce" if signature is None else signature.kind
        elsewhere = [rank for rank in run.members.set.ranks if rank not in run.members.local]
        return self._participants.why_not(kind, run.members, {*run.parts, *elsewhere})

    def _agree(self, run: Run, recipe: Recipe) -> None:
        """All local members have submitted the same: starts, or asks the coordinator."""
        kind = recipe.signature.kind
        if len(recipe.members.nodes) == 1:
            small = kind == "allreduce" and recipe.local_nbytes <= INLINE_WORK and recipe.reducer.op != "adasum"
            if small and self._runner.can_reduce_at_once(recipe):
                self._runner.reduce_at_once(run, recipe)
                return
            local = run.local()
            rows = [p.signature.shape[0] if p.signature.shape else 1 for p in local]
            if kind == "join":
                rows = self._participants.joined[-1:]
            self._start(run, rows, [p.splits for p in local])
            return
        run.digest = wire.digest(recipe.signature)
        if any(chunk.digest != run.digest for _, chunk, _ in run.early):
            self._disagree(run)
            return
        agreed = (run.key.process_set, run.digest)
        if run.early:  # no peer would have sent anything unless it were approved
            self.approve(*agreed, recipe.signature)
        if agreed in self._approved and kind in DIRECT_KINDS:
            self._approved.move_to_end(agreed)
            self._start(run, (), ())
        else:
            run.asked = True
            self._context.trace.record(Kind.NEGOTIATE_BEGIN, run.key.name, 0, run.key.clock)
            self._coordination.ask(_request(run))

    def _stand_in(self, run: Run) -> None:
        """All local members have joined, and peers have begun without them: passes on what passes through this node."""
        if run.key.plan:
            if self._plans.find(run.key.plan, run.key.name) is not None:
                self._start_bucket(run)
            return  # else it goes on when the plan has come
        signature = self._approved.get((run.key.process_set, run.peers_digest))
        if signature is not None:  # else it goes on when the verdict has come
            run.recipe = self.recipe(signature)
            run.digest = wire.digest(signature)
            self._start(run, (), ())

    def verdict(self, verdict: wire.Verdict) -> None:
        """The coordinator says that the ranks agree."""
        run = self._runs.get(verdict.key)
        if verdict.signature is not None:  # the others' operation, while all ranks here have joined
            self.approve(verdict.key.process_set, wire.digest(verdict.signature), verdict.signature)
            for waiting in [r for r in self._runs.values() if r.peers_digest and not r.parts]:
                self.advance(waiting)
            return
        if run is None or not run.asked:
            return
        assert run.recipe is not None
        self.approve(run.key.process_set, run.digest, run.recipe.signature)
        if verdict.rows:
            self._verdicts[verdict.key] = verdict
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        if run.exchange is None:  # else a peer's data came first
            self._context.trace.record(Kind.NEGOTIATE_END, run.key.name, 0, run.key.clock)
            self._start(run, verdict.rows, verdict.splits)

    def peer_has_begun(self, run: Run) -> None:
        """Data of a run has come that waits for the coordinator, or for its local parts."""
        if run.asked and run.exchange is None:
            assert run.recipe is not None
            if run.recipe.signature.kind in DIRECT_KINDS:  # approved, or nothing would come; the verdict is late
                self.approve(run.key.process_set, run.digest, run.recipe.signature)
                self._context.trace.record(Kind.NEGOTIATE_END, run.key.name, 0, run.key.clock)
                self._start(run, (), ())
        elif self._participants.joined:
            self.advance(run)

    def tell_who_joined(self, run: Run) -> None:
        """A run has begun here; nodes whose ranks have all joined have nothing else that would make them begin."""
        if run.key.process_set == GLOBAL_SET and run.parts and run.kind != "join":
            awaited = self._participants.awaited_nodes(run.members)
            for node in run.members.nodes:
                if node != self._context.node and node not in awaited:
                    signature = None if run.recipe is None else run.recipe.signature
                    self._outside.to_node(node, wire.Began(run.key, run.digest, signature))

    def _start(self, run: Run, rows: Sequence[int], splits: Sequence[Sequence[int]]) -> None:
        """An operation outside a plan, on which all ranks agree, begins here."""
        assert run.recipe is not None
        self._take_effect(run, run.recipe.signature, rows)
        if self._participants.joined:
            self.tell_who_joined(run)
        try:
            self._runner.start_tensor(run, run.recipe, rows, splits)
        except RequestError as error:
            self._failing.everywhere(run.key, f"{run.what}: {error}")

    def _start_bucket(self, run: Run) -> None:
        found = self._plans.find(run.key.plan, run.key.name)
        assert found is not None
        passes = {rank: part.passes for rank, part in run.parts.items()}
        run.digest = next(iter(passes.values()), run.peers_digest)
        for rank, number in passes.items():
            if number != run.digest:
                describe = self._context.topology.describe
                self._passes_differ(run, describe([next(iter(passes))]), describe([rank]), number)
                return
        for node, chunk, _ in run.early:
            if chunk.digest != run.digest:
                self.disagree_about_passes(run, node, chunk)
                return
        if self._participants.joined:
            self.tell_who_joined(run)
        try:
            self._runner.start_bucket(run, *found)
        except RequestError as error:
            self._failing.everywhere(run.key, f"{run.what}: {error}")

    def disagree_about_passes(self, run: Run, node: int, chunk: wire.Chunk) -> None:
        """A peer has sent gradients of another backward pass of a step than this node's ranks have submitted."""
        describe = self._context.topology.describe_node
        self._passes_differ(run, describe(self._context.node), describe(node), chunk.digest)

    def _passes_differ(self, run: Run, here: str, there: str, number: int) -> None:
        self._failing.everywhere(
            run.key,
            f"{there} reduces the gradients of backward pass {number} of a step, and {here} those of pass "
            f"{run.digest}; between two calls of step() or zero_grad(), all ranks have to make as many backward passes "
            "(add up losses for one of them, or set backward_passes_per_step)",
        )

    def _take_effect(self, run: Run, signature: wire.Signature, rows: Sequence[int]) -> None:
        """What an operation without data does on this node. All nodes do it before any of them completes it."""
        if signature.kind == "join":
            self._homes.returned(list(self._participants.joined))
            self._participants.joined.clear()
            self._participants.joins += 1
            run.answer = tuple(rows)
        elif signature.kind == "add_process_set":
            run.answer = (self._participants.add(signature.ranks),)
        elif signature.kind == "remove_process_set":
            removed = self._participants.find(signature.ranks)
            if removed is not None:  # else ranks removed it twice, and the clients know
                self._remove_set(removed)

    def _remove_set(self, process_set: int) -> None:
        for key in [key for key in self._runs if key.process_set == process_set]:
            what = self._runs[key].what
            self._failing.here(key, f"{what} was under way when process set {process_set} was removed")
        self._plans.remove_set(process_set)
        self._homes.remove_set(process_set)
        self._coordination.forget_set(process_set)
        for signature in [s for s in self._recipes if s.process_set == process_set]:
            del self._recipes[signature]
        self._participants.remove(process_set)


def _request(run: Run) -> wire.Request:
    signatures = {rank: part.signature for rank, part in run.parts.items()}
    splits = {rank: part.splits for rank, part in run.parts.items() if part.splits}
    return wire.Request(run.key, signatures, splits)
