"""What `fusion-trace hang` tells of a job that is gone: from its records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusion_rt.core.errors import FusionError
from fusion_rt.tracing.format import Flush, Kind, Role
from fusion_trace.cli import app
from tests.tools.synthetic import START, Tape

MS = 1_000_000


def job(directory: Path, hanging: bool = True) -> None:
    """Three ranks on two nodes take a step; in the next one rank 2 is killed in its backward pass."""
    hosts = "a", "a", "b"
    workers = [Tape(Role.WORKER, rank, rank // 2, 2, host, "gone", 100 + rank) for rank, host in enumerate(hosts)]
    daemons = [Tape(Role.DAEMON, node, node, 2, host, "gone", 200 + node) for node, host in enumerate("ab")]
    for step in range(2):
        begin = START + 100 * MS * step
        for tape in workers:
            tape.add(Kind.FORWARD_BEGIN, begin, clock=step)
            tape.add(Kind.FORWARD_END, begin + 10 * MS, clock=step)
            tape.add(Kind.BACKWARD_BEGIN, begin + 11 * MS, clock=step)
            if step and hanging and tape.rank == 2:
                continue
            tape.add(Kind.BACKWARD_END, begin + 30 * MS, clock=step)
            tape.add(Kind.STEP_BEGIN, begin + 31 * MS, clock=step)
            about = {"name": "bucket 0", "clock": step, "plan": 1}
            tape.add(Kind.SUBMITTED, begin + 32 * MS, value=64, extra=Flush.FULL, **about)  # type: ignore[arg-type]
            tape.add(Kind.WAIT_BEGIN, begin + 33 * MS, **about)  # type: ignore[arg-type]
            daemons[tape.node].add(Kind.READY, begin + 33 * MS, peer=tape.rank, **about)  # type: ignore[arg-type]
            if not (step and hanging):
                tape.add(Kind.DONE, begin + 40 * MS, **about)  # type: ignore[arg-type]
                tape.add(Kind.WAIT_END, begin + 40 * MS, **about)  # type: ignore[arg-type]
                tape.add(Kind.STEP_END, begin + 41 * MS, clock=step)
    daemons[0].add(Kind.STALL, START + 2100 * MS, "bucket 0", value=2)
    for tape in (*workers, *daemons):
        tape.write(directory)


def hang(directory: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["hang", "--trace", str(directory), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_who_waited_for_whom_and_what_each_rank_did_last(tmp_path: Path) -> None:
    job(tmp_path)
    shown = hang(tmp_path)
    assert "bucket 0 (clock 1) had waited 2.0 s\n  submitted by ranks 0-1\n  waited for rank 2\n" in shown
    assert "rank 0 (host a, pid 100): step 1, in step(), waiting for bucket 0; last heard of 1.97 s" in shown
    assert "rank 2 (host b, pid 102): step 1, in the backward pass; last heard of 1.99 s before the end" in shown


def test_the_same_for_programs(tmp_path: Path) -> None:
    job(tmp_path)
    (told,) = json.loads(hang(tmp_path, "--json"))
    (waiting,) = told["waiting"]
    assert (waiting["submitted"], waiting["missing"], told["from"]) == ([0, 1], [2], "records")


def test_a_job_that_ended_in_good_order_left_nothing_waiting(tmp_path: Path) -> None:
    job(tmp_path, hanging=False)
    shown = hang(tmp_path)
    assert "nothing waited" in shown
    assert "rank 1 (host a, pid 101): step 2, outside of forward, backward and step()" in shown


def test_without_records_either_both_are_said(tmp_path: Path, runtime_dir: Path) -> None:
    with pytest.raises(FusionError, match=r"no daemon of job .nobody. of this user runs on this host .*, and "):
        CliRunner().invoke(app, ["hang", "--job", "nobody"], catch_exceptions=False)
