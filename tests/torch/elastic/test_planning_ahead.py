"""Plans in a new membership, which are asked for before there are gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.elastic.survival import RankReport, planned_ahead
from tests.torch.elastic.jobs import ElasticJob, Worker, same

STEPS = 12


def test_all_ranks_or_none_ask_for_a_plan_ahead() -> None:
    old, new = RankReport(has_values=True, plans_ahead=(True, False)), RankReport(plans_ahead=(True, True))
    assert planned_ahead([old, new]) == (True, False)
    assert planned_ahead([old, new._replace(plans_ahead=(False, True))]) == (False, False)


def test_nobody_asks_for_a_plan_ahead_where_ranks_have_made_other_optimizers() -> None:
    assert planned_ahead([RankReport(has_values=True, plans_ahead=(True,)), RankReport(plans_ahead=(True, True))]) == ()


def test_nobody_asks_for_a_plan_ahead_when_a_job_begins() -> None:
    assert planned_ahead([RankReport(plans_ahead=(True,)), RankReport(plans_ahead=(True,))]) == ()


def make(kind: str) -> tuple[torch.nn.Sequential, Any]:
    torch.manual_seed(1)
    if kind == "sparse":
        model = torch.nn.Sequential(torch.nn.Embedding(8, 3, sparse=True), torch.nn.Linear(3, 1))
    else:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = "bsp" if kind == "shards" else "allreduce"
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), algorithm=algorithm)


def loss_of(kind: str, model: torch.nn.Module, step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    if kind == "sparse":
        return model(torch.randint(8, (4,), generator=generator)).square().mean()
    return model(torch.randn(4, 3, generator=generator)).square().mean()


def train(worker: Worker, kind: str) -> Any:
    """Steps of which each tells how many ranks there are, and whether a plan was asked for before its gradients."""
    hvd.init()
    model, optimizer = make(kind)
    state: Any = hvd.elastic.TorchState(model, optimizer, step=0)
    told: list[tuple[int, bool]] = []
    frozen: list[torch.Tensor] = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        if kind == "frozen" and hvd.size() == 3:
            model[0].requires_grad_(False)
            frozen.append(model[0].weight.detach().clone())
        while state.step < STEPS:
            asked = optimizer._sync.plan.is_asked_for
            optimizer.zero_grad()
            if state.step == 8 and hvd.size() == 3 and kind == "lost":
                worker.say("has committed")
                worker.listen()
                if hvd.rank() == 2:
                    runtime().client.channel.fail("this connection is pretended to be broken")
            loss_of(kind, model, state.step, hvd.rank()).backward()
            optimizer.step()
            told.append((hvd.size(), asked))
            state.step += 1
            state.commit()
            if state.step == 4:
                worker.say("paused")
                worker.listen()

    run(state)
    is_kept = all(torch.equal(model[0].weight, kept) for kept in frozen)
    return {"told": told, "values": [parameter.detach().tolist() for parameter in model.parameters()], "kept": is_kept}


def results_of(kind: str) -> list[Any]:
    """Returns the results of three ranks, of which the third one comes after four or five steps of the others."""
    with ElasticJob(train, kind, hosts={"a": 1, "b": 1}) as job:
        assert job.reports() == ["paused"] * 2
        job.announce(added=True)
        job.tell("go on")
        job.change({"a": 1, "b": 1, "c": 1})
        if kind == "lost":
            assert job.reports() == ["has committed"] * 3  # a loss would send those back that still do
            job.tell("go on")
            job.change({"a": 1, "b": 1, "c": 1})
        found = job.finish()
    same([result["values"] for result in found])
    return found


@pytest.mark.multiprocess
def test_a_newcomer_and_the_others_ask_for_a_plan_before_their_first_step() -> None:
    for result in results_of("dense"):
        asked = [asked for size, asked in result["told"] if size == 3]
        assert asked == [True] + [False] * (STEPS - 6)
        assert not any(asked for size, asked in result["told"] if size == 2)


@pytest.mark.multiprocess
def test_ranks_that_stay_in_their_loops_ask_for_a_plan_before_their_next_step() -> None:
    for result in results_of("lost"):
        asked = [asked for size, asked in result["told"] if size == 3]
        assert asked == [True, False, False, False, True, False, False]


@pytest.mark.multiprocess
def test_parameters_that_are_frozen_in_the_function_are_in_no_plan_that_was_asked_for_ahead() -> None:
    for result in results_of("frozen"):
        asked = [asked for size, asked in result["told"] if size == 3]
        assert asked == [True] + [False] * (STEPS - 6)
        assert result["kept"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["sparse", "shards"])
def test_where_gradients_say_more_than_parameters_or_nodes_keep_state_nobody_asks_ahead(kind: str) -> None:
    for result in results_of(kind):
        assert not any(asked for _, asked in result["told"])
