"""The side of an engine that combines contributions by exchanges between nodes; the other one is `shards`. No I/O.

An operation is gathered until all local members have contributed to it, agreed upon (`agreement`) unless its signature
is known, and then run as an `Exchange` (`operations.operation`). Chunks of peers may come before any of that, and wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, StepGivenUp, WireError
from fusion_rt.kernels.ordinary import Operand
from fusion_rt.tracing.format import Kind
from fusion_rt.wire import OpKey
from fusiond.buckets.plans import BucketState, PlanState
from fusiond.control.coordination import Coordination
from fusiond.control.waiting import describe, explain_order
from fusiond.core.contribution import Contribution
from fusiond.core.dispatch import Handlers
from fusiond.core.errors import RequestError
from fusiond.core.participants import Members
from fusiond.engine.agreement import Agreement
from fusiond.engine.codec_service import CodecService
from fusiond.engine.keeper import Keeper
from fusiond.operations.admission import SCRATCH_BYTES, Admission, Room
from fusiond.operations.operation import NodeOperations, Operation, OperationState
from fusiond.operations.progress import Progress
from fusiond.operations.starter import Starter
from fusiond.transport.early_credit import EARLY_BYTES
from fusiond.transport.flow_control import CreditExceeded, window_chunks

_MAX_EARLY = 4096  # operations of which peers may have sent chunks before our workers submitted them; more than
# `early_credit` lets all of them send together, with one for each of a thousand peers


class Section(Protocol):
    """A part of an engine that has something under way: exchanges between nodes, homes, or messages between ranks."""

    def handlers(self) -> Handlers:
        """Returns the handlers of the peers' messages about it."""

    def gone(self, ranks: Iterable[int], joined: bool = False) -> None:
        """These ranks take part no longer; or, if they have joined, until all have."""

    def end(self, error: str) -> None:
        """Fails everything under way with this sentence."""

    def fail(self, error: str) -> None:
        """Forgets everything under way: the job cannot go on, for this reason."""

    @property
    def idle(self) -> bool:
        """True if no local worker waits for a result."""


class Route(Section, Protocol):
    """A part that takes contributions: exchanges, or homes. A plan's algorithm says which one its buckets take."""

    def post(self, rank: int, state: PlanState, bucket: BucketState, part: Contribution) -> None:
        """A local worker's contribution to a bucket is in the arena.

        Raises:
            RequestError: no worker of ours would post that.
        """


