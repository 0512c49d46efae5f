"""LinearScaling against rates worked out by hand, also while ranks come and go."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch

from fusion_rt.torch.core import runtime
from fusion_rt.torch.large_batch import LinearScaling
from tests.for_each import for_each


class Membership:
    """What the scheduler is told about the job."""

    size: int | None = None  # None: not initialised


@pytest.fixture
def job_of(monkeypatch: pytest.MonkeyPatch) -> type[Membership]:
    monkeypatch.setattr(Membership, "size", 4)
    monkeypatch.setattr(runtime, "is_initialized", lambda: Membership.size is not None)
    monkeypatch.setattr(runtime, "size", lambda: Membership.size)
    return Membership


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0)


def rates_of(scheduler: LinearScaling, steps: int) -> list[float]:
    """The first group's rates now and after each of the steps."""
    rates = [scheduler.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


def test_warm_up_goes_from_the_base_rate_to_the_scaled_one(job_of: type[Membership]) -> None:
    # 4 ranks of 32 samples, on a rate for 32: four times it after 2 epochs of ceil(500 / 128) = 4 steps
    optimizer = optimizer_of(0.1, 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = LinearScaling(optimizer, 32, base_batch=32, dataset_size=500, warmup_epochs=2)
        rates = rates_of(scheduler, 10)
    expected = [0.1 * (1 + 3 * step / 8) for step in range(8)] + [0.4] * 3
    assert rates == pytest.approx(expected, rel=1e-12)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.04)
    assert scheduler.get_last_lr() == pytest.approx([0.4, 0.04])
    assert scheduler.effective_batch == 128
    assert scheduler.epochs_done == 2.5


@pytest.mark.parametrize(("scaling", "scale"), [("linear", 16.0), ("sqrt", 4.0), ("none", 1.0)])
def test_the_scale_follows_ranks_and_backward_passes(job_of: type[Membership], scaling: Any, scale: float) -> None:
    optimizer: Any = optimizer_of(1.0)
    optimizer.backward_passes_per_step = 4
    scheduler = LinearScaling(optimizer, 8, base_batch=8, steps_per_epoch=10, warmup_epochs=0, scaling=scaling)
    assert scheduler.scale == scale
    assert rates_of(scheduler, 2) == [scale] * 3


def test_what_comes_after_the_warm_up_is_given_epochs_or_steps(job_of: type[Membership]) -> None:
    seen: list[Any] = []

    def after(epoch: float) -> float:
        seen.append(epoch)
        return float(0.1 ** (epoch // 2))

    scheduler = LinearScaling(optimizer_of(1.0), 8, 8, steps_per_epoch=2, warmup_epochs=1, after=after)
    assert rates_of(scheduler, 5) == pytest.approx([1.0, 2.5, 4.0, 4.0, 0.4, 0.4])
    assert seen == [1.0, 1.5, 2.0, 2.5]
    by_step = LinearScaling(
        optimizer_of(1.0), 8, 8, steps_per_epoch=2, warmup_epochs=0.5, after=lambda step: 1 / step, after_by="step"
    )
    assert rates_of(by_step, 3) == pytest.approx([1.0, 4.0, 2.0, 4 / 3])


def test_the_rate_moves_when_ranks_come_and_go(job_of: type[Membership]) -> None:
    scheduler = LinearScaling(optimizer_of(1.0), 8, 8, dataset_size=64, warmup_epochs=0, rewarm_steps=4)
    assert rates_of(scheduler, 2) == [4.0] * 3
    assert scheduler.epochs_done == 1.0
    job_of.size = 8
    assert rates_of(scheduler, 6) == [4.0, 5.0, 6.0, 7.0, 8.0, 8.0, 8.0]
    assert scheduler.epochs_done == 7.0, "an epoch has become one step"
    job_of.size = 2
    assert rates_of(scheduler, 2) == [8.0, 6.5, 5.0]
    job_of.size = None  # between leaving and coming back
    assert rates_of(scheduler, 1) == [5.0, 3.5]
    job_of.size = 4  # in the middle of the way: from where it is
    assert rates_of(scheduler, 4) == pytest.approx([3.5, 3.625, 3.75, 3.875, 4.0])
    assert scheduler.epochs_done == pytest.approx(7.0 + 3 / 4 + 4 / 2)


def test_a_change_during_the_warm_up_keeps_the_epochs_that_are_done(job_of: type[Membership]) -> None:
    scheduler = LinearScaling(optimizer_of(1.0), 8, 8, dataset_size=128, warmup_epochs=2, rewarm_steps=2)
    assert rates_of(scheduler, 4) == pytest.approx([1 + 3 * step / 8 for step in range(5)])  # one epoch of 4 steps
    job_of.size = 8  # 2 steps an epoch; the scale is 6, then 8
    assert rates_of(scheduler, 3) == pytest.approx([2.5, 1 + 5 * 0.75, 8.0, 8.0])


def test_without_steps_to_move_in_the_rate_changes_at_once(job_of: type[Membership]) -> None:
    scheduler = LinearScaling(optimizer_of(1.0), 8, 8, steps_per_epoch=5, warmup_epochs=0, rewarm_steps=0)
    job_of.size = 1
    assert rates_of(scheduler, 2) == [4.0, 1.0, 1.0]


def test_outside_of_a_job_there_is_one_rank(job_of: type[Membership]) -> None:
    job_of.size = None
    scheduler = LinearScaling(optimizer_of(1.0), 512, steps_per_epoch=5, warmup_epochs=0)
    assert scheduler.effective_batch == 512
    assert scheduler.scale == 2.0


def test_a_saved_schedule_goes_on_also_with_other_ranks(job_of: type[Membership]) -> None:
    def make() -> LinearScaling:
        after = lambda epoch: 0.5**epoch  # noqa: E731
        return LinearScaling(
            optimizer_of(1.0, 0.5), 8, 8, dataset_size=128, warmup_epochs=1, after=after, rewarm_steps=3
        )

    scheduler = make()
    rates_of(scheduler, 3)
    job_of.size = 8
    rates_of(scheduler, 1)  # in the middle of both the warm-up and the change
    file = io.BytesIO()
    torch.save({"optimizer": scheduler.optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    def resume(size: int) -> LinearScaling:
        job_of.size = size
        again = make()
        again.optimizer.load_state_dict(saved["optimizer"])
        again.load_state_dict(saved["scheduler"])
        return again

    same, fewer = resume(8), resume(2)
    job_of.size = 8
    expected = rates_of(scheduler, 6)
    assert rates_of(same, 6) == expected
    assert same.state_dict() == scheduler.state_dict()
    job_of.size = 2
    start = 4 + (8 - 4) / 3  # the scale when it was saved
    scales = [start + (2 - start) * k / 3 for k in (1, 2, 3)]
    epochs = [3 / 4 + 1 / 2 + k / 8 for k in (1, 2, 3)]
    rates = [scale * 0.5**epoch for scale, epoch in zip(scales, epochs, strict=True)]
    assert rates_of(fewer, 3) == pytest.approx([expected[0], *rates])


def test_tensor_rates_are_filled_in_place(job_of: type[Membership]) -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    LinearScaling(optimizer, 8, 8, steps_per_epoch=5, warmup_epochs=0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 2.0


@for_each(
    ("arguments", "message"),
    [
        ({}, "give one of dataset_size and steps_per_epoch"),
        ({"dataset_size": 8, "steps_per_epoch": 1}, "give one of dataset_size and steps_per_epoch"),
        ({"dataset_size": 0}, "dataset_size is 0"),
        ({"dataset_size": 8, "base_batch": 0}, "base_batch is 0"),
        ({"dataset_size": 8, "warmup_epochs": -1}, "warmup_epochs is -1"),
        ({"dataset_size": 8, "scaling": "cubic"}, "scaling is 'cubic'; it has to be one of linear, sqrt, none"),
        ({"dataset_size": 8, "after_by": "day"}, "after_by is 'day'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearScaling(optimizer_of(1.0), 8, **arguments)
