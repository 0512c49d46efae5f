"""The published rules against `torch.optim.SGD`, against numbers worked out by hand, and against what they conserve.

No rule here is the reference of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tests.for_each import for_each
from tests.reference.algorithms import (
    Array,
    Event,
    Gradient,
    Quadratic,
    Run,
    adpsgd,
    asgd,
    bsp,
    choco,
    collaborative,
    dc_asgd,
    diloco,
    dpsgd,
    easgd_async,
    easgd_sync,
    local_sgd,
    partial,
    quadratic,
    sgp,
    softsync,
    ssp,
)

RANKS, DIM, STEPS, RATE = 4, 12, 50, 0.05
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])
TOLERANCE = {np.dtype(np.float32): 2e-5, np.dtype(np.float64): 1e-12}


@pytest.fixture(scope="module")
def problem() -> Quadratic:
    return quadratic(RANKS, DIM, seed=3)


def start(dtype: type = np.float64) -> Array:
    return np.random.default_rng(11).standard_normal(DIM).astype(dtype)


def starts() -> Array:
    """A different start for each rank."""
    return np.random.default_rng(12).standard_normal((RANKS, DIM))


def arrivals(count: int, seed: int = 5, weights: Sequence[float] | None = None) -> list[int]:
    """Ranks in a random order; `weights` are how fast they are."""
    return [int(rank) for rank in np.random.default_rng(seed).choice(RANKS, size=count, p=weights)]


def round_robin(count: int, ranks: int = RANKS) -> list[int]:
    return [k % ranks for k in range(count)]


def shuffled_rounds(rounds: int) -> list[int]:
    """Every rank once a round, in another order each time."""
    rng = np.random.default_rng(6)
    return [int(rank) for _ in range(rounds) for rank in rng.permutation(RANKS)]


def same(found: Sequence[Array], expected: Sequence[Array]) -> None:
    """The same trajectory but for rounding, and in the same element type."""
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[a.dtype])


def equal(found: Sequence[Array], expected: Sequence[Array]) -> None:
    """The same trajectory, bit for bit."""
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def ring() -> Array:
    """1/3 for itself and each neighbour."""
    eye = np.eye(RANKS)
    return (np.roll(eye, -1, axis=1) + eye + np.roll(eye, 1, axis=1)) / 3


def complete(_: int) -> Array:
    return np.full((RANKS, RANKS), 1 / RANKS)


def one_peer(clock: int) -> Array:
    """Half of it stays, half goes to the rank 1, 2, 1, 2, … further: doubly stochastic, but not symmetric."""
    return (np.eye(RANKS) + np.roll(np.eye(RANKS), 2 ** (clock % 2), axis=0)) / 2


def uneven(_: int) -> Array:
    """Column-stochastic only: rank j keeps 1 / (j + 2) and shares the rest equally."""
    matrix = np.empty((RANKS, RANKS))
    for j in range(RANKS):
        matrix[:, j] = (1 - 1 / (j + 2)) / (RANKS - 1)
        matrix[j, j] = 1 / (j + 2)
    return matrix


def one_hot(steps: int) -> Gradient:
    """A gradient that marks its own (rank, step), so that the home shows what was applied how often."""

    def gradient(rank: int, step: int, x: Array) -> Array:
        g = np.zeros_like(x)
        g[rank * steps + step] = 1
        return g

    return gradient


# --- the formulas of torch --------------------------------------------------------------------------------------------


class Torch:
    """A model that `torch.optim.SGD` updates, and all that it has been."""

    def __init__(self, x0: Array, rate: float = RATE, momentum: float = 0, nesterov: bool = False) -> None:
        self._model = torch.tensor(x0)
        self._optimizer = torch.optim.SGD([self._model], lr=rate, momentum=momentum, nesterov=nesterov)
        self.models: list[Array] = []

    @property
    def model(self) -> Array:
        return self._model.numpy().copy()

    def step(self, *gradients: Array) -> None:
        """A step along the mean of these."""
        self._model.grad = torch.tensor(np.mean(gradients, axis=0, dtype=gradients[0].dtype))
        self._optimizer.step()
        self.models.append(self.model)


def together(problem: Gradient, x0: Array, steps: int = STEPS, momentum: float = 0, nesterov: bool = False) -> Torch:
    """Steps along everybody's mean gradient."""
    trained = Torch(x0, RATE, momentum, nesterov)
    for step in range(steps):
        trained.step(*(problem(rank, step, trained.model).astype(x0.dtype) for rank in range(RANKS)))
    return trained


