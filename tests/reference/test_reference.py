"""The references are independent of the project, and short enough to be read beside their papers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_imports import ROOTS, imported_names

FILES = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))
MOST_LINES = 40


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_reference_imports_what_it_is_the_reference_of(path: Path) -> None:
    imported = {name for _, name in imported_names(path.read_text(), "tests.reference")}
    assert not {name for name in imported if name.partition(".")[0] in ROOTS}
    own = {name for name in imported if name.startswith("tests")}
    assert all(name.startswith("tests.reference") for name in own), own


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_reference_is_short(path: Path) -> None:
    """Lines of code, without those of the docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            assert (node.end_lineno or 0) - first.lineno < MOST_LINES, f"{path.name}: {node.name}"
