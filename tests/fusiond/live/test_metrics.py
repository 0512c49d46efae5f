"""Metrics as Prometheus reads them, of a daemon that is a loop on a thread."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusiond.host.loop import EventLoop
from fusiond.live.metrics import Metrics, families
from tests.fusiond.live.looks import TOPOLOGY, link, rank, told

FIGURES = told((rank(0, 3, 6, 0.25), rank(1, 4, 8, 0.5)), (link(1, 900, lost=True),), operations=12, bytes=480)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.call_from_thread(loop.stop)
    thread.join()
    loop.close()


class Daemon:
    """A daemon with figures; `asked_on`: the threads on which they were asked for."""

    def __init__(self) -> None:
        self.asked_on: list[threading.Thread] = []

    def figures(self, asked: wire.FiguresRequest) -> wire.Figures:
        self.asked_on.append(threading.current_thread())
        return FIGURES


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text: str = answer.read().decode()
    return text


def test_prometheus_reads_all_figures(loop: EventLoop) -> None:
    daemon = Daemon()
    metrics = Metrics(loop, 0, "mine", TOPOLOGY, 0, daemon)
    try:
        text = get(metrics.address)
    finally:
        metrics.close()
    found = {
        (sample.name, sample.labels.get("rank") or sample.labels.get("peer_host") or sample.labels.get("state", "")):
            sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip
    assert found[("fusion_operations_total", "")] == 12
    assert found[("fusion_reduced_bytes_total", "")] == 480
    assert found[("fusion_steps_total", "1")] == 4
    assert found[("fusion_late_seconds_total", "0")] == 0.25
    assert found[("fusion_sent_bytes_total", "b")] == 900
    assert found[("fusion_peer_lost", "b")] == 1
    assert [found[("fusion_state", name)] for name in ("starting", "running", "failed")] == [0, 1, 0]
    assert 'job_id="mine"' in text
    assert daemon.asked_on[0] is not threading.main_thread()
    assert daemon.asked_on[0].name != "web"  # the loop's thread owns the figures, and nobody else reads them


def test_the_dashboard_for_grafana_and_the_docs_name_metrics_that_there_are() -> None:
    served = {
        sample.name for family in families("mine", TOPOLOGY, 0, FIGURES) for sample in family.samples
    }  # fmt: skip
    docs = Path(__file__).parents[3] / "docs"
    dashboard = json.loads((docs / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {name for query in queries for name in re.findall(r"fusion_\w+", query)} <= served
    told = set(re.findall(r"`(fusion_\w+)`", (docs / "live.md").read_text()))
    assert told == served


def test_a_port_that_is_taken_is_said(loop: EventLoop) -> None:
    metrics = Metrics(loop, 0, "mine", TOPOLOGY, 0, Daemon())
    port = int(metrics.url.rpartition(":")[2].partition("/")[0])
    try:
        with pytest.raises(FusionError, match=rf"port {port} of 127\.0\.0\.1 is not available: Address already in use"):
            Metrics(loop, port, "mine", TOPOLOGY, 0, Daemon())
    finally:
        metrics.close()


def test_a_daemon_that_ends_does_not_wait_for_whoever_asks() -> None:
    loop = EventLoop()  # which does not run
    metrics = Metrics(loop, 0, "mine", TOPOLOGY, 0, Daemon())
    answers: list[int] = []
    asked = threading.Event()
    call = loop.call_from_thread

    def called(callback: object) -> None:
        call(callback)  # type: ignore[arg-type]
        asked.set()

    loop.call_from_thread = called  # type: ignore[method-assign]

    def ask() -> None:
        try:
            get(metrics.address)
        except urllib.error.HTTPError as error:
            answers.append(error.code)
            error.close()

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(10)
    metrics.close()
    thread.join()
    loop.close()
    assert answers == [503]
