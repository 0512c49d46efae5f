"""The event loop touches no bucket as a whole: all that grows with a bucket is done by threads, copies included.

Memory is watched that is allocated in the loop, since a copy, a conversion and an encoded bucket take some. Chunks do
not count, which are small.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fusion_rt import codecs
from fusion_rt.core import scratch
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Node, SimulatedJob

ELEMENTS = 3 << 19  # of two buckets, of 2 and 4 MiB: more than is worked on at once
LARGE = 1 << 20  # bytes, as is worked on at once
AT_HOMES = [
    "bsp",
    "asp",
    "ssp",
    "softsync",
    "dc_asgd",
    "partial",
    "easgd",
    "dpsgd",
    "sgp",
    "adpsgd",
    "noloco",
    "decoupled",
]

STATEFUL = [name for name, codec in sorted(codecs.CODECS.items()) if codec().stateful and not codec.only_all_reduced]
LOSSY = [*(("asp", codec) for codec in STATEFUL), ("choco", "int8"), ("choco", "topk")]
KEEP_NOTHING = ("dpsgd", "noloco")  # homes of these have nothing to be saved but counts


@pytest.fixture(autouse=True)
def every_array_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SCRATCH", scratch.Scratch(kept=0))  # else one that is used again is not seen


class Watch:
    """Watches the calls of engines that are the event loop's.

    Attributes:
        found: names of calls that took much memory, and the MiB.
    """

    def __init__(self, job: SimulatedJob) -> None:
        self.found: list[str] = []
        self._depth = 0
        for node in job.nodes:
            engine: Any = node.engine
            for name in ("peer_message", "ready", "propose", "tick"):
                setattr(engine, name, self._watched(name, getattr(engine, name)))
            node.run_jobs = engine._work._run_jobs = self._run_jobs(node)  # type: ignore[method-assign]

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            with self._segment(f"{name} {arguments[1] if name == 'peer_message' else ''}"[:60]):
                return call(*arguments)

        return watched

    @contextmanager
    def _segment(self, name: str) -> Iterator[None]:
        if self._depth:
            yield
            return
        self._depth += 1
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            yield
        finally:
            self._depth -= 1
            if (taken := tracemalloc.get_traced_memory()[1] - before) > LARGE:
                self.found.append(f"{name}: {taken / 2**20:.1f} MiB")

    def of(self, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Watches a call that the event loop makes."""
        self._watched(name, call)(*arguments)

    def _run_jobs(self, node: Node) -> Callable[..., None]:
        run_jobs = node.run_jobs

        def run(jobs: Any, then: Callable[..., None]) -> None:
            run_jobs(jobs, self._watched(f"then of {getattr(then, 'func', then)}", then))

        return run


def job_of_two() -> SimulatedJob:
    chunk = 1 << 16
    return SimulatedJob([1, 1], fusion_threshold=1 << 22, chunk_bytes=chunk, window_bytes=4 * chunk)


def train(algorithm: str, codec: str, saves: bool = False) -> list[str]:
    """Returns what the event loops of two nodes have done in three steps, the plan and the seeds included; or when
    homes are saved and loaded after these steps, and loaded in a job that has no plan before that."""
    tracemalloc.start()
    try:
        job, start = job_of_two(), np.zeros(ELEMENTS, np.float32)
        watch = Watch(job)
        workers = Workers([1, 1], algorithm, start, 0.1, codec=codec, job=job)
        random = np.random.default_rng(0)
        for _ in range(3):
            for rank in job.ranks:
                workers.post(rank, random.random(ELEMENTS, np.float32), settle=False)
            job.settle()
            for rank in workers.answered():
                workers.collect(rank)
        if saves:
            watch.found.clear()
            answers: list[object] = []
            states: list[dict[str, Any]] = [{} for _ in job.nodes]
            for node, state in zip(job.nodes, states, strict=True):
                watch.of("save", node.engine.homes.save, workers.plan.id, state, answers.append)
            job.settle()
            assert sum(value.nbytes for state in states for value in state.values()) > 4 * ELEMENTS
            other = job_of_two()
            watch_other = Watch(other)
            for node, other_node, state in zip(job.nodes, other.nodes, states, strict=True):
                watch.of("load", node.engine.keeper.load, (0, workers.plan.group), state, False, answers.append)
                watch_other.of(
                    "load", other_node.engine.keeper.load, (0, workers.plan.group), state, False, answers.append
                )
            job.settle()
            other.settle()
            assert answers == [None] * 6
            Workers([1, 1], algorithm, start, 0.1, codec=codec, job=other)
            assert not other.warnings
            return watch.found + watch_other.found
        return watch.found
    finally:
        tracemalloc.stop()


@for_each("codec", sorted(codecs.CODECS))
def test_steps_of_all_reduces_are_made_by_threads(codec: str) -> None:
    assert train("allreduce", codec) == []


@for_each("algorithm", AT_HOMES)
def test_steps_at_homes_are_made_by_threads(algorithm: str) -> None:
    assert train(algorithm, "dense") == []


@for_each(("algorithm", "codec"), LOSSY)
def test_codecs_of_homes_are_opened_by_threads(algorithm: str, codec: str) -> None:
    assert train(algorithm, codec) == []


@for_each(("algorithm", "codec"), [*((name, "dense") for name in AT_HOMES if name not in KEEP_NOTHING), *LOSSY])
def test_homes_are_saved_and_loaded_by_threads(algorithm: str, codec: str) -> None:
    assert train(algorithm, codec, saves=True) == []


def test_what_the_loop_copies_is_found() -> None:
    tracemalloc.start()
    try:
        watch = Watch(SimulatedJob([1, 1]))
        watch._watched("copy", lambda: np.zeros(ELEMENTS, np.float32).copy())()
        assert watch.found == ["copy : 12.0 MiB"]
    finally:
        tracemalloc.stop()