def alone(problem: Gradient, x0: Array, rank: int, steps: int, momentum: float = 0) -> list[Array]:
    """The steps of one rank that nobody else has to do with."""
    trained = Torch(x0, RATE, momentum)
    for step in range(steps):
        trained.step(problem(rank, step, trained.model))
    return trained.models


def delayed(problem: Gradient, x0: Array, order: Sequence[int]) -> list[Array]:
    """A step for each arrival, along a gradient at the model that the rank saw when it was there before."""
    trained = Torch(x0)
    seen = [x0] * RANKS
    steps = [0] * RANKS
    for rank in order:
        trained.step(problem(rank, steps[rank], seen[rank]).astype(x0.dtype))
        seen[rank] = trained.model
        steps[rank] += 1
    return trained.models


@DTYPES
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bsp_is_sgd_on_the_mean_gradient(problem: Quadratic, dtype: type, momentum: float) -> None:
    found = bsp(start(dtype), problem, RANKS, RATE, STEPS, momentum)
    same(found.homes, together(problem, start(dtype), momentum=momentum).models)


def test_the_outer_step_of_diloco_is_nesterov_momentum(problem: Quadratic) -> None:
    found = diloco(start(), problem, RANKS, 1.0, 1, RATE, 0.9, STEPS)  # Δ of one inner step of rate 1 is a gradient
    same(found.homes, together(problem, start(), momentum=0.9, nesterov=True).models)


@DTYPES
def test_without_backup_workers_partial_synchronisation_is_sgd_on_the_mean_gradient(
    problem: Quadratic, dtype: type
) -> None:
    found = partial(start(dtype), problem, RANKS, RATE, shuffled_rounds(STEPS), backup=0)
    same(found.homes, together(problem, start(dtype)).models)
    assert found.late == [0] * RANKS


def test_without_backup_workers_it_is_so_when_fast_ranks_would_arrive_again(problem: Quadratic) -> None:
    found = partial(start(), problem, RANKS, RATE, arrivals(1000, weights=[0.7, 0.1, 0.1, 0.1]), backup=0)
    same(found.homes, together(problem, start(), len(found.homes)).models)
    assert len(found.taken) < 1000


@DTYPES
def test_local_sgd_of_one_step_is_sgd_on_the_mean_gradient(problem: Quadratic, dtype: type) -> None:
    same(local_sgd(start(dtype), problem, RANKS, RATE, 1, STEPS).homes, together(problem, start(dtype)).models)


@DTYPES
def test_ssp_without_staleness_is_sgd_on_the_mean_gradient_at_a_rate_divided_by_the_ranks(
    problem: Quadratic, dtype: type
) -> None:
    found = ssp(start(dtype), problem, RANKS, RATE / RANKS, shuffled_rounds(STEPS), staleness=0)
    same(found.homes[RANKS - 1 :: RANKS], together(problem, start(dtype)).models)


@DTYPES
def test_asgd_is_sgd_on_gradients_of_what_each_rank_read_last(problem: Quadratic, dtype: type) -> None:
    order = arrivals(200)
    found = asgd(start(dtype), problem, RANKS, RATE, order)
    same(found.homes, delayed(problem, start(dtype), order))
    assert found.taken == order


def test_ssp_with_a_bound_that_nobody_reaches_is_the_same(problem: Quadratic) -> None:
    order = arrivals(200)
    found = ssp(start(), problem, RANKS, RATE, order, 200)
    same(found.homes, delayed(problem, start(), order))
    assert found.taken == order


