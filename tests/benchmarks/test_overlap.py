"""What the benchmark of overlap computes from what it has measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overlap
from benchmarks.common import results
from benchmarks.overlap import ALONE, DDP


def measured(**changed: Any) -> dict[str, Any]:
    seconds = {ALONE: [1.0, 2.0, 3.0], "none": [1.5, 2.75, 3.25], "forward": [1.0, 2.0, 3.0], "stale": [1.0, 2.0, 3.0]}
    found = {"hosts": 4, "rate": "1gbit", "ranks": 4, "compute": 1.5, "parameters": 25_557_032}
    return {
        **found,
        "seconds": {**seconds, DDP: [2.0, 3.0, 4.0]},
        "waited": dict.fromkeys(overlap.OVERLAPS, 0.25),
        **changed,
    }


def test_exposed_is_compared_with_the_turn_beside_it() -> None:
    """So that a turn in which the machine was busy counts for both."""
    exposed = overlap.exposed(measured())
    assert exposed == {ALONE: 0.0, "none": 0.5, "forward": 0.0, "stale": 0.0, DDP: 1.0}


def test_results_replace_those_of_the_same_setting(tmp_path: Path) -> None:
    path = tmp_path / "overlap.json"
    overlap.keep(path, measured())
    overlap.keep(path, measured(hosts=1, rate="", ranks=2))
    kept = overlap.keep(path, measured(waited={}))
    assert [overlap.of(record) for record in results.load(path, "overlap").records] == kept
    assert [(one["hosts"], one["waited"] == {}) for one in kept] == [(4, True), (1, False)]
    assert kept[0] == measured(waited={})


def test_the_table_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    overlap.show(measured())
    out = capsys.readouterr().out
    assert "4 hosts with one rank each, links of 1gbit" in out
    row = next(line for line in out.splitlines() if "overlap none" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == ["2750.0", "500.0", "250.0", "1.09"]


def test_the_model_has_the_parameters_of_resnet_50_and_gradients_for_all() -> None:
    model = overlap.make_model(compute=0.0)
    model().backward()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert len(model.layers) == 54
    assert sum(math.prod(parameter.grad.shape) for parameter in model.parameters()) == 25_557_032


def test_priorities_are_compared_turn_by_turn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    without = "forward" + overlap.PLAIN
    seconds = {ALONE: [1.0, 1.0, 1.0], "none": [2.0, 2.0, 2.0], "forward": [1.5, 3.0, 1.5], without: [2.0, 3.0, 3.0]}
    found = measured(seconds=seconds, first={name: [0.25, 0.125, 0.5] for name in seconds})
    (kept,) = overlap.keep(tmp_path / "priority.json", found)
    assert kept["seconds"] == seconds
    overlap.show(found)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("│ forward  "))
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["forward", "1500", "500", "250", "0.75"]
