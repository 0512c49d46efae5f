"""What counts as a regression: beyond noise, by the ratio to the peer, and only what can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as driver
from benchmarks.common import compare, results
from benchmarks.common.machine import Machine
from benchmarks.common.results import Measure, Record, Results

HERE = Machine("cpu", 2, 8, "6.1", "3.11.1", "2.4.0", 0.3)
ELSEWHERE = Machine("other", 64, 256, "6.1", "3.11.1", "2.4.0", 0.3)


def file(
    ours: list[float], gloo: list[float] | None = None, *, machine: Machine | None = HERE, **measure: Any
) -> dict[str, Results]:
    samples = {"ours": ours} | ({"gloo": gloo} if gloo else {})
    made = Measure("a step", "s", samples, "gloo" if gloo else "", **measure)
    return {"step": Results(results.SCHEMA, "step", [Record({"ranks": 2}, [made], machine)])}


def noisy(seed: int, mean: float, rounds: int = 9) -> tuple[list[float], list[float]]:
    """Ours, and a peer that takes one second, on a machine whose speed goes up and down by a factor of two."""
    random = np.random.default_rng(seed)
    load = random.uniform(1.0, 2.0, rounds)
    ours, gloo = mean * load * random.normal(1.0, 0.05, rounds), load * random.normal(1.0, 0.05, rounds)
    return ours.tolist(), gloo.tolist()


def verdicts(old: dict[str, Results], new: dict[str, Results]) -> list[str]:
    return [row.verdict for row in compare.compare(old, new).rows]


def test_a_slower_run_is_worse_and_a_faster_one_better() -> None:
    base = file(*noisy(1, 0.5))
    assert verdicts(base, file(*noisy(2, 0.75))) == [compare.WORSE]
    assert verdicts(base, file(*noisy(3, 0.3))) == [compare.BETTER]


def test_noise_is_no_regression() -> None:
    base = file(*noisy(1, 0.5))
    found = [verdict for seed in range(2, 42) for verdict in verdicts(base, file(*noisy(seed, 0.5)))]
    assert found == [compare.SAME] * 40


def test_a_machine_that_is_slower_as_a_whole_is_no_regression() -> None:
    ours, gloo = noisy(2, 0.5)
    slower = file([3 * x for x in ours], [3 * x for x in gloo], machine=ELSEWHERE)
    found = compare.compare(file(*noisy(1, 0.5)), slower)
    assert [row.verdict for row in found.rows] == [compare.SAME]
    assert "Of times, only ratios to peers that took turns are compared" in found.notes[0]


def test_times_without_a_peer_are_compared_on_the_same_machine_only() -> None:
    old, new = [1.0, 1.01, 0.99, 1.0], [2.0, 2.01, 1.99, 2.0]
    assert verdicts(file(old), file(new)) == [compare.WORSE]
    for elsewhere in (ELSEWHERE, None):
        found = compare.compare(file(old), file(new, machine=elsewhere))
        assert found.rows == []
        assert "different machines without a peer are not compared" in found.notes[-1]
    assert verdicts(file(old, portable=True), file(new, portable=True, machine=ELSEWHERE)) == [compare.WORSE]


def test_more_can_be_better() -> None:
    old, new = [10.0, 10.1, 9.9], [5.0, 5.1, 4.9]
    assert verdicts(file(old, better="more"), file(new, better="more")) == [compare.WORSE]
    assert verdicts(file(old, [10.0] * 3, better="more"), file(new, [10.0] * 3, better="more")) == [compare.WORSE]


def test_few_samples_and_zeros_are_not_judged() -> None:
    found = compare.compare(file([1.0, 1.0]), file([9.0, 9.0]))
    assert (found.rows, found.notes[-1]) == ([], "step, ranks 2, 'a step', ours: fewer than 3 samples are not judged.")
    found = compare.compare(file([1.0, 0.0, 1.0]), file([9.0] * 3))
    assert found.rows == []
    assert "a sample is 0" in found.notes[-1]


def test_what_was_not_measured_again_is_told() -> None:
    old = file([1.0] * 3)
    new = {"step": Results(results.SCHEMA, "step", [Record({"ranks": 4}, [], HERE)])}
    assert compare.compare(old, new).notes == ["step: not measured again: ranks 2."]
    assert compare.compare(old, {"topk": new["step"]}).notes == ["Nothing in common: step before, topk now."]


def write(folder: Path, files: dict[str, Results]) -> Path:
    for name, each in files.items():
        results.keep(folder / f"{name}.json", name, *each.records)
    return folder


@pytest.mark.parametrize(("mean", "status", "said"), [(0.5, 0, "0 worse"), (0.9, 1, "worse than before, beyond noise")])
def test_the_command_fails_on_a_regression_with_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mean: float, status: int, said: str
) -> None:
    old = write(tmp_path / "old", file(*noisy(1, 0.5)))
    new = write(tmp_path / "new", file(*noisy(2, mean)))
    for path in (old, old / "step.json"):
        assert driver.main(["--no-run", "--out", str(new), "--compare", str(path)]) == status
        assert said in capsys.readouterr().out
    assert driver.main(["--no-run", "--out", str(new), "--compare", str(old), "--tolerance", "0.9"]) == 0


def test_the_command_says_what_it_cannot_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old", file(*noisy(1, 0.5)))
    assert driver.main(["--no-run", "--out", str(tmp_path), "--compare", str(tmp_path / "none.json")]) == 2
    assert "There is no file" in capsys.readouterr().err
    assert driver.main(["topk", "--no-run", "--out", str(old), "--compare", str(old)]) == 2
    assert "There are no results of topk" in capsys.readouterr().err
