"""Overlap: `step()` returns at once, and parameters are what they would be without it, or one step late.

Without it means the same job with overlap="none", and that is compared bit by bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusion_rt.torch as hvd
from fusion_rt.torch.core import basics, watching
from fusion_rt.torch.core.process_sets import takes_part
from fusion_rt.torch.sync.exchanges import exchanges
from tests.harness import Job, on_ranks
from tests.torch.core.test_device import fake_gpu, gpu
from tests.torch.training import (
    MakeOptimizer,
    assert_equal_on_all_ranks,
    assert_same,
    everybodys_batch,
    in_arena,
    loss_of,
    make_model,
    my_batch,
    train,
)

sgd: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
adamw: MakeOptimizer = functools.partial(torch.optim.AdamW, lr=0.01)
Step = Callable[[torch.nn.Module, Any, int], None]


def distributed(model: torch.nn.Module, overlap: str, make: MakeOptimizer = sgd, **options: Any) -> Any:
    optimizer = make(model.parameters())
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), overlap=overlap, **options)


def waits(optimizer: Any) -> bool:
    found: bool = bool(optimizer._schedule._pending)
    return found


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_bitwise(model: torch.nn.Module, expected: torch.nn.Module | list[torch.Tensor]) -> None:
    others = list(expected.parameters()) if isinstance(expected, torch.nn.Module) else expected
    for (name, parameter), other in zip(model.named_parameters(), others, strict=True):
        assert torch.equal(parameter, other), name


def plain_step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    train(model, optimizer, [step])


def clipped_step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, my_batch(step)).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    with optimizer.skip_synchronize():
        optimizer.step()


def plainly_clipped_step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    """As a script for DDP has it; and one rank looks at a gradient first."""
    optimizer.zero_grad()
    loss_of(model, my_batch(step)).backward()
    if hvd.rank() == 0:
        assert next(model.parameters()).grad.isfinite().all()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()


def zeroing_step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    """As some scripts have it: the model is asked to zero gradients, after the step, and in place."""
    loss_of(model, my_batch(step)).backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)


def accumulating_step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        loss_of(model, my_batch(3 * step + part)).backward()
    optimizer.step()


def scaled_step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    if not hasattr(optimizer, "scaler"):
        optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer.zero_grad()
    loss = loss_of(model, my_batch(step))
    if step % 7 == 3 and hvd.rank() == 1:
        loss = loss * float("inf")
    optimizer.scaler.scale(loss).backward()
    optimizer.scaler.step(optimizer)
    optimizer.scaler.update()


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    listed = list(parameters)
    groups = [{"params": listed[:3], "lr": 0.05, "momentum": 0.5}, {"params": listed[3:]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class Tied(torch.nn.Module):
    """A language model's way: the matrix of the first layer is that of the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = torch.nn.Linear(16, 24, bias=False)
        self.inner = torch.nn.Linear(24, 24)
        self.decoder = torch.nn.Linear(24, 16, bias=False)
        self.decoder.weight = torch.nn.Parameter(self.encoder.weight.detach().T.contiguous())
        self.again = torch.nn.Linear(16, 24, bias=False)
        self.again.weight = self.encoder.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(torch.tanh(self.encoder(x))))
        return F.linear(self.again(self.decoder(x)), self.inner.weight[:4])


