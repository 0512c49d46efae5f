"""Parameters, optimizer state and objects from one rank to all, and from all to all."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from tests.harness import on_ranks
from tests.torch.training import (
    MakeOptimizer,
    assert_equal_on_all_ranks,
    assert_same,
    batch_of,
    loss_of,
    make_model,
    my_batch,
)

MAKERS: dict[str, MakeOptimizer] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "stateless": functools.partial(torch.optim.SGD, lr=0.1),
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
    "state of another dtype": functools.partial(torch.optim.NAdam, lr=0.01),
    "rate in a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "options of every kind": lambda parameters: torch.optim.Rprop(
        parameters, etas=(0.5 - hvd.rank() / 8, 1.2), step_sizes=(1e-6, 50 + hvd.rank())
    ),
}


@on_ranks
def test_parameters_of_one_rank_reach_all() -> None:
    for root in range(hvd.size()):
        expected = make_model(root)
        for parameters in (
            lambda net: net.state_dict(),
            lambda net: list(net.named_parameters()),
            lambda net: net.named_parameters(),
            lambda net: net.parameters(),
        ):
            model = make_model(hvd.rank())
            hvd.broadcast_parameters(parameters(model), root_rank=root)
            assert_same(model, expected, rtol=0, atol=0)


@on_ranks
def test_buffers_of_every_kind_are_broadcast() -> None:
    norm = torch.nn.BatchNorm2d(2000)
    norm.num_batches_tracked += hvd.rank() + 5
    norm.running_mean += hvd.rank()
    hvd.broadcast_parameters(norm.state_dict(), root_rank=1)
    assert norm.num_batches_tracked.item() == 6
    assert norm.running_mean.eq(1).all()


@on_ranks
def test_parameters_that_are_none_are_left_out() -> None:
    weight = torch.full((3,), float(hvd.rank()))
    hvd.broadcast_parameters({"weight": weight, "bias": None}, root_rank=1)
    hvd.broadcast_parameters([("bias", None)], root_rank=0)
    assert weight.eq(1).all()


@on_ranks
def test_within_a_process_set() -> None:
    some = hvd.add_process_set(range(1, hvd.size()))
    if some.included():
        model = make_model(hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=1, process_set=some)
        optimizer = MAKERS["sgd"](model.parameters())
        if hvd.rank() == 1:
            optimizer.step(functools.partial(closure_of, model, optimizer, 0, 0))
        hvd.broadcast_parameters(model.state_dict(), root_rank=1, process_set=some)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1, process_set=some)
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        states = hvd.allgather_object(model.state_dict(), process_set=some)
        for state in states:
            assert_equal_states(state, states[0])
        assert hvd.broadcast_object(hvd.rank(), 1, process_set=some) == 1
        assert hvd.allgather_object(hvd.rank(), "ranks", process_set=some) == some.ranks
    else:
        with pytest.raises(ValueError, match="Rank 0 is not a member of the provided process set"):
            hvd.broadcast_object(0, 1, process_set=some)
    hvd.barrier()
    hvd.remove_process_set(some)


@on_ranks
def test_what_is_no_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(3, root_rank=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'extra' is a dict, not a tensor"):
        hvd.broadcast_parameters({"extra": {}}, root_rank=0)


@pytest.mark.parametrize("name", MAKERS)
@on_ranks
def test_optimizer_state_of_one_rank_reaches_all(name: str) -> None:
    root = 1
    model = make_model()
    plain = MAKERS[name](model.parameters())
    if hvd.rank() == root:  # as after a restart from a checkpoint that only the root reads
        for step in range(3):
            closure = functools.partial(closure_of, model, plain, step)
            plain.step(closure)
        plain.param_groups[0]["lr"] = 0.123
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    before = copy.deepcopy(plain.state_dict()) if hvd.rank() == root else None
    group = plain.param_groups[0]
    hvd.broadcast_optimizer_state(plain, root_rank=root)
    assert plain.param_groups[0] is group, "a scheduler made earlier would change the wrong group"
    assert group["lr"] == 0.123
    everybodys = hvd.allgather_object(plain.state_dict())
    for state in everybodys:
        assert_equal_states(state, everybodys[root])
    if before is not None:
        assert_equal_states(plain.state_dict(), before)
    plain.step(functools.partial(closure_of, model, plain, 7, 0))
    assert_equal_on_all_ranks(model)


@on_ranks
def test_an_optimizer_without_state_has_gradients_afterwards_as_in_horovod() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()))
    before = copy.deepcopy(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert model[0].weight.grad is None
    assert all(p.grad is not None and not p.grad.any() for p in model[2:].parameters())
    assert_equal_states(model.state_dict(), before)  # which weight decay changes in Horovod


@on_ranks
def test_no_rank_gets_gradients_that_another_one_does_not_get() -> None:
    model = make_model()
    optimizer = MAKERS["sgd"](model.parameters())
    if hvd.rank() == 1:
        closure_of(model, optimizer, 0)
        optimizer.step()
        optimizer.zero_grad()
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks
def test_the_state_of_a_distributed_optimizer_can_be_broadcast() -> None:
    model = make_model(hvd.rank())
    optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, my_batch(step)).backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=step)
    assert_equal_on_all_ranks(model)


@on_ranks
def test_objects_are_broadcast() -> None:
    for root in range(hvd.size()):
        for content in (None, {"a": [1, 2, (3,)]}, "x" * 50_000, b""):
            expected = (root, content)
            found = hvd.broadcast_object((hvd.rank(), content) if hvd.rank() == root else None, root)
            assert found == expected
            assert hvd.broadcast_object(expected, root, name="object") == expected
    local = [hvd.rank()]
    assert (hvd.broadcast_object(local, 1) is local) == (hvd.rank() == 1)


@on_ranks
def test_objects_about_as_long_as_the_first_message_are_broadcast() -> None:
    overhead = len(pickle.dumps("x" * 5000, protocol=pickle.DEFAULT_PROTOCOL)) - 5000
    for length in range(4096 - overhead - 12, 4096 - overhead + 4):
        text = "x" * length
        assert hvd.broadcast_object(text if hvd.rank() == 0 else None, 0) == text


@on_ranks
def test_objects_are_gathered() -> None:
    for length in (0, 10, 50_000):
        gathered = hvd.allgather_object({"rank": hvd.rank(), "text": "y" * (length * (hvd.rank() + 1))})
        assert gathered == [{"rank": r, "text": "y" * (length * (r + 1))} for r in range(hvd.size())]
    assert hvd.allgather_object(hvd.rank(), name="named") == list(range(hvd.size()))


def closure_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int | None = None) -> Any:
    """Of one rank's batch; by default this one's."""
    optimizer.zero_grad()
    loss = loss_of(model, my_batch(step) if rank is None else batch_of(rank, step))
    loss.backward()
    return loss


def assert_equal_states(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal_states(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal_states(one, other)
    else:
        assert found == expected
