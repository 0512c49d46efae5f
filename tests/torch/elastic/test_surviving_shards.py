"""Losses in jobs with parameter shards, where the ranks that are left go on as of the last update. All numbers are such
that sums are exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt import algorithms
from fusion_rt.torch.core import process_sets
from fusion_rt.torch.elastic.survival import Conclusion, RankReport, conclude
from fusion_rt.torch.sync.checkpoint import why_only_at_commits
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.step_schedule import Outcome, ShardClock
from fusion_rt.torch.sync.synchroniser import Synchroniser
from tests.torch.elastic.jobs import ElasticJob, Worker, same
from tests.torch.elastic.test_survival import before, once, received

SHAPES = {"first": (3, 4), "second": (7,), "third": (2, 2, 2)}
SMALL = {"HOROVOD_FUSION_THRESHOLD": "64", "FUSION_MIRROR_SHARDS": "update"}  # bytes: each parameter has its own bucket
RULES = {"even": lambda size: range(0, size, 2), "last": lambda size: [size - 1]}  # ranks by their number
Fault: TypeAlias = tuple[int, int, str]  # the step, who, and at which point


# --- what reports lead to ---------------------------------------------------------------------------------------------


def report(clock: int, in_step: bool = True, completed: int = 4, **changes: Any) -> RankReport:
    shards = ShardClock(1 << 20, 7, clock, in_step)._replace(**changes)
    known = RankReport(
        has_values=True, stays=True, completed=completed, begun=5, failed=(0,), last=((0, Outcome.TAKEN),)
    )
    return known._replace(shard_clocks=(shards,), in_step=in_step)


def test_ranks_at_the_same_shards_leave_out_one_step_or_are_healed() -> None:
    assert conclude([report(4), report(4)]) == Conclusion(5)
    assert conclude([report(4), report(5, completed=5)]) == Conclusion(6, (0,), 1, ((0, Outcome.TAKEN),))


def test_ranks_that_do_not_wait_for_each_other_leave_out_their_own_exchange_only() -> None:
    assert conclude([report(4, False, 4), report(31, False, 31)]) == Conclusion(0)


def test_ranks_go_back_to_the_commit_if_they_are_not_at_the_same_shards() -> None:
    fits = report(4)
    for other in (
        report(4, plan=8),
        report(4, epoch=1),
        report(4, recalled=4),
        report(4)._replace(shard_clocks=()),
        report(4)._replace(stays=False),
    ):
        assert conclude([fits, other]) is None, other


def test_ranks_go_back_to_the_commit_if_rules_give_no_process_sets_or_others_on_other_ranks() -> None:
    there = report(4)._replace(process_sets=((0, 2), (1,)))
    assert conclude([there, there]) == Conclusion(5)
    assert conclude([there._replace(process_sets=None)] * 2) is None
    for other in (None, (), ((0, 2), (2,)), ((1,), (0, 2))):
        assert conclude([there, there._replace(process_sets=other)]) is None, other


def test_what_was_recalled_counts_as_long_as_somebody_has_come_that_far() -> None:
    assert conclude([report(4, recalled=5), report(5, recalled=5, completed=5)]) is not None
    assert conclude([report(4, recalled=5), report(4, recalled=5)]) is None, "who had the answers is gone"


# --- jobs -------------------------------------------------------------------------------------------------------------


def gradient(step: int, who: int) -> dict[str, torch.Tensor]:
    """Small whole numbers that nobody else has."""
    generator = torch.Generator().manual_seed(1000 * step + who)
    return {name: torch.randint(-8, 9, shape, generator=generator).double() for name, shape in SHAPES.items()}


def bit(step: int, who: int) -> dict[str, torch.Tensor]:
    """A bit of the sum of all contributions."""
    return {
        name: torch.full(shape, float(1 << (3 * step + who)), dtype=torch.float64) for name, shape in SHAPES.items()
    }


def lose_at(worker: Worker, point: str, sync: Synchroniser) -> None:
    """Has this rank, or its host, be lost at a point of the step that begins."""

    def die(_: Callable[[], Any]) -> None:
        worker.say(point)
        worker.listen()

    if point == "waits":
        die(lambda: None)  # until it is told to go on
    elif point == "before anything is posted":
        once(sync, "submit", before)
    elif point == "between posts":
        once(sync.plan.buckets[-1], "send", before)
    elif point == "when others have the results":
        once(sync, "receive", received)
    elif point == "while registering sets":
        once(sync.plan.buckets[-1], "send", before)
        once(process_sets, "add_process_set", then_the_next)  # all ranks have agreed when the first is registered
    elif point == "host between posts":
        once(sync.plan.buckets[-1], "send", die)
    elif point == "host when others have the results":
        once(sync, "receive", lambda call: (sync.await_results(), die(call)))


def then_the_next(call: Callable[[], Any]) -> None:
    call()
    once(process_sets, "add_process_set", before)


def train(worker: Worker, steps: int, faults: Sequence[Fault], how: Mapping[str, Any]) -> Any:
    """Steps with given gradients; tells of each whether it counts, and with how many ranks it was taken if it does."""
    hvd.init()
    who = hvd.rank()
    parameters = {name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}
    plain = torch.optim.SGD(parameters.values(), lr=how["rate"], momentum=how["momentum"])
    codec = how.get("codec", "dense")
    optimizer = hvd.DistributedOptimizer(plain, parameters.items(), compression=codec, algorithm=how["algorithm"])
    state: Any = hvd.elastic.TorchState(torch.nn.ParameterDict(parameters), optimizer, step=0, trace=())
    give, calls = {"gradient": gradient, "bit": bit}[how["give"]], [0]
    due, members, sets, sums = list(faults), [], [], []

    @hvd.elastic.run
    def run(state: Any) -> None:
        calls[0] += 1
        if ranks := how.get("set"):
            hvd.add_process_set(ranks)
        members.extend(hvd.add_process_set(RULES[rule]) for rule in how.get("rules", ()))
        while state.step < steps:
            optimizer.zero_grad()
            for fault in [fault for fault in due if fault[:2] == (state.step, who)]:
                due.remove(fault)
                lose_at(worker, fault[2], optimizer._sync)
            given, dropped, size = give(state.step, who), exchanges.dropped, hvd.size()
            sum((parameters[name] * given[name]).sum() for name in SHAPES).backward()  # type: ignore[union-attr]
            optimizer.step()
            counts = exchanges.dropped == dropped
            state.trace = (*state.trace, (size if counts else 0, counts))  # some may have begun it after the loss
            state.step += 1
            sets.append([each.ranks for each in members])
        for each in members:
            if each.included():
                one = torch.tensor(1 << who)
                sums.append(int(hvd.allreduce(one, op=hvd.Sum, process_set=each)))
        if how["algorithm"] != "bsp" or codec != "dense":
            hvd.consensus(optimizer)

    run(state)
    kept = optimizer._sync.checkpoint.carry()
    return {
        "residuals": {} if kept is None else kept.residuals,
        "who": who,
        "calls": calls[0],
        "trace": state.trace,
        "sets": sets,
        "sums": sums,
        "parameters": {name: parameter.detach().tolist() for name, parameter in parameters.items()},
    }


def by_numpy(trace: Sequence[tuple[int, bool]], ranks: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """The parameters after the steps that count; `ranks`: who there was, by how many there were."""
    found = {}
    for name, shape in SHAPES.items():
        value, velocity = np.zeros(shape), np.zeros(shape)
        for step, (size, counts) in enumerate(trace):
            if counts:
                mean = sum(gradient(step, who)[name].numpy() for who in ranks[size]) / size
                velocity = 0.5 * velocity + mean
                value = value - 0.125 * velocity
        found[name] = value.tolist()
    return found


def lose_hosts(job: ElasticJob, *hosts: str) -> None:
    """Kills hosts, daemon and worker, when they have come to the point of their loss."""
    hands = [hand for hand in job.hands if hand.host in hosts]
    for hand in hands:
        job.report(hand)
    for hand in hands:
        job.kill_daemon(hand.host)
        job.kill(hand)


BSP = {"algorithm": "bsp", "rate": 0.125, "momentum": 0.5, "give": "gradient"}


@pytest.mark.multiprocess
def test_a_lost_worker_costs_one_step_which_all_shards_leave_out() -> None:
    points = ["before anything is posted", "between posts", "when others have the results", "between posts"]
    faults = [(2 + 3 * number, number % 3, point) for number, point in enumerate(points)]
    hosts = {"a": 1, "b": 1, "c": 1}
    with ElasticJob(train, 15, faults, BSP, hosts=hosts, environment=SMALL) as job:
        for _ in points:
            job.change(hosts)
        results = job.finish()
    assert [result["calls"] for result in results] == [1] * 3, "somebody has left its function"
    trace = same([result["trace"] for result in results])
    left_out = [step for step, (_, counts) in enumerate(trace) if not counts]
    assert left_out == [2, 5, 9, 11], "the one after that of which others had the results"
    assert same([result["parameters"] for result in results]) == by_numpy(trace, {3: (0, 1, 2)})


@pytest.mark.multiprocess
@pytest.mark.parametrize(("point", "left_out"), [("host between posts", 4), ("host when others have the results", 5)])
def test_a_lost_host_costs_one_step_and_its_shards_go_on_from_their_mirrors(point: str, left_out: int) -> None:
    with ElasticJob(train, 10, [(4, 1, point)], BSP, hosts={"a": 1, "b": 1, "c": 1}, environment=SMALL) as job:
        lose_hosts(job, "b")
        job.change({"a": 1, "c": 1})
        results = job.finish()
    assert [result["calls"] for result in results] == [1] * 2, "somebody has left its function"
    trace = same([result["trace"] for result in results])
    counted = [counts for _, counts in trace]
    assert counted.count(False) == 1
    assert left_out - 1 <= counted.index(False) <= left_out, "the next one only if somebody had the results"
    assert same([result["parameters"] for result in results]) == by_numpy(trace, {3: (0, 1, 2), 2: (0, 2)})


@pytest.mark.multiprocess
@pytest.mark.parametrize("algorithm", ["bsp", "allreduce"])
def test_a_step_that_is_left_out_is_taken_back_from_residuals_too(algorithm: str) -> None:
    """All gradients of steps that count are in the parameters, or in a residual, and none of the others is."""
    how = {**BSP, "algorithm": algorithm, "rate": 1.0, "momentum": 0.0, "codec": "topk(density=0.25, minimum=2)"}
    points = ["before anything is posted", "between posts", "when others have the results", "between posts"]
    has_shards = algorithm == "bsp"
    if not has_shards:  # daemons do not know which results others have
        points[2] = "between posts"
    faults = [(2 + 3 * number, number % 2, point) for number, point in enumerate(points)]
    if not has_shards:  # so nobody is lost before both have the results of the step before
        faults = [(step, who, "waits") for step, _, _ in faults for who in (0, 1)] + faults
    hosts = {"a": 1, "b": 1}
    with ElasticJob(train, 15, faults, how, hosts=hosts, environment=SMALL) as job:
        for _ in points:
            if not has_shards:
                job.reports()
                job.tell("to go on")
            job.change(hosts)
        results = job.finish()
    assert [result["calls"] for result in results] == [1] * 2, "somebody has left its function"
    trace = same([result["trace"] for result in results])
    parameters = same([result["parameters"] for result in results])
    assert any(np.any(value) for result in results for value in result["residuals"].values())
    for name in SHAPES:
        given = sum(
            gradient(step, who)[name].numpy() for step, (_, counts) in enumerate(trace) for who in (0, 1) if counts
        )
        owed = sum(result["residuals"].get(name, np.zeros(given.size)) for result in results)
        assert (given.ravel() == owed - 2 * np.array(parameters[name]).ravel()).all()


@pytest.mark.multiprocess
def test_asynchronous_ranks_just_go_on_and_what_was_answered_counts() -> None:
    how = {"algorithm": "asp", "rate": 1.0, "momentum": 0.0, "give": "bit"}
    faults = [(4, 1, "host between posts"), (4, 0, "waits"), (4, 2, "waits"), (8, 0, "waits"), (8, 2, "waits")]
    faults.append((8, 0, "between posts"))
    with ElasticJob(train, 12, faults, how, hosts={"a": 1, "b": 1, "c": 1}, environment=SMALL) as job:
        first, _, last = job.hands
        job.report(first)
        job.report(last)
        lose_hosts(job, "b")
        job.tell("go on")
        job.change({"a": 1, "c": 1})
        job.report(last)  # before the first is lost, for else it would leave the epoch on its way there
        job.report(first)
        first.tell("go on")
        job._until(lambda: first.waiting is not None, "the first rank to be lost")
        last.tell("go on")
        job.change({"a": 1, "c": 1})
        results = job.finish()
    assert [result["calls"] for result in results] == [1] * 2, "somebody has left its function"
    parameters = same([result["parameters"] for result in results])
    sure = sum(1 << 3 * step + 1 for step in range(4))  # of the rank that is lost
    maybe = 1 << 3 * 4 + 1
    for result in results:
        for step, (_, counts) in enumerate(result["trace"]):
            one = 1 << 3 * step + result["who"]
            sure, maybe = (sure | one, maybe) if counts else (sure, maybe | one)
        assert sum(not counts for _, counts in result["trace"]) == 2
    for name in SHAPES:
        for value in np.array(parameters[name]).ravel():
            assert not sure & ~int(-value), "a step that counts is not in the shard"
            assert not int(-value) & ~(sure | maybe), "a step counts twice, or nobody took it"


@pytest.mark.multiprocess
@pytest.mark.long
def test_when_neighbours_are_lost_at_once_the_others_go_back_to_the_last_commit() -> None:
    faults = [(4, 1, "host between posts"), (4, 2, "host between posts")]
    with ElasticJob(train, 7, faults, BSP, hosts={"a": 1, "b": 1, "c": 1}, environment=SMALL) as job:
        lose_hosts(job, "b", "c")
        job.change({"a": 1})
        (result,) = job.finish()
    assert result["calls"] == 2
    assert result["trace"] == ((1, True),) * 7
    assert result["parameters"] == by_numpy(result["trace"], {1: (0,)})


@pytest.mark.multiprocess
def test_with_a_process_set_the_others_go_back_to_the_last_commit_and_are_told_why(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hosts = {"a": 1, "b": 1, "c": 1}
    with ElasticJob(train, 7, [(4, 1, "between posts")], {**BSP, "set": [0, 1]}, hosts=hosts, environment=SMALL) as job:
        job.change(hosts)
        results = job.finish()
    assert [result["calls"] for result in results] == [2] * 3
    assert same([result["trace"] for result in results]) == ((3, True),) * 7
    assert same([result["parameters"] for result in results]) == by_numpy(((3, True),) * 7, {3: (0, 1, 2)})
    assert "process set 1 is one of ranks that there were" in capfd.readouterr().err


@pytest.mark.multiprocess
def test_process_sets_whose_ranks_follow_a_rule_have_the_new_ranks_after_a_loss_and_no_rank_leaves_its_loop() -> None:
    hosts, how = {"a": 1, "b": 1, "c": 1}, {**BSP, "rules": ["even", "last"]}
    faults = [(2, 2, "when others have the results"), (5, 0, "while registering sets"), (8, 1, "host between posts")]
    with ElasticJob(train, 12, faults, how, hosts=hosts, environment=SMALL) as job:
        job.change(hosts)
        job.change(hosts)
        job.change(hosts)  # after the loss while sets were registered
        lose_hosts(job, "b")
        job.change({"a": 1, "c": 1})
        results = job.finish()
    assert [result["calls"] for result in results] == [1] * 2, "somebody has left its function"
    trace = same([result["trace"] for result in results])
    assert same([result["parameters"] for result in results]) == by_numpy(trace, {3: (0, 1, 2), 2: (0, 2)})
    for sets in (result["sets"] for result in results):
        three = sets.index([[0], [1]])
        assert 7 <= three <= 8, (
            "the loss came in this step, or to a rank that did not have the results of the one before"
        )
        assert sets == [[[0, 2], [2]]] * three + [[[0], [1]]] * (12 - three)
    assert [result["sums"] for result in results] == [[1 << 0], [1 << 2]], "sums of the ranks that are in them now"


def test_who_asks_for_mirrors_of_updates_where_there_can_be_none_is_told_why() -> None:
    class Own(algorithms.BSP):
        is_replicable = False

    everybody, some = SimpleNamespace(process_set_id=0), SimpleNamespace(process_set_id=3)
    for algorithm, ranks, why in (
        (Own(), everybody, "the algorithm bsp, which is not replicable"),
        (algorithms.BSP(), some, "process set 3, which ends with a loss"),
        (algorithms.BSP(), everybody, ""),
    ):
        options: Any = SimpleNamespace(algorithm=algorithm, process_set=ranks)
        assert why in why_only_at_commits(options)
        assert bool(why) == bool(why_only_at_commits(options))
