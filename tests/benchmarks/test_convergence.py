"""What the convergence benchmark makes of its runs, and that its models learn from different data on each rank."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import convergence
from benchmarks.common import runs, training


def result(codec: str, losses: list[float], seed: int = 1, steps: int = 800, **other: Any) -> dict[str, Any]:
    """A run whose test loss was looked at as often as there are losses, and that sent a byte a step."""
    every = steps // 4
    curve = [[every * (row + 1), every * (row + 1), loss, loss] for row, loss in enumerate(losses)]
    made = {"model": "char-gpt", "codec": codec, "seed": seed, "steps": steps, "lr": 0.1, "parameters": 1000}
    return {**made, "accuracy": 0.5, "asked": 0, "selected": 0, "seconds": 1.0, "curve": curve, **other}


def test_means_are_over_seeds_and_goals_are_judged_by_them() -> None:
    results = [
        result("dense", [4.0, 3.0, 2.0, 1.9], seed=1),
        result("dense", [4.0, 3.0, 2.2, 2.1], seed=2),
        result("topk-1%", [4.0, 3.0, 3.0, 2.2], asked=1000, selected=999),
        result("topk-1%-no-feedback", [4.0, 3.0, math.nan]),
        result("topk-1%-momentum", [5.0, 4.0, 3.0, 2.2], asked=1000, selected=1000),
        result("gaussiank-1%", [5.0, 4.0, 3.0, 2.2], asked=1000, selected=905),
        result("onebit", [5.0, 4.0, 3.0, 2.5]),
        result("onebit-no-feedback", [5.0, 4.0, 3.0, 2.4]),
        result("dense", [4.0, 3.0, 2.0, 1.0], steps=1600),
        result("topk-1%-momentum", [4.0, 3.0, 2.0, 1.05], steps=1600),
    ]
    runs = convergence.Runs(results[:8])
    assert runs.loss("dense") == pytest.approx(2.0)
    assert runs.loss("dense", 0.75) == pytest.approx(2.1)
    assert math.isnan(runs.loss("topk-1%-no-feedback")), "it ended before its last step"
    assert runs.until("dense", 2.0) is None, "not with every seed"
    assert runs.until("dense", 2.2) == (600, 600)
    grouped = {("char-gpt", 800): runs, ("char-gpt", 1600): convergence.Runs(results[8:])}
    judged = {goal: holds for goal, _, holds in convergence.goals(grouped)}
    assert judged == {
        "char-gpt, 800 steps: test loss of topk-1%-momentum at most 1.07 of dense": False,
        "char-gpt, 800 steps: training loss of topk-1% lower with feedback than without": True,
        "char-gpt, 800 steps: training loss of onebit lower with feedback than without": False,
        "exact codecs select as many elements as they are asked for": False,
        "approximate ones select 10 % more or less at most": True,
        "char-gpt: test loss of topk-1%-momentum comes closer to dense in longer runs, or is below": True,
    }


def test_the_accuracy_of_digits_is_compared_in_points(capsys: pytest.CaptureFixture[str]) -> None:
    dense = result("dense", [1.0] * 4, model="digits", accuracy=0.98)
    for accuracy, said in ((0.976, ["0.40", "yes"]), (0.974, ["0.60", "no"])):
        sparse = result("topk-1%", [1.0] * 4, model="digits", accuracy=accuracy)
        convergence.show([dense, sparse], Console(width=180))
        (row,) = (line.split("│") for line in capsys.readouterr().out.splitlines() if "points" in line)
        assert [cell.strip() for cell in row[2:4]] == said


def test_a_stopped_benchmark_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results"
    convergence.keep(out, result("dense", [1.0] * 4))
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: started.append(command))
    convergence.run(out, "char-gpt", ["dense", "onebit"], seed=1, steps=800)
    convergence.run(out, "char-gpt", ["dense"], seed=1, steps=800)
    convergence.run(out, "char-gpt", ["dense"], seed=2, steps=800)
    chosen = [[command[command.index(flag) + 1] for flag in ("--codecs", "--seeds")] for command in started]
    assert chosen == [["onebit", "1"], ["dense", "2"]]


def test_a_run_that_diverged_comes_back_as_it_was(tmp_path: Path) -> None:
    diverged = result("randomk-1%", [4.0, 5.0, math.nan], accuracy=math.nan)
    convergence.keep(tmp_path / "results", diverged)
    (again,) = runs.load(tmp_path / "results")
    assert math.isnan(again.pop("accuracy"))
    assert math.isnan(again["curve"][-1].pop())
    assert again["curve"] == [*diverged["curve"][:2], [600, 600, pytest.approx(math.nan, nan_ok=True)]]


@pytest.mark.parametrize("make", [training.digits_task, training.char_gpt_task])
def test_ranks_start_alike_and_draw_other_batches(make: Any) -> None:
    losses = []
    for seed, rank in ((1, 0), (1, 1), (1, 0)):
        torch.manual_seed(seed)
        task = make(seed, rank, 4)
        at_first = [parameter.clone() for parameter in task.model.parameters()]
        losses.append((task.loss(task.model).item(), task.test(), at_first))
    assert losses[0][0] == losses[2][0] != losses[1][0]
    assert losses[0][1] == losses[2][1] != losses[1][1]
    assert all(torch.equal(one, other) for one, other in zip(losses[0][2], losses[1][2], strict=True))


def test_a_momentum_is_the_optimizers_or_the_codecs() -> None:
    model = torch.nn.Linear(1, 1)
    momenta = {name: training.sgd(model, 0.1, text).defaults["momentum"] for name, text in convergence.CODECS.items()}
    assert all((momentum == 0) == name.endswith("-momentum") for name, momentum in momenta.items())
