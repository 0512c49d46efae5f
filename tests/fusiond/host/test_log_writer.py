"""The log's lines are written in order while somebody reads, and are dropped and counted while nobody does."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator

import pytest

from fusiond.host import log_writer
from fusiond.host.log_writer import LogWriter

LINES = 20_000
TEXT = "x" * 1000
PATIENCE_S = 60.0  # for a thread to get its turn


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def logger_of(writer: LogWriter) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(writer)
    return logger


def read_until(fd: int, last: bytes) -> list[str]:
    data = b""
    while last not in data:
        data += os.read(fd, 1 << 20)
    return data.decode().splitlines()


def test_a_reader_that_has_stopped_costs_lines_and_no_time_and_is_told_how_many(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    logger = logger_of(writer)
    for number in range(LINES):  # 20 MB, which would wait for ever
        logger.warning("%d %s", number, TEXT)
    lines = read_until(pipe[0], b"were dropped")
    told = lines.pop()
    numbers = [int(line.removesuffix(f" {TEXT}")) for line in lines]
    assert numbers == sorted(set(numbers))
    match = re.search(r"WARNING: (\d+) lines of this log were dropped", told)
    assert match is not None
    assert len(numbers) + int(match[1]) == LINES
    logger.warning("and on")
    assert read_until(pipe[0], b"and on\n") == ["and on"]


def test_flushing_waits_for_what_is_read_and_not_for_what_is_not(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "_FLUSH_S", PATIENCE_S)
    writer = LogWriter(pipe[1])
    logger_of(writer).warning("%s", "short")
    writer.flush()
    os.set_blocking(pipe[0], False)
    assert os.read(pipe[0], 100) == b"short\n"
    logger_of(writer).warning("%s", TEXT * 200)  # more than a pipe holds
    monkeypatch.setattr(log_writer, "_FLUSH_S", 0.01)
    writer.flush()
    os.set_blocking(pipe[0], True)
    read_until(pipe[0], b"x\n")


def test_lines_that_cannot_be_written_are_counted_when_one_can_be_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "_FLUSH_S", PATIENCE_S)
    full = os.open("/dev/full", os.O_WRONLY)
    reading, writing = os.pipe()
    writer = LogWriter(full)
    logger = logger_of(writer)
    logger.warning("lost")
    writer.flush()
    os.dup2(writing, full)
    logger.warning("kept")
    assert read_until(reading, b"dropped")[0] == "kept"
    for fd in (full, reading, writing):
        os.close(fd)
