"""Where training ends: without noise, on quadratics of which each rank has its own, with known optima."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_rt.core import mixing
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array
from tests.properties.scheduled import LAYOUTS, starts
from tests.reference import algorithms as published

DIM = 12
CODECS = ("dense", "topk(density=0.3, minimum=2)", "int4(minimum=2, rounding='random')", "onebit(minimum=2)")


def problem_of(ranks: int) -> published.Quadratic:
    return published.quadratic(ranks, DIM, seed=7, noise=0.0, spread=1.0)


def trained(layout: list[int], algorithm: str, rate: float, rounds: int, codec: str, orders: int = 1) -> Array:
    """What shards come to when all ranks contribute in each round, in any order; in each of the last rounds."""
    ranks = sum(layout)
    problem, begun = problem_of(ranks), starts(1, 2, np.float32, DIM // 2)[0]
    workers = Workers(layout, algorithm, begun, rate, codec=codec)
    choose, ends = np.random.default_rng(orders), []
    for step in range(rounds):
        for rank in choose.permutation(ranks).tolist():
            if not workers.waits(rank):
                workers.post(rank, problem(rank, step, workers.x[rank]))
            for other in workers.answered():
                workers.collect(other)
        if step >= 3 * rounds // 4:
            ends.append(workers.home())
    return np.stack(ends)


ALGORITHMS = ("bsp", "asp", "ssp(staleness=1)", "partial(backup=1)", "dc_asgd")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shards_end_as_near_the_optimum_as_the_rate_is_small(algorithm: str) -> None:
    """With all ranks at one pace the distance is at most in proportion to the rate: by staleness (Stich and Karimireddy
    1909.05350, theorem 16: delayed SGD and error feedback alike); `bsp` without a codec ends at the optimum."""
    for number, ranks in enumerate((4, 6)):
        layout = LAYOUTS[ranks][number + 1]
        codec = CODECS[number and 1 + ALGORITHMS.index(algorithm) % 3]
        optimum = problem_of(ranks).minimum
        each = 1 if algorithm.startswith(("bsp", "partial")) else ranks
        coarse, fine = (
            np.abs(trained(layout, algorithm, rate / each, rounds, codec) - optimum).max()
            for rate, rounds in ((0.4, 60), (0.1, 160))
        )
        where = f"{algorithm}, {codec}, {layout}: {coarse}, and {fine} at a quarter of the rate"
        if algorithm == "bsp" and codec == "dense":
            assert coarse < 1e-4, where
        else:
            assert fine < max(0.45 * coarse, 2e-4), where
            assert coarse < 0.5 * np.abs(optimum).max(), where


@for_each(("ranks", "graph"), [(4, "ring"), (6, "torus"), (6, "exponential"), (8, "hypercube")])
@pytest.mark.parametrize("algorithm", ["dpsgd", "sgp"])
def test_gossip_ends_at_the_solution_of_its_own_equations(algorithm: str, ranks: int, graph: str) -> None:
    """x = W x - rate H (x - c) for D-PSGD, and x = P (x - rate H (x - c)) for SGP on a doubly stochastic graph."""
    rate, problem, begun = 0.1, problem_of(ranks), starts(1, 2, np.float64, DIM // 2)[0]
    workers = Workers(LAYOUTS[ranks][1], f"{algorithm}(topology={graph!r})", begun, rate)
    for step in range(400):
        moved = [x - rate * problem(rank, step, x) for rank, x in enumerate(workers.x)]
        for rank, x in enumerate(workers.x if algorithm == "dpsgd" else moved):
            workers.post(rank, x, settle=False)
        workers.job.settle()
        for rank, x in enumerate(moved):
            workers.x[rank] = x
            workers.collect(rank)
    mix = np.kron(mixing.parse(graph, ranks).matrix(0), np.eye(DIM))
    hessian = np.zeros((ranks * DIM, ranks * DIM))
    for rank in range(ranks):
        part = slice(rank * DIM, (rank + 1) * DIM)
        hessian[part, part] = rate * problem.hessians[rank]
    pull, eye = hessian @ problem.centres.ravel(), np.eye(ranks * DIM)
    if algorithm == "dpsgd":
        expected = np.linalg.solve(eye - mix + hessian, pull)
    else:
        expected = np.linalg.solve(eye - mix @ (eye - hessian), mix @ pull)
    np.testing.assert_allclose(np.concatenate(workers.x), expected, rtol=0, atol=1e-8)
    mean = expected.reshape(ranks, DIM).mean(axis=0)
    assert np.abs(mean - problem.minimum).max() < 0.5 * rate * np.abs(problem.centres - problem.minimum).max() * ranks