class Exchanges:
    """The operations of one engine that are exchanges.

    Args:
        operations, keeper, codecs, coordination, progress: the engine's.
        epoch: the membership epoch.

    Attributes:
        starter: starts operations.
        agreement: of all nodes on these operations.
        admission: of planned buckets, as their scratch memory has room.
        foreign: chunks of other membership epochs that have come.
    """

    def __init__(
        self,
        operations: NodeOperations,
        keeper: Keeper,
        codecs: CodecService,
        coordination: Coordination,
        progress: Mapping[int, Progress],
        epoch: int,
    ) -> None:
        context = operations.context
        self._operations = operations
        self._context = context
        self._participants = context.participants
        self._plans, self._homes = keeper.plans, keeper.homes
        self._codecs = codecs
        self._progress = progress
        self._clocks = wire.clock_range(epoch)
        nodes, settings = len(context.topology.hosts), context.settings
        self._most_early_bytes = 2 * (EARLY_BYTES + nodes * settings.chunk_bytes)  # twice as many as peers may send
        self._held_elsewhere: dict[OpKey, set[int]] = {}  # by nodes that ask for an operation of which nothing came yet
        self.foreign = 0
        self.admission = Admission(operations.under_way, Room(SCRATCH_BYTES, context.room))
        self._making_room = False
        self._early_bytes = 0  # those that wait at most: those that went on are taken off when they seem too many
        self.starter = Starter(operations)
        self.agreement = Agreement(operations, coordination, keeper, self.starter)

    # --- from the local workers ---------------------------------------------------------------------------------------

    def submit(
        self, rank: int, submit: wire.Submit, memory: Operand | None, into: Callable[[int], Operand] | None = None
    ) -> None:
        """A worker submits an operation outside a plan.

        Args:
            memory: its tensor's bytes (uint8), unless they are in the message.
            into: returns so many bytes of where the result goes, if that is somewhere else.

        Raises:
            RequestError: no worker of ours would submit that.
            WireError: the result has no place where it is to go.
        """
        signature = submit.signature
        key = OpKey(signature.process_set, 0, submit.name, submit.clock)
        if why := self._operations.why(key):
            self._operations.refuse(rank, submit.handle, why)
            return
        if wire.is_group(key.process_set) and (why := self._participants.why_closed(key.process_set)):
            self._refuse_in_group(rank, submit.handle, key, why)
            return
        try:
            recipe = self.agreement.recipe(signature)
            part = recipe.part(rank, submit, memory, into)
        except WireError:
            raise
        except FusionError as error:
            # The other ranks may have submitted the same and would wait for this one: it fails for all.
            sentence = f"rank {rank} submitted {key.in_words} wrongly: {error}"
            if signature.process_set in self._participants:
                self._operations.everywhere(key, sentence)
            self._operations.refuse(rank, submit.handle, sentence)
            return
        if len(recipe.members.nodes) > 1:
            again = partial(self.submit, rank, submit, memory, into)
            if not self._codecs.kernels_of(recipe.codec, [recipe.layout.dtype.name], again):
                return
        carries = wire.KINDS[signature.kind].carries
        lost = self._participants.lost
        if lost and (why := self._participants.why_not_since(signature.kind, recipe.members, carries)):
            self._operations.here(key, f"{key.in_words}: {why}")
            self._operations.refuse(rank, submit.handle, f"{key.in_words}: {why}")
            return
        if why := self._is_another_in_its_place(key, {rank: signature}):
            self._operations.refuse(rank, submit.handle, why)
            return
        operation = self._operation(key, recipe.members)
        if rank in operation.parts:
            raise RequestError(f"rank {rank} submitted {key.in_words} twice under one clock")
        if operation.recipe is None:
            operation.recipe = recipe
        operation.parts[rank] = part
        if type(submit.place) is wire.Address or type(submit.into) is wire.Address:
            operation.is_here = False
        if submit.seconds and recipe.direct:
            self._set_limit(operation, submit.seconds)
        self._context.trace.record(Kind.READY, submit.name, part.values.nbytes, submit.clock, peer=rank)
        if signature.kind == "join":
            self._operations.engine.join(rank)
        if operation.recipe is not recipe and operation.recipe.signature.common() != signature.common():
            self._operations.engine.disagree(operation)
        else:
            self.advance(operation)
        self._homes.occupied.look(rank)

    def _is_another_in_its_place(self, key: OpKey, submitted: Mapping[int, wire.Signature]) -> str:
        """Fails an operation without a name in whose place other ranks have one of another kind, and that one, too.
        Returns why; empty if there is none. `submitted`: by which ranks it is."""
        for other in wire.in_its_place(key):
            found = self._operations.under_way.get(other)
            if found is None and not (why := self._operations.why(other)):
                continue
            if found is not None:
                theirs = {rank: part.signature for rank, part in found.parts.items()}
                why = explain_order({key: submitted, other: theirs}, self._context.topology)
                self._operations.everywhere(other, why)
            self._operations.everywhere(key, why)
            return why
        return ""

    def _set_limit(self, operation: Operation, seconds: float) -> None:
        until = self._context.outside.clock() + seconds
        if until < operation.until:
            operation.seconds, operation.until = seconds, until
            self._operations.engine.limit(operation)

    def _refuse_in_group(self, rank: int, handle: int, key: OpKey, why: str) -> None:
        sentence = f"{key.in_words}: {why}"
        if key.process_set in self._participants:  # else no peer waits for this node
            self._operations.everywhere(key, sentence)
        self._operations.refuse(rank, handle, sentence)

    def post(self, rank: int, state: PlanState, bucket: BucketState, part: Contribution) -> None:
        """A worker's contribution to a planned bucket is in the arena.

        Raises:
            RequestError: the worker has contributed to this run of the bucket.
        """
        key = OpKey(state.plan.process_set, state.plan.id, bucket.name, part.clock)
        if (why := self._operations.why(key)) or part.gives_up:
            self._refuse(rank, key, part, why)
            return
        operation = self._operation(key, state.members)
        if rank in operation.parts:
            raise RequestError(f"rank {rank} is ready twice in bucket {bucket.name} of plan {state.plan.id}")
        operation.planned = (state, bucket)
        self._progress[rank].late += self._context.outside.clock() - operation.begun
        operation.parts[rank] = part
        self.advance(operation)
        if self._homes.occupied.plans:
            self._homes.occupied.look(rank)

    def _refuse(self, rank: int, key: OpKey, part: Contribution, why: str) -> None:
        """A worker's contribution cannot be taken, or its worker gives the step up."""
        if not why:
            who = self._context.topology.describe([rank])
            why = f"{who} {StepGivenUp.SAYS}: {part.gives_up}; all ranks have to skip this batch"
            self._operations.everywhere(key, why)
        elif part.selected is not None:
            part.selected.disown()
        self._operations.refuse(rank, part.handle, why)

    # --- until it starts ----------------------------------------------------------------------------------------------

    def _operation(self, key: OpKey, members: Members) -> Operation:
        """Returns the operation under this key; a new one if there is none."""
        operation = self._operations.under_way.get(key)
        if operation is None:
            operation = self._operations.begin(key, members)
            operation.askers = self._held_elsewhere.pop(key, set())
        return operation

    def advance(self, operation: Operation) -> None:
        """Something has changed about an operation that has not started: goes on if everything local is there."""
        if operation.state is not OperationState.GATHERING or operation.disputed:
            return
        if len(operation.parts) < len(operation.members.local) and not (
            self.agreement.goes_on_without(operation) and self._may_be_next(operation)
        ):
            return
        if operation.recipe is not None:
            self.agreement.agree(operation, operation.recipe)
        else:
            self._start_bucket(operation)

    def _may_be_next(self, operation: Operation) -> bool:
        """Returns whether no earlier run of this one's bucket is under way here. Where no rank has a part, nobody waits
        for its end before the next begins, and peers may be further; but the bucket's codec takes one step at a time.
        """
        key = operation.key
        return operation.recipe is not None or not any(
            other.has_begun and (other.key.plan, other.key.name) == (key.plan, key.name)
            for other in self._operations.under_way.values()
        )

    def one_less(self) -> None:
        """An operation is over, for which the next run of a bucket, without a part from here, may have waited."""
        for operation in list(self._operations.under_way.values()):
            if operation.key.plan and not operation.parts:
                self.advance(operation)

    def _start_bucket(self, operation: Operation) -> None:
        """Everything local is there of a planned bucket: it begins here, if all ranks mean the same backward pass."""
        assert operation.planned is not None
        passes = {part.passes for part in operation.parts.values()} or {operation.peers_digest}
        operation.digest = next(iter(passes))
        if len(passes) > 1 or any([chunk.digest != operation.digest for _, chunk, _ in operation.early]):
            self._refuse_passes(operation)
            return
        if not self._has_room(operation, *operation.planned):
            return
        if self._participants.joined:
            self.agreement.tell_who_joined(operation)
        try:
            self.starter.start_bucket(operation, *operation.planned)
        except RequestError as error:
            self._operations.everywhere(operation.key, f"{operation.what}: {error}")

    def _has_room(self, operation: Operation, state: PlanState, bucket: BucketState) -> bool:
        """Returns whether the exchange of a planned bucket may begin now; if not, it waits (`operations.admission`)."""
        key, waits = operation.key, operation.key in self.admission
        nbytes = self.starter.scratch_nbytes(state, bucket)
        if self.admission.admits(key, nbytes):
            return True
        leader = operation.members.nodes[0]
        if any(node == leader for node, _, _ in operation.early):
            self.admission.told(key)
            return self.admission.admits(key, nbytes)
        if not waits and leader != self._context.node:
            self._context.outside.to_node(leader, wire.Held(key))
        return False

    def _leader_has_begun(self, node: int, operation: Operation) -> None:
        """A node has begun an operation: if it leads, that waits for room here no longer."""
        if node == operation.members.nodes[0] and self.admission.told(operation.key):
            self.advance(operation)

    def make_room(self, completed: OpKey | None) -> None:
        """An operation is over, and others may begin that wait for room; None: it has failed."""
        self.admission.over(completed)
        if self._making_room:
            return  # one that has begun here is over at once: whoever began it goes on
        self._making_room = True
        last: OpKey | None = None
        while (key := self.admission.next()) is not None and key != last:
            last = key
            if (operation := self._operations.under_way.get(key)) is not None:
                self.advance(operation)
        self._making_room = False

    def _refuse_passes(self, operation: Operation) -> None:
        """Ranks here, or this node and a peer, have submitted gradients of different backward passes of a step."""
        describe, numbers = self._context.topology.describe, {r: part.passes for r, part in operation.parts.items()}
        first, operation.digest = next(iter(numbers.items()), (0, operation.peers_digest))
        for rank, number in numbers.items():
            if number != operation.digest:
                self._passes_differ(operation, describe([first]), describe([rank]), number)
                return
        node, chunk = next((node, chunk) for node, chunk, _ in operation.early if chunk.digest != operation.digest)
        self._peer_disagrees_about_passes(operation, node, chunk)

    def _peer_disagrees_about_passes(self, operation: Operation, node: int, chunk: wire.Chunk) -> None:
        """A peer has sent gradients of another backward pass of a step than this node's ranks have submitted."""
        describe = self._context.topology.describe_node
        self._passes_differ(operation, describe(self._context.node), describe(node), chunk.digest)

    def _passes_differ(self, operation: Operation, here: str, there: str, number: int) -> None:
        self._operations.everywhere(
            operation.key,
            f"{there} reduces the gradients of backward pass {number} of a step, and {here} those of pass "
            f"{operation.digest}; between two calls of step() or zero_grad(), all ranks have to make as many "
            "backward passes (add up losses for one of them, or set backward_passes_per_step)",
        )

    # --- from the peers -----------------------------------------------------------------------------------------------

    def handlers(self) -> Handlers:
        """Returns the handlers of the peers' messages about exchanges."""
        return {
            wire.Chunk: self._chunk,
            wire.Credit: self._credit,
            wire.Began: self._began,
            wire.Held: lambda node, message: self._asked(node, message.key),
            wire.CaughtUp: self._reached,
        }

    def _asked(self, node: int, key: OpKey) -> None:
        """A node asks to be told when an operation is reached here, of which it may hold chunks back."""
        operation = self._operations.under_way.get(key)
        if self._operations.is_over(key):
            self._context.outside.to_node(node, wire.CaughtUp(key))
        elif operation is not None:
            operation.asked_by(node)
        else:
            self._held_elsewhere.setdefault(key, set()).add(node)

    def _reached(self, node: int, message: wire.CaughtUp) -> None:
        operation = self._operations.under_way.get(message.key)
        if operation is None or not operation.reached(node):
            # It is over here, and its chunks do not wait there any more; or it waits for room here.
            self.starter.early.reached(node, message.key)
            if operation is not None:
                self._leader_has_begun(node, operation)

    def _credit(self, node: int, credit: wire.Credit) -> None:
        operation = self._operations.under_way.get(credit.key)
        if operation is not None:
            operation.credit(node, credit.chunks)

    def _began(self, node: int, message: wire.Began) -> None:
        operation = self._begun(node, message.key)
        if operation is not None and not operation.parts:
            operation.peers_digest = message.digest
            if message.signature is not None and wire.digest(message.signature) == message.digest:
                self.agreement.approve(message.key.process_set, message.digest, message.signature)
            self.advance(operation)

    def _chunk(self, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        if chunk.key.clock // wire.CLOCKS_OF_AN_EPOCH != self._clocks:
            self._foreign(node, chunk.key)
            return
        operation = self._begun(node, chunk.key)
        if operation is None:
            self._look_back(node, chunk)
            if chunk.asks:
                self._asked(node, chunk.key)
            return
        if node not in operation.members.nodes:
            return
        if chunk.asks:
            self._asked(node, chunk.key)
        if chunk.digest != operation.digest or not operation.takes_chunks:
            self._take_early(operation, node, chunk, payload)
        elif operation.busy:
            self._wait(operation, node, chunk, payload)
        else:
            operation.receive(node, chunk, payload)

    def _foreign(self, node: int, key: OpKey) -> None:
        """Counts a chunk of another membership epoch, which nothing here waits for. The first one is told."""
        if not self.foreign:
            who = self._context.topology.describe_node(node)
            self._context.outside.warn(
                f"{who} sent data of {key.in_words} in another membership epoch, which is dropped; further ones are "
                "counted (`fusiond status --json`: engine.foreign_chunks)"
            )
        self.foreign += 1

    def _take_early(self, operation: Operation, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        """A chunk waits until the workers here have come that far, unless it does not fit their submissions."""
        is_known = operation.has_begun if chunk.key.plan else operation.digest
        if is_known and chunk.digest != operation.digest:
            self._peer_disagrees(operation, node, chunk)
            return
        self._wait(operation, node, chunk, payload)
        self._early_bytes += len(payload)
        if self._early_bytes > self._most_early_bytes:
            self._count_early()
        operation.peers_digest = chunk.digest
        self._leader_has_begun(node, operation)
        if operation.state is OperationState.ASKED or self._participants.joined:
            self.agreement.peer_has_begun(operation)

    def _wait(self, operation: Operation, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        """Has a chunk wait until the exchange of its operation takes it."""
        self._check_credit(operation, sum([sender == node for sender, _, _ in operation.early]))
        operation.early.append((node, chunk, payload))

    def _peer_disagrees(self, operation: Operation, node: int, chunk: wire.Chunk) -> None:
        if chunk.key.plan:
            self._peer_disagrees_about_passes(operation, node, chunk)
        elif not operation.disputed:
            self._operations.engine.disagree(operation)

    def _look_back(self, node: int, chunk: wire.Chunk) -> None:
        """Data has come of an operation that is over here. In a group one that was something else for the sender may be
        over for both: a broadcast of which each was the root."""
        group = self._participants.groups.get(chunk.key.process_set)
        signature = None if group is None else self._operations.completed_as(chunk.key)
        if group is not None and signature is not None and wire.digest(signature) != chunk.digest:
            describe_node = self._context.topology.describe_node
            group.broken = group.broken or (
                f"the ranks did not agree about {chunk.key.in_words}, which was {describe(signature)} for "
                f"{describe_node(self._context.node)} and something else for {describe_node(node)}"
            )

    def _begun(self, node: int, key: OpKey) -> Operation | None:
        """Returns the operation that a peer says something about; None if it is over here, or cannot be."""
        operation = self._operations.under_way.get(key)
        if operation is not None or self._operations.is_over(key):
            return operation
        planned = self._plans.find(key)
        if planned is None or len(self._operations.under_way) >= _MAX_EARLY:
            return self._begun_early(node, key)
        operation = self._operation(key, planned[0].members)
        operation.planned = planned
        return operation

    def _begun_early(self, node: int, key: OpKey) -> Operation | None:
        """Returns a new operation that is of no plan here, or one of very many, if a peer may be the first to say
        anything about it."""
        if self._participants.is_over(key.process_set):
            return None
        if key.process_set in self._participants and not self._too_early():
            if self._is_another_in_its_place(key, {}):
                return None
            return self._operation(key, self._participants.members(key.process_set))
        self._context.outside.job_failed(
            f"node {node} (host {self._context.topology.hosts[node]}) sent data of {key.name!r}, which has no place "
            "here: it is in an unknown process set, or one of too many operations under way"
        )
        return None

    def _too_early(self) -> bool:
        """Returns whether peers are ahead of the workers here in as many operations as they may be."""
        found = self._operations.under_way.values()
        return len(found) >= _MAX_EARLY and sum(not operation.parts for operation in found) >= _MAX_EARLY

    def _check_credit(self, operation: Operation, before: int) -> None:
        """A chunk has come that has to wait, as so many before it; for those that wait nothing is granted.

        Raises:
            CreditExceeded: it is more than the node may send.
        """
        if operation.planned is not None or not operation.key.plan:  # else its grant is not known here yet
            chunk_bytes, window_bytes = self.starter.limits(operation.tuning)
            granted = window_chunks(window_bytes, chunk_bytes)
            if before >= granted:
                raise CreditExceeded(
                    f"it sent more than the {granted} messages of {operation.what} that it was granted"
                )

    def _count_early(self) -> None:
        """Counts again the chunks that wait for workers here. Raises `CreditExceeded` if that is too much."""
        self._early_bytes = sum(
            len(payload)
            for operation in self._operations.under_way.values()
            if not operation.takes_chunks
            for _, _, payload in operation.early
        )
        if self._early_bytes > self._most_early_bytes:
            raise CreditExceeded(
                f"{self._early_bytes} bytes of operations wait that the workers here have not reached, "
                f"and peers may send {self._most_early_bytes // 2}"
            )

    # --- membership and results ---------------------------------------------------------------------------------------

    def gone(self, ranks: Iterable[int], joined: bool = False) -> None:
        """These ranks have joined, or are lost. Operations go on without ranks that have joined; those that need a lost
        rank fail on all ranks. Ranks that have left in good order may still be waited for (`control.stalls`)."""
        if not joined:
            if lost := [rank for rank in ranks if rank in self._participants.lost]:
                self.agreement.lose(lost)
            return
        for operation in list(self._operations.under_way.values()):
            if operation.has_begun:
                self.agreement.tell_who_joined(operation)
            elif operation.kind != "join":
                self.advance(operation)

    def end(self, error: str) -> None:
        """Fails everything under way with this sentence."""
        self._operations.end(error)

    def fail(self, error: str) -> None:
        """Forgets everything under way: the job cannot go on, for this reason."""
        self._operations.drop()

    @property
    def idle(self) -> bool:
        """True if no operation is under way."""
        return not self._operations.under_way