class Borrowing(torch.nn.Module):
    """Uses parameters of modules whose forward passes never run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.listed = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(16, 16) / 4) for _ in range(3))
        self.head = torch.nn.Linear(16, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention(x[None], x[None], x[None], need_weights=False)[0][0]
        for matrix in self.listed:
            y = torch.tanh(y @ matrix)
        out: torch.Tensor = self.head(y)
        return out


CASES: dict[str, tuple[Callable[[], torch.nn.Module], MakeOptimizer, Step, dict[str, Any]]] = {
    "momentum": (make_model, sgd, plain_step, {}),
    "adamw": (make_model, adamw, plain_step, {}),
    "groups": (make_model, two_groups, plain_step, {}),
    "clipping": (make_model, adamw, clipped_step, {}),
    "plain clipping": (make_model, adamw, plainly_clipped_step, {}),
    "zeroing": (make_model, sgd, zeroing_step, {}),
    "accumulation": (make_model, sgd, accumulating_step, {"backward_passes_per_step": 3}),
    "scaler": (make_model, adamw, scaled_step, {}),
    "tied": (Tied, sgd, plain_step, {}),
    "borrowed": (Borrowing, adamw, plain_step, {}),
    "fp16": (make_model, sgd, plain_step, {"compression": hvd.Compression.fp16}),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks
def test_forward_is_the_same_to_the_bit(name: str) -> None:
    """Over 80 steps, with a schedule that is stepped before the update has been applied, and some evaluations."""
    make, kind, step, options = CASES[name]
    models = [make(), make()]
    optimizers = [distributed(models[0], "none", kind, **options), distributed(models[1], "forward", kind, **options)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99) for optimizer in optimizers]
    overlapped = 0
    for number in range(80):
        for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
            step(model, optimizer, number)
            schedule.step()
        overlapped += waits(optimizers[1])
        if number % 20 == 10:
            with torch.no_grad():
                losses = [loss_of(model.eval(), everybodys_batch(number)) for model in models]
            assert torch.equal(*losses)
            for model in models:
                model.train()
    hvd.synchronize_parameters()
    assert overlapped > 60
    assert not waits(optimizers[1])
    assert_bitwise(models[1], models[0])
    assert_equal_on_all_ranks(models[1])
    assert optimizers[1].statistics().steps == optimizers[0].statistics().steps


def simulate_stale(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, schedule: Any, clip: float = 0.0
) -> None:
    """The one-step-delay rule in one process, on everybody's batches: x is changed in step t + 1 by the gradient of
    step t and what was the learning rate then."""
    waiting: tuple[list[torch.Tensor], float] | None = None
    for step in [*steps, None]:
        gradients = None
        if step is not None:
            optimizer.zero_grad()
            loss_of(model, everybodys_batch(step)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        now = optimizer.param_groups[0]["lr"]
        if waiting is not None:
            optimizer.param_groups[0]["lr"] = waiting[1]
            for parameter, gradient in zip(model.parameters(), waiting[0], strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.param_groups[0]["lr"] = now
        if gradients is not None:
            waiting = gradients, now
            schedule.step()


@pytest.mark.parametrize(("clip", "explicit"), [(0.0, True), (0.3, True), (0.3, False)])
@pytest.mark.parametrize("make", [sgd, adamw])
@on_ranks
def test_stale_is_the_rule_of_one_step_delay(make: MakeOptimizer, clip: float, explicit: bool) -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model, "stale", make), make(reference.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(chosen, 5, gamma=0.5) for chosen in (optimizer, plain)]
    start = bits(model)
    for step in range(20):
        before = bits(model)
        optimizer.zero_grad()
        loss_of(model, my_batch(step)).backward()
        assert_bitwise(model, before)
        if explicit and clip:
            optimizer.synchronize()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize() if explicit and clip else contextlib.nullcontext():
            optimizer.step()
        schedules[0].step()
        assert waits(optimizer)
        if step == 0:
            assert_bitwise(model, start)
    optimizer.synchronize_parameters()
    simulate_stale(reference, plain, range(20), schedules[1], clip)
    assert_same(model, reference)


@on_ranks
def test_gradients_under_way_are_not_to_be_replaced_or_added_to() -> None:
    for overlap in ("forward", "stale"):
        model = make_model()
        optimizer = distributed(model, overlap)
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        loss_of(model, my_batch(3)).backward()
        taken = model[0].weight.grad
        with pytest.raises(ValueError, match=rf"overlap='{overlap}' allows one backward pass before step\(\)"):
            loss_of(model, my_batch(3)).backward()
        if overlap == "forward":
            with pytest.raises(AssertionError, match="race condition"):
                optimizer.zero_grad()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"'0\.weight' was asked for before step\(\), which has it now"):
            taken.sum()
        hvd.synchronize_parameters()
        assert_equal_on_all_ranks(model)
        if overlap == "forward":
            loss_of(model, my_batch(4)).backward()
            model.zero_grad()
            with pytest.raises(RuntimeError, match=r"was replaced or forgotten while it was being reduced"):
                optimizer.step()
            optimizer.zero_grad()


@on_ranks
def test_a_checkpoint_in_the_middle_restores_exactly() -> None:
    for overlap in ("forward", "stale"):
        for make in (sgd, adamw):
            model = make_model()
            optimizer = distributed(model, overlap, make)
            train(model, optimizer, range(5))
            assert waits(optimizer)
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            assert not waits(optimizer)
            train(model, optimizer, range(5, 9))
            hvd.synchronize_parameters(optimizer)

            file.seek(0)
            saved = torch.load(file)
            again = make_model(seed=9)
            resumed = distributed(again, overlap, make)
            train(again, resumed, range(2))  # an update waits while the checkpoint is loaded
            again.load_state_dict(saved["model"])
            resumed.load_state_dict(saved["optimizer"])
            assert_bitwise(again, list(saved["model"].values()))
            train(again, resumed, range(5, 9))
            resumed.synchronize()
            assert_bitwise(again, model)


@on_ranks
def test_whoever_reads_parameters_sees_the_update() -> None:
    """Each way of reading them that can be noticed, and `synchronize` for those that cannot."""
    models = [make_model(), make_model()]
    optimizers = [distributed(models[0], "none"), distributed(models[1], "forward")]
    plain, model, optimizer = models[0], models[1], optimizers[1]
    inputs = everybodys_batch(0)[0]

    def evaluated() -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = model.eval()(inputs)
        model.train()
        return out.clone()

    reads: list[Callable[[], Any]] = [
        evaluated,
        lambda: model(inputs),
        model.state_dict,
        optimizer.state_dict,
        lambda: hvd.broadcast_parameters(model.named_parameters(), root_rank=0),
        lambda: hvd.broadcast_optimizer_state(optimizer, root_rank=0),
        lambda: copy.deepcopy(optimizer),
        optimizer.synchronize,
        optimizer.synchronize_parameters,
        hvd.synchronize_parameters,
    ]
    train(plain, optimizers[0], range(1))
    train(model, optimizer, range(1))
    for number, read in enumerate(reads):
        train(plain, optimizers[0], [number])
        train(model, optimizer, [number])
        assert waits(optimizer), number
        with pytest.raises(AssertionError):
            assert_bitwise(model, plain)  # a bare read does not, which is what synchronize_parameters is for
        read()
        assert not waits(optimizer), number
        assert_bitwise(model, plain)
    with torch.no_grad():
        assert torch.equal(evaluated(), plain(inputs))


@on_ranks
def test_synchronize_after_a_step_is_no_operation_of_all_ranks() -> None:
    for overlap in ("forward", "stale"):
        model = make_model()
        optimizer = distributed(model, overlap)
        for step in range(4):
            train(model, optimizer, [step])
            if hvd.rank() == 0:
                model.state_dict()  # so that on this rank alone nothing waits any more
            optimizer.synchronize()
            assert_equal_on_all_ranks(model)
        assert optimizer.statistics().steps == 4


@on_ranks
def test_a_rank_without_gradients_takes_part_in_clipping() -> None:
    models = [make_model(), make_model()]
    optimizers = [distributed(model, way) for model, way in zip(models, ("none", "forward"), strict=True)]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, my_batch(step))
            if step != 2 or hvd.rank() == 0:
                loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            with optimizer.skip_synchronize():
                optimizer.step()
    hvd.synchronize_parameters()
    assert_bitwise(models[1], models[0])


@on_ranks
def test_only_what_a_forward_needs_is_applied() -> None:
    model = make_model()
    optimizer = distributed(model, "forward")
    train(model, optimizer, range(3))
    before = bits(model)
    model[0](everybodys_batch(0)[0])
    assert not torch.equal(model[0].weight, before[0])
    assert torch.equal(model[4].weight, before[4]), "of another bucket"
    assert waits(optimizer)
    assert all(p.grad is None for p in model.parameters())
    optimizer.zero_grad()
    assert waits(optimizer), "zero_grad has nothing to wait for"
    train(model, optimizer, range(3, 4))
    assert_equal_on_all_ranks(model)


@on_ranks
def test_training_goes_on_in_shared_memory_and_one_message_a_bucket() -> None:
    model = make_model()
    optimizer = distributed(model, "forward")
    train(model, optimizer, range(2))
    channel = basics.runtime().client.channel
    sent: list[Any] = []
    channel.send = lambda message, send=channel.send: (sent.append(message), send(message))  # type: ignore[method-assign]
    try:
        train(model, optimizer, range(2, 5))
        optimizer.synchronize()
    finally:
        del channel.send
    assert optimizer.statistics().buckets > 1
    assert len(sent) == 3 * optimizer.statistics().buckets
    loss_of(model, my_batch(5)).backward()
    optimizer.synchronize()
    assert all(in_arena(p.grad) for p in model.parameters())
    with optimizer.skip_synchronize():
        optimizer.step()


class Counting(torch.optim.SGD):
    """A class of a script's own, which counts its steps in the groups, and looks at all gradients at once."""

    def step(self, closure: Any = None) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"] / (1 + float(norm)))


