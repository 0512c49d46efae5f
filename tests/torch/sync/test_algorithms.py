"""Training algorithms on real daemons and workers: four ranks on two nodes.

What each rule says is compared with the published one in `tests/fusiond/algorithms`, in one process. Here is what only
a whole job shows: that the parts fit together, and the optimizer's side.
"""

from __future__ import annotations

import functools
import gc
import io
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core import mixing
from fusion_rt.torch.core import recording
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import NullRecorder
from tests import forks
from tests.faults.nemesis import wait_for_state
from tests.harness import Job, on_ranks
from tests.reference import algorithms as published
from tests.torch.training import assert_equal_on_all_ranks, assert_same, make_model, train, train_reference

RANKS, BATCH, STEPS = 4, 8, 60
MEETING = 5  # steps after which asynchronous ranks wait for each other
DIM = 12  # of the quadratic problem
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two nodes of two ranks, and small buckets, so that both nodes have shards."""
    with Job((2, 2), {"HOROVOD_FUSION_THRESHOLD": "4KiB", "HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


# --- every algorithm trains -------------------------------------------------------------------------------------------

# text: learning rate as a share of the synchronous one, and the codec.
ALGORITHMS: dict[str, tuple[float, str]] = {
    "allreduce": (1, "dense"),
    "bsp": (1, "dense"),
    "bsp ": (1, "int8"),
    "ssp(staleness=2)": (1 / RANKS, "dense"),
    "asp": (1 / RANKS, "dense"),
    "asp(aware=True)": (1, "dense"),
    "asp ": (1 / RANKS, "topk(density=0.1, minimum=100)"),
    "softsync(contributions=2)": (1, "dense"),
    "dc_asgd": (1 / RANKS, "dense"),
    "dc_asgd(adaptive=True, variance=0.5)": (1 / RANKS, "dense"),
    "hogwild": (1 / RANKS, "dense"),
    "collaborative(samples=32)": (1, "dense"),
    "easgd(steps=4)": (1, "dense"),
    "easgd(steps=4, synchronous_home=True)": (1, "dense"),
    "ea_wild(steps=4)": (1, "dense"),
    "dpsgd": (0.5, "dense"),  # W - rate * H has to be stable, and W of a ring of four has an eigenvalue of -1/3
    "adpsgd": (1, "dense"),
    "sgp": (1, "dense"),
    "sgp(topology='one-peer-exponential')": (1, "fp16"),
    "choco": (1, "topk(density=0.3, minimum=100)"),
    "local_sgd(steps=4)": (1, "dense"),
    "local_sgd(steps=4, after=20)": (1, "dense"),
    "diloco(steps=5, outer_rate=0.5, outer_momentum=0.5)": (1, "dense"),
    "diloco(steps=4, fragments=3, delay=2, mix=0.5, outer_rate=0.5, outer_momentum=0.5)": (1, "dense"),
    "diloco(steps=3, fragments=2, delay=1, outer_rate=0.5, outer_momentum=0.5)": (1, "topk(density=0.3, minimum=100)"),
    "decoupled(steps=3, outer_rate=0.5, outer_momentum=0.3)": (1, "dense"),
    "decoupled(steps=3, fragments=2, quorum=2, grace=0.2, mix=0.3, outer_rate=0.5, outer_momentum=0.3)": (1, "fp16"),
    "noloco(steps=3)": (1, "dense"),
    "partial": (1, "dense"),
    "partial(deadline=3.0)": (1, "dense"),
}
RATE = 0.05


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 60), torch.nn.Tanh(), torch.nn.Linear(60, 20), torch.nn.Linear(20, 1)
    )


def data_of(rank: int, step: int, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on a plane."""
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs @ torch.linspace(-1, 1, 20).unsqueeze(1)


def fit(model: torch.nn.Module, optimizer: Any, steps: range, ranks: tuple[int, ...]) -> None:
    for step in steps:
        inputs, targets = (torch.cat(both) for both in zip(*(data_of(rank, step) for rank in ranks), strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    """On points that nobody has trained with."""
    inputs, targets = data_of(99, 0, 512)
    return float(torch.nn.functional.mse_loss(model(inputs), targets))


@functools.cache
def losses_of_one_process() -> tuple[float, float]:
    """Before and after training on all ranks' points."""
    model = network()
    before = loss_of(model)
    fit(model, torch.optim.SGD(model.parameters(), lr=RATE), range(STEPS), tuple(range(RANKS)))
    return before, loss_of(model)


@pytest.mark.parametrize("text", ALGORITHMS)
@on_ranks
def test_it_trains_like_one_process_and_consensus_makes_all_ranks_equal(text: str) -> None:
    share, codec = ALGORITHMS[text]
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE * share),
        model.named_parameters(),
        compression=codec,
        algorithm=text,
    )
    if text.startswith("collaborative"):
        optimizer.samples = BATCH
    synchronous = hvd.algorithms.parse(text.strip()).synchronous
    for start in range(0, STEPS, MEETING):
        fit(model, optimizer, range(start, start + MEETING), (hvd.rank(),))
        if not synchronous:
            hvd.barrier()  # on a busy machine one rank may be done before another begins, and its work be all stale
    hvd.consensus(optimizer)
    before, expected = losses_of_one_process()
    assert_equal_on_all_ranks(model)
    # How fast asynchronous families get there depends on who is scheduled when.
    share = 0.005 if synchronous else 0.15
    reached = loss_of(model)
    assert reached < expected + share * before, (reached, expected, before)


