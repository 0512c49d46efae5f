"""The start of operations: their exchanges are made here, and run by the operations themselves. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fusion_rt import wire
from fusion_rt.codecs import BucketCodec
from fusion_rt.kernels import cpu
from fusion_rt.tracing.format import Kind
from fusiond import algorithms
from fusiond.algorithms.exchange import Algorithm, Work
from fusiond.buckets.codec_state import open_bucket
from fusiond.buckets.plans import BucketState, PlanState
from fusiond.buckets.recipes import Recipe, collective_exchange
from fusiond.buckets.traced_codecs import record_codec
from fusiond.collectives.base import Array, Job, Reducer
from fusiond.collectives.cost import CostModel
from fusiond.core.contribution import Contribution
from fusiond.operations.node_parts import NodeParts, combined, loss_scale
from fusiond.operations.operation import NodeOperations, Operation
from fusiond.operations.staging import Staging
from fusiond.operations.thread_work import INLINE_WORK
from fusiond.transport.early_credit import EARLY_BYTES, EarlyCredit
from fusiond.transport.flow_control import FlowPort

_ALL_REDUCE = algorithms.AllReduce()  # of tensors outside a plan


class Starter:
    """Starts the operations of one engine.

    Attributes:
        cost: of messages, as measured, which sizes of chunks follow.
        route: the model by which the way between nodes is chosen.
        links: all of them by their two nodes, where some are far: the order of rings follows from them.
        early: credit for chunks of operations that peers may not have reached.

    Args:
        operations: the engine's.
    """

    def __init__(self, operations: NodeOperations) -> None:
        context = operations.context
        self._context = context
        self._orders: dict[tuple[int, ...], tuple[int, ...]] = {}  # of positions, by nodes
        self.early = EarlyCredit(EARLY_BYTES // max(1, len(context.topology.hosts) - 1), context.outside)
        self._kernels: set[tuple[str, bool]] = set()  # those here: name of the type, and whether it is converted
        self.measured(CostModel(), CostModel().rounded(), {})

    def measured(self, cost: CostModel, route: CostModel, links: dict[tuple[int, int], CostModel]) -> None:
        """The links are measured: see the attributes of these names."""
        self.cost, self.route, self.links = cost, route, links
        most = self._context.settings.chunk_bytes
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
            # The only lasting part of a name's stream, and all nodes know it: draws are made anew each time.
            codec.step = operation.key.clock
            self._reduce(operation, _ALL_REDUCE, recipe.reducer, codec, recipe.parts)
            return
        local = operation.local_parts or [nothing(recipe.reducer, recipe.layout.elements)]
        traits = wire.KINDS[recipe.signature.kind]
        reduces = traits.reduces
        if not operation.is_here and len(operation.members.nodes) > 1:
            root = operation.members.set.ranks.index(recipe.signature.root) if traits.root == "from" else None
            combines = reduces and not recipe.reducer.widens
            local = self._stage(operation).parts(local, root, combines)
        outputs, operation.shared = outputs_of(local)
        compiles = self._kernels_for(recipe.reducer, recipe.layout.elements) if reduces else None
        port = self._open(operation)
        exchange = collective_exchange(port, recipe, self._context.topology, local, outputs, rows, splits)
        operation.run(exchange, recipe.reducer.is_plain or not reduces, compiles)

    def start_bucket(self, operation: Operation, state: PlanState, bucket: BucketState) -> None:
        """Starts the operation of a planned bucket.

        Raises:
            RequestError: the local members do not agree about the submitter, or the unit.
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
        settings = self._context.settings
        chunk_bytes = min(tuning.chunk_bytes or self._chunk_bytes, settings.chunk_bytes)
        return chunk_bytes, tuning.window_bytes or settings.window_bytes

    def reduce_at_once(self, operation: Operation, recipe: Recipe) -> None:
        """A small all-reduce of workers of this node: nothing to exchange, and no thread that would be faster."""
        local = operation.local_parts
        outputs, operation.shared = outputs_of(local)
        self._context.trace.record(Kind.RUN_BEGIN, operation.key.name, local[0].values.nbytes, operation.key.clock)
        recipe.reducer.whole([part.values for part in local], outputs)
        operation.deliver(())

    def _reduce(
        self,
        operation: Operation,
        algorithm: Algorithm,
        reducer: Reducer,
        codec: BucketCodec,
        parts: Sequence[tuple[int, int]],
    ) -> None:
        """Starts an all-reduce, in the way of an algorithm. `parts`: of the tensors in it."""
        elements, settings = codec.layout.elements, self._context.settings
        local = operation.local_parts or [nothing(reducer, elements)]
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
            self._order(operation.members.nodes),
        )  # fmt: skip
        operation.run(algorithm.exchange(work), reducer.is_plain, self._kernels_for(reducer, elements), first)

    def _combined(
        self, operation: Operation, local: Sequence[Contribution], outputs: list[Array]
    ) -> tuple[list[Contribution], list[Array]]:
        """Returns the contribution in whose place that of the node is when the local part begins, and the outputs.

        Raises:
            RequestError: the local members do not agree about its submitter.
        """
        found = combined(local, len(operation.members.local))
        if found.share == wire.PART:
            parts = operation.staging = NodeParts.of(local, self._context.threads)
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
        record_codec(codec, self._context.trace, operation.about)
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
        return self._stage(operation).reduction(reducer, sources, outputs, self._context.threads)

    def _order(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the positions of nodes in the order in which a ring visits them, the same on all of them; none if
        that is their own order."""
        if not self.links or self._context.settings.ring_order != "measured":
            return ()
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
        if not self._context.outside.has_kernels(dtype, conversions):
            return partial(cpu.prepare, [dtype], conversions)
        self._kernels.add(known)
        return None

    def _open(self, operation: Operation) -> FlowPort:
        """Opens the way of an operation to the other nodes: from now on it runs."""
        context, parts = self._context, operation.parts.values()
        chunk_bytes, window_bytes = self.limits(operation.tuning)
        port = FlowPort(
            operation.key,
            operation.digest,
            operation.members.nodes,
            context.node,
            chunk_bytes,
            window_bytes,
            context.outside,
            context.trace,
            urgency=min([part.urgency for part in parts], default=0),
            runner=operation,
            early=self.early,
        )
        operation.open(port)
        name, clock, plan = operation.about
        size = next((part.values.nbytes for part in parts), 0)
        context.trace.record(Kind.RUN_BEGIN, name, size, clock, plan)
        return port

    def _stage(self, operation: Operation) -> Staging:
        staging = operation.staging = Staging()
        return staging


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