@on_ranks
def test_steps_that_cannot_be_split_are_taken_as_a_whole() -> None:
    for make, hooked in ((functools.partial(Counting, lr=0.1), False), (sgd, True)):
        models = [make_model(), make_model()]
        optimizers = [distributed(model, way, make) for model, way in zip(models, ("none", "forward"), strict=True)]
        seen: list[list[torch.Tensor]] = [[], []]
        for model, optimizer, found in zip(models, optimizers, seen, strict=True):
            if hooked:
                optimizer.register_step_post_hook(lambda *_, m=model, f=found: f.extend(bits(m)))
            for step in range(6):
                train(model, optimizer, [step])
                optimizer.param_groups[0]["lr"] *= 0.9
        assert waits(optimizers[1])
        hvd.synchronize_parameters()
        assert_bitwise(models[1], models[0])
        assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
        assert optimizers[1].param_groups[0].get("taken") == optimizers[0].param_groups[0].get("taken")
        assert len(seen[0]) == len(seen[1]) == (6 * len(bits(models[0])) if hooked else 0)
        assert all(map(torch.equal, *seen))


@on_ranks
def test_parameters_without_a_module() -> None:
    """Nobody is seen to use them, so that `step` has to wait for them."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    weights = [start.clone().requires_grad_() for _ in range(2)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)], overlap=way)
        for weight, way in zip(weights, ("none", "forward"), strict=True)
    ]
    for step in range(4):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            inputs, labels = my_batch(step)
            optimizer.zero_grad()
            F.cross_entropy(inputs @ weight, labels).backward()
            optimizer.step()
        assert torch.equal(*weights)


class Fickle(torch.nn.Module):
    """Calls its layer at first, and later uses the layer's parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(16, 4).double()
        self.calls = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) if self.calls else F.linear(x, self.layer.weight, self.layer.bias)
        return out


