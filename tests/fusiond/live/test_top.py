"""What `fusiond top` draws, and what it finds out from real daemons."""

from __future__ import annotations

import json
import os
import pty
import sys
import termios
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusiond.app.cli import app
from fusiond.live import figures
from fusiond.live.rates import Rates, compare
from fusiond.live.top import History, page, watch
from tests.fusiond.live.looks import document, link, rank, told
from tests.fusiond.processes import Daemons, kill


def fusiond(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def drawn(*documents: dict[str, Any], width: int = 120, lines: int = 64, history: History | None = None) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        rates = [compare(documents[0] if len(documents) > 1 else None, documents[-1])]
        console.print(page(rates, lines, history, 2.0))
    return console.export_text()


def test_the_page_names_stragglers_and_silent_nodes() -> None:
    before = document(0.0, {0: told((rank(0), rank(1)), (link(1),))})
    after = document(1.0, {0: told((rank(0, 8, 8, 0.0), rank(1, 8, 8, 0.4)), (link(1, 5 << 20, lost=True),))})
    text = drawn(before, after)
    assert "job mine: 2 nodes, 2 ranks, 8.00 steps/s" in text
    assert "The others wait for rank 1." in text
    assert "silent" in text
    assert "a to b" in text
    assert "5.0 MiB" in text
    assert "lost" in text


def test_nodes_of_one_host_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fusiond.live.looks.TOPOLOGY", Topology(("a", "a"), ((0, 1), (2,))))
    text = drawn(document(0.0, {0: told((rank(0, 8),), (link(1),)), 1: told((rank(2, 8),), (link(0),))}))
    assert "a (node 0) to a (node 1)" in text


def test_the_first_page_has_no_rates_and_is_whole() -> None:
    text = drawn(document(0.0, {0: told((rank(0, 8), rank(1, 8)), (link(1),)), 1: told((rank(2, 8),), (link(0),))}))
    assert "steps/s" not in text.splitlines()[0]
    assert text.count("running") == 2


def large(now: float, late: float) -> dict[str, Any]:
    """Figures of 16 hosts with 8 ranks each, all of which send to the next one; rank 77 is late."""
    topology = Topology(
        tuple(f"gpu-node-{node:03}.cluster" for node in range(16)),
        tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(16)),
    )
    steps = round(8 * now)
    told_ = {
        node: told(
            tuple(rank(8 * node + n, steps, steps, late if 8 * node + n == 77 else 0.0) for n in range(8)),
            (link((node + 1) % 16, round(now * (5 << 20))),),
            operations=round(100 * now), bytes=round(now * 1e9), cpu_seconds=now / 3, memory_bytes=800 << 20,
            dense_bytes=10**10, packed_bytes=10**9,
        )
        for node in range(16)
        if node != 11
    }  # fmt: skip
    return figures.document("a-long-job-id", topology, told_, now)


def test_a_large_job_fits_a_screen_of_80_columns_and_24_lines_with_what_needs_a_look() -> None:
    history = History()
    for now in range(1, 50):
        history.note([compare(large(now - 1.0, 0.0), large(now, 0.0))])
    text = drawn(large(0.0, 0.0), large(1.0, 0.4), width=80, lines=23, history=history)
    lines = text.splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    assert "8.00 to 8.00 steps/s in 80 s" in lines[1]
    assert "The others wait for rank 77." in text
    assert any(line.startswith("gpu-node-011") and "silent" in line for line in lines)  # the first of hosts
    assert any(line.startswith("rank 77") and "straggler" in line for line in lines)
    assert "more ranks" in text
    assert "more hosts" in text
    assert "more links" in text
    for head in ("ops/s", "reduced/s", "CPU", "memory", "pending", "saved", "late (ms)", "not acknowledged"):
        assert head in text  # none is cut


def test_the_history_of_steps_a_second_is_drawn_and_ends_with_its_job() -> None:
    history = History()
    assert history.line("mine", 2.0) == ""
    looks = [document(float(now), {0: told((rank(0, steps), rank(1, steps)), ())}) for now, steps in
             enumerate((0, 8, 16, 20, 24))]  # fmt: skip
    for before, after in pairwise(looks):
        history.note([compare(before, after)])
    assert history.line("mine", 2.0) == "██▅▅ 4.00 to 8.00 steps/s in 8 s"
    history.note([])
    assert history.line("mine", 2.0) == ""


@pytest.mark.parametrize(("keys", "looks"), [(b"q", 1), (b"xq", 2)])
def test_q_ends_it_and_the_terminal_is_as_before(keys: bytes, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    taken = []

    class Looking:
        def look(self) -> list[Rates]:
            taken.append(0)
            return [compare(None, document(0.0, {0: told((rank(0, 8),), ())}))]

    try:
        with open(terminal, encoding="utf-8", closefd=False) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            os.write(master, keys)
            watch(Looking(), 60.0)  # type: ignore[arg-type]
        assert len(taken) == looks
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(master)
        os.close(terminal)


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
