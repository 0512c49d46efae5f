"""Optimizers whose gradients stay each rank's own until `step()`, on two ranks of two nodes, against torch in one
process. What their meetings with everything else give is in `tests/meetings`; here is what one of them alone shows."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.sync.parameters import optimizer_spec
from fusion_rt.torch.sync.weights import Weights, not_finite
from tests.for_each import for_each
from tests.harness import Job, on_ranks
from tests.torch.training import assert_equal_on_all_ranks, assert_same, batch_of, loss_of, make_model

RATE, RANKS = 0.1, 2
AT_SHARDS = ("bsp", "asp", "ssp(staleness=0)", "softsync", "dc_asgd", "hogwild", "partial", "collaborative(samples=2)")


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((1, 1), {"HOROVOD_FUSION_THRESHOLD": "4KiB", "HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def gradients(model: torch.nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    """Of the loss of a rank's batch."""
    return list(torch.autograd.grad(loss_of(model, batch_of(rank, step)), list(model.parameters())))


def clipped(found: list[torch.Tensor], norm: float) -> list[torch.Tensor]:
    total = torch.stack([gradient.norm() for gradient in found]).norm()
    return [gradient * min(1.0, norm / float(total + 1e-6)) for gradient in found]


def step_with_mean(model: torch.nn.Module, optimizer: Any, found: list[list[torch.Tensor]]) -> None:
    for parameter, *each in zip(model.parameters(), *found, strict=True):
        parameter.grad = torch.stack(each).mean(0)
    optimizer.step()


@on_ranks
def test_bsp_steps_with_the_mean_of_what_each_rank_has_made_of_its_gradients_by_step() -> None:
    """Accumulated over two passes, unscaled, and clipped; rank 1 overflows in one step, and is not in the mean."""
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        momentum(model.parameters()), model.named_parameters(), backward_passes_per_step=2, algorithm="bsp"
    )
    plain = momentum(reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        optimizer.zero_grad()
        for part in range(2):
            loss = scaler.scale(loss_of(model, batch_of(hvd.rank(), 2 * step + part)))
            (loss * float("inf") if (step, part, hvd.rank()) == (3, 1, 1) else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        found = []
        for rank in range(RANKS):
            parts = [gradients(reference, rank, 2 * step + part) for part in range(2)]
            found.append(clipped([first + second for first, second in zip(*parts, strict=True)], 0.5))
        step_with_mean(reference, plain, found[: 1 if step == 3 else None])
    assert scaler.get_scale() == (1024.0 if hvd.rank() == 0 else 512.0)
    assert_same(model, reference)


@pytest.mark.parametrize("text", AT_SHARDS)
@on_ranks
def test_a_gradient_that_is_not_finite_reaches_no_shard_and_is_told(text: str) -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression="topk(density=0.5)", algorithm=text)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        if (step, hvd.rank()) == (1, 1):
            model[2].weight.grad[0, 0] = float("nan")
            with pytest.warns(UserWarning, match=r"the gradient of '2.weight' is not finite on this rank, which there"):
                optimizer.step()
        else:
            optimizer.step()
    hvd.consensus(optimizer)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert_equal_on_all_ranks(model)


@pytest.mark.parametrize("text", AT_SHARDS)
@on_ranks
def test_hooks_on_steps_see_the_parameters_before_and_after_shards_have_taken_them(text: str) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    seen: list[tuple[str, torch.Tensor]] = []

    def see(when: str) -> None:
        seen.append((when, model[0].weight.detach().clone()))

    inner.register_step_pre_hook(lambda *_: see("before"))
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=text)
    optimizer.register_step_post_hook(lambda *_: see("after"))
    expected = [("before", model[0].weight.detach().clone())]
    for step in range(3):
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = model[0].weight.detach().clone()
        expected += [("after", now), ("before", now)]
    assert [when for when, _ in seen] == [when for when, _ in expected[:-1]]
    assert all(torch.equal(mine, right) for (_, mine), (_, right) in zip(seen, expected, strict=False))
    assert not torch.equal(seen[0][1], seen[-1][1])


