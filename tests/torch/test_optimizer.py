"""DistributedOptimizer against training in one process on everybody's batches."""

from __future__ import annotations

import copy
import functools
import gc
import time
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.core import basics
from tests.harness import on_ranks
from tests.torch.training import (
    MakeOptimizer,
    assert_equal_on_all_ranks,
    assert_same,
    batch_of,
    everybodys_batch,
    in_arena,
    loss_of,
    make_model,
    my_batch,
    train,
    train_reference,
)

sgd: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": sgd,
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
}


def distributed(model: torch.nn.Module, make: MakeOptimizer = sgd, **options: Any) -> Any:
    return hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters(), **options)


def backward(model: torch.nn.Module, step: int = 0) -> None:
    loss_of(model, my_batch(step)).backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks
def test_training_is_that_of_one_process(name: str) -> None:
    model, reference = make_model(), make_model()
    train(model, distributed(model, OPTIMIZERS[name]), range(6))
    train_reference(reference, OPTIMIZERS[name](reference.parameters()), range(6))
    assert_same(model, reference)


@on_ranks
def test_gradients_become_views_of_the_arena() -> None:
    model = make_model()
    optimizer = distributed(model)
    backward(model)
    places = [p.grad.data_ptr() for p in model.parameters()]
    assert all(in_arena(p.grad) for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    backward(model, 1)
    assert [p.grad.data_ptr() for p in model.parameters()] == places, "accumulated elsewhere"
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    backward(model, 2)
    assert [p.grad.data_ptr() for p in model.parameters()] == places


@on_ranks
def test_synchronized_gradients_are_the_average() -> None:
    model, reference = make_model(), make_model()
    optimizer = distributed(model)
    loss_of(reference, everybodys_batch(0)).backward()
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.synchronize()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
        with optimizer.skip_synchronize():
            pass  # no step, so that the next round sees the same gradients


@on_ranks
def test_a_bucket_costs_one_message_in_a_step() -> None:
    model = make_model()
    optimizer = distributed(model)
    train(model, optimizer, range(2))
    channel = basics.runtime().client.channel
    sent: list[Any] = []
    channel.send = lambda message, send=channel.send: (sent.append(message), send(message))  # type: ignore[method-assign]
    try:
        train(model, optimizer, range(2, 5))
    finally:
        del channel.send
    assert optimizer.statistics().buckets > 1
    assert len(sent) == 3 * optimizer.statistics().buckets


@on_ranks
def test_buckets_are_sent_while_backward_runs() -> None:
    model = make_model()
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    sent_before_first_layer: list[int] = []
    sync = optimizer._sync
    first = next(model.parameters())
    first.register_hook(lambda _: sent_before_first_layer.append(sum(bucket.sent for bucket in sync.plan.buckets)))
    train(model, optimizer, range(1, 2))
    assert sent_before_first_layer[0] >= 1


@on_ranks
def test_unused_parameters_contribute_zeros() -> None:
    torch.manual_seed(7)
    extra = torch.nn.Linear(16, 16)  # used by no rank
    odd = torch.nn.Linear(16, 4)  # used by odd ranks
    model = torch.nn.ModuleDict({"main": make_model(), "extra": extra, "odd": odd}).double()
    reference = copy.deepcopy(model)
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(4):
        inputs, labels = my_batch(step)
        outputs = model["main"](inputs)
        if hvd.rank() % 2 and step != 2:
            outputs = outputs + model["odd"](inputs)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step()
        assert all(p.grad is not None and not p.grad.any() for p in extra.parameters())

        plain.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rank in range(hvd.size()):
            inputs, labels = batch_of(rank, step)
            outputs = reference["main"](inputs) + (reference["odd"](inputs) if rank % 2 and step != 2 else 0)
            total = total + torch.nn.functional.cross_entropy(outputs, labels) / hvd.size()
        total.backward()
        for p in reference.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        plain.step()
        assert_same(model, reference)


@on_ranks
def test_several_backward_passes_make_one_step() -> None:
    for set_to_none in (True, False):
        model, reference = make_model(), make_model()
        optimizer, plain = distributed(model, backward_passes_per_step=3), sgd(reference.parameters())
        for start in (0, 3, 6):
            optimizer.zero_grad(set_to_none=set_to_none)
            plain.zero_grad()
            for step in range(start, start + 3):
                assert optimizer._schedule.reduced == 0
                backward(model, step)
                loss_of(reference, everybodys_batch(step)).backward()
            optimizer.step()
            plain.step()
            assert_same(model, reference)
        assert optimizer.statistics().steps == 3
        optimizer.set_backward_passes_per_step(1)
        train(model, optimizer, range(9, 11))
        train_reference(reference, plain, range(9, 11))
        assert_same(model, reference)


@on_ranks
def test_backward_passes_per_step_has_to_be_positive() -> None:
    optimizer = distributed(make_model())
    with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
        optimizer.set_backward_passes_per_step(0)


@on_ranks
def test_zero_grad_after_backward_forgets_the_gradients() -> None:
    for passes in (1, 2):  # reduced already, and not yet
        model, reference = make_model(), make_model()
        optimizer, plain = distributed(model, backward_passes_per_step=passes), sgd(reference.parameters())
        for step in range(2):
            backward(model, 7 + step)
            optimizer.zero_grad()
            for _ in range(passes):
                backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
            (passes * loss_of(reference, everybodys_batch(step))).backward()
            plain.step()
        assert_same(model, reference)


class Plain(torch.optim.SGD):
    """Its `zero_grad` has no argument, as that of torch before 1.7 and of optimizers that were written for it."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=False)


class Kept(torch.optim.SGD):
    """Its `zero_grad` keeps gradients by default, and takes an argument of its own."""

    def zero_grad(self, set_to_none: bool = False, scale: float = 0.0) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)


@on_ranks
def test_zero_grad_is_that_of_the_scripts_class() -> None:
    for make in (Plain, Kept):
        model, reference = make_model(), make_model()
        optimizer = distributed(model, functools.partial(make, lr=0.1))
        train(model, optimizer, range(3))
        train_reference(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(3))
        assert_same(model, reference)
        optimizer.zero_grad()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    for parameter in model.parameters():
        parameter.grad.fill_(4.0)  # type: ignore[union-attr]
    optimizer.zero_grad(scale=0.5)
    assert all(bool((p.grad == 2).all()) for p in model.parameters())
    with pytest.raises(TypeError, match="set_to_none"):
        distributed(make_model(), functools.partial(Plain, lr=0.1)).zero_grad(set_to_none=True)


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow those of an optimizer inside (Zhang et al. 2019, "Lookahead Optimizer"): `param_groups`
    is a property, and `__init__` is not torch's, as in the implementations that people use."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2, rate: float = 0.5) -> None:
        self.inner, self.every, self.rate, self.steps = inner, every, rate, 0
        self.defaults, self.state = inner.defaults, inner.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = self.inner.step(closure)
        self.steps += 1
        if self.steps % self.every == 0:
            for slow, fast in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                slow += self.rate * (fast.detach() - slow)
                fast.detach().copy_(slow)
        return result


@pytest.mark.parametrize("overlap", ["none", "forward"])
@on_ranks
def test_an_optimizer_around_another_one(overlap: str) -> None:
    def make(parameters: Any) -> Lookahead:
        return Lookahead(sgd(parameters))

    model, reference = make_model(), make_model()
    optimizer = distributed(model, make, overlap=overlap)
    hvd.broadcast_optimizer_state(optimizer, 0)
    plain = make(reference.parameters())
    for steps in (range(2), range(2, 6)):
        train(model, optimizer, steps)
        train_reference(reference, plain, steps)
        hvd.synchronize_parameters()
        assert_same(model, reference)
        for group in optimizer.param_groups:
            group["lr"] = 0.05
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["momentum"] = 0.8
        optimizer.load_state_dict(saved)
        plain.inner.param_groups[0].update(lr=0.05, momentum=0.8)
        assert optimizer.param_groups[0]["momentum"] == 0.8


@on_ranks
def test_gradients_are_clipped_between_synchronize_and_step() -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            with optimizer.skip_synchronize():
                optimizer.step()
            plain.zero_grad()
            loss_of(reference, everybodys_batch(step)).backward()
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3))
            plain.step()
            assert_same(model, reference)


@on_ranks
def test_synchronize_and_step_after_backward_reduce_nothing_again() -> None:
    for op, factor in ((hvd.Average, 1), (hvd.Sum, hvd.size())):
        model, reference = make_model(), make_model()
        optimizer, plain = distributed(model, op=op), sgd(reference.parameters())
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.synchronize()
            optimizer.synchronize()
            optimizer.step()
            plain.zero_grad()
            (factor * loss_of(reference, everybodys_batch(step))).backward()
            plain.step()
            assert_same(model, reference)
        assert optimizer.statistics().steps == 3


@pytest.mark.parametrize("explicit", [True, False])
@on_ranks
def test_a_grad_scaler_sees_reduced_gradients(explicit: bool) -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    expected_scale = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, my_batch(step))
            if step in (0, 3) and hvd.rank() == 1:
                loss = loss * float("inf")  # on one rank only: every rank has to skip the step
            scaler.scale(loss).backward()
            if explicit:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            expected_scale.append(scaler.get_scale())
            if step not in (0, 3):
                train_reference(reference, plain, [step])
            assert_same(model, reference)
    assert expected_scale == [512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0]
    assert optimizer.statistics().steps == 6


@on_ranks
def test_reading_the_learning_rate_before_step_changes_nothing() -> None:
    model, reference = make_model(), make_model()
    optimizer = distributed(model, op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.step()
    assert optimizer.statistics().steps == 3
    plain = sgd(reference.parameters())
    for step in range(3):
        plain.zero_grad()
        (loss_of(reference, everybodys_batch(step)) * hvd.size()).backward()
        plain.step()
    assert_same(model, reference)


@on_ranks
def test_several_models_and_optimizers() -> None:
    models, references = [make_model(s) for s in (1, 2)], [make_model(s) for s in (1, 2)]
    kinds = (sgd, OPTIMIZERS["adamw"])
    optimizers = [distributed(model, make) for model, make in zip(models, kinds, strict=True)]
    plain = [make(reference.parameters()) for reference, make in zip(references, kinds, strict=True)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models:  # both are under way at once
            backward(model, step)
        for optimizer in reversed(optimizers):
            optimizer.step()
        for reference, reference_optimizer in zip(references, plain, strict=True):
            train_reference(reference, reference_optimizer, [step])
    for model, reference in zip(models, references, strict=True):
        assert_same(model, reference)


@on_ranks
def test_one_model_with_an_optimizer_for_each_half() -> None:
    model, reference = make_model(), make_model()
    halves = [list(model[:3].parameters()), list(model[3:].parameters())]
    optimizers = [hvd.DistributedOptimizer(sgd(half)) for half in halves]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
    train_reference(reference, sgd(reference.parameters()), range(3))
    assert_same(model, reference)


@on_ranks
def test_the_optimizer_made_last_owns_the_parameters() -> None:
    model, reference = make_model(), make_model()
    first = distributed(model)
    train(model, first, range(2))
    second = distributed(model)
    train(model, second, range(2, 4))
    backward(model)
    with pytest.raises(ValueError, match=r"'4\.bias' has been given to another DistributedOptimizer"):
        first.step()
    for steps in (range(2), range(2, 4)):
        train_reference(reference, sgd(reference.parameters()), steps)
    assert_same(model, reference)


@on_ranks
def test_an_optimizer_that_is_gone_leaves_nothing_behind() -> None:
    gc.collect()  # of earlier tests' optimizers, whose segments would be dropped meanwhile
    model = make_model()
    optimizer = distributed(model)
    train(model, optimizer, range(2))
    gone, segments = weakref.ref(optimizer), basics.runtime().client.arena.statistics()["segments"]
    del optimizer
    gc.collect()
    assert gone() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model.zero_grad()
    backward(model)  # without an optimizer
    successor = distributed(model)
    train(model, successor, range(2))
    assert basics.runtime().client.arena.statistics()["segments"] == segments
    assert_equal_on_all_ranks(model)


@on_ranks
def test_a_closure_is_reduced_after_each_evaluation() -> None:
    def closure(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        return loss

    for make in (sgd, functools.partial(torch.optim.LBFGS, max_iter=5, line_search_fn="strong_wolfe")):
        model, reference = make_model(), make_model()
        optimizer, plain = distributed(model, make), make(reference.parameters())
        for step in range(3):
            loss = optimizer.step(functools.partial(closure, model, optimizer, my_batch(step)))
            expected = plain.step(functools.partial(closure, reference, plain, everybodys_batch(step)))
            torch.testing.assert_close(torch.as_tensor(loss), torch.as_tensor(expected), rtol=1e-6, atol=1e-8)
            assert_equal_on_all_ranks(model)
        assert_same(model, reference, rtol=1e-6, atol=1e-8)


@on_ranks
def test_lr_schedulers_before_and_after_wrapping() -> None:
    for before in (True, False):
        model, reference = make_model(), make_model()
        plain = sgd(reference.parameters())
        plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.1)
        inner = sgd(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if before:
                scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.1)
            optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
            if not before:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
            for step in range(5):
                train(model, optimizer, [step])
                scheduler.step()
                train_reference(reference, plain, [step])
                plain_scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(plain.param_groups[0]["lr"]) == pytest.approx(1e-3)
        assert_same(model, reference)


@pytest.mark.parametrize("text", ["allreduce", "bsp"])
@on_ranks
def test_a_scheduler_made_before_wrapping_goes_on_after_a_state_was_loaded(text: str) -> None:
    def begin(model: torch.nn.Module) -> tuple[Any, Any]:
        inner = sgd(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        return hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=text), scheduler

    def both(steps: range) -> None:
        for step in steps:
            train(model, optimizer, [step])
            scheduler.step()
            train_reference(reference, plain, [step])
            plain_scheduler.step()

    model, reference = make_model(), make_model()
    plain = sgd(reference.parameters())
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer, scheduler = begin(model)
    both(range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))

    model = make_model(5)
    optimizer, scheduler = begin(model)
    for one, state in zip((model, optimizer, scheduler), saved, strict=True):
        one.load_state_dict(state)
    both(range(2, 4))
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_same(model, reference)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    both(range(4, 6))
    assert_same(model, reference)


@on_ranks
def test_parameter_groups_may_be_added_and_frozen() -> None:
    def groups(net: torch.nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": net[0].parameters(), "lr": 0.05}, {"params": net[2].parameters()}]

    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups(model), lr=0.1))
    plain = torch.optim.SGD(groups(reference), lr=0.1)

    def both(steps: range) -> None:
        train(model, optimizer, steps)
        train_reference(reference, plain, steps)
        for net in (model, reference):
            net.zero_grad()

    both(range(2))
    assert_same(model[:3], reference[:3])
    for net, wrapped in ((model, optimizer), (reference, plain)):
        wrapped.add_param_group({"params": net[4].parameters(), "lr": 0.2})
    both(range(2, 4))
    assert_same(model, reference)
    for net in (model, reference):
        net[0].requires_grad_(False)
    both(range(4, 6))
    assert model[0].weight.grad is None
    assert_same(model, reference)
    for net in (model, reference):
        net[0].requires_grad_(True)
    both(range(6, 8))
    assert_same(model, reference)
    assert optimizer.statistics().plans == 4


@on_ranks
def test_a_parameter_unfrozen_after_wrapping_is_reduced_at_once() -> None:
    model, reference = make_model(), make_model()
    model[0].requires_grad_(False)
    optimizer, plain = distributed(model), sgd(reference.parameters())
    train(model, optimizer, range(0))
    model[0].requires_grad_(True)
    train(model, optimizer, range(2))
    train_reference(reference, plain, range(2))
    assert_same(model, reference)


@on_ranks
def test_state_dicts_are_those_of_the_plain_optimizer() -> None:
    make = OPTIMIZERS["adamw"]
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model, make), make(reference.parameters())
    train(model, optimizer, range(3))
    train_reference(reference, plain, range(3))
    state = optimizer.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert state["param_groups"] == plain.state_dict()["param_groups"]

    plain_again = make(reference.parameters())
    plain_again.load_state_dict(copy.deepcopy(state))  # out of a distributed optimizer into a plain one
    train_reference(reference, plain_again, range(3, 5))
    model_again = make_model(5)
    model_again.load_state_dict(model.state_dict())
    again = distributed(model_again, make)
    again.load_state_dict(copy.deepcopy(state))  # and into another distributed one
    train(model_again, again, range(3, 5))
    assert_same(model_again, reference)
    inner = make(model.parameters())
    inner.load_state_dict(copy.deepcopy(state))
    wrapped = hvd.DistributedOptimizer(inner)  # state loaded before wrapping counts
    train(model, wrapped, range(3, 5))
    assert_same(model, reference)


@on_ranks
def test_loading_a_state_forgets_pending_gradients() -> None:
    model, reference = make_model(), make_model()
    optimizer = distributed(model)
    state = optimizer.state_dict()
    for step in range(2):
        backward(model, step)
        optimizer.load_state_dict(state)
        model.load_state_dict(reference.state_dict())
        optimizer.zero_grad()
        train(model, optimizer, [step])
        train_reference(reference, sgd(reference.parameters()), [step])
        assert_same(model, reference)
        state = sgd(make_model().parameters()).state_dict()
        optimizer.load_state_dict(state)


@on_ranks
def test_sums_and_predivided_averages() -> None:
    loss_of(reference := make_model(), everybodys_batch(0)).backward()
    for options, factor in (
        ({"op": hvd.Sum}, hvd.size()),
        ({"gradient_predivide_factor": 4.0}, 1),
        ({"compression": hvd.Compression.fp16}, 1),
        ({"compression": hvd.Compression.bf16}, 1),
    ):
        model = make_model()
        optimizer = distributed(model, **options)
        backward(model)
        optimizer.synchronize()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad * factor)  # one node: no codec is used


class Recording:
    """A script's own compressor, which flattens and casts, and counts how often it is called."""

    calls = 0

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        cls.calls += 1
        return tensor.double().view(-1), (tensor.shape, tensor.dtype)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx[1]).view(ctx[0])


