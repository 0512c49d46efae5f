"""What the benchmark of the backend measures, and what it makes of the workers' samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import backend, backend_step
from benchmarks.common.results import Setting

SETTING: Setting = {"hosts": 1, "ranks": 2}


def test_a_record_for_each_operation_compares_with_gloo_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(setting: Setting, command: Sequence[str]) -> Any:
        asked.extend(command)
        return {"all_reduce": {"4": {"fusion": [1e-4, 2e-4, 1e-4], "gloo": [3e-4, 4e-4, 3e-4]}}}

    monkeypatch.setattr(backend, "run", run)
    (record,) = backend.measure(SETTING, ["all_reduce"], [4], rounds=3)
    assert asked[asked.index("--operations") + 1] == "all_reduce"
    assert asked[asked.index("--sizes") + 1] == "4"
    assert record.setting == {"operation": "all_reduce", **SETTING}
    assert record.measure("4").peer == "gloo"
    assert backend.ratio_of(record.measure("4")).value == pytest.approx(3.0), "the median of 3, 2 and 3"


def test_a_record_for_each_model_has_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"ddp": {"fusion": [0.1], "gloo": [0.2]}, "fsdp2": {"fusion": [0.3], "gloo": [0.9]}}
    monkeypatch.setattr(backend_step, "run", lambda setting, command: found)
    records = backend_step.measure(SETTING, ["ddp", "fsdp2"], steps=1, rounds=1)
    assert [record.setting["model"] for record in records] == ["ddp", "fsdp2"]
    assert [record.measure(backend_step.STEP).samples for record in records] == list(found.values())
