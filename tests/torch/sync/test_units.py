"""What codecs remember is in the script's unit, whatever becomes of its loss scale and its learning rate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.codecs import CODECS
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.sync.carried import CarriedState
from tests.harness import Job, on_ranks

SHAPE = 40, 100
HALVES, DOUBLES = [65536.0 / 2**k for k in range(7)], [2.0**k for k in range(11)]
TEXTS = [
    *(f"{name}(minimum=0)" for name, codec in sorted(CODECS.items()) if codec().stateful),
    "topk(minimum=0, momentum=0.9)",
    "topk(minimum=0, momentum=0.9, nesterov=True)",
    "topk(minimum=0, clip=0.5, decay=0.9)",
    "int4(minimum=0, momentum=0.9, decay=0.9)",
    "powersgd(minimum=0, rank=2, warm_start=False)",
    "demo(minimum=0, signed=True)",
]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Three ranks on two nodes."""
    with Job((2, 1), {"HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


def slopes(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SHAPE, generator=generator)


def make(text: str, lr: float = 0.125, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    return parameter, hvd.DistributedOptimizer(optimizer, [("weight", parameter)], compression=text, **options)


def train(
    parameter: torch.Tensor, optimizer: Any, scales: Sequence[float], scaler: Any = None, first: int = 0
) -> list[torch.Tensor]:
    """The parameter after each step, whose loss has that scale."""
    after = []
    for step, scale in enumerate(scales, first):
        loss = (parameter * slopes(step, hvd.rank())).sum()
        optimizer.zero_grad()
        if scaler is None:
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            parameter.grad /= scale
            optimizer.step()
        else:
            scaler.update(scale)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        after.append(parameter.detach().clone())
    return after


def scaler() -> Any:
    made = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=10**6)
    made.scale(torch.ones(1))  # it can be given a scale from now on
    return made


@pytest.mark.parametrize("text", TEXTS)
@on_ranks
def test_a_loss_scale_that_changes_changes_no_bit(text: str) -> None:
    """Scales are powers of two."""
    for scales in (HALVES, DOUBLES):
        plain = train(*make(text), [1.0] * len(scales))
        scaled = train(*make(text), scales, scaler())
        for step, (expected, found) in enumerate(zip(plain, scaled, strict=True)):
            assert torch.equal(expected, found), step
        assert len(set(hvd.allgather_object(scaled[-1].numpy().tobytes()))) == 1


@pytest.mark.parametrize("overlap", ["forward", "stale"])
@on_ranks
def test_a_loss_scale_that_changes_changes_no_bit_where_updates_come_later(overlap: str) -> None:
    """With `stale`, gradients leave after the backward pass, which a scaler brings about before it unscales them."""
    for text in ("topk(minimum=0)", "topk(minimum=0, momentum=0.9)", "powersgd(minimum=0)", "demo(minimum=0)"):
        for scales in (HALVES, DOUBLES):
            plain = train(*make(text, overlap=overlap), [1.0] * len(scales))
            scaled = train(*make(text, overlap=overlap), scales, scaler())
            for step, (expected, found) in enumerate(zip(plain, scaled, strict=True)):
                assert torch.equal(expected, found), (text, step)


@on_ranks
def test_a_scale_that_the_script_says_itself_changes_no_bit() -> None:
    text = "topk(minimum=0, momentum=0.9)"
    plain = train(*make(text), [1.0] * len(HALVES))
    parameter, optimizer = make(text)
    after = []
    for step, scale in enumerate(HALVES):
        optimizer.loss_scale = scale
        after += train(parameter, optimizer, [scale], first=step)
    assert all(map(torch.equal, plain, after))
    with pytest.raises(ValueError, match="a loss scale is a finite number above 0, by which the loss is multiplied"):
        optimizer.loss_scale = 0.0
    assert optimizer.loss_scale == HALVES[-1]


@on_ranks
def test_each_backward_pass_has_the_scale_of_its_own_loss() -> None:
    """Two optimizers, of which one has a scaler, and one that is scaled by another; both losses are scaled before the
    first backward pass. The third is not scaled at all."""
    text = "topk(minimum=0)"
    plain = train(*make(text), [1.0] * 4)
    made = [make(text) for _ in range(3)]
    scalers = [scaler(), scaler(), None]
    for step, expected in enumerate(plain):
        losses = []
        for number, ((parameter, optimizer), its) in enumerate(zip(made, scalers, strict=True)):
            optimizer.zero_grad()
            loss = (parameter * slopes(step, hvd.rank())).sum()
            if its is not None:
                its.update(2.0 ** (3 + number + step))
                loss = its.scale([loss])[0]
            losses.append(loss)
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        for (parameter, optimizer), its in zip(made, scalers, strict=True):
            if its is None:
                optimizer.step()
            else:
                its.step(optimizer)
                its.update()
            assert torch.equal(parameter, expected)


@on_ranks
def test_what_workers_carry_goes_along_with_their_next_gradients() -> None:
    """In a new membership epoch, where no daemon has kept anything by buckets. Nothing is left of a parameter that has
    another size now."""
    shapes = {"weight": (300,), "changed": (200,)}
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=1.0), parameters.items(), compression="topk(density=1.0, minimum=0)",
        op=hvd.Sum,
    )  # fmt: skip
    owed = {"weight": np.full(300, 1.0 + hvd.rank(), np.float32), "changed": np.ones(100, np.float32)}
    optimizer._sync.checkpoint.settle(CarriedState(), CarriedState(residuals=owed), hvd.local_rank() == 0)
    for step in range(2):  # once, and not again
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in parameters.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        assert set(parameters["weight"].tolist()) == {-9.0 - 3 * step}
        assert set(parameters["changed"].tolist()) == {-3.0 - 3 * step}