@on_ranks
def test_a_layer_is_unfrozen_and_shards_keep_their_momentum() -> None:
    found = []
    for distributed in (True, False):
        model = make_model()
        model[0].requires_grad_(False)
        sgd: Any = momentum(list(model[2:].parameters()))
        if distributed:
            sgd = hvd.DistributedOptimizer(sgd, algorithm="bsp")
        for step in range(8):
            if step == 4:
                model[0].requires_grad_(True)
                sgd.add_param_group({"params": list(model[0].parameters()), "lr": RATE / 2})
            sgd.zero_grad()
            for rank in (hvd.rank(),) if distributed else range(RANKS):
                (loss_of(model, batch_of(rank, step)) / (1 if distributed else RANKS)).backward()
            sgd.step()
        found.append(model)
    assert_same(*found)


@on_ranks
def test_diloco_gives_a_parameter_that_is_unfrozen_the_users_outer_rates() -> None:
    """With no inner progress but on what is new: start - rate (1 + momentum) mean change, after the first exchange."""
    old, new = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    new.requires_grad_(False)
    text = "diloco(steps=2, outer_rate=0.25, outer_momentum=0.5)"
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([old], lr=1.0), [("old", old), ("new", new)], algorithm=text)
    for step in range(4):
        if step == 2:
            new.requires_grad_(True)
            optimizer.add_param_group({"params": [new], "lr": 1.0})
        old.grad, new.grad = torch.zeros(3), torch.full((3,), float(hvd.rank()))
        optimizer.step()
    change = 2 * sum(range(RANKS)) / RANKS  # in two steps
    torch.testing.assert_close(new.detach(), torch.full((3,), -0.25 * 1.5 * change))
    assert not old.any()


@pytest.mark.parametrize("text", ["local_sgd(steps=3)", "diloco(steps=3)", "easgd(steps=3)"])
@on_ranks
def test_the_phase_counts_steps_that_a_scaler_skips_on_one_rank(text: str) -> None:
    """Rank 0 is never skipped: if rank 1's count fell behind, the job would not end, or exchange other weights."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters(), algorithm=text)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(9):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, batch_of(hvd.rank(), step)))
        overflows = hvd.rank() == 1 and step == 4
        (loss * float("inf") if overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(before[name], value) for name, value in model.state_dict().items()]
        assert all(same) if overflows else not any(same)
    assert optimizer.statistics().steps == 3 - text.startswith("easgd")  # whose last answer is under way
    if not text.startswith("easgd"):
        assert_equal_on_all_ranks(model)


KEEPERS = ("bsp", "asp", "easgd(steps=2)", "easgd(steps=2, synchronous_home=True)", "diloco(steps=2)")


@pytest.mark.parametrize("text", KEEPERS)
@on_ranks
def test_weights_that_the_script_sets_are_refused_until_reseed_takes_them(text: str) -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=text)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
        optimizer.step()

    for _ in range(3):
        step()
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value + 1 for name, value in own.items()})
    model.load_state_dict(own)  # and back, as for an evaluation
    step()
    step()
    model[2].weight.data.clamp_(-0.01, 0.01)
    with pytest.raises(ValueError, match=r"the parameter '2.weight' was set since the last step, and .*reseed\(\)"):
        step()
    wanted = copy.deepcopy(model.state_dict())
    optimizer.reseed()
    for _ in range(5):
        step()
    hvd.consensus(optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-15)


@on_ranks
def test_an_optimizer_whose_momentum_is_scheduled_is_refused_at_shards() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters(), algorithm="bsp")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, 10)
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.step()
    schedule.step()
    with pytest.raises(ValueError, match="an argument of the optimizer other than its learning rate has changed, and"):
        optimizer.step()


def uneven(text: str, steps: int) -> tuple[torch.nn.Parameter, Any]:
    """Rank r's parameter goes down by r + 1 in each step; rank 1 has data for two steps less."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("x", parameter)], algorithm=text)
    for _ in range(steps - 2 * hvd.rank()):
        parameter.grad = torch.full((4,), 1.0 + hvd.rank())
        optimizer.step()
    hvd.join()
    return parameter, optimizer


@on_ranks
def test_a_rank_that_has_joined_is_left_out_of_the_mean_of_parameters() -> None:
    parameter, _ = uneven("local_sgd(steps=2)", 4)
    mean = -(2 * 1.0 + 2 * 2.0) / 2
    expected = mean - 2 if hvd.rank() == 0 else mean
    torch.testing.assert_close(parameter.detach(), torch.full((4,), expected))


