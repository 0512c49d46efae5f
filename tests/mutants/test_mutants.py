"""The sample of `make mutants`: what may be changed, and which tests are asked. To try changes takes an hour, and this
seconds."""

from __future__ import annotations

import io
import json
import tokenize
from pathlib import Path

import pytest

from tests.mutants import changes
from tests.mutants.changes import Change
from tests.mutants.choice import Watched
from tests.mutants.places import GROUPS, LEAST, shares

ROOT = Path(__file__).resolve().parents[2]
HARMLESS = json.loads(Path(__file__).with_name("harmless.json").read_text(encoding="utf-8"))

SOURCE = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    SIZE = 3

WAIT_S = 30.0
LARGEST = 1 << 20


def total(values: list[int | None], most: int = 7) -> int:
    assert most > 0
    if most < 1:
        raise ValueError(f"{most + 1} is too small" + "." * 3)
    _log.info("%d", most - 1)
    return sum(a * b for a, b in zip(values, values[1:], strict=True))
"""


def changed_at(source: str) -> set[str]:
    """The operators and constants of a source that may be changed, with their lines."""
    words = {"True", "30.0", "1", "<<", "20", "|", "7", ">", "0", "<", "+", "*", "3", "-"}
    spans = changes.unseen(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        f"{token.start[0]}: {token.string}"
        for token in tokens
        if token.string in words and not any(low <= token.start < high for low, high in spans)
    }


def test_messages_annotations_checks_and_patience_are_left_alone() -> None:
    assert changed_at(SOURCE) == {"8: 1", "8: <<", "8: 20", "11: 7", "13: <", "13: 1", "16: *", "16: 1"}


def test_every_group_has_modules_and_tests() -> None:
    for group in GROUPS.values():
        assert group.modules(ROOT)
        for place in group.tests:
            assert list(ROOT.glob(place)), place


def test_a_sample_is_divided_by_size_and_each_group_has_some() -> None:
    given = shares({"large": 5000, "middle": 1000, "small": 40, "tiny": 3}, 300)
    assert given == {"large": 235, "middle": 50, "small": LEAST, "tiny": 3}
    assert sum(given.values()) == 300


def test_a_change_keeps_its_name_and_its_place_while_lines_come_and_go(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray")
    module = "fusion_rt/module.py"
    (tmp_path / "fusion_rt").mkdir()
    (tmp_path / module).write_text(SOURCE, encoding="utf-8")
    before = changes.sample(changes.of_module(tmp_path, module), 1)
    (tmp_path / module).write_text(SOURCE.replace("LARGEST", "# Another line.\nOTHER = 5\nLARGEST"), encoding="utf-8")
    after = changes.sample(changes.of_module(tmp_path, module), 1)
    assert [each.name for each in before] == [each.name for each in after if "OTHER" not in each.line]
    assert len(before) == 9  # places, of which each gives one change: those above, and the condition as a whole
    assert all(changes.line_of(tmp_path, each) != each.line for each in before)


def test_the_change_is_made_where_it_was_found(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray")
    (tmp_path / "module.py").write_text("def f(a, b):\n    return a + b + 2 * a\n", encoding="utf-8")
    found = changes.of_module(tmp_path, "module.py")
    assert {changes.line_of(tmp_path, each).replace("  ", " ") for each in found} == {
        "return a - b + 2 * a",
        "return a + b - 2 * a",
        "return a + b + 2 / a",
        "return a + b + 3 * a",
        "return a + b + 1 * a",
    }


def watched(folder: Path) -> Watched:
    """Tests `slow` and `quick` run lines 1 to 3, `other` line 5, and `blind` nobody knows."""
    coverage = pytest.importorskip("coverage")
    data = coverage.CoverageData(str(folder / "lines.coverage"))
    for test, lines in (
        ("tests/mutants/test_mutants.py::slow", [1, 2, 3]),
        ("tests/mutants/test_mutants.py::quick", [2, 3]),
        ("tests/mutants/test_mutants.py::other", [5]),
    ):
        data.set_context(test)
        data.add_lines({"/somewhere/module.py": lines})
    data.write()
    seconds = {
        "tests/mutants/test_mutants.py::slow": 3.0,
        "tests/mutants/test_mutants.py::quick": 0.01,
        "tests/mutants/test_mutants.py::other": 0.01,
        "tests/docs/test_prose.py::blind": 0.01,
    }
    tests = {test: {"seconds": each, "failed": False, "blind": "blind" in test} for test, each in seconds.items()}
    (folder / "tests.json").write_text(json.dumps(tests), encoding="utf-8")
    (folder / "sources.json").write_text(json.dumps({"module.py": OLD}), encoding="utf-8")
    return Watched(folder, ["tests"])


OLD = "def f(a):\n    a = a + 1\n    return a\ndef g(a):\n    return a - 1\nX = 3\n"


def change(line: int) -> Change:
    return Change("module.py", "core/NumberReplacer", 0, (line, 12), (line, 13), "f", "", 0, 0)


def test_a_change_is_tried_on_the_tests_that_run_its_line_quick_ones_first_and_blind_ones_last(tmp_path: Path) -> None:
    known = watched(tmp_path)
    assert known.tests_of(OLD, change(2)) == [
        "tests/mutants/test_mutants.py::quick",
        "tests/mutants/test_mutants.py::slow",
        "tests/docs/test_prose.py::blind",
    ]
    assert known.tests_of(OLD, change(5)) == ["tests/mutants/test_mutants.py::other", "tests/docs/test_prose.py::blind"]
    assert len(known.tests_of(OLD, change(6))) == 4  # what uses a constant is not known
    assert known.tests_of(OLD, change(2), most=2.0) == ["tests/mutants/test_mutants.py::quick"]


def test_lines_are_found_again_when_others_have_come(tmp_path: Path) -> None:
    known = watched(tmp_path)
    new = '"""Two lines."""\n\n' + OLD
    assert known.tests_of(new, change(7)) == ["tests/mutants/test_mutants.py::other", "tests/docs/test_prose.py::blind"]


def test_what_is_said_to_be_harmless_is_in_the_results() -> None:
    results = Path(__file__).with_name("results.json")
    known = {each["name"] for each in json.loads(results.read_text(encoding="utf-8"))["changes"]}
    assert set(HARMLESS) <= known
    assert all(reason.endswith(".") for reason in HARMLESS.values())
