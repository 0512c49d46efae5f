"""The page of `fusion-trace hang`, from documents as daemons answer them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusion_rt.core.errors import FusionError
from fusion_trace.cli import app
from fusion_trace.report.hang_page import MOST_RANKS, MOST_WAITING, lines

FRAME = {"file": "/train.py", "line": 12, "function": "slow", "source": "time.sleep(300)", "inner": 0}
RANK = {
    "rank": 2, "host": "b", "node": 1, "pid": 4711, "state": "sleeping (S)", "why_not": "",
    "stack": {"frames": [FRAME], "more": 0},
}  # fmt: skip
STALL = {
    "kind": "operation", "what": "tensor 'loss' (allreduce sum float32 [2])", "seconds": 61.2, "submitted": [0, 1],
    "missing": [2], "stragglers": [], "idle": [], "notes": [],
}  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    return {
        "job": "mine", "answered": True, "state": "running", "failure": "", "hosts": ["a", "b"],
        "ranks_of_nodes": [[0, 1], [2]], "waiting": [], "more": 0, "ranks": [],
        "daemons": [{"node": 0, "host": "a", "pid": 7, "answered": True, "state": "sleeping (S)"}],
        **changes,
    }  # fmt: skip


def page(**changes: Any) -> str:
    return "\n".join(line for line, _ in lines(document(**changes)))


def test_an_operation_its_missing_rank_and_where_that_is() -> None:
    assert page(waiting=[STALL], ranks=[RANK]) == (
        "job mine: running, 3 ranks on 2 nodes\n"
        "\n"
        "tensor 'loss' (allreduce sum float32 [2]) has waited 61 s\n"
        "  submitted by ranks 0-1 (host a)\n"
        "  waits for rank 2 (host b)\n"
        "\n"
        "where they are\n"
        "  rank 2 (host b, pid 4711, sleeping (S)), most recent call first:\n"
        "      /train.py:12 in slow: time.sleep(300)\n"
        "\n"
        "daemons\n"
        "  host a (pid 7, sleeping (S)) answers"
    )


def test_nothing_waits_and_where_everybody_is() -> None:
    assert "nothing waits: what ranks have submitted is done" in page()
    assert "where all ranks are\n  rank 2" in page(ranks=[RANK])


def test_a_job_that_has_failed_says_why_and_not_that_nothing_waits() -> None:
    shown = page(failure="rank 1 died")
    assert "it has failed: rank 1 died" in shown
    assert "nothing waits" not in shown


def test_a_link_and_a_node_are_named() -> None:
    straggler = {"text": "4 chunks from host a (node 0) to host b (node 1) are under way"}
    told = {**STALL, "submitted": [0, 1, 2], "missing": []}
    assert "\n  4 chunks from host a (node 0)" in page(waiting=[{**told, "stragglers": [straggler]}])
    assert "host b has not begun to exchange data" in page(waiting=[{**told, "idle": [1]}])
    assert "every rank has submitted it: data is on its way" in page(waiting=[told])
    assert "\n  it is over on host b" in page(waiting=[{**told, "notes": ["it is over on host b (node 1)"]}])


def test_a_daemon_that_does_not_answer_is_shown_from_outside() -> None:
    silent = {"node": 1, "host": "b", "pid": 8, "answered": False, "why_not": "it does not answer within 10 s"}
    stuck = page(daemons=[{**silent, "state": "running (R)", "stack": RANK["stack"]}])
    assert "host b (pid 8, running (R)): it does not answer within 10 s" in stuck
    assert "its main thread, most recent call first:\n        /train.py:12 in slow" in stuck
    stopped = page(daemons=[{**silent, "state": "stopped (T)"}])
    assert "it is stopped; `kill -CONT 8` lets it go on" in stopped
    elsewhere = page(daemons=[{"node": 1, "host": "b", "pid": None, "answered": False}])
    assert "host b: it did not answer the others in time" in elsewhere


def test_a_daemon_that_answers_says_where_its_main_thread_is() -> None:
    daemon = {"node": 0, "host": "a", "pid": 7, "answered": True, "state": "sleeping (S)", "stack": RANK["stack"]}
    assert "answers, its main thread in slow (/train.py:12)" in page(daemons=[daemon])


def test_without_any_daemon_the_page_is_about_the_daemons() -> None:
    shown = "\n".join(line for line, _ in lines({"job": "mine", "answered": False, "daemons": []}))
    assert shown.startswith("job mine: none of its daemons on this host answers")


def test_of_much_some_is_shown() -> None:
    shown = page(waiting=[STALL] * (MOST_WAITING + 5), more=3, ranks=[RANK] * (MOST_RANKS + 2))
    assert shown.count("has waited") == MOST_WAITING
    assert "\nand 8 more\n" in shown
    assert "and 2 more ranks (--json has them all)" in shown


def test_no_daemon_is_an_error(runtime_dir: Path) -> None:
    for arguments in ([], ["--json"], ["--job", "mine"]):
        with pytest.raises(FusionError, match="of this user runs on this host"):
            CliRunner().invoke(app, ["hang", *arguments], catch_exceptions=False)
