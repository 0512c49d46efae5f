"""A process as the kernel shows it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from fusion_rt.host.process_stat import process_start, process_state, stat_fields


@pytest.mark.multiprocess
def test_a_process_is_there_until_its_end_is_noticed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert int(stat_fields(child.pid)[1]) == os.getpid(), "its parent"
    assert process_state(child.pid) in "RSD"
    child.communicate(b"\n")
    assert stat_fields(child.pid) == []
    assert process_state(child.pid) == ""


def test_this_process_runs_since_a_moment_in_the_past() -> None:
    assert process_state(os.getpid()) == "R"
    assert 0 < process_start() < time.clock_gettime(time.CLOCK_BOOTTIME)
