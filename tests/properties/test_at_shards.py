"""Gradients to shards on 4, 6 and 8 ranks: each update is the reference's, with each optimizer, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from fusion_rt import codecs, wire
from tests.for_each import for_each
from tests.fusiond.algorithms.training import SGD, Workers
from tests.fusiond.simulation import Array
from tests.properties.reduced import LEAST_ENCODED, encoded_share
from tests.properties.scheduled import LAYOUTS, RATE_OF_SCHEDULES, Parameters
from tests.reference import algorithms as published

RATE, DIM = 0.05, 60
WORLDS = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
OPTIMIZERS: dict[str, tuple[dict[str, object], Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = {
    "SGD": ({}, lambda p: torch.optim.SGD(p, RATE)),
    "SGD, momentum": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, RATE, 0.9, nesterov=True, weight_decay=0.01),
    ),
    "Adam": ({"betas": [0.8, 0.9]}, lambda p: torch.optim.Adam(p, RATE, (0.8, 0.9))),
    "AdamW": ({"weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.1)),
}
if hasattr(torch.optim, "Adafactor"):  # since torch 2.5
    OPTIMIZERS["Adafactor"] = {"weight_decay": 0.1}, lambda p: torch.optim.Adafactor(p, RATE, weight_decay=0.1)


def start(ranks: int, dtype: type = np.float64) -> Array:
    return np.random.default_rng((ranks, 1)).standard_normal(DIM).astype(dtype)


def gradient(rank: int, step: int, x: Array) -> Array:
    """One that does not depend on x."""
    return np.random.default_rng((rank, step)).standard_normal(len(x)).astype(x.dtype)


def samples(rank: int, step: int) -> int:
    return 1 + (rank + step) % 3


def rules(ranks: int, order: list[int], begun: Array, g: published.Gradient, rate: float) -> dict[str, published.Run]:
    """Each algorithm of shards, by its text, and its published rule in this order of arrivals."""
    rounds = [rank for step in range(len(order) // ranks) for rank in np.random.default_rng(step).permutation(ranks)]
    bsp = published.bsp(begun, g, ranks, rate, len(order) // ranks)
    bsp.taken = [int(rank) for rank in rounds]
    few = ranks // 2
    return {
        "bsp": bsp,
        "asp": published.asgd(begun, g, ranks, rate, order),
        "hogwild": published.asgd(begun, g, ranks, rate, order),
        "ssp(staleness=0)": published.ssp(begun, g, ranks, rate, order, 0),
        "ssp(staleness=3)": published.ssp(begun, g, ranks, rate, order, 3),
        f"softsync(contributions={few})": published.softsync(begun, g, ranks, rate, order, few),
        "partial(backup=1)": published.partial(begun, g, ranks, rate, order, 1),
        f"partial(backup={few})": published.partial(begun, g, ranks, rate, order, few),
        "collaborative(samples=11)": published.collaborative(begun, g, samples, ranks, rate, order, 11),
        "dc_asgd(variance=0.3)": published.dc_asgd(begun, g, ranks, rate, order, 0.3),
        "dc_asgd(variance=0.3, adaptive=True)": published.dc_asgd(begun, g, ranks, rate, order, 0.3, True),
    }


def homes_of(workers: Workers, order: list[int], g: published.Gradient) -> Iterator[Array]:
    """The shards' copy after each contribution of `order`, in which no rank waits."""
    steps = [0] * workers.job.size
    for rank in order:
        workers.post(rank, g(rank, steps[rank], workers.x[rank]), samples(rank, steps[rank]))
        steps[rank] += 1
        for other in workers.answered():
            workers.collect(other)
        yield workers.home()


def distinct(homes: Iterator[Array], begun: Array) -> list[Array]:
    """Those that differ from the one before."""
    found = [begun]
    for home in homes:
        if (home != found[-1]).any():
            found.append(home)
    return found[1:]


ALGORITHMS = list(rules(4, [], start(4), gradient, RATE))


@for_each("number", range(len(ALGORITHMS)))
def test_each_update_is_that_of_the_reference(number: int) -> None:
    for seed, (ranks, layout) in enumerate(WORLDS[number % 3 :: 3]):
        problem, begun = published.quadratic(ranks, DIM, seed), start(ranks)
        speeds = np.random.default_rng(seed).dirichlet(np.full(ranks, 2.0))
        order = np.random.default_rng(seed).choice(ranks, 12 * ranks, p=speeds).tolist()
        text, run = list(rules(ranks, order, begun, problem, RATE).items())[number]
        workers = Workers(layout, text, begun, RATE, seed=seed)
        found = distinct(homes_of(workers, run.taken, problem), begun)
        assert len(found) == len(run.homes) > 2, text
        for update, (home, expected) in enumerate(zip(found, run.homes, strict=True)):
            np.testing.assert_allclose(
                home, expected, rtol=1e-9, atol=1e-11, err_msg=f"{text}, {layout}, seed {seed}, update {update}"
            )