@on_ranks
def test_a_compressor_of_the_scripts_own() -> None:
    model, reference = make_model(), make_model()
    Recording.calls = 0
    train(model, distributed(model, compression=Recording), range(4))
    train_reference(reference, sgd(reference.parameters()), range(4))
    assert_same(model, reference)
    assert Recording.calls == 4 * len(list(model.parameters())), "a residual would be counted twice"


@on_ranks
def test_gradients_have_the_memory_format_of_their_parameters() -> None:
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        images = torch.full((2, 3, 5, 5), hvd.rank() + 1.0).to(memory_format=torch.channels_last)
        images[0, 0, 0, 0] = 9.0
        (local,) = torch.autograd.grad(net(images).square().sum(), [net.weight])
        net(images).square().sum().backward()
        optimizer.synchronize()
        assert net.weight.grad.stride() == net.weight.stride()
        torch.testing.assert_close(net.weight.grad, hvd.allreduce(local.contiguous()))


OPTIONS: list[dict[str, Any]] = [{}, {"overlap": "forward"}, {"backward_passes_per_step": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks
def test_gradients_whose_memory_a_script_replaces_are_still_reduced(set_to_none: bool, options: dict[str, Any]) -> None:
    def halve(net: torch.nn.Module) -> None:
        for parameter in net.parameters():
            parameter.grad.data = parameter.grad.data * 0.5

    _train_both(options, set_to_none, step_does=halve)


@pytest.mark.parametrize("options", [*OPTIONS, {"algorithm": "bsp"}, {"algorithm": "local_sgd(steps=1)"}], ids=str)
@pytest.mark.parametrize("at", [0, 2])
@on_ranks
def test_a_model_may_become_one_of_another_dtype(at: int, options: dict[str, Any]) -> None:
    _train_both(options, True, converted_at=at)


def _train_both(
    options: dict[str, Any], set_to_none: bool, converted_at: int = -1, step_does: Any = lambda net: None
) -> None:
    """Trains on this rank's batches, two backward passes a step where the options allow it, and in one process on
    everybody's."""
    model, reference = make_model().float(), make_model().float()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        for net, taken, batch in ((model, optimizer, my_batch), (reference, plain, everybodys_batch)):
            if step == converted_at:
                hvd.synchronize_parameters()
                net.double()
            taken.zero_grad(set_to_none)
            for part in range(1 if "overlap" in options else 2):
                inputs, labels = batch(2 * step + part)
                loss_of(net, (inputs.to(net[0].weight.dtype), labels)).backward()
            step_does(net)
            taken.step()
    hvd.synchronize_parameters()
    assert_same(model, reference, rtol=1e-4, atol=1e-6)


@on_ranks
def test_parameters_of_several_dtypes_and_shapes() -> None:
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(shape).to(dtype))
        for shape, dtype in (
            ((3, 5), torch.float32),
            ((), torch.float32),
            ((7,), torch.bfloat16),
            ((0, 4), torch.float32),
            ((2, 2), torch.float64),
            ((1,), torch.float16),
        )
    ]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        sum((p.double() * (hvd.rank() + 1)).sum() for p in parameters).backward()
        optimizer.synchronize()
        for parameter in parameters:
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.shape == parameter.shape
            assert (parameter.grad == (hvd.size() + 1) / 2).all()


