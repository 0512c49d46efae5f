"""The page of `fusiond dashboard`, in a browser without a screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from fusion_rt.core.errors import FusionError
from fusiond.live.client import Lookout
from fusiond.live.dashboard import Latest, serve
from fusiond.live.rates import Rates, compare
from tests.fusiond.live.looks import document, link, rank, told


def rates() -> list[Rates]:
    hostile = "<img src=x onerror=alert(1)>"
    before = document(0.0, {0: told((rank(0), rank(1)), (link(1),)), 1: told((rank(2),), (link(0),))}, hostile)
    after = document(
        1.0,
        {0: told((rank(0, 10, 10, 0.0), rank(1, 10, 10, 0.5)), (link(1, 3 << 20),), operations=20),
         1: told((rank(2, 10, 10, 0.01),), (link(0, 1 << 20, lost=True),), operations=20)},
        hostile,
    )  # fmt: skip
    return [compare(before, after)]


def test_a_look_is_shared_by_all_pages_and_taken_only_when_one_asks() -> None:
    now = [0.0]
    looks: list[float] = []

    def look() -> list[Rates]:
        looks.append(now[0])
        return rates()

    latest = Latest(look, 2.0, lambda: now[0])
    assert latest.take()["serial"] == latest.take()["serial"] == 1
    now[0] = 2.0
    assert latest.take()["serial"] == 2
    assert looks == [0.0, 2.0]


def test_what_cannot_be_seen_is_a_sentence() -> None:
    def look() -> list[Rates]:
        raise FusionError("no daemon of this user answers on this host")

    taken = Latest(look, 2.0).take()
    assert (taken["jobs"], taken["trouble"]) == ([], "no daemon of this user answers on this host")


@pytest.mark.multiprocess
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the command chromium (Debian's package)")
def test_the_page_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lookout = Lookout("/nowhere")
    monkeypatch.setattr(lookout, "look", rates)
    server = serve(lookout, 0, 2.0)
    try:
        with urllib.request.urlopen(server.address("/rates.json"), timeout=10) as answer:
            assert json.load(answer)["jobs"][0]["stragglers"] == [1]
        done = subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom",
             server.address("/")],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    finally:
        server.close()
    told = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "source: chrome://" not in line]
    assert told == []  # what pages of the browser's own have to say, on a busy machine, is not ours
    text = re.sub(r"<[^>]*>", " ", done.stdout.partition("<body>")[2].partition("<script>")[0])
    assert "The others wait for rank 1." in text
    assert "2 nodes, 3 ranks, 10.00 steps/s" in text
    assert "3.0 MiB" in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in done.stdout  # a name is text, whatever is in it
    assert done.stdout.count('class="late"') == 2  # the sentence, and the rank's row
    assert 'class="bad"' in done.stdout  # the link that is lost
    cells = re.findall(r"<td[^>]*>(?:<[^>]*>)*([^<]*)", done.stdout.partition("reconnections")[2])
    assert cells[:2] == ["a", "b"]  # hosts have names here, too
    assert "saved" not in text  # of columns without a figure there is none
    assert "staleness" not in text
