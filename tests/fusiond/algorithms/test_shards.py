"""Gradients to shards: the published rules, on one and on several nodes, to rounding."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES
from fusiond.algorithms import make
from fusiond.algorithms.home import Home
from fusiond.algorithms.shards import DCASGD
from fusiond.core.contribution import Contribution
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array
from tests.reference import algorithms as published

LAYOUTS = [[4], [2, 2], [1, 1, 1, 1], [0, 3, 1]]
layouts = for_each("layout", LAYOUTS)
RANKS, RATE, DIM = 4, 0.05, 30
PROBLEM = published.quadratic(RANKS, DIM, seed=3)
START = np.random.default_rng(1).standard_normal(DIM)
ORDER = np.random.default_rng(2).integers(0, RANKS, 200).tolist()
SKEWED = np.random.default_rng(4).choice(RANKS, 200, p=[0.45, 0.3, 0.2, 0.05]).tolist()


def follow(
    layout: list[int], algorithm: str, order: list[int] = ORDER, start: Array = START, **more: object
) -> Workers:
    workers = Workers(layout, algorithm, start, RATE, **more)  # type: ignore[arg-type]
    workers.taken = workers.follow(order, PROBLEM, lambda rank, step: 1 + rank)  # type: ignore[attr-defined]
    return workers


def same(workers: Workers, run: published.Run) -> None:
    assert workers.taken == run.taken  # type: ignore[attr-defined]
    np.testing.assert_allclose(workers.home(), run.homes[-1], rtol=1e-10, atol=1e-12)


@layouts
def test_asp_is_asynchronous_sgd(layout: list[int]) -> None:
    run = published.asgd(START, PROBLEM, RANKS, RATE, ORDER)
    workers = follow(layout, "asp")
    same(workers, run)
    lags = [node.engine.homes.meters.version_lag for node in workers.job.nodes]
    assert sum(lag._sum for lag in lags) == 2 * sum(run.staleness)  # in each of two buckets
    assert sum(lag._total for lag in lags) == 2 * len(ORDER)


@layouts
@for_each("bound", [0, 1, 4])
def test_ssp_holds_back_who_is_too_far_ahead(layout: list[int], bound: int) -> None:
    workers = follow(layout, f"ssp(staleness={bound})", SKEWED)
    same(workers, published.ssp(START, PROBLEM, RANKS, RATE, SKEWED, bound))
    assert max(node.engine.homes.meters.clock_gap._largest for node in workers.job.nodes) <= bound + 1


@layouts
def test_bsp_is_synchronous_sgd_with_the_same_bits_on_all_ranks(layout: list[int]) -> None:
    order = [rank for step in range(50) for rank in np.random.default_rng(step).permutation(RANKS).tolist()]
    workers = follow(layout, "bsp", order)
    np.testing.assert_allclose(workers.home(), published.bsp(START, PROBLEM, RANKS, RATE, 50).homes[-1], rtol=1e-10)
    assert all((x == workers.x[0]).all() for x in workers.x)


def test_sharded_and_single_home_give_the_same_bits() -> None:
    homes = [follow(layout, "bsp", ORDER, START.astype(np.float32)).home() for layout in LAYOUTS]
    assert all((home == homes[0]).all() for home in homes)


@layouts
def test_softsync_divides_by_staleness(layout: list[int]) -> None:
    run = published.softsync(START, PROBLEM, RANKS, RATE, SKEWED, 3)
    same(follow(layout, "softsync(contributions=3)", SKEWED), run)


@layouts
def test_collaborative_averages_over_samples(layout: list[int]) -> None:
    run = published.collaborative(START, PROBLEM, lambda rank, _: 1 + rank, RANKS, RATE, SKEWED, 9)
    same(follow(layout, "collaborative(samples=9)", SKEWED), run)


@layouts
@for_each("adaptive", [False, True])
def test_delay_compensation(layout: list[int], adaptive: bool) -> None:
    run = published.dc_asgd(START, PROBLEM, RANKS, RATE, SKEWED, 0.3, adaptive)
    same(follow(layout, f"dc_asgd(variance=0.3, adaptive={adaptive})", SKEWED), run)


def test_delay_compensation_by_nothing_is_asp() -> None:
    assert (follow([2, 2], "dc_asgd(variance=0.0)").home() == follow([2, 2], "asp").home()).all()


@layouts
def test_hogwild_in_order_of_arrival_is_asp(layout: list[int]) -> None:
    assert (follow(layout, "hogwild").home() == follow(layout, "asp").home()).all()


@layouts
@for_each("backup", [0, 1, 3])
def test_partial_synchronisation_carries_what_is_late(layout: list[int], backup: int) -> None:
    run = published.partial(START, PROBLEM, RANKS, RATE, SKEWED, backup)
    workers = follow(layout, f"partial(backup={backup})", SKEWED)
    same(workers, run)
    late: dict[str, int] = {}
    for node in workers.job.nodes:
        for rank, count in node.engine.homes.statistics()["late"].items():  # type: ignore[attr-defined]
            late[rank] = late.get(rank, 0) + count
    assert [late.get(str(rank), 0) for rank in range(RANKS)] == run.late


def test_partial_without_backups_is_bsp() -> None:
    order = [rank for _ in range(20) for rank in (2, 0, 3, 1)]
    assert (follow([2, 2], "partial(backup=0)", order).home() == follow([2, 2], "bsp", order).home()).all()


def test_partial_synchronisation_does_not_wait_beyond_its_deadline() -> None:
    workers = Workers([2, 2], "partial(backup=0, deadline=3.0)", START, RATE)
    for step in range(8):  # all ranks come at once, except for the last, which is a second late
        for rank in (0, 1, 2):
            workers.post(rank, PROBLEM(rank, step, workers.x[rank]))
        workers.job.pass_time(1)
        workers.post(3, PROBLEM(3, step, workers.x[3]))
        for rank in range(4):
            workers.collect(rank)
    for rank in (0, 1, 2):
        workers.post(rank, START)
    assert workers.waits(0)
    workers.job.pass_time(10)
    assert not any(workers.waits(rank) for rank in (0, 1, 2))
    workers.post(3, START)  # too late: it is answered at once, and counts later
    assert not workers.waits(3)


@pytest.mark.parametrize(
    ("name", "arguments", "make"),
    [
        ("SGD", {"momentum": 0.9, "weight_decay": 0.01}, lambda p: torch.optim.SGD(p, RATE, 0.9, weight_decay=0.01)),
        ("AdamW", {"betas": [0.8, 0.9]}, lambda p: torch.optim.AdamW(p, RATE, (0.8, 0.9))),
    ],
    ids=["SGD", "AdamW"],
)
def test_a_shard_applies_any_optimizer_of_torch(name: str, arguments: object, make: object) -> None:
    spec = wire.OptimizerSpec(name, (json.dumps(arguments),))
    order = [rank for _ in range(30) for rank in range(RANKS)]
    workers = follow([2, 2], "bsp", order, optimizer=spec)
    x = torch.nn.Parameter(torch.tensor(START))
    optimizer = make([x])  # type: ignore[operator]
    for step in range(30):
        with torch.no_grad():
            gradients = [PROBLEM(rank, step, x.numpy()) for rank in range(RANKS)]
            x.grad = torch.tensor(np.mean(gradients, 0))
        optimizer.step()
    np.testing.assert_allclose(workers.home(), x.detach().numpy(), rtol=1e-9)


@pytest.mark.parametrize("algorithm", ["asp", "ssp(staleness=2)", "partial(backup=1)", "bsp"])
@pytest.mark.parametrize("codec", ["topk(density=0.2, minimum=4)", "int8(minimum=4)", "fp16"])
def test_compressed_both_ways_it_ends_near_the_minimum(algorithm: str, codec: str) -> None:
    order = [rank for _ in range(120) for rank in np.random.default_rng(5).permutation(RANKS).tolist()]
    start = START.astype(np.float32)
    workers = follow([2, 2], algorithm, order, start, codec=codec)
    before, after = PROBLEM.loss(start.astype(np.float64)), PROBLEM.loss(workers.home().astype(np.float64))
    assert after < 0.03 * before
    counted = [node.engine.statistics()["compression"]["total"] for node in workers.job.nodes]
    for told in counted:
        assert told["encoded"] == told["elements"] > 0
        assert told["bytes_packed"] < told["bytes_dense"]


def test_a_rank_that_leaves_holds_nobody_back_unless_every_rank_is_needed() -> None:
    workers = Workers([2, 2], "ssp(staleness=1)", START, RATE)
    for step in range(2):
        workers.post(0, PROBLEM(0, step, workers.x[0]))
        if not workers.waits(0):
            workers.collect(0)
    assert workers.waits(0)
    for rank in (1, 2, 3):
        workers.job.leave(rank)
    workers.job.settle()
    assert not workers.waits(0)

    workers = Workers([2, 2], "bsp", START, RATE)
    workers.post(0, START)
    workers.job.leave(3)
    workers.job.settle()
    message, _ = workers.job.answer(0, workers._handles[0][0])
    assert isinstance(message, wire.Failed)
    assert "a rank has left" in message.message


@for_each("seed", range(6))
@for_each("layout", [[4], [1, 1, 1, 1]])
def test_homes_that_leave_ranks_behind_never_wait_for_each_other(layout: list[int], seed: int) -> None:
    """Ranks go on at random moments, so that buckets reach their homes in different orders."""
    workers = Workers(layout, "partial(backup=1)", START, RATE, seed=seed)
    choose = np.random.default_rng(seed)
    for _ in range(300):
        rank = int(choose.integers(RANKS))
        if not workers.waits(rank):
            if rank in workers.answered():
                workers.collect(rank)
            workers.post(rank, PROBLEM(rank, workers.clocks[rank], workers.x[rank]), settle=False)
        for _ in range(int(choose.integers(6))):
            workers.job.step()
    workers.job.settle()
    assert sum(workers.waits(rank) for rank in range(RANKS)) < RANKS - 1
    assert min(workers.clocks) > 20


# --- ranks without a gradient -----------------------------------------------------------------------------------------

NOT_FINITE = np.full(DIM, np.nan)


@layouts
def test_a_rank_without_a_gradient_is_in_nobodys_mean_and_holds_nobody_up(layout: list[int]) -> None:
    workers = Workers(layout, "bsp", START, RATE)
    gradients = [PROBLEM(rank, 0, START) for rank in range(RANKS)]
    for rank in range(RANKS):
        workers.post(rank, NOT_FINITE if rank == 1 else gradients[rank], samples=int(rank != 1))
    mean = np.mean([gradients[rank] for rank in (0, 2, 3)], axis=0)
    np.testing.assert_allclose(workers.home(), START - RATE * mean, rtol=1e-12)
    for rank in range(RANKS):
        workers.collect(rank)
        assert (workers.x[rank] == workers.home()).all()


@pytest.mark.parametrize("algorithm", ["asp", "hogwild", "softsync", "dc_asgd", "collaborative(samples=1)", "partial"])
@pytest.mark.parametrize("codec", ["dense", "topk(density=0.2)"])
def test_a_contribution_without_a_gradient_changes_no_home_and_no_residual(algorithm: str, codec: str) -> None:
    momentum = wire.OptimizerSpec("SGD", (json.dumps({"momentum": 0.9}),))
    workers = Workers([2, 2], algorithm, START, RATE, momentum, codec)
    for rank in range(RANKS):
        workers.post(rank, PROBLEM(rank, 0, START))
    workers.job.pass_time(5)
    before = workers.home()
    for rank in range(RANKS):
        workers.collect(rank)
        workers.post(rank, NOT_FINITE, samples=0)
    workers.job.pass_time(5)
    assert (workers.home() == before).all()
    for rank in range(RANKS):
        workers.collect(rank)
        workers.post(rank, np.zeros(DIM))
    workers.job.pass_time(5)
    assert np.isfinite(workers.home()).all()


def test_a_step_without_a_gradient_counts_for_those_who_wait_for_the_slowest() -> None:
    workers = Workers([2, 2], "ssp(staleness=0)", START, RATE)
    for rank in (0, 1, 2):
        workers.post(rank, np.zeros(DIM))
        assert workers.waits(rank)
    workers.post(3, NOT_FINITE, samples=0)
    assert not any(workers.waits(rank) for rank in range(RANKS))


@layouts
def test_a_rank_that_has_joined_counts_as_zeros_in_a_synchronous_mean_until_it_is_back(layout: list[int]) -> None:
    workers = Workers(layout, "bsp", START, RATE)
    join = [workers.job.submit(3, "join", wire.Signature("join"))]
    workers.job.settle()
    gradients = [PROBLEM(rank, 0, START) for rank in range(RANKS)]
    for rank in range(3):
        workers.post(rank, gradients[rank])
    expected = START - RATE * np.sum(gradients[:3], axis=0) / RANKS
    np.testing.assert_allclose(workers.home(), expected, rtol=1e-12)
    for rank in range(3):
        workers.collect(rank)
        join.append(workers.job.submit(rank, "join", wire.Signature("join")))
    workers.job.settle()
    for rank in range(RANKS):
        workers.post(rank, gradients[rank])
        assert workers.waits(rank) == (rank < 3)
    np.testing.assert_allclose(workers.home(), expected - RATE * np.mean(gradients, axis=0), rtol=1e-12)


@layouts
def test_synchronous_elastic_averaging_leaves_out_ranks_that_have_joined(layout: list[int]) -> None:
    """Rank 3 joins while its last parameters are on their way to a home, which may get them before or after that."""
    values = [np.random.default_rng(rank).standard_normal(DIM) for rank in range(RANKS)]
    for seed in range(8):
        workers = Workers(layout, "easgd(steps=1, alpha=0.1, synchronous_home=True)", START, RATE, None, seed=seed)
        workers.post(3, values[3], settle=False)
        workers.job.submit(3, "join", wire.Signature("join"))
        for step in range(2):
            for rank in range(3):
                workers.post(rank, values[rank], settle=False)
            workers.job.settle()
            assert not any(workers.waits(rank) for rank in range(3))
            home = workers.home()
            for rank in range(3):
                workers.collect(rank)
            if step:
                assert not workers.waits(3)
        pull = 0.1 * sum(values[rank] - START for rank in range(3))
        once, late = START + pull, 0.1 * (values[3] - START)
        # With the first update of the others, or with the second, and so at all homes.
        allowed = [x + 0.1 * sum(values[rank] - x for rank in second) for x, second in
                   ((once + late, range(3)), (once, range(RANKS)))]  # fmt: skip
        assert any(np.allclose(home, x, rtol=1e-12) for x in allowed), seed


def test_an_update_is_made_of_all_that_a_rank_sent_before_it_joined_also_where_that_comes_last() -> None:
    workers = Workers([2, 2], "easgd(steps=1, alpha=0.1, synchronous_home=True)", START, RATE)
    values = [START + rank for rank in range(RANKS)]
    for place, of in workers.places(3):
        place[:] = values[3][of]
    handles = [workers._ready(3, 0, 0)]
    workers.job.settle()
    for node in workers.job.nodes:
        node.engine.homes.gone([3], joined=True)
    for rank in range(3):
        workers.post(rank, values[rank])
    handles.append(workers._ready(3, 1, 0))
    workers.job.settle()
    assert all(workers.job.is_answered(3, handle) for handle in handles)
    np.testing.assert_allclose(workers.home(), START + 0.1 * (0 + 1 + 2 + 3), rtol=1e-12)


def test_what_a_rank_has_is_noted_without_another_clock() -> None:
    home = Home(-1, 2, DTYPES["float64"], 3, ((0, 3, 0),), value=np.zeros(3), clock=7)
    home.aux |= {f"w_bak/{rank}": np.zeros(3) for rank in range(2)}
    rule = make("dc_asgd", 2)
    assert isinstance(rule, DCASGD)
    rule.told(home, Contribution(1, np.zeros(3), clock=5), np.ones(3))
    assert (home.clock, home.version) == (7, 0)
    assert home.aux["w_bak/1"].tolist() == [1.0, 1.0, 1.0]
    assert home.aux["w_bak/0"].tolist() == [0.0, 0.0, 0.0]
