"""What a process may use of its machine's processors."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fusion_rt.tracing import processors


def test_a_limit_of_a_cgroup_counts_if_it_is_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "_CGROUPS", str(tmp_path))
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        own = next(line.strip().removeprefix("0::/") for line in file if line.startswith("0::"))
    (tmp_path / own).mkdir(parents=True, exist_ok=True)
    limit = tmp_path / own / "cpu.max"
    assert processors.allowed() == len(os.sched_getaffinity(0))
    limit.write_text("max 100000\n")
    assert processors.allowed() == len(os.sched_getaffinity(0))
    limit.write_text("50000 100000\n")
    assert processors.allowed() == 0.5
    assert processors.MACHINE.unpack(processors.machine())[1] == 500


def test_the_wait_for_a_processor_never_shrinks() -> None:
    before = processors.waited()
    assert 0 <= before <= processors.waited() < 1 << 32


def test_a_thread_leaves_nothing_open() -> None:
    processors.waited()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        thread = threading.Thread(target=processors.waited)
        thread.start()
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == before
