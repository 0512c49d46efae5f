"""State of newcomers, which they get from one of the others while these go on."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.elastic import donors
from tests.torch.elastic.jobs import ElasticJob, Worker, same

STEPS, PAUSE = 7, 3


def test_newcomers_get_the_state_from_different_ranks_that_have_it() -> None:
    assert donors.by_taker(["x", "", "x", "", ""]) == {1: 0, 3: 2, 4: 0}
    assert donors.by_taker(["x", "x"]) == {}


def test_where_no_rank_is_known_to_have_what_others_have_all_get_it_from_one() -> None:
    assert donors.by_taker(["", ""]) is None
    assert donors.by_taker(["x", "", "y"]) is None


def make_model(width: int = 4) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1)).double()
    model.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
    model.register_buffer("mask", torch.randn(5) > 0)
    model.register_buffer("nothing", torch.randn(0))
    return model


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    loss: torch.Tensor = model(torch.randn(4, 3, generator=generator, dtype=torch.double)).square().mean()
    return loss


def contents(state: Any) -> list[Any]:
    """All that newcomers get."""
    parameters = [*state.model.parameters()]
    momenta = [state.optimizer.state.get(p, {}).get("momentum_buffer") for p in parameters]
    given = [*state.model.buffers(), *(each for each in momenta if each is not None)]
    return [[p.tolist() for p in parameters], [each.tolist() for each in given], state.step, state.note]


class Dealer:
    """An object of a script's own that deals something to the ranks that there are when its state is loaded."""

    ranks = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ranks = hvd.size()


def take_steps(
    worker: Worker,
    state: Any,
    model: torch.nn.Module,
    optimizer: Any,
    sizes: list[int],
    pause: int = PAUSE,
    writer: int | None = None,
) -> None:
    """Takes the rest of the steps, and notes how many ranks take each. After `pause` ranks wait for a word.

    Args:
        writer: who notes in the state how many ranks there are; None: all.
    """
    while state.step < STEPS:
        optimizer.zero_grad()
        loss_of(model, state.step, hvd.rank()).backward()
        optimizer.step()
        state.step += 1
        if writer in (None, hvd.rank()):
            state.note = f"by {hvd.size()}"
        sizes.append(hvd.size())
        state.commit()
        if state.step == pause:
            worker.say("paused")
            worker.listen()


def train(
    worker: Worker,
    algorithm: str = "allreduce",
    compression: str = "",
    wide: bool = False,
    pause: int = PAUSE,
    writer: int | None = None,
) -> Any:
    """Steps, before which each rank says what it has. A newcomer says who gives it the state, and waits for a word."""
    hvd.init()
    torch.manual_seed(os.getpid())  # so that nothing is equal by chance
    model = make_model(5 if wide and hvd.rank() == 2 else 4)
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    coded = hvd.Compression.topk(0.25) if compression else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=coded, algorithm=algorithm)
    dealer = Dealer()
    state: Any = hvd.elastic.TorchState(model, optimizer, dealer=dealer, step=0, note="")
    sizes: list[int] = []
    take = donors._take

    def waiting(here: Any, items: Any, donor: int) -> None:
        worker.say(donor)
        worker.listen()
        take(here, items, donor)

    donors._take = waiting

    @hvd.elastic.run
    def run(state: Any) -> None:
        worker.say(contents(state))
        take_steps(worker, state, model, optimizer, sizes, pause, writer)

    try:
        run(state)
    except ValueError as error:
        return str(error)
    return {"sizes": sizes, "contents": contents(state), "dealt to": dealer.ranks}


def train_by_parts_made_anew(worker: Worker) -> Any:
    """Steps of a distributed optimizer that each call of the function makes; the state has the script's own."""
    hvd.init()
    torch.manual_seed(os.getpid())
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    state: Any = hvd.elastic.TorchState(model, plain, step=0, note="")
    sizes: list[int] = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        if not sizes:
            worker.say(contents(state))
        take_steps(worker, state, model, optimizer, sizes)

    run(state)
    return {"sizes": sizes, "contents": contents(state)}


def begin(job: ElasticJob) -> list[Any]:
    """Lets ranks train until they let newcomers in; returns what they had in the beginning."""
    start: list[Any] = same(job.reports())
    assert job.reports() == ["paused"] * len(job.living())
    job.announce(added=True)
    job.tell("go on")
    return start


def check(results: list[Any], start: list[Any], sizes: list[int]) -> None:
    """All ranks have the same in the end, which is that of one process; `sizes`: ranks in each step."""
    values, _, step, note = same([result["contents"] for result in results])
    assert (step, note) == (STEPS, f"by {sizes[-1]}")
    expected = alone(start[0], sizes)
    for value, other in zip(values, expected, strict=True):
        torch.testing.assert_close(torch.tensor(value), torch.tensor(other))


def alone(start: list[Any], sizes: list[int]) -> list[Any]:
    """The parameters after the same steps in one process.

    Args:
        start: their values before.
        sizes: ranks in each step.
    """
    model = make_model()
    parameters = [*model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(parameters, start, strict=True):
            parameter.copy_(torch.tensor(value))
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.5)
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model, step, rank) / size).backward()
        optimizer.step()
    return [parameter.tolist() for parameter in parameters]