@pytest.mark.parametrize("options", [{}, {"overlap": "forward"}, {"overlap": "stale"}, {"algorithm": "bsp"}], ids=str)
@on_ranks
def test_parameters_whose_elements_lie_apart_train_like_any_other(options: dict[str, Any]) -> None:
    def make(apart: bool) -> torch.nn.Linear:
        net = torch.nn.Linear(6, 4, bias=False)
        memory = torch.arange(48.0).view(4, 12).div(50)
        net.weight = torch.nn.Parameter(memory[:, ::2] if apart else memory[:, ::2].contiguous())
        return net

    nets = make(True), make(False)
    assert not nets[0].weight.is_contiguous()
    for net in nets:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), **options)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.full((2, 6), 0.1 * (step + hvd.rank()))).square().sum().backward()
            optimizer.step()
        hvd.synchronize_parameters()
    torch.testing.assert_close(nets[0].weight, nets[1].weight)


@on_ranks
def test_the_class_is_that_of_the_script() -> None:
    class Picky(torch.optim.SGD):
        def __init__(self, params: Any, rate: float, *, needed: str) -> None:
            super().__init__(params, lr=rate)
            self.needed = needed

    model = make_model()
    inner = Picky(model.parameters(), 0.1, needed="yes")
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert isinstance(optimizer, Picky)
    assert type(optimizer).__name__ == "Picky"
    assert optimizer.needed == "yes"
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, range(1))
    assert calls == ["before", "after"]
    assert "lr: 0.1" in repr(optimizer)
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)


