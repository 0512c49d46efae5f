"""Ranks that all-reduce gradients through a codec: a simulated job, and the same by the references."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fusion_rt import codecs, wire
from fusion_rt.codecs import BucketCodec, layout_of
from fusion_rt.codecs.factoring import FactoringBucketCodec
from fusion_rt.codecs.selecting import Selecting
from fusion_rt.codecs.summing import SummingBucketCodec
from fusion_rt.codecs.tensor_rules import joined
from fusiond.collectives.owned import expected_bounds
from tests.fusiond.simulation import Array, SimulatedJob
from tests.reference import codecs as reference

NET = (
    wire.TensorSpec("stem.weight", "float32", (72, 64), together=1),
    wire.TensorSpec("stem.bias", "float32", (40,), together=1),
    wire.TensorSpec("body", "float32", (48, 96), together=1),
    wire.TensorSpec("head", "float32", (64, 64), together=2),
)
"""A bias that is sent whole; matrices that all codecs encode; two buckets."""
LEAST_ENCODED = 0.8


def encoded_share(buckets: Sequence[wire.Bucket], text: str) -> float:
    """The share of a net's elements that a codec does not send as they are."""
    opened = [codecs.open_bucket(codecs.parse(text), layout_of(bucket)) for bucket in buckets]
    encoded = sum(codec.encoded_elements for codec in opened if not codec.lossless)
    return encoded / sum(codec.numel for codec in opened)


