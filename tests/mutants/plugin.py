"""The side of pytest: which tests run which lines, which tests are tried on a change, and which one found it."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

WATCH = "FUSION_MUTANTS_WATCH"  # a folder: what the tests run is recorded in it
TRY = "FUSION_MUTANTS_TRY"  # a file: the tests to run, in this order
FOUND = "FUSION_MUTANTS_FOUND"  # a file: gets the name of the test that failed
LINES, TESTS = "lines.coverage", "tests.json"


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get(WATCH):
        config.pluginmanager.register(Watch(Path(folder), config.rootpath))
    if file := os.environ.get(TRY):
        config.pluginmanager.register(Try(Path(file), Path(os.environ[FOUND])))


class Watch:
    """Records the lines that each test runs, its seconds, whether it failed, and whether it is blind: it runs lines in
    other processes too, which leave no trace here."""

    def __init__(self, folder: Path, root: Path) -> None:
        import coverage

        from tests.harness import Job  # not where changes are tried: nothing of ours may have been imported there

        self._job = Job
        os.environ["COVERAGE_CORE"] = "ctrace"  # the other one tells a line's first test only
        self._folder = folder
        self._tests: dict[str, dict[str, Any]] = {}
        self._coverage = coverage.Coverage(
            data_file=folder / LINES, source=[str(root / "fusion_rt"), str(root / "daemon")], config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._tests[item.nodeid] = {"seconds": 0.0, "failed": False, "blind": False}
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        arguments = pyfuncitem.funcargs.values()
        blind = pyfuncitem.get_closest_marker("multiprocess") or any(isinstance(each, self._job) for each in arguments)
        self._tests[pyfuncitem.nodeid]["blind"] = bool(blind)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests[report.nodeid]
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        test["failed"] |= not report.passed

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        (self._folder / TESTS).write_text(json.dumps(self._tests), encoding="utf-8")


class Try:
    """Leaves the tests that a file names, in its order; those that it does not know come in front of them, unless it
    knows nothing."""

    def __init__(self, file: Path, found: Path) -> None:
        plan = json.loads(file.read_text(encoding="utf-8"))
        self._order: dict[str, int] = {name: place for place, name in enumerate(plan["tests"])}
        self._known: set[str] | None = set(plan["known"]) or None
        self._found = found

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        unknown = set() if self._known is None else {item.nodeid for item in items} - self._known
        items[:] = [item for item in items if item.nodeid in self._order or item.nodeid in unknown]
        items.sort(key=lambda item: self._order.get(item.nodeid, -1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._found.exists():
            self._found.write_text(report.nodeid, encoding="utf-8")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self._found.exists():
            self._found.write_text(report.nodeid, encoding="utf-8")
