"""Plans that are replaced while a model trains: two ranks on two nodes."""

from __future__ import annotations

import contextlib
import csv
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import fusion_rt.torch as hvd
from fusion_rt import wire
from fusion_rt.choice.codec_costs import ALLREDUCE
from fusion_rt.torch.autotune.director import Director, Step
from fusion_rt.torch.autotune.replanning import Replanning
from fusion_rt.torch.sync.overlap.after_step import OneStepLate
from tests.harness import Job, on_ranks
from tests.torch.training import (
    assert_equal_on_all_ranks,
    assert_same,
    batch_of,
    everybodys_batch,
    loss_of,
    make_model,
    my_batch,
    train,
    train_reference,
)

SAMPLES, STEPS = 5, 2
TUNED = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": str(STEPS),
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": str(SAMPLES),
}
ENOUGH = (SAMPLES + 1) * (STEPS + 2) + STEPS + 4  # steps until the search is over


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((1, 1), {"HOROVOD_FUSION_THRESHOLD": "4KiB", "HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Has optimizers that are made inside of this see these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def kept_in(folder: str = "") -> Iterator[str]:
    """A directory for what is found, of this rank alone."""
    with tempfile.TemporaryDirectory() as temporary, variables({"FUSION_AUTOTUNE_DIRECTORY": folder or temporary}):
        yield folder or temporary


def distributed(model: torch.nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def trained(steps: Iterable[int], settings: dict[str, str], **options: Any) -> tuple[torch.nn.Module, Any]:
    with variables(settings):
        model = make_model()
        optimizer = distributed(model, **options)
    train(model, optimizer, steps)
    if hasattr(optimizer, "synchronize_parameters"):
        optimizer.synchronize_parameters()
    return model, optimizer


def bits(model: torch.nn.Module) -> bytes:
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return bytes(flat.numpy().tobytes())


@pytest.mark.parametrize("overlap", ["none", "forward", "stale"])
@on_ranks
def test_tuning_changes_no_bit_between_two_nodes(overlap: str) -> None:
    with kept_in():
        model, optimizer = trained(range(ENOUGH), TUNED, overlap=overlap)
    plain, unturned = trained(range(ENOUGH), {}, overlap=overlap)
    assert bits(model) == bits(plain)
    assert optimizer.statistics().plans == SAMPLES + 1
    assert unturned.statistics().plans == 1
    assert_equal_on_all_ranks(model)
    if overlap != "stale":
        reference = make_model()
        train_reference(reference, torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9), range(ENOUGH))
        assert_same(model, reference)


@on_ranks
def test_what_was_found_is_logged_and_used_by_the_next_optimizer() -> None:
    with kept_in() as folder, variables({"HOROVOD_AUTOTUNE_LOG": f"{folder}/log"}):
        trained(range(ENOUGH), TUNED)
        logs = list(Path(folder).glob("log*"))
        found = list(Path(folder).glob("*.json"))
        assert len(logs) == len(found) == (hvd.rank() == 0)
        for log in logs:
            rows = list(csv.DictReader(log.read_text().splitlines()))
            assert len(rows) == SAMPLES + 1
            assert float(rows[0]["tensor_fusion_threshold"]) == 4 / 1024
            assert all(float(row["score"]) > 0 for row in rows)
        _, optimizer = trained(range(ENOUGH), TUNED)
        assert optimizer.statistics().plans == 1


@on_ranks
def test_ranks_that_join_meanwhile_find_back() -> None:
    """Each rank in turn has fewer batches, once so few that it misses plans, and rank 0 is the one that tunes."""
    few, many = STEPS + 1, 3 * (STEPS + 2)
    counts = [(few, many), (many, few), (many, many), (0, many), (1, 1)]

    def epochs(settings: dict[str, str]) -> tuple[torch.nn.Module, Any]:
        with variables(settings):
            model = make_model()
            optimizer = distributed(model)
        first = 0
        for shares in counts:
            train(model, optimizer, range(first, first + shares[hvd.rank()]))
            first += many
            hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=1)
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        train(model, optimizer, range(first, first + ENOUGH))
        return model, optimizer

    with kept_in():
        model, optimizer = epochs(TUNED)
    plain, _ = epochs({})
    assert bits(model) == bits(plain)
    assert optimizer.statistics().plans > len(counts)
    assert_equal_on_all_ranks(model)


class Script(Director):
    """Plans of two steps each, and the last one for ever."""

    def __init__(self, tunings: Sequence[wire.Tuning]) -> None:
        self.asked_by: list[str] = []
        self._tunings = [structs.replace(tuning, steps=2) for tuning in tunings[:-1]] + [*tunings[-1:]]

    def next(self, algorithm: str = ALLREDUCE) -> wire.Tuning:
        self.asked_by.append(algorithm)
        return self._tunings.pop(0)

    def stepped(self, step: Step) -> None:
        del step


def trained_by(tunings: Sequence[wire.Tuning], steps: int, **options: Any) -> tuple[torch.nn.Module, Any]:
    """A model whose plans have these tunings, one after the other, and its optimizer."""
    model = make_model()
    optimizer = distributed(model, **options)
    optimizer._sync.replanning = Replanning(lambda where: Script(tunings))
    train(model, optimizer, range(steps))
    if hasattr(optimizer, "synchronize_parameters"):
        optimizer.synchronize_parameters()
    return model, optimizer


@on_ranks
def test_a_codec_that_only_a_plan_names_is_used_and_its_residual_goes_along() -> None:
    lossy = "topk(density=0.1, minimum=0, exclude='')"
    codecs = ["dense", lossy, lossy, "fp16", "dense"]
    model, optimizer = trained_by([wire.Tuning(codec=codec) for codec in codecs[:3]], 8)
    assert optimizer.statistics().plans == 3
    assert_equal_on_all_ranks(model)
    stats = hvd.compression_stats()["total"]
    assert 0 < stats["bytes_packed"] < 0.5 * stats["bytes_dense"]
    assert stats["residual_norm"] > 0
    assert "fusion_rt" in optimizer.state_dict(), "a checkpoint has the residual"
    model, optimizer = trained_by([wire.Tuning(codec=codec) for codec in codecs], 40)
    assert_equal_on_all_ranks(model)
    reference = make_model()
    train_reference(reference, torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9), range(40))
    assert_same(model, reference, rtol=0.3, atol=0.1)
    assert "fusion_rt" not in optimizer.state_dict()


