"""Elastic averaging and gossip: the published rules, on one and on several nodes, to rounding."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from fusion_rt import codecs, wire
from fusion_rt.codecs import layout_of
from fusion_rt.core import mixing
from fusion_rt.core.errors import WireError
from fusiond.shards.messages import pack, unpack
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array
from tests.reference import algorithms as published

LAYOUTS = [[4], [2, 2], [1, 1, 1, 1], [0, 3, 1]]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
RANKS, RATE, DIM, STEPS = 4, 0.05, 30, 50
PROBLEM = published.quadratic(RANKS, DIM, seed=3)
START = np.random.default_rng(1).standard_normal(DIM)
ORDER = np.random.default_rng(2).integers(0, RANKS, 200).tolist()


def close(actual: object, expected: object) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]


def exchange_all(workers: Workers, values: list[Array]) -> None:
    """All ranks post, in any order, and take their answers; `x` of each is `values` when the answer comes."""
    for rank in range(RANKS):
        workers.post(rank, values[rank], settle=False)
    workers.job.settle()
    for rank in range(RANKS):
        workers.x[rank] = values[rank].copy()
        workers.collect(rank)


# --- elastic averaging ------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("name", ["easgd", "ea_wild"])
def test_elastic_averaging_in_order_of_arrival(layout: list[int], name: str) -> None:
    period, alpha = 3, 0.2
    run = published.easgd_async(START, PROBLEM, RANKS, RATE, alpha, period, ORDER)
    workers = Workers(layout, f"{name}(steps={period}, alpha={alpha})", START, RATE)
    clocks = [0] * RANKS
    for rank in ORDER:
        gradient = PROBLEM(rank, clocks[rank], workers.x[rank])
        if clocks[rank] % period == 0:
            workers.post(rank, workers.x[rank])
        workers.x[rank] = workers.x[rank] - RATE * gradient
        if clocks[rank] % period == 0:
            workers.collect(rank)
        clocks[rank] += 1
    close(workers.home(), run.homes[-1])
    close(np.stack(workers.x), run.workers[-1])


@layouts
def test_synchronous_elastic_averaging(layout: list[int]) -> None:
    run = published.easgd_sync(START, PROBLEM, RANKS, RATE, 0.2, 1, STEPS)
    workers = Workers(layout, "easgd(steps=1, alpha=0.2, synchronous_home=True)", START, RATE)
    for step in range(STEPS):
        gradients = [PROBLEM(rank, step, workers.x[rank]) for rank in range(RANKS)]
        exchange_all(workers, list(workers.x))
        for rank in range(RANKS):
            workers.x[rank] = workers.x[rank] - RATE * gradients[rank]
    close(workers.home(), run.homes[-1])
    close(np.stack(workers.x), run.workers[-1])


def test_the_elastic_step_conserves_the_sum_of_all_copies() -> None:
    workers = Workers([2, 2], "easgd(steps=1)", START, RATE)
    workers.x = [START + np.random.default_rng(rank).standard_normal(DIM) for rank in range(RANKS)]
    before = sum(workers.x) + workers.home()
    for rank in ORDER:
        workers.post(rank, workers.x[rank])
        workers.collect(rank)
    close(sum(workers.x) + workers.home(), before)


# --- gossip -----------------------------------------------------------------------------------------------------------


@layouts
@for_each("topology", ["ring", "complete", "exponential"])
def test_dpsgd_mixes_while_the_gradient_is_computed(layout: list[int], topology: str) -> None:
    graph = mixing.parse(topology, RANKS)
    run = published.dpsgd(np.stack([START] * RANKS), PROBLEM, graph.matrix, RATE, STEPS)
    workers = Workers(layout, f"dpsgd(topology={topology!r})", START, RATE)
    for step in range(STEPS):
        posted = [x.copy() for x in workers.x]
        moved = [x - RATE * PROBLEM(rank, step, x) for rank, x in enumerate(posted)]
        for rank in range(RANKS):
            workers.post(rank, posted[rank], settle=False)
        workers.job.settle()
        for rank in range(RANKS):
            workers.x[rank] = moved[rank]
            workers.collect(rank)
    close(np.stack(workers.x), run.workers[-1])


@layouts
@pytest.mark.parametrize("topology", ["exponential", "one-peer-exponential", "file"])
def test_stochastic_gradient_push(layout: list[int], topology: str, tmp_path: object) -> None:
    if topology == "file":  # columns add up to 1, rows do not: omega changes
        path = f"{tmp_path}/p"
        np.savetxt(path, [[0.5, 0.2, 0, 0.3], [0.25, 0.5, 0.1, 0], [0.25, 0, 0.9, 0.2], [0, 0.3, 0, 0.5]])
        topology = f"file:{path}"
    graph = mixing.parse(topology, RANKS)
    run = published.sgp(np.stack([START] * RANKS), PROBLEM, graph.matrix, RATE, STEPS)
    workers = Workers(layout, f"sgp(topology={topology!r})", START, RATE)
    for step in range(STEPS):
        exchange_all(workers, [x - RATE * PROBLEM(rank, step, x) for rank, x in enumerate(workers.x)])
    close(np.stack(workers.x), run.debiased[-1])
    omegas = [float(hosted.home.aux["omega"][0]) for node in workers.job.nodes
              for hosted in node.engine.homes._server if hosted.bucket.index == 0]  # fmt: skip
    close(sum(omegas), RANKS)
    if "file" not in topology:
        close(omegas, 1.0)


@layouts
@pytest.mark.parametrize("codec", ["topk(density=0.3, minimum=0)", "int8(minimum=0)"])
def test_choco_sends_what_a_codec_makes_of_the_difference(layout: list[int], codec: str) -> None:
    start = START.astype(np.float32)
    graph = mixing.parse("ring", RANKS)
    workers = Workers(layout, "choco(gamma=0.4)", start, RATE, codec=codec)
    opened = [
        codecs.open_bucket(codecs.parse(codec).without_memory(), layout_of(bucket)) for bucket in workers.plan.buckets
    ]

    sent: list[Array] = []

    def quantise(difference: Array) -> Array:
        sent.append(difference)
        if len(sent) <= RANKS:  # the first message of each rank is whole
            return difference
        told = np.empty_like(difference)
        for bucket, one in zip(workers.plan.buckets, opened, strict=True):
            for place, of in workers.places(0, bucket):
                place[:] = difference[of]
            whole = workers.memory[0][bucket.offset : bucket.offset + 4 * bucket.numel].view(np.float32)
            for tensor in bucket.tensors:  # what lies between tensors is no part of them
                end = tensor.start + tensor.numel
                whole[end : -(-end // 16) * 16] = 0
            whole[:] = unpack(one, pack(one, whole.copy()))
            for place, of in workers.places(0, bucket):
                told[of] = place
        return told

    run = published.choco(start, PROBLEM, graph.matrix(0), RATE, 0.4, quantise, STEPS)
    for step in range(STEPS):
        exchange_all(workers, [(x - RATE * PROBLEM(r, step, x)).astype(np.float32) for r, x in enumerate(workers.x)])
    np.testing.assert_allclose(np.stack(workers.x), run.workers[-1], rtol=2e-3, atol=2e-4)


@layouts
@for_each("topology", ["ring", "complete"])
def test_adpsgd_averages_pairs_while_both_compute(layout: list[int], topology: str) -> None:
    graph = mixing.parse(topology, RANKS)
    workers = Workers(layout, f"adpsgd(topology={topology!r})", START, RATE)
    events: list[published.Event] = []
    steps = [0] * RANKS
    for rank in [0, 2, 1, 3, *ORDER]:
        workers.x[rank] = workers.x[rank] - RATE * PROBLEM(rank, steps[rank], workers.x[rank])
        workers.post(rank, workers.x[rank])
        workers.collect(rank)
        events.append(("step", rank))
        if rank % 2:
            partners = graph.partners(rank)
            events.append(("mix", rank, partners[steps[rank] % len(partners)]))
        steps[rank] += 1
    run = published.adpsgd(np.stack([START] * RANKS), PROBLEM, RATE, events)
    for rank in range(RANKS):
        close(workers.replica(rank), run.workers[-1][rank])


def test_a_stopped_worker_holds_up_nobody_in_adpsgd() -> None:
    workers = Workers([1, 1, 1, 1], "adpsgd(topology='ring')", START, RATE)
    for rank in (0, 2, 1, 3):
        workers.post(rank, workers.x[rank])
        workers.collect(rank)
    for step in range(100):  # rank 2 is stopped
        for rank in (0, 1, 3):
            workers.post(rank, workers.x[rank] - RATE * PROBLEM(rank, step, workers.x[rank]))
            assert not workers.waits(rank)
            workers.collect(rank)


def test_gossip_goes_on_when_a_rank_leaves() -> None:
    for algorithm in ("dpsgd(topology='ring')", "sgp(topology='ring')", "adpsgd(topology='ring')"):
        workers = Workers([2, 2], algorithm, START, RATE)
        for rank in range(3):
            workers.post(rank, START)
        workers.job.leave(3)
        workers.job.settle()
        for rank in range(3):
            workers.collect(rank)
            close(workers.x[rank], START)


def test_what_a_home_never_sends_is_refused() -> None:
    workers = Workers([1, 1, 1, 1], "dpsgd(topology='ring')", START, RATE)
    homes = workers.job.nodes[0].engine.homes
    piece = wire.Piece(0, workers.plan.id, 0, "mix", 0, 1, 0, 0, 4, 0)
    for bad in (
        {"kind": "post"}, {"kind": "answer"}, {"kind": "seed"}, {"home": 1}, {"home": -1}, {"rank": 2}, {"bucket": 9},
        {"nbytes": 1 << 40},
    ):  # fmt: skip
        with pytest.raises(WireError):
            homes.peer(1, msgspec.structs.replace(piece, **bad), memoryview(b"abcd"))