# What a slow rank posts comes late; where parameters are mixed, rates are as above.
UNEVEN = {"partial(backup=1)": 0.5, "ssp(staleness=1)": 1 / RANKS, "dpsgd": 0.5, "sgp": 1.0, "choco": 0.5,
          "easgd(steps=1, synchronous_home=True)": 1.0}  # fmt: skip


@pytest.mark.parametrize("text", UNEVEN)
@on_ranks
def test_ranks_of_unequal_speed_meet_in_barriers_and_take_unequal_numbers_of_steps(text: str) -> None:
    model = network()
    before = loss_of(model)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE * UNEVEN[text])
    codec = "topk(density=0.3, minimum=100)" if text == "choco" else "dense"
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=codec, algorithm=text)
    for step in range(30):
        for _ in range(20 if hvd.rank() == 3 else 0):
            loss_of(model)
        fit(model, optimizer, range(step, step + 1), (hvd.rank(),))
        if step % 3 == 2:
            hvd.barrier()
    fit(model, optimizer, range(30, 60 if hvd.rank() == 1 else 33), (hvd.rank(),))
    hvd.consensus(optimizer)
    assert_equal_on_all_ranks(model)
    assert loss_of(model) < 0.5 * before


# --- against what is known to come out --------------------------------------------------------------------------------


def weights_and_biases(model: torch.nn.Module, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """In groups with learning rates of their own; only weights decay."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return make([{"params": weights, "weight_decay": 1e-2}, {"params": biases, "lr": 0.02}])


BSP: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "groups": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.0),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
}


@pytest.mark.parametrize("name", BSP)
@on_ranks
def test_bsp_is_training_in_one_process_with_groups_and_a_schedule(name: str) -> None:
    model, reference = make_model(), make_model()
    optimizers = [weights_and_biases(which, BSP[name]) for which in (model, reference)]
    optimizers[0] = hvd.DistributedOptimizer(optimizers[0], model.named_parameters(), algorithm=hvd.algorithms.BSP())
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8) for optimizer in optimizers]
    for step in range(8):
        train(model, optimizers[0], range(step, step + 1))
        train_reference(reference, optimizers[1], range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    assert_same(model, reference, rtol=1e-9, atol=1e-11)


SHAPED = {
    "Adafactor": {"lr": 0.05, "weight_decay": 0.01},
    "Muon": {"lr": 0.05},
    "AdamW": {"lr": 0.05},
}


@pytest.mark.parametrize("name", [name for name in SHAPED if hasattr(torch.optim, name)])
@on_ranks
def test_shards_take_steps_of_parameters_as_the_script_sees_them(name: str) -> None:
    """Of a convolution in channels_last, of which Adafactor has a row and a column of each of the last dimensions, and
    of a transposed matrix. Another optimizer begins with the state of the first's steps."""
    made = torch.Generator().manual_seed(1)
    conv = torch.randn(8, 4, 3, 5, generator=made).to(memory_format=torch.channels_last)
    matrices = [torch.randn(12, 7, generator=made).t(), torch.randn(5, 9, generator=made)]
    start = matrices if name == "Muon" else [conv, *matrices]

    def gradients(rank: int, step: int) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(100 * rank + step)
        return [torch.randn(value.shape, generator=drawn) for value in start]

    mine, alone = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    assert [parameter.is_contiguous() for parameter in mine] == [value.is_contiguous() for value in start]
    plain, reference = (getattr(torch.optim, name)(parameters, **SHAPED[name]) for parameters in (mine, alone))
    for parameters, optimizer in ((mine, plain), (alone, reference)):  # one step before it is wrapped
        for parameter, value in zip(parameters, gradients(0, 99), strict=True):
            parameter.grad = value
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(plain, [(str(i), p) for i, p in enumerate(mine)], algorithm="bsp")
    for step in range(6):
        for parameter, value in zip(mine, gradients(hvd.rank(), step), strict=True):
            parameter.grad = value
        optimizer.step()
        of_all = zip(*(gradients(rank, step) for rank in range(RANKS)), strict=True)
        for parameter, values in zip(alone, of_all, strict=True):
            parameter.grad = torch.stack(values).mean(0)
        reference.step()
        for found, expected in zip(mine, alone, strict=True):
            torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=1e-5)
            assert found.stride() == expected.stride()


