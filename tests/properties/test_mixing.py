"""Mixing without gradients, on graphs that are not complete: the mean stays, and ranks come to it.

Ranks wait in other operations and join, at any moment, and come back.
"""

from __future__ import annotations

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.core import mixing
from tests.for_each import for_each
from tests.fusiond.algorithms.schedules import Training
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array
from tests.properties.scheduled import LAYOUTS, SIZES, Parameters, spread, starts


def all_come_to_the_mean(
    algorithm: str, ranks: int, seed: int, times: int, codec: str = "", error: float = 1e-9
) -> None:
    dtype = np.float32 if codec else np.float64
    begun = starts(ranks, seed, dtype)
    schedule = Parameters(algorithm, seed, ranks, begun, times, codec)
    schedule.run()
    where = f"{algorithm} with {codec or 'dense'}, {ranks} ranks, seed {seed}: {schedule.where}"
    mean = begun.mean(axis=0, dtype=float)
    assert spread(schedule.x) < error, f"{where}: {spread(schedule.x)} apart"
    moved = np.abs(np.mean(schedule.x, axis=0, dtype=float) - mean).max()
    assert moved < error, f"{where}: the mean has moved by {moved}"


@for_each(("ranks", "graph"), SIZES)
@pytest.mark.parametrize("algorithm", ["dpsgd", "sgp"])
def test_ranks_come_to_the_mean_of_what_they_began_with(algorithm: str, ranks: int, graph: str) -> None:
    gap = mixing.parse(graph, ranks).spectral_gap()
    times = int(np.ceil(np.log(1e-12) / np.log(max(1 - gap, 1e-2)))) + 8
    for seed in range(3):
        all_come_to_the_mean(f"{algorithm}(topology={graph!r})", ranks, seed, times)


@for_each(
    ("ranks", "graph"),
    [size for size in SIZES if mixing.parse(size[1], size[0]).period == 1 and size[1] != "exponential"],
)
def test_compressed_gossip_keeps_the_mean(ranks: int, graph: str) -> None:
    """CHOCO-SGD with small steps on symmetric graphs; ranks come closer, and the mean is what it was."""
    for seed, codec in enumerate(("topk(density=0.3, minimum=0)", "int8(minimum=0)", "int4(minimum=0)")):
        begun = starts(ranks, seed, np.float32)
        schedule = Parameters(f"choco(topology={graph!r}, gamma=0.05)", seed, ranks, begun, 30, codec)
        schedule.run()
        where = f"{graph}, {codec}, {ranks} ranks, seed {seed}: {schedule.where}"
        owed = [np.concatenate([schedule.homes(b)[rank].aux.get("owed", np.zeros(48)) for b in range(2)])
                for rank in range(ranks)]  # fmt: skip
        kept = np.sum(schedule.x, axis=0, dtype=float) + np.sum(owed, axis=0, dtype=float)
        np.testing.assert_allclose(kept, begun.sum(0, dtype=float), rtol=0, atol=1e-4, err_msg=where)
        assert spread(schedule.x) < spread(list(begun)), where


class Pairs(Parameters):
    """NoLoCo's ranks, that do not move by themselves."""

    MOMENTUM, CONSENSUS = 0.4, 1.1

    def __init__(self, graph: str, seed: int, ranks: int, begun: Array, last: int) -> None:
        self.velocities = np.zeros_like(begun)
        text = f"noloco(steps=1, outer_momentum={self.MOMENTUM}, consensus={self.CONSENSUS}, topology={graph!r})"
        super().__init__(text, seed, ranks, begun, last, posts=lambda rank, count, x: self.CONSENSUS * x)

    def take(self, rank: int, training: Training, bucket: int, message: wire.DaemonMessage) -> None:
        part = self._part(bucket)
        self.velocities[rank][part] *= self.MOMENTUM
        self.velocities[rank][part] += self.place(rank, training, bucket)
        self.x[rank][part] += self.velocities[rank][part]


@for_each("ranks", [4, 6, 8])
@for_each("graph", ["random-pairs", "ring", "torus"])
def test_pairs_of_noloco_come_to_the_mean(graph: str, ranks: int) -> None:
    for seed in range(3):
        begun = starts(ranks, seed)
        schedule = Pairs(graph, seed, ranks, begun, 150)
        schedule.run()
        where = f"{graph}, {ranks} ranks, seed {seed}: {schedule.where}"
        assert spread(schedule.x) < 1e-3, f"{where}: {spread(schedule.x)} apart"
        np.testing.assert_allclose(np.mean(schedule.x, axis=0), begun.mean(axis=0), rtol=0, atol=1e-6, err_msg=where)


LEFT = [
    *("dpsgd(topology='ring')", "dpsgd(topology='exponential')", "dpsgd(topology='one-peer-exponential')"),
    *("sgp(topology='ring')", "sgp(topology='exponential')", "choco(topology='ring', gamma=0.1)"),
]


@for_each("ranks", [4, 6, 8])
@pytest.mark.parametrize("algorithm", LEFT)
def test_those_that_are_left_come_to_the_mean_of_what_they_have(algorithm: str, ranks: int) -> None:
    """After a rank has left, between two exchanges."""
    codec = "topk(density=0.4, minimum=0)" if algorithm.startswith("choco") else "dense"
    dtype = np.float64 if codec == "dense" else np.float32
    begun = starts(ranks, 2, dtype, 30)
    workers = Workers(LAYOUTS[ranks][2], algorithm, begun[0], 0.1, codec=codec)
    workers.x = list(begun.copy())
    there = list(range(ranks))
    for step in range(120):
        if step == 3:
            there.remove(1)
            workers.job.leave(1)
            workers.job.settle()
            mean = np.mean([workers.x[rank] for rank in there], axis=0)
        for rank in there:
            workers.post(rank, workers.x[rank], settle=False)
        workers.job.settle()
        for rank in there:
            workers.collect(rank)
    found, exact = [workers.x[rank] for rank in there], dtype == np.float64
    assert spread(found) < (0.01 if exact else 0.2) * spread(list(begun)), f"{spread(found)} apart"
    np.testing.assert_allclose(np.mean(found, axis=0), mean, rtol=0, atol=1e-11 if exact else 1e-5)
