"""A script that is right with `asp` ends with every asynchronous and partial algorithm, whatever the ranks' order."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_rt import algorithms, wire
from tests.for_each import for_each
from tests.fusiond.algorithms.schedules import Schedule, stuck
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array, SimulatedJob

WAITING = (
    "ssp(staleness=0)",
    "ssp(staleness=2)",
    "partial(backup=1)",
    "partial(backup=1, deadline=2.0)",
    "easgd(steps=1, synchronous_home=True)",
    "dpsgd",
    "dpsgd(topology='complete')",
    "sgp",
    "sgp(topology='one-peer-exponential')",
    "choco",
    "noloco(steps=1)",
    "decoupled(steps=1, quorum=1)",
    "decoupled(steps=1, grace=0.5)",
    "decoupled(steps=1, quorum=3)",
)
"""Those in which a worker may have to wait for others."""
AT_ONCE = (
    "asp",
    "softsync",
    "dc_asgd",
    "hogwild",
    "collaborative(samples=3)",
    "easgd(steps=1)",
    "ea_wild(steps=1)",
    "adpsgd",
)
RANKS, DIM = 4, 30
START = np.random.default_rng(1).standard_normal(DIM)


def every_script_ends(algorithm: str, seeds: range, optimizers: int = 1) -> None:
    found = stuck(algorithm, seeds, optimizers)
    text = "\n".join(f"seed {seed}: {why}" for seed, why in found.items())
    assert not found, f"{len(found)} of {len(seeds)} scripts never end with {algorithm}:\n{text}"


@pytest.mark.parametrize("algorithm", WAITING)
def test_every_script_ends(algorithm: str) -> None:
    every_script_ends(algorithm, range(40))


@pytest.mark.parametrize("algorithm", WAITING)
def test_every_script_ends_that_trains_two_models_in_any_order(algorithm: str) -> None:
    every_script_ends(algorithm, range(12), optimizers=2)


@pytest.mark.parametrize("algorithm", AT_ONCE)
def test_every_script_ends_where_nobody_waits_for_anybody(algorithm: str) -> None:
    every_script_ends(algorithm, range(8))


@pytest.mark.long
@pytest.mark.parametrize("optimizers", [1, 2, 3])
@pytest.mark.parametrize("algorithm", WAITING + AT_ONCE)
def test_every_one_of_many_scripts_ends(algorithm: str, optimizers: int) -> None:
    every_script_ends(algorithm, range(8, 2008), optimizers)


def test_the_algorithms_are_all_of_those_that_are_not_synchronous() -> None:
    tried = {type(algorithms.parse(text)) for text in WAITING + AT_ONCE}
    assert tried == {kind for kind in algorithms.ALGORITHMS.values() if not kind.synchronous}


@pytest.mark.parametrize(
    "algorithm", ["dpsgd", "sgp", "choco", "noloco(steps=1)", "easgd(steps=1, synchronous_home=True)", "ssp"]
)
def test_ranks_that_take_equal_steps_between_barriers_are_never_left_out(algorithm: str) -> None:
    """Even if one goes on from a barrier before the daemon of another knows that it is complete."""
    replicas = algorithms.parse(algorithm).place is algorithms.Place.REPLICA
    for seed in range(20):
        schedule = Schedule(algorithm, seed, even=True)
        schedule.run()
        steps = schedule.steps[0]
        for hosted in schedule.hosted_homes:
            if algorithm == "ssp":
                assert hosted.home.version == len(schedule.steps) * steps
            else:  # nobody has passed, and no update was without anybody
                assert hosted.home.version == steps
            assert not replicas or hosted.home.heard.get(hosted.home.rank, 0) == steps


# --- what is kept when a rank passes ----------------------------------------------------------------------------------


def occupy(workers: Workers, rank: int, name: str = "barrier") -> int:
    """A rank waits in a barrier. Returns the handle."""
    handle = workers.job.submit(rank, name, wire.Signature("barrier"))
    workers.job.settle()
    return handle


def leave_one_out(
    layout: list[int], algorithm: str, codec: str = "dense", first: int = 1
) -> tuple[Workers, list[Array]]:
    """All mix `first` times, and three ranks six times while rank 2 is in a barrier; then all mix once more."""
    rng = np.random.default_rng(5)
    start = START.astype(np.float32) if codec != "dense" else START
    workers = Workers(layout, algorithm, start, 0.1, codec=codec)
    workers.x = [start + rng.standard_normal(DIM).astype(start.dtype) for _ in range(RANKS)]
    before = [x.copy() for x in workers.x]

    def mix(*ranks: int) -> None:
        for rank in ranks:
            workers.post(rank, workers.x[rank], settle=False)
        workers.job.settle()
        for rank in ranks:
            workers.collect(rank)

    for _ in range(first):
        mix(0, 1, 2, 3)
    handle = occupy(workers, 2)
    for _ in range(6):
        mix(0, 1, 3)
    assert not workers.job.is_answered(2, handle)
    for rank in (0, 1, 3):
        occupy(workers, rank)
    assert workers.job.is_answered(2, handle)
    mix(0, 1, 2, 3)
    return workers, before


@for_each("layout", [[4], [2, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [
        ("dpsgd", "dense"),
        ("dpsgd(topology='complete')", "dense"),
        ("noloco(steps=1)", "dense"),
        ("choco(gamma=0.4)", "topk(density=0.3, minimum=0)"),
    ],
)
def test_the_mean_stays_when_a_rank_is_left_out_and_comes_back(layout: list[int], algorithm: str, codec: str) -> None:
    workers, before = leave_one_out(layout, algorithm, codec)
    error = np.abs(np.mean(workers.x, 0) - np.mean(before, 0)).max()
    assert error < (1e-12 if codec == "dense" else 1e-5)


@for_each("layout", [[4], [2, 2], [1, 1, 1, 1]])
@for_each("topology", ["exponential", "one-peer-exponential"])
@for_each("first", [0, 1])
def test_push_sum_loses_nothing_when_a_rank_is_left_out(layout: list[int], topology: str, first: int) -> None:
    workers, before = leave_one_out(layout, f"sgp(topology={topology!r})", first=first)
    for bucket in workers.plan.buckets:
        homes = [hosted.home for node in workers.job.nodes for hosted in node.engine.homes._server
                 if hosted.bucket.index == bucket.index]  # fmt: skip
        np.testing.assert_allclose(sum(home.aux["omega"][0] for home in homes), RANKS)
        total = sum(home.value for home in homes)
        for (_, of), tensor in zip(workers.places(0, bucket), bucket.tensors, strict=True):
            kept = total[tensor.start : tensor.start + tensor.numel]  # type: ignore[index]
            np.testing.assert_allclose(kept, np.sum(before, 0)[of])


def test_an_elastic_home_goes_on_with_the_ranks_that_are_there() -> None:
    workers = Workers([2, 2], "easgd(steps=1, alpha=0.2, synchronous_home=True)", START, 0.1)
    values = [START + rank for rank in range(RANKS)]
    for rank in (0, 1, 2):
        workers.post(rank, values[rank])
    assert workers.waits(0)
    occupy(workers, 3)
    assert not any(workers.waits(rank) for rank in (0, 1, 2))
    np.testing.assert_allclose(workers.home(), START + 0.2 * (0 + 1 + 2))


def test_who_waits_in_a_barrier_is_a_backup_and_counts_again_when_it_is_back() -> None:
    workers = Workers([2, 2], "partial(backup=1)", START, 0.1)
    workers.post(0, START)
    workers.post(1, START)
    workers.job.pass_time(500)
    assert workers.waits(0)  # two are still computing, and one of them is no backup
    occupy(workers, 3)
    assert workers.waits(0)
    handle = occupy(workers, 2)
    assert not workers.waits(0)
    assert not workers.waits(1)
    for rank in (0, 1):
        occupy(workers, rank)
        workers.collect(rank)
    assert workers.job.is_answered(2, handle)
    workers.post(0, START)
    workers.post(1, START)
    assert workers.waits(0)


def test_who_waits_in_a_barrier_holds_nobody_back_until_it_is_back() -> None:
    workers = Workers([2, 2], "ssp(staleness=1)", START, 0.1)

    def step(rank: int) -> bool:
        workers.post(rank, START)
        held = workers.waits(rank)
        if not held:
            workers.collect(rank)
        return held

    assert [step(0), step(0)] == [False, True]
    for rank in (1, 2):
        occupy(workers, rank)
    assert workers.waits(0)  # rank 3 computes
    occupy(workers, 3)
    assert not workers.waits(0)
    workers.collect(0)
    assert [step(0) for _ in range(5)] == [False] * 5
    occupy(workers, 0)  # they all are back
    assert step(0)
    for _ in range(7):
        for rank in (1, 2, 3):
            assert workers.waits(0)
            step(rank)
    assert not workers.waits(0)


def test_who_waits_in_a_barrier_that_it_came_to_before_the_plan_was_there_holds_nobody_back() -> None:
    job = SimulatedJob([2, 2])
    handles = [job.submit(rank, "barrier", wire.Signature("barrier")) for rank in (1, 2, 3)]
    workers = Workers([2, 2], "ssp(staleness=1)", START, 0.1, job=job)
    for _ in range(5):
        workers.post(0, START)
        assert not workers.waits(0)
        workers.collect(0)
    occupy(workers, 0)
    assert all(job.is_answered(rank, handle) for rank, handle in zip((1, 2, 3), handles, strict=True))
