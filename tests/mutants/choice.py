"""Which tests are tried on a change, and in which order: those that run its line, cheap ones first."""

from __future__ import annotations

import ast
import difflib
import glob
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.mutants import plugin
from tests.mutants.changes import Change

_BINS_S = (0.03, 0.2, 1.0, 5.0)  # tests of a file stay together as long as they take about as long
_SLOWER = 8.0  # than when they were watched: tests on a busy machine, before the change counts as one that hangs
_LEAST_S = 120.0
_ROOT = Path(__file__).resolve().parents[2]
_FIRST = 24  # tests
_SOURCES = "sources.json"


class Watched:
    """What the tests of a group were seen to run.

    Attributes:
        tests: seconds of each, and whether it failed or was blind, by name.
    """

    def __init__(self, folder: Path, tests: Sequence[str]) -> None:
        from coverage import CoverageData

        self._places = tests
        self.tests: dict[str, dict[str, Any]] = json.loads((folder / plugin.TESTS).read_text(encoding="utf-8"))
        self._sources: dict[str, str] = json.loads((folder / _SOURCES).read_text(encoding="utf-8"))
        self._data = CoverageData(str(folder / plugin.LINES))
        self._data.read()
        self._files = self._data.measured_files()
        self._lines: dict[str, dict[int, set[str]]] = {}

    def rounds(self, root: Path, tests: Sequence[str], some: bool) -> list[tuple[list[str], list[str]]]:
        """Divides the tests of a change: a few to begin with, which find most changes, and the rest. To collect all
        tests of a folder takes longer than to run those.

        Args:
            some: whether these are not all tests: then new ones, in other files, can wait.

        Returns:
            For each round the files or folders, and the tests.
        """
        first, files = tests[:_FIRST], list(dict.fromkeys(test.partition("::")[0] for test in tests))
        started = list(dict.fromkeys(test.partition("::")[0] for test in first))
        rounds = [(started, list(first))] if first else []
        if not some:
            rounds.append((expanded(root, self._places), list(tests)))
        elif len(tests) > len(first):
            rounds.append((files, list(tests)))
        return rounds

    def _is_there(self, test: str) -> bool:
        return (_ROOT / test.partition("::")[0]).exists()

    def meet(self, test: str, failed: bool, seconds: float) -> None:
        """Notes a test that has come since the others were watched. It is taken for one that runs any line."""
        self.tests[test] = {"seconds": round(seconds, 3), "failed": failed, "blind": True}

    def limit(self, tests: Sequence[str]) -> float:
        """Returns the seconds after which a change hangs."""
        return _LEAST_S + _SLOWER * sum(self.tests[test]["seconds"] for test in tests)

    def tests_of(self, source: str, change: Change, most: float = math.inf) -> list[str]:
        """Chooses the tests of a change in `source`, in their order.

        These are the tests that run its statement and then those that are blind. Where no test was seen to run it (a
        kernel's, a class's or a module's own), they are those that run its function, any of its module, or all. A test
        that failed without a change is left out.

        Args:
            most: seconds that they may take; the dearest are left out.
        """
        lines = self._of_module(change.module)
        seen: set[str] = set()
        for span in _spans(source, change.start[0]):
            for line in self._before(change.module, source, span):
                seen |= lines.get(line, set())
            if seen:
                break
        else:
            seen = set().union(*lines.values())
        useful = [
            name
            for name, test in self.tests.items()
            if not test["failed"] and (name in seen or test["blind"] or not seen) and self._is_there(name)
        ]
        words = _words(change.module)

        def order(name: str) -> tuple[Any, ...]:
            file, test = name.partition("::")[0], self.tests[name]
            related = not words.isdisjoint(_words(Path(file).name.removeprefix("test_")))
            slow = sum(test["seconds"] > limit for limit in _BINS_S)
            return name not in seen, not related, slow, not test["blind"], file

        ordered = sorted(useful, key=order)
        sums = itertools.accumulate(self.tests[name]["seconds"] for name in ordered)
        return [name for name, total in zip(ordered, sums, strict=True) if total <= most] or ordered[:1]

    def _of_module(self, module: str) -> dict[int, set[str]]:
        if module not in self._lines:
            paths = [file for file in self._files if file.endswith("/" + module)]
            found = self._data.contexts_by_lineno(paths[0]) if paths else {}
            self._lines[module] = {line: {test for test in tests if test} for line, tests in found.items()}
        return self._lines[module]

    def _before(self, module: str, source: str, span: tuple[int, int]) -> Iterator[int]:
        """Yields what the lines of a span of `source` were called when tests were watched."""
        watched = self._sources.get(module, "")
        if watched == source:
            yield from range(span[0], span[1] + 1)
            return
        matcher = difflib.SequenceMatcher(None, watched.splitlines(), source.splitlines(), autojunk=False)
        for old, new, length in matcher.get_matching_blocks():
            for line in range(max(span[0], new + 1), min(span[1], new + length) + 1):
                yield line - new + old


def watch(copy: Path, folder: Path, tests: Sequence[str]) -> Watched:
    """Runs the tests of a group once, in a copy of the tree, unless that was done."""
    if not (folder / plugin.TESTS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"watching {' '.join(tests)}", flush=True)
        sources = {
            str(path.relative_to(copy)): path.read_text(encoding="utf-8")
            for part in ("fusion_rt", "daemon")
            for path in (copy / part).rglob("*.py")
        }
        (folder / _SOURCES).write_text(json.dumps(sources), encoding="utf-8")
        with (folder / "log").open("w", encoding="utf-8") as log:
            options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"]
            subprocess.run(
                [sys.executable, "-m", "pytest", *options, *expanded(copy, tests)],
                cwd=copy,
                env={
                    **os.environ,
                    plugin.WATCH: str(folder),
                    "PYTHONPATH": os.pathsep.join(str(copy / part) for part in ("", "daemon", "tools")),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,  # a test that fails is left out
            )
    return Watched(folder, tests)


def expanded(root: Path, places: Sequence[str]) -> list[str]:
    """Returns the paths that the patterns stand for."""
    return sorted(name for place in places for name in glob.glob(place, root_dir=root))


def _words(path: str) -> set[str]:
    return set(path.removesuffix(".py").replace("/", "_").split("_")) - {"", "test", "fusion", "rt", "torch", "sync"}


def _spans(source: str, line: int) -> list[tuple[int, int]]:
    """Returns the lines of the statement that has a line, or of its head, and then those of the function around it."""
    statement, function = (line, line), None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function = (node.body[0].lineno, node.end_lineno or 0)
            if not body:
                statement = (node.lineno, node.end_lineno or 0)
            elif line < body[0].lineno:
                statement = (node.lineno, body[0].lineno - 1)
    return [statement] if function is None else [statement, function]
