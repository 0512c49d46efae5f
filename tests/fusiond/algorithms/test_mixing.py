"""What mixing keeps, whatever the graph, the codec, and the ranks that wait, join, leave, or set their parameters.

No gradients, no learning: ranks begin with different vectors. The mean of all that take part stays, to rounding; ranks
come together; and what all ranks have set to the same stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fusion_rt import algorithms, codecs, wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import MixingError
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array

DIM = 30
SIZES = {4: [2, 2], 6: [1, 2, 3], 8: [2, 2, 2, 2]}
TOPK = "topk(density=0.3, minimum=0)"
SYMMETRIC = ("ring", "torus", "random-pairs", "complete")
DIRECTED = ("exponential", "one-peer-exponential", "file:directed")
CASES = [
    *(("dpsgd", graph, "dense") for graph in (*SYMMETRIC, *DIRECTED)),
    *(("sgp", graph, "dense") for graph in ("ring", "random-pairs", *DIRECTED, "file:columns")),
    *(("noloco(steps=1)", graph, "dense") for graph in SYMMETRIC),
    *(("choco", graph, TOPK) for graph in ("ring", "torus", "complete")),
    *(("dpsgd", graph, "fp16") for graph in ("ring", "one-peer-exponential")),
    ("sgp", "exponential", "bf16"),
]
IDS = [f"{name}-{graph}-{codec.partition('(')[0]}" for name, graph, codec in CASES]
every_case = pytest.mark.parametrize(("name", "graph", "codec"), CASES, ids=IDS)
ranks_of_jobs = pytest.mark.parametrize("ranks", SIZES)


def directed(ranks: int) -> Array:
    """Doubly stochastic, and not symmetric: a fifth to the next rank, and a tenth to the one three further."""
    eye = np.eye(ranks)
    return 0.7 * eye + 0.2 * np.roll(eye, 1, axis=0) + 0.1 * np.roll(eye, 3, axis=0)


def columns(ranks: int) -> Array:
    """Column-stochastic only: rank j keeps 1 / (j + 2), and gives the rest to the next one."""
    kept = 1 / (np.arange(ranks) + 2)
    return np.diag(kept) + np.roll(np.diag(1 - kept), 1, axis=0)


class Ranks(Workers):
    """Ranks that begin with different vectors, and mix."""

    def __init__(self, name: str, graph: str, codec: str, ranks: int, folder: Path, apart: float = 1.0) -> None:
        if graph.startswith("file:"):
            matrix = {"file:directed": directed, "file:columns": columns}[graph](ranks)
            np.savetxt(folder / "weights", matrix, "%.17g")
            graph = f"file:{folder / 'weights'}"
        rng = np.random.default_rng(7)
        start = rng.standard_normal(DIM).astype(np.float64 if codec == "dense" else np.float32)
        text = name.removesuffix(")") + (", " if "(" in name else "(") + f"topology={graph!r})"
        super().__init__(SIZES[ranks], text, start, 0.1, codec=codec)
        self.x = [x + apart * rng.standard_normal(DIM).astype(x.dtype) for x in self.x]
        self.there = list(range(ranks))

    def mix(self, times: int, *without: int) -> None:
        ranks = [rank for rank in self.there if rank not in without]
        for _ in range(times):
            for rank in ranks:
                self.post(rank, self.x[rank], settle=False)
            self.job.settle()
            for rank in ranks:
                self.collect(rank)

    def submit(self, rank: int, name: str, kind: str = "barrier") -> int:
        handle = self.job.submit(rank, name, wire.Signature(kind))  # type: ignore[arg-type]
        self.job.settle()
        return handle

    def meet(self, name: str, kind: str = "barrier", first: Sequence[int] = ()) -> None:
        """All that have not come yet come to an operation of all."""
        handles = [self.submit(rank, name, kind) for rank in self.there if rank not in first]
        assert all(self.job.is_answered(rank, h) for rank, h in zip(
            [rank for rank in self.there if rank not in first], handles, strict=True))  # fmt: skip

    def mean(self) -> Array:
        """The mean of what ranks have, with what their homes have for them, by their weights."""
        total, weights = np.zeros(DIM), np.zeros(DIM)
        for rank in self.there:
            handles = [self._ready(rank, b.index, self.clocks[rank], "ask") for b in self.plan.buckets]
            self.job.settle()
            for bucket, handle in zip(self.plan.buckets, handles, strict=True):
                message, _ = self.job.answer(rank, handle)
                assert isinstance(message, wire.Done), message
                assert message.sizes[0] == 1
                weight = message.sizes[1] * wire.WEIGHT_UNIT if len(message.sizes) > 1 else 1.0
                for place, of in self.places(rank, bucket):
                    total[of] += weight * (self.x[rank][of] + place)
                    weights[of] += weight
        return total / weights

    @property
    def spread(self) -> float:
        return float(np.ptp(np.stack([self.x[rank] for rank in self.there]), axis=0).max())

    @property
    def error(self) -> float:
        """What rounding makes of a mean."""
        return 1e-9 if self.x[0].dtype == np.float64 else 1e-5


def same(actual: Array, expected: Array, ranks: Ranks) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ranks.error)


@ranks_of_jobs
@every_case
def test_the_mean_stays_and_ranks_come_together(name: str, graph: str, codec: str, ranks: int, tmp_path: Path) -> None:
    job = Ranks(name, graph, codec, ranks, tmp_path)
    mean, spread = np.mean(job.x, 0), job.spread
    for _ in range(4):
        job.mix(10)
        same(job.mean(), mean, job)
    assert job.spread < (0.5 if codec == TOPK else 0.05) * spread


@ranks_of_jobs
@every_case
def test_the_mean_stays_when_ranks_wait(name: str, graph: str, codec: str, ranks: int, tmp_path: Path) -> None:
    job = Ranks(name, graph, codec, ranks, tmp_path)
    mean = np.mean(job.x, 0)
    for waiting in (1, ranks - 1):
        job.mix(2)
        job.submit(waiting, f"barrier {waiting}")
        job.mix(5, waiting)
        job.meet(f"barrier {waiting}", first=[waiting])
        job.mix(1)
        same(job.mean(), mean, job)


@every_case
def test_the_mean_stays_when_a_rank_waits_before_its_first_step(
    name: str, graph: str, codec: str, tmp_path: Path
) -> None:
    job = Ranks(name, graph, codec, 6, tmp_path, apart=0.0)
    mean = job.x[0].copy()
    job.submit(4, "barrier")
    job.mix(3, 4)
    job.meet("barrier", first=[4])
    job.mix(1)
    same(job.mean(), mean, job)
    same(np.stack(job.x), np.stack([mean] * 6), job)  # they began alike


@ranks_of_jobs
@every_case
def test_the_mean_stays_when_a_rank_joins_and_comes_back(
    name: str, graph: str, codec: str, ranks: int, tmp_path: Path
) -> None:
    job = Ranks(name, graph, codec, ranks, tmp_path)
    mean = np.mean(job.x, 0)
    job.mix(2)
    job.submit(2, "join", "join")
    job.mix(5, 2)
    job.meet("join", "join", first=[2])
    job.mix(20)
    same(job.mean(), mean, job)


@ranks_of_jobs
@every_case
def test_the_mean_of_those_that_are_left_stays(name: str, graph: str, codec: str, ranks: int, tmp_path: Path) -> None:
    job = Ranks(name, graph, codec, ranks, tmp_path)
    job.mix(2)
    for leaves in (1, ranks - 1):
        job.there.remove(leaves)
        mean = job.mean()
        job.job.leave(leaves)
        job.job.settle()
        job.mix(5)
        same(job.mean(), mean, job)


@every_case
def test_what_all_ranks_set_stays_whatever_was_before(name: str, graph: str, codec: str, tmp_path: Path) -> None:
    job = Ranks(name, graph, codec, 8, tmp_path)
    job.mix(3)
    job.submit(3, "barrier")
    job.mix(4, 3)
    job.meet("barrier", first=[3])
    fives = np.full(DIM, 5.0, job.x[0].dtype)
    job.set(fives, *job.there)
    for _ in range(5):
        job.mix(1)
        np.testing.assert_allclose(np.stack(job.x), 5.0, rtol=0, atol=1e-6)
    job.there.remove(5)
    job.job.leave(5)
    job.job.settle()
    job.mix(3)
    job.set(fives + 1, *job.there)
    job.mix(3)
    np.testing.assert_allclose(np.stack([job.x[rank] for rank in job.there]), 6.0, rtol=0, atol=1e-6)


def test_a_pair_that_averages_keeps_its_mean_and_what_all_ranks_set() -> None:
    for codec in ("dense", "fp16", "bf16"):
        job = Ranks("adpsgd", "bipartite", codec, 6, Path())
        mean = np.mean(job.x, 0)
        for round in range(20):
            for rank in np.random.default_rng(round).permutation(6).tolist():
                job.post(rank, job.x[rank])
                job.collect(rank)
        same(job.mean(), mean, job)
        job.post(1, job.x[1])  # asks, and is answered after all have set
        job.collect(1)
        job.set(np.full(DIM, 5.0, job.x[0].dtype))
        for rank in [*range(6), *range(6)]:
            job.post(rank, job.x[rank])
            job.collect(rank)
        np.testing.assert_allclose(np.stack(job.x), 5.0, rtol=0, atol=1e-6)


# --- parameters through codecs that round -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@for_each("layout", [[4], [2, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize(
    "algorithm",
    [
        "dpsgd", "dpsgd(topology='one-peer-exponential')", "sgp", "adpsgd", "noloco(steps=1)", "choco",
        "easgd(steps=1)", "ea_wild(steps=1)", "easgd(steps=1, synchronous_home=True)",
    ],
)  # fmt: skip
def test_steps_that_are_small_beside_the_parameters_count(algorithm: str, layout: list[int], codec: str) -> None:
    """A hundred steps of .001 from 1 end at .9, of all copies together, and close to it on each rank."""
    workers = Workers(layout, algorithm, np.ones(DIM, np.float32), 0.1, codec=codec)
    for _ in range(100):
        for rank in range(4):
            workers.x[rank] = workers.x[rank] - np.float32(0.001)
            workers.post(rank, workers.x[rank], settle=False)
        workers.job.settle()
        for rank in range(4):
            workers.collect(rank)
    if algorithm.startswith("ea"):  # the home is a copy, too, which has taken no steps of its own
        total = np.sum(workers.x, 0) + workers.home()
        np.testing.assert_allclose(total, 4 * 0.9 + 1, rtol=0, atol=2e-5)
        return
    copies = [workers.replica(rank) for rank in range(4)] if algorithm == "adpsgd" else workers.x  # with what is owed
    np.testing.assert_allclose(np.mean(copies, 0), 0.9, rtol=0, atol=2e-5)
    grid = {"fp16": 2.0**-11, "bf16": 2.0**-8}[codec]
    np.testing.assert_allclose(np.stack(workers.x), 0.9, rtol=0, atol=1.5 * grid)


# --- CHOCO's step -----------------------------------------------------------------------------------------------------

CODECS = (
    "topk(density=0.5, minimum=0)", "topk(density=0.1, minimum=0)", "topk(density=0.01, minimum=0)",
    "topk(density=0.1, minimum=0, scope='tensor', value='int4')", "gaussiank(density=0.05, minimum=0)",
    "thresholdk(density=0.05, minimum=0)", "randomk(density=0.1, minimum=0)",
    "demo(density=0.1, minimum=0, signed=False)", "int8(minimum=0)", "int4(minimum=0)",
    "int4(minimum=0, rounding='random')", "int2(minimum=0)", "onebit(minimum=0)", "fp16", "bf16",
)  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
@for_each(("graph", "ranks"), [("ring", 4), ("ring", 8), ("hypercube", 8), ("torus", 6)])
@for_each("heavy", [False, True])
def test_by_its_own_gamma_choco_brings_ranks_together(codec: str, graph: str, ranks: int, heavy: bool) -> None:
    rng = np.random.default_rng(3)
    elements = 600
    common = rng.standard_normal(elements) * (np.exp(2 * rng.standard_normal(elements)) if heavy else 1.0)
    start = common.astype(np.float32)
    workers = Workers(SIZES[ranks], f"choco(topology={graph!r})", start, 0.1, codec=codec)
    sizes = np.exp(2 * rng.standard_normal(elements)) if heavy else 1.0
    workers.x = [start + (sizes * rng.standard_normal(elements)).astype(np.float32) for _ in range(ranks)]
    mean = np.mean(np.stack(workers.x, dtype=np.float64), 0)

    def distance() -> float:
        return float(np.linalg.norm(np.stack(workers.x) - mean))

    before = furthest = distance()
    for _ in range(60):
        for rank in range(ranks):
            workers.post(rank, workers.x[rank], settle=False)
        workers.job.settle()
        for rank in range(ranks):
            workers.collect(rank)
        furthest = max(furthest, distance())
    assert furthest <= 1.0001 * before
    assert distance() < 0.98 * before  # int2 and onebit take small steps, by their worst case
    scale = float(np.abs(start).max())
    np.testing.assert_allclose(np.mean(np.stack(workers.x, dtype=np.float64), 0), mean, rtol=0, atol=1e-5 * scale)


def test_a_gamma_that_drives_ranks_apart_is_refused() -> None:
    for codec, gamma in (("topk", 0.5), ("topk(density=0.1)", 0.2), ("onebit", 0.1), ("int8", 1.5)):
        chosen = algorithms.parse(f"choco(gamma={gamma})")
        name = codec.partition("(")[0]
        why = f"gamma={gamma:g} of choco is too much for the codec {name}.* on the topology ring of 8 ranks"
        with pytest.raises(algorithms.AlgorithmError, match=why):
            algorithms.check_use(chosen, codecs.parse(codec), "average", 8)


@pytest.mark.parametrize("codec", ["topk(clip=1.0)", "topk(value='int2')"])
def test_a_codec_that_may_leave_more_than_there_was_is_refused_with_choco(codec: str) -> None:
    with pytest.raises(algorithms.AlgorithmError, match=r"choco.* needs a codec of which every message takes away"):
        algorithms.check_use(algorithms.parse("choco"), codecs.parse(codec), "average", 4)


@pytest.mark.parametrize("codec", CODECS)
@for_each("kind", ["normal", "heavy", "spikes", "one", "equal"])
def test_every_message_takes_away_the_share_that_its_codec_names(codec: str, kind: str) -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal(8192)
    if kind == "heavy":
        values *= np.exp(2 * rng.standard_normal(8192))
    elif kind == "spikes":
        values[::100] *= 1000
    elif kind == "one":
        values = np.where(np.arange(8192) == 77, 1.0, 0.0)
    elif kind == "equal":
        values = np.sign(values)
    values = values.astype(np.float32)
    chosen = codecs.parse(codec).without_memory()
    layout = codecs.Layout(DTYPES["float32"], 8192, (codecs.Span("w", 0, 8192, (64, 128)),))
    bucket = codecs.open_bucket(chosen, layout)
    ratios = []
    for _ in range(200 if codec.startswith("randomk") else 8):  # at random: on average
        left = values - bucket.tell(values.copy())[1]
        ratios.append(float((left.astype(np.float64) ** 2).sum() / (values.astype(np.float64) ** 2).sum()))
    draws = "random" in str(chosen) or codec.startswith("int8")
    ratio = float(np.mean(ratios)) if draws else max(ratios)
    assert ratio <= 1 - chosen.contraction() + (0.05 if draws else 2e-4)
    assert bucket.contractions() == [(0, 8192, pytest.approx(chosen.contraction()))]


def test_what_is_sent_whole_mixes_as_without_a_codec() -> None:
    chosen = codecs.parse("topk(density=0.1, minimum=100)")
    spans = (codecs.Span("a", 0, 50), codecs.Span("b", 64, 200))
    bucket = codecs.open_bucket(chosen, codecs.Layout(DTYPES["float32"], 264, spans))
    assert bucket.contractions() == [(0, 50, 1.0), (64, 264, pytest.approx(0.1))]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "codec", "whose"), [("choco", "topk", "CHOCO-SGD"), ("noloco", "dense", "NoLoCo")])
def test_a_directed_graph_is_refused_where_the_mean_could_not_be_kept(name: str, codec: str, whose: str) -> None:
    with pytest.raises(MixingError, match=rf"{whose} cannot use the mixing graph 'exponential'.*algorithm sgp"):
        algorithms.check_use(algorithms.parse(f"{name}(topology='exponential')"), codecs.parse(codec), "average", 8)