@DTYPES
@pytest.mark.parametrize("adaptive", [False, True])
def test_delay_compensation_with_lambda_zero_is_the_same(problem: Quadratic, dtype: type, adaptive: bool) -> None:
    order = arrivals(200)
    found = dc_asgd(start(dtype), problem, RANKS, RATE, order, lam=0, adaptive=adaptive)
    same(found.homes, delayed(problem, start(dtype), order))


def test_delay_compensation_changes_nothing_that_is_not_delayed(problem: Quadratic) -> None:
    found = dc_asgd(start(), problem, 1, RATE, [0] * STEPS, lam=2, adaptive=True)
    same(found.homes, alone(problem, start(), 0, STEPS))


def test_softsync_that_fires_on_each_contribution_and_never_finds_it_stale_by_more_than_one_is_the_same(
    problem: Quadratic,
) -> None:
    order = round_robin(STEPS, 2)
    same(softsync(start(), problem, 2, RATE, order, 1).homes, delayed(problem, start(), order))


def test_softsync_that_waits_for_all_is_sgd_on_the_mean_gradient_if_ranks_wait_too(problem: Quadratic) -> None:
    order = round_robin(RANKS * STEPS)
    found = softsync(start(), problem, RANKS, RATE, order, RANKS, wait=True)
    same(found.homes, together(problem, start()).models)


def one_behind(problem: Quadratic) -> list[Array]:
    """All but the last rank have their gradients from before the last step, which they did not wait for."""
    trained = Torch(start())
    before = start()
    for step in range(STEPS):
        now = trained.model
        read = [before] * (RANKS - 1) + [now]
        trained.step(*(problem(rank, step, x) for rank, x in enumerate(read)))
        before = now
    return trained.models


def test_softsync_that_waits_for_all_takes_gradients_of_one_step_before_if_ranks_do_not_wait(
    problem: Quadratic,
) -> None:
    found = softsync(start(), problem, RANKS, RATE, round_robin(RANKS * STEPS), RANKS)
    assert found.staleness == [0] * RANKS + [1, 1, 1, 0] * (STEPS - 1)
    same(found.homes, one_behind(problem))


def test_collaborative_with_equal_batches_and_one_a_rank_does_the_same(problem: Quadratic) -> None:
    order = round_robin(RANKS * STEPS)
    found = collaborative(start(), problem, lambda rank, step: 8, RANKS, RATE, order, 8 * RANKS)
    assert found.staleness == [0] * RANKS + [1, 1, 1, 0] * (STEPS - 1)
    same(found.homes, one_behind(problem))


@DTYPES
@pytest.mark.parametrize("matrix", [one_peer, complete])
def test_push_sum_weights_stay_one_on_a_doubly_stochastic_matrix(
    problem: Quadratic, dtype: type, matrix: Callable[[int], Array]
) -> None:
    x0s: Array = starts().astype(dtype)
    found = sgp(x0s, problem, matrix, RATE, STEPS)
    same(found.weights, [np.ones(RANKS, dtype)] * STEPS)
    same(found.debiased, found.workers)


def test_dpsgd_on_the_complete_graph_is_sgd_of_the_mean_model(problem: Quadratic) -> None:
    """Each step starts from the mean of all; where gradients are the same on all copies, the mean is all there is."""
    found = dpsgd(starts(), problem, complete, RATE, STEPS)
    before = starts()
    for step, workers in enumerate(found.workers):
        gradients = np.stack([problem(rank, step, before[rank]) for rank in range(RANKS)])
        same(list(workers + RATE * gradients), [before.mean(axis=0)] * RANKS)
        before = workers

    def blind(rank: int, step: int, x: Array) -> Array:
        return problem(rank, step, start())

    found = dpsgd(starts(), blind, complete, RATE, STEPS)
    same([workers.mean(axis=0) for workers in found.workers], together(blind, starts().mean(axis=0)).models)


