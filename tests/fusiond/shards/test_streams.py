"""Codecs that remember something live as long as the stream that they encode: contributions to a home, its answers to
one worker, the operations of one name. All codecs that can go to homes, on 4 to 8 ranks of 2 to 4 nodes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fusion_rt import algorithms, codecs, wire
from fusion_rt.codecs import layout_of
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array, SimulatedJob

DIM, RATE = 480, 0.05
START = np.random.default_rng(1).standard_normal(DIM).astype(np.float32)
LAYOUTS = {4: [2, 2], 6: [3, 1, 2], 8: [2, 2, 2, 2]}
LOSSY = {
    "fp16": "fp16",
    "bf16": "bf16",
    "topk": "topk(density=0.25, minimum=0)",
    "gaussiank": "gaussiank(density=0.25, minimum=0)",
    "thresholdk": "thresholdk(density=0.25, minimum=0, every=4)",
    "randomk": "randomk(density=0.25, minimum=0)",
    "demo": "demo(density=0.25, minimum=0, chunk=16)",
    "int8": "int8(minimum=0)",
    "int4": "int4(minimum=0)",
    "int2": "int2(minimum=0)",
    "onebit": "onebit(minimum=0)",
}
"""Of all codecs: dense has nothing to lose, and powersgd cannot go to homes."""
by_codec = pytest.mark.parametrize(("ranks", "codec"), list(zip(itertools.cycle(LAYOUTS), LOSSY, strict=False)))


def test_no_codec_is_left_out() -> None:
    assert {*LOSSY, "dense", "powersgd"} == set(codecs.CODECS)


def workers_of(ranks: int, algorithm: str, codec: str, job: SimulatedJob | None = None) -> Workers:
    """Workers whose codec encodes at least 80 % of the elements."""
    workers = Workers(LAYOUTS[ranks], algorithm, START, RATE, codec=LOSSY.get(codec, codec), job=job)
    chosen = codecs.parse(workers.plan.reduction.codec)
    opened = [codecs.open_bucket(chosen, layout_of(bucket)) for bucket in workers.plan.buckets]
    assert not any(bucket.lossless for bucket in opened)
    assert sum(bucket.dense.size for bucket in opened if hasattr(bucket, "dense")) <= 0.2 * DIM
    return workers


def gradient(rank: int, step: int) -> Array:
    return np.random.default_rng([rank, step]).standard_normal(DIM).astype(np.float32)


def train(workers: Workers, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        for rank in workers.job.ranks:
            workers.post(rank, np.float32(scale) * gradient(rank, step))
        for rank in workers.job.ranks:
            workers.collect(rank)


def apart(workers: Workers) -> float:
    """How far the ranks are from homes on other nodes: the largest of the roots of the mean squares."""
    found = []
    for rank in workers.job.ranks:
        node = workers.job.topology.node_of(rank)
        for bucket in workers.plan.buckets:
            if workers.plan.homes[bucket.index] != node:
                for _, of in workers.places(rank, bucket):
                    found.append(float(np.sqrt(np.mean((workers.x[rank][of] - workers.home()[of]) ** 2))))
    assert found
    return max(found)


@pytest.mark.parametrize("algorithm", ["bsp", "asp", "decoupled(steps=1, quorum=1, outer_momentum=0.0)"])
@by_codec
def test_a_copy_on_another_node_comes_to_all_that_its_home_has(ranks: int, codec: str, algorithm: str) -> None:
    """Without gradients; a selection of a fourth has reached every element by then, whatever it draws."""
    workers = workers_of(ranks, algorithm, codec)
    train(workers, range(3))
    before = apart(workers)
    train(workers, range(3, 43), scale=0.0)
    share = 0.2 if codec in ("int2", "onebit") else 0.02  # of few bits, the largest elements take longer
    assert apart(workers) < max(share * before, 1e-6)


@pytest.mark.parametrize("codec", ["topk", "gaussiank", "thresholdk", "randomk", "demo"])
def test_a_clip_is_of_gradients_and_not_of_what_a_home_tells(codec: str) -> None:
    """Whose difference to what a rank has may be larger than any gradient."""
    workers = workers_of(4, "asp", LOSSY[codec].replace(")", ", clip=0.001)"))
    train(workers, range(1))
    for hosted in [hosted for node in workers.job.nodes for hosted in node.engine.homes._server]:
        assert hosted.home.value is not None
        hosted.home.value += 1
    before = apart(workers)
    train(workers, range(1, 41), scale=0.0)
    assert before > 0.9
    assert apart(workers) < 0.02


@pytest.mark.parametrize("codec", ["topk", "gaussiank", "thresholdk", "randomk", "demo"])
def test_answers_become_as_sparse_as_contributions_when_the_warmup_is_over(codec: str) -> None:
    text = LOSSY[codec].replace("0.25", "0.02").replace(")", ", warmup=5)")
    workers = Workers([2, 2], "asp", np.tile(START, 20), RATE, codec=text)

    def sent_in(steps: range) -> int:
        before = sum(workers.job.payload_bytes)
        for step in steps:
            for rank in workers.job.ranks:
                workers.post(rank, np.tile(gradient(rank, step), 20))
                workers.collect(rank)
        return sum(workers.job.payload_bytes) - before

    sent_in(range(1))  # which is answered in full
    first, _, late = sent_in(range(1, 2)), sent_in(range(2, 8)), sent_in(range(8, 9))
    assert late < 0.4 * first


@pytest.mark.parametrize("codec", ["int8", "int4", "int2"])
def test_ranks_round_their_contributions_by_draws_of_their_own(codec: str) -> None:
    """All post the same, so that the error of the mean of the seven on other nodes is as small as independence makes
    it; with the same draws it would be that of each."""
    text = LOSSY[codec].replace(")", ", rounding='random', feedback=False)")
    errors: list[float] = []
    for layout in ([0, 7], [0, 1]):
        workers = Workers(layout, "bsp", np.zeros(6000, np.float32), 1.0, codec=text,
                          job=SimulatedJob(layout, shard_hosts="host0"))  # fmt: skip
        assert set(workers.plan.homes) == {0}
        values = np.random.default_rng(3).uniform(0.5, 1.5, 6000).astype(np.float32)  # none is too large for int2
        for rank in workers.job.ranks:
            workers.post(rank, values)
        errors.append(float(np.std(workers.home() + values)))
    assert errors[1] / np.sqrt(7) / 1.15 < errors[0] < errors[1] / np.sqrt(7) * 1.15


# --- from a checkpoint ------------------------------------------------------------------------------------------------

RESTORED = ["bsp", "asp", "dc_asgd", "partial(backup=1)", "softsync(contributions=2)", "choco(topology='torus')"]


@pytest.mark.parametrize("algorithm", RESTORED)
@by_codec
def test_a_restored_training_goes_on_bit_by_bit(ranks: int, codec: str, algorithm: str) -> None:
    if algorithm.startswith("choco") and not codecs.parse(LOSSY[codec]).stateful:
        pytest.skip("choco has to have a codec that selects")
    first = workers_of(ranks, algorithm, codec)
    train(first, range(4))
    job = SimulatedJob(LAYOUTS[ranks])
    for node, state in enumerate(first.job.saved_homes(first.plan)):
        job.load_homes(node, state)
    second = workers_of(ranks, algorithm, codec, job)
    second.x = [x.copy() for x in first.x]
    if algorithms.parse(algorithm).at_shards:
        for rank in job.ranks:
            second.say(rank)
    for workers in (first, second):
        train(workers, range(4, 8))
    for mine, other in zip(first.x, second.x, strict=True):
        if codec == "demo":  # to within rounding, as docs/compression.md says
            np.testing.assert_allclose(other, mine, rtol=0, atol=1e-5)
        else:
            assert (mine == other).all()


@pytest.mark.parametrize("codec", ["topk", "randomk", "int2"])
def test_a_rank_that_goes_on_from_another_ranks_copy_comes_to_what_the_home_has_all_the_same(codec: str) -> None:
    """Ranks of a node load one file."""
    workers = workers_of(8, "asp", codec)
    train(workers, range(3))
    for rank in workers.job.ranks:
        workers.x[rank] = workers.x[rank - rank % 2].copy() + np.float32(0.1 * (rank % 2))
        workers.say(rank)
    train(workers, range(3, 43), scale=0.0)
    assert apart(workers) < 0.01


# --- what an algorithm knows of each rank -----------------------------------------------------------------------------


@for_each("survives", [False, True])
@by_codec
def test_delay_compensation_is_from_what_each_rank_has(ranks: int, codec: str, survives: bool) -> None:
    """At the home, and at its mirror, which takes the same steps."""
    layout = LAYOUTS[ranks]
    workers = Workers(layout, "dc_asgd(adaptive=True)", START, RATE, codec=LOSSY[codec], survives=survives)
    order = np.random.default_rng(4).integers(0, ranks, 40).tolist()
    workers.follow(order, lambda rank, step, x: x - gradient(rank, 0), lambda rank, step: 1)
    for node in workers.job.nodes:
        for hosted in node.engine.homes._server:
            assert hosted.home.clock == order.count(order[-1]), "what a rank is told is no contribution"
            for rank in set(order):
                for place, of in workers.places(rank, hosted.bucket):
                    del place
                    tensors = [t for t in hosted.bucket.tensors if workers._offsets[t.name] == of.start]
                    kept = hosted.home.aux[f"w_bak/{rank}"][tensors[0].start : tensors[0].start + tensors[0].numel]
                    assert (kept == workers.x[rank][of]).all()
        for mirror in node.engine.homes._mirrors._mirrors.values():
            state = mirror.state_at(1 << 40)
            home = (
                workers.job.nodes[workers.plan.homes[mirror.bucket.index]]
                .engine.homes._server[workers.plan.id, mirror.bucket.index, -1]
                .home
            )
            assert state is not None
            for key in ("value", *(f"aux/w_bak/{rank}" for rank in range(ranks))):
                expected = home.value if key == "value" else home.aux[key.removeprefix("aux/")]
                assert (state[key] == expected).all()


# --- operations of one name -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gradients", "allreduce.noname"])
def test_an_operation_that_is_repeated_sends_other_elements_each_time(name: str) -> None:
    job = SimulatedJob([2, 1, 1])
    signature = wire.Signature("allreduce", "float32", (DIM,), codec="randomk(density=0.25, minimum=0, feedback=False)")
    arrived = np.zeros(DIM, bool)
    for clock in range(40):
        handles = job.submit_all(name, signature, [np.ones(DIM, np.float32)] * 4, clock)
        results = [job.result(rank, handle) for rank, handle in enumerate(handles)]
        assert all((result == results[0]).all() for result in results)
        arrived |= results[0] != 0
    assert arrived.all()