@on_ranks
def test_updates_become_late_and_punctual_again_as_plans_say() -> None:
    """Late ones lag behind by a step; when they are punctual again, the last ones are those of one who never lagged."""
    late, punctual = wire.Tuning(late=True), wire.Tuning(late=False)
    model, _ = trained_by([late], 12, overlap="forward")
    reference, _ = trained(range(12), {}, overlap="stale")
    assert bits(model) == bits(reference)
    model, _ = trained_by([punctual, punctual], 12, overlap="stale")
    reference, _ = trained(range(12), {}, overlap="forward")
    assert bits(model) == bits(reference)
    model, optimizer = trained_by([punctual, late, punctual, late], 12, overlap="forward")
    assert optimizer.statistics().plans == 4
    assert_equal_on_all_ranks(model)


@on_ranks
def test_auto_changes_when_updates_are_applied_only_where_that_was_asked() -> None:
    few = {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2", "FUSION_AUTO_EVERY": "6"}
    for overlap in ("none", "stale"):
        model, optimizer = trained(range(30), {"FUSION_AUTO": "lossless", **few}, overlap=overlap)
        plain, _ = trained(range(30), {}, overlap=overlap)
        assert bits(model) == bits(plain)
        assert optimizer.statistics().plans > 1
    _, optimizer = trained(range(2), {"FUSION_AUTO": "lossy", **few})
    assert not hasattr(optimizer, "synchronize_parameters")
    _, optimizer = trained(range(2), {"FUSION_AUTO": "async", **few})
    assert hasattr(optimizer, "synchronize_parameters")
    model, optimizer = trained(range(30), {"FUSION_AUTO": "async", **few}, compression="fp16", overlap="stale")
    assert {type(optimizer._schedule), optimizer._sync.plan.agreed.reduction.codec} == {OneStepLate, "fp16"}, "as asked"
    assert_equal_on_all_ranks(model)


class Replicas:
    """All ranks' models, in this process: the reference. All-reduces up to step 2, local steps with a mean of
    parameters after each third up to step 8, where all take the momenta of rank 0, and all-reduces again."""

    def __init__(self) -> None:
        self.models = [make_model() for _ in range(hvd.size())]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in self.models]
        self.schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9) for optimizer in self.optimizers]

    def step(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, batch_of(rank, number)).backward()
        if not 2 <= number < 8:
            self.average(lambda parameter: parameter.grad)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        if number in (4, 7):
            self.average(lambda parameter: parameter.detach())
        if number == 7:
            for model, optimizer in zip(self.models[1:], self.optimizers[1:], strict=True):
                for own, first in zip(model.parameters(), self.models[0].parameters(), strict=True):
                    momentum = self.optimizers[0].state[first]["momentum_buffer"]
                    optimizer.state[own]["momentum_buffer"].copy_(momentum)

    def average(self, value_of: Callable[[torch.Tensor], Any]) -> None:
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([value_of(parameter) for parameter in parameters]).mean(0)
            for parameter in parameters:
                value_of(parameter).copy_(mean)


