"""The processes of a job, some of which may end while a test looks."""

from __future__ import annotations

from typing import Any

import psutil


def below(pid: int, attribute: str) -> list[tuple[psutil.Process, Any]]:
    """The processes below one that have not ended, with what psutil says of each: its `name`, its `cmdline`, ..."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            found.append((process, getattr(process, attribute)()))
        except psutil.NoSuchProcess:
            continue
    return found
