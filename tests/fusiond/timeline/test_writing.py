"""From the engine's records to the file: what is collected, and the process that writes it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fusion_rt import trace, wire
from fusion_rt.settings import Settings
from fusion_rt.topology import Topology
from fusion_rt.trace_format import Kind
from fusiond.host.loop import EventLoop
from fusiond.timeline import instrument
from fusiond.timeline.controller import Desk
from fusiond.timeline.events import Dropped, Event, Order, Plan, Tensor, Told, decode
from fusiond.timeline.instrument import Tee
from fusiond.timeline.writer import Chronicle
from fusiond.timeline.writer_process import Book

PLAN = wire.Plan(
    3, "g", 0, wire.Reduction(), (wire.Bucket(0, "float32", 6, 0, (wire.PlannedTensor("w", 0, 6, (2, 3)),)),), 24
)


class Ring:
    """An instrument that keeps what it is told."""

    def __init__(self) -> None:
        self.kinds: list[int] = []

    def record(self, kind: int, *what: object, **more: object) -> None:
        self.kinds.append(kind)

    def close(self) -> None:
        pass


def step(clock: int) -> list[Told]:
    kinds = (Kind.READY, Kind.RUN_BEGIN, Kind.RUN_END)
    return [Event(clock * 1000 + i, kind, "allreduce.x", clock, 0, 0) for i, kind in enumerate(kinds)]


def all_of(tee: Tee) -> list[Told]:
    return [told for packet in tee.packets() for told in decode(packet)]


def test_without_a_timeline_only_the_ring_is_told() -> None:
    ring = Ring()
    tee = Tee(ring)
    assert tee.record == ring.record
    tee.submitted(wire.Submit(1, "x", 0, wire.Signature("allreduce", "float32", (2,))))
    assert all_of(tee) == []


def test_a_timeline_is_told_what_tensors_and_plans_are_before_their_records() -> None:
    ring = Ring()
    tee = Tee(ring, lambda: 5)
    tee.planned(PLAN)
    tee.begin()
    for name in ("x", "x", "y"):
        tee.submitted(wire.Submit(1, name, 0, wire.Signature("allreduce", "float32", (2,), "adasum")))
        tee.record(Kind.READY, name, 8, peer=1)
    tee.record(Kind.CLOCK, "", 8, peer=1)
    tee.planned(PLAN)
    tee.end()
    tee.record(Kind.RUN_END, "x")
    assert ring.kinds == [Kind.READY, Kind.READY, Kind.READY, Kind.CLOCK, Kind.RUN_END]
    tensors = [Tensor(name, "ADASUM", "float32", (2,)) for name in "xy"]
    ready = [Event(5, Kind.READY, name, 0, 0, 1) for name in "xxy"]
    plan = Plan(3, 0, False, "ALLREDUCE", (("float32", (("w", (2, 3)),)),))
    assert all_of(tee) == [plan, tensors[0], ready[0], ready[1], tensors[1], ready[2]]


def test_what_nobody_takes_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "MAX_WAITING", 3)
    tee = Tee(trace.NULL, lambda: 5)
    tee.begin()
    for _ in range(10):
        tee.record(Kind.READY, "x")
    assert all_of(tee) == [Event(5, Kind.READY, "x", 0, 0, 65535)] * 3 + [Dropped(5, 7)]
    assert all_of(tee) == []


def test_a_file_that_is_full_goes_on_in_another(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    order = Order(str(path), nodes=((0,),))
    book = Book(str(path), Chronicle(order, (0, 0)), 1 << 17)
    for clock in range(1000):
        book.write(step(clock))
    book.close()
    for each in (path, tmp_path / "t.json.1"):
        lines = json.loads(each.read_bytes())
        assert each.stat().st_size <= 1 << 17
        assert [line["name"] for line in lines[:3]] == ["process_name", "process_sort_index", "process_name"]
        assert sum(line["ph"] == "B" for line in lines) == sum(line["ph"] == "E" for line in lines) > 0


def test_a_full_disk_leaves_a_gap_that_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    book = Book(str(path), Chronicle(Order(str(path), nodes=((0,),)), (0, 0)), 0)
    book.write(step(0))
    pwrite = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if len(data) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    book.write(step(1))
    book.write(step(2))
    monkeypatch.setattr(os, "pwrite", pwrite)
    book.write(step(3))
    book.close()
    lines = json.loads(path.read_bytes())
    assert [line["name"] for line in lines if line["ph"] == "i"] == ["14 lines are missing"]
    assert lines[-1] == {"ph": "E", "ts": 3, "pid": 1, "args": {"dtype": "", "shape": "[]"}}
    assert capsys.readouterr().err.count("has gaps: No space left on device") == 1


@pytest.mark.multiprocess
def test_a_desk_starts_switches_and_ends_timelines(tmp_path: Path) -> None:
    loop = EventLoop()
    tee = Tee(trace.NULL)
    warnings: list[str] = []
    desk = Desk(loop, tee, Settings(), Topology(("a",), ((0, 1),)), 0, warnings.append)

    def done(ask: Callable[[Callable[[str], None]], None]) -> str:
        told: list[str] = []
        ask(told.append)
        deadline = time.monotonic() + 60
        loop.call_every(0.05, lambda: None)
        while not told:
            assert time.monotonic() < deadline
            loop.turn()
        return told[0]

    def collects() -> bool:
        return tee.collects

    first, second, third = (str(tmp_path / name) for name in ("1.json", "2.json", "3.json"))
    assert "cannot be the path" in done(lambda then: desk.start(0, "t.json", False, then))
    assert "cannot be written: No such file" in done(lambda then: desk.start(0, "/no/such", False, then))
    assert done(lambda then: desk.start(1, third, False, then)) == ""  # rank 1 has none
    assert not collects()
    assert done(lambda then: desk.start(0, first, False, then)) == ""
    tee.record(Kind.READY, "x", peer=0)
    assert done(lambda then: desk.start(0, first, False, then)) == ""  # goes on
    assert done(lambda then: desk.start(0, second, False, then)) == ""
    tee.record(Kind.READY, "y", peer=0)
    assert done(lambda then: desk.stop(1, then)) == ""
    assert collects()
    assert done(lambda then: desk.stop(0, then)) == done(lambda then: desk.stop(0, then)) == ""
    assert not collects()
    assert done(lambda then: desk.start(0, first, False, then)) == ""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # of an earlier one, which has ended by itself
            if "fusiond.timeline.writer_process" in child.cmdline():
                child.kill()
    while collects():
        loop.turn()
    assert warnings == [f"the timeline {first} is not written any more: its process has ended"]
    assert done(lambda then: desk.start(0, third, False, then)) == ""
    tee.record(Kind.READY, "z", peer=0)
    desk.close()
    loop.close()
    assert len(warnings) == 1
    for path, name in ((f"{first}.1", "x"), (second, "y"), (third, "z")):
        lines = json.loads(Path(path).read_bytes())
        assert [line["args"]["name"] for line in lines if "name" in line.get("args", {})] == [name]
