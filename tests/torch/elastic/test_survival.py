"""Losses that the ranks which are left survive in their loops: sums are exact, and parameters the same to the bit.

Most losses are pretended: a rank takes its connection for broken at a point that the test names, leaves the epoch, and
comes back with the others in the next one. To these it is a rank that was lost.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.elastic import survival
from fusion_rt.torch.elastic.survival import Conclusion, RankReport, conclude
from fusion_rt.torch.sync.overlap.pending_gradients import PendingGradients
from fusion_rt.torch.sync.step_schedule import Outcome
from fusion_rt.torch.sync.synchroniser import Synchroniser
from tests.torch.elastic.jobs import ElasticJob, Worker, same

HERE = {"a": 3}
SMALL = {"HOROVOD_FUSION_THRESHOLD": "256"}  # bytes: each parameter has a bucket of its own


# --- what reports lead to ---------------------------------------------------------------------------------------------


def report(completed: int, begun: int = 0, **changes: Any) -> RankReport:
    known = RankReport(has_values=True, stays=True, completed=completed, begun=begun or completed + 1, failed=(0,))
    return known._replace(last=((0, Outcome.TAKEN),))._replace(**changes)


def test_ranks_that_have_completed_the_same_leave_out_the_step_under_way() -> None:
    assert conclude([report(4), report(4)]) == Conclusion(left_out=5)


def test_what_some_have_begun_after_the_step_under_way_is_left_out_too() -> None:
    assert conclude([report(4, begun=6), report(4)]) == Conclusion(left_out=6)


def test_a_rank_that_is_a_step_behind_is_healed_from_the_first_one_that_has_it() -> None:
    found = conclude([report(3), report(4), report(4)])
    assert found == Conclusion(left_out=5, behind=(0,), root=1, healed=((0, Outcome.TAKEN),))


def test_all_go_on_from_the_last_commit_if_what_they_have_does_not_fit_together() -> None:
    fits = report(4)
    for other in (
        report(2),  # two steps
        report(4, stays=False),
        report(4, generation=1),
        report(4, is_spoiled=True),
        report(3, failed=(1,)),  # of another optimizer
        report(5, last=((0, Outcome.OPEN),)),
        report(5, has_memory=True),
    ):
        assert conclude([fits, other]) is None, other
        assert conclude([other, fits]) is None, other


def test_a_rank_whose_healing_was_interrupted_is_healed_again() -> None:
    found = conclude([report(3, is_spoiled=True), report(4)])
    assert found is not None
    assert (found.behind, found.root) == ((0,), 1)


# --- jobs -------------------------------------------------------------------------------------------------------------


def pretend() -> HorovodInternalError:
    """Has this rank lose its connection."""
    runtime().client.channel.fail("this connection is pretended to be broken")
    return HorovodInternalError("this connection is pretended to be broken")


def once(owner: Any, name: str, action: Callable[..., Any]) -> None:
    """Replaces a method for its next call, which `action(method, *args)` makes instead."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, method)
        return action(functools.partial(method, *args, **kwargs))

    setattr(owner, name, replaced)


def after(call: Callable[[], Any]) -> Any:
    """Loses the connection when the results are there, but not taken yet."""
    call()
    raise pretend()


def before(call: Callable[[], Any]) -> Any:
    pretend()
    return call()


def received(call: Callable[[], Any]) -> Any:
    sync = call.func.__self__  # type: ignore[attr-defined]
    sync.await_results()
    sync.await_sent()
    raise pretend()


def lose_at(point: str, optimizer: Any, model: torch.nn.Module) -> None:
    """Has this rank lose its connection at a point of the step that begins."""
    sync: Synchroniser = optimizer._sync
    if point == "before the first bucket":
        pretend()
    elif point == "between buckets":

        def lose(_: Any) -> None:
            handle.remove()
            pretend()

        handle = list(model.parameters())[1].register_post_accumulate_grad_hook(lose)
    elif point == "before results":
        once(sync, "receive", before)
    elif point == "when others have the results":
        once(sync, "receive", received)
    elif point == "when others have landed":
        once(PendingGradients, "await_end", after)
    elif point == "in step":
        once(optimizer, "_step", before)
    elif point == "while agreeing":
        pretend()
        once(survival, "allgather_object", before)
    elif point == "while healing":
        once(sync, "receive", received)
        once(survival, "heal", before)
    elif point == "donor while healing":
        once(survival, "heal", before)


def make_plain() -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(4)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-9, 9, (3, 3)))
    return model