@on_ranks
def test_arguments_that_make_no_sense_are_refused() -> None:
    model = make_model()
    optimizer, named = sgd(model.parameters()), list(model.named_parameters())
    for options, text in (
        ({"named_parameters": [p for _, p in named]}, "sequence of tuples"),
        ({"named_parameters": [*named, named[0]]}, r"must be unique\. Found duplicates: 0\.weight"),
        ({"named_parameters": named[1:]}, r"not named: parameter 0 of group 0 \(\[24, 16\]\)"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "not supported with op != Average"),
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"groups": 0}, r"non-negative integer or a list of list of torch\.Tensor"),
        ({"groups": 2.5}, r"non-negative integer or a list of list of torch\.Tensor"),
        ({"groups": [["weight"]]}, r"groups must consist of torch\.Tensor"),
        ({"groups": [[named[0][1]], [named[1][1], named[0][1]]]}, "can only appear once in groups"),
        ({"op": "max of all"}, "'max of all' is not an op"),
        ({"compression": 16}, "it needs the functions compress and decompress"),
        ({"compression": "fp17"}, "did you mean 'fp16'"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(optimizer, **options)  # type: ignore[arg-type]


@on_ranks
def test_ranks_whose_models_differ_are_told_which_tensor() -> None:
    net = torch.nn.Linear(3, 4 + hvd.rank())
    optimizer = distributed(net)
    with pytest.raises(hvd.HorovodInternalError, match=r"'(weight|bias)'"):
        net(torch.ones(1, 3)).sum().backward()
    optimizer.zero_grad()


@on_ranks
def test_a_data_loader_with_workers_disturbs_nothing() -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for epoch in range(2):
        steps = [2 * epoch, 2 * epoch + 1]
        dataset = [my_batch(step) for step in steps]
        for inputs, labels in torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss_of(model, (inputs, labels)).backward()
            optimizer.step()
        train_reference(reference, plain, steps)
    assert_same(model, reference)


@on_ranks
def test_statistics_count_steps_and_waiting() -> None:
    model = make_model()
    optimizer = distributed(model)
    assert optimizer.statistics().steps == 0
    began = time.perf_counter()
    train(model, optimizer, range(3))
    took, found = time.perf_counter() - began, optimizer.statistics()
    assert (found.steps, found.plans) == (3, 1)
    assert found.nbytes >= sum(p.nbytes for p in model.parameters())
    assert 0 < found.last_waited_seconds < found.waited_seconds < took


@on_ranks
def test_complex_parameters_are_refused_by_name_before_any_step() -> None:
    parameters = {
        "weight": torch.nn.Parameter(torch.ones(2)),
        "phase": torch.nn.Parameter(torch.ones(2, dtype=torch.cfloat)),
    }
    for algorithm in ("allreduce", "local_sgd(period=2)"):
        with pytest.raises(ValueError, match=r"parameter 'phase', which is torch\.complex64.*torch\.view_as_real"):
            hvd.DistributedOptimizer(
                torch.optim.SGD(parameters.values(), lr=0.1), parameters.items(), algorithm=algorithm
            )
    parameters["phase"].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
    parameters["weight"].sum().backward()
    optimizer.step()
    parameters["phase"].requires_grad_(True)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"parameter 'phase', which is torch\.complex64"):
        (parameters["weight"].sum() + parameters["phase"].abs().sum()).backward()
    optimizer.zero_grad()


