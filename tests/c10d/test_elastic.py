"""Process groups in elastic jobs: they end with the membership in which they were made, with the same error on all
ranks, and others take their place in the same processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fusion_rt.torch as hvd
from fusion_rt.c10d import ddp_hook, renew_process_group
from fusion_rt.c10d.failing import CollectiveError
from fusion_rt.c10d.variables import set_variables
from fusion_rt.core.errors import FusionError
from tests.torch.elastic.jobs import ElasticJob, Worker, same
from tests.torch.elastic.test_membership import data, linear

pytestmark = pytest.mark.multiprocess

PAGE = Path(__file__).parents[2] / "docs" / "torch-distributed.md"
BOTH, ALONE = {"a": 2, "b": 1}, {"a": 2}
LARGE = 300_000  # elements: more than travels in messages
SAMPLES = 96
ADVICE = "make it anew in the function of hvd.elastic.run"


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- DDP --------------------------------------------------------------------------------------------------------------


def train(worker: Worker) -> Any:
    """An epoch of data with DDP in a plain loop. The worker on host b dies in its fifth backward pass."""
    hvd.init()
    dies = hvd.rank() == 2 and os.environ["FUSION_ELASTIC_EPOCH"] == "1"
    inputs, targets = data()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    samples: Any = torch.arange(SAMPLES)
    sampler = hvd.elastic.ElasticSampler(samples, seed=5)
    loader = torch.utils.data.DataLoader(samples, batch_size=2, sampler=sampler)
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, steps=())
    with hvd.elastic.Manager(state, commit_every=3) as manager:
        for mine in manager.batches(loader):
            with manager.step():
                if renew_process_group():
                    ddp = DistributedDataParallel(model)
                    even = dist.new_group(list(range(0, hvd.size(), 2)))
                batches = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(batches, mine)
                optimizer.zero_grad()
                results = ddp(inputs[mine])
                if dies and len(state.steps) == 4:
                    results.register_hook(die)
                (results - targets[mine]).square().mean().backward()
                optimizer.step()
                count = torch.ones(1)
                if dist.get_rank() % 2 == 0:
                    dist.all_reduce(count, group=even)
                    assert count.item() == (hvd.size() + 1) // 2
                state.steps = (*state.steps, torch.cat(batches).tolist())
                if len(state.steps) == 8:
                    worker.say("two ranks")
                    worker.listen()
    return [p.detach().numpy().tobytes() for p in model.parameters()], state.steps


def test_ddp_goes_on_without_a_lost_rank_and_with_a_new_one_as_one_process_would() -> None:
    with ElasticJob(train, hosts=BOTH) as job:
        (reason,) = set(job.change(ALONE))
        assert "rank 2 (host b, " in reason
        assert job.reports() == ["two ranks"] * 2
        job.announce(added=True)
        job.tell("go on")
        job.change(BOTH)
        parameters, steps = same(job.finish())
    assert [len(step) for step in steps] == [6] * 3 + [4] * 6 + [6] * 9
    assert sorted(itertools.chain.from_iterable(steps)) == list(range(SAMPLES))
    inputs, targets = data()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        (model(inputs[step]) - targets[step]).square().mean().backward()
        optimizer.step()
    for mine, expected in zip(parameters, model.parameters(), strict=True):
        found = torch.frombuffer(bytearray(mine), dtype=torch.float32).view_as(expected)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


def example(worker: Worker) -> Any:
    """Runs the page's example. The last of three ranks dies in a backward pass, and another one comes later."""
    (code,) = re.findall(r"```python\n((?:(?!```).)*elastic\.run.*?)```", PAGE.read_text(), re.DOTALL)
    original, is_new = torch.nn.functional.mse_loss, os.environ["FUSION_ELASTIC_EPOCH"] != "1"
    calls = 0

    def mse_loss(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 15 and hvd.size() == 3 and hvd.rank() == 2 and not is_new:
            result.register_hook(die)
        if calls == 25 and hvd.size() == 2:
            worker.say("two ranks")
            worker.listen()
        return original(result, target)

    torch.nn.functional.mse_loss = mse_loss
    names: dict[str, Any] = {}
    exec(code, names)
    return names["model"].weight.tolist(), names["sampler"].epoch, dist.is_initialized()


def test_the_example_of_the_page_trains_whatever_happens_to_the_job() -> None:
    with ElasticJob(example, hosts=BOTH) as job:
        job.change(ALONE)
        assert job.reports() == ["two ranks"] * 2
        job.announce(added=True)
        job.tell("go on")
        job.change(BOTH)
        weights, epoch, is_left = same(job.finish())
    assert (epoch, is_left) == (3, False)
    assert torch.tensor(weights) == pytest.approx(torch.full((1, 8), 1.0), abs=0.2)


# --- operations -------------------------------------------------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    """Returns the text of the error that a call raises."""
    with pytest.raises(CollectiveError) as caught:
        call()
    return str(caught.value)


def operate(worker: Worker) -> Any:
    """Operations in groups of each membership, made by torch's own functions. It does what the test says."""
    hvd.init()
    state: Any = hvd.elastic.TorchState(step=0)
    olds: list[Any] = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        if dist.is_initialized():
            worker.say(same([said(lambda g=group: dist.all_reduce(torch.ones(LARGE), group=g)) for group in olds]))
            dist.destroy_process_group()
        dist.init_process_group("fusion")
        first_two = dist.new_group([0, 1])
        olds[:] = [dist.group.WORLD, *([first_two] if dist.get_rank() < 2 else [])]
        total = torch.full((LARGE,), float(dist.get_rank() + 1))
        for group in olds:
            dist.all_reduce(total, group=group)
        worker.say((dist.get_rank(), dist.get_world_size(), total[-1].item()))
        order = worker.listen()
        if order == "commit":
            state.commit()
        elif order == "lose":
            works = [dist.all_reduce(torch.ones(count), async_op=True) for count in (1, LARGE)]
            receive = dist.irecv(torch.ones(LARGE), 2)
            worker.say("under way")
            errors = [said(work.wait) for work in (*works, receive)]
            errors += [said(lambda g=group: dist.all_reduce(torch.ones(LARGE), group=g)) for group in olds]
            errors += [said(dist.barrier), said(lambda: dist.send(torch.ones(LARGE), 1 - dist.get_rank()))]
            errors += [said(lambda: dist.new_group([0, 1])), said(dist.group.WORLD.monitored_barrier)]
            worker.say(same(errors))
            dist.all_reduce(torch.ones(1))

    run(state)
    dist.destroy_process_group()
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_operations_of_a_lost_membership_fail_alike_and_those_of_the_next_are_right() -> None:
    """Rank 2 is killed while operations of the others are under way that it has not submitted."""
    with ElasticJob(operate, hosts=BOTH) as job:
        assert job.reports() == [(0, 3, 12.0), (1, 3, 12.0), (2, 3, 6.0)]  # the first two add up twice
        for hand in job.hands[:2]:
            hand.tell("lose")
            assert job.report(hand) == "under way"
        job.kill(job.hands[2])
        error = same(job.reports())
        assert error.startswith("rank 2 (host b, ")
        assert ADVICE in error
        assert same(job.change(ALONE)) == error
        assert same(job.reports()) == error
        assert job.reports() == [(0, 2, 6.0), (1, 2, 6.0)]
        job.announce(added=True)
        job.tell("commit")
        job.change(BOTH)
        old = [job.report(hand) for hand in job.hands[:2]]
        assert same(old).startswith("ranks have come or are to go")
        assert ADVICE in old[0]
        assert job.reports() == [(0, 3, 12.0), (1, 3, 12.0), (2, 3, 6.0)]
        job.tell("end")
        assert job.finish() == [3.0] * 3


def open_or_die(worker: Worker) -> Any:
    """Opens the default group, unless it is to die before, or in the midst of it."""
    hvd.init()
    state: Any = hvd.elastic.TorchState(step=0)

    @hvd.elastic.run
    def run(state: Any) -> None:
        order = worker.listen()
        if order == "serve":
            set_variables()  # and with them the store in which the others wait
        if order != "open":
            die()
        renew_process_group()

    run(state)
    return dist.get_world_size(), renew_process_group()


def test_ranks_that_are_lost_while_a_group_is_opened_leave_nobody_waiting() -> None:
    with ElasticJob(open_or_die, hosts={"a": 4}) as job:
        for orders in (["open", "open", "open", "die"], ["serve", "open", "open"]):
            for hand, order in zip(job.hands, orders, strict=True):
                hand.tell(order)
            error = same(job.change({"a": len(orders) - 1}))
            assert ADVICE in error
        job.tell("open")
        assert job.finish() == [(2, False)] * 2


# --- what cannot be right ---------------------------------------------------------------------------------------------


def try_all(worker: Worker) -> Any:
    """Returns the texts of what is refused outside of the function and in it, and of a loss while a group is open."""
    hvd.init()
    refused = []

    def refuse(kind: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            call()
        refused.append(str(caught.value))

    refuse(FusionError, lambda: dist.init_process_group("fusion"))
    refuse(FusionError, lambda: dist.init_process_group("fusion", store=dist.HashStore(), rank=0, world_size=1))
    model = linear()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state: Any = hvd.elastic.TorchState(model, optimizer)
    calls: list[int] = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        calls.append(hvd.size())
        if hvd.size() == 2:
            refuse(FusionError, lambda: dist.init_process_group("gloo"))
        renew_process_group()
        if hvd.size() == 2:
            refuse(ValueError, lambda: ddp_hook("topk(density=0.1)"))
            refuse(ValueError, lambda: hvd.elastic.TorchState(DistributedDataParallel(model)))
            mesh = init_device_mesh("cpu", (2,))
            sharded = torch.nn.Module()
            sharded.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh))
            refuse(ValueError, lambda: hvd.elastic.TorchState(sharded))
            dist.barrier()
        if hvd.size() == 2 and hvd.rank() == 1:
            die()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    run(state)
    dist.destroy_process_group()
    return refused, calls


def test_what_cannot_be_right_is_refused_and_a_loss_ends_the_function_where_a_group_is_open() -> None:
    with ElasticJob(try_all, hosts=ALONE) as job:
        (reason,) = job.change({"a": 1})
        assert reason.endswith(
            "(and in place no rank can go on: a process group of torch.distributed is one of ranks that there were, "
            "which the script has to make anew)"
        )
        ((refused, calls),) = job.finish()
    assert calls == [2, 1]
    early, given, gloo, hook, ddp, shard = refused
    assert early == given
    assert early.startswith("this job of fusionrun is elastic, and a process group has the ranks of one membership")
    assert gloo.startswith(
        "a process group of the backend gloo knows nothing of memberships, and this job of fusionrun"
    )
    assert "do not go with an elastic job of fusionrun" in hook
    assert ddp.startswith("a DDP module belongs to a process group, and so to one membership of an elastic job")
    assert shard.startswith("the parameter 'weight' is a DTensor")