def make(overlap: str, algorithm: str) -> tuple[torch.nn.Module, Any]:
    model = make_plain()
    plain = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    names = model.named_parameters()
    if algorithm:
        return model, hvd.DistributedOptimizer(plain, names, algorithm=algorithm)
    return model, hvd.DistributedOptimizer(plain, names, op=hvd.Sum, overlap=overlap)


def loss_of(model: torch.nn.Module, who: int, step: int) -> torch.Tensor:
    """A loss whose gradients are integers that nobody else has, whatever the parameters are."""
    generator = torch.Generator().manual_seed(1000 * step + who)
    inputs = torch.randint(-9, 9, (4, 3, 3), generator=generator).to(torch.float64)
    model(torch.zeros(1, 3, dtype=torch.float64))  # which overlap waits for
    return torch.stack([(p * x).sum() for p, x in zip(model.parameters(), inputs, strict=True)]).sum()


Fault = tuple[int, int, str]  # the step, who, and at which point


def train(worker: Worker, steps: int, faults: Sequence[Fault], overlap: str, algorithm: str) -> Any:
    hvd.init()
    who = hvd.rank()
    model, optimizer = make(overlap, algorithm)
    state: Any = hvd.elastic.TorchState(model, optimizer, step=0)
    calls, resets, left_out = [0], [0], list[int]()
    state.register_reset_callbacks([lambda: resets.__setitem__(0, resets[0] + 1)])

    @hvd.elastic.run
    def run(state: Any) -> None:
        calls[0] += 1
        due = list(faults)
        while state.step < steps:
            optimizer.zero_grad()
            for fault in [fault for fault in due if fault[0] == state.step]:
                due.remove(fault)
                if fault[1] == who:
                    lose_at(fault[2], optimizer, model)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            loss_of(model, who, state.step).backward()
            optimizer.step()
            if all(map(torch.equal, before, model.parameters())):
                left_out.append(state.step)
            state.step += 1
        if overlap != "none":
            optimizer.synchronize_parameters()

    run(state)
    values = [parameter.detach().tolist() for parameter in model.parameters()]
    momenta = [optimizer.state[parameter]["momentum_buffer"].tolist() for parameter in model.parameters()]
    return {"values": values, "momenta": momenta, "calls": calls[0], "resets": resets[0], "left_out": left_out}


def alone(steps: int, left_out: set[int], ranks: Sequence[int] = range(3)) -> tuple[Any, Any]:
    """What one process comes to that leaves these steps out."""
    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for who in ranks:
            loss_of(model, who, step).backward()
        if step not in left_out:
            optimizer.step()
    values = [parameter.detach().tolist() for parameter in model.parameters()]
    return values, [optimizer.state[parameter]["momentum_buffer"].tolist() for parameter in model.parameters()]


def check(results: list[Any], steps: int, losses: int) -> None:
    """Nobody has left its function, a step was left out for each loss, and the others count to the bit."""
    assert [result["calls"] for result in results] == [1] * len(results), "somebody has left its function"
    assert [result["resets"] for result in results] == [losses] * len(results)
    left_out = same([result["left_out"] for result in results])
    for loss, step in enumerate(left_out):
        assert step in (4 * loss + 2, 4 * loss + 3)  # the second where some had the results of the first
    assert len(left_out) == losses
    values, momenta = alone(steps, set(left_out))
    assert same([result["values"] for result in results]) == values
    assert same([result["momenta"] for result in results]) == momenta


def survive(points: Sequence[str], overlap: str) -> tuple[list[Any], int]:
    """Results of a job in which ranks are lost at these points, one each in every fourth step."""
    faults = [(2 + 4 * number, number % 3, point) for number, point in enumerate(points)]
    steps = 4 * len(points) + 2
    with ElasticJob(train, steps, faults, overlap, "", hosts=HERE, environment=SMALL) as job:
        for point in points:
            job.change(HERE)
            if point in AGAIN:
                job.change(HERE)
        return job.finish(), steps


AGAIN = ("while agreeing", "while healing", "donor while healing")
POINTS = (
    "before the first bucket",
    "between buckets",
    "before results",
    "when others have the results",
    "in step",
    "while agreeing",
)


@pytest.mark.multiprocess
def test_a_loss_at_any_point_of_a_step_leaves_one_step_out() -> None:
    results, steps = survive(POINTS, "none")
    check(results, steps, len(POINTS))