@on_ranks
def test_a_use_that_nobody_saw_is_warned_of_and_waited_for_afterwards() -> None:
    models = [Fickle(), Fickle()]
    optimizers = [distributed(model, way) for model, way in zip(models, ("none", "forward"), strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
        hvd.synchronize_parameters()
        model.calls = False
        train(model, optimizer, [2])
    with pytest.warns(UserWarning, match=r"'layer\.(weight|bias)' was used before its last update"):
        train(models[1], optimizers[1], [3])
    assert not waits(optimizers[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(models[1], optimizers[1], range(4, 6))
    assert_equal_on_all_ranks(models[1])


@on_ranks
def test_plans_change_while_an_update_waits() -> None:
    """Parameters are added and frozen; what was under way by the old plan is applied all the same."""

    def groups(net: torch.nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": net[0].parameters(), "lr": 0.05}, {"params": net[2].parameters()}]

    for overlap in ("forward", "stale"):
        models = [make_model(), make_model()]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(groups(model), lr=0.1), overlap=way)
            for model, way in zip(models, ("none", overlap), strict=True)
        ]
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, range(3))
            model.zero_grad()
            optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.2})
            train(model, optimizer, range(3, 6))
            model[0].requires_grad_(False)
            train(model, optimizer, range(6, 9))
        hvd.synchronize_parameters()
        if overlap == "forward":
            assert_bitwise(models[1], models[0])
        assert_equal_on_all_ranks(models[1])


