"""Gossip on 4, 6 and 8 ranks beside the references, step by step, on graphs of each kind; contraction, and means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from fusion_rt import algorithms
from fusion_rt.core import mixing
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array
from tests.properties.scheduled import LAYOUTS, SIZES, Parameters, spread, starts
from tests.reference import algorithms as published
from tests.reference import codecs as reference

RATE, STEPS = 0.05, 16


def still(rank: int, step: int, x: Array) -> Array:
    return np.zeros_like(x)


def directed(ranks: int, seed: int, doubly: bool) -> Array:
    """A matrix on a directed graph that is not complete: columns sum to 1, and rows too, if it is `doubly`."""
    choose = np.random.default_rng((seed, ranks))
    if doubly:  # a mean of cyclic shifts
        weights = choose.dirichlet(np.ones(3))
        shifts = (0, 1, ranks // 2)
        return sum(w * np.roll(np.eye(ranks), s, axis=0) for w, s in zip(weights, shifts, strict=True))  # type: ignore[no-any-return]
    edges = np.eye(ranks) + np.roll(np.eye(ranks), 1, axis=0) + (choose.random((ranks, ranks)) < 0.3)
    matrix = edges * choose.uniform(0.2, 1.0, (ranks, ranks))
    return matrix / matrix.sum(axis=0)  # type: ignore[no-any-return]


def written(matrix: Array, path: Path) -> str:
    np.savetxt(path, matrix, fmt="%.17g")
    return f"file:{path}"


def exchanged(workers: Workers, posted: Sequence[Array], moved: Sequence[Array]) -> None:
    """All ranks post, in any order, and go on to `moved` before they take their answers."""
    for rank in np.random.default_rng(workers.clocks[0]).permutation(len(posted)).tolist():
        workers.post(rank, posted[rank], settle=False)
    workers.job.settle()
    for rank, x in enumerate(moved):
        workers.x[rank] = x.copy()
        workers.collect(rank)


def layouts_of(ranks: int, number: int) -> list[int]:
    return LAYOUTS[ranks][number % len(LAYOUTS[ranks])]


def graphs(ranks: int, path: Path, doubly: bool) -> list[str]:
    named = [graph for size, graph in SIZES if size == ranks]
    return [*named, written(directed(ranks, 1, doubly), path)]


@pytest.mark.parametrize("ranks", [4, 6, 8])
@pytest.mark.parametrize("algorithm", ["dpsgd", "sgp"])
def test_each_exchange_is_that_of_the_reference(algorithm: str, ranks: int, tmp_path: Path) -> None:
    problem = published.quadratic(ranks, 60, seed=3)
    for number, graph in enumerate(graphs(ranks, tmp_path / "w", algorithm == "dpsgd")):
        matrix, layout = mixing.parse(graph, ranks).matrix, layouts_of(ranks, number)
        begun = starts(ranks, number, elements=30)
        workers = Workers(layout, f"{algorithm}(topology={graph!r})", begun[0], RATE, seed=number)
        workers.x = list(begun.copy())
        rule = published.dpsgd if algorithm == "dpsgd" else published.sgp
        run = rule(begun, problem, matrix, RATE, STEPS)
        for step, expected in enumerate(run.debiased or run.workers):
            before = [x.copy() for x in workers.x]
            moved = [x - RATE * problem(rank, step, x) for rank, x in enumerate(before)]
            exchanged(workers, before if algorithm == "dpsgd" else moved, moved)
            where = f"{graph}, {layout}, exchange {step}"
            np.testing.assert_allclose(np.stack(workers.x), expected, rtol=1e-9, atol=1e-11, err_msg=where)


@for_each(("ranks", "graph"), SIZES)
def test_ranks_come_together_as_fast_as_the_gap_of_the_graph_promises(ranks: int, graph: str) -> None:
    """Of symmetric graphs after each exchange, of changing ones after each period: by 1 - gap (Xiao and Boyd 2004)."""
    mixing_graph = mixing.parse(graph, ranks)
    factor = 1 - mixing_graph.spectral_gap()
    begun = starts(ranks, 5)
    workers = Workers(layouts_of(ranks, len(graph)), f"dpsgd(topology={graph!r})", begun[0], RATE)
    workers.x = list(begun.copy())
    mean, first = begun.mean(axis=0), np.linalg.norm(begun - begun.mean(axis=0))
    for step in range(1, 2 * mixing_graph.period + 17):
        exchanged(workers, workers.x, workers.x)
        apart = np.linalg.norm(np.stack(workers.x) - mean)
        if step % mixing_graph.period == 0 and (mixing_graph.symmetric or mixing_graph.period > 1):
            assert apart <= first * factor**step * (1 + 1e-9) + 1e-9, f"{apart / first} after {step} exchanges"
        np.testing.assert_allclose(np.mean(workers.x, axis=0), mean, rtol=0, atol=1e-12)


GAMMA = {"topk": 0.1, "int4": 0.3, "int2": 0.015, "onebit": 0.001}
SENDERS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "topk": ("topk(density=0.2, minimum=0, value='fp32')", lambda v: reference.topk(v, [(0, len(v))], len(v) // 5)),
    "int4": ("int4(minimum=0)", lambda v: reference.integers(v, [(0, len(v))], 4, 256)),
    "int2": ("int2(minimum=0)", lambda v: reference.int2(v, [(0, len(v))], 256)),
    "onebit": ("onebit(minimum=0)", lambda v: reference.onebit(v, [(0, len(v))], 1024)),
}


@pytest.mark.parametrize("name", SENDERS)
def test_choco_is_that_of_the_reference_with_codecs_of_the_reference(name: str) -> None:
    """With gradients; each of the two buckets is encoded by itself."""
    codec, send = SENDERS[name]
    for ranks, graph in [(4, "ring"), (6, "torus"), (8, "hypercube"), (8, "complete")]:
        problem = published.quadratic(ranks, 60, seed=3)
        begun = starts(1, 4, np.float32, elements=30)[0]
        workers = Workers(
            layouts_of(ranks, 1), f"choco(topology={graph!r}, gamma={GAMMA[name]})", begun, RATE, codec=codec
        )
        buckets = [[workers.span_of(t.name) for t in bucket.tensors] for bucket in workers.plan.buckets]

        whole = iter(range(ranks))  # the first message of each rank

        def quantise(difference: Array, buckets: list[list[slice]] = buckets, whole: Iterator[int] = whole) -> Array:
            if next(whole, None) is not None:
                return difference
            sent = np.zeros_like(difference)
            for spans in buckets:
                parts = [np.arange(span.start, span.stop) for span in spans]  # blocks begin anew with each tensor
                for of in [np.concatenate(parts)] if name == "topk" else parts:
                    sent[of] = send(difference[of])
            return sent

        matrix = mixing.parse(graph, ranks).matrix(0)
        run = published.choco(begun, problem, matrix, RATE, GAMMA[name], quantise, STEPS)
        for step, expected in enumerate(run.workers):
            moved = [(x - RATE * problem(r, step, x)).astype(np.float32) for r, x in enumerate(workers.x)]
            exchanged(workers, moved, moved)
            where = f"{name}, {ranks} ranks, {graph}, exchange {step}"
            np.testing.assert_allclose(np.stack(workers.x), expected, rtol=0, atol=2e-5, err_msg=where)


PAIRED = for_each(("ranks", "graph"), [(4, "ring"), (6, "bipartite"), (8, "torus"), (8, "ring")])


@PAIRED
def test_pairs_keep_the_sum_of_all_copies_whatever_ranks_wait_for(ranks: int, graph: str) -> None:
    """AD-PSGD without gradients, by random schedules: what homes have, with all changes that workers have not got."""
    for seed in range(4):
        begun = starts(ranks, seed)
        schedule = Parameters(f"adpsgd(topology={graph!r})", seed, ranks, begun, last=3)
        schedule.run()
        for bucket, part in enumerate((slice(0, 48), slice(48, 96))):
            total = sum(home.value for home in schedule.homes(bucket))  # type: ignore[misc]
            where = f"{graph}, {ranks} ranks, seed {seed}: {schedule.where}"
            np.testing.assert_allclose(total, begun.sum(0)[part], rtol=0, atol=1e-11, err_msg=where)


@PAIRED
def test_pairs_come_to_the_mean(ranks: int, graph: str) -> None:
    begun = starts(ranks, 3, elements=30)
    workers = Workers(layouts_of(ranks, 2), f"adpsgd(topology={graph!r})", begun[0], RATE)
    workers.x = list(begun.copy())
    for rank in [*range(ranks), *np.random.default_rng(4).integers(0, ranks, 120 * ranks).tolist()]:
        workers.post(rank, workers.x[rank])
        workers.collect(rank)
    assert spread(workers.x) < 1e-6
    np.testing.assert_allclose(np.mean(workers.x, axis=0), begun.mean(axis=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm", ["easgd(steps=1, alpha=0.1)", "ea_wild(steps=1)", "easgd(steps=1, synchronous_home=True)"]
)
def test_elastic_averaging_keeps_the_sum_of_all_copies_and_the_home(algorithm: str) -> None:
    """By random schedules, in which ranks wait, and join (1412.6651, eqs. 3 and 4, without gradients)."""
    for seed in range(6):
        ranks = (4, 6, 8)[seed % 3]
        begun = starts(ranks, seed)
        schedule = Parameters(algorithm, seed, ranks, begun, last=2)
        schedule.run()
        homes = np.concatenate([schedule.homes(bucket)[0].value for bucket in range(2)])  # type: ignore[misc]
        where = f"{algorithm}, seed {seed}: {schedule.where}"
        np.testing.assert_allclose(sum(schedule.x) + homes, begun.sum(0) + begun[0], rtol=0, atol=1e-11, err_msg=where)


def test_each_way_of_gossip_is_tried_here() -> None:
    gossip = {name for name, kind in algorithms.ALGORITHMS.items() if kind.place is algorithms.Place.REPLICA}
    assert gossip == {"dpsgd", "sgp", "choco", "adpsgd", "noloco"}  # the last one in test_local_steps.py