@on_ranks
def test_to_a_shard_a_parameter_without_a_gradient_has_one_of_zeros() -> None:
    """One is used by no rank, and one by rank 1 only; as with an all-reduce."""
    reference = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    alone = torch.optim.AdamW(reference, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        reference[0].grad, reference[1].grad = torch.zeros(3), torch.full([3], 1 / RANKS)
        alone.step()
    for text in ("bsp", "allreduce"):
        mine = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        plain = torch.optim.AdamW(mine, lr=0.1, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(plain, [(str(i), p) for i, p in enumerate(mine)], algorithm=text)
        for _ in range(3):
            optimizer.zero_grad()
            if hvd.rank() == 1:
                mine[1].sum().backward()
            optimizer.step()
        for found, expected in zip(mine, reference, strict=True):
            torch.testing.assert_close(found.detach(), expected.detach())


@on_ranks
def test_local_sgd_with_one_step_is_allreduce() -> None:
    found = []
    for text in ("local_sgd(steps=1)", "allreduce"):
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=text), range(8))
        found.append(model)
    assert_same(*found)


def follow(
    text: str,
    start: published.Array,
    problem: published.Quadratic,
    rate: float,
    steps: int,
    codec: str = "dense",
    parts: int = 1,
    then: Callable[[int, Any], None] = lambda step, optimizer: None,
) -> np.ndarray:
    """This rank's parameters after each step. `parts`: so many make up the vector; `then`: done after each step."""
    parameters = [torch.nn.Parameter(part) for part in torch.from_numpy(start.copy()).chunk(parts)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=rate), algorithm=text, compression=codec)
    after = []
    for step in range(steps):
        x = torch.cat([parameter.detach() for parameter in parameters]).numpy()
        gradients = torch.from_numpy(problem(hvd.rank(), step, x)).chunk(parts)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        then(step, optimizer)
        after.append(torch.cat([parameter.detach() for parameter in parameters]).numpy().copy())
    return np.stack(after)


@on_ranks
def test_local_steps_and_gossip_by_clocks_are_the_published_rules() -> None:
    rank, rate, steps = hvd.rank(), 0.05, 24
    problem = published.quadratic(RANKS, DIM, seed=3)
    start = np.random.default_rng(11).standard_normal(DIM)
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)

    expected = published.local_sgd(start, problem, RANKS, rate, 4, steps)
    same(follow("local_sgd(steps=4)", start, problem, rate, steps), [xs[rank] for xs in expected.workers])

    expected = published.diloco(start, problem, RANKS, rate, 4, 0.7, 0.9, steps // 4)
    same(follow("diloco(steps=4)", start, problem, rate, steps)[3::4], expected.homes)

    ring = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]) / 3
    starts = published.copies(start, RANKS)
    expected = published.dpsgd(starts, problem, lambda clock: ring, rate, steps)
    same(follow("dpsgd", start, problem, rate, steps), [xs[rank] for xs in expected.workers])

    expected = published.bsp(start, problem, RANKS, rate, steps)
    same(follow("bsp", start, problem, rate, steps), expected.homes)


