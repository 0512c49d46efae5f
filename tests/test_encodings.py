"""Text files are read and written as UTF-8, whatever the locale is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.for_each import for_each

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("fusion_rt", "daemon", "tools", "benchmarks", "examples")
TEXT = {"read_text": 0, "write_text": 1}  # methods of `Path`: position of the encoding
MODE = {
    "open": 1,
    "fdopen": 1,
    "NamedTemporaryFile": 0,
    "TemporaryFile": 0,
}  # position of the mode; text if it has no b


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Lines of the calls that leave the encoding of a text to the locale."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, (ast.Name, ast.Attribute)):
            continue
        words = {word.arg: word.value for word in call.keywords}
        is_method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
        if "encoding" in words:
            continue
        if name in TEXT:
            if len(call.args) <= TEXT[name]:
                yield call.lineno
        elif name in MODE:
            position = 0 if (is_method and name == "open") else MODE[name]
            given = words.get("mode", call.args[position] if len(call.args) > position else None)
            mode = given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else None
            if mode is not None and "b" not in mode and not set(mode) - set("rwaxt+"):
                yield call.lineno
            elif given is None and name in ("open", "fdopen") and not (is_method and name == "open"):
                yield call.lineno  # text is what `open` takes it for


@for_each(
    ("code", "found"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, mode='a', errors='replace')", True),
        ("open(path, 'rb')", False),
        ("open(path, encoding='ascii')", False),
        ("path.open('w')", True),
        ("codec.open(layout)", False),
        ("path.open('wb')", False),
        ("os.fdopen(fd, 'w')", True),
        ("os.fdopen(fd, 'wb', buffering=0)", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("resource.read_text('utf-8')", False),
        ("path.read_text()", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("tempfile.TemporaryFile()", False),
        ("tempfile.NamedTemporaryFile('w')", True),
    ],
)
def test_calls_without_an_encoding_are_found(code: str, found: bool) -> None:
    assert bool(list(without_encoding(ast.parse(code)))) == found


def test_no_text_file_depends_on_the_locale() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in without_encoding(ast.parse(path.read_bytes()))
    ]
    assert found == []