@pytest.mark.parametrize("overlap", ["none", "forward"])
@on_ranks
def test_a_running_job_goes_on_by_local_steps_and_comes_back(overlap: str) -> None:
    tunings = [wire.Tuning(then="local_sgd(steps=3)"), wire.Tuning(then="allreduce"), wire.Tuning()]
    with variables({"FUSION_AUTO": "async", "FUSION_OVERLAP": overlap}):
        model = make_model()
        optimizer = distributed(model)
    script = Script(tunings)
    optimizer._sync.replanning = Replanning(lambda where: script)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
    replicas, algorithms = Replicas(), []
    for number in range(12):
        algorithms.append(optimizer._sync.options.reduction.algorithm)
        train(model, optimizer, [number])
        schedule.step()
        replicas.step(number)
    optimizer.synchronize_parameters()
    assert algorithms == ["allreduce"] * 2 + ["local_sgd(steps=3)"] * 6 + ["allreduce"] * 4
    if hvd.rank() == 0:  # which decides
        assert script.asked_by == ["allreduce", "local_sgd(steps=3)", "allreduce"]
    assert_same(model, replicas.models[hvd.rank()])


@on_ranks
def test_a_running_job_goes_from_one_algorithm_with_local_steps_to_another() -> None:
    """Two exchanges of each, one of them with a residual and one with an outer momentum, and back."""
    ways = ["sparseloco(steps=2)", "diloco(steps=3)", "allreduce"]
    with variables({"FUSION_AUTO": "async"}):
        model = make_model()
        optimizer = distributed(model)
    tunings = [*(wire.Tuning(then=way) for way in ways), wire.Tuning()]
    optimizer._sync.replanning = Replanning(lambda where: Script(tunings))
    scaler, found = torch.amp.GradScaler("cpu", init_scale=16.0), []
    for number in range(2 + 4 + 6 + 3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, my_batch(number))).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(optimizer._sync.options.reduction.algorithm)
        if number in (1, 5, 11, 14):
            optimizer.synchronize_parameters()
            assert_equal_on_all_ranks(model)
    assert found == ["allreduce"] + [ways[0]] * 4 + [ways[1]] * 6 + ["allreduce"] * 4
    reference = make_model()
    train_reference(reference, torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9), range(15))
    inputs = torch.cat([everybodys_batch(number)[0] for number in range(15)])
    assert (model(inputs) - reference(inputs)).abs().mean() < 0.5 * (
        make_model()(inputs) - reference(inputs)
    ).abs().mean()


@on_ranks
def test_nobody_goes_on_otherwise_while_a_rank_has_joined() -> None:
    """Rank 1 has two batches, and the plan lasts for two steps, after which rank 0 would take local ones."""
    with variables({"FUSION_AUTO": "async"}):
        model = make_model()
        optimizer = distributed(model)
    script = Script([wire.Tuning(then="local_sgd(steps=3)"), *[wire.Tuning()] * 5])
    optimizer._sync.replanning = Replanning(lambda where: script)
    train(model, optimizer, range(6 if hvd.rank() == 0 else 1))
    hvd.join()
    optimizer.synchronize_parameters()
    assert optimizer._sync.options.reduction.algorithm == "allreduce"
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(6, 8))
    optimizer.synchronize_parameters()
    assert_equal_on_all_ranks(model)


@pytest.mark.parametrize("overlap", ["none", "forward", "stale"])
@on_ranks
def test_what_is_waited_for_is_known_however_updates_are_applied(overlap: str) -> None:
    """Rank 1 computes for longer, so that the other waits, and does not take that for its own computing."""
    model = make_model()
    optimizer = distributed(model, overlap=overlap)
    seconds = 0.05 * hvd.rank()
    model[0].register_forward_hook(lambda *_: time.sleep(seconds))  # in place of a computation
    train(model, optimizer, range(2))
    before = optimizer.statistics().waited_seconds
    train(model, optimizer, range(2, 8))
    waited = hvd.allgather_object(optimizer.statistics().waited_seconds - before)
    assert waited[0] - waited[1] > 4 * 0.05  # both wait for the exchanges themselves
