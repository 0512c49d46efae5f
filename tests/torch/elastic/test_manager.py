"""A plain loop that survives losses and newcomers: each sample of each epoch counts once.

The model counts that itself: its parameters are one number for each sample, and the gradient of a batch is one for each
of its samples.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import FusionError, HostsUpdatedInterrupt
from tests.harness import on_ranks
from tests.torch.elastic.jobs import ElasticJob, Worker, same
from tests.torch.elastic.test_survival import POINTS, SMALL, Fault, lose_at, pretend

SAMPLES, EPOCHS = 72, 2
BOTH, ALONE = {"a": 2, "b": 1}, {"a": 2}
PAGE = Path(__file__).parents[3] / "docs" / "elastic.md"


class Counting(torch.nn.Module):
    """One number for each sample; the loss of a batch is their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.counts[samples].sum()


def train(worker: Worker, loaders: int) -> Any:
    """Trains with faults: the worker on host b dies in the fourth step, and those on host a, in the sixth step of the
    second epoch, lose an operation of the script's own."""
    hvd.init()
    is_first_on_b, is_new = hvd.size() == 3 and hvd.rank() == 2, os.environ["FUSION_ELASTIC_EPOCH"] != "1"
    model = Counting()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Sum
    )
    samples: Any = torch.arange(SAMPLES)
    sampler = hvd.elastic.ElasticSampler(samples)
    loader = torch.utils.data.DataLoader(samples, batch_size=2, sampler=sampler, num_workers=loaders)
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)
    outcomes: list[bool] = []
    with hvd.elastic.Manager(state, commit_every=3) as manager:
        but_the_last = hvd.add_process_set(lambda size: range(size - 1))
        while state.epoch < EPOCHS:
            for batch in manager.batches(loader):
                with manager.step() as step:
                    if (state.epoch, state.step) == (0, 3) and is_first_on_b and not is_new:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if (state.epoch, state.step) == (0, 4):
                        worker.say("two ranks")
                        assert worker.listen() == "go on"
                    optimizer.zero_grad()
                    model(batch).backward()
                    optimizer.step()
                    # Asked of the membership, not of what this rank remembers: the loss can come before a slower rank
                    # has got to this line, and all have to agree on whether there is an operation.
                    if (state.epoch, state.step, os.environ["FUSION_ELASTIC_EPOCH"]) == (1, 5, "3"):
                        if hvd.rank() == 1:
                            pretend()
                        hvd.allreduce(torch.ones(1))
                    if state.epoch == 1 and state.step in (1, 6) and but_the_last.included():
                        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=but_the_last).item() == 2
                    state.step += step.counts
                outcomes.append(step.counts)
            state.epoch, state.step = state.epoch + 1, 0
            sampler.set_epoch(state.epoch)
    assert but_the_last.ranks == [0, 1], "as many as there are but one, however often that has changed"
    return model.counts.tolist(), outcomes


def run(loaders: int) -> list[Any]:
    with ElasticJob(train, loaders, hosts=BOTH) as job:
        job.change(ALONE)
        assert job.reports() == ["two ranks"] * 2
        job.announce(added=True)
        job.tell("go on")
        job.change(BOTH)
        reasons = job.change(BOTH)
        assert all(reasons), "an error, and no news of hosts"
        return job.finish()


@pytest.mark.multiprocess
def test_each_sample_counts_once_whatever_happens_to_the_job() -> None:
    results = run(0)
    assert same([counts for counts, _ in results]) == [-EPOCHS] * SAMPLES
    first, second, new = (outcomes for _, outcomes in results)
    assert first == second
    assert first.count(False) == 2, "the step of the lost rank, and that of the lost operation"
    assert new.count(False) == 1


@pytest.mark.long
@pytest.mark.multiprocess
def test_each_sample_counts_once_where_loaders_have_workers() -> None:
    assert same([counts for counts, _ in run(2)]) == [-EPOCHS] * SAMPLES


def train_without_rule(worker: Worker) -> Any:
    hvd.init()
    model = Counting()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    state: Any = hvd.elastic.TorchState(model, optimizer, step=0)
    told, steps = [], 0
    with hvd.elastic.Manager(state) as manager:
        for ranks in ([0, 1], [1, 2]):
            process_set = hvd.add_process_set(ranks)
            with pytest.raises(FusionError) as error, manager.step():
                steps += 1
            told.append(str(error.value))
            hvd.remove_process_set(process_set)
        with manager.step():
            steps += 1
    return told, steps


