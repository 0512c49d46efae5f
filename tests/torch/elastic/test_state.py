"""States: what commit saves, restore brings back, and sync makes the same on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch import elastic
from fusion_rt.torch.elastic import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, TorchState
from fusion_rt.torch.sync import broadcasting
from tests.harness import on_ranks


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().sum().backward()
        optimizer.step()


def contents(*things: Any) -> list[torch.Tensor]:
    """Copies of all tensors in the state dicts of these."""
    found: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.detach().clone())
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)

    for thing in things:
        collect(thing.state_dict())
    return found


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=0)


def noting(calls: list[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does the same as the original, and notes each call."""

    def noted(*given: Any) -> Any:
        calls.append(name)
        return original(*given)

    return noted


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of one rank, without a job."""
    state: Any = elastic.state
    monkeypatch.setattr(state, "broadcast_object", lambda obj, root_rank=0: obj)
    monkeypatch.setattr(state, "broadcast_items", lambda items, root_rank: None)


def object_state(**values: Any) -> ObjectState:
    return ObjectState(lambda obj: obj, lambda: 0, **values)


def test_objects_are_attributes_and_go_back_to_what_was_committed() -> None:
    state: Any = object_state(epoch=0, best=None)
    state.epoch, state.best = 3, 0.5
    state.restore()
    assert (state.epoch, state.best) == (0, None)
    state.epoch = 4
    state.commit()
    state.epoch = 5
    state.restore()
    assert state.epoch == 4


def test_names_without_an_underscore_are_the_scripts() -> None:
    """`commits` is the one of Horovod's own test of elastic jobs."""
    values = {name: 0 for name in ("commits", "batch", "epoch", "handlers", "donors", "saved", "last", "rank")}
    for state in (object_state(**values), TorchState(**values)):
        public = {name for name in vars(state) if not name.startswith("_")}
        assert public - {"model", "optimizer"} == set(values)


@pytest.mark.usefixtures("alone")
def test_commits_that_a_script_counts_are_counted_once() -> None:
    state: Any = TorchState(torch.nn.Linear(1, 1), commits=0)
    for _ in range(3):
        state.commits += 1
        state.commit()
    assert state.commits == 3
    state.commits += 1
    state.restore()
    assert state.commits == 3


@pytest.mark.parametrize("name", ["commit", "sync", "_donors", "_saved_state"])
def test_a_value_that_would_hide_something_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot have a value named '{name}', which would hide \w+State\.{name}"):
        object_state(**{name: 0})
    with pytest.raises(ValueError, match=f"cannot have a value named '{name}'"):
        TorchState(**{name: torch.nn.Linear(1, 1)})


def test_a_sync_takes_what_was_changed_since_the_commit() -> None:
    state: Any = object_state(epoch=0)
    state.epoch = 1
    state.sync()
    assert state.epoch == 1
    state.epoch = 2
    state.restore()
    assert state.epoch == 1


@pytest.mark.usefixtures("alone")
def test_model_optimizer_and_scheduler_go_back_as_often_as_one_likes() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state: Any = TorchState(model, optimizer, scheduler=scheduler, batch=0)
    assert (state.model, state.optimizer, state.scheduler) == (model, optimizer, scheduler)
    train(model, optimizer)
    scheduler.step()
    state.batch = 3
    state.commit()
    committed = contents(model, optimizer)
    for _ in range(2):  # an optimizer works on the tensors it is given: the second time shows that they were copies
        train(model, optimizer)
        scheduler.step()
        state.batch += 1
        state.restore()
        assert_same(contents(model, optimizer), committed)
        assert state.batch == 3
        assert scheduler.last_epoch == 1
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.usefixtures("alone")
def test_what_an_optimizer_has_in_another_dtype_than_its_parameters_goes_back_bit_by_bit() -> None:
    model = torch.nn.Linear(2, 3).bfloat16()
    optimizer = torch.optim.NAdam(model.parameters())
    state: Any = TorchState(model, optimizer)
    train(model.float(), optimizer)
    model.bfloat16()
    state.commit()
    committed = contents(optimizer)
    assert {tensor.dtype for tensor in committed} >= {torch.float32}
    state.restore()
    assert_same(contents(optimizer), committed)


@on_ranks
def test_an_optimizer_goes_back_together_with_the_distributed_one_that_was_made_from_it() -> None:
    model = torch.nn.Linear(2, 3)
    plain = torch.optim.Adam(model.parameters())
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    state: Any = hvd.elastic.TorchState(model, plain)
    for load in (state.sync, state.restore):
        load()
        train(model, optimizer)
        assert_same(contents(plain), contents(optimizer))


def wrapped(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, **options)


