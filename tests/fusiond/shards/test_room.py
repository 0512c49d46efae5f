"""Messages to and from homes leave as there is room: what is under way does not grow with the number of buckets, and
nodes that wait for each other's room go on, in whatever order their ranks post."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fusion_rt import algorithms, wire
from tests.for_each import for_each
from tests.fusiond.algorithms.training import SGD
from tests.fusiond.simulation import SimulatedJob

ELEMENTS = 1 << 16  # of a bucket, which is one tensor
NBYTES = 4 * ELEMENTS
RECORDS = 16 * 1024  # bytes of a home and its messages, which are no values
AT_SHARDS = ["bsp", "asp", "ssp(staleness=1)", "softsync(contributions=2)", "dc_asgd", "partial(backup=1)", "hogwild"]
OUTER = ["easgd(steps=1)", "easgd(steps=1, synchronous_home=True)", "decoupled(steps=1, quorum=1)"]
MIXING = ["dpsgd", "sgp", "adpsgd", "noloco(steps=1)"]


class Job:
    """A job whose ranks post all buckets of a step at once.

    Args:
        seed: of the order of all events, and of that in which each rank posts its buckets.
    """

    def __init__(
        self,
        layout: Sequence[int],
        algorithm: str,
        buckets: int,
        codec: str = "dense",
        seed: int = 0,
        rows: int = 256,
        survives: bool = False,
        seeds: bool = True,
    ) -> None:
        self.job = SimulatedJob(layout, seed, fusion_threshold=NBYTES, chunk_bytes=1 << 14, window_bytes=1 << 16)
        self.spec = algorithms.parse(algorithm)
        self.order = random.Random(seed)
        shape = (rows, ELEMENTS // 256)
        tensors = tuple(wire.TensorSpec(f"w{i}", "float32", shape) for i in range(buckets))
        reduction = wire.Reduction(codec=codec, algorithm=algorithm, optimizer=SGD, survives=survives)
        self.plan = self.job.plan(wire.Proposal("opt", 0, 0, reduction, tensors))
        self.buckets = [bucket.index for bucket in self.plan.buckets]
        self.memory = [bytes_of.view(np.float32) for bytes_of in self.job.add_plan_memory(self.plan)]
        for rank in [] if not seeds else [0] if self.spec.at_shards else self.job.ranks:
            self.memory[rank][:] = 1.0
            self.post([rank], 0, "seed")

    def post(self, ranks: Sequence[int], clock: int, kind: str = "post") -> list[tuple[int, int]]:
        """Has ranks post all buckets, each in an order of its own, and waits. Returns ranks and handles."""
        handles: list[tuple[int, int]] = []

        def ready(rank: int, bucket: int) -> None:
            self.job._handles += 1
            handle = self.job._handles
            handles.append((rank, handle))
            message = wire.Ready(handle, self.plan.id, bucket, clock, (), (0.1,), 1, kind)  # type: ignore[arg-type]
            self.job.engine(rank).ready(rank, message)

        for rank in ranks:
            for bucket in self.order.sample(self.buckets, len(self.buckets)):
                self.job.later(rank, lambda rank=rank, bucket=bucket: ready(rank, bucket))  # type: ignore[misc]
        self.job.settle()
        return handles

    def fill(self, clock: int) -> None:
        """All ranks have a new contribution."""
        for rank in self.job.ranks:
            self.memory[rank][:] = np.random.default_rng([rank, clock]).random(len(self.memory[rank]))

    def step(self, clock: int) -> None:
        """All ranks take a step, and all are answered."""
        handles = self.post(self.job.ranks, clock)
        self.job.pass_time(3)  # as decoupled needs
        for rank, handle in handles:
            message, _ = self.job.answer(rank, handle)
            assert isinstance(message, wire.Done), message

    def in_use(self) -> set[tuple[int, int]]:
        """Returns the bytes and the waiting messages that nodes know of, in each direction."""
        rooms = [node.engine.homes.statistics()["room"] for node in self.job.nodes]
        return {(of["bytes"], of["waiting"]) for room in rooms for of in room.values()}  # type: ignore[attr-defined]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two buckets in each direction; all messages need some."""
    monkeypatch.setattr("fusiond.shards.node.ROOM_BYTES", 2 * NBYTES)
    monkeypatch.setattr("fusiond.shards.node.SMALL_BYTES", 0)