@on_ranks
def test_outer_steps_with_a_codec_are_those_of_sparseloco() -> None:
    """By a bucket of 12 elements: the first node owns the only block, and what is selected goes to all nodes."""
    rate, steps, nodes = 0.05, 40, [(0, 1), (2, 3)]
    problem = published.quadratic(RANKS, DIM, seed=3)
    start = np.random.default_rng(11).standard_normal(DIM)
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)

    def expected(outer: tuple[float, float], decay: float, send: Any, owner: int | None = None) -> Any:
        found = published.sparseloco(start, problem, nodes, rate, 4, outer, decay, send, steps // 4, owner)
        return found.homes

    def in_two_bits(values: published.Array) -> published.Array:
        return published.two_bits(published.largest(3, values))

    text = "sparseloco(steps=4, density=0.25, decay=0.9)"
    same(follow(text, start, problem, rate, steps)[3::4], expected((1.0, 0.0), 0.9, in_two_bits))

    text, codec = "diloco(steps=4)", "topk(density=0.25, minimum=0, value='fp32')"
    found = follow(text, start, problem, rate, steps, codec)[3::4]
    same(found, expected((0.7, 0.9), 1.0, functools.partial(published.largest, 3)))

    def in_four_bits(values: published.Array) -> published.Array:
        step = np.abs(values).max() / 7
        return step * np.rint(values / step)

    found = follow(text, start, problem, rate, steps, "int4(minimum=0, decay=0.95)")[3::4]
    same(found, expected((0.7, 0.9), 0.95, in_four_bits, owner=1))


STREAMING = "diloco(steps=6, fragments=3, delay=4, mix=0.25, outer_rate=0.6)"


def streamed(start: published.Array, problem: published.Quadratic, rate: float, steps: int) -> published.Run:
    """The published rule of `STREAMING`: its fragments are due after 2, 4 and 6 of 6 steps."""
    fragments = [range(place, place + DIM // 3) for place in range(0, DIM, DIM // 3)]
    return published.streaming_diloco(start, problem, RANKS, rate, 6, 0.6, 0.9, fragments, [2, 4, 0], 4, 0.25, steps)


@on_ranks
def test_outer_steps_of_fragments_and_of_pairs_are_the_published_rules() -> None:
    rank, rate, steps = hvd.rank(), 0.05, 26
    problem = published.quadratic(RANKS, DIM, seed=3)
    start = np.random.default_rng(11).standard_normal(DIM)
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)

    expected = streamed(start, problem, rate, steps)
    same(follow(STREAMING, start, problem, rate, steps, parts=3), [xs[rank] for xs in expected.workers])

    pairs = mixing.parse("random-pairs", RANKS)
    expected = published.noloco(
        start, problem, RANKS, rate, 4, 0.6, 0.4, 0.9, lambda i, turn: pairs.incoming(i, turn)[0][0], steps // 4
    )
    text = "noloco(steps=4, outer_rate=0.6, outer_momentum=0.4, consensus=0.9)"
    same(follow(text, start, problem, rate, steps, parts=2)[3::4], [xs[rank] for xs in expected.workers])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@on_ranks
def test_outer_steps_around_muon_are_those_that_one_process_computes() -> None:
    """MuLoCo (arXiv 2505.23725): Muon's state is a rank's own, and only matrices are exchanged here."""

    def muon(matrix: torch.Tensor) -> torch.optim.Optimizer:
        return torch.optim.Muon([matrix], lr=0.05)

    def gradient(rank: int, step: int, matrix: torch.Tensor) -> torch.Tensor:
        target = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        return matrix.detach() - target

    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    mine = torch.nn.Parameter(start.clone())
    optimizer = hvd.DistributedOptimizer(muon(mine), [("w", mine)], algorithm="diloco(steps=3, outer_momentum=0.6)")
    home, velocity = start.clone(), torch.zeros_like(start)
    alone = [torch.nn.Parameter(start.clone()) for _ in range(RANKS)]
    inner = [muon(matrix) for matrix in alone]
    for step in range(12):
        mine.grad = gradient(hvd.rank(), step, mine)
        optimizer.step()
        for rank, matrix in enumerate(alone):
            matrix.grad = gradient(rank, step, matrix)
            inner[rank].step()
        if step % 3 == 2:
            change = torch.stack([home - matrix.detach() for matrix in alone]).mean(0)
            velocity = 0.6 * velocity + change
            home = home - 0.7 * (change + 0.6 * velocity)
            for matrix in alone:
                matrix.detach().copy_(home)
        torch.testing.assert_close(mine.detach(), alone[hvd.rank()].detach(), atol=1e-4, rtol=1e-4)


def take_answers(step: int, optimizer: Any) -> None:
    """Takes the answers to what is under way when they have come; homes do not hear that somebody waits for them."""
    buckets = [bucket for posted in optimizer._schedule._unanswered for bucket in posted.buckets]
    while not all(bucket.has_answer() for bucket in buckets):
        os.sched_yield()
    optimizer.drain()


@on_ranks
def test_decoupled_learners_that_wait_for_all_others_are_those_of_diloco() -> None:
    """With a quorum of all, and an answer that is taken at once."""
    rate, steps = 0.05, 24
    problem = published.quadratic(RANKS, DIM, seed=3)
    start = np.random.default_rng(11).standard_normal(DIM)
    expected = published.diloco(start, problem, RANKS, rate, 4, 0.6, 0.8, steps // 4)
    text = "decoupled(steps=4, quorum=4, outer_rate=0.6, outer_momentum=0.8)"
    found = follow(text, start, problem, rate, steps, parts=3, then=take_answers)
    np.testing.assert_allclose(found[3::4], expected.homes, rtol=0, atol=1e-12)


@on_ranks
def test_a_decoupled_learner_never_waits_for_the_others(tmp_path: Path) -> None:
    """Rank 0 takes all its steps while nobody else takes one, nor waits in an operation, and the quorum is three."""
    parameter = torch.nn.Parameter(torch.zeros(DIM))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), algorithm="decoupled(steps=2)")

    def step() -> None:
        parameter.grad = torch.ones(DIM)
        optimizer.step()

    step()  # in which the plan is made
    hvd.barrier()
    if hvd.rank() == 0:
        for _ in range(20):
            step()
        assert float(parameter[0]) == -21
        (tmp_path / "done").touch()
    while not (tmp_path / "done").exists():
        os.sched_yield()
    step()
    hvd.consensus(optimizer)
    assert len(set(hvd.allgather_object(parameter.detach().numpy().tobytes()))) == 1


@pytest.mark.parametrize("mix", [0.0, 0.5])
@on_ranks
def test_all_that_a_decoupled_learner_does_while_it_waits_counts_in_its_next_post(mix: float, tmp_path: Path) -> None:
    """Rank 0 posts after 2 steps, and is not answered in the 40 after that, in which it posts nothing."""
    parameter = torch.nn.Parameter(torch.zeros(DIM))
    text = f"decoupled(steps=2, quorum=4, outer_rate=1.0, outer_momentum=0.0, mix={mix})"
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), algorithm=text)

    def take(steps: int) -> float:
        for _ in range(steps):
            parameter.grad = torch.ones(DIM)
            optimizer.step()
        return float(parameter[0])

    def meet(where: str) -> None:
        """Waits as homes do not notice."""
        (tmp_path / f"{where}-{hvd.rank()}").touch()
        while len(list(tmp_path.glob(f"{where}-*"))) < RANKS:
            os.sched_yield()

    take(1)  # in which the plan is made
    hvd.barrier()
    if hvd.rank() == 0:
        assert take(41) == -42
    meet("posted")
    if hvd.rank():
        take(1)
    take_answers(0, optimizer)
    assert float(parameter[0]) == (-42 if hvd.rank() == 0 else -2)
    meet("answered")
    take(2)
    take_answers(0, optimizer)
    # 42 steps of rank 0 since its last post with the weight 42, and 2 of each of the others with the weight 2.
    home = -2 - (42 * 42 + 3 * 2 * 2) / (42 + 3 * 2)
    assert float(parameter[0]) == pytest.approx(mix * (-44 if hvd.rank() == 0 else -4) + (1 - mix) * home)


