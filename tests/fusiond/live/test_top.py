"""What `fusiond top` draws, and what it finds out from real daemons."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fusion_rt import wire
from fusiond.app.cli import app
from fusiond.live.rates import compare
from fusiond.live.top import page
from tests.fusiond.live.looks import document, link, rank, told
from tests.fusiond.processes import Daemons, kill


def fusiond(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def drawn(*documents: dict[str, Any]) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(page([compare(documents[0] if len(documents) > 1 else None, documents[-1])]))
    return console.export_text()


def test_the_page_names_stragglers_and_silent_nodes() -> None:
    before = document(0.0, {0: told((rank(0), rank(1)), (link(1),))})
    after = document(1.0, {0: told((rank(0, 8, 8, 0.0), rank(1, 8, 8, 0.4)), (link(1, 5 << 20, lost=True),))})
    text = drawn(before, after)
    assert "job mine: 2 nodes, 2 ranks, 8.00 steps/s" in text
    assert "The others wait for rank 1." in text
    assert "silent" in text
    assert "node 0 to 1" in text
    assert "5.0 MiB" in text
    assert "lost" in text


def test_the_first_page_has_no_rates_and_is_whole() -> None:
    text = drawn(document(0.0, {0: told((rank(0, 8), rank(1, 8)), (link(1),)), 1: told((rank(2, 8),), (link(0),))}))
    assert "steps/s" not in text.splitlines()[0]
    assert text.count("running") == 2


def test_without_a_daemon_it_says_so(runtime_dir: object) -> None:
    result = fusiond("top")
    assert result.exit_code != 0
    assert "no daemon of this user answers on this host" in str(result.exception)


@pytest.mark.multiprocess
def test_one_daemon_tells_of_a_job_on_several_nodes(daemons: Callable[..., Daemons]) -> None:
    job = daemons(2, 1).start()
    job.join()
    value = wire.Signature("allreduce", "float32", (3,), op="sum")

    def work(client: Any) -> None:
        data = np.ones(3, np.float32).tobytes()
        for _ in range(5):
            client.wait(client.submit("x", value, inline=data))

    assert set(job.on_clients(work).values()) == {None}
    result = fusiond("top", "--json", "--interval", "0.2")
    assert result.exit_code == 0, result.output
    (rates,) = json.loads(result.stdout)
    assert [(node["host"], node["state"]) for node in rates["nodes"]] == [("host0", "running"), ("host1", "running")]
    assert [each["rank"] for each in rates["ranks"]] == [0, 1, 2]
    assert {(each["source"], each["target"]) for each in rates["links"]} == {(0, 1), (1, 0)}
    assert all(node["cpu"] is not None and node["memory"] > 0 for node in rates["nodes"])

    kill(job.processes[1])
    result = fusiond("top", "--once", "--interval", "0.2")
    assert result.exit_code == 0, result.output
    assert "host1" in result.stdout
