"""The benchmark of the busiest thread computes rates and tables from its measurements."""

from __future__ import annotations

import os
import threading
import time

import pytest

from benchmarks import cores

FOUND = {
    "4": {"seconds": {"arena": [2e-4, 4e-4, 3e-4], "ordinary": [3e-4] * 3, "gloo": [6e-4] * 3}, "busy": {}},
    "25600000": {
        "seconds": {"arena": [0.02] * 3, "ordinary": [0.05] * 3, "gloo": [0.03] * 3},
        "busy": {
            "arena": [(0.005, 0.02), (0.004, 0.03), (0.003, 0.01)],
            "ordinary": [(0.01, 0.02)] * 3,
            "gloo": [(0.02, 0.025)] * 3,
        },
    },
}


def test_the_table_has_medians_ratios_and_the_rate_at_which_the_busiest_thread_is_full() -> None:
    text = cores.table([cores.record_of(2, 2, "all", FOUND)]).markdown()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["2, 2, all", "4", "0.6", "0.3", "0.3", "2.00", "2.00", "", ""] in rows
    assert ["2, 2, all", "25,600,000", "30", "20", "50", "1.50", "0.60", "6.40", "20.0, 25.0"] in rows


def test_the_busiest_thread_is_the_one_that_took_the_most_time_meanwhile() -> None:
    before = {"1/1": 9.0, "1/2": 0.5}
    assert cores.spent(before, {"1/1": 9.2, "1/2": 1.5, "2/7": 0.4}, 2) == pytest.approx((0.5, 0.8))


def test_the_time_of_each_thread_is_read() -> None:
    ended = threading.Event()
    busy = threading.Thread(target=ended.wait)
    busy.start()
    try:
        found = cores.threads_of([os.getpid()])
        assert f"{os.getpid()}/{busy.native_id}" in found
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        later = cores.threads_of([os.getpid()])
    finally:
        ended.set()
        busy.join()
    here = f"{os.getpid()}/{threading.get_native_id()}"
    assert later[here] - found[here] >= 0.015
