"""The record of an operation on this node, and the executor that runs it as an `Exchange`. No I/O."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fusion_rt import wire
from fusion_rt.codecs import BucketCodec
from fusion_rt.core.topology import Topology
from fusion_rt.kernels import cpu
from fusion_rt.settings import Settings
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import NULL, Instrument
from fusion_rt.wire import OpKey
from fusiond import algorithms
from fusiond.algorithms.exchange import Algorithm, Work
from fusiond.buckets.codec_state import open_bucket
from fusiond.buckets.plans import UNTUNED, BucketState, PlanState
from fusiond.buckets.recipes import Recipe, collective_exchange, contributions_of, outputs_of
from fusiond.buckets.traced_codecs import record_codec
from fusiond.collectives.base import Array, Exchange, Job, Port, Reducer
from fusiond.collectives.cost import CostModel
from fusiond.core.contribution import Contribution
from fusiond.core.effects import Effects
from fusiond.core.participants import Members
from fusiond.core.result import Result
from fusiond.core.tracing import About, about_key, recorded_jobs
from fusiond.operations.staging import Scratch, Staging
from fusiond.operations.thread_work import INLINE_WORK, ThreadWork
from fusiond.transport.flow_control import FlowPort


@dataclass(slots=True)
class Operation:
    """One operation under way on this node.

    Attributes:
        since: when it last made progress (s); `begun`: when it began here.
        about: it, as records have it.
        parts: of the local members, by rank.
        recipe: of the first part that came; None for a planned bucket.
        planned: the plan and the bucket that it is of, once the plan is active here; None for a tensor outside a plan.
        asked: the coordinator has been asked.
        digest: of the signature that goes into its chunks.
        peers_digest: the one that came from peers, when nothing has come from local members.
        shared: the result that goes to workers in messages.
        answer: what workers are told about an operation without data.
        early: chunks that came before it could start, with their sender's node; `early_from`: how many of each node.
        disputed: it cannot start here: submissions or a peer's data do not fit.
        heard: when a chunk last came from a node (s).
        taking: the exchange is taking a chunk; `over`: with that one it has finished.
        working: the kernel pool has jobs of it.
        seconds: time-out that a local member has set, the shortest; 0: none. `until`: when it is up (s).
        failed: is called when it has failed, and its jobs have ended.
        is_here: nothing of it is in workers' own memory, which only threads may touch: it may have to be paged in.
        staging: the scratch memory that stands in for workers' own memory, if any does.
    """

    key: OpKey
    members: Members
    since: float
    begun: float = field(init=False)
    about: About = field(init=False)
    parts: dict[int, Contribution] = field(default_factory=dict)
    recipe: Recipe | None = None
    planned: tuple[PlanState, BucketState] | None = None
    asked: bool = False
    digest: int = 0
    peers_digest: int = 0
    exchange: Exchange | None = None
    port: FlowPort | None = None
    started: bool = False
    shared: Array | None = None
    answer: tuple[int, ...] = ()
    early: deque[tuple[int, wire.Chunk, memoryview]] = field(default_factory=deque)
    early_from: Counter[int] = field(default_factory=Counter)
    disputed: bool = False
    heard: dict[int, float] = field(default_factory=dict)
    taking: bool = False
    over: bool = False
    working: bool = False
    seconds: float = 0.0
    until: float = math.inf
    failed: Callable[[], None] = lambda: None
    dropped: bool = False
    is_here: bool = True
    staging: Staging | None = None

    def __post_init__(self) -> None:
        self.begun = self.since
        self.about = about_key(self.key)

    @property
    def kind(self) -> str:
        """The collective; as far as it is known here."""
        return "allreduce" if self.recipe is None else self.recipe.signature.kind

    @property
    def tuning(self) -> wire.Tuning:
        """The tuning of its plan, if it has one."""
        return UNTUNED if self.planned is None else self.planned[0].tuning

    @property
    def urgency(self) -> int:
        """The urgency for the local member that needs it soonest."""
        return min((part.urgency for part in self.parts.values()), default=0)

    @property
    def what(self) -> str:
        """The operation, as it is named in messages to people."""
        return self.key.in_words

    def traffic(self, node: int, now: float) -> tuple[wire.Traffic, ...]:
        """Returns what has gone between this node and its peers, once the exchange is there; now in seconds."""
        if self.port is None:
            return ()
        found = []
        for position, peer in enumerate(self.members.nodes):
            if peer != node:
                sent, received, unsent = self.port.traffic(position)
                received += sum(sender == peer for sender, _, _ in self.early)
                found.append(wire.Traffic(peer, sent, received, unsent, now - self.heard.get(peer, self.begun)))
        return tuple(found)

    def local(self) -> list[Contribution]:
        """Returns the parts that local members have submitted, in order of local_rank."""
        return [self.parts[rank] for rank in self.members.local if rank in self.parts]


class Executor:
    """Runs exchanges.

    Attributes:
        cost: of messages, as measured, which sizes of chunks follow.
        route: the model by which the way between nodes is chosen.
        links: all of them by their two nodes, where some are far: the order of rings follows from them.

    Args:
        topology, node: who is where, and which node this is.
        settings: sizes of chunks and windows, threads.
        outside: acts for it.
        work: the threads.
        operations: those under way. One that is no longer in it has failed, and nothing more is done about it; one that
            is delivered is taken out.
        delivered: called with an operation when its workers have their results.
        failed: called with an operation and an exception, when its jobs or its exchange raised one.
        trace: what is done is recorded there.
    """

    def __init__(
        self,
        topology: Topology,
        node: int,
        settings: Settings,
        outside: Effects,
        work: ThreadWork,
        operations: dict[OpKey, Operation],
        delivered: Callable[[Operation], None],
        failed: Callable[[Operation, BaseException], None],
        trace: Instrument = NULL,
    ) -> None:
        self._orders: dict[tuple[int, ...], tuple[int, ...]] = {}  # of positions, by nodes
        self._topology = topology
        self._node = node
        self._settings = settings
        self._outside = outside
        self._work = work
        self._operations = operations
        self._delivered = delivered
        self._failed = failed
        self._trace = trace
        self._all_reduce = algorithms.AllReduce()  # of tensors outside a plan
        self._scratch = Scratch()
        self._kernels: set[str] = set()  # names of types of which they are here
        self.measured(CostModel(), CostModel().rounded(), {})

    def measured(self, cost: CostModel, route: CostModel, links: dict[tuple[int, int], CostModel]) -> None:
        """The links are measured: see the attributes of these names."""
        self.cost, self.route, self.links = cost, route, links
        most = self._settings.chunk_bytes
        self._chunk_bytes, self._whole_nbytes = cost.chunk_bytes(most), route.chunk_bytes(most)

    def start_tensor(
        self, operation: Operation, recipe: Recipe, rows: Sequence[int], splits: Sequence[Sequence[int]]
    ) -> None:
        """Starts an operation outside a plan; `rows` and `splits` of all members where it needs them.

        Raises:
            RequestError: the members' sizes do not fit together.
        """
        if recipe.signature.kind == "allreduce":
            codec = open_bucket(recipe.codec, recipe.layout, len(operation.members.nodes))
            tuning = wire.Tuning()
            self._reduce(
                operation, self._all_reduce, recipe.reducer, codec, recipe.layout.elements, recipe.parts, tuning
            )
            return
        local = operation.local() or [nothing(recipe.reducer, recipe.layout.elements)]
        if not operation.is_here and len(operation.members.nodes) > 1:
            root = operation.members.set.ranks.index(recipe.signature.root) if operation.kind == "broadcast" else None
            local = self._stage(operation).parts(local, root)
        outputs, operation.shared = outputs_of(local)
        topology = self._topology
        reduces = recipe.signature.kind in ("reducescatter", "reduce")
        compiles = self._kernels_for(recipe.reducer, recipe.layout.elements) if reduces else None
        self._start(
            operation,
            lambda port: collective_exchange(port, recipe, topology, local, outputs, rows, splits),
            compiles=compiles,
        )

    def start_bucket(self, operation: Operation, state: PlanState, bucket: BucketState) -> None:
        """Starts the operation of a planned bucket.

        Raises:
            RequestError: the local members do not agree about who submits what.
        """
        assert isinstance(state.algorithm, Algorithm)  # one with homes has no exchanges
        tuning = state.plan.tuning or wire.Tuning()
        self._reduce(
            operation, state.algorithm, bucket.reducer, bucket.codec, bucket.bucket.numel, bucket.parts, tuning
        )

    def can_reduce_at_once(self, operation: Operation, recipe: Recipe) -> bool:
        """Returns whether a small all-reduce needs no thread: no kernel has to be compiled, and all of it is here."""
        return operation.is_here and self._kernels_for(recipe.reducer, recipe.layout.elements) is None

    def limits(self, tuning: wire.Tuning) -> tuple[int, int]:
        """Returns the bytes of the largest chunk, and those that may be under way to a peer."""
        settings = self._settings
        chunk_bytes = min(tuning.chunk_bytes or self._chunk_bytes, settings.chunk_bytes)
        return chunk_bytes, tuning.window_bytes or settings.window_bytes

    def reduce_at_once(self, operation: Operation, recipe: Recipe) -> None:
        """A small all-reduce of workers of this node: nothing to exchange, and no thread that would be faster."""
        local = operation.local()
        outputs, operation.shared = outputs_of(local)
        self._trace.record(Kind.RUN_BEGIN, operation.key.name, local[0].values.nbytes, operation.key.clock)
        recipe.reducer.whole([part.values for part in local], outputs)
        self._deliver(operation, ())

    def _reduce(
        self,
        operation: Operation,
        algorithm: Algorithm,
        reducer: Reducer,
        codec: BucketCodec,
        elements: int,
        parts: Sequence[tuple[int, int]],
        tuning: wire.Tuning,
    ) -> None:
        local = operation.local()
        if not local:
            reducer = replace(reducer, prescale=1.0)  # nothing, scaled, would not be nothing in a product
            local = [nothing(reducer, elements)]
        outputs, operation.shared = outputs_of(local)
        contributions, prescaled = contributions_of(local)
        if prescaled:
            reducer = replace(reducer, prescale=1.0)
        sources = [part.values for part in contributions]
        if not operation.is_here and (len(operation.members.nodes) > 1 or reducer.op == "adasum"):
            threads = tuning.threads or self._settings.kernel_threads
            reducer, sources, outputs = self._stage(operation).reduction(reducer, sources, outputs, threads)
        selected = contributions[0].selected if len(contributions) == 1 else None
        factors = operation.parts[min(operation.parts)].rescale if operation.parts else ()
        if not codec.lossless:  # else it does next to nothing
            record_codec(codec, self._trace, operation.about)
        first = partial(codec.scale_residual, factors) if factors else None  # a job that comes before all others
        sparse, dense = self._settings.sparse_route, tuning.exchange or self._settings.dense_route
        ordered = self.links and self._settings.ring_order == "measured"
        order = self._order(tuple(operation.members.nodes)) if ordered else ()
        whole = self._settings.chunk_bytes if dense == "doubling" else self._whole_nbytes

        def exchange(port: Port) -> Exchange:
            work = Work(
                port, reducer, codec, self.route, sources, outputs, parts, sparse, dense, whole, selected, order
            )
            return algorithm.exchange(work)

        compiles = self._kernels_for(reducer, elements)
        self._start(operation, exchange, first, compiles, tuning)

    def _order(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the positions of nodes in the order in which a ring visits them; the same on all of them."""
        from fusiond.transport.distance import ring_order

        if nodes not in self._orders:
            self._orders[nodes] = tuple(nodes.index(node) for node in ring_order(nodes, self.links))
        return self._orders[nodes]

    def _kernels_for(self, reducer: Reducer, elements: int) -> Job | None:
        """Returns a job that loads or compiles the kernel of a reduction, in seconds perhaps; None if it is there."""
        if reducer.dtype.name in self._kernels or not reducer.needs_kernel(elements):
            return None
        if not self._outside.has_kernels(reducer.dtype):
            return partial(cpu.prepare, [reducer.dtype])
        self._kernels.add(reducer.dtype.name)
        return None

    def _start(
        self,
        operation: Operation,
        make: Callable[[Port], Exchange],
        first: Job | None = None,
        compiles: Job | None = None,
        tuning: wire.Tuning | None = None,
    ) -> None:
        """Makes the operation's exchange, does the local part of it, and starts it. What `make` raises, this raises.

        Args:
            first: is done before the local part.
            compiles: is done before that, and never by the event loop: it would send no heartbeats meanwhile.
            tuning: of its plan.
        """
        settings, tuning = self._settings, tuning or wire.Tuning()
        chunk_bytes, window_bytes = self.limits(tuning)
        urgency = operation.urgency
        operation.port = FlowPort(
            operation.key,
            operation.digest,
            operation.members.nodes,
            self._node,
            chunk_bytes,
            window_bytes,
            lambda node, chunk, payload: self._outside.send_chunk(node, chunk, payload, urgency),
            lambda node, chunks: self._outside.to_node(node, wire.Credit(operation.key, chunks)),
            lambda: self._exchange_finished(operation),
            self._trace,
        )
        what = operation.about
        size = next((part.values.nbytes for part in operation.parts.values()), 0)
        self._trace.record(Kind.RUN_BEGIN, what.name, size, what.clock, what.plan)
        operation.exchange = make(operation.port)
        operation.port.lends = operation.exchange.lends
        nbytes: float = operation.exchange.local_nbytes if operation.is_here else math.inf
        small = nbytes <= INLINE_WORK
        jobs = operation.exchange.jobs(1 if small else tuning.threads or settings.kernel_threads)
        jobs = recorded_jobs(jobs, self._trace, what, operation.exchange.local_nbytes)
        before = [job for job in (compiles, first) if job is not None]
        if compiles is not None or (before and jobs and not small) or operation.staging is not None:
            self._do_in_stages(operation, before, jobs, nbytes)
            return
        operation.working = bool(jobs) and not small
        nbytes = nbytes if jobs else 0  # else there is at most a residual to be scaled
        self._work.do(operation.key.plan, [*before, *jobs], nbytes, partial(self._jobs_done, operation))

    def _stage(self, operation: Operation) -> Staging:
        operation.staging = Staging(self._scratch)
        return operation.staging

    def _do_in_stages(self, operation: Operation, before: Sequence[Job], jobs: Sequence[Job], nbytes: float) -> None:
        operation.working = True
        reads = operation.staging.reads if operation.staging else []
        stages = deque(stage for stage in (reads, jobs) if stage)
        then = partial(self._next_stage, operation, stages, nbytes)
        self._work.do(operation.key.plan, [partial(_one_by_one, before)], math.inf, then)

    def _next_stage(
        self, operation: Operation, stages: deque[Sequence[Job]], nbytes: float, error: BaseException | None
    ) -> None:
        """Does the next jobs of an operation, after those that come before them. It may have failed in the meantime."""
        if stages and error is None and self._operations.get(operation.key) is operation:
            jobs = stages.popleft()
            self._work.do(operation.key.plan, jobs, nbytes, partial(self._next_stage, operation, stages, nbytes))
        else:
            self._jobs_done(operation, error)

    def receive(self, operation: Operation, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        """Gives the exchange of an operation that has started a chunk."""
        try:
            self._receive(operation, node, chunk, payload)
        except Exception as error:
            self._failed(operation, error)

    def _jobs_done(self, operation: Operation, error: BaseException | None) -> None:
        operation.working = False
        if self._operations.get(operation.key) is not operation:  # it has failed in the meantime
            assert operation.exchange is not None
            operation.exchange.abandon(operation.dropped)
            operation.failed()
            return
        if error is not None:
            self._failed(operation, error)
            return
        operation.started = True
        operation.since = self._outside.clock()
        try:
            assert operation.exchange is not None
            operation.exchange.start()
            while operation.early and self._operations.get(operation.key) is operation:
                self._receive(operation, *operation.early.popleft())
        except Exception as failure:
            self._failed(operation, failure)

    def _receive(self, operation: Operation, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        assert operation.exchange is not None
        assert operation.port is not None
        operation.since = operation.heard[node] = self._outside.clock()
        position = operation.members.nodes.index(node)
        name, clock, plan = operation.about
        self._trace.record(Kind.REDUCE_BEGIN, name, len(payload), clock, plan, 0, node)
        operation.taking = True
        operation.exchange.receive(position, chunk, payload)
        operation.taking = False
        self._trace.record(Kind.REDUCE_END, name, len(payload), clock, plan, 0, node)
        self._trace.record(Kind.TAKEN, name, len(payload), clock, plan, 0, node)
        operation.port.consumed(position, len(payload))
        if operation.over:
            self._exchange_finished(operation)

    def _exchange_finished(self, operation: Operation) -> None:
        if operation.taking:  # workers are answered when it is recorded that the last chunk was taken
            operation.over = True
        elif self._operations.get(operation.key) is operation:
            assert operation.exchange is not None
            if operation.staging is None:
                self._deliver(operation, operation.exchange.results)
            else:
                operation.working = True
                jobs = operation.staging.writes(self._settings.kernel_threads)
                self._work.do(operation.key.plan, jobs, math.inf, partial(self._written, operation))

    def _written(self, operation: Operation, error: BaseException | None) -> None:
        """The results are in the workers' own memory."""
        operation.working = False
        assert operation.exchange is not None
        assert operation.staging is not None
        if self._operations.get(operation.key) is not operation:
            operation.failed()
        elif error is not None:
            self._failed(operation, error)
        else:
            self._deliver(operation, operation.exchange.results)
            operation.staging.give_back()

    def _deliver(self, operation: Operation, results: Sequence[Result]) -> None:
        """Gives workers their results: nothing of the operation is under way any more."""
        del self._operations[operation.key]
        name, clock, plan = operation.about
        self._trace.record(Kind.RUN_END, name, 0, clock, plan)
        inline = None if operation.shared is None else operation.shared.tobytes()
        ranks = [rank for rank in operation.members.local if rank in operation.parts]
        for index, rank in enumerate(ranks):
            part = operation.parts[rank]
            self._trace.record(Kind.ANSWERED, name, 0, clock, plan, 0, rank)
            if not results:
                done = wire.Done(part.handle, inline if part.place is None else None, operation.answer)
                self._outside.to_worker(rank, done)
                continue
            result = results[index if len(results) > 1 else 0]
            small = None if result.segment or part.place is not None else result.array.tobytes()
            nbytes = result.segment.nbytes if result.segment else 0
            self._outside.to_worker(rank, wire.Done(part.handle, small, result.sizes, nbytes), result)
        for result in results:
            if result.segment is not None:
                result.segment.close()
        self._delivered(operation)


def nothing(reducer: Reducer, elements: int) -> Contribution:
    """Returns the part of a node whose members have all joined; the result is lost in its own memory."""
    values = reducer.nothing(elements)
    return Contribution(-1, values, place=values)


def _one_by_one(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job()
