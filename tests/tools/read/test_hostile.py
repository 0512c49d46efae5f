"""Rings that somebody else has written: what no job has is refused or left out, and nothing steers a terminal."""

from __future__ import annotations

import csv
import tracemalloc
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusion_rt.tracing.format import HEADER, Kind, Role
from fusion_rt.tracing.reader import TraceError, read
from fusion_trace.cli import app
from tests.tools.synthetic import MS, START, Job, Tape, simulate

HEADER_FIELDS = {  # their places and bytes
    "capacity": (3, 8), "created": (4, 8), "created_wall": (5, 8), "rank": (7, 4), "node": (8, 4), "nodes": (9, 4),
    "written": (13, 8),
}  # fmt: skip
COMMANDS = ("summary", "overlap", "stragglers", "buckets", "critical-path", "hang --trace", "whatif --rate 1gbit")


def run(command: str, *arguments: str) -> str:
    done = CliRunner().invoke(app, [*command.split(), *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit | TraceError), done.exception
    return done.output


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_header_that_no_job_has_is_refused_and_costs_nothing(tmp_path: Path, field: str) -> None:
    path = Path(Tape(Role.DAEMON, 0).write(tmp_path))
    data = bytearray(path.read_bytes())
    fields = list(HEADER.unpack_from(data))
    place, nbytes = HEADER_FIELDS[field]
    fields[place] = 256**nbytes - 1
    HEADER.pack_into(data, 0, *fields)
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(TraceError, match="has a damaged header"):
        read(str(path))
    run("summary", str(path))
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("command", COMMANDS)
def test_absurd_records_are_left_out(tmp_path: Path, command: str) -> None:
    truth = simulate(Job(nodes=1, ranks_per_node=2, steps=4))
    truth.write(tmp_path)
    plain = run(command, str(tmp_path))
    for tape in truth.tapes.values():
        for kind in Kind:
            tape.rows.append((2**64 - 1 - START, 0, 1, "bucket 0", 1, 0, kind, 0))  # a time
            tape.add(kind, START + MS, "bucket 0", plan=1, clock=2**64 - 1)
            tape.add(kind, START + MS, "bucket 0", plan=1, value=2**63 - 1)
    truth.write(tmp_path)
    told = run(command, str(tmp_path))
    assert "records are damaged, and were left out" in told
    assert len(told) < len(plain) + 5000


@pytest.mark.parametrize("command", [*COMMANDS, "list"])
def test_no_text_of_a_file_steers_the_terminal(tmp_path: Path, command: str) -> None:
    evil = "x\x1b]0;y\x07\x1b[2J\x9b31m\u202e\r"
    truth = simulate(Job(nodes=1, ranks_per_node=2, steps=4))
    for tape in truth.tapes.values():
        tape.host = tape.command = evil
        tape.rows = [(*row[:3], row[3] and row[3] + evil, *row[4:]) for row in tape.rows]
    truth.write(tmp_path)
    told = run(command, str(tmp_path))
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(told)


def test_a_job_is_called_as_jobs_are(tmp_path: Path) -> None:
    """Its name is that of the files that `merge` and `convert` write."""
    for job in ("../../x", "a/b", "", "\x1b[2J"):
        with pytest.raises(TraceError, match="a job is not called"):
            read(Tape(Role.WORKER, 0, job=job).write(tmp_path))


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    tape = Tape(Role.WORKER, 0, host="=cmd|' /C calc'!A0")
    for name in ("=1+1", "+x", "-x", "@x", "w"):
        tape.add(Kind.GRADIENT, START + MS, name)
    output = tmp_path / "all.csv"
    run("convert", tape.write(tmp_path), "-o", str(output))
    cells = [cell for row in csv.reader(output.read_text().splitlines()) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
    assert {"'=1+1", "'+x", "'-x", "'@x", "w"} <= set(cells)
