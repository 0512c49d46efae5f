"""What the benchmark of a slow worker makes of its runs."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import straggler
from benchmarks.common import runs
from benchmarks.straggler import FAMILIES, Runs
from fusion_rt import algorithms

BATCH = straggler.SIZES["batch"]


def result(family: str, steps: list[int], losses: list[float], seed: int = 1, **other: Any) -> dict[str, Any]:
    """A run of ten seconds whose samples and losses are spread evenly over it; the last loss is that of its end."""
    total, parts = BATCH * sum(steps), len(losses) - 1
    curve = [[10 * part / parts, total * part / parts, loss] for part, loss in enumerate(losses[:-1])]
    made = {"family": family, "algorithm": FAMILIES[family].algorithm, "lr": FAMILIES[family].lr, "seed": seed}
    made |= {"seconds": 10.0, "steps": steps, "took": [10.0] * 4, "loss": losses[-1], "curve": curve}
    return {**made, "staleness": [1.0, 9], **other}


BSP = result("bsp", [100] * 4, [4.0, 3.0, 2.0])
ASP = result("asp", [500, 500, 500, 100], [4.0, 3.0, 2.0, 1.75, 1.5])


def test_pace_is_of_all_ranks_or_of_a_fast_one() -> None:
    assert straggler.pace(BSP) == pytest.approx(40)
    assert straggler.pace(ASP) == pytest.approx(160)
    assert (straggler.fast_pace(BSP), straggler.fast_pace(ASP)) == pytest.approx((10, 50))
    assert straggler.samples(ASP) == 1600 * BATCH


def test_losses_are_compared_after_as_many_samples_and_as_much_time() -> None:
    (row,) = Runs([BSP, ASP]).compared("asp")
    assert row["loss/bsp"] == pytest.approx(0.75)
    assert row["at samples"] == pytest.approx(3.1), "a quarter of its samples, and a little before"
    assert row["at samples/bsp"] == pytest.approx(3.1 / 2.2)
    assert row["to loss"] == pytest.approx(4.5)
    assert row["faster"] == pytest.approx(2.0)
    (same,) = Runs([BSP, ASP]).compared("bsp")
    assert [same[key] for key in ("pace/bsp", "fast/bsp", "loss/bsp", "at samples/bsp", "faster")] == [1.0] * 5


def test_between_points_of_a_curve_it_is_a_straight_line() -> None:
    assert straggler.loss_after(BSP, 100 * BATCH) == pytest.approx(3.55)
    assert straggler.loss_after(BSP, 400 * BATCH) == pytest.approx(2.2)
    assert straggler.loss_after(BSP, 404 * BATCH) < 2.2, "about as many"
    assert math.isnan(straggler.loss_after(BSP, 800 * BATCH))
    assert straggler.time_to(BSP, 2.5) == pytest.approx(7.5)
    assert math.isnan(straggler.time_to(BSP, 1.0))


def test_goals_are_of_medians_over_seeds() -> None:
    runs = Runs([
        BSP, ASP, {**BSP, "seed": 2}, {**ASP, "seed": 2, "loss": 2.03}, {**BSP, "seed": 3},
        {**ASP, "seed": 3, "loss": 2.05}, {**ASP, "seed": 4},
    ])  # fmt: skip
    judged = {goal: holds for goal, _, holds in straggler.goals(runs)}
    assert judged == {
        "asp: a fast rank's pace at least 4 times bsp's": True,
        "asp: the pace of all ranks at least 4 times bsp's (about the most there can be)": True,
        "asp: loss after the same time at most 1.02 of bsp's": True,
        "asp: loss after the same number of samples at most 1.02 of bsp's": False,
    }
    assert len(runs.compared("asp")) == 3, "of the fourth seed there is no run of bsp"


def test_the_table_has_medians_and_ranges_and_leaves_open_what_was_not_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = result("local_sgd", [100] * 4, [4.0, 3.8, 3.6])
    straggler.show([BSP, ASP, slow, {**BSP, "seed": 2}, {**ASP, "seed": 2, "loss": 1.7}], Console(width=300))
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    paces, losses = (row for row in cells if row[0] == "asp")
    assert paces == ["asp", "0.075", "2", "160.0 (160.0-160.0)", "4.00 (4.00-4.00)", "50.0 (50.0-50.0)",
                     "5.00 (5.00-5.00)", "1.0 (1.0-1.0)"]  # fmt: skip
    assert losses[3] == "1.600 (1.500-1.700)"
    assert [row[-2:] for row in cells if row[0] == "local_sgd"][1] == ["", ""]


def test_a_stopped_benchmark_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "deep" / "results"
    straggler.keep(out, BSP)
    started: list[str] = []

    def run(ranks: int, arguments: list[str]) -> dict[str, Any]:
        assert ranks == straggler.RANKS
        started.append(arguments[arguments.index("--families") + 1])
        if started[-1] == "ssp":
            raise subprocess.CalledProcessError(1, "fusionrun")
        return ASP

    monkeypatch.setattr(straggler, "fusionrun", run)
    straggler.run(out, ["bsp", "ssp", "asp"], 1, 10.0)
    straggler.run(out, ["bsp", "asp"], 1, 10.0)
    assert started == ["ssp", "asp"], "what failed does not keep the others from running"
    assert runs.load(out) == [BSP, ASP]


def test_families_are_algorithms_and_weigh_samples_alike() -> None:
    for name, family in FAMILIES.items():
        spec = algorithms.parse(family.algorithm)
        spec.check(straggler.RANKS)
        if spec.synchronous:
            assert (family.lockstep, family.lr) == (True, straggler.LR), name
    assert {"asp", "adpsgd", "partial", "easgd"} == set(straggler.WAIT_FREE) < set(FAMILIES)


@pytest.mark.parametrize(
    ("argv", "said"), [(["--families", "bsp,asb"], "no family 'asb'"), (["--seconds", "0"], "few")]
)
def test_a_wrong_command_line_exits_with_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        straggler.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_table_is_shown_without_running_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    straggler.keep(out, BSP)
    monkeypatch.setattr(straggler, "fusionrun", lambda *_: pytest.fail("it ran"))
    straggler.main(["--table", "--out", str(out)])
    assert "10 s of training each" in capsys.readouterr().out
