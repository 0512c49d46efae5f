"""What the step benchmark claims about its model and its stopwatches."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from benchmarks.step import Clock, shapes


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