class Reduced:
    """A job whose ranks all-reduce gradients step by step, in any order.

    Args:
        layout: number of workers of each node.
        codec: its text.
        seed: of the order of events.
        route: of what codecs select, and of dense values.

    Attributes:
        buckets: of the plan.
    """

    def __init__(
        self,
        layout: Sequence[int],
        codec: str,
        seed: int = 0,
        route: str = "auto",
        net: Sequence[wire.TensorSpec] = NET,
        op: wire.Op = "average",
        prescale: float = 1.0,
    ) -> None:
        routes = {"dense_route": route} if route in ("ring", "halving", "doubling") else {"sparse_route": route}
        large = {"fusion_threshold": 1 << 20, "chunk_bytes": 1 << 16, "window_bytes": 1 << 18}
        self.job = SimulatedJob(layout, seed, **large, **routes)
        self._how = wire.Reduction(op, prescale=prescale, codec=codec)
        self._choose = np.random.default_rng(seed)
        self.clock = self._joins = 0
        self.gone: dict[int, int] = {}  # ranks that have joined, and the handles of that
        self.propose(net)

    def propose(self, net: Sequence[wire.TensorSpec]) -> None:
        """Makes a plan, in place of the one that there is."""
        self.plan = self.job.plan(wire.Proposal("opt", 0, 0, self._how, tuple(net)))
        self.buckets = self.plan.buckets
        self._memory = self.job.add_plan_memory(self.plan)

    def join(self, *ranks: int) -> None:
        """These ranks join; when all have, all come back."""
        for rank in ranks:
            self.gone[rank] = self.job.submit(rank, f"join{self._joins}", wire.Signature("join"))
            self.job.settle()
        if len(self.gone) == self.job.size:
            assert all(self.job.is_answered(rank, handle) for rank, handle in self.gone.items())
            self.gone, self.clock, self._joins = {}, wire.first_clock_after_join(self.clock), self._joins + 1

    def place(self, rank: int, bucket: wire.Bucket) -> Array:
        """A rank's memory of a bucket."""
        dtype = {"float32": np.float32, "float64": np.float64}[bucket.dtype]
        nbytes = bucket.numel * np.dtype(dtype).itemsize
        return self._memory[rank][bucket.offset : bucket.offset + nbytes].view(dtype)

    def step(self, gradients: Sequence[Sequence[Array]], rescale: float = 1.0) -> list[Array]:
        """All ranks reduce `gradients[rank][bucket]`; returns the result of each bucket, the same bits on all ranks.

        Args:
            rescale: factor of what was not sent before.
        """
        handles: list[tuple[int, int]] = []
        present = [rank for rank in self.job.ranks if rank not in self.gone]
        for rank in present:
            for index in self._choose.permutation(len(self.buckets)).tolist():

                def post(rank: int = rank, index: int = index) -> None:
                    bucket = self.buckets[index]
                    self.place(rank, bucket)[:] = gradients[rank][index]
                    self.job._handles += 1
                    factors = () if rescale == 1.0 else (rescale,) * len(bucket.tensors)
                    ready = wire.Ready(self.job._handles, self.plan.id, index, self.clock, factors)
                    handles.append((rank, self.job._handles))
                    self.job.engine(rank).ready(rank, ready)

                self.job.later(rank, post)
        self.job.settle()
        self.clock += 1
        for rank, handle in handles:
            message, _ = self.job.answer(rank, handle)
            assert isinstance(message, wire.Done), message
        for bucket in self.buckets:
            assert len({self.place(rank, bucket).tobytes() for rank in present}) == 1
        return [self.place(present[0], bucket).copy() for bucket in self.buckets]

    def codec(self, node: int, bucket: int) -> BucketCodec:
        return self.job.nodes[node].engine._plans.get(self.plan.id).buckets[bucket].codec

    def first_bounds(self, bucket: int) -> tuple[int, ...]:
        """Where the nodes' ranges begin in the first steps, and the end; none where there are none."""
        codec = self.codec(0, bucket)
        return expected_bounds(codec, len(self.job.nodes)) if isinstance(codec, SummingBucketCodec) else ()

    def residual(self, node: int, bucket: int) -> Array:
        """What a node remembers of a bucket, with zeros for padding, float32."""
        state = self.codec(node, bucket).state_dict()
        whole = np.zeros(self.buckets[bucket].numel, np.float32)
        for tensor in self.buckets[bucket].tensors:
            if (kept := state.get(f"residual/{tensor.name}")) is not None:
                whole[tensor.start : tensor.start + tensor.numel] = kept
        return whole

    def states(self) -> list[dict[str, Array]]:
        """What each node's codecs remember, as a checkpoint has it."""
        return [node.engine.keeper.state_of_codecs((0, "opt")) for node in self.job.nodes]

    def load(self, states: Sequence[dict[str, Array]]) -> None:
        errors: list[BaseException | None] = []
        for node, state in zip(self.job.nodes, states, strict=True):
            node.engine.keeper.load((0, "opt"), state, False, errors.append)
        self.job.settle()
        assert not any(errors)

    def residuals(self, bucket: int) -> list[Array]:
        return [self.residual(node, bucket) for node in range(len(self.job.nodes))]

    def gradients(self, step: int, seed: int, spread: float = 1.0) -> list[list[Array]]:
        """Normal gradients of all ranks, whose magnitudes differ from tensor to tensor; zeros for padding."""
        found = []
        for rank in self.job.ranks:
            choose = np.random.default_rng((seed, step, rank))
            of_rank = []
            for bucket in self.buckets:
                values = np.zeros(bucket.numel, np.float32)
                for number, tensor in enumerate(bucket.tensors):
                    part = choose.standard_normal(tensor.numel) * spread**number
                    values[tensor.start : tensor.start + tensor.numel] = part
                of_rank.append(values)
            found.append(of_rank)
        return found


