"""Elastic jobs in which workers come and go: what they have afterwards."""

from __future__ import annotations

import linecache
import random
import signal
import warnings
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.large_batch import LinearScaling
from tests.torch.elastic.jobs import ElasticJob, Worker, same

pytestmark = pytest.mark.multiprocess

SAMPLES, BATCH = 96, 2  # of the data, and of a step on one rank


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, 1, generator=generator)


def linear() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(3, 1)


def train(worker: Worker, pauses: tuple[int, ...]) -> dict[str, Any]:
    """One epoch of data. At the pauses (global samples done) it says so, after the commit, and waits for a word."""
    hvd.init()
    inputs, targets = data()
    model = linear()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=5)
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, trace=())
    resets: list[int] = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        step = 0
        while step * BATCH < len(sampler):
            mine = sampler.get_indices(step, BATCH)
            optimizer.zero_grad()
            (model(inputs[mine]) - targets[mine]).square().mean().backward()
            optimizer.step()
            sampler.record_batch(step, BATCH)
            state.trace = (*state.trace, (hvd.size(), mine))
            step += 1
            state.commit()
            if sampler.processed_num in pauses:
                worker.say(sampler.processed_num)
                worker.listen()

    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    run(state)
    parameters = [p.detach().tolist() for p in model.parameters()]
    momenta = [optimizer.state[p]["momentum_buffer"].tolist() for p in model.parameters()]
    done = len(sampler.processed_indices)
    return {"parameters": parameters, "momenta": momenta, "resets": resets, "sizes": sizes(state.trace), "done": done}


def sizes(trace: tuple[tuple[int, list[int]], ...]) -> list[int]:
    return [size for size, _ in trace]


def alone(sizes: list[int]) -> list[Any]:
    """The parameters after the same steps in one process; `sizes`: ranks in each step."""
    inputs, targets = data()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = list(range(SAMPLES))
    random.Random(5).shuffle(order)
    done = 0
    for size in sizes:
        batch = order[done : done + size * BATCH]
        done += size * BATCH
        optimizer.zero_grad()
        (model(inputs[batch]) - targets[batch]).square().mean().backward()
        optimizer.step()
    assert done == SAMPLES
    return [p.detach() for p in model.parameters()]


def check(results: list[dict[str, Any]]) -> None:
    """All ranks have the same to the bit, and what one process has."""
    parameters = same([result["parameters"] for result in results])
    same([result["momenta"] for result in results])
    same([result["done"] for result in results])
    assert results[0]["done"] == SAMPLES
    for mine, expected in zip(parameters, alone(same([result["sizes"] for result in results])), strict=True):
        torch.testing.assert_close(torch.tensor(mine), expected, rtol=1e-5, atol=1e-6)


def test_when_a_worker_dies_the_others_go_on_from_the_last_commit() -> None:
    with ElasticJob(train, (24,), hosts={"a": 1, "b": 1, "c": 1}) as job:
        assert job.reports() == [24] * 3
        job.kill(job.hands[2])
        job.tell("go on")
        reasons = job.change({"a": 1, "b": 1})
        assert all("rank 2" in reason or "c" in reason for reason in reasons)
        results = job.finish()
    check(results)
    assert results[0]["sizes"] == [3] * 4 + [2] * 18
    assert results[0]["resets"] == [2]


def test_a_worker_that_comes_gets_the_state_and_one_that_goes_ends_well() -> None:
    with ElasticJob(train, (16, 26, 60), hosts={"a": 2}) as job:
        assert job.reports() == [16] * 2
        job.announce(added=True)
        job.tell("go on")
        assert job.change({"b": 1, "a": 2}) == ["", ""]  # they look at the next commit, when 20 samples are done
        assert job.topology.hosts == ("a", "b")
        assert job.reports() == [26] * 3
        job.announce(removed=True)
        job.tell("go on")
        assert job.change({"b": 1}) == ["", "", ""]
        (survivor,) = job.living()
        assert job.report(survivor) == 60
        job.tell("go on")
        results = job.finish()
    check(results)
    assert results[0]["sizes"] == [2] * 5 + [3] * 2 + [1] * 32


def train_everything(worker: Worker, steps: int, pause: int) -> dict[str, Any]:
    """Steps of a model with buffers, by an optimizer with momenta, with a rate that follows the number of ranks."""
    hvd.init()
    torch.manual_seed(hvd.rank())  # so that nothing is equal by chance
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    scheduler = LinearScaling(optimizer, 8, base_batch=8, steps_per_epoch=10, warmup_epochs=0, rewarm_steps=2)
    state: Any = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, step=0, note="")
    rates: list[float] = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        worker.say(everything(state))
        worker.listen()
        while state.step < steps:
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
            state.step += 1
            state.note = f"by {hvd.size()}"
            state.commit()
            if state.step == pause:
                worker.say("paused")
                worker.listen()

    run(state)
    return {"rates": rates}


