"""Compares results with older ones, to find out whether a version has become slower.

Times of two runs differ for reasons other than the version: another machine, other load. So a contender is judged by
its ratio to the peer that took turns with it, which the same conditions affect. Times without a peer are compared only
where both are from the same machine, and numbers that do not depend on a machine (bytes, losses) always.

*Beyond noise*: the whole 99 % bootstrap interval of (new / old) has to be on the wrong side, and by more than the
tolerance, since runs differ by more than turns of one run do. Fewer than three samples are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.common import sampling, tables
from benchmarks.common.results import Measure, Record, Results, label
from benchmarks.common.sampling import Estimate
from benchmarks.common.tables import Table

CONFIDENCE = 0.99
TOLERANCE = 0.1
FEWEST = 3  # samples that are judged
WORSE, BETTER, SAME = "worse", "better", "no change beyond noise"


@dataclass(frozen=True)
class Row:
    """One contender in one measure.

    Attributes:
        where: suite and setting.
        peer: the contender that it is compared with; empty: its own older times.
        old, new: medians, of the ratios to the peer or of the samples.
        change: new goodness over old; above 1 is better.
    """

    where: str
    measure: str
    contender: str
    peer: str
    old: float
    new: float
    change: Estimate
    verdict: str


@dataclass
class Comparison:
    """Rows, and sentences about what could not be compared or only with care."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == WORSE]


def compare(old: Mapping[str, Results], new: Mapping[str, Results], tolerance: float = TOLERANCE) -> Comparison:
    """Compares the suites that both have."""
    found = Comparison()
    for suite in [name for name in new if name in old]:
        before = {label(record.setting): record for record in old[suite].records}
        after = {label(record.setting): record for record in new[suite].records}
        for setting in [each for each in after if each in before]:
            found.notes += _cautions(suite, before[setting], after[setting])
            _records(f"{suite}, {setting}", before[setting], after[setting], tolerance, found)
        if gone := [setting for setting in before if setting not in after]:
            found.notes.append(f"{suite}: not measured again: {'; '.join(gone)}.")
    if not set(old) & set(new):
        found.notes.append(f"Nothing in common: {_names(old)} before, {_names(new)} now.")
    found.notes = list(dict.fromkeys(found.notes))  # the same of several settings once
    return found


def _names(suites: Mapping[str, Results]) -> str:
    return ", ".join(suites) or "nothing"


def _cautions(suite: str, old: Record, new: Record) -> Iterator[str]:
    if not _same(old, new):
        yield (
            f"{suite}: {_machine(old)} before, {_machine(new)} now. Of times, only ratios to peers that took turns are "
            "compared, and those can differ between machines, too."
        )
    elif old.machine and new.machine and old.machine.torch != new.machine.torch:
        yield f"{suite}: the peers are those of torch {old.machine.torch} before, {new.machine.torch} now."
    for when, record in (("before", old), ("now", new)):
        if record.machine and record.machine.busy:
            yield f"{suite}: the machine was busy {when} (load {record.machine.load:g})."


def _same(old: Record, new: Record) -> bool:
    return old.machine is not None and new.machine is not None and old.machine.same(new.machine)


def _machine(record: Record) -> str:
    return f"{record.machine.cores} cores of {record.machine.cpu}" if record.machine else "an unknown machine"


def _records(where: str, old: Record, new: Record, tolerance: float, found: Comparison) -> None:
    same = _same(old, new)
    before = {measure.name: measure for measure in old.measures}
    for measure in new.measures:
        if measure.name in before:
            found.rows += _rows(where, before[measure.name], measure, same, tolerance, found.notes)


def _rows(where: str, old: Measure, new: Measure, same: bool, tolerance: float, notes: list[str]) -> Iterator[Row]:
    peer = new.peer if new.peer == old.peer else ""
    if not peer and not same and not new.portable:
        notes.append(f"{where}, {new.name!r}: times of different machines without a peer are not compared.")
        return
    for name in [name for name in new.ours() if name in old.samples]:
        was, now = (_goodness(measure, name, peer) for measure in (old, new))
        if was is None or now is None:
            notes.append(f"{where}, {new.name!r}, {name}: a sample is 0, so there is no ratio to compare.")
        elif min(len(was), len(now)) < FEWEST and not new.portable:
            notes.append(f"{where}, {new.name!r}, {name}: fewer than {FEWEST} samples are not judged.")
        else:
            change = sampling.change(was, now, CONFIDENCE)
            numbers = [sampling.median(each if peer else measure.samples[name])
                       for each, measure in ((was, old), (now, new))]  # fmt: skip
            yield Row(where, new.name, name, peer, numbers[0], numbers[1], change, _verdict(change, tolerance))


def _goodness(measure: Measure, name: str, peer: str) -> list[float] | None:
    """Converts samples so that larger is better; None if one of them is 0, and so has no ratio."""
    own = measure.samples[name]
    other: Sequence[float] = measure.samples[peer] if peer else [1.0] * len(own)
    over, under = (other, own) if measure.better == "less" else (own, other)
    if 0 in under or 0 in over:
        return None
    return sampling.ratios(over, under)


def _verdict(change: Estimate, tolerance: float) -> str:
    if change.high < 1 - tolerance:
        return WORSE
    return BETTER if change.low > 1 + tolerance else SAME


def table(rows: Sequence[Row], title: str) -> Table:
    """Makes a table of changes."""
    made = Table(["where", "what", "contender", "before", "now", "now / before, as good", ""], title=title, left=3)
    for row in rows:
        unit = f"{row.peer} / it: " if row.peer else ""
        old, new = (f"{unit}{tables.number(value)}" for value in (row.old, row.new))
        made.add(row.where, row.measure, row.contender, old, new, tables.ratio(row.change), row.verdict)
    return made