@for_each("optimizer", OPTIMIZERS)
@for_each("number", [n for n, text in enumerate(ALGORITHMS) if not text.startswith("dc_asgd")])
def test_shards_take_the_steps_of_torch_at_rates_that_fall_a_hundredfold(number: int, optimizer: str) -> None:
    """By the mean that the reference applies. (Compensation depends on where the optimizer has come to.)"""
    arguments, make = OPTIMIZERS[optimizer]
    ranks, layout = WORLDS[(5 * number + 3 * list(OPTIMIZERS).index(optimizer)) % len(WORLDS)]
    order = np.random.default_rng(number).integers(0, ranks, 10 * ranks).tolist()
    begun = start(ranks)
    text, run = list(rules(ranks, order, begun, gradient, 1.0).items())[number]
    spec = wire.OptimizerSpec("SGD" if "SGD" in optimizer else optimizer, (json.dumps(arguments),))
    workers = Workers(layout, text, begun, RATE, spec)
    tensors = [workers.span_of(name) for name in workers.sizes]
    parameters = [torch.nn.Parameter(torch.tensor(begun[of])) for of in tensors]
    torch_optimizer = make(parameters)
    updates = [before - after for before, after in zip([begun, *run.homes], run.homes, strict=False)]
    taken, last = 0, begun
    for home in homes_of(workers, run.taken, gradient):
        if (home != last).any():
            torch_optimizer.param_groups[0]["lr"] = workers.rate
            for parameter, of in zip(parameters, tensors, strict=True):
                parameter.grad = torch.tensor(updates[taken][of])
            torch_optimizer.step()
            taken, last = taken + 1, home
            where = f"{text} with {optimizer}, {layout}, update {taken}"
            expected = torch.cat([parameter.detach() for parameter in parameters]).numpy()
            np.testing.assert_allclose(home, expected, rtol=1e-9, atol=1e-11, err_msg=where)
            workers.rate = RATE * 0.01 ** (taken / len(run.homes))
    assert taken == len(run.homes) > 2


# --- nothing is lost --------------------------------------------------------------------------------------------------

SENT = {
    "asp": lambda ranks: 1.0,
    "ssp(staleness=2)": lambda ranks: 1.0,
    "bsp": lambda ranks: 1 / ranks,
    "partial(backup=1)": lambda ranks: 1 / ranks,
}
STEPS, WITH_GRADIENTS = 44, 5
CODECS = [
    *("dense", "fp16", "bf16", "topk(density=0.1, minimum=8)", "thresholdk(density=0.1, minimum=8)"),
    *(
        "gaussiank(density=0.1, minimum=8)",
        "randomk(density=0.1, minimum=8)",
        "demo(density=0.1, minimum=8, chunk=8, decay=1.0)",
    ),
    *("int8(minimum=8)", "int4(minimum=8)", "int2(minimum=8)", "onebit(minimum=8)"),
]
"""All that go to shards: PowerSGD is for sums of all nodes."""


@pytest.mark.parametrize("text", CODECS)
def test_what_is_sent_to_shards_and_what_is_remembered_are_what_came(text: str) -> None:
    """At each contribution: start - home = rate * (gradients - residuals of those that send them) and what is carried.

    After many steps without gradients all has arrived, both ways: also in each rank's copy.
    """
    for seed, algorithm in list(enumerate(SENT))[CODECS.index(text) % 2 :: 2]:
        ranks, layout = WORLDS[(5 * CODECS.index(text) + 7 * seed) % len(WORLDS)]
        begun = start(ranks, np.float32)
        workers = Workers(layout, algorithm, begun, RATE, SGD, text, seed)
        if text != "dense":
            assert encoded_share(workers.plan.buckets, text) >= LEAST_ENCODED
        share, given, choose = SENT[algorithm](ranks), np.zeros(DIM), np.random.default_rng(seed)
        where = f"{text}, {algorithm}, {layout}, seed {seed}"
        scale = 0.0
        for step in range(STEPS):
            for rank in choose.permutation(ranks).tolist():
                if workers.waits(rank):
                    continue
                values = gradient(rank, step, begun) if step < WITH_GRADIENTS else np.zeros_like(begun)
                given += values
                scale = max(scale, float(np.abs(given).max()))
                workers.post(rank, values)
                if step <= WITH_GRADIENTS:
                    moved = (begun.astype(float) - workers.home()) / (RATE * share)
                    error = np.abs(moved - (given - pending(workers))).max() / scale
                    assert error < lossy(text), f"{where}, step {step}: {error} of the largest is lost"
                for other in workers.answered():
                    workers.collect(other)
        error = np.abs((begun.astype(float) - workers.home()) / (RATE * share) - given).max() / scale
        assert error < 50 * lossy(text), f"{where}: {error} of the largest has not arrived at the shards"
        for rank in range(ranks):
            error = np.abs(workers.x[rank].astype(float) - workers.home()).max() / (RATE * share * scale)
            assert error < 50 * lossy(text), f"{where}: rank {rank} has not got {error} of the largest"