@on_ranks
def test_what_a_codec_remembers_is_meant_for_the_rates_from_when_it_is_used() -> None:
    """A tuner that has begun without a codec takes one, and then another."""
    parameter, optimizer = make("dense")
    train(parameter, optimizer, [1.0])
    checkpoint = optimizer._sync.checkpoint
    assert not checkpoint.units.meant.rates
    checkpoint.use("topk(minimum=0)")
    assert checkpoint.units.meant.rates == {"weight": 0.125}
    optimizer.param_groups[0]["lr"] = 0.0625
    checkpoint.use("randomk(minimum=0)")  # what is remembered by the first one was meant for the rate of then
    assert checkpoint.units.factors(optimizer._sync.slots) == (2.0,)


@on_ranks
def test_ranks_of_a_node_whose_losses_are_scaled_differently_are_told_so() -> None:
    parameter, optimizer = make("topk(minimum=0)")
    train(parameter, optimizer, [1.0])
    optimizer.loss_scale = 8.0 if hvd.rank() == 1 else 4.0
    with pytest.raises(
        HorovodInternalError,
        match="the loss of rank 0 of the process set is scaled by 4, and that of rank 1 by 8; give the GradScalers",
    ):
        (parameter * slopes(1, hvd.rank())).sum().backward()  # type: ignore[no-untyped-call]


SUMS = [f"{name}(minimum=0)" for name, codec in sorted(CODECS.items()) if codec().stateful and name != "demo"]
FALLS = [0.5, 0.5, 0.05, 0.05, 0.005, 0.005, 0.05, 0.5]


@pytest.mark.parametrize("text", [*SUMS, "demo(minimum=0, decay=1.0)"])
@on_ranks
def test_nothing_is_lost_while_the_rate_falls_a_hundredfold_and_the_scale_sixty_fourfold(text: str) -> None:
    """What was applied, and what waits times the rate at which it will be, is what plain SGD would have applied."""
    (parameter, optimizer), its = make(text), scaler()
    due = torch.zeros(SHAPE)
    for step, rate in enumerate(FALLS):
        optimizer.param_groups[0]["lr"] = rate
        applied = train(parameter, optimizer, [HALVES[min(step, 6)]], its, first=step)[0]
        due -= rate * sum(slopes(step, rank) for rank in range(hvd.size())) / hvd.size()
        residuals = hvd.allgather_object(residual_of(optimizer))
        waiting = (residuals[0] + residuals[2]) / hvd.size()  # of the first rank of each node
        torch.testing.assert_close(applied - rate * waiting, due, rtol=1e-4, atol=2e-5)


def residual_of(optimizer: Any) -> torch.Tensor:
    """This node's."""
    state = optimizer.state_dict()["fusion_rt"]["state"]
    found = torch.zeros(SHAPE).view(-1)
    for key, value in state.items():
        if ":residual/" in key:
            found += value
    return found.view(SHAPE)