@pytest.mark.multiprocess
def test_the_others_go_on_while_newcomers_get_the_state() -> None:
    with ElasticJob(train, hosts={"a": 1, "b": 1}) as job:
        start = begin(job)
        job.change({"a": 1, "b": 1, "c": 1, "d": 1})
        reports = job.reports()
        assert reports[2:] == [0, 1]  # who gives it to them
        for hand in job.hands[2:]:
            hand.tell("go on")
        assert [job.report(hand) for hand in job.hands[2:]] == [same(reports[:2])] * 2
        results = job.finish()
        check(results, start, [2, 2, 2, 2, 4, 4, 4])
        assert [result["dealt to"] for result in results] == [4] * 4


@pytest.mark.multiprocess
def test_a_newcomer_trains_with_optimizers_that_each_call_of_the_function_makes_anew() -> None:
    with ElasticJob(train_by_parts_made_anew, hosts={"a": 1, "b": 1}) as job:
        start = begin(job)
        job.change({"a": 1, "b": 1, "c": 1})
        job.report(job.hands[2])
        check(job.finish(), start, [2, 2, 2, 2, 3, 3, 3])


@pytest.mark.multiprocess
def test_a_newcomer_that_dies_meanwhile_costs_the_others_a_step() -> None:
    with ElasticJob(train, hosts={"a": 1, "b": 1}) as job:
        start = begin(job)
        job.change({"a": 1, "b": 1, "c": 1})
        assert job.reports()[2] == 0
        job.kill(job.hands[2])
        job.change({"a": 1, "b": 1})
        results = job.finish()
        same([result["contents"] for result in results])
        assert [result["sizes"] for result in results] == [[2] * STEPS] * 2
        check(results, start, [2, 2, 2, 2, 0, 2, 2])


@pytest.mark.multiprocess
def test_if_the_rank_dies_that_gives_the_state_another_one_gives_it() -> None:
    with ElasticJob(train, hosts={"a": 1, "b": 1}) as job:
        start = begin(job)
        job.change({"a": 1, "b": 1, "c": 1})
        before = job.reports()
        assert before[2] == 0
        job.kill(job.hands[0])
        job.kill_daemon("a")
        job.hands[2].tell("go on")
        job.change({"b": 1, "c": 1})
        assert job.reports() == [before[1]] * 2  # from the commit
        check(job.finish(), start, [2, 2, 2, 2, 2, 2, 2])


@pytest.mark.multiprocess
def test_a_newcomer_that_comes_when_nothing_is_left_to_do_gets_the_state_too() -> None:
    with ElasticJob(train, "allreduce", "", False, STEPS - 1, hosts={"a": 1, "b": 1}) as job:
        start = begin(job)
        job.change({"a": 1, "b": 1, "c": 1})
        donor, other, newcomer = job.hands
        there = same([job.report(donor), job.report(other)])
        assert job.report(newcomer) == 0
        results = [job.report(other)]  # it has trained to the end
        newcomer.tell("go on")
        assert job.report(newcomer) == there
        results += [job.report(donor), job.report(newcomer)]
        check([result for _, result in results], start, [2] * STEPS)


@pytest.mark.multiprocess
def test_a_newcomer_whose_model_is_another_one_is_told_so() -> None:
    with ElasticJob(train, "allreduce", "", True, hosts={"a": 1, "b": 1}) as job:
        begin(job)
        job.change({"a": 1, "b": 1, "c": 1})
        assert job.reports()[2] == 0
        newcomer = job.hands[2]
        newcomer.tell("go on")
        assert job.report(newcomer) == (
            "returned",
            "model.0.bias is torch.float64 of shape (5,) in the state of rank 2, and model.0.bias is torch.float64 of "
            "shape (4,) in that of rank 0, from which it gets its values: make the same model and optimizer on all "
            "ranks",
        )
        job.change({"a": 1, "b": 1})
        same(job.reports())
        same([result["contents"] for result in job.finish()])


@pytest.mark.multiprocess
def test_what_nodes_have_not_sent_is_dealt_when_newcomers_have_the_state() -> None:
    with ElasticJob(train, "allreduce", "topk", hosts={"a": 1, "b": 1}) as job:
        begin(job)
        job.change({"a": 1, "b": 1, "c": 1})
        assert job.report(job.hands[2]) == 0
        job.hands[2].tell("go on")
        same(job.reports())
        same([result["contents"] for result in job.finish()])


@pytest.mark.multiprocess
def test_where_one_rank_has_set_a_value_all_get_it() -> None:
    with ElasticJob(train, "allreduce", "", False, PAUSE, 0, hosts={"a": 1, "b": 1}) as job:
        begin(job)
        job.change({"a": 1, "b": 1, "c": 1})
        _, _, step, note = same(job.reports())
        assert (step, note) == (PAUSE + 1, "by 2")
        job.finish()


@pytest.mark.multiprocess
@pytest.mark.parametrize("algorithm", ["bsp", "local_sgd(steps=2)"])
def test_where_ranks_or_shards_have_more_than_their_parameters_all_get_the_state_of_one(algorithm: str) -> None:
    with ElasticJob(train, algorithm, hosts={"a": 1, "b": 1}) as job:
        begin(job)
        job.change({"a": 1, "b": 1, "c": 1})
        same(job.reports())
        job.finish()