def lossy(text: str) -> float:
    """The rounding that nothing remembers, of what a step may have in all."""
    return {"fp16": 2e-3, "bf16": 2e-2}.get(text, 2e-4)


def pending(workers: Workers) -> Array:
    """What has come and is not in the shards: residuals of senders, what waits at a home, and what is carried there."""
    waiting = np.zeros(DIM)
    for node in workers.job.nodes:
        for client in node.engine.homes._clients:
            if client.codec is not None:
                state = client.codec.state_dict()
                for tensor in client.bucket.tensors:
                    part = workers.span_of(tensor.name)
                    waiting[part] += state.get(f"residual/{tensor.name}", 0)
        for hosted in node.engine.homes._server:
            parts = [part.values for slot in list(hosted.home.slots.items())[:1] for part in slot[1].values()]
            parts += [hosted.home.aux["carried"]] if "carried" in hosted.home.aux else []
            for values in parts:
                for tensor in hosted.bucket.tensors:
                    waiting[workers.span_of(tensor.name)] += values[tensor.start : tensor.start + tensor.numel]
    return waiting


APPLIED = {
    "asp": 1.0,
    "hogwild": 1.0,
    "dc_asgd(variance=0.0)": 1.0,
    "ssp(staleness=0)": 1.0,
    "ssp(staleness=2)": 1.0,
    "softsync(contributions=3, aware=False)": 1 / 3,
    "collaborative(samples=3)": 1 / 3,
    "partial(backup=1)": 0.0,
    "partial(backup=2, deadline=2.0)": 0.0,
}
"""The weight of a contribution in an update; 0: one over the number of ranks."""


@pytest.mark.parametrize("text", APPLIED)
def test_each_contribution_counts_once_whatever_ranks_wait_for(text: str) -> None:
    """By random schedules, in which ranks wait, and join, and have no gradient in some steps: what shards
    have moved by, and what is carried there, is the sum of all gradients at their rate."""
    each_counts_once(text, range(9))


@pytest.mark.long
@pytest.mark.parametrize("text", APPLIED)
def test_each_contribution_counts_once_in_many_schedules(text: str) -> None:
    each_counts_once(text, range(9, 600))


def each_counts_once(text: str, seeds: range) -> None:
    for seed in seeds:
        ranks = (4, 6, 8)[seed % 3]
        begun = np.tile(start(ranks), (ranks, 1))
        schedule = Parameters(text, seed, ranks, begun, last=2, posts=gradient)
        schedule.run()
        share = APPLIED[text] or 1 / ranks
        came = sum(gradient(rank, n, begun[0]) for rank in range(ranks) for n in range(schedule.counts[rank]))
        found = []
        for bucket in range(2):
            home = schedule.homes(bucket)[0]
            left = home.aux.get("carried", np.zeros(1)) + home.aux.get("sum", np.zeros(1))
            moved = begun[0][bucket * DIM // 2 :][: DIM // 2] - home.value[: DIM // 2]  # type: ignore[index]
            found.append(moved / (RATE_OF_SCHEDULES * share) + left[: DIM // 2])
        where = f"{text}, {ranks} ranks, seed {seed}: {schedule.where}"
        np.testing.assert_allclose(np.concatenate(found), came, rtol=0, atol=1e-9, err_msg=where)


def test_all_codecs_are_tried_here_but_those_that_only_sum() -> None:
    tried = {codecs.parse(text).name for text in CODECS}
    assert tried == {name for name, codec in codecs.CODECS.items() if not codec.only_all_reduced}