@on_ranks
def test_optimizers_in_another_order_on_one_rank_are_an_error_at_once() -> None:
    models = {name: torch.nn.Linear(3, 2) for name in ("generator", "critic")}
    optimizers = {}
    for name in sorted(models, reverse=hvd.rank() == 1):
        named = [(f"{name}.{key}", parameter) for key, parameter in models[name].named_parameters()]
        optimizers[name] = hvd.DistributedOptimizer(torch.optim.SGD(models[name].parameters(), lr=0.1), named)
    ranks = r"'optimizer\.\d+' on rank [0-3]"
    match = rf"in different orders: the one of 'generator\.bias' and 1 more is {ranks}.* and {ranks}"
    for _ in range(2):
        optimizers["generator"].zero_grad()
        with pytest.raises(hvd.HorovodInternalError, match=match):
            models["generator"](torch.ones(1, 3)).sum().backward()
    hvd.barrier()


@on_ranks
def test_parameter_groups_in_another_order_on_one_rank() -> None:
    """Parameters are paired and compared by name. Warnings are errors."""
    model, reference = make_model(), make_model()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    groups = groups[::-1] if hvd.rank() == 1 else groups
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), model.named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer._sync._digests, "_waits", True)
        train(model, optimizer, range(4))
    train_reference(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(4))
    assert_same(model, reference)
