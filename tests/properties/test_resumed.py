"""A job that loads a checkpoint goes on bit by bit, by each algorithm with homes and each codec that it goes with."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from fusion_rt import algorithms, codecs, wire
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array
from tests.properties.scheduled import LAYOUTS, starts

ALGORITHMS = (
    "bsp",
    "asp",
    "hogwild",
    "ssp(staleness=1)",
    "softsync(contributions=3)",
    "dc_asgd(adaptive=True)",
    "partial(backup=1)",
    "collaborative(samples=3)",
    "easgd(steps=1)",
    "easgd(steps=1, synchronous_home=True)",
    "ea_wild(steps=1)",
    "dpsgd(topology='exponential')",
    "sgp(topology='exponential')",
    "choco(topology='ring', gamma=0.05)",
    "adpsgd(topology='ring')",
    "noloco(steps=1)",
    "decoupled(steps=1, quorum=2)",
)
CODECS = (
    *("dense", "fp16", "topk(density=0.2, minimum=8)", "thresholdk(density=0.2, minimum=8, every=5)"),
    *("gaussiank(density=0.2, minimum=8)", "randomk(density=0.2, minimum=8)", "int8(minimum=8)", "int4(minimum=8)"),
    *("int2(minimum=8)", "onebit(minimum=8)", "topk(density=0.2, minimum=8, momentum=0.5)"),
)
ADAM = wire.OptimizerSpec("Adam", (json.dumps({"betas": [0.8, 0.9]}),))


def goes_with(algorithm: str, codec: str) -> bool:
    try:
        algorithms.check_use(algorithms.parse(algorithm), codecs.parse(codec), "average", 4)
    except algorithms.AlgorithmError:
        return False
    return True


def trained(workers: Workers, steps: range) -> None:
    """Each rank contributes in each step, in an order that the step decides; those that wait are left out."""
    gradients = workers.spec.signal is algorithms.Signal.GRADIENT
    for step in steps:
        choose = np.random.default_rng((step, 5))
        for rank in choose.permutation(workers.job.size).tolist():
            values: Array = choose.standard_normal(len(workers.x[rank])).astype(np.float32)
            if not gradients:
                values = workers.x[rank] - np.float32(0.1) * values
            if not workers.waits(rank):
                workers.post(rank, values, samples=1)
            for other in workers.answered():
                workers.collect(other)
        workers.job.pass_time(1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_job_that_loads_a_checkpoint_goes_on_bit_by_bit(algorithm: str) -> None:
    """With some of the codecs, others for each algorithm."""
    fitting = [codec for codec in CODECS if goes_with(algorithm, codec)]
    goes_on(algorithm, fitting[ALGORITHMS.index(algorithm) % 4 :: 4] or fitting)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_does_so_with_every_codec(algorithm: str) -> None:
    goes_on(algorithm, [codec for codec in CODECS if goes_with(algorithm, codec)])


def goes_on(algorithm: str, fitting: Sequence[str]) -> None:
    for number, codec in enumerate(fitting):
        layout = LAYOUTS[4 + 2 * (number % 3)][1]
        begun = starts(1, number, np.float32, 30)[0]
        whole, first, second = (Workers(layout, algorithm, begun, 0.01, ADAM, codec, number) for _ in range(3))
        trained(whole, range(8))
        trained(first, range(8))
        at_rest = [rank for rank in whole.job.ranks if not first.waits(rank)]
        if len(at_rest) < whole.job.size:  # a checkpoint is taken when nothing is awaited
            continue
        for node, state in enumerate(first.job.saved_homes(first.plan)):
            second.job.load_homes(node, state)
        second.x, second.clocks = [x.copy() for x in first.x], list(first.clocks)
        if second.spec.at_shards and second.spec.signal is not algorithms.Signal.PARAMETER:
            for rank in second.job.ranks:
                second.say(rank)
        trained(whole, range(8, 13))
        trained(second, range(8, 13))
        for rank, (expected, found) in enumerate(zip(whole.x, second.x, strict=True)):
            apart = np.abs(expected - found).max()
            assert expected.tobytes() == found.tobytes(), f"{algorithm}, {codec}, {layout}: rank {rank} is {apart} off"