# --- checkpoints ------------------------------------------------------------------------------------------------------

CODECS = {
    "choco": "topk(density=0.3, minimum=100)",
    "choco ": "int8(minimum=100)",
    "bsp ": "randomk(density=0.3, minimum=100)",
    "bsp  ": "int8(minimum=100)",
}
DETERMINISTIC = (
    "bsp",
    *CODECS,
    "local_sgd(steps=3)",
    "diloco(steps=3)",
    "diloco(steps=4, fragments=3, delay=3, mix=0.5)",
    "noloco(steps=3)",
    "dpsgd",
    "sgp",
    "easgd(steps=3, synchronous_home=True)",
)


def make(text: str) -> tuple[torch.nn.Module, Any]:
    """With momentum, which is at the shards under bsp."""
    model = network()
    codec = CODECS.get(text, "dense")
    sgd = torch.optim.SGD(model.parameters(), lr=RATE / 4, momentum=0.0 if text == "asp" else 0.5)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=codec, algorithm=text)


def checkpoint_of(model: torch.nn.Module, optimizer: Any) -> bytes:
    """This rank's file; written while nobody is in the next step."""
    file = io.BytesIO()
    hvd.barrier()
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, file)
    hvd.barrier()
    return file.getvalue()


def contents(checkpoint: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(checkpoint), weights_only=True)
    return found


def restore(checkpoint: bytes, model: torch.nn.Module, optimizer: Any) -> None:
    found = contents(checkpoint)
    hvd.barrier()
    optimizer.load_state_dict(found["optimizer"])
    model.load_state_dict(found["model"])
    hvd.barrier()


def bytes_of(model: torch.nn.Module) -> bytes:
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values())


@pytest.mark.parametrize("text", DETERMINISTIC)
@on_ranks
def test_a_restored_training_goes_on_bit_by_bit(text: str) -> None:
    model, optimizer = make(text)
    fit(model, optimizer, range(7), (hvd.rank(),))
    checkpoint = checkpoint_of(model, optimizer)
    fit(model, optimizer, range(7, 17), (hvd.rank(),))
    optimizer.drain()
    expected = bytes_of(model)
    for steps in (0, 2):  # into one that is new, and into one that has a plan
        model, optimizer = make(text)
        fit(model, optimizer, range(50, 50 + steps), (hvd.rank(),))
        restore(checkpoint, model, optimizer)
        fit(model, optimizer, range(7, 17), (hvd.rank(),))
        optimizer.drain()
        assert bytes_of(model) == expected


@pytest.mark.parametrize("text", ["easgd(steps=2)", "asp", "adpsgd", "decoupled(steps=2)"])
@on_ranks
def test_asynchronous_training_is_restored_as_it_was(text: str) -> None:
    model, optimizer = make(text)
    fit(model, optimizer, range(7), (hvd.rank(),))
    optimizer.drain()
    hvd.barrier()  # else homes may take a step between the ranks' checkpoints, for those who have posted
    checkpoint = checkpoint_of(model, optimizer)
    other, restored = make(text)
    fit(other, restored, range(50, 52), (hvd.rank(),))
    restored.drain()  # else what is posted may reach a home after it was loaded, and counts there
    restore(checkpoint, other, restored)
    again = checkpoint_of(other, restored)
    saved, found = (contents(file)["optimizer"]["fusion_rt"]["state"] for file in (checkpoint, again))
    fit(other, restored, range(7, 12), (hvd.rank(),))
    hvd.consensus(restored)
    assert_equal_on_all_ranks(other)
    assert saved
    if text != "adpsgd":  # where homes still talk to each other when no worker waits any more
        assert found.keys() == saved.keys()
        assert [key for key, value in found.items() if not torch.equal(value, saved[key])] == []


ANSWERED_LATER = (
    "dpsgd",
    "adpsgd",
    "easgd(steps=2)",
    "ea_wild(steps=2)",
    "diloco(steps=2, fragments=2, delay=1, mix=0.25)",
)