@on_ranks
def test_after_a_join_all_ranks_have_the_outer_optimizer_of_the_last() -> None:
    rate, mu = 0.5, 0.5
    parameter, optimizer = uneven(f"diloco(steps=2, outer_rate={rate}, outer_momentum={mu})", 4)
    start = velocity = 0.0
    for change in (3.0, 2.0):  # the second one is rank 0's alone
        velocity = mu * velocity + change
        start -= rate * (change + mu * velocity)
    if hvd.rank() == 0:
        torch.testing.assert_close(parameter.detach(), torch.full((4,), start))
    ((anchor, speed),) = (optimizer.own_state()["outer"][name] for name in ("x",))
    torch.testing.assert_close((anchor, speed), (torch.full((4,), start), torch.full((4,), velocity)))
    for _ in range(2):  # both exchange in the same step again, from the same start
        parameter.grad = torch.zeros(4)
        optimizer.step()
    assert len({float(value[0]) for value in hvd.allgather(parameter.detach().view(1, -1))}) == 1


@pytest.mark.parametrize("text", ["bsp", "easgd(steps=1, synchronous_home=True)", "dpsgd", "asp"])
@on_ranks
def test_uneven_data_ends_by_a_join_and_training_goes_on_after_it(text: str) -> None:
    parameter, optimizer = uneven(text, 5)
    for _ in range(3):
        parameter.grad = torch.ones(4)
        optimizer.step()
    hvd.consensus(optimizer)
    assert float(parameter[0]) < -2
    assert len({float(value[0]) for value in hvd.allgather(parameter.detach().view(1, -1))}) == 1


# --- in one process ---------------------------------------------------------------------------------------------------


class Slot:
    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.name, self.parameter = name, parameter


def layer(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


SET: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda p: p.detach().add_(1),
    "its data": lambda p: p.data.clamp_(max=1.5),
    "other data": lambda p: setattr(p, "data", torch.zeros(5)),
    "another dtype": lambda p: setattr(p, "data", p.data.double()),
}


@for_each("how", SET)
def test_weights_that_were_set_are_noticed_however_they_were_set(how: str) -> None:
    slots: list[Any] = [Slot("a", layer(1.0, float("nan"))), Slot("b", layer(1.0, 2.0))]
    weights = Weights()
    weights.note(slots)
    assert weights.changed() == ""
    SET[how](slots[1].parameter)
    assert weights.changed() == "b"
    weights.note(slots)
    assert weights.changed() == ""


@for_each("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_parameter_whose_gradient_is_not_finite_is_named(bad: float) -> None:
    slots: list[Any] = [Slot(name, layer(1.0, 2.0, 3.0)) for name in "abcd"]
    slots[0].parameter.grad = torch.full((3,), 3e38)  # whose norm would overflow
    slots[1].parameter.grad = torch.ones(3).to_sparse()
    assert not_finite(slots) == ""
    slots[2].parameter.grad = torch.tensor([0.0, bad, 1.0])
    assert not_finite(slots) == "c"
    slots[1].parameter.grad = torch.tensor([0.0, bad, 1.0]).to_sparse()
    assert not_finite(slots) == "b"


def test_no_warning_where_there_is_no_gradient() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not_finite([Slot("a", layer(1.0))]) == ""  # type: ignore[list-item]


# --- what the optimizer has learned elsewhere -------------------------------------------------------------------------

MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": momentum,
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def mixed(seed: int = 0) -> torch.nn.Sequential:
    """A model of which one parameter lies in another order in memory."""
    model = make_model(seed)
    model[2].weight = torch.nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


def train_on_all(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        step_with_mean(model, optimizer, [gradients(model, rank, step) for rank in range(RANKS)])


def train_on_mine(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("how", ["stepped before it was wrapped", "loaded", "loaded by the first rank, and broadcast"])
@on_ranks
def test_shards_go_on_from_what_the_optimizer_remembers(how: str, name: str) -> None:
    make = MAKES[name]
    build = make_model if name == "Adafactor" else mixed
    reference = build()
    plain = make(reference.parameters())
    train_on_all(reference, plain, range(3))
    saved = copy.deepcopy(plain.state_dict())
    model = copy.deepcopy(reference)
    optimizer = make(model.parameters())
    if how.startswith("stepped"):
        optimizer.load_state_dict(saved)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm="bsp")
    if how == "loaded" or (hvd.rank() == 0 and not how.startswith("stepped")):
        optimizer.load_state_dict(saved)
    if how.endswith("broadcast"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train_on_mine(model, optimizer, range(3, 7))
    train_on_all(reference, plain, range(3, 7))
    assert_same(model, reference)


@pytest.mark.parametrize("text", AT_SHARDS)
@on_ranks
def test_shards_of_every_algorithm_take_what_the_optimizer_remembers(text: str) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_on_all(model, optimizer, range(3))
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=text)
    train_on_mine(model, optimizer, range(3, 6))
    hvd.barrier()
    steps = [value for key, value in optimizer.state_dict()["fusion_rt"]["state"].items() if key.endswith("/step")]
    assert all(int(step) > 3 for step in steps)
    assert not optimizer.state
    assert hvd.allreduce(torch.tensor(len(steps)), op=hvd.Sum) == len(list(model.parameters()))


@on_ranks
def test_a_state_that_is_loaded_when_shards_have_another_is_refused() -> None:
    model = make_model()
    before = momentum(model.parameters())
    train_on_all(model, before, range(2))
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters(), algorithm="bsp")
    train_on_mine(model, optimizer, range(2))
    own = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match=r"was given a state .* with bsp the shards have their own"):
        train_on_mine(model, optimizer, range(2, 3))
    hvd.barrier()
    optimizer.load_state_dict(own)
    hvd.barrier()
    train_on_mine(model, optimizer, range(2, 4))
    assert_equal_on_all_ranks(model)