def everything(state: Any) -> list[Any]:
    """All that has to be the same on all ranks after a sync."""
    momenta = [
        {key: torch.as_tensor(value).tolist() for key, value in state.optimizer.state[parameter].items()}
        for parameter in state.model.parameters()
        if parameter in state.optimizer.state
    ]
    values = {name: value.tolist() for name, value in state.model.state_dict().items()}
    return [
        values,
        momenta,
        state.scheduler.state_dict(),
        state.step,
        state.note,
        state.optimizer.param_groups[0]["lr"],
    ]


def test_a_worker_that_comes_in_place_of_a_dead_one_has_all_that_the_others_have() -> None:
    with ElasticJob(train_everything, 6, 3, hosts={"a": 1, "b": 1}) as job:
        same([start[0] for start in job.reports()])
        job.tell("begin")
        assert job.reports() == ["paused"] * 2
        job.kill(job.hands[0])  # it had rank 0
        job.tell("go on")
        job.change({"b": 1, "c": 2})
        values, momenta, _, step, note, rate = same(job.reports())
        assert (step, note) == (3, "by 2")
        assert values["1.num_batches_tracked"] == 3
        assert len(momenta) == 6
        assert momenta[0]["step"] == 3
        assert rate == 0.02
        job.tell("begin")
        old, *new = job.finish()
    # The rate moves from twice to three times that of one rank within two steps.
    assert old["rates"] == pytest.approx([0.02, 0.02, 0.02, 0.025, 0.03, 0.03])
    assert all(each["rates"] == pytest.approx(old["rates"][3:]) for each in new)


def test_values_come_from_who_has_them_even_if_rank_0_is_new() -> None:
    """A worker that had come as far as to ask for a place, and no further, is a survivor to the launcher."""
    with ElasticJob(train, (24,), hosts={"a": 1, "b": 1}) as job:
        assert job.reports() == [24] * 2
        job.kill(job.hands[1])
        job.tell("go on")
        job.change({"c": 1, "a": 1}, in_order=True)
        assert job.topology.hosts == ("c", "a")
        results = job.finish()
    check(results)
    assert results[0]["sizes"] == [2] * 24


@pytest.mark.parametrize("late", [False, True])
def test_an_epoch_that_does_not_come_about_is_left_for_the_next(late: bool) -> None:
    """Also by a worker that comes so late that the daemon of the epoch is not there any more."""
    with ElasticJob(train, (16,), hosts={"a": 1, "b": 1}) as job:
        assert job.reports() == [16] * 2
        job.kill(job.hands[1])
        job.tell("go on")
        job.await_leaving()
        first = job.hands[0].process
        if late:
            first.send_signal(signal.SIGSTOP)
        job.change({"a": 1, "c": 1})
        job.kill(job.hands[1])  # while the first one waits for it
        job.abandon()
        if late:
            first.send_signal(signal.SIGCONT)
        (reason,) = job.change({"a": 1, "d": 1})
        assert reason
        results = job.finish()
    check(results)
    assert results[0]["sizes"] == [2] * 24
    assert results[0]["resets"] == [2]  # the epoch that never was is none


def begin_outside(worker: Worker) -> list[tuple[str, str, str]]:
    """Submits operations before the training function and in it; returns the warnings, with their lines of code."""
    hvd.init()
    model = linear()
    state: Any = hvd.elastic.TorchState(model)

    @hvd.elastic.run
    def run(state: Any) -> float:
        worker.say(float(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
        return float(worker.listen())

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.barrier()
        run(state)
        hvd.barrier()
    own = [warning for warning in found if warning.category is RuntimeWarning]
    return [(w.category.__name__, str(w.message), linecache.getline(w.filename, w.lineno).strip()) for w in own]


def test_rank_0_warns_at_the_start_of_what_a_worker_that_comes_later_cannot_do() -> None:
    with ElasticJob(begin_outside, hosts={"a": 2}) as job:
        assert job.reports() == [2.0] * 2
        job.tell(1)
        (warning,), none = job.finish()
    assert none == []
    category, words, line = warning
    assert category == "RuntimeWarning"
    assert line == "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
    assert words == (
        "broadcast outside of the training function of an elastic job: now all ranks are here, but a worker that comes "
        "later will fail at this line: operations of all ranks belong into the function of hvd.elastic.run, which "
        "brings the state to all of them (docs/elastic.md)"
    )


def step_outside(worker: Worker) -> list[str]:
    """Takes a step of an optimizer before the training function."""
    hvd.init()
    model = linear()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return [str(warning.message).split(" outside of the training")[0] for warning in found]


def test_a_step_before_the_training_function_is_warned_of() -> None:
    with ElasticJob(step_outside, hosts={"a": 2}) as job:
        assert job.finish() == [["optimizer step"], []]
