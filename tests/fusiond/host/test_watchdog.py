"""An event loop that stands still is shown in the log; one that runs is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOOP = """
import logging, time
from fusiond.host.loop import EventLoop
from fusiond.host.watchdog import Watchdog

logging.basicConfig(format="%(message)s")
loop = EventLoop()
watchdog = Watchdog(loop, 1.0)

def stand_still():
    time.sleep(3)

loop.call_soon({callback})
loop.call_later({seconds}, loop.stop)
loop.run()
watchdog.close()
loop.close()
"""


def log_of(callback: str, seconds: float) -> str:
    """What such a loop's process writes to its standard error."""
    code = LOOP.format(callback=callback, seconds=seconds)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stderr


@pytest.mark.multiprocess
def test_a_loop_that_stands_still_is_shown_once_with_its_stack() -> None:
    log = log_of("stand_still", 3.5)
    assert log.count("in stand_still") == 1
    assert log.count("the event loop stood still for") == 1
    assert log.index("in stand_still") < log.index("the event loop stood still for ")


@pytest.mark.multiprocess
def test_nothing_is_written_once_the_watch_is_over() -> None:
    assert log_of("loop.stop", 10) == ""
