"""What the step benchmark claims about its model and its stopwatches."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from benchmarks import step
from benchmarks.common.peers import DDP
from benchmarks.common.stopwatch import Clock
from benchmarks.step import shapes


def test_the_tensors_are_those_of_resnet_50() -> None:
    assert len(shapes()) == 161
    assert sum(math.prod(shape) for shape in shapes()) == 25_557_032  # torchvision.models.resnet50()
    assert shapes()[0] == (64, 3, 7, 7)
    assert shapes()[-2:] == [(1000, 2048), (1000,)]


def test_time_counts_for_the_innermost_measured_function(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    def outer() -> str:
        work(1.0)
        module.inner()
        module.inner()
        return "returned"

    module = SimpleNamespace(inner=lambda: work(2.0), outer=outer)
    clock = Clock()
    clock.measure(module, "inner", "copy")
    clock.measure(module, "outer", "python")
    assert module.outer() == "returned"
    assert clock.take() == {"python": 1.0, "copy": 4.0}
    module.inner()
    assert clock.take() == {"copy": 2.0}


def test_the_time_a_waiting_function_computes_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, computing = iter([10.0, 15.0]), iter([1.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(time, "thread_time", lambda: next(computing))
    module = SimpleNamespace(receive=lambda: None)
    clock = Clock()
    clock.measure(module, "receive", "wait", busy="python")
    module.receive()
    assert clock.take() == {"wait": 4.0, "python": 1.0}


def found(hosts: int) -> dict[str, dict[str, list[float]]]:
    samples = {step.STEP: {step.OURS: [0.1, 0.2], DDP: [0.4, 0.4]}, step.CPU: {step.OURS: [0.2, 0.2], DDP: [0.3, 0.3]}}
    parts = {what: {step.OURS: [0.01, 0.01], DDP: [0.0, 0.0]} for what in step.PARTS.values()}
    sent = {step.OURS: [hosts * 1e8] * 2, DDP: [hosts * 2e8] * 2}
    return {**samples, **parts, step.SENT: sent, step.DAEMON: {step.OURS: [0.05, 0.1], DDP: [0.0, 0.0]}}


def test_the_daemons_cpu_is_told_by_bytes() -> None:
    """Two hosts with two ranks each, whose gradients have 100 MB; each host sends 100 MB in a step."""
    made = {each.name: each for each in step.measures(found(2), 100_000_000, ranks=4, hosts=2)}
    assert made[step.PER_REDUCED].samples == {step.OURS: pytest.approx([0.125, 0.25])}
    assert made[step.PER_SENT].samples == {step.OURS: pytest.approx([0.25, 0.5])}
    assert made[step.SENT].samples == {step.OURS: [1e8, 1e8], DDP: [2e8, 2e8]}
    assert made[step.SENT].portable
    assert (made[step.STEP].peer, made[step.PER_SENT].peer) == (DDP, "")


def test_one_host_sends_nothing() -> None:
    made = {each.name for each in step.measures(found(1), 100_000_000, ranks=2, hosts=1)}
    assert made == {step.STEP, step.CPU, *step.PARTS.values(), step.DAEMON, step.PER_REDUCED}
