"""From the records to the file: what the controller has recorded, and the process that writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.host import bootstrap
from fusion_rt.settings import Settings
from fusion_rt.tracing import files, reader
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import Event
from fusiond.core.tracing import Trace, record_plan
from fusiond.host.loop import EventLoop
from fusiond.timeline.controller import TimelineController
from fusiond.timeline.writer import Order, TimelineWriter
from fusiond.timeline.writer_process import TimelineFile

PLAN = wire.Plan(
    3, "g", 0, wire.Reduction(), (wire.Bucket(0, "float32", 6, 0, (wire.PlannedTensor("w", 0, 6, (2, 3)),)),), 24
)
TOPOLOGY = Topology(("a",), ((0, 1),))


def step(clock: int) -> list[Event]:
    kinds = (Kind.READY, Kind.RUN_BEGIN, Kind.RUN_END)
    return [Event(clock * 1000 + i, kind, "allreduce.x", clock, 0, 0, 0) for i, kind in enumerate(kinds)]


def test_a_file_that_is_full_goes_on_in_another(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    order = Order(str(path), nodes=((0,),))
    file = TimelineFile(str(path), TimelineWriter(order, (0, 0)), 1 << 17)
    for clock in range(1000):
        file.write(step(clock))
    file.close()
    for each in (path, tmp_path / "t.json.1"):
        lines = json.loads(each.read_bytes())
        assert each.stat().st_size <= 1 << 17
        assert [line["name"] for line in lines[:3]] == ["process_name", "process_sort_index", "process_name"]
        assert sum(line["ph"] == "B" for line in lines) == sum(line["ph"] == "E" for line in lines) > 0


def test_a_full_disk_leaves_a_gap_that_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    file = TimelineFile(str(path), TimelineWriter(Order(str(path), nodes=((0,),)), (0, 0)), 0)
    file.write(step(0))
    pwrite = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if len(data) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    file.write(step(1))
    file.write(step(2))
    monkeypatch.setattr(os, "pwrite", pwrite)
    file.write(step(3))
    file.close()
    lines = json.loads(path.read_bytes())
    assert [line["name"] for line in lines if line["ph"] == "i"] == ["14 lines are missing"]
    assert lines[-1] == {"ph": "E", "ts": 3, "pid": 1, "args": {"dtype": "", "shape": "[]"}}
    assert capsys.readouterr().err.count("has gaps: No space left on device") == 1


class Recorded:
    """A daemon's ring, and the controller of its timelines."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.settings = Settings(trace_dir=str(directory / "rings"), runtime_dir=str(directory / "run"), **settings)
        (directory / "rings").mkdir()
        self.config = bootstrap.DaemonConfig("job", 0, TOPOLOGY)
        bootstrap.make_private_directory(self.settings.runtime_root())
        bootstrap.make_private_directory(bootstrap.job_directory(self.settings.runtime_root(), "job", 0))
        self.trace = Trace(self.config, self.settings)
        self.loop = EventLoop()
        self.loop.call_every(0.05, lambda: None)
        self.warnings: list[str] = []
        self.timeline = TimelineController(
            self.loop,
            self.trace,
            self.settings,
            TOPOLOGY,
            0,
            lambda: record_plan(self.trace, PLAN),
            self.warnings.append,
        )

    def done(self, ask: Callable[[Callable[[str], None]], None]) -> str:
        told: list[str] = []
        ask(told.append)
        self.turn_until(lambda: bool(told))
        return told[0]

    def turn_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            self.loop.turn()

    def start(self, rank: int, path: str) -> str:
        return self.done(lambda then: self.timeline.start(rank, path, False, then))

    def stop(self, rank: int) -> str:
        return self.done(lambda then: self.timeline.stop(rank, then))

    def operation(self, name: str, clock: int = 0, plan: int = 0) -> None:
        """One that two ranks take part in."""
        for rank in (0, 1):
            if not plan:
                signature = wire.Signature("allreduce", "float32", (2,), "adasum")
                self.timeline.submitted(wire.Submit(1, name, clock, signature))
            self.trace.record(Kind.READY, name, 8, clock, plan, peer=rank)
        self.trace.record(Kind.RUN_BEGIN, name, 8, clock, plan)
        self.trace.record(Kind.RUN_END, name, 8, clock, plan)

    def close(self) -> None:
        self.timeline.close()
        self.loop.close()
        self.trace.close()


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    made = Recorded(tmp_path)
    yield made
    made.close()


