"""What the benchmark of slow links makes of its measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import low_bandwidth
from benchmarks.common import results
from benchmarks.low_bandwidth import DECOUPLED, DENSE, METHODS
from fusion_rt import algorithms

FEW = "streaming DiLoCo"


def curves(loss: float, nbytes: int) -> dict[str, list[list[float]]]:
    """Two seeds, whose losses in the end are .02 apart."""
    return {
        str(seed): [[0, 0, 4.8], [64, nbytes, loss + 0.5], [128, 2 * nbytes, loss + 0.02 * seed]] for seed in (0, 1)
    }


MEASURED: dict[str, Any] = {
    "parameters": 475_000,
    "training": {DENSE: curves(2.0, 10_000_000), FEW: curves(2.03, 80_000), DECOUPLED: curves(2.3, 20_000)},
    "times": {"100mbit": {DENSE: [0.3, 0.4, 0.35], FEW: [0.101, 0.104, 0.102]}, "10mbit": {DENSE: [2.5], FEW: [0.125]}},
    "faults": {"one 5x slower": {"steps": [90, 20], "could": [100, 20], "goodput": 0.9167}},
}


def test_loss_and_bytes_are_medians_over_seeds_after_as_many_steps() -> None:
    found = low_bandwidth.ends(MEASURED)
    assert found[DENSE] == pytest.approx((2.01, 20_000_000))
    assert found[FEW] == pytest.approx((2.04, 160_000))
    shorter = {**MEASURED, "training": {**MEASURED["training"], "fp16": {"0": [[0, 0, 4.8], [64, 5, 2.2]]}}}
    assert low_bandwidth.ends(shorter)[DENSE] == pytest.approx((2.5, 10_000_000))


def test_goals_are_judged_by_what_was_measured() -> None:
    judged = {goal: (said, holds) for goal, said, holds in low_bandwidth.goals(MEASURED)}
    assert judged == {
        "100 times fewer bytes than dense, loss within 2%": (f"{FEW}: +1.5%, 125 times fewer", True),
        "400 times fewer bytes than dense, loss within 5%": (f"{DECOUPLED}: +14.9%, 500 times fewer", False),
        "100mbit: utilisation at least 95%": (f"{FEW}: 98.0%", True),
        "10mbit: utilisation at least 90%": (f"{FEW}: 80.0%", False),
        f"{DECOUPLED}, one 5x slower: goodput at least 90%": ("91.7%", True),
    }
    assert low_bandwidth.goals({}) == []


def test_results_are_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "low_bandwidth.json"
    low_bandwidth.keep(file, MEASURED)
    low_bandwidth.show(low_bandwidth.load(file), Console(width=200))
    rows = [line for line in capsys.readouterr().out.splitlines() if FEW in line]
    assert [cell.strip() for cell in rows[0].split("│")[1:-1]] == [
        FEW, "2.040", "1.015", "0.160", "125.000", "0.102", "0.980", "0.125", "0.800",
    ]  # fmt: skip
    pytest.importorskip("matplotlib", reason="plots need the extra bench")
    from benchmarks.report import plots

    found: Any = {"low_bandwidth": results.load(file, "low_bandwidth")}
    assert "s at 10mbit" in plots.draw("low_bandwidth", found)


def test_methods_are_timed_in_whole_rounds_and_most_are_in_this_version() -> None:
    found = low_bandwidth.available()
    assert {DENSE, "fp16", "DiLoCo", FEW, DECOUPLED, "NoLoCo"} <= found.keys() <= METHODS.keys()
    for method in METHODS.values():
        assert method.turn % algorithms.parse(method.algorithm).period == 0


def test_a_quick_run_leaves_alone_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments, names, networks, _ = low_bandwidth.parse(["--quick", "--methods", "dense", "--seeds", "2"])
    assert (names, networks, arguments.seeds, arguments.rounds) == (["dense"], ["100mbit"], 2, 1)
    with pytest.raises(SystemExit):
        low_bandwidth.parse(["--methods", "dens"])
    assert "dens" in capsys.readouterr().err


def test_goodput_is_of_what_learners_could_have_done_while_they_lived(tmp_path: Path) -> None:
    for rank, line in enumerate(("90 100.0", "95 100.0", "20 20.0", "30 33.3")):
        (tmp_path / str(rank)).write_text(line)
    assert low_bandwidth.goodput(tmp_path)["goodput"] == pytest.approx(235 / 253.3, abs=1e-4)
