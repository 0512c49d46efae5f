"""The engine of a node: all operations, from the workers' submissions to their results. No I/O.

Events come in as method calls (a worker submitted, a peer's message came, time passed); instructions go out
through its `Effects`. One thread calls it. The algorithm of a plan says which route its contributions take: to
exchanges between nodes (`exchanges`), or to homes (`shards`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels.ordinary import Operand
from fusion_rt.kernels.team import Team
from fusion_rt.tracing.format import Kind
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
from fusiond.core.tracing import record_plan
from fusiond.engine.codec_service import CodecService
from fusiond.engine.exchanges import Exchanges, Route, Section
from fusiond.engine.groups import Groups
from fusiond.engine.keeper import Keeper, Left
from fusiond.engine.proposals import Proposals
from fusiond.engine.snapshots import Snapshots
from fusiond.operations.context import Context
from fusiond.operations.operation import NodeOperations, Operation
from fusiond.operations.progress import Progress
from fusiond.operations.thread_work import ThreadWork
from fusiond.point_to_point.messaging import Messaging
from fusiond.shards import ParameterService
from fusiond.workers.connections import WorkerLink


class Engine:
    """All operations of a node.

    Args:
        context: its surroundings.
        epoch: the membership epoch.
        left: state that the formation before has left; in an elastic job.

    Attributes:
        handlers: of the peers' messages that are taken; other ones once the job has failed.
    """

    def __init__(
        self,
        context: Context,
        epoch: int = 0,
        left: Left | None = None,
    ) -> None:
        self._context = context
        self.topology, self.node, self.participants = context.topology, context.node, context.participants
        self._outside, self._trace = context.outside, context.trace
        self._epoch = epoch
        self.progress = {rank: Progress() for rank in self.topology.ranks[self.node]}
        self._work = ThreadWork(context.outside.run_jobs)
        self.operations = NodeOperations(context, self._work, self)
        self._plans = Plans(Team(context.threads), keeps_before=left is not None)
        self.homes = ParameterService(context, self._work, epoch, self.operations.home_failed, self._operations_of)
        self.keeper = Keeper(self.operations, self._plans, self.homes, epoch, left)
        self.snapshots = Snapshots(context, self.keeper)
        self.codecs = CodecService(self.operations, self.keeper)
        self._questions = Questions(context, os.getpid(), self)
        self._coordination = Coordination(context, self._questions, self, epoch)
        self.exchanges = Exchanges(self.operations, self.keeper, self.codecs, self._coordination, self.progress, epoch)
        self._agreement = self.exchanges.agreement
        self.messages = Messaging(self.operations, self.exchanges.starter, self._questions)
        self._sections: tuple[Section, ...] = (self.exchanges, self.homes, self.messages)
        self._proposals = Proposals(self.operations, self._coordination, self.codecs, self.keeper, self.snapshots)
        self._stalls = Stalls(self.operations, self._coordination, self._questions, self.homes, self._proposals)
        self.groups = Groups(self.operations, self._agreement, self._stalls, self.messages)
        self.handlers = self._handlers()

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator, if it is here."""
        return self._coordination.coordinator

    @property
    def cost(self) -> CostModel:
        """The cost of a message on this job's links."""
        return self.exchanges.starter.cost

    def measured(
        self, cost: CostModel, route: CostModel, links: Mapping[tuple[int, int], CostModel] | None = None
    ) -> None:
        """The links are measured. Ways between nodes are chosen by `route` and `links` (each link by its two nodes, the
        lower first, where some are far), which are the same on all of them."""
        self.exchanges.starter.measured(cost, route, dict(links or {}))

    # --- from the local workers ---------------------------------------------------------------------------------------

    def worker_handlers(self) -> Handlers:
        """Returns the handlers of local workers' requests, each called with the worker's connection and the message."""
        return {
            wire.Ready: lambda worker, ready: self.ready(worker.rank, ready),
            wire.Submit: lambda worker, submit: self.submit(
                worker.rank,
                submit,
                None if submit.place is None else worker.operand(submit.place, _nbytes(submit.signature)),
                None if submit.into is None else partial(worker.operand, submit.into),
            ),
            wire.SendTo: lambda worker, send: self.messages.send(worker.rank, send, _operand_of(worker, send)),
            wire.ReceiveFrom: lambda worker, asked: self.messages.receive(
                worker.rank, asked, _operand_of(worker, asked)
            ),
            **self.groups.worker_handlers(),
            wire.Propose: lambda worker, asked: self.propose(worker.rank, asked.handle, asked.proposal),
            wire.AwaitsAnswers: lambda worker, waits: self.homes.occupied.awaits_answers(worker.rank, waits.plan),
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

    def submit(
        self, rank: int, submit: wire.Submit, memory: Operand | None, into: Callable[[int], Operand] | None = None
    ) -> None:
        """A worker submits an operation.

        Args:
            memory: its tensor's bytes (uint8), unless they are in the message.
            into: returns so many bytes of where the result goes, if that is somewhere else.
        """
        self.exchanges.submit(rank, submit, memory, into)

    def propose(self, rank: int, handle: int, proposal: wire.Proposal) -> None:
        """A worker asks for a plan."""
        self._proposals.propose(rank, handle, proposal)
        self.homes.occupied.look(rank)

    def add_plan_memory(self, rank: int, plan: int, memory: Array) -> None:
        """A worker's arena has a segment (its bytes, uint8) for the buckets of a plan."""
        self._plans.add_memory(rank, plan, memory)

    def drop_plan_memory(self, rank: int, plan: int) -> None:
        """A worker has dropped that segment."""
        self._plans.drop_memory(rank, plan)

    def ready(self, rank: int, ready: wire.Ready) -> None:
        """A worker's part of a planned bucket is in the arena."""
        state, bucket, part = self._plans.part(rank, ready)
        self._trace.record(Kind.READY, f"bucket {ready.bucket}", part.values.nbytes, ready.clock, ready.plan, peer=rank)
        progress = self.progress[rank]
        progress.steps += not ready.bucket
        progress.parts += 1
        route: Route = self.homes if state.at_homes else self.exchanges
        route.post(rank, state, bucket, part)

    def staleness(self, rank: int, handle: int) -> None:
        """A worker asks how stale contributions have been."""
        self._outside.to_worker(rank, wire.Done(handle, json.dumps(self.homes.statistics()).encode()))

    def depart(self, ranks: Sequence[int]) -> None:
        """Ranks have left in good order, here or elsewhere."""
        self.participants.departed.update(ranks)
        for section in self._sections:
            section.gone(ranks)

    def why_not_without(self, losses: Sequence[wire.Loss]) -> str:
        """Returns why this job cannot go on without these nodes and workers, as far as is known here; empty if it can.

        A node that has no part in any plan leaves that to those that have, unless it coordinates and there is no plan
        yet: then nothing says that the job can.
        """
        if self.coordinator is not None and not (self.coordinator.has_plans or any(self._plans)):
            return "pending operations need every rank"
        nodes = {loss.node for loss in losses if loss.rank is None}
        workers = {loss.rank for loss in losses if loss.rank is not None}
        return self._plans.why_not_without(nodes, workers.union(*(self.topology.ranks[node] for node in nodes)))

    def view_begins(self, view: wire.View, coordinator: int) -> None:
        """Nodes or workers have been declared lost, and a node coordinates that may be another one than before."""
        new = {}
        for loss in view.lost:
            ranks = self.topology.ranks[loss.node] if loss.rank is None else (loss.rank,)
            new.update({rank: loss.why for rank in ranks if rank not in self.participants.lost})
        self._trace.record(Kind.VIEW, "", len(view.nodes), view.number)
        self.participants.lost_nodes.update(loss.node for loss in view.lost if loss.rank is None)
        self.participants.lose(new)
        for section in self._sections:
            section.gone(new)
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
            (*self.operations.latest(), *proposals.refused),
            proposals.last,
            proposals.made,
            agreement.unanswered,
            agreement.disputed,
            proposals.unanswered,
        )

    def join(self, rank: int) -> None:
        """A local rank has joined: what waits for it goes on without it."""
        for node in self._context.other_nodes():
            self._outside.to_node(node, wire.Joined(rank, self.participants.joins))
        self._joined(rank)

    def _joined(self, rank: int) -> None:
        self.participants.joined.append(rank)
        for section in self._sections:
            section.gone([rank], joined=True)
        self._coordination.joined()

    # --- from the peers -----------------------------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        """Returns the handlers of the peers' messages about operations."""
        return {
            **self.exchanges.handlers(),
            **self.homes.handlers(),
            **self.snapshots.handlers(),
            **self.messages.handlers(),
            wire.Verdict: partial(self._decided, self._agreement.verdict),
            wire.PlanVerdict: partial(self._decided, self._plan_decided),
            wire.OpFailed: self._failed_elsewhere,
            wire.Settled: self._settled,
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

    def _decided(self, take: Callable[[Any], None], node: int, message: wire.PeerMessage) -> None:
        """The coordinator has decided something."""
        if self._coordination.takes(node):
            take(message)

    def _plan_decided(self, verdict: wire.PlanVerdict) -> None:
        self._proposals.verdict(verdict)
        self.homes.occupied.look_again()

    def _failed_elsewhere(self, node: int, message: wire.OpFailed) -> None:
        self.operations.here(message.key, message.error, message.missing)
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
        """Time has passed: ends waits that are too long. Called about once a second while anything is under way."""
        self._stalls.tick()
        self.homes.tick()
        self.messages.reports.tick()

    def fail_job(self, error: str) -> None:
        """The job cannot go on: everything under way, and everything later, fails with this sentence."""
        if self.operations.failure:
            return
        self.operations.failure = error
        self.handlers = self._questions.handlers()
        self._proposals.clear()
        for section in self._sections:
            section.fail(error)

    def when_quiet(self, then: Callable[[], None]) -> None:
        """Calls `then` when no job of an operation, failed or not, is in the kernel pool: at once, or later."""
        self._work.when_all_quiet(then)

    def end(self, error: str) -> None:
        """This membership epoch is over elsewhere: everything fails with this sentence, and the job may go on."""
        for section in self._sections:
            section.end(error)
        self._proposals.end(error)
        self.fail_job(error)

    @property
    def idle(self) -> bool:
        """True if nothing is under way that a tick could end."""
        return all(section.idle for section in self._sections) and not self._proposals.waiting

    @property
    def quiet_seconds(self) -> float:
        """Seconds since an operation between ranks has begun or gone on."""
        return self._outside.clock() - max(
            (operation.since for operation in self.operations.under_way.values()), default=-math.inf
        )

    def survey(self, everyone: bool, then: Callable[[Survey], None]) -> None:
        """Asks all nodes for waits between ranks; `everyone`: and also for places of ranks that are not waited for."""
        self._questions.survey(everyone, then)

    def under_way(self, key: OpKey | None) -> list[wire.Waiting]:
        """Returns the waits here; only those with this key, if there is one."""
        messages = self.messages.reports.under_way()
        return [*self._stalls.under_way(key), *(one for one in messages if key in (None, one.key))]

    def record_plans(self) -> None:
        """Records the active plans again: their first records may be overwritten by now."""
        for state in self._plans:
            record_plan(self._trace, state.plan)

    def counts(self) -> tuple[int, int, int]:
        """Operations that are complete here, their bytes, and operations that are not."""
        return (
            self.operations.count + self.homes.meters.version_lag.count,
            self.operations.nbytes,
            len(self.operations.under_way),
        )

    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that would have been sent to other nodes without compression, and that were, as far as it counts."""
        return self._plans.traffic()

    def statistics(self) -> dict[str, object]:
        """Operations `under_way` and `completed`, their `bytes` on this node, the active `plans`, and what of
        operations that peers have not reached may wait there, and is held back (`ahead`),
        `foreign_chunks` of other membership epochs, and the `scratch` memory of planned buckets."""
        return {
            "under_way": len(self.operations.under_way),
            "completed": self.operations.count,
            "bytes": self.operations.nbytes,
            "plans": self._plans.statistics(),
            "compression": self._plans.compression(),
            "homes": self.homes.statistics(),
            "messages": self.messages.statistics(),
            "ahead": self.exchanges.starter.early.statistics(),
            "foreign_chunks": self.exchanges.foreign,
            "scratch": self.exchanges.admission.statistics(),
            "process_sets": self.participants.statistics(),
            "latency_seconds": self.cost.latency,
            "seconds_per_byte": self.cost.seconds_per_byte,
            "route_latency_seconds": self.exchanges.starter.route.latency,
            "route_seconds_per_byte": self.exchanges.starter.route.seconds_per_byte,
            "coordinator": self._coordination.statistics(),
            "coordination": self._coordination.state(),
        }

    # --- OperationOwner -----------------------------------------------------------------------------------------------

    def advance(self, operation: Operation) -> None:
        """Something has changed about an operation that has not begun: goes on if it can."""
        self.exchanges.advance(operation)

    def disagree(self, operation: Operation) -> None:
        """The ranks do not agree about an operation."""
        self._stalls.disagree(operation)

    def limit(self, operation: Operation) -> None:
        """An operation fails when its time is up."""
        self._stalls.limit(operation)

    def operation_over(self, completed: OpKey | None) -> None:
        """An operation is over, which others may have waited for; None: it has failed."""
        if self.homes.occupied.plans and completed is not None:
            self.homes.operation_completed(wire.mark(completed))
        if self.participants.joined:
            self._agreement.one_less()
            self.exchanges.one_less()
        self.exchanges.make_room(completed)
        if self.homes.occupied.plans:
            self.homes.occupied.look_again()

    def _operations_of(self, rank: int) -> Iterator[int]:
        """Yields the marks (`wire.mark`) of the operations and proposals in which a local rank waits. A rank that has
        joined is not expected by any rank, and so its join is left out."""
        for operation in self.operations.under_way.values():
            if rank in operation.parts and operation.kind != "join":
                yield wire.mark(operation.key)
        for (process_set, group, clock), ranks in self._proposals.waiting.items():
            if rank in ranks:
                yield wire.mark(OpKey(process_set, 0, f"plan of {group}", clock))


def _operand_of(worker: WorkerLink, asked: wire.SendTo | wire.ReceiveFrom) -> Operand | None:
    """Returns the memory of a message at a worker; None: it travels with the worker's message."""
    return None if asked.place is None else worker.operand(asked.place, asked.nbytes)


def _nbytes(signature: wire.Signature) -> int:
    """Bytes of a tensor; 0 where its dtype does not exist, which `Engine.submit` refuses."""
    return math.prod(signature.shape) * DTYPES[signature.dtype].itemsize if signature.dtype in DTYPES else 0