def names_in(path: str) -> list[str]:
    """Of the rows of a timeline."""
    lines = json.loads(Path(path).read_bytes())
    return [line["args"]["name"] for line in lines if "name" in line.get("args", {})]


@pytest.mark.multiprocess
def test_a_timeline_has_what_is_recorded_while_there_is_one(recorded: Recorded, tmp_path: Path) -> None:
    path = str(tmp_path / "t.json")
    recorded.operation("before")
    assert recorded.start(0, path) == ""
    recorded.operation("x")
    recorded.operation("bucket 0", plan=3)
    recorded.operation("x", 1)
    assert recorded.stop(0) == ""
    recorded.operation("after")
    assert names_in(path) == ["x", "allreduce.w"]
    ends = [line["args"] for line in json.loads(Path(path).read_bytes()) if line["ph"] == "E" and "args" in line]
    x, w = ({"dtype": "float32", "shape": shape} for shape in ("[2]", "[2, 3]"))
    assert ends == [x, w, x]
    ring = reader.read(os.path.join(files.directory_of(recorded.settings.trace_root(), "job"), "node-0.ring"))
    assert not ring.problems
    told = ring.records[ring.records["kind"] == Kind.TENSOR]
    assert [(ring.names[row["name"]], ring.names[row["clock"]]) for row in told] == [("x", "ADASUM float32 [2]")]


@pytest.mark.multiprocess
def test_where_nothing_is_recorded_a_timeline_has_a_ring_of_its_own_that_leaves_nothing(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, trace=False)
    for name in ("1.json", "2.json"):
        assert recorded.start(0, str(tmp_path / name)) == ""
        recorded.operation(name)
        assert recorded.stop(0) == ""
        assert names_in(str(tmp_path / name)) == [name]
    recorded.close()
    assert not [path for path in tmp_path.rglob("*") if "ring" in path.name and not path.is_dir()]


@pytest.mark.multiprocess
def test_timelines_are_started_switched_and_ended(recorded: Recorded, tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("1.json", "2.json", "3.json"))
    assert "cannot be the path" in recorded.start(0, "t.json")
    assert "cannot be written: No such file" in recorded.start(0, "/no/such")
    assert recorded.start(1, third) == ""  # rank 1 has none
    assert not recorded.timeline.is_written
    assert recorded.start(0, first) == ""
    recorded.operation("x")
    assert recorded.start(0, first) == ""  # goes on
    assert recorded.start(0, second) == ""
    recorded.operation("y")
    assert recorded.stop(1) == ""
    assert recorded.timeline.is_written
    assert recorded.stop(0) == recorded.stop(0) == ""
    assert not recorded.timeline.is_written
    assert recorded.start(0, first) == ""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # of an earlier one, which has ended by itself
            if "fusiond.timeline.writer_process" in child.cmdline():
                child.kill()
    recorded.turn_until(lambda: not recorded.timeline.is_written)
    assert recorded.warnings == [f"the timeline {first} is not written any more: its process has ended"]
    assert recorded.start(0, third) == ""
    recorded.operation("z")
    recorded.timeline.close()
    assert len(recorded.warnings) == 1
    for path, name in ((f"{first}.1", "x"), (second, "y"), (third, "z")):
        assert names_in(path) == [name]


@pytest.mark.multiprocess
def test_tensors_with_a_name_of_their_own_in_each_step_are_not_all_remembered(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusiond.timeline.controller._MOST_TENSORS", 8)
    path = str(tmp_path / "timeline.json")
    assert recorded.start(0, path) == ""
    for step in range(100):
        recorded.operation(f"loss.{step}")
    assert len(recorded.timeline._tensors) <= 8
    assert recorded.stop(0) == ""
    assert {f"loss.{step}" for step in range(100)} <= set(names_in(path))
