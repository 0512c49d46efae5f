"""The references are independent of the project, and short enough to be read beside their papers."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from fusion_rt import algorithms, codecs
from tests.reference import algorithms as of_algorithms
from tests.reference import codecs as of_codecs
from tests.test_imports import ROOTS, imported_names

FILES = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))
MOST_LINES = 40
OTHER_NAMES = {
    **{"allreduce": ("bsp",), "asp": ("asgd",), "hogwild": ("asgd",), "easgd": ("easgd_async", "easgd_sync")},
    **{"ea_wild": ("easgd_async",), "diloco": ("diloco", "streaming_diloco"), "decoupled": ("decoupled_diloco",)},
    **{"int4": ("integers",), "int8": ("integers",)},
}
"""Of references of what has another name in the product."""


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


@pytest.mark.parametrize(("names", "references"), [(algorithms.ALGORITHMS, of_algorithms), (codecs.CODECS, of_codecs)])
def test_each_algorithm_and_codec_has_a_reference_that_a_test_follows(names: Any, references: Any) -> None:
    tests = Path(__file__).parent.parent
    files = [*(tests / "properties").glob("*.py"), *(tests / "fusiond" / "algorithms").glob("*.py")]
    text = "\n".join(path.read_text() for path in files)
    for name in names:
        for function in OTHER_NAMES.get(name, (name,)):
            assert callable(getattr(references, function)), name
            assert re.search(rf"(?:published|reference)\.(?:scaled_)?{function}\b", text), (
                f"{function} is followed nowhere"
            )
