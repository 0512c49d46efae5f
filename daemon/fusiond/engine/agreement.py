"""Agreement of all nodes on operations outside a plan, and on those without ranks that have joined. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from fusion_rt import wire
from fusion_rt.core.topology import GLOBAL_SET
from fusion_rt.tracing.format import Kind
from fusion_rt.wire import OpKey
from fusiond.buckets.recipes import Recipe, make_recipe
from fusiond.control.coordination import Coordination
from fusiond.core.errors import RequestError
from fusiond.engine.keeper import Keeper
from fusiond.operations.operation import NodeOperations, Operation, OperationState
from fusiond.operations.starter import Starter
from fusiond.operations.thread_work import INLINE_WORK

_MAX_RECIPES = 4096  # signatures remembered
_MAX_APPROVED = 4096  # those that all ranks have agreed on; of others the coordinator is asked again
_MAX_VERDICTS = 256  # the latest that the coordinator of a new view is told


class Agreement:
    """The agreement of all nodes on an engine's operations.

    Args:
        operations, coordination, keeper, starter: the engine's.
    """

    def __init__(
        self,
        operations: NodeOperations,
        coordination: Coordination,
        keeper: Keeper,
        starter: Starter,
    ) -> None:
        self._operations = operations
        self._context = operations.context
        self._participants = operations.context.participants
        self._coordination = coordination
        self._keeper = keeper
        self._starter = starter
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
        """Returns the recipe of all operations with this signature. Raises FusionError when none can be submitted."""
        recipe = self._recipes.get(signature)
        if recipe is None:
            if len(self._recipes) >= _MAX_RECIPES:
                self._recipes.clear()
            members = self._participants.members(signature.process_set)
            recipe = self._recipes[signature] = make_recipe(signature, members)
        return recipe

    def goes_on_without(self, operation: Operation) -> bool:
        """Returns whether an operation begins here although some local ranks have not submitted it: they have joined.
        One that all of them have joined without is relayed: of chunks that peers send."""
        if not self._participants.joined or operation.kind == "join":
            return False
        refusal = self._refused_after_join(operation)
        if refusal:
            self._operations.everywhere(operation.key, f"{operation.what}: {refusal}")
            return False
        away = self._participants.away(operation.members)
        if any(rank not in operation.parts and rank not in away for rank in operation.members.local):
            return False
        if operation.parts:
            return True
        if operation.key.plan:
            if operation.planned is None and (planned := self._keeper.plans.find(operation.key)) is not None:
                operation.planned = planned
            return operation.planned is not None  # else it goes on when the plan has come
        self._relay(operation)
        return False

    def lose(self, new: Sequence[int]) -> None:
        """Ranks are lost, and the process sets know. Operations under way that need them fail on all ranks."""
        self._recipes.clear()
        for operation in list(self._operations.under_way.values()):
            lost = [rank for rank in operation.members.set.ranks if rank in new]
            if not lost or self._operations.under_way.get(operation.key) is not operation:
                continue
            if operation.has_begun or (operation.parts and operation.kind != "join"):
                who, why = self._context.topology.describe(lost), self._participants.lost[lost[0]]
                self._operations.everywhere(operation.key, f"{operation.what} was under way when {who} was lost: {why}")
            else:  # a join, or only peers have said anything: they have begun it since, or will say that it has failed
                operation.lose(self._participants.members(operation.key.process_set))

    def resume(self) -> None:
        """Lets operations go on that waited for ranks that are lost."""
        for operation in [r for r in self._global_operations() if r.kind == "join" and r.parts]:
            self._operations.engine.advance(operation)

    @property
    def approved(self) -> tuple[wire.Signature, ...]:
        """The signatures that all ranks have agreed on, of process sets that there are."""
        return tuple(s for s in self._approved.values() if s.process_set in self._participants)

    @property
    def verdicts(self) -> tuple[wire.Verdict, ...]:
        """The latest that said more than that."""
        return tuple(self._verdicts.values())

    @property
    def unanswered(self) -> tuple[wire.Request, ...]:
        """Operations that wait for the coordinator."""
        return tuple(
            _request(operation)
            for operation in self._operations.under_way.values()
            if operation.state is OperationState.ASKED
        )

    @property
    def disputed(self) -> tuple[wire.Mismatch, ...]:
        """Operations about which the coordinator has to ask all nodes."""
        return tuple(wire.Mismatch(key) for key, found in self._operations.under_way.items() if found.disputed)

    def settle_sets(self, settled: wire.Settled, removed: Callable[[int], None]) -> None:
        """The process sets are those that all nodes have; `removed` is called with the others first."""
        for process_set in [id for id in self._participants.sets() if id not in settled.sets]:
            removed(process_set)
            self.remove_set(process_set)
        self._participants.next_set = settled.next_set

    def one_less(self) -> None:
        """An operation is over, which a join may have waited for."""
        for operation in self._global_operations():
            if operation.kind == "join":
                self._operations.engine.advance(operation)

    def _global_operations(self) -> list[Operation]:
        return [operation for key, operation in self._operations.under_way.items() if key.process_set == GLOBAL_SET]

    def _refused_after_join(self, operation: Operation) -> str:
        """Returns why an operation cannot do without the local ranks that have joined; empty if it can."""
        kind = operation.kind
        if not operation.parts:  # only peers know its kind
            signature = self._approved.get((operation.key.process_set, operation.peers_digest))
            kind = "allreduce" if signature is None else signature.kind
        elsewhere = [rank for rank in operation.members.set.ranks if rank not in operation.members.local]
        return self._participants.why_not(kind, operation.members, {*operation.parts, *elsewhere})

    def agree(self, operation: Operation, recipe: Recipe) -> None:
        """All local members have submitted the same: starts, or asks the coordinator."""
        kind = recipe.signature.kind
        if kind == "join" and any(other.parts and other is not operation for other in self._global_operations()):
            return  # a rank may join before its operations are done; everybody stays joined until they are
        if len(recipe.members.nodes) == 1:
            small = kind == "allreduce" and recipe.local_nbytes <= INLINE_WORK and recipe.reducer.op != "adasum"
            if small and self._starter.can_reduce_at_once(operation, recipe):
                self._starter.reduce_at_once(operation, recipe)
                return
            # all members; those of a node may be in another order
            parts = sorted(operation.local_parts, key=lambda part: part.rank)
            rows = [part.signature.shape[0] if part.signature.shape else 1 for part in parts]
            if kind == "join":
                rows = [*self._participants.joined[-1:], *max(part.splits for part in parts)]
            self._start(operation, rows, [part.splits for part in parts])
            return
        in_group = wire.is_group(operation.key.process_set)
        operation.digest = wire.digest(recipe.signature)
        if any(chunk.digest != operation.digest for _, chunk, _ in operation.early):
            self._operations.engine.disagree(operation)
            return
        if in_group:  # its ranks agree, or will notice
            self._start(operation, (), ())
            return
        agreed = (operation.key.process_set, operation.digest)
        if operation.early:  # no peer would have sent anything unless it were approved
            self.approve(*agreed, recipe.signature)
        if agreed in self._approved and wire.KINDS[kind].complete:
            self._approved.move_to_end(agreed)
            self._start(operation, (), ())
        else:
            operation.ask()
            self._context.trace.record(Kind.NEGOTIATE_BEGIN, operation.key.name, 0, operation.key.clock)
            self._coordination.ask(_request(operation))

    def _relay(self, operation: Operation) -> None:
        """Runs an operation outside a plan that peers have begun, and all of whose local members have joined."""
        signature = self._approved.get((operation.key.process_set, operation.peers_digest))
        if signature is not None:  # else it goes on when the verdict has come
            operation.recipe = self.recipe(signature)
            operation.digest = wire.digest(signature)
            self._start(operation, (), ())

    def verdict(self, verdict: wire.Verdict) -> None:
        """The coordinator says that the ranks agree."""
        operation = self._operations.under_way.get(verdict.key)
        if verdict.signature is not None:  # the others' operation, while all ranks here have joined
            self.approve(verdict.key.process_set, wire.digest(verdict.signature), verdict.signature)
            for waiting in [r for r in self._operations.under_way.values() if r.peers_digest and not r.parts]:
                self._operations.engine.advance(waiting)
            return
        if operation is None or operation.state is not OperationState.ASKED:  # a peer's data came first
            return
        assert operation.recipe is not None
        self.approve(operation.key.process_set, operation.digest, operation.recipe.signature)
        if verdict.rows:
            self._verdicts[verdict.key] = verdict
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._context.trace.record(Kind.NEGOTIATE_END, operation.key.name, 0, operation.key.clock)
        self._start(operation, verdict.rows, verdict.splits)

    def peer_has_begun(self, operation: Operation) -> None:
        """Data of an operation has come that waits for the coordinator, or for ranks that may have joined."""
        if operation.state is OperationState.ASKED:
            assert operation.recipe is not None
            if wire.KINDS[operation.kind].complete:  # approved, or nothing would come; the verdict is late
                self.approve(operation.key.process_set, operation.digest, operation.recipe.signature)
                self._context.trace.record(Kind.NEGOTIATE_END, operation.key.name, 0, operation.key.clock)
                self._start(operation, (), ())
        elif self._participants.joined:
            self._operations.engine.advance(operation)

    def tell_who_joined(self, operation: Operation) -> None:
        """An operation has begun here; nodes whose ranks have all joined would not begin it without this message."""
        if operation.key.process_set == GLOBAL_SET and operation.parts and operation.kind != "join":
            awaited = self._participants.awaited_nodes(operation.members)
            for node in operation.members.nodes:
                if node != self._context.node and node not in awaited:
                    signature = None if operation.recipe is None else operation.recipe.signature
                    self._context.outside.to_node(node, wire.Began(operation.key, operation.digest, signature))

    def _start(self, operation: Operation, rows: Sequence[int], splits: Sequence[Sequence[int]]) -> None:
        """An operation outside a plan, on which all ranks agree, begins here."""
        assert operation.recipe is not None
        self._take_effect(operation, operation.recipe.signature, rows)
        if self._participants.joined:
            self.tell_who_joined(operation)
        try:
            self._starter.start_tensor(operation, operation.recipe, rows, splits)
        except RequestError as error:
            self._operations.everywhere(operation.key, f"{operation.what}: {error}")

    def _take_effect(self, operation: Operation, signature: wire.Signature, rows: Sequence[int]) -> None:
        """Does this node's part of an operation without data. All nodes do it before any of them completes it."""
        if signature.kind == "join":
            self._keeper.homes.returned(list(self._participants.joined))
            self._participants.joined.clear()
            self._participants.joins += 1
            operation.answer = tuple(rows)
        elif signature.kind == "add_process_set":
            operation.answer = (self._participants.add(signature.ranks),)
        elif signature.kind == "remove_process_set":
            removed = self._participants.find(signature.ranks)
            if removed is not None:  # else ranks removed it twice, and the clients know
                self.remove_set(removed)

    def remove_set(self, process_set: int) -> None:
        """There is no such process set any more. Its operations under way fail."""
        for key in [key for key in self._operations.under_way if key.process_set == process_set]:
            what = self._operations.under_way[key].what
            self._operations.here(key, f"{what} was under way when process set {process_set} was removed")
        self._keeper.remove_set(process_set)
        self._coordination.forget_set(process_set)
        for signature in [s for s in self._recipes if s.process_set == process_set]:
            del self._recipes[signature]
        self._participants.remove(process_set)


def _request(operation: Operation) -> wire.Request:
    signatures = {rank: part.signature for rank, part in operation.parts.items()}
    splits = {rank: part.splits for rank, part in operation.parts.items() if part.splits}
    return wire.Request(operation.key, signatures, splits)
