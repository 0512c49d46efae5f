"""One operation on this node, from the first sign of it to its results; and what runs it as an `Exchange`. No I/O."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fusion_rt import wire
from fusion_rt.codecs import BucketCodec
from fusion_rt.kernels import cpu
from fusion_rt.settings import Settings
from fusion_rt.topology import Topology
from fusion_rt.trace import NULL, Instrument
from fusion_rt.trace_format import Kind
from fusion_rt.wire import OpKey
from fusiond import algorithms
from fusiond.algorithms.base import Algorithm, Work
from fusiond.buckets.codec_state import open_bucket
from fusiond.buckets.plans import BucketState, PlanState
from fusiond.buckets.recipes import Recipe, collective_exchange, contributions_of, outputs_of
from fusiond.buckets.traced_codecs import record_codec
from fusiond.collectives.base import Array, Exchange, Job, Port, Reducer
from fusiond.collectives.cost import CostModel
from fusiond.core.contribution import Contribution
from fusiond.core.effects import Effects
from fusiond.core.participants import Members
from fusiond.core.result import Result
from fusiond.core.tracing import about_key, recorded_jobs
from fusiond.operations.thread_work import INLINE_WORK, ThreadWork
from fusiond.transport.flow_control import FlowPort


@dataclass(slots=True)
class Run:
    """One operation under way on this node.

    Attributes:
        since: when it last made progress (s); `begun`: when it began here.
        parts: of the local members, by rank.
        recipe: of the first part that came; None for a planned bucket.
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
        failed: is called when it has failed, and its jobs have ended.
    """

    key: OpKey
    members: Members
    since: float
    begun: float = field(init=False)
    parts: dict[int, Contribution] = field(default_factory=dict)
    recipe: Recipe | None = None
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
    failed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.begun = self.since

    @property
    def kind(self) -> str:
        """The collective; as far as it is known here."""
        return "allreduce" if self.recipe is None else self.recipe.signature.kind

    @property
    def urgency(self) -> int:
        """That of the local member that needs it soonest."""
        return min((part.urgency for part in self.parts.values()), default=0)

    @property
    def what(self) -> str:
        """For people."""
        return self.key.in_words

    def traffic(self, node: int, now: float) -> tuple[wire.Traffic, ...]:
        """What has gone between this node and its peers, once the exchange is there; now in seconds."""
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
        """The parts that local members have submitted, in order of local_rank."""
        return [self.parts[rank] for rank in self.members.local if rank in self.parts]


class Runner:
    """Runs exchanges.

    Attributes:
        cost: of messages, as measured, which sizes of chunks follow.
        route: the model by which the way between nodes is chosen.

    Args:
        topology, node: who is where, and which node this is.
        settings: sizes of chunks and windows, threads.
        outside: acts for it.
        work: the threads.
        runs: what is under way. A run that is no longer in it has failed, and nothing more is done about it; one that
            is delivered is taken out.
        delivered: called with a run when its workers have their results.
        failed: called with a run and an exception, when its jobs or its exchange raised one.
        trace: what is done is recorded there.
    """

    def __init__(
        self,
        topology: Topology,
        node: int,
        settings: Settings,
        outside: Effects,
        work: ThreadWork,
        runs: dict[OpKey, Run],
        delivered: Callable[[Run], None],
        failed: Callable[[Run, BaseException], None],
        trace: Instrument = NULL,
    ) -> None:
        self.cost = CostModel()
        self.route = self.cost.rounded()
        self._topology = topology
        self._node = node
        self._settings = settings
        self._outside = outside
        self._work = work
        self._runs = runs
        self._delivered = delivered
        self._failed = failed
        self._trace = trace
        self._all_reduce = algorithms.AllReduce()  # of tensors outside a plan

    def start_tensor(self, run: Run, recipe: Recipe, rows: Sequence[int], splits: Sequence[Sequence[int]]) -> None:
        """Starts an operation outside a plan; `rows` and `splits` of all members where it needs them.

        Raises:
            RequestError: the members' sizes do not fit together.
        """
        if recipe.signature.kind == "allreduce":
            codec = open_bucket(recipe.codec, recipe.layout, len(run.members.nodes))
            tuning = wire.Tuning()
            self._reduce(run, self._all_reduce, recipe.reducer, codec, recipe.layout.elements, recipe.parts, tuning)
            return
        local = run.local() or [nothing(recipe.reducer, recipe.layout.elements)]
        outputs, run.shared = outputs_of(local)
        topology = self._topology
        reduces = recipe.signature.kind == "reducescatter"
        compiles = self._kernels_for(recipe.reducer, recipe.layout.elements) if reduces else None
        self._start(
            run,
            lambda port: collective_exchange(port, recipe, topology, local, outputs, rows, splits),
            compiles=compiles,
        )

    def start_bucket(self, run: Run, state: PlanState, bucket: BucketState) -> None:
        """Starts the run of a planned bucket.

        Raises:
            RequestError: the local members do not agree about who submits what.
        """
        assert isinstance(state.algorithm, Algorithm)  # one with homes has no runs
        tuning = state.plan.tuning or wire.Tuning()
        self._reduce(run, state.algorithm, bucket.reducer, bucket.codec, bucket.bucket.numel, bucket.parts, tuning)

    def can_reduce_at_once(self, recipe: Recipe) -> bool:
        """Whether no kernel has to be compiled for a small all-reduce."""
        return self._kernels_for(recipe.reducer, recipe.layout.elements) is None

    def limits(self, tuning: wire.Tuning) -> tuple[int, int]:
        """Bytes of the largest chunk, and those that may be under way to a peer."""
        settings = self._settings
        chunk_bytes = min(tuning.chunk_bytes or self.cost.chunk_bytes(settings.chunk_bytes), settings.chunk_bytes)
        return chunk_bytes, tuning.window_bytes or settings.window_bytes

    def reduce_at_once(self, run: Run, recipe: Recipe) -> None:
        """A small all-reduce of workers of this node: nothing to exchange, and no thread that would be faster."""
        local = run.local()
        outputs, run.shared = outputs_of(local)
        self._trace.record(Kind.RUN_BEGIN, run.key.name, local[0].values.nbytes, run.key.clock)
        recipe.reducer.whole([part.values for part in local], outputs)
        self._deliver(run, ())

    def _reduce(
        self,
        run: Run,
        algorithm: Algorithm,
        reducer: Reducer,
        codec: BucketCodec,
        elements: int,
        parts: Sequence[tuple[int, int]],
        tuning: wire.Tuning,
    ) -> None:
        local = run.local()
        if not local:
            reducer = replace(reducer, prescale=1.0)  # nothing, scaled, would not be nothing in a product
            local = [nothing(reducer, elements)]
        outputs, run.shared = outputs_of(local)
        contributions, prescaled = contributions_of(local)
        if prescaled:
            reducer = replace(reducer, prescale=1.0)
        sources = [part.values for part in contributions]
        selected = contributions[0].selected if len(contributions) == 1 else None
        factors = run.parts[min(run.parts)].rescale if run.parts else ()
        record_codec(codec, self._trace, about_key(run.key))
        first = partial(codec.scale_residual, factors) if factors else None  # a job that comes before all others
        sparse, dense = self._settings.sparse_route, tuning.exchange or self._settings.dense_route
        most = self._settings.chunk_bytes
        whole = most if dense == "doubling" else self.route.chunk_bytes(most)

        def exchange(port: Port) -> Exchange:
            work = Work(port, reducer, codec, self.route, sources, outputs, parts, sparse, dense, whole, selected)
            return algorithm.exchange(work)

        compiles = self._kernels_for(reducer, elements)
        self._start(run, exchange, first, compiles, tuning)

    def _kernels_for(self, reducer: Reducer, elements: int) -> Job | None:
        """A job that loads or compiles the kernel of a reduction, which may take seconds; None if it is there."""
        if not reducer.needs_kernel(elements) or self._outside.has_kernels(reducer.dtype):
            return None
        return partial(cpu.prepare, [reducer.dtype])

    def _start(
        self,
        run: Run,
        make: Callable[[Port], Exchange],
        first: Job | None = None,
        compiles: Job | None = None,
        tuning: wire.Tuning | None = None,
    ) -> None:
        """Makes the run's exchange, does the local part of it, and starts it. What `make` raises, this raises.

        Args:
            first: is done before the local part.
            compiles: is done before that, and never by the event loop: it would send no heartbeats meanwhile.
            tuning: of its plan.
        """
        settings, tuning = self._settings, tuning or wire.Tuning()
        chunk_bytes, window_bytes = self.limits(tuning)
        urgency = run.urgency
        run.port = FlowPort(
            run.key,
            run.digest,
            run.members.nodes,
            self._node,
            chunk_bytes,
            window_bytes,
            lambda node, chunk, payload: self._outside.send_chunk(node, chunk, payload, urgency),
            lambda node, chunks: self._outside.to_node(node, wire.Credit(run.key, chunks)),
            lambda: self._exchange_finished(run),
            self._trace,
        )
        what = about_key(run.key)
        nbytes = next((part.values.nbytes for part in run.parts.values()), 0)
        self._trace.record(Kind.RUN_BEGIN, what.name, nbytes, what.clock, what.plan)
        run.exchange = make(run.port)
        run.port.lends = run.exchange.lends
        small = run.exchange.local_nbytes <= INLINE_WORK
        jobs = run.exchange.jobs(1 if small else tuning.threads or settings.kernel_threads)
        jobs = recorded_jobs(jobs, self._trace, what, run.exchange.local_nbytes)
        before = [job for job in (compiles, first) if job is not None]
        if compiles is not None or (before and jobs and not small):
            run.working = True
            then = partial(self._reduce_locally, run, jobs)
            self._work.do(run.key.plan, [partial(_one_by_one, before)], math.inf, then)
        else:
            run.working = bool(jobs) and not small
            nbytes = run.exchange.local_nbytes if jobs else 0  # else there is at most a residual to be scaled
            self._work.do(run.key.plan, [*before, *jobs], nbytes, partial(self._jobs_done, run))

    def _reduce_locally(self, run: Run, jobs: Sequence[Job], error: BaseException | None) -> None:
        """What comes before the local part is done. The run may have failed in the meantime."""
        assert run.exchange is not None
        if error is None and self._runs.get(run.key) is run:
            self._work.do(run.key.plan, jobs, run.exchange.local_nbytes, partial(self._jobs_done, run))
        else:
            self._jobs_done(run, error)

    def receive(self, run: Run, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        """Gives the exchange of a run that has started a chunk."""
        try:
            self._receive(run, node, chunk, payload)
        except Exception as error:
            self._failed(run, error)

    def _jobs_done(self, run: Run, error: BaseException | None) -> None:
        run.working = False
        if self._runs.get(run.key) is not run:  # it has failed in the meantime
            assert run.exchange is not None
            run.exchange.abandon()
            run.failed()
            return
        if error is not None:
            self._failed(run, error)
            return
        run.started = True
        run.since = self._outside.clock()
        try:
            assert run.exchange is not None
            run.exchange.start()
            while run.early and self._runs.get(run.key) is run:
                self._receive(run, *run.early.popleft())
        except Exception as failure:
            self._failed(run, failure)

    def _receive(self, run: Run, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        assert run.exchange is not None
        assert run.port is not None
        run.since = run.heard[node] = self._outside.clock()
        position = run.members.nodes.index(node)
        name, clock, plan = about_key(run.key)
        self._trace.record(Kind.REDUCE_BEGIN, name, len(payload), clock, plan, 0, node)
        run.taking = True
        run.exchange.receive(position, chunk, payload)
        run.taking = False
        self._trace.record(Kind.REDUCE_END, name, len(payload), clock, plan, 0, node)
        self._trace.record(Kind.TAKEN, name, len(payload), clock, plan, 0, node)
        run.port.consumed(position, len(payload))
        if run.over:
            self._exchange_finished(run)

    def _exchange_finished(self, run: Run) -> None:
        if run.taking:  # workers are answered when it is recorded that the last chunk was taken
            run.over = True
        elif self._runs.get(run.key) is run:
            assert run.exchange is not None
            self._deliver(run, run.exchange.results)

    def _deliver(self, run: Run, results: Sequence[Result]) -> None:
        """Nothing of the run is under way any more: its workers get their results."""
        del self._runs[run.key]
        name, clock, plan = about_key(run.key)
        self._trace.record(Kind.RUN_END, name, 0, clock, plan)
        inline = None if run.shared is None else run.shared.tobytes()
        ranks = [rank for rank in run.members.local if rank in run.parts]
        for index, rank in enumerate(ranks):
            part = run.parts[rank]
            self._trace.record(Kind.ANSWERED, name, 0, clock, plan, 0, rank)
            if not results:
                done = wire.Done(part.handle, inline if part.place is None else None, run.answer)
                self._outside.to_worker(rank, done)
                continue
            result = results[index if len(results) > 1 else 0]
            small = None if result.segment else result.array.tobytes()
            nbytes = result.segment.nbytes if result.segment else 0
            self._outside.to_worker(rank, wire.Done(part.handle, small, result.sizes, nbytes), result)
        for result in results:
            if result.segment is not None:
                result.segment.close()
        self._delivered(run)


def nothing(reducer: Reducer, elements: int) -> Contribution:
    """The part of a node whose members have all joined; the result is lost in its own memory."""
    values = reducer.nothing(elements)
    return Contribution(-1, values, place=values)


def _one_by_one(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job()