@on_ranks
def test_parts_of_a_model_that_take_turns() -> None:
    """What no forward pass has asked for is applied before its place in the arena is needed again."""
    trees = [torch.nn.ModuleDict({"a": make_model(1), "b": make_model(2)}) for _ in range(2)]
    optimizers = [distributed(model, way) for model, way in zip(trees, ("none", "forward"), strict=True)]
    for step in range(8):
        for tree, optimizer in zip(trees, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(tree["ab"[step // 2 % 2]], my_batch(step)).backward()
            optimizer.step()
    hvd.synchronize_parameters()
    assert_bitwise(trees[1], trees[0])


@on_ranks
def test_an_optimizer_that_is_gone_has_still_taken_its_last_step() -> None:
    models = [make_model(), make_model()]

    def trained(model: torch.nn.Module, overlap: str) -> weakref.ref[Any]:
        optimizer = distributed(model, overlap)
        train(model, optimizer, range(3))
        return weakref.ref(optimizer)

    for way in ("forward", "stale"):
        models = [make_model(), make_model()]
        trained(models[0], "none")
        reference = trained(models[1], way)
        gc.collect()
        before = bits(models[1])
        models[1].eval()
        with torch.no_grad():
            models[1](everybodys_batch(0)[0])
        with pytest.raises(AssertionError):
            assert_bitwise(models[1], before)
        if way == "forward":
            assert_bitwise(models[1], models[0])
        gc.collect()
        assert reference() is None
        assert not models[1][0]._state_dict_pre_hooks
    gc.collect()
    assert not watching._watchers
    assert not torch.nn.modules.module._global_forward_pre_hooks


@on_ranks
def test_models_can_be_copied() -> None:
    model = make_model()
    optimizer = distributed(model, "forward")
    train(model, optimizer, range(3))
    assert waits(optimizer)
    copied = copy.deepcopy(model)
    assert not waits(optimizer)
    assert_bitwise(copied, model)
    train(model, optimizer, range(3, 5))
    assert waits(optimizer)
    copied.state_dict()
    copied.load_state_dict(make_model(seed=2).state_dict())
    assert waits(optimizer), "the copy is another model"
    assert_bitwise(copied, make_model(seed=2))
    saved = io.BytesIO()
    torch.save(model, saved)
    assert not waits(optimizer)
    saved.seek(0)
    assert_bitwise(torch.load(saved, weights_only=False), model)
    assert not any(parameter.__dict__ for parameter in model.parameters())


@on_ranks
def test_weights_changed_while_their_update_waits_are_refused() -> None:
    def masked(model: torch.nn.Sequential) -> None:
        with torch.no_grad():
            model[2].weight.mul_(0.5)

    def clamped(model: torch.nn.Sequential) -> None:
        weight = model[2].weight.data  # which no version tells of
        weight.clamp_(max=float(weight.max()) / 2)

    def clamping(model: torch.nn.Sequential, steps: Iterable[int]) -> Iterator[int]:
        for step in steps:
            clamped(model)
            yield step

    message = r"'2\.weight' was changed.*overlap.*synchronize_parameters\(\)"
    for overlap in ("forward", "stale"):
        for change in (masked, clamped):
            model = make_model()
            optimizer = distributed(model, overlap)
            train(model, optimizer, range(2))
            optimizer.synchronize_parameters()
            change(model)
            train(model, optimizer, range(2, 3))
            change(model)
            with pytest.raises(ValueError, match=message):
                train(model, optimizer, range(3, 4))
            optimizer.zero_grad()
        model = make_model()  # and where that begins when only a part of the parameters is looked at in each step
        optimizer = distributed(model, overlap)
        train(model, optimizer, range(20))
        with pytest.raises(ValueError, match=message):
            train(model, optimizer, clamping(model, range(20, 36)))
        optimizer.zero_grad()


@on_ranks
def test_checkpointed_and_compiled_modules() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (True, False):
        models = [make_model(), make_model()]
        optimizers = [distributed(model, way) for model, way in zip(models, ("none", "forward"), strict=True)]
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                inputs, labels = my_batch(step)
                optimizer.zero_grad()
                out = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
                F.cross_entropy(out, labels).backward()
                optimizer.step()
        hvd.synchronize_parameters()
        assert_bitwise(models[1], models[0])

    models = [make_model(), make_model()]
    optimizers = [distributed(model, way) for model, way in zip(models, ("none", "forward"), strict=True)]
    # As after `compile()`, whose import takes long: calls go another way, and hooks run inside of what is compiled.
    models[1]._compiled_call_impl = models[1]._call_impl
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3))
    models[1](everybodys_batch(0)[0])
    assert not waits(optimizers[1])
    train(models[1], optimizers[1], [3])
    train(models[0], optimizers[0], [3])
    assert waits(optimizers[1])
    hvd.synchronize_parameters()
    assert_bitwise(models[1], models[0])


@on_ranks
def test_gradients_on_a_device() -> None:
    """Which are copied from and to the arena; in between the script's own gradients are not touched."""
    for overlap in ("forward", "stale"):
        with fake_gpu() as layer, pytest.MonkeyPatch.context() as patch:
            copy_later = layer.copy

            def copy_at_once(to: Any, source: Any, later: Any = copy_later, layer: Any = layer) -> Any:
                """What comes later on a stream finds the copy made; the fake has no stream for the optimizer."""
                copying = later(to, source)
                layer.make(layer.started)
                return copying

            patch.setattr(layer, "copy", copy_at_once)
            start = torch.linspace(0, 1, 40, dtype=torch.float64)
            weights = [gpu(start).requires_grad_() for _ in range(2)]
            optimizers = [
                hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)], overlap=way)
                for weight, way in zip(weights, ("none", overlap), strict=True)
            ]
            for step in range(5):
                for weight, optimizer in zip(weights, optimizers, strict=True):
                    optimizer.zero_grad()
                    (weight * (step + 1.0 + hvd.rank())).sum().backward()
                    optimizer.step()
            hvd.synchronize_parameters()
            # The gradients do not depend on the weights, so that a delay changes nothing.
            torch.testing.assert_close(weights[1].detach().cpu(), weights[0].detach().cpu())