@on_ranks
def test_ranks_are_known_to_have_the_same_where_each_step_all_reduces_the_gradients_of_all() -> None:
    def is_alike(*optimizers: Any) -> bool:
        values = {f"optimizer{index}": optimizer for index, optimizer in enumerate(optimizers)}
        return hvd.elastic.TorchState(torch.nn.Linear(2, 2), **values)._level() != ""

    def plain() -> torch.optim.Optimizer:
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)

    some = hvd.add_process_set([0])
    assert is_alike(wrapped(plain()), wrapped(plain(), overlap="forward"))
    assert not is_alike(wrapped(plain(), process_set=some)), "others have parameters of their own"
    assert not is_alike(wrapped(plain(), algorithm="local_sgd(steps=2)"))
    assert not is_alike(wrapped(plain(), op=hvd.Adasum)), "each has momenta of its own"
    assert not is_alike(wrapped(plain()), plain()), "who knows what the script does with a plain one"
    assert not is_alike()
    hvd.remove_process_set(some)


@on_ranks
def test_values_that_only_some_ranks_have_set_are_noticed() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = wrapped(torch.optim.Adam(model.parameters()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    sampler = hvd.elastic.ElasticSampler(range(8))
    state: Any = hvd.elastic.TorchState(
        model, optimizer, scheduler=scheduler, sampler=sampler, best=0.0, mean=torch.zeros(3), epoch=["epoch", "best"]
    )
    state.sync()
    assert len(set(hvd.allgather_object(state._level()))) == 1
    for change in (
        lambda: setattr(state, "best", 0.5),
        lambda: state.mean.add_(1),
        scheduler.step,
        lambda: sampler.record_batch(0, 1),
    ):
        if hvd.rank() == 0:
            change()
        assert len(set(hvd.allgather_object(state._level()))) == 2
        state.sync()
        assert len(set(hvd.allgather_object(state._level()))) == 1
    state.best = (step for step in ())  # which cannot be pickled
    assert state._level() == ""


@pytest.mark.usefixtures("alone")
def test_another_model_may_take_the_place_of_the_first() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    state: Any = TorchState(first)
    assert state.optimizer is None
    state.model = second
    committed, untouched = contents(second), contents(first)
    with torch.no_grad():
        second.weight.zero_()
    state.restore()
    assert_same(contents(second), committed)
    assert_same(contents(first), untouched)


def test_news_of_hosts_interrupt_once() -> None:
    state: Any = object_state(epoch=0)
    state.check_host_updates()
    state.on_hosts_updated(1.0, HostUpdateResult.added)
    state.on_hosts_updated(2.0, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert not caught.value.skip_sync
    state.on_hosts_updated(2.0, HostUpdateResult.added)  # known already
    state.commit()
    state.on_hosts_updated(3.0, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync


def test_reset_callbacks_are_called_in_order_and_old_news_forgotten() -> None:
    state: Any = object_state()
    called: list[int] = []
    state.register_reset_callbacks([lambda: called.append(1)])
    state.register_reset_callbacks([lambda: called.append(2)])
    state.on_hosts_updated(1.0, HostUpdateResult.added)
    state.on_reset()
    assert called == [1, 2]
    state.check_host_updates()


@on_ranks
def test_all_ranks_have_the_values_of_rank_0_after_a_sync() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + hvd.rank())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    sampler = hvd.elastic.ElasticSampler(range(16))
    if hvd.rank() == 0:
        train(model, optimizer)
        scheduler.step()
        sampler.record_batch(0, 2)
    state: Any = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=10 + hvd.rank())
    state.sync()
    assert state.epoch == 10
    assert sampler.processed_num == 4
    assert len(sampler) == 6
    assert scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    mine = contents(model, optimizer)
    assert len(mine) == 4 + 3 + 3 * 4
    assert hvd.rank() == 0 or all(p.grad is None for p in model.parameters()), "a newcomer alone would step with it"
    for other in hvd.allgather_object(mine):
        assert_same(other, mine)

    train(model, optimizer)
    state.epoch = 11
    state.restore()  # to the sync, on the ranks whose values came with it, too
    assert state.epoch == 10
    assert_same(contents(model, optimizer), mine)


@on_ranks
def test_a_sync_of_many_things_waits_for_others_only_twice() -> None:
    torch.manual_seed(hvd.rank())
    models = [torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)]  # whose tensors have the same names
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1 + hvd.rank()) for model in models]
    if hvd.rank() == 0:
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer)
    state: Any = hvd.elastic.TorchState(
        models[0], optimizers[0], other=models[1], other_optimizer=optimizers[1], epoch=hvd.rank()
    )
    waits: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast_object", "broadcast_all"):
            patch.setattr(broadcasting, name, noting(waits, name, getattr(broadcasting, name)))
        state.sync()
    assert waits == ["broadcast_object", "broadcast_all"]
    mine = contents(*models, *optimizers)
    assert len(mine) == 2 * (2 + 3 * 2)
    for other in hvd.allgather_object((state.epoch, mine)):
        assert other[0] == 0
        assert_same(other[1], mine)
    assert not torch.equal(models[0].weight, models[1].weight)


@on_ranks
def test_all_ranks_are_interrupted_when_rank_0_has_news() -> None:
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)
    if hvd.rank() == 0:
        state.on_hosts_updated(1.0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.commit()


def test_what_is_saved_is_a_copy() -> None:
    model = torch.nn.Linear(2, 2)
    handler = elastic.state._handler_of(model)
    assert handler is not None
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.weight.add_(1)
    handler.restore()
    torch.testing.assert_close(model.weight.data, before["weight"])
