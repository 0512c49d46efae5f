"""Results of suites that make training runs: each run is a record, and is not repeated once it is in the file."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import results
from benchmarks.common.results import Measure, Record

Result = dict[str, Any]


def load(path: Path) -> list[Result]:
    """Loads the runs in a file; none if there is no such file.

    Raises:
        results.ResultsError: it is no file of results.
    """
    return [of(record) for record in results.load(path).records] if path.exists() else []


def of(record: Record) -> Result:
    """Converts a record to a run's settings and results; null becomes NaN, which JSON does not have."""
    found: Result = _with_nan({**record.setting, **record.details})
    return found


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_nan(each) for each in value]
    return math.nan if value is None else value


def record(known_by: Sequence[str], result: Result, numbers: Mapping[str, tuple[float, str, bool]]) -> Record:
    """Makes the record of a run.

    Args:
        known_by: the keys that identify it.
        result: the run.
        numbers: by measure, its value, whether less or more is better, and whether it is the same on any machine.
    """
    measures = [
        Measure(name, "", {"fusion_rt": [value]}, better="more" if better == "more" else "less", portable=portable)
        for name, (value, better, portable) in numbers.items()
        if math.isfinite(value)
    ]
    setting = {name: result[name] for name in known_by}
    details = {name: value for name, value in result.items() if name not in known_by}
    return Record(setting, measures, *results.begin(), results.command_line(), details)


def missing(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the names of the runs that a file does not have yet; `runs`: the keys and values that identify each."""
    done = load(path)
    return [name for name, known in runs.items() if not any(known.items() <= each.items() for each in map(_flat, done))]


def _flat(result: Result) -> dict[str, Any]:
    """Returns a run without its lists and dicts."""
    return {name: value for name, value in result.items() if not isinstance(value, (list, dict))}


def attempt(name: str, job: Callable[[], Result]) -> Result | None:
    """Makes a run; if the job fails, prints a sentence and returns None, so that the others are still made."""
    try:
        return job()
    except subprocess.CalledProcessError as error:
        print(f"{name}: the job failed with status {error.returncode}", file=sys.stderr)
        return None
