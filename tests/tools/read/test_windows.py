"""Of a large job only what is asked about is read, and says the same."""

from __future__ import annotations

import pytest

from fusion_trace.analyse import bucket_times, critical_path
from fusion_trace.analyse.overlap import partitions
from fusion_trace.read import job, progress, windows
from fusion_trace.read.choice import StepRange
from tests.diagnosis.generator import MS, Fault, Shape, write

SHAPE = Shape(nodes=2, ranks_per_node=2, steps=40, loss=True, skews={1: 700 * MS}, seed=2)


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


def test_of_a_job_that_is_too_large_the_last_steps_are_read(rings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = job.load([rings], "")
    records = sum(len(process.records) for process in whole.processes)
    monkeypatch.setattr(windows, "AT_ONCE", records // 4)
    part = job.load([rings], "")
    steps = sorted({each.number for each in partitions(part)})
    assert steps[-10:] == list(range(30, 40))
    assert len(steps) <= 12
    (problem,) = part.problems
    assert f"of {records:,} records those of step 30 and later are read: --steps" in problem


def test_steps_that_no_rank_has_are_none(rings: str) -> None:
    assert partitions(job.load([rings], "", StepRange(900, None)), StepRange(900, None)) == ()


def test_at_a_terminal_a_line_says_how_far_reading_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    assert list(progress.told("rings", ["a", "b"])) == ["a", "b"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress.told("rings", ["a", "b"])) == ["a", "b"]
    assert capsys.readouterr().err == "\rrings: 0 of 2\033[K\rrings: 1 of 2\033[K\r\033[K"