@pytest.mark.multiprocess
@pytest.mark.parametrize("overlap", ["forward", "stale"])
def test_a_loss_leaves_one_step_out_where_updates_are_applied_later(overlap: str) -> None:
    points = ("before the first bucket", "between buckets", "when others have landed", "while agreeing")
    results, steps = survive(points, overlap)
    assert [result["calls"] for result in results] == [1] * len(results), "somebody has left its function"
    values, momenta = same([(result["values"], result["momenta"]) for result in results])
    # A step is left out when it is to be applied, or the next one, where some ranks have applied it already.
    candidates = itertools.product(*((4 * loss + 1, 4 * loss + 2, 4 * loss + 3) for loss in range(len(points))))
    assert [left_out for left_out in candidates if alone(steps, set(left_out)) == (values, momenta)]


@pytest.mark.multiprocess
def test_a_healing_that_is_interrupted_begins_again() -> None:
    """On the rank that is healed all of it; where others have healed it already, all go on from the last commit."""
    results, _ = survive(("while healing",), "none")
    assert same([result["calls"] for result in results]) in (1, 2)
    assert same([(result["values"], result["momenta"]) for result in results])


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("overlap", ["none", "forward", "stale"])
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_lost_wherever_all_have_the_same_to_the_bit(overlap: str, seed: int) -> None:
    """Sometimes two at once, or the next before the last one is over; now and then that leads back to the commit."""
    choice = random.Random(seed)
    landing = {"before results", "when others have the results", "in step", "while healing"}
    points = [point for point in (*POINTS, *AGAIN) if overlap == "none" or point not in landing]
    points += ["when others have landed"] if overlap != "none" else []
    faults: list[Fault] = []
    steps = 60
    for step in range(2, steps - 2, 2):
        for who in choice.sample(range(3), choice.choice((0, 1, 1, 2))):
            faults.append((step + choice.randrange(2), who, choice.choice(points)))
    with ElasticJob(train, steps, faults, overlap, "", hosts=HERE, environment=SMALL) as job:
        while True:
            job.await_word()
            if any(hand.reports for hand in job.hands):
                break
            job.change(HERE)
        results = job.finish()
    same([result["values"] for result in results])
    same([result["momenta"] for result in results])
    calls = same([result["calls"] for result in results])
    if calls == 1:
        left_out = same([result["left_out"] for result in results])
        if overlap == "none":
            assert alone(steps, set(left_out)) == (results[0]["values"], results[0]["momenta"])


# --- scripts ----------------------------------------------------------------------------------------------------------


def train_by(worker: Worker, script: str, faults: Sequence[Fault]) -> Any:
    """Six steps of a script that is written in one way or another; returns all that has to be the same."""
    hvd.init()
    who = hvd.rank()
    model, optimizer = make("none", "")
    other, second = make("none", "")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    if script == "accumulation":
        optimizer.set_backward_passes_per_step(2)
    state: Any = hvd.elastic.TorchState(model, optimizer, other=other, second=second, scaler=scaler, step=0)
    calls, losses = [0], list[Any]()

    def close(loss: torch.Tensor) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss.backward()
            return loss

        return closure

    @hvd.elastic.run
    def run(state: Any) -> None:
        calls[0] += 1
        while state.step < 6:
            optimizer.zero_grad()
            second.zero_grad()
            for fault in faults:
                if fault[:2] == (state.step, who):
                    lose_at(fault[2], optimizer, model)
            loss = loss_of(model, who, state.step)
            if script == "accumulation":
                loss.backward()
                loss_of(model, who, 100 + state.step).backward()
                optimizer.step()
            elif script == "two optimizers":
                (loss + loss_of(other, who, 100 + state.step)).backward()
                optimizer.step()
                second.step()
            elif script == "in turn":
                loss.backward()
                optimizer.step()
                loss_of(other, who, 100 + state.step).backward()
                second.step()
            elif script == "closure":
                losses.append(float(optimizer.step(close(loss))))
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            state.step += 1

    run(state)
    found: list[Any] = [calls[0], scaler.state_dict(), len(losses), optimizer._schedule.passes_left]
    for one in (*model.parameters(), *other.parameters()):
        found.append(one.detach().tolist())
    for one in (optimizer, second):
        found.append([entry["momentum_buffer"].tolist() for entry in one.state.values()])
    return found


SCRIPTS = ("accumulation", "two optimizers", "in turn", "closure", "scaler")
CASES = {(script, point) for script in SCRIPTS for point in ("between buckets", "when others have the results")}
CASES -= {("closure", "when others have the results")}  # they go on to the reduction of the loss, and leave there


