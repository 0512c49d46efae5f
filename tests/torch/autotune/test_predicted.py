"""`--auto`, with links and a model that behave as they are told to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fusion_rt import wire
from fusion_rt.choice import prediction
from fusion_rt.choice.candidates import Setting
from fusion_rt.choice.prediction import Conditions
from fusion_rt.settings import Settings
from fusion_rt.torch.autotune.director import Circumstances, Director, Step
from fusion_rt.torch.autotune.predicted import Predicted
from fusion_rt.units import MIB
from tests.for_each import for_each
from tests.torch.autotune.fakes import TENSORS, circumstances

COMPUTING = 0.1
TOPK = "topk(density=0.01)"


def settings(level: str, **changes: Any) -> Settings:
    return Settings(**{"auto": level, "auto_every": 20, "autotune_steps_per_sample": 4, **changes})


def truth(where: Circumstances, seconds_per_byte: float) -> Conditions:
    tensors = tuple(MIB for _ in where.tensors)
    return Conditions(4, 2, where.latency, seconds_per_byte, COMPUTING, tensors, 2 * MIB)


def steps_as_predicted(conditions: Conditions) -> Callable[[wire.Tuning], Step]:
    """The model is right, about these links."""

    def step(tuning: wire.Tuning) -> Step:
        assert tuning.threshold is not None
        assert tuning.exchange is not None
        setting = Setting(tuning.threshold, exchange=tuning.exchange, codec=tuning.codec, late=bool(tuning.late))
        found = prediction.predict(conditions, setting)
        return Step(found.step, found.exposed, found.reducing)

    return step


def pilot_of(settings: Settings, where: Circumstances) -> Director:
    return Director(Predicted(settings, where), settings.autotune_steps_per_sample)


def follow(pilot: Director, step: Callable[[wire.Tuning], Step], plans: int) -> list[wire.Tuning]:
    found = [pilot.next()]
    while len(found) < plans and found[-1].steps:
        for _ in range(found[-1].steps):
            pilot.stepped(step(found[-1]))
        found.append(pilot.next())
    return found


def test_it_measures_tries_and_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    where = circumstances(seconds_per_byte=8e-8)
    plans = follow(pilot_of(settings("lossy"), where), steps_as_predicted(truth(where, 8e-8)), 3)
    assert [plan.codec for plan in plans] == ["dense", TOPK, TOPK]
    assert [plan.steps for plan in plans] == [5 + 4, 2 + 4, 20]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert f"--auto=lossy tries {TOPK}" in told[0]
    assert told[1].endswith(plans[2].why)
    assert f"chose {TOPK}" in told[1]
    assert "measured to take" in told[1]


def test_what_is_measured_counts_and_not_what_was_predicted() -> None:
    """Every codec is slow here, whatever the links."""
    where = circumstances(seconds_per_byte=8e-8)
    model = steps_as_predicted(truth(where, 8e-8))

    def step(tuning: wire.Tuning) -> Step:
        found = model(tuning)
        return found if tuning.codec == "dense" else found._replace(seconds=100.0)

    plans = follow(pilot_of(settings("lossy", auto_every=0), where), step, 20)
    assert plans[-1].steps == 0
    assert plans[-1].codec == "dense"
    tried = [(plan.codec, plan.threshold, plan.exchange) for plan in plans[:-1]]
    assert len(tried) <= 8
    lossy = [setting for setting in tried if setting[0] != "dense"]
    assert len(lossy) == len(set(lossy))  # what is slow is tried once; what is as fast as the default is measured again


@for_each("level", ["lossless", "lossy", "async"])
@for_each("seed", range(5))
def test_what_is_kept_was_the_fastest_of_what_was_tried_or_changes_less(level: str, seed: int) -> None:
    where = circumstances(seconds_per_byte=8e-8, may_be_late=True)
    draw = random.Random(seed)
    took: dict[tuple[Any, ...], float] = {}

    def step(tuning: wire.Tuning) -> Step:
        key = tuning.codec, tuning.threshold, tuning.exchange, tuning.late
        return Step(took.setdefault(key, draw.uniform(0.5, 2.0)), 0.1, 0.4)

    plans = follow(pilot_of(settings(level, auto_every=0), where), step, 20)
    last = plans[-1]
    assert last.steps == 0
    assert took[last.codec, last.threshold, last.exchange, last.late] <= prediction.ALIKE * min(took.values())


def test_buckets_that_cost_more_than_was_thought_become_fewer() -> None:
    where = circumstances(seconds_per_byte=8e-8, tensors=TENSORS * 4)
    model = steps_as_predicted(replace(truth(where, 8e-8), overheads={("dense", False): 0.5}))
    plans = follow(pilot_of(settings("lossless", auto_every=0), where), model, 20)
    assert plans[-1].threshold == max(plan.threshold or 0 for plan in plans)


def test_it_looks_again() -> None:
    where = circumstances(seconds_per_byte=8e-11)
    speeds = [8e-11]

    def step(tuning: wire.Tuning) -> Step:
        return steps_as_predicted(truth(where, speeds[0]))(tuning)

    pilot = pilot_of(settings("lossy"), where)
    plans = follow(pilot, step, 6)
    assert {plan.codec for plan in plans} == {"dense"}
    assert plans[-1].steps == 20
    speeds[0] = 8e-8  # somebody else uses the links, too
    for _ in range(20):
        pilot.stepped(step(plans[-1]))
    plans = follow(pilot, step, 8)
    assert plans[-1].codec == TOPK


def test_as_long_as_nothing_changes_a_look_tries_nothing_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    where = circumstances(seconds_per_byte=8e-9)
    step = steps_as_predicted(truth(where, 8e-9))
    pilot = pilot_of(settings("lossless"), where)
    plans = follow(pilot, step, 20)
    settled = next(number for number, plan in enumerate(plans) if plan.steps == 20)
    assert {plan.steps for plan in plans[settled:]} == {20}
    told = capsys.readouterr().err.splitlines()
    assert len(told) == settled


def test_it_can_be_told_not_to_look_again() -> None:
    where = circumstances(seconds_per_byte=8e-8)
    plans = follow(pilot_of(settings("lossy", auto_every=0), where), steps_as_predicted(truth(where, 8e-8)), 20)
    assert plans[-1].steps == 0


def test_links_that_carry_less_than_was_measured_are_noticed() -> None:
    """Measured to carry 100 Gbit/s at the start; in truth it is a thousandth of that."""
    where = circumstances(seconds_per_byte=8e-11)
    plans = follow(pilot_of(settings("lossy"), where), steps_as_predicted(truth(where, 8e-8)), 3)
    assert plans[1].codec == TOPK


@for_each("speed", [8e-11, 8e-9, 8e-8])
def test_lossless_changes_neither_codec_nor_when_updates_are_applied(speed: float) -> None:
    where = circumstances(seconds_per_byte=speed, may_be_late=True)
    for plan in follow(pilot_of(settings("lossless"), where), steps_as_predicted(truth(where, speed)), 6):
        assert plan.codec == "dense"
        assert not plan.late


def test_who_asked_for_late_updates_keeps_them() -> None:
    """Then they cannot be made anything else, and plans say nothing of it."""
    where = circumstances(seconds_per_byte=8e-8, may_be_late=False)
    for level in ("lossless", "async"):
        plans = follow(pilot_of(settings(level), where), steps_as_predicted(truth(where, 8e-8)), 6)
        assert {plan.late for plan in plans} == {None}


def test_async_makes_updates_late_where_that_helps() -> None:
    where = circumstances(seconds_per_byte=3e-9, may_be_late=True)
    plans = follow(pilot_of(settings("async"), where), steps_as_predicted(truth(where, 3e-9)), 3)
    assert [plan.late for plan in plans][:2] == [False, True]
    assert plans[-1].late
    assert {plan.codec for plan in plans} == {"dense", "fp16"}, "it would not be hidden without a codec"


@for_each(
    "change",
    [
        {"reduction": wire.Reduction(codec="fp16")},
        {"reduction": wire.Reduction(op="max")},
        {"tensors": (wire.TensorSpec("w", "int64", (1 << 20,)),)},
        {"tensors": (wire.TensorSpec("w", "float32", (1 << 20,), sparse=1),)},
    ],
)
def test_what_cannot_or_shall_not_be_compressed_is_not(change: dict[str, Any]) -> None:
    where = replace(circumstances(seconds_per_byte=8e-7), **change)
    pilot = pilot_of(settings("lossy"), where)
    plans = follow(pilot, lambda tuning: Step(1.0, 0.9, 0.9), 4)
    assert {plan.codec for plan in plans} == {where.reduction.codec}


def test_a_look_that_a_join_cut_short_is_taken_again() -> None:
    pilot = pilot_of(settings("lossy"), circumstances())
    first = pilot.next()
    pilot.stepped(Step(0.1, 0.0, 0.0))
    second = pilot.next()
    assert (second.codec, second.threshold) == (first.codec, first.threshold)
    assert second.steps == 2 + 4
