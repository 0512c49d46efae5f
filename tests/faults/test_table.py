"""The table of faults (README.md) names every fault and only tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("README.md")
TESTS = Path(__file__).resolve().parents[1]
FAULTS = 18


def rows() -> dict[int, list[str]]:
    """The tests of each fault."""
    found = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].isdigit():
            found[int(cells[0])] = re.findall(r"`([^`]+)`", cells[-1])
    return found


def names_in(path: Path) -> set[str]:
    """Names of the tests in a file."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_table_has_every_fault() -> None:
    assert sorted(rows()) == list(range(1, FAULTS + 1))
    assert all(rows().values())


@pytest.mark.parametrize("fault", range(1, FAULTS + 1))
def test_every_test_that_the_table_names_is_there(fault: int) -> None:
    for named in rows()[fault]:
        file, _, name = named.partition("::")
        assert name.startswith("test_"), named
        assert name in names_in(TESTS / file), f"{named} is not there"