def test_dpsgd_without_neighbours_is_sgd_of_each_rank(problem: Quadratic) -> None:
    found = dpsgd(starts(), problem, lambda clock: np.eye(RANKS), RATE, STEPS)
    for rank, x0 in enumerate(starts()):
        same([workers[rank] for workers in found.workers], alone(problem, x0, rank, STEPS))


def test_choco_without_compression_and_with_gamma_one_mixes_after_the_step(problem: Quadratic) -> None:
    found = choco(start(), problem, ring(), RATE, 1.0, lambda x: x, STEPS)
    x, expected = np.tile(start(), (RANKS, 1)), []
    for step in range(STEPS):
        x = ring() @ (x - RATE * np.stack([problem(rank, step, x[rank]) for rank in range(RANKS)]))
        expected.append(x)
    same(found.workers, expected)


def test_diloco_with_a_plain_outer_step_is_the_mean_of_ranks_that_trained_alone(problem: Quadratic) -> None:
    found = diloco(start(), problem, RANKS, RATE, 5, outer_rate=1.0, outer_momentum=0, rounds=STEPS // 5)
    home, expected = start(), []
    for first in range(0, STEPS, 5):

        def later(rank: int, step: int, x: Array, first: int = first) -> Array:
            return problem(rank, first + step, x)

        home = np.mean([alone(later, home, rank, 5)[-1] for rank in range(RANKS)], axis=0)
        expected.append(home)
    same(found.homes, expected)
    same(local_sgd(start(), problem, RANKS, RATE, 5, STEPS).homes, expected)


def test_adpsgd_without_mixing_is_sgd_of_each_rank(problem: Quadratic) -> None:
    order = arrivals(100)
    found = adpsgd(starts(), problem, RATE, [("step", rank) for rank in order])
    for rank, x0 in enumerate(starts()):
        same([found.workers[-1][rank]], alone(problem, x0, rank, order.count(rank))[-1:])


def test_easgd_without_elastic_force_is_sgd_with_momentum_of_each_rank(problem: Quadratic) -> None:
    found = easgd_sync(start(), problem, RANKS, RATE, 0.0, 1, STEPS, momentum=0.9)
    same([workers[2] for workers in found.workers], alone(problem, start(), 2, STEPS, momentum=0.9))
    equal(found.homes, [start()] * STEPS)


# --- conserved --------------------------------------------------------------------------------------------------------


def test_the_elastic_step_keeps_the_sum_of_all_copies_and_the_home(problem: Quadratic) -> None:
    """So the sum changes by the gradients alone; momentum and the period do not matter."""
    for momentum in (0.0, 0.9):
        given = np.zeros(DIM)
        velocities = np.zeros((RANKS, DIM))
        clocks = [0] * RANKS
        order = arrivals(200)
        run = easgd_async(start(), problem, RANKS, RATE, 0.2, 3, order, momentum)
        before = np.tile(start(), (RANKS, 1))
        for rank, home, workers in zip(order, run.homes, run.workers, strict=True):
            velocities[rank] = momentum * velocities[rank] + problem(rank, clocks[rank], before[rank])
            clocks[rank] += 1
            given += RATE * velocities[rank]
            np.testing.assert_allclose(workers.sum(axis=0) + home, (RANKS + 1) * start() - given, atol=1e-12)
            before = workers
    still = easgd_sync(start(), lambda rank, step, x: np.zeros_like(x), RANKS, RATE, 0.2, 1, STEPS)
    equal(still.homes, [start()] * STEPS)


def test_push_sum_conserves_mass_and_finds_the_mean_of_the_starts() -> None:
    found = sgp(starts(), lambda rank, step, x: np.zeros_like(x), uneven, RATE, STEPS)
    for x, weights in zip(found.workers, found.weights, strict=True):
        np.testing.assert_allclose(x.sum(axis=0), starts().sum(axis=0), atol=1e-12)
        np.testing.assert_allclose(weights.sum(), RANKS)
    assert np.abs(found.weights[-1] - 1).max() > 0.1
    assert np.abs(found.workers[-1] - starts().mean(axis=0)).max() > 0.01
    np.testing.assert_allclose(found.debiased[-1], np.tile(starts().mean(axis=0), (RANKS, 1)), atol=1e-9)


def test_compressed_gossip_keeps_the_mean_of_all_copies(problem: Quadratic) -> None:
    found = choco(start(), problem, ring(), RATE, 0.4, np.sign, STEPS)
    x = np.tile(start(), (RANKS, 1))
    for step, workers in enumerate(found.workers):
        gradients = np.stack([problem(rank, step, x[rank]) for rank in range(RANKS)])
        np.testing.assert_allclose(workers.mean(axis=0), x.mean(axis=0) - RATE * gradients.mean(axis=0), atol=1e-12)
        x = workers


def test_mixing_two_ranks_keeps_their_sum_and_leaves_the_others_alone() -> None:
    found = adpsgd(starts(), lambda rank, step, x: x, RATE, [("mix", 0, 3)])
    expected = starts()
    expected[[0, 3]] = (expected[0] + expected[3]) / 2
    np.testing.assert_array_equal(found.workers[0], expected)


@for_each("backup", [0, 1, 2])
def test_no_gradient_is_lost_or_applied_twice_with_backup_workers(backup: int) -> None:
    order = arrivals(60, weights=[0.4, 0.3, 0.2, 0.1])
    found = partial(np.zeros(RANKS * 60), one_hot(60), RANKS, 1.0, order, backup)
    assert found.carried is not None
    expected = np.zeros(RANKS * 60)
    for rank in range(RANKS):
        expected[rank * 60 : rank * 60 + found.taken.count(rank)] = 1
    np.testing.assert_allclose(found.carried - RANKS * found.homes[-1], expected, atol=1e-12)
    assert sum(found.late) == sum(tau > 0 for tau in found.staleness)
    assert (sum(found.late) > 0) == (backup > 0)


def test_samples_weigh_the_gradients_of_a_large_batch() -> None:
    found = collaborative(np.zeros(8), one_hot(2), lambda rank, step: rank + 1, 4, 1.0, [0, 3, 1, 0, 2], 5)
    np.testing.assert_allclose(found.homes[0], -np.array([1, 0, 0, 0, 0, 0, 4, 0]) / 5)
    np.testing.assert_allclose(found.homes[1] - found.homes[0], -np.array([0, 1, 2, 0, 3, 0, 0, 0]) / 6)
    assert found.staleness == [0, 0, 1, 1, 1]
    np.testing.assert_array_equal(found.carried, np.zeros(8))


# --- staleness --------------------------------------------------------------------------------------------------------


@for_each("ranks", [1, 2, 4, 8, 16])
def test_staleness_of_equal_ranks_is_one_less_than_their_number(ranks: int) -> None:
    found = asgd(np.ones(2), lambda rank, step, x: x, ranks, 0.001, round_robin(400 * ranks, ranks))
    assert found.staleness[:ranks] == list(range(ranks))
    assert set(found.staleness[ranks:]) == {ranks - 1}
    assert np.mean(found.staleness) == pytest.approx(ranks - 1, rel=0.01)


@for_each("bound", [0, 1, 3])
def test_no_rank_is_further_ahead_of_the_slowest_than_the_bound_and_the_step_under_way(bound: int) -> None:
    found = ssp(start(), lambda rank, step, x: x, RANKS, 0.01, arrivals(600, weights=[0.6, 0.2, 0.15, 0.05]), bound)
    clocks = np.zeros(RANKS, int)
    ahead = []
    for rank in found.taken:
        clocks[rank] += 1
        ahead.append(clocks.max() - clocks.min())
    assert max(ahead) == bound + 1
    assert max(found.staleness) <= (2 * bound + 1) * (RANKS - 1)


def test_a_held_rank_reads_the_home_at_the_moment_that_the_slowest_advances() -> None:
    """s = 1 and two ranks: the fast one is held after its second step; what it reads has the slow one's first in it."""
    seen: list[tuple[int, int, float]] = []

    def gradient(rank: int, step: int, x: Array) -> Array:
        seen.append((rank, step, float(x[0])))
        return np.ones_like(x)

    found = ssp(np.zeros(1), gradient, 2, 1.0, [0, 0, 0, 0, 1, 0], 1)
    assert found.taken == [0, 0, 1, 0]
    assert seen == [(0, 0, 0.0), (0, 1, -1.0), (1, 0, 0.0), (0, 2, -3.0)]
    assert found.staleness == [0, 0, 2, 0]


def test_a_late_rank_reads_at_once_and_is_on_time_again() -> None:
    seen: list[tuple[int, int, float]] = []

    def gradient(rank: int, step: int, x: Array) -> Array:
        seen.append((rank, step, float(x[0])))
        return np.full_like(x, 3.0)

    found = partial(np.zeros(1), gradient, 3, 1.0, [0, 0, 1, 2, 2, 0], backup=1)
    assert found.taken == [0, 1, 2, 2, 0]  # the second arrival of rank 0 is ignored: it waits
    assert seen == [(0, 0, 0.0), (1, 0, 0.0), (2, 0, 0.0), (2, 1, -2.0), (0, 1, -2.0)]
    assert [home[0] for home in found.homes] == [-2.0, -5.0]
    assert found.late == [0, 0, 1]


def test_softsync_divides_each_contribution_by_its_own_staleness() -> None:
    found = softsync(np.zeros(6), one_hot(2), 3, 1.0, [0, 0, 1, 2], contributions=1)
    assert found.staleness == [0, 0, 2, 3]
    np.testing.assert_allclose(found.homes[-1], -np.array([1, 1, 1 / 2, 0, 1 / 3, 0]))


def test_the_compensation_is_that_of_the_paper_for_one_stale_gradient() -> None:
    """Rank 1 arrives one update late with g = 2 at a distance of −3 from what it read."""

    def gradient(rank: int, step: int, x: Array) -> Array:
        return np.full_like(x, [3.0, 2.0][rank])

    plain = dc_asgd(np.zeros(1), gradient, 2, 1.0, [0, 1], lam=0.1)
    assert plain.homes[1][0] == pytest.approx(-3 - (2 + 0.1 * 4 * -3))
    for per_worker, square in ((False, 0.95 * 0.05 * 9 + 0.05 * 4), (True, 0.05 * 4)):
        adaptive = dc_asgd(np.zeros(1), gradient, 2, 1.0, [0, 1], 0.1, adaptive=True, per_worker=per_worker)
        assert adaptive.homes[1][0] == pytest.approx(-3 - (2 + 0.1 / np.sqrt(square + 1e-7) * 4 * -3))


def test_an_adpsgd_step_uses_the_gradient_from_before_the_mixing() -> None:
    x0s = np.array([[0.0], [4.0]])
    events: list[Event] = [("mix", 0, 1), ("step", 1), ("step", 0), ("step", 0)]
    found = adpsgd(x0s, lambda rank, step, x: x + 10, 0.1, events)
    assert [float(workers[0, 0]) for workers in found.workers] == pytest.approx([2, 2, 2 - 0.1 * 10, 1 - 0.1 * 11])
    assert float(found.workers[-1][1, 0]) == pytest.approx(2 - 0.1 * 14)


def test_the_elastic_difference_is_on_the_x_of_the_gradient_at_the_clocks_that_the_period_divides() -> None:
    """g = x + rank; η = .5, α = .25, every 2 steps; worked out by hand from algorithm 1."""
    found = easgd_async(np.ones(1), lambda rank, step, x: x + rank, 2, 0.5, 0.25, 2, [0, 0, 0, 1, 0])
    # rank 0: at its first step d = 0; then none; then d = .25 (.25 − 1). Rank 1 then meets x̃ = .8125: d = .046875.
    assert [float(home[0]) for home in found.homes] == [1, 1, 0.8125, 0.859375, 0.859375]
    assert [float(x[0, 0]) for x in found.workers] == [0.5, 0.25, 0.3125, 0.3125, 0.15625]
    assert float(found.workers[-1][1, 0]) == 1 - 1 - 0.046875


def test_all_elastic_differences_of_a_synchronous_step_are_from_the_same_home() -> None:
    """g = rank, so that x is (1, 0.5) when the second step meets x̃ = 1 with α = .25."""
    found = easgd_sync(np.ones(1), lambda rank, step, x: np.full_like(x, rank), 2, 0.5, 0.25, 1, 3)
    assert [float(home[0]) for home in found.homes] == [1, 0.875, 0.875 + 0.25 * (0.125 - 0.75)]
    assert found.workers[1][:, 0].tolist() == [1, 0.5 - 0.5 + 0.125]


def test_ranks_are_alone_between_two_averages_of_local_sgd(problem: Quadratic) -> None:
    found = local_sgd(start(), problem, RANKS, RATE, 7, 10)
    assert len(found.homes) == 1
    for rank in range(RANKS):
        same([workers[rank] for workers in found.workers[:6]], alone(problem, start(), rank, 6))
    same(list(found.workers[6]), [found.homes[0]] * RANKS)


def test_push_sum_takes_gradients_at_the_model_and_not_at_the_biased_copy() -> None:
    found = sgp(np.ones((2, 1)), lambda rank, step, x: x, lambda clock: np.array([[0.5, 0.0], [0.5, 1.0]]), 0.5, 2)
    assert found.workers[0][:, 0].tolist() == [0.25, 0.75]
    assert found.weights[0].tolist() == [0.5, 1.5]
    assert found.debiased[0][:, 0].tolist() == [0.5, 0.5]
    assert found.workers[1][:, 0].tolist() == [0.0, 0.5]


# --- convergence ------------------------------------------------------------------------------------------------------

ROUNDS = 400
EVEN = round_robin(RANKS * ROUNDS)
GOSSIP: list[Event] = []
for clock in range(ROUNDS):
    GOSSIP += [("step", rank) for rank in range(RANKS)]
    GOSSIP.append(("mix", clock % RANKS, (clock + 1) % RANKS))


def coarse(x: Array) -> Array:
    """The sign of each element times their mean magnitude."""
    quantised: Array = np.sign(x) * np.abs(x).mean()
    return quantised


RULES: dict[str, Callable[[Array, Quadratic], Run]] = {
    "bsp": lambda x, p: bsp(x, p, RANKS, RATE, ROUNDS),
    "bsp with momentum": lambda x, p: bsp(x, p, RANKS, RATE / 5, ROUNDS, 0.9),
    "asgd": lambda x, p: asgd(x, p, RANKS, RATE / RANKS, EVEN),
    "ssp": lambda x, p: ssp(x, p, RANKS, RATE / RANKS, arrivals(3000), 2),
    "softsync": lambda x, p: softsync(x, p, RANKS, RATE, EVEN, 2),
    "softsync, waiting": lambda x, p: softsync(x, p, RANKS, RATE, EVEN, 2, wait=True),
    "dc_asgd": lambda x, p: dc_asgd(x, p, RANKS, RATE / RANKS, EVEN, 0.04),
    "dc_asgd, adaptive": lambda x, p: dc_asgd(x, p, RANKS, RATE / RANKS, EVEN, 2, adaptive=True),
    "partial": lambda x, p: partial(x, p, RANKS, RATE, shuffled_rounds(ROUNDS), 1),
    "collaborative": lambda x, p: collaborative(x, p, lambda r, s: 4 + (r + s) % 5, RANKS, RATE, EVEN, 20),
    "easgd_async": lambda x, p: easgd_async(x, p, RANKS, RATE, 0.9 / RANKS, 2, EVEN),
    "easgd_async with momentum": lambda x, p: easgd_async(x, p, RANKS, RATE / 5, 0.9 / RANKS, 2, EVEN, 0.9),
    "easgd_sync": lambda x, p: easgd_sync(x, p, RANKS, RATE, 0.2, 2, ROUNDS),
    "dpsgd": lambda x, p: dpsgd(np.tile(x, (RANKS, 1)), p, lambda clock: ring(), RATE, ROUNDS),
    "adpsgd": lambda x, p: adpsgd(np.tile(x, (RANKS, 1)), p, RATE, GOSSIP),
    "sgp": lambda x, p: sgp(np.tile(x, (RANKS, 1)), p, one_peer, RATE, ROUNDS),
    "sgp, uneven": lambda x, p: sgp(np.tile(x, (RANKS, 1)), p, uneven, RATE, ROUNDS),
    "choco": lambda x, p: choco(x, p, ring(), RATE, 0.4, coarse, ROUNDS),
    "local_sgd": lambda x, p: local_sgd(x, p, RANKS, RATE, 4, ROUNDS),
    "diloco": lambda x, p: diloco(x, p, RANKS, RATE, 4, 0.7, 0.5, ROUNDS // 4),
}


@DTYPES
@pytest.mark.parametrize("name", RULES)
def test_each_rule_ends_near_the_minimum_in_the_element_type_of_its_start(
    problem: Quadratic, name: str, dtype: type
) -> None:
    run = RULES[name](start(dtype), problem)
    for arrays in (run.homes, run.workers, run.weights, run.debiased, run.replicas):
        assert {array.dtype for array in arrays} <= {np.dtype(dtype)}
    end = run.homes[-1] if run.homes else (run.debiased or run.workers)[-1].mean(axis=0)
    assert problem.loss(end) < 2e-3 * problem.loss(start())


def test_the_minimum_is_where_the_mean_gradient_vanishes() -> None:
    problem = quadratic(RANKS, DIM, seed=4, noise=0)
    mean = np.mean([problem(rank, 0, problem.minimum) for rank in range(RANKS)], axis=0)
    np.testing.assert_allclose(mean, np.zeros(DIM), atol=1e-12)
    end = bsp(start(), problem, RANKS, 0.5, 300).homes[-1]
    np.testing.assert_allclose(end, problem.minimum, atol=1e-9)
    assert problem.loss(problem.minimum) == 0


def test_the_noise_is_a_function_of_rank_and_step_alone(problem: Quadratic) -> None:
    x = start()
    np.testing.assert_array_equal(problem(1, 2, x), quadratic(RANKS, DIM, seed=3)(1, 2, x))
    others = [problem(1, 3, x) - problem(1, 2, x), problem(1, 3, x + 1) - problem(1, 2, x + 1)]
    np.testing.assert_allclose(others[0], others[1], atol=1e-12)
    assert np.abs(others[0]).max() > 0.01


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: asgd(start(), p, RANKS, RATE, [0, RANKS]), "names rank 4; ranks are 0 to 3"),
        (lambda p: bsp(np.zeros(3, int), p, RANKS, RATE, 1), "vector of float32 or float64"),
        (lambda p: bsp(start(), p, 0, RATE, 1), "at least one rank"),
        (lambda p: partial(start(), p, RANKS, RATE, [], RANKS), "nobody to wait for"),
        (lambda p: dpsgd(start(), p, complete, RATE, 1), "has to be"),
        (lambda p: dpsgd(starts(), p, lambda clock: np.eye(3), RATE, 1), "mixing matrix"),
        (lambda p: adpsgd(starts(), p, RATE, [("mix", 1, 1)]), "cannot mix with itself"),
        (lambda p: adpsgd(starts(), p, RATE, [("wait", 1)]), "an event is"),
    ],
)
def test_nonsense_is_refused_with_a_sentence(
    problem: Quadratic, call: Callable[[Quadratic], Run], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(problem)
