"""All-reduce through every codec, on 4, 6 and 8 ranks: beside the references, and nothing is lost, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fusion_rt import codecs, wire
from tests.for_each import for_each
from tests.fusiond.simulation import Array
from tests.properties.reduced import LEAST_ENCODED, NET, Beside, Reduced, encoded_share, node_sums

LAYOUTS = ([2, 2], [1, 3], [1, 1, 1, 1], [2, 2, 2], [3, 1, 2], [2, 2, 2, 2], [1, 3, 1, 3], [4, 4])
FOLLOWED = {
    "topk": "topk(density=0.05, minimum=64, value='fp32')",
    "topk, fp16": "topk(density=0.05, minimum=64)",
    "topk, bf16": "topk(density=0.05, minimum=64, value='bf16', decay=0.9)",
    "topk, each tensor": "topk(density=0.05, minimum=64, value='fp32', scope='tensor')",
    "topk, chunks": "topk(density=0.05, minimum=64, value='fp32', chunk=512, decay=0.95)",
    "topk, momentum": "topk(density=0.05, minimum=64, value='fp32', momentum=0.9)",
    "topk, Nesterov, masked": "topk(density=0.008, minimum=64, value='fp32', momentum=0.9, nesterov=True)",
    "thresholdk": "thresholdk(density=0.05, minimum=64, value='fp32', every=8)",
    "gaussiank": "gaussiank(density=0.05, minimum=64, value='fp32')",
    "randomk": "randomk(density=0.05, minimum=64, value='fp32', seed=3)",
    "int8": "int8(minimum=64, rounding='nearest')",
    "int4": "int4(minimum=64, block=64)",
    "int4, momentum": "int4(minimum=64, momentum=0.9, decay=0.9)",
    "int2": "int2(minimum=64)",
    "onebit": "onebit(minimum=64, block=256)",
    "powersgd": "powersgd(rank=3, minimum=64)",
    "demo": "demo(density=0.05, minimum=64, value='fp32', chunk=32, decay=0.9)",
}
STEPS = 9


def close(found: Array, expected: Array, what: str) -> None:
    """Equal but for the rounding of float32, of sums of which the largest values are a part; a power iteration takes
    the rounding of each step into the next."""
    rounding = 5e-5 if what.startswith("powersgd") else 8e-6
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding * max(1, np.abs(expected).max()), err_msg=what)


@pytest.mark.parametrize("name", FOLLOWED)
def test_each_step_is_that_of_the_reference(name: str) -> None:
    """Results and residuals, on layouts, routes and scales of the residual that the seed chooses."""
    is_followed(name, range(2))


@pytest.mark.long
@pytest.mark.parametrize("name", FOLLOWED)
def test_each_step_is_that_of_the_reference_in_many_jobs(name: str) -> None:
    is_followed(name, range(2, 60))


def is_followed(name: str, seeds: range) -> None:
    text = FOLLOWED[name]
    for seed in seeds:
        choose = np.random.default_rng((seed, list(FOLLOWED).index(name)))
        layout = LAYOUTS[choose.integers(len(LAYOUTS))]
        route = "gather" if name == "demo" or choose.random() < 0.5 else "owners"
        job = Reduced(layout, text, seed, route)
        assert encoded_share(job.buckets, text) >= LEAST_ENCODED
        beside = [Beside(job.codec(0, b.index), len(layout), route == "gather") for b in job.buckets]
        for step in range(STEPS):
            rescale = float(choose.choice([1.0, 1.0, 0.5, 2.0]))
            given = job.gradients(step, seed)
            bounds = [job.codec(0, b.index).bounds for b in job.buckets]
            results = job.step(given, rescale)
            for index, follower in enumerate(beside):
                first = bounds[index] or job.first_bounds(index)
                expected = follower.step(node_sums(job.job, given, index), first, rescale)
                where = f"{name}, {layout}, {route}, seed {seed}, step {step}, bucket {index}"
                close(results[index] * job.job.size, expected, where)
                for found, kept in zip(job.residuals(index), follower.residuals, strict=True):
                    close(found, kept, where)


KEPT = [
    *("topk(density=0.02, minimum=64)", "topk(density=0.02, minimum=64, value='int8', chunk=256, decay=0.9)"),
    *(
        "thresholdk(density=0.02, minimum=64)",
        "gaussiank(density=0.02, minimum=64)",
        "randomk(density=0.02, minimum=64)",
    ),
    *("demo(density=0.05, minimum=64, chunk=16)", "int8(minimum=64)", "int4(minimum=64, rounding='random')"),
    *("int2(minimum=64, decay=0.9)", "onebit(minimum=64)", "powersgd(rank=2, minimum=64, decay=0.9)"),
]
HALVED, DOUBLED = [0.5] * 6, [2.0] * 10


@pytest.mark.parametrize("text", KEPT)
def test_what_is_sent_and_what_is_remembered_are_what_came_at_each_step(text: str) -> None:
    """In every bucket: result + residuals afterwards = gradients + residuals before * decay * rescale, summed over all
    nodes; with a scale that halves six times, or doubles ten times, as residuals have to be in its units."""
    nothing_is_lost(text, range(4))


@pytest.mark.long
@pytest.mark.parametrize("text", KEPT)
def test_nothing_is_lost_in_many_jobs(text: str) -> None:
    nothing_is_lost(text, range(4, 80))


def nothing_is_lost(text: str, seeds: range) -> None:
    decay = getattr(codecs.parse(text), "decay", 1.0)
    for seed in seeds:
        choose = np.random.default_rng((seed, KEPT.index(text)))
        layout, route = LAYOUTS[choose.integers(len(LAYOUTS))], str(choose.choice(["gather", "owners"]))
        job = Reduced(layout, text, seed, route, op="average" if seed % 2 else "sum")
        assert encoded_share(job.buckets, text) >= LEAST_ENCODED
        scale, divisor = 1.0, job.job.size if seed % 2 else 1
        for step, factor in enumerate([1.0, 1.0, *(HALVED if seed % 4 < 2 else DOUBLED), 1.0]):
            scale *= factor
            given = [[scale * part for part in of_rank] for of_rank in job.gradients(step, seed)]
            before = [total(job.residuals(bucket.index)) for bucket in job.buckets]
            results = job.step([[part.astype(np.float32) for part in of_rank] for of_rank in given], factor)
            for index, result in enumerate(results):
                came = total([of_rank[index] for of_rank in given]) + before[index] * decay * factor
                found = result.astype(float) * divisor + total(job.residuals(index))
                error = np.abs(found - came).max() / np.abs(came).max()
                assert error < 1e-6, f"{text}, {layout}, {route}, seed {seed}, step {step}: {error} of the largest"


def total(parts: Sequence[Array]) -> Array:
    found: Array = np.sum(parts, axis=0, dtype=float)
    return found


@pytest.mark.parametrize(("text", "rounding"), [("dense", 2.0**-24), ("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_without_memory_a_mean_is_right_to_a_rounding_for_each_hop(text: str, rounding: float) -> None:
    for seed, route in enumerate(["ring", "halving", "doubling"] * len(LAYOUTS)):
        layout = LAYOUTS[seed // 3]
        job = Reduced(layout, text, seed, route)
        assert encoded_share(job.buckets, text) >= (LEAST_ENCODED if text != "dense" else 0)
        for step in range(3):
            given = job.gradients(step, seed)
            for index, result in enumerate(job.step(given)):
                parts = [of_rank[index] for of_rank in given]
                bound = 2 * len(layout) * rounding * total([np.abs(part) for part in parts]) + 1e-7
                error = np.abs(result.astype(float) * job.job.size - total(parts))
                assert (error <= bound).all(), f"{layout}, {route}, seed {seed}, step {step}"


@pytest.mark.parametrize("text", [*KEPT, "fp16"])
def test_one_node_sends_nothing_and_so_nothing_is_encoded(text: str) -> None:
    job = Reduced([6], text, 1)
    for step in range(3):
        given = job.gradients(step, 7)
        for index, result in enumerate(job.step(given)):
            np.testing.assert_allclose(result * 6, total([of_rank[index] for of_rank in given]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", ["int8(minimum=64)", "int4(minimum=64, rounding='random')"])
def test_random_rounding_is_to_one_of_two_neighbours_and_right_on_average(text: str) -> None:
    """QSGD (Alistarh et al., arXiv 1610.02132), lemma 3.1. Nodes draw apart, and each step anew."""
    steps, job = 40, Reduced([1, 1, 1, 1], text.replace(")", ", feedback=False)"), 3)
    block, most = codecs.parse(text).block, 127 if "int8" in text else 7  # type: ignore[attr-defined]
    gradient = job.gradients(0, 5)[0]
    results = np.stack([job.step([gradient] * 4)[1] for _ in range(steps)])
    unit = np.abs(gradient[1]).reshape(-1, block).max(1).repeat(block) / most
    assert (np.abs(results - gradient[1]) <= 2.1 * unit).all()
    spread = results.std(0).max() / unit.max()
    assert 0.2 < spread < 0.8  # of four that draw apart, and then of the sum; of four that draw alike it would be more
    assert (np.abs(results.mean(0) - gradient[1]) <= 6 * 0.8 * unit / np.sqrt(steps)).all()


@pytest.mark.parametrize("text", KEPT)
def test_nothing_is_lost_when_ranks_join_and_come_back(text: str) -> None:
    """What the node of a rank that has joined remembers goes on being sent, also where all of its ranks have."""
    decay = getattr(codecs.parse(text), "decay", 1.0)
    for seed, layout in enumerate(([1, 1, 2], [3, 1, 2])):
        job = Reduced(layout, text, seed, "owners" if seed % 2 else "gather", op="sum")
        leaving = np.random.default_rng(seed).permutation(job.job.size).tolist()
        for step in range(12):
            if step in (2, 4, 7):
                job.join(leaving.pop())
            if step == 9:
                job.join(*leaving)
            given = job.gradients(step, seed)
            for rank in job.gone:
                given[rank] = [np.zeros_like(part) for part in given[rank]]
            before = [total(job.residuals(bucket.index)) for bucket in job.buckets]
            for index, result in enumerate(job.step(given)):
                came = total([of_rank[index] for of_rank in given]) + before[index] * decay
                error = np.abs(result + total(job.residuals(index)) - came).max() / np.abs(came).max()
                assert error < 1e-6, f"{text}, {layout}, step {step}, joined {sorted(job.gone)}: {error} is lost"
        assert not job.gone


@pytest.mark.parametrize("text", KEPT)
def test_what_is_remembered_moves_with_its_tensors_to_other_buckets(text: str) -> None:
    job = Reduced([1, 2, 1], text, 3, "owners", op="sum")
    for step in range(3):
        job.step(job.gradients(step, 1))
    before = [by_tensor(state) for state in job.states()]
    job.propose([tensor_of(tensor, together=2 - number % 2) for number, tensor in enumerate(reversed(NET))])
    for old, new in zip(before, map(by_tensor, job.states()), strict=True):
        assert old.keys() == new.keys()
        for key, value in old.items():
            np.testing.assert_allclose(new[key], value, rtol=0, atol=1e-5, err_msg=key)


def by_tensor(state: dict[str, Array]) -> dict[str, Array]:
    """What belongs to a tensor, whichever bucket that is in."""
    return {key.partition(":")[2]: value for key, value in state.items() if "/" in key}


def tensor_of(tensor: wire.TensorSpec, together: int) -> wire.TensorSpec:
    return wire.TensorSpec(tensor.name, tensor.dtype, tensor.shape, together=together)


@pytest.mark.parametrize("text", [text for text in KEPT if not text.startswith("demo")])
@for_each("route", ["gather", "owners"])
def test_a_job_that_loads_a_checkpoint_goes_on_bit_by_bit(text: str, route: str) -> None:
    """(DeMo to within rounding, as its page says.)"""
    whole, first, second = (Reduced([2, 1, 3], text, seed, route) for seed in range(3))
    for step in range(66 if text == KEPT[0] and route == "owners" else 4):  # owners' ranges are adapted
        whole.step(whole.gradients(step, 1))
        first.step(first.gradients(step, 1))
    second.load(first.states())
    second.clock = 1000
    for step in range(100, 104):
        given = whole.gradients(step, 1)
        for expected, found in zip(whole.step(given), second.step(given), strict=True):
            assert expected.tobytes() == found.tobytes(), f"{text}, {route}, step {step}"
