"""What the benchmark of encryption makes of its measurements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import encryption
from benchmarks.encryption import MODES, WAYS, Variant


def times(*pairs: tuple[float, float]) -> dict[str, list[float]]:
    """The same turns of `all` and `control` for each way."""
    return {str(Variant(mode, *way)): [pair[i] for pair in pairs] for way in WAYS for i, mode in enumerate(MODES)}


def measured(unshaped: dict[str, list[float]], shaped: dict[str, list[float]]) -> dict[str, Any]:
    load = {"unshaped": 0.2, "1gbit": 3.5}
    return {"bytes": 25_600_000, "cores": 2, "load": load, "times": {"unshaped": unshaped, "1gbit": shaped}}


def test_turns_are_compared_with_those_of_the_same_round() -> None:
    assert encryption.ratio(times((2.0, 1.0), (20.0, 12.0), (4.0, 1.0)), 4, 1) == 0.5


def test_goals_hold_or_not() -> None:
    good = encryption.goals(measured(times((0.04, 0.02)), times((0.21, 0.21))))
    assert [holds for _, _, holds in good] == [True, True]
    bad = encryption.goals(measured(times((0.05, 0.02)), times((0.22, 0.21))))
    assert [holds for _, _, holds in bad] == [False, False]


def test_one_connection_alone_is_not_judged_on_links_without_limit() -> None:
    unshaped = times((0.05, 0.02)) | {str(Variant("all", 4, 2)): [0.03]}
    ((_, _, holds), _) = encryption.goals(measured(unshaped, times((1.0, 1.0))))
    assert holds


def test_the_table_has_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    encryption.show(measured(times((0.04, 0.02)), times((0.21, 0.21))), Console(width=160))
    told = capsys.readouterr().out
    assert "1gbit, load 3.5 before" in told
    assert "unshaped, load" not in told
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in told.splitlines() if "│" in line]
    assert ["4", "2", "40.0 (40.0-40.0)", "20.0 (20.0-20.0)", "640", "1280", "0.500"] in rows


def test_what_was_kept_is_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "encryption.json"
    made = measured(times((0.04, 0.02)), times((0.21, 0.21)))
    encryption.keep(path, made)
    assert encryption.load(path) == {**made, "cores": len(os.sched_getaffinity(0))}
