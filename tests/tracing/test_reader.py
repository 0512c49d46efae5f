"""Rings are read as far as they can be: whole ones, full ones, cut off ones, and those that are written meanwhile."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from fusion_rt.tracing import reader
from fusion_rt.tracing.format import HEADER, HEADER_NBYTES, NAMES_NBYTES, RECORD, WRITTEN_AT, Kind, Role
from fusion_rt.tracing.reader import TraceError, read
from tests.tools.synthetic import MS, START, Tape


def tape(records: int = 100, capacity: int | None = None) -> Tape:
    tape = Tape(Role.WORKER, 3, node=1, nodes=2, host="höst", job="job-1", pid=42, capacity=capacity)
    for number in range(records):
        tape.add(Kind.GRADIENT, START + number * MS, f"w{number % 7}", clock=number, value=3 * number, extra=9, peer=8)
    return tape


def test_a_whole_ring(tmp_path: Path) -> None:
    ring = read(tape().write(tmp_path))
    assert (ring.role, ring.rank, ring.node, ring.nodes, ring.pid) == (Role.WORKER, 3, 1, 2, 42)
    assert (ring.host, ring.job, ring.created) == ("höst", "job-1", START)
    assert ring.names == ("", *(f"w{number}" for number in range(7)))
    assert (ring.written, ring.overwritten, ring.problems) == (100, 0, ())
    assert ring.records["clock"].tolist() == list(range(100))
    assert ring.records["value"].tolist() == [3 * number for number in range(100)]
    assert [ring.names[number] for number in ring.records["name"]] == [f"w{number % 7}" for number in range(100)]
    assert set(ring.records["extra"]) == {9}
    assert set(ring.records["peer"]) == {8}


def test_a_full_ring_has_its_newest_records_in_order_and_counts_the_others(tmp_path: Path) -> None:
    ring = read(tape(records=1000, capacity=128).write(tmp_path))
    newest = ring.records["clock"].tolist()
    assert newest == list(range(1000 - len(newest), 1000))
    assert 100 < len(newest) <= 128  # of the oldest, one or another may be written over just now
    assert ring.overwritten == 1000 - len(newest)
    assert not ring.problems


def test_records_are_in_order_of_time_also_if_threads_wrote_them_in_another(tmp_path: Path) -> None:
    mixed = tape()
    path = Path(mixed.write(tmp_path))
    data = bytearray(path.read_bytes())
    first = HEADER_NBYTES + NAMES_NBYTES
    a, b = (slice(first + place * RECORD.size, first + (place + 1) * RECORD.size) for place in (3, 4))
    data[a], data[b] = data[b], data[a]
    path.write_bytes(data)
    assert read(str(path)).records["clock"].tolist() == list(range(100))


@pytest.mark.parametrize("kept", [0, 5, 60, HEADER.size - 1])
def test_a_file_that_ends_in_its_header_is_an_error(tmp_path: Path, kept: int) -> None:
    path = Path(tape().write(tmp_path))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(TraceError, match=r"it is empty|is not a trace|ends within its header"):
        read(str(path))


def test_what_is_left_of_a_file_that_was_cut_off_is_read(tmp_path: Path) -> None:
    path = Path(tape().write(tmp_path))
    path.write_bytes(path.read_bytes()[: HEADER_NBYTES + NAMES_NBYTES + 40 * RECORD.size + 17])
    ring = read(str(path))
    assert ring.records["clock"].tolist() == list(range(40))
    assert ring.problems == (f"{path} is cut off: 60 of 100 records are not there",)
    path.write_bytes(path.read_bytes()[: HEADER_NBYTES + 8])
    ring = read(str(path))
    assert not len(ring.records)
    assert ring.names == ("", "w0", "w1")
    assert len(ring.problems) == 2


def test_a_record_that_was_being_written_when_its_writer_was_killed_is_left_out(tmp_path: Path) -> None:
    path = Path(tape().write(tmp_path))
    data = bytearray(path.read_bytes())
    data[WRITTEN_AT : WRITTEN_AT + 8] = struct.pack("<Q", 101)  # its place has zeros
    path.write_bytes(data)
    ring = read(str(path))
    assert len(ring.records) == 100
    assert ring.problems == (f"{path}: 1 records are damaged, and were left out",)


def test_other_files_and_other_versions_are_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read(str(path))
    path.write_bytes(b"#!/bin/sh\n")
    with pytest.raises(TraceError, match="is not a trace of fusion_rt"):
        read(str(path))
    data = bytearray(tape().encoded())
    data[8] = 7
    path.write_bytes(data)
    with pytest.raises(TraceError, match="is of version 7"):
        read(str(path))


def test_no_bytes_make_it_fail_otherwise_or_take_much_memory(tmp_path: Path) -> None:
    """A header may claim anything: what is read is bounded by the file."""
    generator = random.Random(8)
    whole = tape().encoded()
    path = tmp_path / "fuzzed"
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(generator.randrange(1, 6)):
            area = generator.choice([HEADER.size + 20, HEADER_NBYTES + 60, len(data)])
            data[generator.randrange(8, area)] = generator.randrange(256)
        path.write_bytes(data[: generator.randrange(len(data))] if generator.random() < 0.3 else data)
        try:
            ring = read(str(path))
        except TraceError:
            continue
        assert len(ring.records) <= 164
        assert all(name < len(ring.names) for name in ring.records["name"])


def test_a_ring_that_is_written_while_it_is_read_has_no_record_twice_and_none_of_two_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reading of the records and the second look at the header, 50 more are written."""
    path = Path(tape(records=1000, capacity=128).write(tmp_path))
    later = tape(records=1050, capacity=128).encoded()
    headers = 0
    parse = reader.header_of

    def header(data: bytes, where: str) -> reader.Header:
        nonlocal headers
        headers += 1
        return parse(later[:HEADER_NBYTES] if headers == 2 else data, where)

    monkeypatch.setattr(reader, "header_of", header)
    ring = read(str(path))
    assert ring.records["clock"].tolist() == list(range(1000 - len(ring.records), 1000))
    assert 1000 - len(ring.records) >= 1050 - 128