@on_ranks
def test_what_makes_no_sense_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"overlap='sideways' is not one of none, forward, stale"):
        distributed(model, "sideways")
    with pytest.raises(ValueError, match=r"cannot be used with the algorithm asp"):
        distributed(model, "forward", functools.partial(torch.optim.SGD, lr=0.1), algorithm="asp")
    with pytest.raises(ValueError, match="op=Adasum"):
        distributed(model, "stale", op=hvd.Adasum)
    with pytest.raises(ValueError, match="L-BFGS"):
        distributed(model, "forward", torch.optim.LBFGS)
    optimizer = distributed(model, "forward")
    with pytest.raises(ValueError, match=r"step\(closure\)"):
        optimizer.step(lambda: 0.0)

    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = distributed(table, "forward", functools.partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(ValueError, match=r"'weight' is sparse.*sparse_as_dense=True"):
        table(torch.tensor([hvd.rank()])).sum().backward()
    tables = [torch.nn.Embedding.from_pretrained(torch.ones(10, 4), freeze=False, sparse=True) for _ in range(2)]
    plain = functools.partial(torch.optim.SGD, lr=0.1)
    for chosen, way in zip(tables, ("none", "forward"), strict=True):
        optimizer = distributed(chosen, way, plain, sparse_as_dense=True)
        for step in range(3):
            optimizer.zero_grad()
            chosen(torch.tensor([hvd.rank(), step])).sum().backward()
            optimizer.step()
    hvd.synchronize_parameters()
    assert torch.equal(tables[0].weight, tables[1].weight)


@on_ranks
def test_the_setting_is_for_unmodified_scripts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_OVERLAP", "stale")
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        assert takes_part(optimizer.process_set)
        start = bits(model)
        train(model, optimizer, range(1))
        assert_bitwise(model, start)
        with pytest.raises(ValueError, match=r"overlap='stale' \(of FUSION_OVERLAP\) cannot be used"):
            hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), algorithm="local_sgd")
        patch.setenv("FUSION_OVERLAP", "")
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        assert not hasattr(optimizer, "synchronize_parameters")


