"""The executor, which runs an operation as an `Exchange`: its local part, its chunks, and the answers. No I/O."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

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
from fusiond.buckets.plans import BucketState, PlanState
from fusiond.buckets.recipes import Recipe, collective_exchange
from fusiond.buckets.traced_codecs import record_codec
from fusiond.collectives.base import Array, Exchange, Job, Reducer
from fusiond.collectives.cost import CostModel
from fusiond.core.contribution import Contribution
from fusiond.core.effects import Effects
from fusiond.core.result import Result
from fusiond.core.tracing import recorded_jobs
from fusiond.operations.node_parts import NodeParts, combined, loss_scale
from fusiond.operations.operation import Operation
from fusiond.operations.staging import Scratch, Staging
from fusiond.operations.thread_work import INLINE_WORK, PLAIN_WORK, Act, ThreadWork
from fusiond.transport.early_credit import EARLY_BYTES, EarlyCredit
from fusiond.transport.flow_control import FlowPort


class Executor:
    """Runs exchanges.

    Attributes:
        cost: of messages, as measured, which sizes of chunks follow.
        route: the model by which the way between nodes is chosen.
        links: all of them by their two nodes, where some are far: the order of rings follows from them.
        early: credit for chunks of operations that peers may not have reached.

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
        self.early = EarlyCredit(
            EARLY_BYTES // max(1, len(topology.hosts) - 1),
            lambda node, key: outside.to_node(node, wire.Held(key)),
        )
        self._settings = settings
        self._outside = outside
        self._work = work
        self._operations = operations
        self._delivered = delivered
        self._failed = failed
        self._trace = trace
        self._all_reduce = algorithms.AllReduce()  # of tensors outside a plan
        self._scratch = Scratch()
        self._kernels: set[tuple[str, bool]] = set()  # those here: name of the type, and whether it is converted
        self.measured(CostModel(), CostModel().rounded(), {})

    def measured(self, cost: CostModel, route: CostModel, links: dict[tuple[int, int], CostModel]) -> None:
        """The links are measured: see the attributes of these names."""
        self.cost, self.route, self.links = cost, route, links
        most = self._settings.chunk_bytes
        self._chunk_bytes, self._whole_nbytes = cost.chunk_bytes(most), route.chunk_bytes(most)
        self._has_order = bool(links) and self._settings.ring_order == "measured"

    def start_tensor(
        self, operation: Operation, recipe: Recipe, rows: Sequence[int], splits: Sequence[Sequence[int]]
    ) -> None:
        """Starts an operation outside a plan; `rows` and `splits` of all members where it needs them.

        Raises:
            RequestError: the members' sizes do not fit together.
        """
        if recipe.signature.kind == "allreduce":
            codec = open_bucket(recipe.codec, recipe.layout, len(operation.members.nodes))
            # All that lasts of the stream of a name, and all nodes know: what is drawn is drawn anew each time.
            codec.step = operation.key.clock
            self._reduce(operation, self._all_reduce, recipe.reducer, codec, recipe.parts)
            return
        local = local_parts(operation) or [nothing(recipe.reducer, recipe.layout.elements)]
        traits = wire.KINDS[recipe.signature.kind]
        reduces = traits.reduces
        if not operation.is_here and len(operation.members.nodes) > 1:
            root = operation.members.set.ranks.index(recipe.signature.root) if traits.root == "from" else None
            combines = reduces and not recipe.reducer.widens
            local = self._stage(operation).parts(local, root, combines)
        outputs, operation.shared = outputs_of(local)
        compiles = self._kernels_for(recipe.reducer, recipe.layout.elements) if reduces else None
        port = self._open(operation)
        operation.exchange = collective_exchange(port, recipe, self._topology, local, outputs, rows, splits)
        self._run(operation, operation.exchange, port, recipe.reducer.is_plain or not reduces, compiles)

    def start_bucket(self, operation: Operation, state: PlanState, bucket: BucketState) -> None:
        """Starts the operation of a planned bucket.

        Raises:
            RequestError: the local members do not agree about who submits what, or in which unit.
        """
        self._reduce(operation, state.exchange_algorithm, bucket.reducer, bucket.codec, bucket.parts)

    def scratch_nbytes(self, state: PlanState, bucket: BucketState) -> int:
        """Returns the bytes that the exchange of a planned bucket holds while it is under way."""
        return state.exchange_algorithm.scratch_nbytes(bucket.reducer, bucket.codec, len(state.members.nodes))

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
        local = local_parts(operation)
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
        parts: Sequence[tuple[int, int]],
    ) -> None:
        """Starts an all-reduce, in the way of an algorithm. `parts`: of the tensors in it."""
        elements, settings = codec.layout.elements, self._settings
        local = local_parts(operation) or [nothing(reducer, elements)]
        outputs, operation.shared = outputs_of(local)
        if not operation.parts:  # nothing, scaled, would not be nothing in a product
            reducer = replace(reducer, prescale=1.0)
        elif any([part.share for part in local]):
            local, outputs = self._combined(operation, local, outputs)
            reducer = replace(reducer, prescale=1.0)  # the ranks have scaled it
        sources = [part.values for part in local]
        if not operation.is_here:
            reducer, sources, outputs = self._staged(operation, reducer, sources, outputs)
        first = None if codec.lossless else self._prepare_codec(operation, codec, reducer)
        route = operation.tuning.exchange or settings.dense_route
        port = self._open(operation)
        work = Work(
            port, reducer, codec, self.route, sources, outputs, parts, settings.sparse_route, route,
            settings.chunk_bytes if route == "doubling" else self._whole_nbytes,
            local[0].selected if len(local) == 1 else None,
            self._order(operation.members.nodes) if self._has_order else (),
        )  # fmt: skip
        operation.exchange = algorithm.exchange(work)
        compiles = self._kernels_for(reducer, elements)
        self._run(operation, operation.exchange, port, reducer.is_plain, compiles, first)

    def _combined(
        self, operation: Operation, local: Sequence[Contribution], outputs: list[Array]
    ) -> tuple[list[Contribution], list[Array]]:
        """Returns the contribution in whose place that of the node is when the local part begins, and the outputs.

        Raises:
            RequestError: the local members do not agree about who submits it.
        """
        found = combined(local, len(operation.members.local))
        if found.share == wire.PART:
            parts = operation.staging = NodeParts.of(local, self._settings.kernel_threads)
            if parts.nbytes <= INLINE_WORK:
                for job in parts.reads:
                    job()
                parts.reads.clear()
        return [found], [found.values] if found.asks_for_part else outputs

    def _prepare_codec(self, operation: Operation, codec: BucketCodec, reducer: Reducer) -> Job | None:
        """Has a codec that does something recorded, and tells it the units of this step. Returns a job that scales its
        residual, if workers ask for that.

        Raises:
            RequestError: the local members' gradients are multiplied by different loss scales.
        """
        record_codec(codec, self._trace, operation.about)
        codec.loss_scale = loss_scale(operation.parts) / reducer.headroom
        codec.weight = reducer.postscale / reducer.headroom / reducer.divisor
        factors = operation.parts[min(operation.parts)].rescale if operation.parts else ()
        return partial(codec.scale_residual, factors) if factors else None

    def _staged(
        self, operation: Operation, reducer: Reducer, sources: list[Array], outputs: list[Array]
    ) -> tuple[Reducer, list[Array], list[Array]]:
        """Returns the reducer, sources and outputs of an all-reduce that is partly in other processes' memory."""
        if len(operation.members.nodes) == 1 and reducer.op != "adasum":
            return reducer, sources, outputs
        return self._stage(operation).reduction(reducer, sources, outputs, self._settings.kernel_threads)

    def _order(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the positions of nodes in the order in which a ring visits them; the same on all of them."""
        from fusiond.transport.distance import ring_order

        if nodes not in self._orders:
            self._orders[nodes] = tuple(nodes.index(node) for node in ring_order(nodes, self.links))
        return self._orders[nodes]

    def _kernels_for(self, reducer: Reducer, elements: int) -> Job | None:
        """Returns a job that loads or compiles the kernel of a reduction, in seconds perhaps; None if it is there."""
        dtype, conversions = reducer.partial, reducer.conversions
        known = dtype.name, bool(conversions)
        if known in self._kernels or not reducer.needs_kernel(elements):
            return None
        if not self._outside.has_kernels(dtype, conversions):
            return partial(cpu.prepare, [dtype], conversions)
        self._kernels.add(known)
        return None

    def _open(self, operation: Operation) -> FlowPort:
        """Opens the way of an operation to the other nodes: from now on it runs."""
        key, outside = operation.key, self._outside  # the port must not hold the operation: see `Operation.close`
        chunk_bytes, window_bytes = self.limits(operation.tuning)
        parts = operation.parts.values()
        operation.port = FlowPort(
            key,
            operation.digest,
            operation.members.nodes,
            self._node,
            chunk_bytes,
            window_bytes,
            partial(self._outside.send_chunk, urgency=min([part.urgency for part in parts], default=0)),
            lambda node, chunks: outside.to_node(node, wire.Credit(key, chunks)),
            partial(self._exchange_finished, operation),
            self._trace,
            work=partial(self._work_for, operation),
            early=self.early,
        )
        for node in {node for node, _, _ in operation.early}:
            operation.port.reached(operation.members.nodes.index(node))
        what = operation.about
        size = next((part.values.nbytes for part in parts), 0)
        self._trace.record(Kind.RUN_BEGIN, what.name, size, what.clock, what.plan)
        return operation.port

    def _run(
        self,
        operation: Operation,
        exchange: Exchange,
        port: FlowPort,
        is_plain: bool,
        compiles: Job | None = None,
        first: Job | None = None,
    ) -> None:
        """Starts an operation's exchange, after its local part.

        Args:
            is_plain: the local part takes little more than its memory does.
            compiles: is done before all else, and never by the event loop: it would send no heartbeats meanwhile.
            first: is done before the local part.
        """
        port.lends = exchange.lends
        nbytes: float = exchange.local_nbytes if operation.is_here else math.inf
        small = nbytes <= (PLAIN_WORK if is_plain and port.nodes == 1 else INLINE_WORK)
        nbytes = 0 if small else nbytes
        jobs = exchange.jobs(1 if small else operation.tuning.threads or self._settings.kernel_threads)
        if jobs or compiles is not None or first is not None or _reads(operation):
            self._do_local_part(operation, exchange, jobs, nbytes, compiles, first)
        else:
            self._begin(operation, exchange)

    def _do_local_part(
        self,
        operation: Operation,
        exchange: Exchange,
        jobs: Sequence[Job],
        nbytes: float,
        compiles: Job | None,
        first: Job | None,
    ) -> None:
        """Does an exchange's jobs, which touch so many bytes, and what comes before them; then it begins."""
        if jobs:
            jobs = recorded_jobs(jobs, self._trace, operation.about, exchange.local_nbytes)
        small = nbytes <= INLINE_WORK
        before = [job for job in (compiles, first) if job is not None]
        if compiles is not None or (before and jobs and not small) or _reads(operation):
            self._do_in_stages(operation, before, jobs, nbytes)
            return
        operation.working = bool(jobs) and not small
        nbytes = nbytes if jobs else 0  # else there is only a residual to be scaled
        self._work.do(operation.key.plan, [*before, *jobs], nbytes, partial(self._jobs_done, operation))

    def _stage(self, operation: Operation) -> Staging:
        staging = operation.staging = Staging(self._scratch)
        return staging

    def _do_in_stages(self, operation: Operation, before: Sequence[Job], jobs: Sequence[Job], nbytes: float) -> None:
        operation.working = True
        if operation.staging is not None:
            nbytes = max(nbytes, operation.staging.nbytes)
        stages = deque(stage for stage in (_reads(operation), jobs) if stage)
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

    def _jobs_done(self, operation: Operation, error: BaseException | None) -> None:
        operation.working = False
        assert operation.exchange is not None
        if self._operations.get(operation.key) is not operation:  # it has failed in the meantime
            operation.exchange.abandon()
            operation.failed()
        elif error is not None:
            self._failed(operation, error)
        else:
            self._begin(operation, operation.exchange)

    def _begin(self, operation: Operation, exchange: Exchange) -> None:
        """The local part is done: the exchange starts, and takes the chunks that have come before."""
        operation.started = True
        operation.since = self._outside.clock()
        tell_askers(operation, self._outside)
        try:
            exchange.start()
        except Exception as error:
            self._failed(operation, error)
            return
        self._take_waiting(operation)

    def _take_waiting(self, operation: Operation) -> None:
        """Gives the exchange of an operation the chunks that wait for it, until it works on one."""
        while operation.early and not operation.working and self.receive(operation, *operation.early.popleft()):
            pass

    def _work_for(self, operation: Operation, nbytes: int, job: Job, then: Act) -> None:
        """Runs a job of an exchange that has started; see `Port.work`."""
        if nbytes <= PLAIN_WORK:
            job()
            then()
            return
        operation.working = True
        self._work.do(operation.key.plan, [job], math.inf, partial(self._worked, operation, then))

    def _worked(self, operation: Operation, then: Act, error: BaseException | None) -> None:
        operation.working = False
        if self._operations.get(operation.key) is not operation:  # it has failed in the meantime
            assert operation.exchange is not None
            operation.exchange.abandon()
            operation.failed()
            return
        operation.since = self._outside.clock()
        try:
            if error is not None:
                raise error
            then()
        except Exception as failure:
            self._failed(operation, failure)
            return
        self._take_waiting(operation)

    def receive(self, operation: Operation, node: int, chunk: wire.Chunk, payload: memoryview) -> bool:
        """Gives the exchange of an operation that has started a chunk. Returns whether it goes on then: it has neither
        finished nor failed."""
        assert operation.exchange is not None
        assert operation.port is not None
        operation.since = operation.heard[node] = self._outside.clock()
        position = operation.members.nodes.index(node)
        name, clock, plan = operation.about
        nbytes = len(payload)
        self._trace.record(Kind.REDUCE_BEGIN, name, nbytes, clock, plan, 0, node)
        operation.taking = True
        try:
            operation.exchange.receive(position, chunk, payload)
            operation.taking = False
            self._trace.record(Kind.REDUCE_END, name, nbytes, clock, plan, 0, node)
            self._trace.record(Kind.TAKEN, name, nbytes, clock, plan, 0, node)
            operation.port.consumed(position, nbytes)
            if operation.over:
                self._exchange_finished(operation)
        except Exception as error:
            self._failed(operation, error)
            return False
        return self._operations.get(operation.key) is operation

    def _exchange_finished(self, operation: Operation) -> None:
        if operation.taking:  # workers are answered when it is recorded that the last chunk was taken
            operation.over = True
        elif self._operations.get(operation.key) is operation:
            assert operation.exchange is not None
            if operation.exchange.results:
                _check_results(operation, operation.exchange.results)
            if operation.staging is None:
                self._deliver(operation, operation.exchange.results)
            else:
                self._write(operation, operation.staging)

    def _write(self, operation: Operation, staging: Staging | NodeParts) -> None:
        """Writes the results to where workers want them, if they are elsewhere."""
        operation.working = True
        jobs = staging.writes(self._settings.kernel_threads)
        self._work.do(operation.key.plan, jobs, staging.nbytes, partial(self._written, operation))

    def _written(self, operation: Operation, error: BaseException | None) -> None:
        """The results are where the workers want them."""
        operation.working = False
        assert operation.exchange is not None
        assert operation.staging is not None
        if self._operations.get(operation.key) is not operation:
            operation.exchange.abandon()
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
        self._trace.record(Kind.RUN_END, name, time.process_time_ns(), clock, plan)
        if results:
            self._answer_each(operation, results)
        else:
            inline = None if operation.shared is None else operation.shared.tobytes()
            for rank in operation.members.local:
                if part := operation.parts.get(rank):
                    self._trace.record(Kind.ANSWERED, name, 0, clock, plan, 0, rank)
                    done = wire.Done(part.handle, inline if part.place is None else None, operation.answer)
                    self._outside.to_worker(rank, done)
        self._delivered(operation)

    def _answer_each(self, operation: Operation, results: Sequence[Result]) -> None:
        """Gives workers results that do not lie where the inputs lay: to each its own, or to all the only one."""
        name, clock, plan = operation.about
        ranks = [rank for rank in operation.members.local if rank in operation.parts]
        for index, rank in enumerate(ranks):
            part = operation.parts[rank]
            self._trace.record(Kind.ANSWERED, name, 0, clock, plan, 0, rank)
            result = results[index if len(results) > 1 else 0]
            small = None if result.segment or part.place is not None else result.array.tobytes()
            nbytes = result.segment.nbytes if result.segment else 0
            self._outside.to_worker(rank, wire.Done(part.handle, small, result.sizes, nbytes), result)
        for result in results:
            if result.segment is not None:
                result.segment.close()


def tell_askers(operation: Operation, outside: Effects) -> None:
    """Tells the nodes that have asked that an operation is reached here, or over."""
    while operation.askers:
        outside.to_node(operation.askers.pop(), wire.CaughtUp(operation.key))


def local_parts(operation: Operation) -> list[Contribution]:
    """Returns the parts that local members have submitted, in order of local_rank."""
    return [operation.parts[rank] for rank in operation.members.local if rank in operation.parts]


def _check_results(operation: Operation, results: Sequence[Result]) -> None:
    """Raises `TypeError` where an exchange has not given each worker what that is going to read."""
    parts, name = local_parts(operation), type(operation.exchange).__name__
    if len(results) not in (1, len(parts)):
        raise TypeError(f"{name} has {len(results)} results for {len(parts)} local members")
    if any(part.place is not None and results[i % len(results)].segment for i, part in enumerate(parts)):
        raise TypeError(
            f"{name} has a result in memory of its own, but the worker awaits it at `part.place`; "
            "use Result.allocate(nbytes, place=part.place)"
        )


def outputs_of(local: Sequence[Contribution]) -> tuple[list[Array], Array | None]:
    """Returns where an operation with one result for all writes it, for its local parts.

    Returns: the distinct arrays, the places in workers' memory first; and the one that serves all inline parts, if any.
    """
    outputs = [part.place for part in local if part.place is not None]
    if len(outputs) == len(local):
        return outputs, None
    shared = np.empty(len(local[0].values), local[0].values.dtype)
    return [*outputs, shared], shared


def nothing(reducer: Reducer, elements: int) -> Contribution:
    """Returns the part of a node whose members have all joined; the result is lost in its own memory."""
    values = reducer.nothing(elements)
    return Contribution(-1, values, place=values)


def _reads(operation: Operation) -> Sequence[Job]:
    """Returns the jobs that bring local contributions to where the exchange works on them."""
    return () if operation.staging is None else operation.staging.reads


def _one_by_one(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job()
