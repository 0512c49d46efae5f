"""Training by an algorithm whose buckets have homes, on a simulated job: workers that post, and get answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fusion_rt import algorithms, wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.local import array_codec
from tests.fusiond.simulation import Array, SimulatedJob

SGD = wire.OptimizerSpec("SGD", ("{}",))


class Workers:
    """The ranks of a job that train a vector, of which three tensors are made; two of them share a bucket.

    Args:
        layout: number of workers of each node.
        algorithm: its text.
        start: what all ranks begin with (elements,).
        optimizer: of the shards.
        settings: of the daemons.
        survives: shards are mirrored at each update.

    Attributes:
        x: each rank's copy.
    """

    def __init__(
        self,
        layout: Sequence[int],
        algorithm: str,
        start: Array,
        rate: float,
        optimizer: wire.OptimizerSpec | None = SGD,
        codec: str = "dense",
        seed: int = 0,
        job: SimulatedJob | None = None,
        survives: bool = False,
    ) -> None:
        self.job = job or SimulatedJob(layout, seed=seed)
        self.spec = algorithms.parse(algorithm)
        self.x = [start.copy() for _ in self.job.ranks]
        self.rate = rate
        name = {"float64": "float64", "float32": "float32"}[str(start.dtype)]
        third = len(start) // 3
        sizes = [third, third, len(start) - 2 * third]
        tensors = tuple(
            wire.TensorSpec(f"w{i}", name, (size,), together=min(i, 1)) for i, size in enumerate(sizes) if size
        )
        reduction = wire.Reduction(codec=codec, algorithm=algorithm, optimizer=optimizer, survives=survives)
        self.plan = self.job.plan(wire.Proposal("opt", 0, 0, reduction, tensors))
        assert len(self.plan.buckets) == 2
        self.memory = self.job.add_plan_memory(self.plan)
        self.itemsize = DTYPES[name].itemsize
        self.sizes = {f"w{i}": size for i, size in enumerate(sizes)}
        self._offsets = dict(zip((f"w{i}" for i in range(3)), np.cumsum([0, *sizes[:2]]).tolist(), strict=True))
        self._handles: dict[int, list[int]] = {}
        self.seeds: list[tuple[int, int]] = []
        self.clocks = [0] * self.job.size
        if self.spec.at_homes:
            for rank in [0] if self.spec.at_shards else self.job.ranks:
                self.seed(rank)

    def span_of(self, tensor: str) -> slice:
        """Returns which elements of the vector a tensor has."""
        start = self._offsets[tensor]
        return slice(start, start + self.sizes[tensor])

    def places(self, rank: int, *buckets: wire.Bucket) -> list[tuple[Array, slice]]:
        """The views of a rank's memory of these buckets, or all, and which elements of the vector they are."""
        found = []
        for bucket in buckets or self.plan.buckets:
            nbytes = bucket.numel * self.itemsize
            values = self.memory[rank][bucket.offset : bucket.offset + nbytes].view(self.x[rank].dtype)
            for tensor in bucket.tensors:
                start = self._offsets[tensor.name]
                found.append((values[tensor.start : tensor.start + tensor.numel], slice(start, start + tensor.numel)))
        return found

    def seed(self, rank: int) -> None:
        """The homes begin with a rank's copy. It is answered when they have it: after a snapshot, if they read one."""
        for place, of in self.places(rank):
            place[:] = self.x[rank][of]
        handles = [self._ready(rank, bucket.index, 0, "seed") for bucket in self.plan.buckets]
        self.seeds += [(rank, handle) for handle in handles]
        self.job.settle()
        assert self.are_seeded() or not self.job.files_answer

    def are_seeded(self) -> bool:
        """Returns whether all seeds are answered."""
        return all(self.job.is_answered(rank, handle) for rank, handle in self.seeds)

    def set(self, values: Array, *ranks: int) -> None:
        """These ranks, by default all, have set the same values, and say so as `optimizer.reseed()` does, when nothing
        is under way: codecs forget what they have not sent, and homes go on from these values."""
        there = ranks or tuple(self.job.ranks)
        forgotten = np.zeros(array_codec.nbytes_of({}), np.uint8)
        array_codec.write({}, forgotten)
        for node in self.job.nodes:
            first = next((rank for rank in there if self.job.topology.node_of(rank) == node.node), None)
            if first is not None:
                self.job._handles += 1
                load = wire.LoadState(self.job._handles, 0, "opt", wire.Place(1, 0), len(forgotten))
                node.engine.codecs.load_state(first, load, forgotten)
                self.job.settle()
                assert isinstance(self.job.answer(first, load.handle)[0], wire.Done)
        for rank in there:
            self.x[rank] = values.copy()
        for rank in there[:1] if self.spec.at_shards else there if self.spec.at_homes else ():
            for place, of in self.places(rank):
                place[:] = values[of]
            handles = [self._ready(rank, b.index, self.clocks[rank], "reseed") for b in self.plan.buckets]
            self.job.settle()
            assert all(self.job.is_answered(rank, handle) for handle in handles)

    def post(self, rank: int, values: Array, samples: int = 1, settle: bool = True, kind: str = "post") -> None:
        """Posts for a rank."""
        for place, of in self.places(rank):
            place[:] = values[of]
        clock, self.clocks[rank] = self.clocks[rank], self.clocks[rank] + 1
        self._handles[rank] = [self._ready(rank, b.index, clock, kind, samples) for b in self.plan.buckets]
        if settle:
            self.job.settle()

    def _ready(self, rank: int, bucket: int, clock: int, kind: str = "post", samples: int = 1) -> int:
        self.job._handles += 1
        handle = self.job._handles
        ready = wire.Ready(handle, self.plan.id, bucket, clock, (), (self.rate,), samples, kind)  # type: ignore[arg-type]
        decoded = wire.decode_worker_message(wire.encode(ready))
        assert isinstance(decoded, wire.Ready)
        self.job.engine(rank).ready(rank, decoded)
        return handle

    def ask(self, rank: int) -> None:
        """A rank that waits for nothing asks what the homes have, and takes it."""
        self._handles[rank] = [self._ready(rank, b.index, self.clocks[rank], "ask") for b in self.plan.buckets]
        self.job.settle()
        self.collect(rank)

    def say(self, rank: int) -> None:
        """A rank that waits for nothing says what it has, as one does that goes on from a checkpoint."""
        for place, of in self.places(rank):
            place[:] = self.x[rank][of]
        handles = [self._ready(rank, b.index, self.clocks[rank], "has") for b in self.plan.buckets]
        self.job.settle()
        for handle in handles:
            assert isinstance(self.job.answer(rank, handle)[0], wire.Done)

    def waits(self, rank: int) -> bool:
        """Returns whether a rank has posted and has not got its answer."""
        return rank in self._handles and not all(self.job.is_answered(rank, h) for h in self._handles[rank])

    def collect(self, rank: int) -> None:
        """A rank takes its answer: what replaces its copy, or what is added to it."""
        for bucket, handle in zip(self.plan.buckets, self._handles.pop(rank), strict=True):
            message, _ = self.job.answer(rank, handle)
            assert isinstance(message, wire.Done), message
            for place, of in self.places(rank, bucket):
                self.x[rank][of] = place + (self.x[rank][of] if message.sizes[:1] == (1,) else 0)

    def answered(self) -> list[int]:
        """Ranks that have got an answer and not taken it."""
        return [rank for rank in self._handles if not self.waits(rank)]

    def follow(
        self, order: Sequence[int], gradient: Callable[[int, int, Array], Array], samples: Callable[[int, int], int]
    ) -> list[int]:
        """Ranks contribute gradients in this order; those that wait are left out. Returns who did."""
        taken = []
        steps = [0] * self.job.size
        for rank in order:
            if self.waits(rank):
                continue
            self.post(rank, gradient(rank, steps[rank], self.x[rank]), samples(rank, steps[rank]))
            steps[rank] += 1
            taken.append(rank)
            for other in self.answered():
                self.collect(other)
        return taken

    def home(self) -> Array:
        """Returns the shards' copy."""
        return self._homes(-1, dict(zip((b.index for b in self.plan.buckets), self.plan.homes, strict=True)))

    def replica(self, rank: int) -> Array:
        """The copy at a rank's own homes."""
        return self._homes(rank, dict.fromkeys((b.index for b in self.plan.buckets), self.job.topology.node_of(rank)))

    def _homes(self, rank: int, nodes: dict[int, int]) -> Array:
        whole = np.empty_like(self.x[0])
        for bucket in self.plan.buckets:
            value = (
                self.job.nodes[nodes[bucket.index]].engine.homes._server[self.plan.id, bucket.index, rank].home.value
            )
            assert value is not None
            for tensor in bucket.tensors:
                start = self._offsets[tensor.name]
                whole[start : start + tensor.numel] = value[tensor.start : tensor.start + tensor.numel]
        return whole
