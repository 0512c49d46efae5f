"""The engine: what this node does about every operation, from the workers' submissions to their results. No I/O.

Events come in as method calls (a worker submitted, a peer's message came, time passed); what is to be done goes out
through its `Effects`. One thread calls it. An operation is gathered until all local members have submitted it, agreed
upon (`negotiation`) unless its signature is known, and then run as an `Exchange` (`running`, `collectives`), whose
chunks may come before any of that and wait.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fusion_rt import wire
from fusion_rt.dtypes import DTYPES
from fusion_rt.errors import FusionError, StepGivenUp
from fusion_rt.kernels.team import Team
from fusion_rt.settings import Settings
from fusion_rt.topology import Topology
from fusion_rt.trace import NULL, Instrument
from fusion_rt.trace_format import Kind
from fusion_rt.wire import OpKey
from fusiond.buckets.plans import Plans
from fusiond.collectives.base import Array
from fusiond.collectives.cost import CostModel
from fusiond.control.coordination import Coordination
from fusiond.control.negotiation import Coordinator
from fusiond.control.questions import Questions
from fusiond.control.stalls import Stalls
from fusiond.control.waiting import Survey
from fusiond.core.dispatch import Handlers
from fusiond.core.effects import Effects
from fusiond.core.errors import RequestError
from fusiond.core.participants import Participants
from fusiond.core.tracing import record_plan
from fusiond.engine.agreement import Agreement
from fusiond.engine.codec_service import CodecService
from fusiond.engine.proposals import Proposals
from fusiond.engine.snapshots import Snapshots
from fusiond.operations.context import Context
from fusiond.operations.executor import Executor, Operation
from fusiond.operations.outcomes import Outcomes
from fusiond.operations.progress import Progress
from fusiond.operations.thread_work import ThreadWork
from fusiond.shards import ParameterService
from fusiond.transport.flow_control import CreditExceeded, window_chunks
from fusiond.workers.connections import WorkerLink

_MAX_EARLY = 4096  # operations of which peers may have sent chunks before our workers submitted them
_MAX_EARLY_BYTES = 1 << 32  # of these chunks


class Engine:
    """All operations of a node.

    Args:
        topology, node: who is where, and which node this is.
        settings: sizes and time-outs.
        outside: acts for the engine.
        on_job_failed: called with a sentence when the job cannot go on because of something noticed here.
        epoch: the membership epoch.
        trace: what is done is recorded there.

    Attributes:
        handlers: of the peers' messages that are taken; other ones once the job has failed.
    """

    def __init__(
        self,
        topology: Topology,
        node: int,
        settings: Settings,
        outside: Effects,
        on_job_failed: Callable[[str], None],
        epoch: int = 0,
        trace: Instrument = NULL,
    ) -> None:
        self.topology = topology
        self.node = node
        self.participants = Participants(topology, node)
        self._outside = outside
        self._epoch = epoch
        self._completed = 0
        self._completed_bytes = 0
        self._early_bytes = 0  # those that wait at most: what has gone on since is taken off when they seem too many
        self.progress = Progress(topology.ranks[node])
        context = Context(topology, node, settings, outside, self.participants, trace=trace)
        self._trace = trace
        self._operations = context.operations
        self._outcomes = Outcomes(context, on_job_failed, self._one_less)
        self._work = ThreadWork(outside.run_jobs)
        self._executor = Executor(
            topology,
            node,
            settings,
            outside,
            self._work,
            self._operations,
            self._delivered,
            self._outcomes.operation_failed,
            trace,
        )
        self._plans = Plans(Team(settings.kernel_threads))
        self.homes = ParameterService(
            topology, node, settings, outside, self._work, self._outcomes.home_failed, epoch, trace, self._operations_of
        )
        self.snapshots = Snapshots(settings, node, self._plans, self.homes, outside)
        self.codecs = CodecService(
            self._plans,
            self.homes,
            self._operations,
            outside,
            lambda: self._outcomes.failure,
            self._outcomes.codec_failed,
        )
        self._context = context
        self._questions = Questions(context, os.getpid(), lambda key: self._stalls.under_way(key))
        self._coordination = Coordination(context, self._questions, self.peer_message, on_job_failed, epoch)
        self._agreement = Agreement(
            context,
            self._coordination,
            self._outcomes,
            self.homes,
            self._plans,
            self._executor,
            lambda operation: self._stalls.disagree(operation),
        )
        self._proposals = Proposals(
            context,
            self._coordination,
            self._outcomes,
            self.codecs,
            self.homes,
            self._plans,
            self.snapshots,
            self._agreement.advance,
        )
        self._stalls = Stalls(
            context, self._outcomes, self._coordination, self._questions, self.homes, self._proposals.waits
        )
        self.handlers = self._handlers()

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator, if it is here."""
        return self._coordination.coordinator

    @property
    def cost(self) -> CostModel:
        """The cost of a message on this job's links."""
        return self._executor.cost

    def measured(self, cost: CostModel, route: CostModel) -> None:
        """The links are measured. Ways between nodes are chosen by `route`, which is the same on all of them."""
        self._executor.cost, self._executor.route = cost, route

    # --- from the local workers ---------------------------------------------------------------------------------------

    def worker_handlers(self) -> Handlers:
        """Returns the handlers of what local workers ask, each called with the worker's connection and the message."""
        return {
            wire.Ready: lambda worker, ready: self.ready(worker.rank, ready),
            wire.Submit: lambda worker, submit: self.submit(
                worker.rank,
                submit,
                None if submit.place is None else worker.at(submit.place, _nbytes(submit.signature)),
            ),
            wire.Propose: lambda worker, asked: self.propose(worker.rank, asked.handle, asked.proposal),
            wire.StalenessRequest: lambda worker, asked: self.staleness(worker.rank, asked.handle),
            wire.AddSegment: self._segment_added,
            wire.DropSegment: self._segment_dropped,
            **self.codecs.worker_handlers(),
        }

    def _segment_added(self, worker: WorkerLink, message: wire.AddSegment) -> None:
        if message.plan:
            assert worker.rank is not None
            self.add_plan_memory(worker.rank, message.plan, worker.memory[message.segment])

    def _segment_dropped(self, worker: WorkerLink, message: wire.DropSegment) -> None:
        if message.segment in worker.plans:
            assert worker.rank is not None
            self.drop_plan_memory(worker.rank, worker.plans[message.segment])

    def submit(self, rank: int, submit: wire.Submit, memory: Array | None) -> None:
        """A worker submits an operation; `memory` is its tensor's bytes (uint8) in the arena, if it is there."""
        signature = submit.signature
        key = OpKey(signature.process_set, 0, submit.name, submit.clock)
        if why := self._outcomes.why(key):
            self._outcomes.refuse(rank, submit.handle, why)
            return
        try:
            recipe = self._agreement.recipe(signature)
            part = recipe.part(rank, submit, memory)
        except FusionError as error:
            # The other ranks may have submitted the same and would wait for this one: it fails for all.
            sentence = f"rank {rank} submitted tensor {submit.name!r} wrongly: {error}"
            if signature.process_set in self.participants:
                self._outcomes.everywhere(key, sentence)
            self._outcomes.refuse(rank, submit.handle, sentence)
            return
        if len(recipe.members.nodes) > 1:
            again = partial(self.submit, rank, submit, memory)
            if not self.codecs.kernels_of(recipe.codec, [recipe.layout.dtype.name], again):
                return
        if why := self.participants.why_not_since(signature.kind, recipe.members) if self.participants.lost else "":
            self._outcomes.here(key, f"tensor {submit.name!r}: {why}")
            self._outcomes.refuse(rank, submit.handle, f"tensor {submit.name!r}: {why}")
            return
        operation = self._agreement.operation(key, recipe.members)
        if rank in operation.parts:
            raise RequestError(f"rank {rank} submitted tensor {submit.name!r} twice under one clock")
        if operation.recipe is None:
            operation.recipe = recipe
        operation.parts[rank] = part
        self._trace.record(Kind.READY, submit.name, part.values.nbytes, submit.clock, peer=rank)
        if signature.kind == "join":
            self._join(rank)
        if operation.recipe is not recipe and operation.recipe.signature.common() != signature.common():
            self._stalls.disagree(operation)
        else:
            self._agreement.advance(operation)
        self.homes.occupied.look(rank)

    def propose(self, rank: int, handle: int, proposal: wire.Proposal) -> None:
        """A worker asks for a plan."""
        self._proposals.propose(rank, handle, proposal)
        self.homes.occupied.look(rank)

    def add_plan_memory(self, rank: int, plan: int, memory: Array) -> None:
        """A worker's arena has a segment (its bytes, uint8) for the buckets of a plan."""
        self._plans.add_memory(rank, plan, memory)

    def drop_plan_memory(self, rank: int, plan: int) -> None:
        """The worker has given that segment up."""
        self._plans.drop_memory(rank, plan)

    def ready(self, rank: int, ready: wire.Ready) -> None:
        """A worker's part of a planned bucket is in the arena."""
        state, bucket, part = self._plans.part(rank, ready)
        name, nbytes = f"bucket {ready.bucket}", part.values.nbytes
        self._trace.record(Kind.READY, name, nbytes, ready.clock, ready.plan, peer=rank)
        if state.at_homes:
            self.progress.ready(rank, ready.bucket)
            if self._outcomes.failure:
                self._outcomes.refuse(rank, ready.handle, self._outcomes.failure)
            else:
                self.homes.post(rank, state, bucket.bucket, part)
            return
        key = OpKey(state.plan.process_set, ready.plan, bucket.name, ready.clock)
        if why := self._outcomes.why(key):
            if part.selected is not None:
                part.selected.disown()
            self._outcomes.refuse(rank, ready.handle, why)
            return
        if ready.gives_up:
            who = self.topology.describe([rank])
            sentence = f"{who} {StepGivenUp.SAYS}: {ready.gives_up}; all ranks have to skip this batch"
            self._outcomes.everywhere(key, sentence)
            self._outcomes.refuse(rank, ready.handle, sentence)
            return
        operation = self._agreement.operation(key, state.members)
        if rank in operation.parts:
            raise RequestError(f"rank {rank} is ready twice in bucket {ready.bucket} of plan {ready.plan}")
        self.progress.ready(rank, ready.bucket, self._outside.clock() - operation.begun)
        operation.parts[rank] = part
        self._agreement.advance(operation)
        self.homes.occupied.look(rank)

    def staleness(self, rank: int, handle: int) -> None:
        """A worker asks how stale contributions have been."""
        self._outside.to_worker(rank, wire.Done(handle, json.dumps(self.homes.statistics()).encode()))

    def depart(self, ranks: Sequence[int]) -> None:
        """Ranks have left in good order, here or elsewhere."""
        self.participants.departed.update(ranks)
        self.homes.gone(ranks)

    def why_not_without(self, losses: Sequence[wire.Loss]) -> str:
        """Why this job cannot go on without these nodes and workers, as far as this node knows; empty if it can.

        A node that has no part in any plan leaves that to those that have, unless it coordinates and there is no plan
        yet: then nothing says that the job can.
        """
        if self.coordinator is not None and not (self.coordinator.has_plans or any(self._plans)):
            return "what is under way needs every rank"
        nodes = {loss.node for loss in losses if loss.rank < 0}
        lost = {loss.rank for loss in losses if loss.rank >= 0}.union(*(self.topology.ranks[node] for node in nodes))
        return self._plans.why_not_without(nodes, lost)

    def view_begins(self, view: wire.View, coordinator: int) -> None:
        """Nodes or workers have been declared lost, and a node coordinates that may be another one than before."""
        new = {}
        for loss in view.lost:
            ranks = self.topology.ranks[loss.node] if loss.rank < 0 else (loss.rank,)
            new.update({rank: loss.why for rank in ranks if rank not in self.participants.lost})
        self._trace.record(Kind.VIEW, "", len(view.nodes), view.number)
        self.participants.lost_nodes.update(loss.node for loss in view.lost if loss.rank < 0)
        self.participants.lose(new)
        self._agreement.lose(list(new))
        self.homes.gone(new)
        self._coordination.view_begins(view, coordinator, self._handover(view.number))
        self._agreement.resume()

    def _handover(self, number: int) -> wire.Handover:
        agreement, proposals = self._agreement, self._proposals
        return wire.Handover(
            self._epoch,
            number,
            self.participants.next_set,
            self.participants.sets(),
            agreement.approved,
            agreement.verdicts,
            (*self._outcomes.latest(), *proposals.refused),
            proposals.last,
            proposals.made,
            agreement.unanswered,
            agreement.disputed,
            proposals.unanswered,
        )

    def _join(self, rank: int) -> None:
        """A local rank has joined: what waits for it goes on without it."""
        for node in self._context.other_nodes():
            self._outside.to_node(node, wire.Joined(rank, self.participants.joins))
        self._joined(rank)

    def _joined(self, rank: int) -> None:
        self.participants.joined.append(rank)
        self.homes.gone([rank], joined=True)
        for operation in list(self._operations.values()):
            if operation.exchange is not None:
                self._agreement.tell_who_joined(operation)
            elif operation.kind != "join":
                self._agreement.advance(operation)
        self._coordination.joined()

    # --- from the peers -----------------------------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        """Returns the handlers of the peers' messages about operations."""
        return {
            wire.Chunk: self._chunk,
            wire.Piece: self.homes.peer,
            wire.Credit: self._credit,
            wire.Verdict: partial(self._decided, self._agreement.verdict),
            wire.PlanVerdict: partial(self._decided, self._plan_decided),
            wire.OpFailed: self._failed_elsewhere,
            wire.Settled: self._settled,
            wire.Began: self._began,
            wire.Occupied: self._occupied,
            wire.Joined: self._joined_elsewhere,
            **self._questions.handlers(),
            **self._coordination.handlers(),
        }

    def peer_message(self, node: int, message: wire.PeerMessage, *payload: memoryview) -> None:
        """A message about operations has come, maybe from this node's own coordinator. Once the job has failed, only
        questions are answered."""
        if handler := self.handlers.get(type(message)):
            handler(node, message, *payload)

    def _credit(self, node: int, credit: wire.Credit) -> None:
        operation = self._operations.get(credit.key)
        if operation is not None and operation.port is not None and node in operation.members.nodes:
            operation.port.credit(operation.members.nodes.index(node), credit.chunks)

    def _decided(self, take: Callable[[Any], None], node: int, message: wire.PeerMessage) -> None:
        """The coordinator has decided something."""
        if self._coordination.takes(node):
            take(message)

    def _plan_decided(self, verdict: wire.PlanVerdict) -> None:
        self._proposals.verdict(verdict)
        self.homes.occupied.look_again()

    def _failed_elsewhere(self, node: int, message: wire.OpFailed) -> None:
        self._outcomes.here(message.key, message.error)
        self._coordination.forget(message.key)

    def _settled(self, node: int, settled: wire.Settled) -> None:
        if self._coordination.is_settled(settled):
            self._agreement.settle_sets(settled, self._proposals.remove_set)

    def _occupied(self, node: int, message: wire.Occupied) -> None:
        if message.rank in self.topology.ranks[node]:
            self.homes.occupied.told(message)

    def _joined_elsewhere(self, node: int, message: wire.Joined) -> None:
        if message.rank in self.topology.ranks[node] and message.before == self.participants.joins:
            self._joined(message.rank)

    def tick(self) -> None:
        """Time has passed: ends what has waited too long. Called about once a second while anything is under way."""
        self._stalls.tick()
        self.homes.tick()

    def fail_job(self, error: str) -> None:
        """The job cannot go on: everything under way, and everything later, fails with this sentence."""
        if self._outcomes.failure:
            return
        self._outcomes.failure = error
        self.handlers = self._questions.handlers()
        self._operations.clear()
        self._proposals.clear()
        self.homes.fail()

    def when_quiet(self, then: Callable[[], None]) -> None:
        """Calls `then` when no job of an operation, failed or not, is in the kernel pool: at once, or later."""
        self._work.when_all_quiet(then)

    def end(self, error: str) -> None:
        """This membership epoch is over elsewhere: everything fails with this sentence, and the job may go on."""
        for key in list(self._operations):
            self._outcomes.here(key, f"{self._operations[key].what}: {error}")
        self._proposals.end(error)
        self.homes.end(error)
        self.fail_job(error)

    @property
    def idle(self) -> bool:
        """True if nothing is under way that a tick could end."""
        return not self._operations and not self._proposals.waiting and self.homes.idle

    @property
    def quiet_seconds(self) -> float:
        """For how long no operation between ranks has begun or gone on."""
        return self._outside.clock() - max(
            (operation.since for operation in self._operations.values()), default=-math.inf
        )

    def survey(self, everyone: bool, then: Callable[[Survey], None]) -> None:
        """Asks all nodes who waits for whom; `everyone`: and where also those are that nobody waits for."""
        self._questions.survey(everyone, then)

    def record_plans(self) -> None:
        """Records the active plans again: what was recorded first may be overwritten by now."""
        for state in self._plans:
            record_plan(self._trace, state.plan)

    def counts(self) -> tuple[int, int, int]:
        """Operations that are complete here, their bytes, and operations that are not."""
        return self._completed + self.homes.meters.version_lag.count, self._completed_bytes, len(self._operations)

    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that would have been sent to other nodes without compression, and that were, as far as it counts."""
        return self._plans.traffic()

    def statistics(self) -> dict[str, object]:
        """Operations `under_way` and `completed`, their `bytes` on this node, and the active `plans`."""
        return {
            "under_way": len(self._operations),
            "completed": self._completed,
            "bytes": self._completed_bytes,
            "plans": self._plans.statistics(),
            "compression": self._plans.compression(),
            "homes": self.homes.statistics(),
            "process_sets": self.participants.statistics(),
            "latency_seconds": self.cost.latency,
            "seconds_per_byte": self.cost.seconds_per_byte,
            "route_latency_seconds": self._executor.route.latency,
            "route_seconds_per_byte": self._executor.route.seconds_per_byte,
            "coordinator": self._coordination.statistics(),
            "coordination": self._coordination.state(),
        }

    def _began(self, node: int, message: wire.Began) -> None:
        operation = self._operations.get(message.key)
        if operation is None:
            if not self._may_begin(node, message.key):
                return
            operation = self._agreement.operation(message.key, self.participants.members(message.key.process_set))
        if not operation.parts:
            operation.peers_digest = message.digest
            if message.signature is not None and wire.digest(message.signature) == message.digest:
                self._agreement.approve(message.key.process_set, message.digest, message.signature)
            self._agreement.advance(operation)

    def _chunk(self, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        if chunk.key.clock // wire.CLOCKS_OF_AN_EPOCH != self._epoch:
            return
        operation = self._operations.get(chunk.key)
        if operation is None:
            if not self._may_begin(node, chunk.key):
                return
            operation = self._agreement.operation(chunk.key, self.participants.members(chunk.key.process_set))
        if node not in operation.members.nodes:
            return
        if operation.digest and not chunk.key.plan and chunk.digest != operation.digest:
            if not operation.disputed:
                self._stalls.disagree(operation)
        elif chunk.key.plan and operation.exchange is not None and chunk.digest != operation.digest:
            self._agreement.disagree_about_passes(operation, node, chunk)
        elif operation.started:
            self._executor.receive(operation, node, chunk, payload)
        else:
            self._check_credit(operation, node, len(payload))
            operation.early.append((node, chunk, payload))
            operation.early_from[node] += 1
            operation.peers_digest = chunk.digest
            self._agreement.peer_has_begun(operation)

    def _check_credit(self, operation: Operation, node: int, nbytes: int) -> None:
        """A chunk has come that has to wait; for those that wait nothing is granted.

        Raises:
            CreditExceeded: it is more than the node may send.
        """
        found = self._plans.find(operation.key.plan, operation.key.name)
        if found is not None or not operation.key.plan:
            tuning = None if found is None else found[0].plan.tuning
            chunk_bytes, window_bytes = self._executor.limits(tuning or wire.Tuning())
            granted = window_chunks(window_bytes, chunk_bytes)
            if operation.early_from[node] >= granted:
                raise CreditExceeded(
                    f"it sent more than the {granted} messages of {operation.what} that it was granted"
                )
        self._early_bytes += nbytes
        if self._early_bytes > _MAX_EARLY_BYTES:
            waiting = (len(payload) for other in self._operations.values() for _, _, payload in other.early)
            self._early_bytes = nbytes + sum(waiting)
            if self._early_bytes > _MAX_EARLY_BYTES:
                raise CreditExceeded(
                    f"{self._early_bytes} bytes of operations wait that the workers here have not reached, "
                    f"and no more than {_MAX_EARLY_BYTES} are kept"
                )

    def _may_begin(self, node: int, key: OpKey) -> bool:
        """Returns whether a peer may be the first to say anything about an operation here."""
        if self._outcomes.is_over(key) or self.participants.is_over(key.process_set):
            return False
        if key.process_set in self.participants and not self._too_early():
            return True
        self._outcomes.on_job_failed(
            f"node {node} (host {self.topology.hosts[node]}) sent data of {key.name!r}, which has no place here: it is "
            "in an unknown process set, or one of too many operations under way"
        )
        return False

    def _too_early(self) -> bool:
        """Returns whether peers are ahead of the workers here in as many operations as they may be."""
        return (
            len(self._operations) >= _MAX_EARLY
            and sum(not operation.parts for operation in self._operations.values()) >= _MAX_EARLY
        )

    def _delivered(self, operation: Operation) -> None:
        """The workers have their results."""
        self._completed += 1
        self._completed_bytes += sum(part.values.nbytes for part in operation.parts.values())
        self._outcomes.completed(operation)
        if self.homes.occupied.matters:
            self.homes.operation_completed(wire.mark(operation.key))
        self._one_less()

    def _one_less(self) -> None:
        """An operation is over, which others may have waited for."""
        self._agreement.one_less()
        self.homes.occupied.look_again()

    def _operations_of(self, rank: int) -> Iterator[int]:
        """The marks of the operations that a local rank has submitted, and that are not over. A rank that has joined
        is not expected by anybody, and so its join is left out."""
        for operation in self._operations.values():
            if rank in operation.parts and operation.kind != "join":
                yield wire.mark(operation.key)
        for (process_set, group, clock), ranks in self._proposals.waiting.items():
            if rank in ranks:
                yield wire.mark(OpKey(process_set, 0, f"plan of {group}", clock))


def _nbytes(signature: wire.Signature) -> int:
    """Bytes of a tensor; 0 where its dtype does not exist, which `Engine.submit` refuses."""
    return math.prod(signature.shape) * DTYPES[signature.dtype].itemsize if signature.dtype in DTYPES else 0
