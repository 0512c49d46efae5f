"""Raw results of benchmarks: one JSON file a suite, in one form for all, checked whenever one is read.

A file has *records*, one for each setting (how many ranks, which network, which model); a record has *measures*, each
with a name, a unit, and every contender's samples. `details` is other data of the suite, such as the curve of a
training run. Tables, plots and comparisons are made from these files and from nothing else.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.common import machine
from benchmarks.common.machine import Machine
from benchmarks.suites import SUITES

RESULTS = Path(__file__).parents[1] / "results"
SCHEMA = 1
DIGITS = 6  # significant ones that are kept of a sample
Setting = dict[str, str | int | float | bool]


class ResultsError(Exception):
    """A file of results cannot be used; the text names it and says why."""


class Measure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One measured quantity.

    Attributes:
        name: of the quantity, unique in its record: "4 B", "a step".
        unit: of the samples: s, B, 1, ...
        samples: by contender. Where there is a peer, the i-th of each are of the same turn.
        peer: the contender that the others are compared with; none if empty.
        better: whether less or more is better.
        portable: does not depend on the speed of the machine, such as a number of bytes or a loss.
    """

    name: str
    unit: str
    samples: dict[str, list[float]]
    peer: str = ""
    better: Literal["less", "more"] = "less"
    portable: bool = False

    def ours(self) -> list[str]:
        """Returns the contenders other than the peer."""
        return [name for name in self.samples if name != self.peer]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The measurements in one setting.

    Attributes:
        setting: its parameters, by name; identifies the record in its file.
        measures: none in suites that have details only.
        machine: None where it was not recorded.
        date: of the beginning, in UTC.
        command: of this suite.
        details: of the suite.
    """

    setting: Setting
    measures: list[Measure] = []
    machine: Machine | None = None
    date: str = ""
    command: str = ""
    details: dict[str, Any] = {}

    def measure(self, name: str) -> Measure:
        """Returns a measure by its name. Raises `KeyError`."""
        return {each.name: each for each in self.measures}[name]


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a file of results."""

    schema: int
    suite: str
    records: list[Record]

    def find(self, **setting: str | int | float | bool) -> list[Record]:
        """Returns the records whose settings have these values, and any others."""
        return [each for each in self.records if setting.items() <= each.setting.items()]


def begin() -> tuple[Machine, str]:
    """Returns the machine and the date, for a record; call it before anything is measured."""
    return machine.describe(), time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())


def command_line() -> str:
    """Returns the command of this process, as a person would write it, without `--out`."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = f"python -m {module.name}" if module is not None else "python"
    arguments = sys.argv[1:]
    if "--out" in arguments:
        place = arguments.index("--out")
        del arguments[place : place + 2]
    return " ".join([name.removesuffix(".__main__"), *arguments])


def rounded(samples: Iterable[float]) -> list[float]:
    """Rounds samples to `DIGITS` significant digits."""
    return [float(f"{number:.{DIGITS}g}") for number in samples]


def load(path: Path, suite: str = "") -> Results:
    """Reads and checks a file.

    Raises:
        ResultsError: there is no such file, it is not one of results, or not of this suite.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except FileNotFoundError:
        raise ResultsError(f"There is no file {path}: nothing has been measured into it yet.") from None
    except msgspec.DecodeError as error:
        raise ResultsError(f"{path} is no file of results: {error}.") from None
    if problem := _problem(found, suite):
        raise ResultsError(f"{path} cannot be used: {problem}.")
    return found


def load_all(folder: Path) -> dict[str, Results]:
    """Loads all results in a folder, by suite; files of no suite, and in forms of their own, are skipped.

    Raises:
        ResultsError: one of them cannot be used.
    """
    files = sorted(path for path in folder.glob("*.json") if path.stem in SUITES and SUITES[path.stem].common)
    return {path.stem: load(path, path.stem) for path in files}


def keep(path: Path, suite: str, *records: Record) -> Results:
    """Writes records to a file, at the places of those with the same settings; makes the file if there is none.

    Raises:
        ResultsError: the file or the records cannot be used; nothing is written then.
    """
    before = load(path, suite).records if path.exists() else []
    old = [each.setting for each in before]
    kept = [next((new for new in records if new.setting == each.setting), each) for each in before]
    found = Results(SCHEMA, suite, [*kept, *(each for each in records if each.setting not in old)])
    if problem := _problem(found, suite):
        raise ResultsError(f"What was measured cannot be kept in {path}: {problem}.")
    lines = ",\n".join(msgspec.json.encode(each).decode() for each in found.records)
    header = f'{{"schema": {SCHEMA}, "suite": {msgspec.json.encode(suite).decode()}, "records": ['
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(f"{header}\n{lines}\n]}}\n", encoding="utf-8")
    unfinished.rename(path)
    return found


def _problem(found: Results, suite: str) -> str:
    """Describes a problem of the results in a clause; empty if there is none."""
    if found.schema != SCHEMA:
        return f"its schema is {found.schema}, and this version reads {SCHEMA}"
    if suite and found.suite != suite:
        return f"it is of the suite {found.suite!r}, not of {suite!r}"
    for number, record in enumerate(found.records):
        where = f"in record {number} ({label(record.setting)})"
        if [other.setting for other in found.records].count(record.setting) > 1:
            return f"{where}, the setting is that of another record"
        names = [measure.name for measure in record.measures]
        if repeated := {name for name in names if names.count(name) > 1}:
            return f"{where}, {repeated.pop()!r} is measured twice"
        for measure in record.measures:
            if problem := _problem_of(measure):
                return f"{where}, {measure.name!r}: {problem}"
    return ""


def _problem_of(measure: Measure) -> str:
    if not measure.samples:
        return "there are no samples"
    for name, samples in measure.samples.items():
        if not samples:
            return f"there are no samples of {name!r}"
        if not all(map(math.isfinite, samples)):
            return f"a sample of {name!r} is no number"
    if measure.peer and measure.peer not in measure.samples:
        return f"there are no samples of its peer {measure.peer!r}"
    if measure.peer and len({len(samples) for samples in measure.samples.values()}) > 1:
        return "contenders have different numbers of samples, so they cannot be compared turn by turn"
    return ""


def label(setting: Setting) -> str:
    """Describes a setting in words."""
    return ", ".join(f"{name} {value}" for name, value in setting.items() if value != "") or "as it is"
