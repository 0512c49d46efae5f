"""Raw results are checked whenever they are read or written, and a record takes the place of its predecessor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import machine, results
from benchmarks.common.results import Measure, Record, ResultsError

MACHINE = machine.Machine("cpu", 2, 8, "6.1", "3.11.1", "2.4.0", 0.3, "abc")


def record(ranks: int, **samples: list[float]) -> Record:
    return Record({"ranks": ranks}, [Measure("a step", "s", samples, "gloo")], MACHINE, "2026-01-01T00:00Z", "command")


def test_what_is_kept_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "step.json"
    first, second = record(2, ours=[1.0, 2.0], gloo=[3.0, 4.0]), record(4, ours=[1.0], gloo=[2.0])
    results.keep(path, "step", first)
    results.keep(path, "step", second)
    assert results.load(path, "step").records == [first, second]
    assert results.load(path).find(ranks=4) == [second]
    assert results.load_all(path.parent) == {"step": results.load(path)}


def test_a_record_takes_the_place_of_that_of_the_same_setting(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    results.keep(path, "step", record(2, ours=[1.0], gloo=[3.0]), record(4, ours=[1.0], gloo=[2.0]))
    results.keep(path, "step", record(2, ours=[7.0], gloo=[9.0]))
    assert [(each.setting["ranks"], each.measure("a step").samples["ours"]) for each in results.load(path).records] == [
        (2, [7.0]),
        (4, [1.0]),
    ]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ({"ours": [1.0], "gloo": []}, "no samples of 'gloo'"),
        ({"ours": [math.nan], "gloo": [1.0]}, "is no number"),
        ({"ours": [1.0]}, "no samples of its peer 'gloo'"),
        ({"ours": [1.0, 2.0], "gloo": [1.0]}, "different numbers of samples"),
        ({}, "there are no samples"),
    ],
)
def test_what_cannot_be_compared_is_not_kept(tmp_path: Path, samples: Any, said: str) -> None:
    path = tmp_path / "step.json"
    results.keep(path, "step", record(4, ours=[1.0], gloo=[2.0]))
    before = path.read_text()
    with pytest.raises(ResultsError, match=said):
        results.keep(path, "step", record(2, **samples))
    assert path.read_text() == before


def change(path: Path, **changed: Any) -> None:
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, **changed}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schema": 99}, "its schema is 99, and this version reads 1"),
        ({"suite": "topk"}, "it is of the suite 'topk', not of 'step'"),
        ({"more": 1}, "unknown field `more`"),
        ({"records": [{"setting": {}, "measures": [{"name": "x", "unit": "s"}]}]}, "missing required field `samples`"),
        ({"records": [{"setting": {"ranks": 2}}, {"setting": {"ranks": 2}}]}, "that of another record"),
        ({"records": [{"setting": {"ranks": [2]}}]}, "got `array` - at `$.records[0].setting[...]`"),
    ],
)
def test_a_file_that_is_not_in_order_is_refused_in_a_sentence(tmp_path: Path, changed: Any, said: str) -> None:
    path = tmp_path / "step.json"
    results.keep(path, "step", record(2, ours=[1.0], gloo=[3.0]))
    change(path, **changed)
    with pytest.raises(ResultsError, match=r"step\.json") as raised:
        results.load(path, "step")
    assert said in str(raised.value)


def test_no_file_and_no_json_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"There is no file .*none\.json"):
        results.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ResultsError, match=r"bad\.json is no file of results"):
        results.load(tmp_path / "bad.json")


def test_all_committed_results_are_in_order() -> None:
    found = results.load_all(results.RESULTS)
    assert {"allreduce", "step", "startup", "topk"} <= found.keys()
    assert all(file.records for file in found.values())


def test_machines_are_described_without_their_name() -> None:
    here = machine.describe()
    assert here.cores >= 1
    assert here.memory_gb >= 1
    assert here.same(machine.describe())
    assert not here.same(MACHINE)
    assert f"{here.cores} cores" in here.sentence()


def test_the_command_is_kept_without_where_results_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--ranks", "2", "--out", "/somewhere/step.json", "--quick"])
    assert results.command_line().endswith(" --ranks 2 --quick")
    monkeypatch.setattr("sys.argv", ["x", "--ranks", "2"])
    assert results.command_line().endswith(" --ranks 2")
