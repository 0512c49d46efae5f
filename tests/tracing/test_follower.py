"""Reading a ring while it is written: each record of a timeline once, and gaps where it was too fast."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion_rt.tracing import reader
from fusion_rt.tracing.format import HEADER_NBYTES, NAMES_NBYTES, RECORD, WRITERS, WRITTEN_AT, Kind, Role
from fusion_rt.tracing.reader import Event, Gap, RingFollower
from fusion_rt.tracing.recorder import Owner, Recorder

S = 10**9
CAPACITY = 1000


class Ring:
    """A ring whose records are a second apart, and who follows it."""

    def __init__(self, directory: Path) -> None:
        self.now = 0
        nbytes = HEADER_NBYTES + NAMES_NBYTES + CAPACITY * RECORD.size
        self.recorder = Recorder(str(directory / "a.ring"), Owner("job", Role.DAEMON, 0, 0, 1), nbytes, self.clock)
        self.follower = RingFollower(os.open(self.recorder.path, os.O_RDONLY), 0)

    def clock(self) -> int:
        self.now += 1
        return self.now * S

    def record(self, *names: str) -> None:
        for name in names:
            self.recorder.record(Kind.READY, name, peer=3)

    def begin(self) -> None:
        self.recorder.record(Kind.TIMELINE, "t.json", 1)

    def end(self) -> None:
        self.recorder.record(Kind.TIMELINE, "t.json", 0)

    def read(self) -> list[Event | Gap]:
        return [event for events in self.follower.read(self.follower.written) for event in events]

    def names(self) -> list[str | int]:
        """What is read: names, and numbers of records that are not."""
        return [event.records if isinstance(event, Gap) else event.name for event in self.read()]

    def close(self) -> None:
        self.follower.close()
        self.recorder.close()


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    made = Ring(tmp_path)
    yield made
    made.close()


def test_records_are_read_once_and_in_order(ring: Ring) -> None:
    ring.begin()
    expected = []
    for number in range(3 * CAPACITY // 10):  # three rounds
        some = [f"{number}.{index}" for index in range(10)]
        ring.record(*some)
        assert ring.names() == some
        expected += some
    assert ring.names() == []
    assert ring.follower.next == len(expected) + 1


def test_a_record_has_what_was_recorded(ring: Ring) -> None:
    ring.begin()
    number = ring.recorder.number("float32 [2, 3]")
    ring.recorder.record(Kind.MEMBER, "w", 24, number, 7, 2)
    ring.recorder.record(Kind.RECEIVED, "bucket 2", 24, 5, 7, peer=1)
    ring.recorder.record(Kind.CLOCK, value=-12, peer=1)  # is in no timeline
    assert ring.read() == [
        Event(2 * S, Kind.MEMBER, "w", number, 7, 2, 0xFFFF, "float32 [2, 3]"),
        Event(3 * S, Kind.RECEIVED, "bucket 2", 5, 7, 0, 1),
    ]


def test_what_is_before_and_after_the_timeline_is_not_read(ring: Ring) -> None:
    ring.record("before")
    ring.end()  # of the timeline before
    ring.begin()
    ring.record("x")
    assert ring.names() == ["x"]
    assert not ring.follower.over
    ring.record("y")
    ring.end()
    ring.record("after")
    ring.begin()
    assert ring.names() == ["y"]
    assert ring.follower.over
    assert ring.names() == []


def test_what_is_overwritten_before_it_is_read_is_counted(ring: Ring) -> None:
    ring.begin()
    ring.record("x")
    assert ring.names() == ["x"]
    ring.record(*(str(number) for number in range(3 * CAPACITY)))
    gap, *left = ring.names()
    assert isinstance(gap, int)
    assert left == [str(number) for number in range(gap, 3 * CAPACITY)]
    assert CAPACITY // 2 <= len(left) <= CAPACITY - WRITERS
    ring.record("z")
    assert ring.names() == ["z"]


def set_written(ring: Ring, written: int) -> None:
    with open(ring.recorder.path, "r+b") as file:
        file.seek(WRITTEN_AT)
        file.write(struct.pack("<Q", written))


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_record_that_a_thread_is_about_to_write_is_waited_for(ring: Ring, rounds: int) -> None:
    ring.begin()
    for number in range(rounds * CAPACITY):
        ring.record(str(number))
        ring.read()
    ring.record("a")
    set_written(ring, 3 + rounds * CAPACITY)  # as if another thread had written the record behind the next
    assert ring.names() == ["a"]
    assert ring.names() == []
    ring.record("b")
    assert ring.names() == ["b"]


def test_a_record_that_is_never_written_is_passed_over(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    ring.begin()
    ring.record("a")
    set_written(ring, 3)
    assert ring.names() == ["a"]
    now = reader.time.monotonic_ns()
    monkeypatch.setattr(reader.time, "monotonic_ns", lambda: now + 2 * S)
    assert ring.names() == []
    assert ring.follower.next == 3


def test_threads_that_record_side_by_side_are_read_whole(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "a.ring"), Owner("job", Role.DAEMON, 0, 0, 1), 4 << 20)
    follower = RingFollower(os.open(recorder.path, os.O_RDONLY), 0)
    recorder.record(Kind.TIMELINE, "t.json", 1)

    def work(which: int) -> None:
        for clock in range(5000):
            recorder.record(Kind.READY, str(which), 8, clock, peer=which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    found: list[Event | Gap] = []
    seen = 0
    while len(found) < 4 * 5000:
        alive = any(thread.is_alive() for thread in threads)
        until, seen = seen, follower.written
        found += [event for events in follower.read(until if alive else seen) for event in events]
    for thread in threads:
        thread.join()
    for which in range(4):
        clocks = [event.clock for event in found if isinstance(event, Event) and event.peer == which]
        assert clocks == list(range(5000))
    follower.close()
    recorder.close()
