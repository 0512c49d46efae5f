"""Tables of documents come from the committed results, and from nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import results
from benchmarks.common.machine import ROOT
from benchmarks.common.results import Measure, Record, Results, ResultsError
from benchmarks.report import __main__ as report
from benchmarks.report import regions
from benchmarks.report.regions import DocumentError
from tests.for_each import for_each

DOCUMENTS = regions.documents(ROOT)


@for_each("path", DOCUMENTS)
def test_the_committed_tables_are_those_that_the_committed_results_give(path: Path) -> None:
    found = results.load_all(results.RESULTS)
    text = path.read_text()
    right = regions.fill(text, lambda name: report.table(name, found), path.name)
    assert text == right, "out of date: run `python -m benchmarks.report`"


def test_documents_have_the_tables_of_the_main_suites() -> None:
    shown = {name for path in DOCUMENTS for name in regions.names(path.read_text())}
    assert {"allreduce", "step", "startup", "topk", "overlap", "straggler", "networks", "costs"} <= shown
    assert shown <= report.TABLES.keys()


def test_only_what_is_between_marks_changes() -> None:
    text = "a\n<!-- table: one -->\nold\n<!-- end -->\nb\n<!-- table: two -->\n<!-- end -->\nc\n"
    filled = regions.fill(text, str.upper)
    assert filled == "a\n<!-- table: one -->\n\nONE\n\n<!-- end -->\nb\n<!-- table: two -->\n\nTWO\n\n<!-- end -->\nc\n"
    assert regions.fill(filled, str.upper) == filled
    assert regions.names(text) == ["one", "two"]


@pytest.mark.parametrize("text", ["<!-- table: a -->\n", "<!-- end -->\n", "<!-- table: a -->\n<!-- table: b -->\n"])
def test_a_mark_without_its_counterpart_is_an_error(text: str) -> None:
    with pytest.raises(DocumentError, match=r"In guide\.md"):
        regions.fill(text, str.upper, "guide.md")


def allreduce(**samples: list[float]) -> dict[str, Results]:
    measures = [Measure("4", "s", samples, "gloo"), Measure("1048576", "s", samples, "gloo")]
    return {"allreduce": Results(results.SCHEMA, "allreduce", [Record({"hosts": 1, "ranks": 2}, measures)])}


def test_a_peer_that_is_faster_is_shown_in_bold() -> None:
    found = allreduce(arena=[1.0] * 5, copy=[4.0] * 5, gloo=[2.0] * 5)
    rows = report.table("allreduce", found).splitlines()[2:]
    assert rows == [
        "| 2 ranks on one host | 2.0 | 2.0 |",
        "| 2 ranks on one host, tensor outside the arena | **0.50** | **0.50** |",
    ]


def test_a_table_without_results_is_a_sentence() -> None:
    with pytest.raises(ResultsError, match=r"There are no results of topk: `python -m benchmarks topk` makes them\."):
        report.table("topk", {})
    with pytest.raises(ResultsError, match="There is no table 'speed'"):
        report.table("speed", {})


def test_check_writes_nothing_and_says_what_is_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    guide = tmp_path / "docs" / "guide.md"
    guide.write_text("<!-- table: overlap -->\n<!-- end -->\n")
    assert report.main(["--check"]) == 1
    assert "docs/guide.md is out of date" in capsys.readouterr().out
    assert "| ms |" not in guide.read_text()


def test_plots_are_the_same_bytes_for_the_same_results() -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra bench")
    from benchmarks.report import plots

    found: Any = allreduce(arena=[1.0, 1.1, 0.9], copy=[4.0] * 3, gloo=[2.0, 2.2, 1.9])
    once = plots.draw("allreduce", found)
    assert once == plots.draw("allreduce", found)
    assert "gloo's time / fusion_rt's" in once
    assert "<dc:date>" not in once


def test_all_plots_can_be_drawn_from_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra bench")
    from benchmarks.report import plots

    found = results.load_all(results.RESULTS)
    drawn = report.draw(tmp_path, found)
    assert [path.stem for path in drawn] == [name for name in plots.PLOTS if name in found]
    assert len(drawn) > 3
    assert all(path.read_text().startswith("<?xml") for path in drawn)
