"""The memory that a job needs, as it is told before the job, is that of a job's daemons and workers."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from benchmarks import footprint
from benchmarks.common import results
from fusion_rt import algorithms, codecs
from fusion_rt.choice.memory_needs import DAEMON_NBYTES, SCRATCH_NBYTES, WORKER_NBYTES, needs
from fusion_rt.core.dtypes import DTYPES
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import SimulatedJob

ELEMENTS = 3 << 16
MODEL = 4 * ELEMENTS
CLOSE = 0.06  # units of the model
AT_HOMES = [
    "bsp", "asp", "ssp", "hogwild", "softsync", "dc_asgd", "partial", "collaborative(samples=4)", "easgd", "ea_wild",
    "dpsgd", "sgp", "adpsgd", "noloco", "decoupled",
]  # fmt: skip


def kept(algorithm: str, codec: str) -> float:
    """Returns the memory that the daemons of two nodes, one rank each, have after three steps: that of one of them, in
    units of the model, without arenas."""
    gc.collect()
    tracemalloc.start()
    try:
        job = SimulatedJob([1, 1], fusion_threshold=2 * MODEL, chunk_bytes=1 << 16, window_bytes=1 << 18)
        workers = Workers([1, 1], algorithm, np.zeros(ELEMENTS, np.float32), 0.1, codec=codec, job=job)
        random = np.random.default_rng(0)
        for _ in range(3):
            for rank in job.ranks:
                workers.post(rank, random.random(ELEMENTS, np.float32), settle=False)
            job.settle()
            for rank in workers.answered():
                workers.collect(rank)
        job.answers.clear()
        gc.collect()
        outside = sum(x.nbytes for x in workers.x) + sum(memory.nbytes for memory in workers.memory)
        return (tracemalloc.get_traced_memory()[0] - outside) / MODEL / 2
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def records() -> float:
    """Records of the simulation and of operations, in units of the model: what is left where nothing is kept."""
    kept("allreduce", "dense")
    return kept("allreduce", "dense")


@pytest.mark.parametrize("codec", sorted({*codecs.CODECS} - {"powersgd"}))
def test_daemons_keep_what_their_codec_says(codec: str, records: float) -> None:
    kept("allreduce", codec)  # what the first one needs only
    told = needs(algorithms.parse("allreduce"), codecs.parse(codec), 2).daemon
    assert kept("allreduce", codec) - records == pytest.approx(told, abs=CLOSE)


def test_powersgd_keeps_its_residual_and_factors_that_are_small() -> None:
    layout = codecs.Layout(DTYPES["float32"], 1 << 18, (codecs.Span("w", 0, 1 << 18, (512, 512)),))
    codec = codecs.parse("powersgd")
    codec.open(layout)
    tracemalloc.start()
    opened = codec.open(layout)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held / (opened.numel * 4) == pytest.approx(codec.memory(), abs=CLOSE)


@pytest.mark.parametrize("codec", ["topk(momentum=0.9)", "int8(momentum=0.9)"])
def test_a_codec_with_a_momentum_keeps_a_velocity(codec: str, records: float) -> None:
    assert needs(algorithms.parse("allreduce"), codecs.parse(codec), 2).daemon == 2.0
    assert kept("allreduce", codec) - records == pytest.approx(2.0, abs=CLOSE)


@pytest.mark.parametrize("algorithm", AT_HOMES)
def test_homes_keep_what_their_algorithm_says(algorithm: str, records: float) -> None:
    spec = algorithms.parse(algorithm)
    copies = spec.home_copies(2) / (2 if spec.at_shards else 1)
    kept(algorithm, "dense")
    assert kept(algorithm, "dense") - records == pytest.approx(copies, abs=CLOSE)
    assert copies <= needs(spec, codecs.parse("dense"), 2).daemon


@pytest.mark.parametrize("codec", ["topk", "int8"])
def test_homes_keep_nothing_for_codecs_that_remember_nothing(codec: str, records: float) -> None:
    """Choco has x, and the copies of it and of its neighbour: Q(x - x^) leaves nothing that is sent later."""
    kept("choco", codec)
    assert kept("choco", codec) - records == pytest.approx(3.0, abs=CLOSE)
    # Half of the shards, what the other node's rank was told of these, and the residual of its own worker's gradients
    # to the other half.
    kept("asp", codec)
    assert kept("asp", codec) - records == pytest.approx(1.5, abs=CLOSE)
    assert needs(algorithms.parse("asp"), codecs.parse(codec), 2).daemon == 1.5 + 0.5  # a contribution that waits


def test_on_one_host_daemons_keep_nothing() -> None:
    assert needs(algorithms.parse("allreduce"), codecs.parse("topk"), 1, workers=4).daemon == 0


def test_homes_have_the_state_of_the_optimizer_whose_steps_they_take() -> None:
    dense = codecs.parse("dense")
    for algorithm, more in [("bsp", 1.0), ("easgd", 0.0), ("allreduce", 0.0)]:
        spec = algorithms.parse(algorithm)
        assert needs(spec, dense, 2, optimizer=2.0).daemon - needs(spec, dense, 2).daemon == more


def test_a_host_needs_what_its_processes_do() -> None:
    found = needs(algorithms.parse("diloco"), codecs.parse("topk"), 2, workers=4)
    assert (found.worker, found.daemon) == (5.0, 1.0)
    assert found.host_nbytes(1e9, 4) == 21e9 + 4 * WORKER_NBYTES + SCRATCH_NBYTES + DAEMON_NBYTES


MEASURED = [one for one in results.load(results.RESULTS / "footprint.json").records if "parameters" in one.setting]


@for_each("record", MEASURED)
def test_measured_jobs_are_within_what_is_told(record: results.Record) -> None:
    of = {name: record.measure(name).samples[footprint.OURS][0] for name in footprint.MEASURES}
    spec = algorithms.parse(str(record.setting["algorithm"]))
    found = needs(spec, codecs.parse(str(record.setting["codec"])), 2)
    model = 4 * float(record.setting["parameters"])
    assert of["worker"] + of["arenas"] <= found.worker + WORKER_NBYTES / model
    assert of["daemon, at most"] * model <= found.daemon * model + SCRATCH_NBYTES + DAEMON_NBYTES