@on_ranks
def test_below_a_hundredth_of_the_highest_rate_a_residual_grows_no_more() -> None:
    parameter, optimizer = make(f"topk(density={1 / 4000}, minimum=0, value='fp32')")
    norms = []
    for step, rate in enumerate((0.5, 0.005, 1e-4, 1e-12, 0.5)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (parameter * slopes(step, hvd.rank()) * (step == 0)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        norms.append(float(torch.linalg.vector_norm(residual_of(optimizer))))
    growth = [norm / norms[0] for norm in norms]
    assert growth == pytest.approx([1, 100, 100, 100, 1], rel=0.02)


@on_ranks
def test_what_was_remembered_for_other_ranks_is_loaded_in_the_unit_of_these() -> None:
    """A checkpoint of six ranks that is loaded by three: each of their gradients counted half as much."""
    parameter, optimizer = make("topk(minimum=0, momentum=0.9)")
    train(parameter, optimizer, [1.0] * 2)
    saved = optimizer.state_dict()
    assert saved["fusion_rt"]["weight"] == pytest.approx(1 / 3)
    saved["fusion_rt"]["weight"] = 1 / 6
    _, restored = make("topk(minimum=0, momentum=0.9)")
    restored.load_state_dict(saved)
    found = restored.state_dict()["fusion_rt"]["state"]
    for key, value in saved["fusion_rt"]["state"].items():
        halved = any(f":{kind}/" in key for kind in ("residual", "velocity"))
        assert torch.equal(found[key], value / 2 if halved else value), key


@on_ranks
def test_clipping_in_the_codec_does_not_depend_on_the_loss_scale_or_on_the_ranks_of_a_node() -> None:
    """All ranks have the same gradient of norm 60, and the codec may send 3: of the two thirds of the mean that the
    first node has it sends 3 / sqrt(2), and so much the other node of its third."""
    slope = torch.full(SHAPE, 60 / 4000**0.5)
    for scale in (1.0, 1024.0):
        parameter, optimizer = make("topk(density=1.0, minimum=0, value='fp32', clip=3.0)", lr=1.0)
        optimizer.loss_scale = scale
        ((parameter * slope).sum() * scale).backward()  # type: ignore[no-untyped-call]
        norm = float(torch.linalg.vector_norm(parameter.grad)) / scale
        assert norm == pytest.approx(2 * 3 / 2**0.5, rel=1e-4)
        optimizer.step()


def final_loss(text: str, rate: float, scaled: bool = True) -> float:
    """The loss on other data after 120 steps. Six in a row overflow, or, if losses are not scaled, are left out."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    teacher = torch.nn.Linear(32, 8)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=text)
    its = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=10**6, enabled=scaled)
    for step in range(120):
        overflows = 40 <= step < 46
        if overflows and not scaled:
            continue
        inputs = torch.randn(32, 32, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        loss = torch.nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
        optimizer.zero_grad()
        its.scale(loss * torch.inf if overflows else loss).backward()  # type: ignore[no-untyped-call]
        its.step(optimizer)
        its.update()
    assert its.get_scale() == (1024 if scaled else 1)
    inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1)))


@on_ranks
def test_six_overflows_in_a_row_cost_six_steps_and_no_more() -> None:
    dense = final_loss("dense", 0.3)
    for text in ("topk(minimum=0)", "powersgd(minimum=0)", "int4(minimum=0)", "demo(minimum=0)"):
        assert final_loss(text, 0.3) == pytest.approx(dense, rel=0.04), text
    text = "topk(minimum=0, momentum=0.9)"  # which starts more slowly than the momentum of an optimizer
    assert final_loss(text, 0.03) == pytest.approx(final_loss(text, 0.03, scaled=False), rel=0.01)


def steps_warned_of(clip: bool, its: Any, text: str = "topk(minimum=0)") -> int:
    """Trains 40 steps with the same gradient, of which elements wait for long; returns how many warnings there were."""
    parameter, optimizer = make(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            optimizer.zero_grad()
            its.scale((parameter * slopes(0, 0)).sum()).backward()
            its.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_([parameter], 1.0)
            its.step(optimizer)
            its.update()
    told = [str(each.message) for each in caught if "the script clips gradients" in str(each.message)]
    assert all("after the codec topk has sent them" in one and "clip in the codec instead" in one for one in told)
    return len(told)


@on_ranks
def test_a_script_that_clips_what_has_waited_is_warned_once() -> None:
    plain = torch.amp.GradScaler("cpu", enabled=False)
    assert steps_warned_of(True, plain) == 1
    assert steps_warned_of(True, scaler()) == 1
    assert steps_warned_of(False, scaler()) == steps_warned_of(False, plain) == 0
    assert steps_warned_of(True, plain, "int4(minimum=0)") == 0
