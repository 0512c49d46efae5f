"""Weights that all ranks have set are the new start, whatever an algorithm or a codec remembers of those before."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_rt import algorithms, codecs
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array
from tests.properties.scheduled import LAYOUTS, starts
from tests.properties.test_resumed import ALGORITHMS, CODECS, goes_with, trained

ALL_CODECS = (*CODECS, "demo(density=0.2, minimum=8, chunk=8)", "powersgd(rank=1, minimum=8)")
REDUCED = ("allreduce", "diloco(steps=1)")  # by daemons alike: a worker makes an outer step of the mean
SET = 3.0


def meetings() -> list[tuple[str, str]]:
    """Each algorithm with all codecs that it goes with."""
    return [(name, codec) for name in (*REDUCED, *ALGORITHMS) for codec in ALL_CODECS if goes_with(name, codec)]


def at_rest(workers: Workers) -> None:
    """All ranks have the answers to what they have posted: those that wait for others get them when these post."""
    for _ in range(8):
        waiting = [rank for rank in workers.job.ranks if workers.waits(rank)]
        if not waiting:
            return
        for rank in workers.job.ranks:
            if rank not in waiting:
                workers.post(rank, workers.x[rank])
        workers.job.pass_time(2)
        for rank in workers.answered():
            workers.collect(rank)
    raise AssertionError("ranks wait for ever")


def moved(algorithm: str, codec: str, seed: int) -> float:
    """How far a rank's weights, or a home's, are from what all have set, after steps without gradients."""
    layout = LAYOUTS[4 + 2 * (seed % 3)][1 + seed % 2]
    begun = starts(1, seed, np.float32, 30)[0]
    workers = Workers(layout, algorithm, begun, 0.1, codec=codec, seed=seed)
    posts_gradients = workers.spec.signal in (algorithms.Signal.GRADIENT, algorithms.Signal.DELTA)
    trained(workers, range(5))
    at_rest(workers)
    workers.set(np.full_like(begun, SET))
    furthest = 0.0
    for _ in range(8):
        for rank in workers.job.ranks:
            if not workers.waits(rank):
                zeros: Array = np.zeros_like(begun)
                workers.post(rank, zeros if posts_gradients else workers.x[rank], settle=False)
        workers.job.settle()
        workers.job.pass_time(2)
        for rank in workers.answered():
            if workers.spec.at_homes:
                workers.collect(rank)
            else:
                furthest = max(furthest, max(float(np.abs(place).max()) for place, _ in workers.places(rank)))
                del workers._handles[rank]
        copies = [*workers.x, *([workers.home()] if workers.spec.at_shards else [])]
        furthest = max(furthest, *(float(np.abs(x - SET).max()) for x in copies))
    return furthest


@pytest.mark.parametrize("algorithm", [*REDUCED, *ALGORITHMS])
def test_weights_that_all_ranks_have_set_stay_without_gradients(algorithm: str) -> None:
    """Whatever waited at a home, or was not sent: to the bit, but for what mixing rounds."""
    codecs_of = [codec for name, codec in meetings() if name == algorithm]
    found = {codec: moved(algorithm, codec, seed) for seed, codec in enumerate(codecs_of)}
    exact = algorithms.parse(algorithm).place is not algorithms.Place.REPLICA
    far = {codec: by for codec, by in found.items() if by > (0 if exact else 1e-6)}
    assert not far, far


def test_all_codecs_are_tried() -> None:
    assert {codecs.parse(text).name for _, text in meetings()} == set(codecs.CODECS) - {"bf16"}  # which rounds as fp16