@dataclass
class Beside:
    """One bucket of such a job, by the references: what its nodes remember, and how they add up.

    Args:
        codec: the bucket codec of node 0, of which its numbers are asked: how many elements, in which ranges.
        nodes: their number.
        gathers: all nodes send to all, and no owner encodes a sum.
    """

    codec: BucketCodec
    nodes: int
    gathers: bool
    residuals: list[Array] = field(init=False)
    velocities: list[Array] = field(init=False)
    thresholds: list[float] = field(init=False)
    starts: dict[str, Array] = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.residuals = [np.zeros(self.codec.layout.elements, np.float32) for _ in range(self.nodes)]
        self.velocities = [residual.copy() for residual in self.residuals]
        self.thresholds = [0.0] * self.nodes
        self.starts = _drawn_starts(self.codec)

    @property
    def encoded(self) -> list[tuple[int, int]]:
        """Those that are encoded."""
        rules = self.codec.codec.rules  # type: ignore[attr-defined]
        spans = [(s.start, s.end) for s in self.codec.layout.spans if not rules.is_dense(s)]
        return list(joined(spans))

    def step(self, gradients: Sequence[Array], bounds: Sequence[int], rescale: float = 1.0) -> Array:
        """The sum of the nodes' gradients that all get (before any division); changes what nodes remember."""
        chosen = self.codec.codec
        self.residuals = [residual * np.float32(rescale) for residual in self.residuals]
        given = list(gradients)
        if chosen.has_momentum():
            momentum, nesterov = chosen.momentum, chosen.nesterov  # type: ignore[attr-defined]
            pairs = [reference.corrected(u, g, momentum, nesterov) for u, g in zip(self.velocities, given, strict=True)]
            self.velocities, given = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        decay = getattr(chosen, "decay", 1.0)
        values = [reference.added(r, g, decay) for r, g in zip(self.residuals, given, strict=True)]
        self.steps += 1
        if chosen.name == "powersgd":
            return self._low_rank(values)
        sent = [self._encode(node, of_node) for node, of_node in enumerate(values)]
        self.residuals = [reference.remembered(v, s) for v, s in zip(values, sent, strict=True)]
        if self.gathers:
            return reference.in_node_order(sent)
        total, self.residuals = reference.squeezed_twice(sent, self.residuals, bounds, self._encode_sum)
        return total

    # --- of one node --------------------------------------------------------------------------------------------------

    def _encode(self, node: int, values: Array) -> Array:
        chosen, ranges = self.codec.codec, self.encoded
        if chosen.name == "demo":
            return self._transformed(values)
        if not isinstance(chosen, Selecting):
            return self._rounded(values, ranges)
        k = self.k
        if chosen.name == "topk":
            found = [reference.largest(values, among, most) for among, most in self.groups]
            sent = reference.only(values, np.concatenate(found), ranges, self.rounding)
        elif chosen.name == "gaussiank":
            sent = reference.gaussiank(values, ranges, k, self.rounding)
        elif chosen.name == "randomk":
            sent = reference.randomk(values, ranges, self.drawn(self.steps - 1), self.rounding)
        else:
            exact = (self.steps - 1) % chosen.every == 0  # type: ignore[attr-defined]
            threshold = self.thresholds[node]
            sent, self.thresholds[node] = reference.thresholdk(values, ranges, k, threshold, exact, self.rounding)
        if chosen.has_momentum() and chosen.masks(k, sum(b - a for a, b in ranges)):
            inside = reference.places(ranges)
            self.velocities[node][inside[sent[inside] != 0]] = 0
        return sent

    def _rounded(self, values: Array, ranges: Sequence[tuple[int, int]]) -> Array:
        name, block = self.codec.codec.name, self.codec.codec.block  # type: ignore[attr-defined]
        if name == "onebit":
            return reference.onebit(values, ranges, block)
        if name == "int2":
            return reference.int2(values, ranges, block)
        return reference.integers(values, ranges, int(name.removeprefix("int")), block)

    def _transformed(self, values: Array) -> Array:
        chosen, sent = self.codec.codec, values
        for span in self.codec.layout.spans:
            if not chosen.rules.is_dense(span):  # type: ignore[attr-defined]
                shape = (span.shape[0], span.numel // span.shape[0]) if len(span.shape) > 1 else (1, span.numel)
                sent = reference.demo(sent, (span.start, span.end), shape, chosen.chunk, chosen.density)  # type: ignore[attr-defined]
        return sent

    @property
    def groups(self) -> list[tuple[Array, int]]:
        """Elements that are compared with each other, and how many of them a node selects: of the bucket, or of each
        tensor, or of each chunk of one."""
        chosen = self.codec.codec
        assert isinstance(chosen, Selecting)
        together = [reference.places(self.encoded)]
        if (size := getattr(chosen, "chunk", 0)) or chosen.scope == "tensor":
            spans = [span for span in self.codec.layout.spans if not chosen.rules.is_dense(span)]
            starts = [(span, low) for span in spans for low in range(span.start, span.end, size or span.numel)]
            together = [np.arange(low, min(low + (size or span.numel), span.end)) for span, low in starts]
        return [(among, max(1, round(len(among) * chosen.density))) for among in together]

    @property
    def k(self) -> int:
        """The number of elements that a node selects in a step."""
        return sum(k for _, k in self.groups)

    @property
    def rounding(self) -> reference.Rounding:
        assert isinstance(self.codec.codec, Selecting)
        return {"fp32": reference.dense, "fp16": reference.scaled_fp16, "bf16": reference.bf16}[self.codec.codec.value]

    def drawn(self, step: int) -> Array:
        """What all nodes draw in a step: of each of k equal ranges an element. Which one is the codec's."""
        indices = self.codec._drawn(step, 0, self.codec.layout.elements)  # type: ignore[attr-defined]
        among = reference.places(self.encoded)
        edges = [number * len(among) // self.k for number in range(self.k + 1)]
        for index, (low, high) in zip(indices, itertools.pairwise(edges), strict=True):
            assert among[low] <= index <= among[high - 1]
        return np.asarray(indices, np.int64)

    # --- of the sum ---------------------------------------------------------------------------------------------------

    def _encode_sum(self, total: Array, low: int, high: int) -> Array:
        within = [(max(a, low) - low, min(b, high) - low) for a, b in self.encoded if max(a, low) < min(b, high)]
        if not isinstance(self.codec.codec, Selecting):
            whole = np.zeros(self.codec.layout.elements, np.float32)
            whole[low:high] = total
            return self._rounded(whole, [(a + low, b + low) for a, b in within])[low:high]
        if self.codec.codec.name == "randomk":
            return reference.only(total, np.flatnonzero(total), within, self.rounding)
        return reference.topk(total, within, -(-self.k // self.nodes), self.rounding)

    def _low_rank(self, values: Sequence[Array]) -> Array:
        assert isinstance(self.codec, FactoringBucketCodec)
        total, self.residuals = reference.in_node_order(values), [v.copy() for v in values]
        approximates = self.codec.codec.approximates  # type: ignore[attr-defined]
        for span in self.codec.layout.spans:
            part = slice(span.start, span.end)
            if not approximates(span):
                for residual in self.residuals:
                    residual[part] = 0
                continue
            matrices = [v[part].reshape(span.shape[0], -1) for v in values]
            start = self.starts[span.name]
            summed, own, self.starts[span.name] = reference.powersgd(matrices, start)
            total[part] = summed.ravel()
            for residual, sent in zip(self.residuals, own, strict=True):
                residual[part] -= sent.ravel()
        return total


def _drawn_starts(codec: BucketCodec) -> dict[str, Array]:
    """The factors (columns, rank) that the first step of PowerSGD begins with, which the codec draws."""
    if not isinstance(codec, FactoringBucketCodec):
        return {}
    fresh = codecs.open_bucket(codec.codec, codec.layout)
    assert isinstance(fresh, FactoringBucketCodec)
    fresh.start(np.zeros(codec.layout.elements, np.float32))
    found = fresh.state_dict().items()
    return {key.removeprefix("factor/"): value.T for key, value in found if key.startswith("factor/")}


def node_sums(job: SimulatedJob, gradients: Sequence[Sequence[Array]], bucket: int) -> list[Array]:
    """The sums of the gradients of each node's ranks, in their order."""
    return [
        reference.in_node_order([gradients[rank][bucket] for rank in ranks]) for ranks in job.topology.ranks if ranks
    ]