@pytest.mark.multiprocess
@pytest.mark.parametrize(("script", "point"), sorted(CASES))
def test_scripts_of_many_kinds_leave_a_step_out(script: str, point: str) -> None:
    with ElasticJob(train_by, script, [(2, 1, point)], hosts=HERE, environment=SMALL) as job:
        job.change(HERE)
        found = same(job.finish())
    calls, scaler, losses, passes_left = found[:4]
    assert calls == 1, "a rank has left its function"
    if script == "scaler":
        assert (scaler["scale"], scaler["_growth_tracker"]) == (8.0, 2)  # of five steps that were taken
    assert losses == (6 if script == "closure" else 0)
    assert passes_left == (2 if script == "accumulation" else 1)


# --- local steps ------------------------------------------------------------------------------------------------------


def local_alone(outer: tuple[float, float] | None, steps: int, lost: int) -> Any:
    """Parameters of two models that take local steps, and exchange after every second one but that at which a round is
    lost."""
    models = [make_plain() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5) for model in models]
    starts = [parameter.detach().clone() for parameter in models[0].parameters()]
    velocities = [torch.zeros_like(start) for start in starts]
    for step in range(steps):
        for who, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, who, step).backward()
            optimizer.step()
        if step % 2 == 0 or step == lost:
            continue
        for mine, theirs, start, velocity in zip(*(m.parameters() for m in models), starts, velocities, strict=True):
            if outer is None:
                start.copy_((mine + theirs).detach() / 2)
            else:
                change = ((start - mine) + (start - theirs)).detach() / 2
                velocity.mul_(outer[1]).add_(change)
                start.sub_(change + outer[1] * velocity, alpha=outer[0])
            mine.detach().copy_(start)
            theirs.detach().copy_(start)
    return [parameter.detach().tolist() for parameter in models[0].parameters()]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("algorithm", "outer"),
    [("local_sgd(steps=2)", None), ("diloco(steps=2, outer_rate=0.5, outer_momentum=0.5)", (0.5, 0.5))],
)
def test_a_round_that_is_lost_leaves_local_steps_and_the_outer_optimizer_as_they_were(
    algorithm: str, outer: tuple[float, float] | None
) -> None:
    with ElasticJob(train, 8, [(3, 1, "before the first bucket")], "none", algorithm, hosts={"a": 2}) as job:
        job.change({"a": 2})
        results = job.finish()
    assert [result["calls"] for result in results] == [1, 1]
    assert same([result["values"] for result in results]) == local_alone(outer, 8, 3)


# --- samples ----------------------------------------------------------------------------------------------------------


def train_on_samples(worker: Worker, samples: int, fault: Fault) -> Any:
    """An epoch from a loader; the samples of each step, and whether it was left out."""
    hvd.init()
    who = hvd.rank()
    model, optimizer = make("none", "")
    sampler = hvd.elastic.ElasticSampler(range(samples), seed=5)
    loader = torch.utils.data.DataLoader(range(samples), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler)
    steps: list[tuple[list[int], bool]] = []
    calls = [0]

    @hvd.elastic.run
    def run(state: Any) -> None:
        calls[0] += 1
        for index, batch in enumerate(loader):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            if (index, who) == fault[:2]:
                if fault[2] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                lose_at(fault[2], optimizer, model)
            loss_of(model, who, index).backward()
            optimizer.step()
            sampler.record_batch(index, len(batch))
            steps.append((batch.tolist(), all(map(torch.equal, before, model.parameters()))))

    run(state)
    values = [parameter.detach().tolist() for parameter in model.parameters()]
    return {"calls": calls[0], "steps": steps, "values": values}


@pytest.mark.multiprocess
@pytest.mark.parametrize("point", ["killed", "when others have the results"])
def test_each_sample_is_trained_on_once_but_for_those_of_the_step_that_is_left_out(point: str) -> None:
    left = {"a": 2 if point == "killed" else 3}
    with ElasticJob(train_on_samples, 60, (3, 2, point), hosts=HERE) as job:
        job.change(left)
        results = job.finish()
    assert same([result["calls"] for result in results]) == 1
    assert same([result["values"] for result in results])
    kept = Counter(sample for result in results for batch, is_left_out in result["steps"] for sample in batch
                   if not is_left_out)  # fmt: skip
    dropped = {
        sample for result in results for batch, is_left_out in result["steps"] for sample in batch if is_left_out
    }
    assert [sum(is_left_out for _, is_left_out in result["steps"]) for result in results] == [1] * left["a"]
    assert not dropped & set(kept)
    if point == "killed":  # what it had done in the three steps before nobody else has
        assert len(set(range(60)) - set(kept) - dropped) == 6
    else:
        assert set(range(60)) == set(kept) | dropped
    assert kept.total() - len(kept) <= left["a"]  # at the end of the epoch some are repeated, so that all have as many