@on_ranks
def test_a_checkpoint_of_shards_is_warned_of_elsewhere() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters(), algorithm="bsp")
    train_on_mine(model, optimizer, range(2))
    hvd.barrier()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters())
    if any(":optimizer/" in key for key in saved["fusion_rt"]["state"]):
        with pytest.warns(UserWarning, match=r"momenta, .* are those of parameter shards"):
            optimizer.load_state_dict(saved)
    train_on_mine(model, optimizer, range(2, 4))
    assert_equal_on_all_ranks(model)


@on_ranks
def test_parameters_that_share_their_memory_are_refused_where_shards_have_one_each() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' share their memory, and with bsp"):
        hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters(), algorithm="bsp")
    model[1].weight = model[0].weight
    hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters(), algorithm="bsp")


def test_shards_are_not_told_how_ranks_compute_a_step() -> None:
    how = {"capturable": True, "differentiable": False}
    (told,) = optimizer_spec(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], eps=1e-5, **how)).groups
    assert json.loads(told).keys().isdisjoint({"foreach", "fused", "lr", *how})
    assert json.loads(told)["eps"] == 1e-5


@on_ranks
def test_a_rank_knows_how_many_of_its_contributions_shards_have_answered() -> None:
    """By that it tells, after a loss, which steps shards that outlive it have taken."""
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters(), algorithm="bsp")
    when = optimizer._schedule
    assert when.shard_clock() is None, "these shards outlive nothing"
    optimizer._sync.checkpoint.outlives = True
    for steps in range(3):
        clock = when.shard_clock()
        assert clock.clock == steps
        assert clock.in_step
        assert clock.plan == (optimizer._sync.plan.agreed.id if steps else 0)
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), steps)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@on_ranks
def test_parameters_that_the_script_sets_count_in_a_mean_of_parameters() -> None:
    parameter = torch.nn.Parameter(torch.full((3,), 5.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), algorithm="local_sgd(steps=2)")
    for step in range(4):
        if step in (2, 3):  # after an exchange, and before the next one
            parameter.data.fill_(hvd.rank() + step)
        parameter.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert parameter.tolist() == [3 + (RANKS - 1) / 2] * 3


@pytest.mark.parametrize("algorithm", ["bsp", "local_sgd(steps=2)"])
@on_ranks
def test_gradients_that_a_scaler_has_not_unscaled_are_unscaled_by_step(algorithm: str) -> None:
    """As by torch's fused optimizers. One parameter has no gradient. The scale is a power of two."""

    def trained(scaler: Any) -> list[torch.Tensor]:
        model, unused = make_model(), torch.nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(momentum([*model.parameters(), unused]), algorithm=algorithm)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch_of(hvd.rank(), step))).backward()
            scaler.step(optimizer)
            scaler.update()
        return list(model.parameters())

    plain, scaled = (trained(torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=on)) for on in (False, True))
    assert all(map(torch.equal, plain, scaled))
