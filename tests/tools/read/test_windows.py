"""Of a large job only what is asked about is read, and says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_rt.tracing.format import HEADER, HEADER_NBYTES, NAMES_NBYTES, RECORD, Role
from fusion_rt.tracing.reader import read_header
from fusion_trace.analyse import bucket_times, critical_path
from fusion_trace.analyse.overlap import partitions
from fusion_trace.read import job
from fusion_trace.read.choice import ChoiceError, StepRange
from tests.diagnosis.generator import MS, Fault, Shape, write

SHAPE = Shape(nodes=2, ranks_per_node=2, steps=40, loss=True, skews={1: 700 * MS}, seed=2)


def _cut(ring: bytes, written: int) -> bytes:
    """Makes a ring of one whose worker died when it had written so many records."""
    fields = list(HEADER.unpack_from(ring))
    fields[13] = written
    return HEADER.pack(*fields) + ring[HEADER.size : HEADER_NBYTES + NAMES_NBYTES + written * RECORD.size]


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("rings")
    write(SHAPE, directory, Fault("link", (1.0,) * SHAPE.steps, links=frozenset({(0, 1)}), factor=2.0))
    return str(directory)


@pytest.mark.parametrize("chosen", [StepRange(10, 14), StepRange(None, 3), StepRange(36, None), StepRange(20, 21)])
def test_some_steps_are_read_alone_and_are_as_in_the_whole_job(rings: str, chosen: StepRange) -> None:
    whole, part = job.load([rings], ""), job.load([rings], "", chosen)
    assert partitions(part, chosen) == partitions(whole, chosen) != ()
    assert bucket_times.find(part, chosen) == bucket_times.find(whole, chosen)
    assert critical_path.find(part, chosen) == critical_path.find(whole, chosen)
    assert (part.span, part.problems) == (whole.span, ())
    read, there = (sum(len(process.records) for process in trace.processes) for trace in (part, whole))
    assert read < there / 3


@pytest.mark.parametrize("chosen", [StepRange(41, None), StepRange(900, 950)])
def test_steps_that_a_job_has_not_are_an_error_that_says_which_it_has(rings: str, chosen: StepRange) -> None:
    with pytest.raises(ChoiceError, match="none of the chosen steps is in job diagnosis, which has steps 1 to 39"):
        job.load([rings], "", chosen)


def test_of_a_job_that_is_too_large_the_last_steps_are_read(rings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = job.load([rings], "")
    records = sum(len(process.records) for process in whole.processes)
    monkeypatch.setattr(job, "AT_ONCE", records // 4)
    part = job.load([rings], "")
    steps = sorted({each.number for each in partitions(part)})
    assert steps[-10:] == list(range(30, 40))
    assert len(steps) <= 12
    (problem,) = part.problems
    assert f"of {records:,} records only those of step 30 and later are read; --steps" in problem


def test_of_a_step_that_has_not_ended_the_end_of_the_job_is_read(rings: str) -> None:
    part = job.load([rings], "", StepRange(40, None))
    assert partitions(part, StepRange(40, None)) == ()
    whole = job.load([rings], "")
    assert part.span == whole.span
    read, there = (sum(len(process.records) for process in trace.processes) for trace in (part, whole))
    assert read < there / 3


def test_a_rank_that_died_early_does_not_make_more_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(SHAPE, tmp_path, Fault("link", (0.0,) * SHAPE.steps))
    died = next(path for path in sorted(tmp_path.iterdir()) if read_header(str(path)).role == Role.WORKER)
    died.write_bytes(_cut(died.read_bytes(), 100))
    records = sum(len(process.records) for process in job.load([str(tmp_path)], "").processes)
    monkeypatch.setattr(job, "AT_ONCE", records // 4)
    part = job.load([str(tmp_path)], "")
    assert sum(len(process.records) for process in part.processes) < records / 2


def test_at_a_terminal_a_line_says_how_far_reading_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "_PATIENCE", -1.0)
    assert list(job._told("rings", ["a", "b"])) == ["a", "b"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(job._told("rings", ["a", "b"])) == ["a", "b"]
    assert capsys.readouterr().err == "\rrings: 0 of 2\033[K\rrings: 1 of 2\033[K\r\033[K"
