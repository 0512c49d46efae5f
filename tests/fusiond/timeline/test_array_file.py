"""A file that is a JSON array at every moment."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from fusiond.timeline.writer_process import ArrayFile


def test_after_every_append_the_file_is_an_array(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    file = ArrayFile(str(path))
    assert json.loads(path.read_bytes()) == []
    expected: list[int] = []
    for size in (1, 0, 3, 2000):
        new = list(range(len(expected), len(expected) + size))
        file.append([b"%d" % number for number in new])
        expected += new
        assert json.loads(path.read_bytes()) == expected
        assert file.nbytes == path.stat().st_size
        assert file.elements == len(expected)
    file.close()


def test_each_append_is_one_write_that_begins_at_the_bracket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[tuple[bytes, int]] = []
    pwrite = os.pwrite

    def noted(fd: int, data: bytes, at: int) -> int:
        writes.append((data, at))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", noted)
    file = ArrayFile(str(tmp_path / "a.json"))
    file.append([b"1"])
    file.append([b"2", b"3"])
    file.close()
    assert writes == [(b"[\n]", 0), (b"1]", 2), (b",\n2,\n3]", 3)]


@pytest.mark.parametrize("room", [0, 1, 5, 9])
def test_what_does_not_fit_on_the_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path = tmp_path / "a.json"
    file = ArrayFile(str(path))
    file.append([b"1"])
    pwrite = os.pwrite
    size = file.nbytes + room

    def on_a_full_disk(fd: int, data: bytes, at: int) -> int:
        if at + len(data) <= size:
            return pwrite(fd, data, at)
        if at >= size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data[: size - at], at)

    monkeypatch.setattr(os, "pwrite", on_a_full_disk)
    with pytest.raises(OSError, match="No space left"):
        file.append([b'"a long element"'])
    assert json.loads(path.read_bytes()) == [1]
    monkeypatch.setattr(os, "pwrite", pwrite)
    file.append([b"2"])
    assert json.loads(path.read_bytes()) == [1, 2]
    file.close()


def test_what_was_there_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[0]")
    file = ArrayFile(str(path))
    assert (tmp_path / "a.json.1").read_text() == "[0]"
    file.append([b"1"])
    file.rotate()
    assert json.loads((tmp_path / "a.json.1").read_bytes()) == [1]
    assert json.loads(path.read_bytes()) == []
    file.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "a.json.1"]


def test_an_empty_file_and_a_device_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.touch()
    ArrayFile(str(path)).close()
    ArrayFile("/dev/null").close()
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ArrayFile(str(tmp_path / "no" / "a.json"))