def peak_of_a_step(algorithm: str, buckets: int, codec: str = "dense") -> float:
    """Returns the bytes that two nodes allocate at most, at a time, in a step after the first ones."""
    tracemalloc.start()
    try:
        job = Job([1, 1], algorithm, buckets, codec)
        for clock in range(2):
            job.fill(clock)
            job.step(clock)
        job.fill(2)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        job.step(2)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


# Of each bucket, on both nodes together: contributions that wait at its homes for others of the same clock.
KEPT = {
    "bsp": 1,
    "partial(backup=1)": 1,
    "easgd(steps=1, synchronous_home=True)": 1,
    "dpsgd": 2,
    "sgp": 2,
    "noloco(steps=1)": 2,
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("algorithm", [*AT_SHARDS, *OUTER, *MIXING])
def test_messages_under_way_do_not_grow_with_the_number_of_buckets(algorithm: str) -> None:
    few, many = 8, 16
    grown = peak_of_a_step(algorithm, many) - peak_of_a_step(algorithm, few)
    assert grown <= (many - few) * (KEPT.get(algorithm, 0) * NBYTES + RECORDS) + 2 * NBYTES


@pytest.mark.parametrize("algorithm", [*AT_SHARDS, *OUTER, *MIXING])
@pytest.mark.parametrize("layout", [[1, 1, 1, 1], [2, 1, 2, 1, 2]], ids=str)
def test_nodes_do_not_wait_for_each_others_room(
    layout: list[int], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusiond.shards.node.ROOM_BYTES", 1)  # one message at a time
    monkeypatch.setattr("fusiond.shards.node.SMALL_BYTES", 0)
    for seed in range(4):
        for codec in ("dense", "topk(density=0.1, minimum=0)" if algorithm in AT_SHARDS else "fp16"):
            job = Job(layout, algorithm, 5, codec, seed, rows=4)
            for clock in range(3):
                job.fill(clock)
                job.step(clock)
            assert job.in_use() == {(0, 0)}, (seed, codec)


def watched(job: SimulatedJob) -> list[int]:
    """Returns a list to which the bytes are added that a node has under way in exchanges and messages, at all times."""
    seen = [0]
    step = job.step

    def look() -> bool:
        for node in job.nodes:
            rooms: Any = node.engine.homes.statistics()["room"]
            exchanges = node.engine.exchanges.admission.statistics()["bytes"]
            seen.append(exchanges + sum(of["bytes"] for of in rooms.values()))
        return step()

    job.step = look  # type: ignore[method-assign]
    return seen


@pytest.mark.usefixtures("small")
@for_each("layout", [[1, 1], [1, 2, 1]])
def test_shards_tell_their_mirrors_of_their_seeds_as_there_is_room(layout: list[int]) -> None:
    job = Job(layout, "bsp", 16, survives=True, seeds=False)
    seen = watched(job.job)
    job.post([0], 0, "seed")
    assert max(seen) <= 4 * (NBYTES + 64)  # two in their room, one beyond it, and one that has left and has it still
    job.step(0)
    assert job.in_use() == {(0, 0)}


def test_exchanges_and_messages_have_one_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusiond.operations.admission.SCRATCH_BYTES", 6 * NBYTES)
    monkeypatch.setattr("fusiond.engine.exchanges.SCRATCH_BYTES", 6 * NBYTES)
    monkeypatch.setattr("fusiond.shards.node.ROOM_BYTES", 4 * NBYTES)
    job = Job([1, 1], "asp", 16)
    seen = watched(job.job)
    tensors = tuple(wire.TensorSpec(f"g{i}", "float32", (256, ELEMENTS // 256)) for i in range(16))
    plan = job.job.plan(wire.Proposal("gradients", 0, 0, wire.Reduction(codec="int8"), tensors))
    job.job.add_plan_memory(plan)
    handles = [(0, job.job.ready(0, plan, bucket, 0)) for bucket in range(16)]
    job.job.settle()
    exchanges = job.job.nodes[0].engine.exchanges.admission.statistics()
    assert exchanges["bytes"] > 4 * NBYTES  # under way, while rank 1 is late
    assert exchanges["waiting"] > 0
    for clock in range(2):
        job.fill(clock)
        job.step(clock)
    assert job.in_use() == {(0, 0)}
    assert max(seen) <= (6 + 2) * NBYTES  # a request and an answer may be beyond
    handles += [(1, job.job.ready(1, plan, bucket, 0)) for bucket in range(16)]
    job.job.settle()
    for rank, handle in handles:
        assert isinstance(job.job.answer(rank, handle)[0], wire.Done)
    assert {node.engine._context.room.used for node in job.job.nodes} == {0}
