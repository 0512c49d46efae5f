"""The operations of one node: each from the first sign of it to the answers of the workers, and all together. No I/O.

An `Operation` goes through the `OperationState`s in their order. Each of its methods that moves it on checks that it
may. Jobs on threads may outlive an operation that fails; its end then waits for them.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Protocol

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.core.traceback_format import quoted
from fusion_rt.host.cores import threads_for
from fusion_rt.tracing.format import Kind
from fusion_rt.wire import OpKey
from fusiond.buckets.plans import UNTUNED, BucketState, PlanState
from fusiond.buckets.recipes import Recipe
from fusiond.collectives.base import Array, Exchange, Job
from fusiond.core.contribution import Contribution
from fusiond.core.participants import Members
from fusiond.core.result import Result
from fusiond.core.tracing import About, about_key, recorded_jobs
from fusiond.operations.context import Context
from fusiond.operations.node_parts import NodeParts
from fusiond.operations.staging import Staging
from fusiond.operations.thread_work import INLINE_WORK, PLAIN_WORK, ThreadWork
from fusiond.transport.flow_control import FlowPort

_HANDED_OVER = 256  # the latest of them that the coordinator of a new view is told
_REMEMBERED = 1024  # failed operations kept so that late submissions and chunks meet the same error
_COMPLETED = 4096  # completed ones that are kept, because other nodes may still wait for them and ask


class OperationState(IntEnum):
    """The states of an operation on one node, in the order in which it goes through them.

    Attributes:
        GATHERING: the parts of local members come, and maybe chunks of peers, which wait.
        ASKED: all local parts are there, and the coordinator has been asked whether the ranks agree.
        PREPARING: its exchange is there, and its local part is done, by threads if that is long.
        EXCHANGING: its exchange takes chunks.
        WRITING: its exchange is over, and threads write the results to where the workers want them.
        DELIVERED: the workers have their results.
        FAILED: the workers have an error, or get it as soon as no thread works for the operation.
    """

    GATHERING = 0
    ASKED = 1
    PREPARING = 2
    EXCHANGING = 3
    WRITING = 4
    DELIVERED = 5
    FAILED = 6


_GATHERING, _ASKED, _PREPARING, _EXCHANGING, _WRITING, _DELIVERED, _FAILED = OperationState
_BEFORE = {
    _ASKED: (_GATHERING,),
    _PREPARING: (_GATHERING, _ASKED),
    _EXCHANGING: (_PREPARING,),
    _WRITING: (_EXCHANGING,),
    _DELIVERED: (_GATHERING, _EXCHANGING, _WRITING),  # at once, where nothing is exchanged
    _FAILED: (_GATHERING, _ASKED, _PREPARING, _EXCHANGING, _WRITING),
}
"""The states from which an operation gets to each state."""


@dataclass(slots=True, eq=False)
class Operation:
    """One operation under way on this node.

    Attributes:
        owner: all operations of this node.
        begun: when it began here (s); `since`: when it last made progress.
        about: it, as records have it.
        parts: of the local members, by rank.
        recipe: of the first part that came; None for a planned bucket.
        planned: the plan and the bucket that it is of, once the plan is active here; None for a tensor outside a plan.
        disputed: submissions or a peer's data do not fit, and the coordinator has been told: it does not begin here.
        digest: of the signature that goes into its chunks.
        peers_digest: the one that came from peers, when nothing has come from local members.
        port: its way to the other nodes, as soon as it begins; `exchange`: once its local part is under way.
        busy: threads have jobs of it: its exchange is not touched meanwhile, and chunks wait in `early`.
        shared: the result that goes to workers in messages.
        answer: told to workers about an operation without data.
        early: chunks that wait for its exchange, with their sender's node.
        askers: nodes that are to be told when it is reached here, since they hold chunks back.
        heard: when a chunk last came from a node (s).
        seconds: time-out that a local member has set, the shortest; 0: none. `until`: when it is up (s).
        is_here: nothing of it is in workers' own memory, which only threads may touch: it may have to be paged in.
        staging: brings local contributions to the exchange's memory, and results back, if they do not
            lie there: scratch memory that stands in for workers' own, or a node's parts.
        uses_lane: the work of the chunk that its exchange is taking is for a thread; `beside_it`: that work.
        lanes: chunks whose work threads do.
    """

    owner: NodeOperations
    key: OpKey
    members: Members
    begun: float
    since: float
    about: About
    state: OperationState = _GATHERING
    parts: dict[int, Contribution] = field(default_factory=dict)
    recipe: Recipe | None = None
    planned: tuple[PlanState, BucketState] | None = None
    disputed: bool = False
    digest: int = 0
    peers_digest: int = 0
    exchange: Exchange | None = None
    port: FlowPort | None = None
    busy: bool = False
    shared: Array | None = None
    answer: tuple[int, ...] = ()
    early: deque[tuple[int, wire.Chunk, memoryview]] = field(default_factory=deque)
    askers: set[int] = field(default_factory=set)
    heard: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    until: float = math.inf
    is_here: bool = True
    staging: Staging | NodeParts | None = None
    uses_lane: bool = False
    beside_it: tuple[Job, Callable[[], None]] | None = None
    lanes: int = 0
    _error: wire.OpFailed | None = None

    @property
    def kind(self) -> wire.Kind:
        """The collective; as far as it is known here."""
        return "allreduce" if self.recipe is None else self.recipe.signature.kind

    @property
    def what(self) -> str:
        """The operation, as it is named in messages to people."""
        return self.key.in_words

    @property
    def tuning(self) -> wire.Tuning:
        """The tuning of its plan."""
        return UNTUNED if self.planned is None else self.planned[0].tuning

    @property
    def has_begun(self) -> bool:
        """True once its exchange is there."""
        return self.state >= _PREPARING

    @property
    def takes_chunks(self) -> bool:
        """True once its exchange has started. While threads work for it, chunks wait nevertheless."""
        return self.state >= _EXCHANGING

    @property
    def local_parts(self) -> list[Contribution]:
        """The parts that local members have submitted, in order of local_rank."""
        return [self.parts[rank] for rank in self.members.local if rank in self.parts]

    def _enter(self, state: OperationState) -> None:
        assert self.state in _BEFORE[state], f"{self.what} goes from {self.state.name} to {state.name}"
        self.state = state

    # --- until it begins ----------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """The coordinator is asked about it."""
        self._enter(_ASKED)

    def lose(self, members: Members) -> None:
        """Some of its ranks are lost, and it has not begun: these are left."""
        self.members = members
        self.early = deque(early for early in self.early if early[0] in members.nodes)

    def open(self, port: FlowPort) -> None:
        """Gets its way to the other nodes."""
        self.port = port
        for node in {node for node, _, _ in self.early}:
            port.reached(self.members.nodes.index(node))

    def run(self, exchange: Exchange, is_plain: bool, compiles: Job | None = None, first: Job | None = None) -> None:
        """Does its local part, and then starts its exchange, whose port is open.

        Args:
            is_plain: the local part takes little more than its memory does.
            compiles: is done before all else, and never by the event loop: it would send no heartbeats meanwhile.
            first: is done before the local part.
        """
        assert self.port is not None
        context = self.owner.context
        self.port.lends = exchange.lends
        nbytes: float = exchange.local_nbytes if self.is_here else math.inf
        small = nbytes <= (PLAIN_WORK if is_plain and self.port.nodes == 1 else INLINE_WORK)
        nbytes = 0 if small else nbytes
        threads = self.tuning.threads or threads_for(exchange.local_nbytes, context.threads)
        jobs = exchange.jobs(1 if small else threads)
        self.exchange = exchange
        self._enter(_PREPARING)
        stages: deque[tuple[Sequence[Job], float]] = deque()
        if compiles is not None:
            stages.append(([compiles], math.inf))
        if first is not None:
            stages.append(([first], nbytes if jobs else 0))
        if self.staging is not None:
            nbytes = max(nbytes, self.staging.nbytes)
            if self.staging.reads:
                stages.append((self.staging.reads, nbytes))
        if jobs:
            stages.append((recorded_jobs(jobs, context.trace, self.about, exchange.local_nbytes), nbytes))
        self._guarded(partial(self._next_stage, stages))

    def _next_stage(self, stages: deque[tuple[Sequence[Job], float]]) -> None:
        """Does the next jobs of its local part; after the last ones its exchange starts."""
        if stages:
            jobs, nbytes = stages.popleft()
            self._do(jobs, nbytes, partial(self._next_stage, stages))
        else:
            self._start()

    def _start(self) -> None:
        """The local part is done: the exchange starts, and takes the chunks that have come before."""
        assert self.exchange is not None
        self._enter(_EXCHANGING)
        self.since = self.owner.context.outside.clock()
        self._tell_askers()
        self.exchange.start()
        self._finish_if_over()
        self._take_early()

    # --- threads ------------------------------------------------------------------------------------------------------

    def _do(self, jobs: Sequence[Job], nbytes: float, then: Callable[[], None]) -> None:
        """Does jobs that touch so many bytes, on threads if that is long; then calls `then`, if it has not failed."""
        self.busy = True
        self.owner.work.do(self.key.plan, jobs, nbytes, partial(self._done, then))

    def _done(self, then: Callable[[], None], error: BaseException | None) -> None:
        self.busy = False
        if self.state is _FAILED:  # in the meantime
            self._give_back_if_quiet()
        elif error is not None:
            self.owner.failed_by(self, error)
        else:
            self._guarded(then)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Does something; if it raises an exception, the operation fails."""
        try:
            act()
        except Exception as error:
            self.owner.failed_by(self, error)

    def work(self, nbytes: int, job: Job, then: Callable[[], None]) -> None:
        """Runs a job of its exchange, which has started; see `Port.work`."""
        if nbytes <= PLAIN_WORK:
            job()
            then()
        else:
            self._do([job], math.inf, partial(self._worked, then))

    def _worked(self, then: Callable[[], None]) -> None:
        self.since = self.owner.context.outside.clock()
        then()
        self._finish_if_over()
        self._take_early()

    # --- chunks and credit --------------------------------------------------------------------------------------------

    def receive(self, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        """Gives its exchange, which has started and is not busy, a chunk."""
        assert self.exchange is not None
        assert self.port is not None
        context = self.owner.context
        record = context.trace.record
        self.since = self.heard[node] = context.outside.clock()
        position = self.members.nodes.index(node)
        name, clock, plan = self.about
        nbytes = len(payload)
        self.uses_lane = nbytes >= INLINE_WORK and self.exchange.lanes and context.lanes
        try:
            if self.uses_lane:
                self.exchange.receive(position, chunk, payload)
            else:
                record(Kind.REDUCE_BEGIN, name, nbytes, clock, plan, 0, node)
                self.exchange.receive(position, chunk, payload)
                record(Kind.REDUCE_END, name, nbytes, clock, plan, 0, node)
                self._taken(node, position, nbytes)
        except Exception as error:
            self.owner.failed_by(self, error)
            return
        if self.beside_it is not None:
            (job, then), self.beside_it = self.beside_it, None
            self.lanes += 1
            jobs = recorded_jobs([job], context.trace, self.about, nbytes, node)
            self.owner.work.do(plan, jobs, math.inf, partial(self._worked_beside, then, node, position, nbytes))

    def beside(self, job: Job, then: Callable[[], None]) -> None:
        """Does the work of the chunk that it receives, or leaves it to a thread; see `Port.beside`."""
        if self.uses_lane:
            self.beside_it = job, then
        else:
            job()
            then()

    def _worked_beside(
        self, then: Callable[[], None], node: int, position: int, nbytes: int, error: BaseException | None
    ) -> None:
        self.lanes -= 1
        if self.state is _FAILED:  # in the meantime
            self._give_back_if_quiet()
        elif error is not None:
            self.owner.failed_by(self, error)
        else:
            self.since = self.owner.context.outside.clock()
            self._guarded(partial(self._go_on_beside, then, node, position, nbytes))

    def _go_on_beside(self, then: Callable[[], None], node: int, position: int, nbytes: int) -> None:
        then()
        self._taken(node, position, nbytes)

    def _taken(self, node: int, position: int, nbytes: int) -> None:
        """Its exchange has taken a chunk."""
        assert self.port is not None
        name, clock, plan = self.about
        self.owner.context.trace.record(Kind.TAKEN, name, nbytes, clock, plan, 0, node)
        self.port.consumed(position, nbytes)
        self._finish_if_over()  # now, since workers are answered when it is recorded that the last chunk was taken

    def _take_early(self) -> None:
        """Gives its exchange the chunks that wait for it, until it works on one."""
        while self.early and not self.busy and self.state is _EXCHANGING:
            self.receive(*self.early.popleft())

    def credit(self, node: int, chunks: int) -> None:
        """A node has consumed so many more of its chunks."""
        if self.port is not None and node in self.members.nodes:
            self.port.credit(self.members.nodes.index(node), chunks)
            self._guarded(self._finish_if_over)

    def reached(self, node: int) -> bool:
        """A node has reached it. Returns whether it matters here: its port is open, and the node a member."""
        if self.port is None or node not in self.members.nodes:
            return False
        self.port.reached(self.members.nodes.index(node))
        return True

    def asked_by(self, node: int) -> None:
        """A node asks to be told when it is reached here."""
        self.askers.add(node)
        if self.takes_chunks:
            self._tell_askers()

    def _tell_askers(self) -> None:
        """Tells the nodes that have asked that it is reached here, or over."""
        while self.askers:
            self.owner.context.outside.to_node(self.askers.pop(), wire.CaughtUp(self.key))

    def traffic(self, node: int, now: float) -> tuple[wire.Traffic, ...]:
        """Returns the traffic between this node and its peers, once the exchange is there; now in seconds."""
        if self.port is None:
            return ()
        found = []
        for position, peer in enumerate(self.members.nodes):
            if peer != node:
                sent, received, unsent = self.port.traffic(position)
                received += sum(sender == peer for sender, _, _ in self.early)
                found.append(wire.Traffic(peer, sent, received, unsent, now - self.heard.get(peer, self.begun)))
        return tuple(found)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _finish_if_over(self) -> None:
        """Delivers the results, if the exchange has finished and nothing of it is borrowed any more."""
        assert self.exchange is not None
        assert self.port is not None
        if not self.port.is_over or self.busy or self.state is not _EXCHANGING:
            return
        if self.exchange.results:
            self._check_results(self.exchange.results)
        if self.staging is None:
            self.deliver(self.exchange.results)
        else:
            self._enter(_WRITING)
            jobs = self.staging.writes(self.owner.context.threads)
            self._do(jobs, self.staging.nbytes, partial(self.deliver, self.exchange.results))

    def _check_results(self, results: Sequence[Result]) -> None:
        """Raises `TypeError` where an exchange has not given each worker the result that it reads."""
        parts, name = self.local_parts, type(self.exchange).__name__
        if len(results) not in (1, len(parts)):
            raise TypeError(f"{name} has {len(results)} results for {len(parts)} local members")
        if any(part.place is not None and results[i % len(results)].segment for i, part in enumerate(parts)):
            raise TypeError(
                f"{name} has a result in memory of its own, but the worker awaits it at `part.place`; "
                "use Result.allocate(nbytes, place=part.place)"
            )

    def deliver(self, results: Sequence[Result]) -> None:
        """Gives workers their results: nothing of it is under way any more."""
        self._enter(_DELIVERED)
        self.owner.remove(self)
        context = self.owner.context
        name, clock, plan = self.about
        context.trace.record(Kind.RUN_END, name, time.process_time_ns(), clock, plan)
        if results:
            self._answer_each(results)
        else:
            inline = None if self.shared is None else self.shared.tobytes()
            for rank in self.members.local:
                if part := self.parts.get(rank):
                    context.trace.record(Kind.ANSWERED, name, 0, clock, plan, 0, rank)
                    done = wire.Done(part.handle, inline if part.place is None else None, self.answer)
                    context.outside.to_worker(rank, done)
        self._close()
        self.owner.completed(self)

    def _answer_each(self, results: Sequence[Result]) -> None:
        """Gives workers results that do not lie where the inputs lay: to each its own, or to all the only one."""
        context = self.owner.context
        name, clock, plan = self.about
        for index, rank in enumerate(rank for rank in self.members.local if rank in self.parts):
            part = self.parts[rank]
            context.trace.record(Kind.ANSWERED, name, 0, clock, plan, 0, rank)
            result = results[index if len(results) > 1 else 0]
            small = None if result.segment or part.place is not None else result.array.tobytes()
            nbytes = result.segment.nbytes if result.segment else 0
            context.outside.to_worker(rank, wire.Done(part.handle, small, result.sizes, nbytes), result)
        for result in results:
            if result.segment is not None:
                result.segment.close()

    def fail(self, error: str, missing: Sequence[int] = ()) -> None:
        """Fails: its workers are told, once no thread writes into their memory, and the codec's, any more.

        Args:
            missing: the ranks that had not submitted it when its time was up.
        """
        self._error = wire.OpFailed(self.key, error, tuple(missing))
        self.drop()

    def drop(self) -> None:
        """Ends without a word to the workers, unless it `fail`s: the job cannot go on."""
        has_started = self.takes_chunks
        self._enter(_FAILED)
        self._give_back_if_quiet(has_started)

    def _give_back_if_quiet(self, has_started: bool = True) -> None:
        """It has failed: when no thread works for it, gives codecs and workers their memory back."""
        if self.busy or self.lanes:
            return
        if has_started and self.exchange is not None:
            self.exchange.abandon()
        if self._error is None:
            return
        borrows = self.port is not None and self.port.borrows
        self._close()
        refuse = partial(self._refuse, self._error)
        if borrows:  # chunks lie in the workers' memory, and others may complete the operation with them
            self.owner.context.outside.when_received(refuse)
        else:
            refuse()

    def _refuse(self, failed: wire.OpFailed) -> None:
        for rank, part in self.parts.items():
            if part.selected is not None and self.exchange is None:
                part.selected.disown()
            self.owner.context.outside.to_worker(rank, wire.Failed(part.handle, failed.error, failed.missing))

    def _close(self) -> None:
        """Has the exchange be freed with the last reference to it.

        The port's way back to the operation would close a circle. Python's garbage collector, which counts objects and
        not bytes, would leave buckets' scratch memory in it for many steps.
        """
        if self.port is not None:
            self.port.close()


class OperationOwner(Protocol):
    """The engine, as operations and the parts that deal with them see it."""

    def advance(self, operation: Operation) -> None:
        """Something has changed about an operation that has not begun: goes on if it can."""

    def disagree(self, operation: Operation) -> None:
        """The ranks do not agree about an operation."""

    def limit(self, operation: Operation) -> None:
        """An operation fails when its time is up."""

    def join(self, rank: int) -> None:
        """A local rank has joined: what waits for it goes on without it."""

    def operation_over(self, completed: OpKey | None) -> None:
        """An operation is over, which others may have waited for; None: it has failed."""


class NodeOperations:
    """The operations of one engine: those under way, and the outcomes of those that are over.

    Args:
        context: the engine's surroundings.
        work: the threads.
        engine: owns the operations.

    Attributes:
        under_way: by key.
        failure: why the job cannot go on; empty if it can.
        count: how many are completed here; `nbytes`: of their contributions on this node.
    """

    def __init__(self, context: Context, work: ThreadWork, engine: OperationOwner) -> None:
        self.context = context
        self.work = work
        self.engine = engine
        self.under_way: dict[OpKey, Operation] = {}
        self.failure = ""
        self.count = 0
        self.nbytes = 0
        self._failed: OrderedDict[OpKey, str] = OrderedDict()
        # Completed here, maybe not yet elsewhere; None: the ranks here had joined, and submitted nothing.
        self._completed: OrderedDict[OpKey, wire.Signature | None] = OrderedDict()

    def begin(self, key: OpKey, members: Members) -> Operation:
        """Returns a new operation, which is under way from now on."""
        now = self.context.outside.clock()
        operation = self.under_way[key] = Operation(self, key, members, now, now, about_key(key))
        return operation

    def why(self, key: OpKey) -> str:
        """Returns why nothing may be submitted under this key; empty if it may."""
        return self.failure or self._failed.get(key, "")

    def is_over(self, key: OpKey) -> bool:
        """Returns whether an operation has failed or completed here, as far as that is remembered."""
        return key in self._failed or key in self._completed

    # --- those that complete ------------------------------------------------------------------------------------------

    def remove(self, operation: Operation) -> None:
        """An operation's results are there: nothing of it is under way any more."""
        del self.under_way[operation.key]

    def completed(self, operation: Operation) -> None:
        """The workers have their results."""
        self.count += 1
        self.nbytes += sum([part.values.nbytes for part in operation.parts.values()])
        if len(operation.members.nodes) > 1:
            part = next(iter(operation.parts.values()), None)
            self._completed[operation.key] = None if part is None else part.signature
            if len(self._completed) > _COMPLETED:
                self._completed.popitem(last=False)
        self.engine.operation_over(operation.key)

    def completed_as(self, key: OpKey) -> wire.Signature | None:
        """Returns the signature that ranks here submitted of an operation that completed here; None if they submitted
        none, or it is not known."""
        return self._completed.get(key)

    def clocks(self) -> dict[int, dict[str, int]]:
        """Returns the clocks of the buckets that were completed last, as far as they are remembered, by plan."""
        found: dict[int, dict[str, int]] = {}
        for key in self._completed:
            if key.plan:
                of_plan = found.setdefault(key.plan, {})
                of_plan[key.name] = max(key.clock, of_plan.get(key.name, 0))
        return found

    # --- those that fail ----------------------------------------------------------------------------------------------

    def latest(self) -> tuple[wire.OpFailed, ...]:
        """Returns the latest operations that have failed."""
        return tuple(wire.OpFailed(key, error) for key, error in list(self._failed.items())[-_HANDED_OVER:])

    def refuse(self, rank: int, handle: int, error: str) -> None:
        """Tells a worker that its submission has failed."""
        self.context.outside.to_worker(rank, wire.Failed(handle, error))

    def everywhere(self, key: OpKey, error: str, missing: Sequence[int] = ()) -> None:
        """An operation fails on all ranks; `missing`: those that had not submitted it when its time was up."""
        for node in self.context.participants.members(key.process_set).nodes:
            if node != self.context.node:
                self.context.outside.to_node(node, wire.OpFailed(key, error, tuple(missing)))
        self.here(key, error, missing)

    def here(self, key: OpKey, error: str, missing: Sequence[int] = ()) -> None:
        """An operation fails on this node's ranks, also on those that have not submitted it yet."""
        self._failed.setdefault(key, error)
        while len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)
        what = about_key(key)
        self.context.trace.record(Kind.FAILED, what.name, 0, what.clock, what.plan)
        operation = self.under_way.pop(key, None)
        if operation is not None:
            for node in operation.askers:
                self.context.outside.to_node(node, wire.CaughtUp(key))
            operation.fail(error, missing)
        self.engine.operation_over(None)

    def end(self, error: str) -> None:
        """Fails all that are under way with this sentence."""
        for key, operation in list(self.under_way.items()):
            self.here(key, f"{operation.what}: {error}")

    def drop(self) -> None:
        """Forgets all that are under way: the job cannot go on."""
        for operation in self.under_way.values():
            operation.drop()
        self.under_way.clear()

    def failed_by(self, operation: Operation, error: BaseException) -> None:
        """An operation's jobs or its exchange raised this."""
        context = self.context
        if isinstance(error, FusionError):
            self.everywhere(
                operation.key, f"{operation.what} failed on node {context.node} (host {context.host}): {error}"
            )
        else:  # a bug: say where it is
            text = quoted("".join(traceback.format_exception(error)))
            context.outside.job_failed(f"the daemon of host {context.host} failed: {text}")

    def home_failed(self, error: BaseException) -> None:
        """A home raised this."""
        text = str(error) if isinstance(error, FusionError) else quoted("".join(traceback.format_exception(error)))
        self.context.outside.job_failed(f"a home on host {self.context.host} failed: {text}")

    def kernels_failed(self, what: str, error: BaseException) -> None:
        """The kernels cannot be had that something needs."""
        self.context.outside.job_failed(f"the daemon of host {self.context.host} cannot use {what}: {error}")
