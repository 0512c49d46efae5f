"""The kernel's figures of a process of this host (/proc/PID/stat, proc(5)): whether it lives, and since when."""

from __future__ import annotations

import os


def stat_fields(pid: int) -> list[str]:
    """Returns the fields from the third one on, the state; none if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command's name stands in parentheses and may itself hold spaces and parentheses.
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def process_state(pid: int) -> str:
    """Returns the letter of a process's state; empty if there is no such process."""
    return "".join(stat_fields(pid)[:1])


def process_start() -> float:
    """Returns when this process was started, in seconds since the boot of this host."""
    return int(stat_fields(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field of all