def after_the_other_has_left(way: str) -> tuple[str, bool]:
    """Rank 0 takes a step; rank 1 leaves the job instead, and what it was needed for fails. Returns what that rank got
    from whatever waits first, and whether it could go on without waiting for the same again."""
    model = make_model()
    optimizer = distributed(model, "stale" if way == "step" else "forward")
    train(model, optimizer, range(3))
    hvd.synchronize_parameters()
    before = bits(model)
    told, free = "", True
    if hvd.rank() == 0:
        train(model, optimizer, [3])  # returns, whatever becomes of it
        if way == "load":
            with pytest.warns(UserWarning, match=r"the last update of an optimizer is lost.*rank 1"):
                model.load_state_dict(make_model().state_dict())
            before = bits(make_model())
        else:
            waiting = {
                "forward": lambda: model(my_batch(0)[0]),
                "state_dict": model.state_dict,
                "step": lambda: train(model, optimizer, [4]),
            }
            with pytest.raises(hvd.HorovodInternalError) as raised:
                waiting[way]()
            told = str(raised.value)
        free = not waits(optimizer)
        hvd.synchronize_parameters()
        assert_bitwise(model, before)
    hvd.shutdown()
    hvd.init()
    return told, free


def test_a_failed_reduction_is_raised_by_whoever_waits_for_it() -> None:
    with Job((2,), {"HOROVOD_START_TIMEOUT": "120"}) as job:
        for way in ("forward", "state_dict", "step", "load"):
            (told, free), _ = job.run(after_the_other_has_left, way)
            assert free, way
            assert "rank 1" in told or way == "load", way


@on_ranks
def test_buckets_that_the_next_forward_pass_needs_first_are_the_most_urgent() -> None:
    """Learned from the first forward pass, which runs through the layers in another order than they are named in."""

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
            self.order = (2, 0, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in self.order:
                x = self.layers[index](x).relu()
            return x

    def buckets_of(overlap: str) -> tuple[Odd, list[Any]]:
        model = Odd()
        optimizer = distributed(model, overlap)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
        hvd.synchronize_parameters()
        return model, sorted(optimizer._sync.plan.buckets, key=lambda bucket: bucket.urgency)

    model, buckets = buckets_of("forward")
    layer_of = {id(p): index for index, layer in enumerate(model.layers) for p in layer.parameters()}
    first_needed = [min(model.order.index(layer_of[id(s.parameter)]) for s in bucket.slots) for bucket in buckets]
    assert len(buckets) > 1
    assert first_needed == sorted(first_needed)
    assert [bucket.urgency for bucket in buckets] == list(range(1, len(buckets) + 1))
    for overlap in ("none", "stale"):  # all are waited for at once
        assert {bucket.urgency for bucket in buckets_of(overlap)[1]} == {1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_PRIORITY", "0")
        assert {bucket.urgency for bucket in buckets_of("forward")[1]} == {0}


@on_ranks
def test_a_set_of_one_rank_has_the_same_methods_and_nothing_is_late() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), overlap="forward", process_set=sets[hvd.rank()]
    )
    plain = sgd(reference.parameters())
    for step in range(2):
        for trained, of in ((optimizer, model), (plain, reference)):
            trained.zero_grad()
            loss_of(of, my_batch(step)).backward()
            trained.step()
        optimizer.synchronize_parameters()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter, expected)
    for process_set in sets:
        hvd.remove_process_set(process_set)


@on_ranks
def test_the_exchange_of_an_update_that_waits_has_ended_when_that_is_applied() -> None:
    model = make_model()
    optimizer = distributed(model, "forward")
    train(model, optimizer, range(2))
    when = optimizer._schedule
    assert when._pending
    under_way, exchanges.last = when._under_way, ()
    assert not under_way.is_done
    optimizer.synchronize_parameters()
    assert under_way.is_done
    assert exchanges.last == (when,)
    assert when._under_way is None


@on_ranks
def test_a_step_that_is_left_out_has_ended_on_all_ranks_and_leaves_no_gradient() -> None:
    model = make_model()
    optimizer = distributed(model, "forward")
    train(model, optimizer, range(2))
    optimizer.synchronize_parameters()
    before, sync = bits(model), optimizer._sync
    sync.begin()
    optimizer._schedule._leave_out(exchanges.begin([optimizer._schedule]))
    assert sync.idle
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_bitwise(model, before)
    train(model, optimizer, range(2, 3))
    optimizer.synchronize_parameters()
    assert_equal_on_all_ranks(model)
