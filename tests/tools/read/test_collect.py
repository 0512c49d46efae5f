"""Rings that are fetched while they are written have only records that were there all the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_rt.tracing.format import HEADER_NBYTES, NAMES_NBYTES, RECORD, WRITTEN_AT, Kind, Role
from fusion_rt.tracing.reader import TraceError, read
from fusion_trace.read import job as jobs
from fusion_trace.read.collect import daemon_of, fetch
from tests.tools.synthetic import MS, START, Job, Tape, simulate


def tape(records: int, capacity: int | None = None) -> bytes:
    made = Tape(Role.WORKER, 0, capacity=capacity)
    for number in range(records):
        made.add(Kind.GRADIENT, START + number * MS, f"w{number % 9}", clock=number)
    return made.encoded()


def of(*versions: bytes) -> Callable[[int, int], bytes]:
    """Reads a file that is the next version after each read, and stays the last."""
    left = list(versions)

    def read(offset: int, nbytes: int) -> bytes:
        data = left.pop(0) if len(left) > 1 else left[0]
        return data[offset : offset + nbytes]

    return read


def ring(data: bytes, directory: Path) -> list[int]:
    path = directory / "fetched"
    path.write_bytes(data)
    found = read(str(path))
    assert found.problems == ()
    assert found.written == found.overwritten + len(found.records)
    assert [found.names[number] for number in found.records["name"]] == [f"w{n % 9}" for n in found.records["clock"]]
    return [int(clock) for clock in found.records["clock"]]


@pytest.mark.parametrize("records", [0, 1, 100, 5000])
def test_a_ring_that_nobody_writes_comes_whole(tmp_path: Path, records: int) -> None:
    data, count = fetch(of(tape(records)), "x")
    assert count == records
    assert ring(data, tmp_path) == list(range(records))


def test_a_full_ring_comes_but_for_what_is_being_overwritten(tmp_path: Path) -> None:
    data, count = fetch(of(tape(5000, capacity=512)), "x")
    clocks = ring(data, tmp_path)
    assert clocks == list(range(5000 - count, 5000))
    assert 480 < count <= 512
    # Much less than the ring had, if it has little.
    assert len(data) <= HEADER_NBYTES + NAMES_NBYTES + (512 + 64) * RECORD.size


@pytest.mark.parametrize("more", [1, 100, 400, 511, 512, 3000])
def test_of_a_ring_that_is_written_meanwhile_the_records_that_stayed(tmp_path: Path, more: int) -> None:
    """The header of 1000, then all the rest with `more` records."""
    data, count = fetch(of(tape(1000, capacity=512), tape(1000 + more, capacity=512)), "x")
    clocks = ring(data, tmp_path)
    assert clocks == list(range(1000 - count, 1000))
    assert count == max(0, 512 - more - 16)


def test_what_is_no_ring_or_ends_early_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is not a trace of fusion_rt"):
        fetch(of(b"no ring at all" * 1000), "x")
    with pytest.raises(TraceError, match="is empty"):
        fetch(of(b""), "x")
    whole = tape(100)
    _, count = fetch(of(whole[: HEADER_NBYTES + NAMES_NBYTES + 50 * RECORD.size + 7]), "x")
    assert count == 50


def test_a_header_that_claims_more_than_any_ring_has_costs_nothing() -> None:
    data = bytearray(tape(10))
    for at in (16, WRITTEN_AT):
        data[at : at + 8] = (1 << 50).to_bytes(8, "little")
    with pytest.raises(TraceError, match=r"at most .* are fetched"):
        fetch(of(bytes(data)), "x")


def test_rings_that_were_fetched_twice_are_one(tmp_path: Path) -> None:
    for copy in ("one", "two"):
        (tmp_path / copy).mkdir()
        simulate(Job(steps=2)).write(tmp_path / copy)
    once, twice = (jobs.load([str(path)], "/nowhere") for path in (tmp_path / "one", tmp_path))
    assert [len(process.records) for process in twice.processes] == [len(process.records) for process in once.processes]


def test_which_daemon_is_asked(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no daemon of job 'x' of this user runs on this host"):
        daemon_of(str(tmp_path), "x")
    for name in ("one.0", "one.1", "two.0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sock").touch()
    assert daemon_of(str(tmp_path), "two").node == 0
    with pytest.raises(TraceError, match=r"several jobs run on this host \(one, two\)"):
        daemon_of(str(tmp_path), "")