def goes_on_in_another_job(text: str) -> bool:
    """Leaves the job while answers are under way. Returns whether all ranks agree in the end."""
    model, optimizer = make(text)
    fit(model, optimizer, range(5), (hvd.rank(),))
    hvd.shutdown()
    saved = optimizer.state_dict()
    fit_alone = bytes_of(model)
    hvd.init()
    optimizer.load_state_dict(saved)
    assert bytes_of(model) == fit_alone
    fit(model, optimizer, range(5, 10), (hvd.rank(),))
    hvd.consensus(optimizer)
    assert_equal_on_all_ranks(model)
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_training_goes_on_after_leaving_a_job_that_owes_answers() -> None:
    with Job((2,), {"HOROVOD_START_TIMEOUT": "120"}) as job:
        for text in ANSWERED_LATER:
            assert job.run(goes_on_in_another_job, text) == [True, True], text


@pytest.mark.parametrize("text", ["diloco(steps=2)", "decoupled(steps=2)", "noloco(steps=2)", "easgd(steps=2)", "asp"])
@on_ranks
def test_parameters_may_be_broadcast_after_the_optimizer_was_made(text: str) -> None:
    parameter = torch.nn.Parameter(torch.full((DIM,), float(hvd.rank())))
    sgd = torch.optim.SGD([parameter], lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, [("x", parameter)], algorithm=text)
    hvd.broadcast_parameters([("x", parameter)], root_rank=2)
    for _ in range(5):
        parameter.grad = torch.ones(DIM)
        optimizer.step()
    optimizer.drain()
    torch.testing.assert_close(parameter.detach(), torch.full((DIM,), 2.0))


# --- one model of many ------------------------------------------------------------------------------------------------


