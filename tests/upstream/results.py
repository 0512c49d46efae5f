"""The file of outcomes, and the comparison of two backends in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.upstream.running import Outcome

FILE = Path(__file__).parent / "results.json"
_LAST_LINES = 6  # of what a failed test has said, that are kept
_PLACE = re.compile(r'(?<=")/[^"]*/site-packages/')  # where this machine has torch


class Results:
    """Outcomes of whole suites, by suite, place and backend.

    Attributes:
        torch: the version whose tests these are.
    """

    def __init__(self, torch: str) -> None:
        self.torch = torch
        self._runs: dict[str, dict[str, dict[str, dict[str, Outcome]]]] = {}

    @classmethod
    def read(cls, file: Path = FILE) -> Results:
        """Returns what `write` has written."""
        found = json.loads(file.read_text(encoding="utf-8"))
        results = cls(found["torch"])
        for suite, places in found["suites"].items():
            for place, backends in places.items():
                for backend, kinds in backends.items():
                    results.put(suite, place, backend, _outcomes(kinds))
        return results

    def write(self, file: Path = FILE) -> None:
        """Writes all into a file that shows differences line by line."""
        suites = {
            suite: {
                place: {backend: _grouped(outcomes) for backend, outcomes in sorted(backends.items())}
                for place, backends in sorted(places.items())
            }
            for suite, places in sorted(self._runs.items())
        }
        text = json.dumps({"torch": self.torch, "suites": suites}, indent=1)
        file.write_text(text + "\n", encoding="utf-8")

    def put(self, suite: str, place: str, backend: str, outcomes: Mapping[str, Outcome]) -> None:
        """Notes a run of a suite, in place of an earlier one."""
        self._runs.setdefault(suite, {}).setdefault(place, {})[backend] = dict(outcomes)

    def of(self, suite: str, place: str, backend: str) -> Mapping[str, Outcome]:
        """Returns the outcomes of a suite's tests by name; none if it has not been run there."""
        return self._runs.get(suite, {}).get(place, {}).get(backend, {})

    def runs(self) -> Iterator[tuple[str, str, str]]:
        """Yields suite, place and backend of each run."""
        for suite, places in self._runs.items():
            for place, backends in places.items():
                for backend in backends:
                    yield suite, place, backend


def behind(gloo: Mapping[str, Outcome], other: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Returns the outcomes of those tests that pass with gloo and, having been run, do not with the other backend."""
    return {
        test: outcome
        for test, outcome in other.items()
        if outcome.kind != "pass" and test in gloo and gloo[test].kind == "pass"
    }


def _grouped(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    passed = sorted(test for test, outcome in outcomes.items() if outcome.kind == "pass")
    skipped: dict[str, list[str]] = {}
    for test, outcome in sorted(outcomes.items()):
        if outcome.kind == "skip":
            skipped.setdefault(outcome.said, []).append(test)
    failed = {
        test: _PLACE.sub("", outcome.said).strip().splitlines()[-_LAST_LINES:]
        for test, outcome in sorted(outcomes.items())
        if outcome.kind == "fail"
    }
    return {"pass": passed, "skip": skipped, "fail": failed}


def _outcomes(kinds: Mapping[str, Any]) -> dict[str, Outcome]:
    return {
        **{test: Outcome("pass") for test in kinds["pass"]},
        **{test: Outcome("skip", reason) for reason, tests in kinds["skip"].items() for test in tests},
        **{test: Outcome("fail", "\n".join(lines)) for test, lines in kinds["fail"].items()},
    }
