"""Jobs on slow links, in virtual time: no link stalls, links carry what they can, and whoever leaves has delivered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fusion_rt import wire
from fusiond.membership import startup
from fusiond.transport import probe
from tests.for_each import for_each
from tests.fusiond.network_simulation import Network, VirtualWorker, job

KIB, MIB = 1024, 1024 * 1024


def plan_of(sizes: list[int]) -> wire.Proposal:
    """A plan of a bucket for each number of bytes."""
    tensors = tuple(
        wire.TensorSpec(f"w{index}", "float32", (nbytes // 4,), together=index + 1)
        for index, nbytes in enumerate(sizes)
    )
    return wire.Proposal("opt", 0, 0, wire.Reduction("sum"), tensors)


def loss(worker: VirtualWorker, clock: int) -> int:
    """Sums up a tensor outside of the plan."""
    signature = wire.Signature("allreduce", "float32", (1,))
    return worker.submit(wire.Submit(next(worker.handles), "loss", clock, signature, inline=bytes(4)))


def train(
    worker: VirtualWorker, proposal: wire.Proposal, steps: int, pause: float = 0.0, together: bool = False
) -> Iterator[Any]:
    """Sums up a tensor in each step, fills all buckets, in an order of its own, and waits for them. Checks the sums.
    `together`: waits for all ranks in the end."""
    network, choose = worker.daemon.network, worker.daemon.network.random
    handle = worker.submit(wire.Propose(next(worker.handles), proposal))
    yield [handle]
    planned = worker.answers[handle]
    assert isinstance(planned, wire.Planned), planned
    plan = planned.plan
    worker.daemon.tell(worker, wire.AddSegment(1, plan.nbytes, plan.id))
    ranks = worker.daemon._formation.engine.topology.size
    for clock in range(steps):
        yield [loss(worker, clock)]
        began = network.now
        handles = []
        for bucket in choose.sample(plan.buckets, len(plan.buckets)):
            values = worker.memory[bucket.offset : bucket.offset + 4 * bucket.numel].view(np.float32)
            values[:] = worker.rank + clock
            yield network.late() + choose.random() * pause
            ready = wire.Ready(next(worker.handles), plan.id, bucket.index, clock, urgency=choose.randrange(3))
            handles.append(worker.submit(ready))
        yield handles
        worker.seconds.append(network.now - began)
        if worker.failures:
            return
        for bucket in plan.buckets:
            values = worker.memory[bucket.offset : bucket.offset + 4 * bucket.numel].view(np.float32)
            np.testing.assert_array_equal(values, sum(range(ranks)) + ranks * clock)
    if together:
        yield [loss(worker, steps)]


def run(network: Network, local_sizes: list[int], sizes: list[int], steps: int = 2, **settings: Any) -> list[float]:
    """A job that trains until its last daemon has ended. Returns the seconds of all steps on all ranks."""
    habits = {name: settings.pop(name) for name in ("pause", "together") if name in settings}
    workers = job(network, local_sizes, sum(sizes) + 4096 * len(sizes), **settings)
    for worker in workers:
        worker.begin(train(worker, plan_of(sizes), steps, **habits))
    network.run(lambda: all(daemon.loop.stopped for daemon in network.daemons), 10_000.0)
    failures = [failure for worker in workers for failure in worker.failures]
    assert not failures, failures
    assert [daemon.failure for daemon in network.daemons] == [""] * len(local_sizes)
    assert not network.stalls, f"links stalled {len(network.stalls)} times"
    return [seconds for worker in workers for seconds in worker.seconds]


@for_each("seed", range(4))
def test_buckets_of_any_size_take_what_the_links_take(seed: int) -> None:
    """Small messages that are not acknowledged held up large ones until the next heartbeat."""
    choose = random.Random(seed)
    sizes = [choose.randrange(4, 400_000) * 4 for _ in range(8)]
    network = Network(seed, 25e6, 1e-4)
    took = run(network, [1] * 4, sizes)
    assert max(took) < 1.05 * 1.5 * sum(sizes) / 25e6


@for_each("latency", [1e-4, 5e-3, 20e-3, 50e-3])
def test_links_with_a_long_way_carry_as_much_as_others(latency: float) -> None:
    """Each of 6 hops takes the latency, and nothing else is lost."""
    took = run(Network(0, 25e6, latency), [1] * 4, [16 * MIB])
    assert max(took) < 1.05 * 1.5 * 16 * MIB / 25e6 + 6 * latency


def schedule(seed: int) -> None:
    """A job of any shape, on links of any kind, some of which break."""
    choose = random.Random(seed)
    network = Network(seed, 10 ** choose.uniform(4.5, 6), 10 ** choose.uniform(-4, -1.5))
    local_sizes = [choose.choice([1, 1, 2]) for _ in range(choose.randrange(2, 6))]
    for node in range(len(local_sizes)):
        if choose.random() < 0.2:
            network.rates[node] = network.rate / 10
    sizes = [4 * choose.randrange(1, 2 ** choose.randrange(3, 15)) for _ in range(choose.randrange(1, 9))]
    for _ in range(choose.choice([0, 0, 3])):
        network.at(0.1 + 3 * choose.random(), network.break_something)
    run(
        network,
        local_sizes,
        sizes,
        chunk_bytes=choose.choice([4096, 8192]),
        window_bytes=choose.choice([4096, 65536]),
        link_credit=choose.choice([0, 1, 5000, 20_000, 2**24]),
        connections=choose.choice([1, 1, 2]),
        pause=choose.choice([0.0, 0.1]),
        together=choose.random() < 0.5,
        start_timeout=1000.0,
    )
    for daemon in network.daemons:
        gone = set()
        for node, what in daemon.heard:
            if what is wire.Departed:
                gone.add(node)
            assert what is wire.Departed or node not in gone or local_sizes[node] > 1, "it left before it delivered"


@pytest.fixture
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that carry little are measured with little."""
    monkeypatch.setattr(probe, "LARGE", 4096)
    monkeypatch.setattr(probe, "_ROUNDS", (1, 1, *[4096] * 4))
    monkeypatch.setattr(startup, "FEW", (1, 1, *[4096] * 4))


@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_whatever_the_schedule_nothing_stalls_and_healthy_jobs_end(first: int) -> None:
    for seed in range(first, first + 20):
        print(f"seed {seed}")
        schedule(seed)


@pytest.mark.long
@pytest.mark.usefixtures("small_probes")
@pytest.mark.parametrize("first", range(120, 3120, 500))
def test_thousands_of_schedules_do_not_stall(first: int) -> None:
    for seed in range(first, first + 500):
        print(f"seed {seed}")
        schedule(seed)