def normalised(text: str) -> tuple[torch.nn.Sequential, Any]:
    """A network with BatchNorm, whose buffers differ between ranks after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=text)
    fit(model, optimizer, range(5), (hvd.rank(),))
    return model, optimizer


def everybodys(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allgather(tensor.detach().reshape(1, -1))


@pytest.mark.parametrize("text", ["easgd(steps=2)", "adpsgd", "sgp", "local_sgd", "asp"])
@on_ranks
def test_averaged_is_for_a_while_and_consensus_for_good(text: str) -> None:
    model, optimizer = normalised(text)
    optimizer.drain()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    means = everybodys(model[1].running_mean)
    assert not torch.equal(means[0], means[1])
    with hvd.averaged(optimizer, model=model):
        assert_equal_on_all_ranks(model)
        torch.testing.assert_close(model[1].running_mean, means.mean(0))
        assert hvd.consensus_distance(optimizer) == 0
        inside = bytes_of(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name]), name
    gc.collect()  # of earlier tests' optimizers, for the next line is about all that there are
    hvd.consensus(model=model)
    assert bytes_of(model) == inside
    assert len(set(hvd.allgather_object(bytes_of(model)))) == 1


JOINED = {
    "allreduce": {},
    "allreduce ": {"overlap": "forward"},
    "allreduce  ": {"compression": "int8(minimum=100)"},
    "local_sgd(steps=3)": {},
    "diloco(steps=3)": {},
    "diloco(steps=4, fragments=2, delay=1)": {},
}
TAKEN = (5, 8, 10, 10)  # steps of each rank; the last two miss no exchange


@pytest.mark.parametrize("text", JOINED)
@on_ranks
def test_after_a_join_consensus_is_of_those_who_have_missed_nothing(text: str) -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=text.strip(), **JOINED[text])
    fit(model, optimizer, range(TAKEN[hvd.rank()]), (hvd.rank(),))
    hvd.join()
    optimizer.drain()
    getattr(optimizer, "synchronize_parameters", lambda: None)()
    everyones = everybodys(torch.nn.utils.parameters_to_vector(model.parameters()))
    mean = everyones.double().mean(0)
    apart = float(((everyones.double() - mean) ** 2).sum(1).mean())
    assert apart > 1e-6
    assert hvd.consensus_distance(optimizer) == pytest.approx(apart, rel=1e-3)
    expected = everyones[2:].mean(0)
    with hvd.averaged(optimizer):
        assert torch.equal(everybodys(torch.nn.utils.parameters_to_vector(model.parameters())), expected.expand(4, -1))
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), everyones[hvd.rank()])
    gc.collect()  # of earlier tests' optimizers, for the next line is about all that there are
    hvd.consensus(model=model)
    assert torch.equal(everybodys(torch.nn.utils.parameters_to_vector(model.parameters())), expected.expand(4, -1))
    assert hvd.consensus_distance() == 0
    fit(model, optimizer, range(10, 22), (hvd.rank(),))  # from there on ranks are alike again
    hvd.consensus(optimizer)
    assert_equal_on_all_ranks(model)


# --- staleness --------------------------------------------------------------------------------------------------------


def trained(text: str) -> Callable[[int], None]:
    """Takes a step on this rank."""
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), model.named_parameters(), algorithm=text
    )
    return lambda step: fit(model, optimizer, range(step, step + 1), (hvd.rank(),))


def meter(name: str) -> list[dict[str, Any]]:
    """As both nodes have it, when nobody is at work."""
    hvd.barrier()
    found = hvd.allgather_object(hvd.staleness()[name] if hvd.local_rank() == 0 else None)
    hvd.barrier()
    return [of_node for of_node in found if of_node is not None]


def total(meters: list[dict[str, Any]]) -> np.ndarray:
    """Sum, and number, of all that was counted."""
    return sum(np.array([of_node["mean"] * of_node["count"], of_node["count"]]) for of_node in meters)


@on_ranks
def test_asynchronous_gradients_of_equal_workers_are_stale_by_the_number_of_the_others() -> None:
    """All stop at the same moment: who goes on alone has nobody who makes it stale."""
    step = trained("asp")
    step(0)
    before = total(meter("version_lag"))
    end = hvd.broadcast_object(time.monotonic() + 2, 0)
    number = 0
    while time.monotonic() < end:
        time.sleep(0.002)  # the computation
        number += 1
        step(number)
    lag, count = total(meter("version_lag")) - before
    assert lag / count == pytest.approx(RANKS - 1, abs=0.4)  # one that pauses at the end misses what others do then


def gaps(text: str) -> dict[int, int]:
    """How often a rank was so many clocks ahead of the slowest, in a training where one rank is slow."""
    before, step = meter("clock_gap"), trained(text)
    for number in range(25):
        began = time.monotonic()
        step(number)
        if hvd.rank() == 3:  # many times as slow as the others, whatever else the machine does
            time.sleep(0.01 + 3 * (time.monotonic() - began))
    counts: dict[int, int] = {}
    for sign, meters in ((1, meter("clock_gap")), (-1, before)):
        for of_node in meters:
            for gap, count in of_node["histogram"].items():
                counts[int(gap)] = counts.get(int(gap), 0) + sign * count
    return {gap: count for gap, count in counts.items() if count}


@on_ranks
def test_bounded_staleness_keeps_its_bound_with_a_slow_rank() -> None:
    """A contribution is noted when it has come and its clock counts; one that is more than the bound ahead is where its
    sender waits."""
    bounded, unbounded = gaps("ssp(staleness=2)"), gaps("asp")
    assert max(bounded) == 3
    assert max(unbounded) > 3


def _steps_with_a_pause(stopped: int, steps: int) -> int:
    """One rank stops its own process after 20 steps."""
    model, optimizer = make("adpsgd")
    for step in range(steps):
        if step == 20:
            hvd.barrier()  # nobody is done before it has stopped
            if hvd.rank() == stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
        fit(model, optimizer, range(step, step + 1), (hvd.rank(),))
    return step + 1


@pytest.mark.parametrize("stopped", [2, 3])  # a passive and an active one
def test_nobody_waits_for_a_stopped_worker_in_pairwise_gossip(job: Job, stopped: int) -> None:
    others = [rank for rank in range(RANKS) if rank != stopped]
    job.start(_steps_with_a_pause, stopped, 150)
    worker = job.workers[stopped]
    try:
        taken = job.results(ranks=others)
        wait_for_state(worker.pid, "T")
        assert taken == [150] * 3, "they took all their steps while it was stopped"
    finally:
        worker.send_signal(signal.SIGCONT)
        assert job.results(ranks=[stopped]) == [150]


# --- what makes no sense ----------------------------------------------------------------------------------------------


class Plain(torch.optim.SGD):
    """No optimizer of torch.optim."""


def attempt(algorithm: str, codec: str = "dense", kind: Any = torch.optim.SGD, **options: Any) -> Any:
    arguments = {"momentum": options.pop("momentum")} if "momentum" in options else {}
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1, **arguments)
    return hvd.DistributedOptimizer(optimizer, algorithm=algorithm, compression=codec, **options)


TOPK = "topk(density=0.1)"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "topk of parameters": (
        lambda: attempt("dpsgd", TOPK),
        r"dpsgd sends parameters, and the codec topk\(density=0.1\) would leave out most of them; use",
    ),
    "powersgd to shards": (
        lambda: attempt("asp", "powersgd"),
        "the codec powersgd.* all-reduces its factors, which asp does not; use topk, for example",
    ),
    "a sum": (lambda: attempt("asp", op=hvd.Sum), "asp takes means, and cannot combine by sum; use op=Average, or"),
    "choco alone": (lambda: attempt("choco"), "choco sends a codec's selection of a difference, and dense selects n"),
    "another optimizer": (
        lambda: attempt("asp", kind=Plain),
        r"shards take the steps, by an optimizer of torch.optim, which .*\.Plain is not; use one of these, or another",
    ),
    "a closure at shards": (
        lambda: attempt("bsp", kind=torch.optim.LBFGS),
        "shards take the steps, and they have no closure for LBFGS; use another optimizer, or an algorithm whose ranks",
    ),
    "sparse gradients at shards": (
        lambda: attempt("asp", kind=torch.optim.SparseAdam),
        "shards take the steps, and they have no sparse gradients for SparseAdam; use another optimizer, or an algorit",
    ),
    "nobody left": (
        lambda: attempt("partial(backup=4)"),
        r"partial\(backup=4\) would wait for no rank: there are 4 ranks, and 4 are backups",
    ),
    "too many": (
        lambda: attempt("softsync(contributions=5)"),
        r"softsync\(contributions=5\) waits for 5 contributions, and there are 4 ranks",
    ),
    "a divisor": (
        lambda: attempt("bsp", gradient_predivide_factor=2.0),
        "gradient_predivide_factor makes no sense with bsp, which adds up no gradients of all ranks",
    ),
    "no name": (lambda: attempt("sps"), "there is no algorithm 'sps'; did you mean 'ssp'"),
    "no argument": (lambda: attempt("ssp(stale=3)"), "the algorithm ssp has no argument 'stale'; did you mean 'stal"),
    "no value": (lambda: attempt("ssp(staleness=-1)"), "staleness of ssp cannot be -1: it is 0 or more"),
    "no type": (lambda: attempt("ssp(staleness=1.5)"), "staleness of the algorithm ssp is of type int, which 1.5 is"),
    "no graph": (lambda: attempt("dpsgd(topology='rign')"), "there is no mixing graph 'rign'; did you mean 'ring'"),
    "no samples": (lambda: setattr(attempt("collaborative"), "samples", 0), "from at least one sample, not 0"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@on_ranks
def test_what_makes_no_sense_is_refused_in_a_sentence(what: str) -> None:
    do, sentence = REFUSED[what]
    with pytest.raises(ValueError, match=sentence):
        do()


@on_ranks
def test_a_graph_that_is_not_bipartite_is_refused_for_pairs(tmp_path: Path) -> None:
    """Rank 2 has rank 0 as its only neighbour: both are even."""
    file = tmp_path / f"graph-{hvd.rank()}"
    file.write_text(".2 .3 .5 0\n.3 .4 0 .3\n.5 0 .5 0\n0 .3 0 .7\n")
    with pytest.raises(ValueError, match="rank 2 has no neighbour that is odd; use 'bipartite', or 'ring'"):
        attempt(f"adpsgd(topology='file:{file}')")


@on_ranks
def test_momentum_warns_where_it_is_stale() -> None:
    with pytest.warns(UserWarning, match="the optimizer has momentum, and asp is asynchronous.*; use momentum=0, or a"):
        attempt("asp", momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("asp", "bsp", "easgd", "adpsgd"):
            attempt(text, momentum=0.0 if text == "asp" else 0.9)


# --- from the command line --------------------------------------------------------------------------------------------

SCRIPT = """
import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
generator = torch.Generator().manual_seed(hvd.rank())
losses = []
for _ in range(60):
    inputs = torch.randn(16, 20, generator=generator)
    optimizer.zero_grad()
    loss = ((model(inputs) - inputs.sum(1, keepdim=True) / 4) ** 2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("learned" if losses[-1] < 0.2 * losses[0] else losses, optimizer._sync.options.algorithm, flush=True)
"""


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusion_rt.runner", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)


@pytest.mark.multiprocess
def test_a_script_written_for_horovod_runs_with_any_algorithm(runtime_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    hosts = ("-np", "2", "-H", "127.0.0.1:1,localhost:1")
    options = ("--as-horovod", "--algorithm", "ssp(staleness=4)")
    done = launch(*hosts, *options, *forks.interpreter(forks.WORKER), str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:learned ssp" for rank in range(2)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sps(staleness=4)", "there is no algorithm 'sps'; did you mean 'ssp'?"),
        ("ssp(staleness=-4)", "staleness of ssp cannot be -4: it is 0 or more"),
    ],
)
def test_the_launcher_refuses_an_algorithm_before_anything_starts(runtime_dir: Path, text: str, sentence: str) -> None:
    done = launch("-np", "2", "--algorithm", text, sys.executable, "-c", "print('started')")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"fusionrun: error: --algorithm: {sentence}"
    assert list(runtime_dir.iterdir()) == []


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["local_sgd(steps=2)", "asp"])
@on_ranks
def test_each_backward_pass_is_recorded_by_its_gradients_where_no_module_shows_it(algorithm: str) -> None:
    class Noted(NullRecorder):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def record(self, kind: int, name: str = "", value: int = 0, clock: int = 0, *others: int) -> None:  # type: ignore[override]
            if kind in (Kind.BACKWARD_BEGIN, Kind.BACKWARD_END):
                self.seen.append((kind, clock))

    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), algorithm=algorithm)
    noted = optimizer._sync.steps.trace = Noted()
    try:
        for _ in range(3):
            for _ in range(2):  # of which the gradients are added up
                sum(parameter.sum() for parameter in parameters).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        recording.forget(noted)
    passes = [(Kind.BACKWARD_BEGIN, Kind.BACKWARD_END)] * 2
    assert noted.seen == [(kind, step) for step in range(3) for each in passes for kind in each]