@pytest.mark.multiprocess
def test_a_process_set_without_a_rule_is_refused_before_anything_is_trained() -> None:
    """New workers would register theirs, and wait in vain for the others."""
    with ElasticJob(train_without_rule, hosts=BOTH) as job:
        told, steps = same(job.finish())
    for ranks, sentence in zip(([0, 1], [1, 2]), told, strict=True):
        assert sentence.startswith(f"process set {ranks} has no rule, by which a Manager could register it again")
    assert steps == 1


def train_on(worker: Worker, faults: Sequence[Fault]) -> Any:
    """Trains four epochs with faults, each in the first step that is tried as so many have counted."""
    hvd.init()
    who = hvd.rank()
    model = Counting()
    second = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))  # in a bucket of its own
    model.register_parameter("second", second)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Sum)
    samples: Any = torch.arange(SAMPLES)
    sampler = hvd.elastic.ElasticSampler(samples)
    loader = torch.utils.data.DataLoader(samples, batch_size=2, sampler=sampler)
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)
    due, dropped = list(faults), 0
    with hvd.elastic.Manager(state, commit_every=5) as manager:
        while state.epoch < 4:
            for batch in manager.batches(loader):
                with manager.step() as step:
                    optimizer.zero_grad()
                    for fault in [fault for fault in due if fault[0] == state.step]:
                        due.remove(fault)
                        if fault[1] == who:
                            lose_at(fault[2], optimizer, model)
                    (model(batch) + second.sum()).backward()
                    optimizer.step()
                    state.step += step.counts
                dropped += not step.counts
            state.epoch += 1
            sampler.set_epoch(state.epoch)
    return model.counts.tolist(), second.tolist(), state.step, dropped


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("seed", [1, 2])
def test_each_sample_counts_once_wherever_ranks_are_lost(seed: int) -> None:
    choice = random.Random(seed)
    faults = [(step, choice.randrange(3), choice.choice(POINTS)) for step in range(1, 47, 3)]
    with ElasticJob(train_on, faults, hosts={"a": 3}, environment=SMALL) as job:
        while True:
            job.await_word()
            if any(hand.reports for hand in job.hands):
                break
            job.change({"a": 3})
        counts, second, steps, dropped = same(job.finish())
    assert counts == [-4.0] * SAMPLES
    assert (second, steps) == ([-3.0 * 48] * 3, 48)
    assert dropped >= len(faults)


def example(worker: Worker) -> Any:
    """Runs the page's example."""
    (code,) = re.findall(r"```python\n((?:(?!```).)*elastic\.Manager.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["model"].weight.tolist(), names["sampler"].epoch, names["sampler"].processed_num


@pytest.mark.multiprocess
def test_the_example_of_the_page_trains() -> None:
    with ElasticJob(example, hosts=ALONE) as job:
        weights, epoch, done = same(job.finish())
    assert (epoch, done) == (3, 0)
    assert torch.tensor(weights) == pytest.approx(torch.full((1, 8), 1.0), abs=0.2)


# --- without faults ---------------------------------------------------------------------------------------------------


@on_ranks
def test_what_is_no_use_is_refused_and_a_fixed_job_trains() -> None:
    samples: Any = torch.arange(8)
    sampler = hvd.elastic.ElasticSampler(samples)
    loader = torch.utils.data.DataLoader(samples, batch_size=2, sampler=sampler)
    other: Any = torch.utils.data.DataLoader(samples, batch_size=2)
    with pytest.raises(ValueError, match="every 1 or more steps"):
        hvd.elastic.Manager(hvd.elastic.TorchState(sampler=sampler), commit_every=0)
    with hvd.elastic.Manager(hvd.elastic.TorchState(sampler=sampler)) as manager:
        with pytest.raises(ValueError, match="whose sampler is an ElasticSampler"):
            next(manager.batches(other))
        with pytest.raises(FusionError, match="not taken by a step"):
            list(manager.batches(loader))
        seen = []
        for batch in manager.batches(loader):
            with manager.step():
                seen += batch.tolist()
        assert len(seen) == 8 // hvd.size()
        assert sampler.processed_num == 8


@on_ranks
def test_an_interrupted_step_keeps_nothing_that_it_computed_with() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def compute() -> None:
        tensor = torch.zeros(3)
        made.append(weakref.ref(tensor))
        raise HostsUpdatedInterrupt("hosts have changed")

    state: Any = hvd.elastic.TorchState(step=0)
    state.register_reset_callbacks([lambda: alive.append(made[0]() is not None)])
    gc.disable()
    try:
        with hvd.elastic.Manager(state) as manager, manager.step() as step:
            compute()
    finally:
        gc.enable()
    assert step.counts
    assert alive == [False], "already before the next epoch begins"
