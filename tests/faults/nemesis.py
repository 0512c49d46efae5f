"""Faults, done to real processes and to the hosts of a lab. What lasts is a context manager that undoes it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.netlab import Netlab

TIMEOUT_S = 60.0


def kill(process: subprocess.Popen[bytes]) -> float:
    """SIGKILL. Returns when, by the monotonic clock; the process is not waited for."""
    began = time.monotonic()
    process.send_signal(signal.SIGKILL)
    return began


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within the block, the process stands still (SIGSTOP)."""
    process.send_signal(signal.SIGSTOP)
    wait_for_state(process.pid, "T")
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)


def wait_for_state(pid: int, state: str) -> None:
    """Waits until the kernel says that a process is in a state (proc(5)): a stop takes a moment."""
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline, f"process {pid} does not come to state {state}"
        time.sleep(0.005)


def hang(fifo: Path, seconds: float) -> None:
    """Makes the `hangable` daemon that reads this FIFO hold its GIL that long, from now on."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:  # nobody reads it yet, or any more
            assert time.monotonic() < deadline, f"no daemon reads {fifo}"
            time.sleep(0.005)
    os.write(fd, f"{seconds}\n".encode())
    os.close(fd)


@contextmanager
def link_down(lab: Netlab, host: int) -> Iterator[None]:
    """Within the block, the cable of a host is out."""
    lab.set_link(host, up=False)
    try:
        yield
    finally:
        lab.set_link(host, up=True)


@contextmanager
def slow_link(lab: Netlab, host: int, rate: str) -> Iterator[None]:
    """Within the block, a host sends and receives at this rate only."""
    lab.set_rate(host, rate)
    try:
        yield
    finally:
        lab.set_rate(host, None)


def in_another_time(seconds: float) -> list[str]:
    """What stands before a command whose monotonic clock is to be ahead of this machine's; as root."""
    return ["unshare", "--time", "--monotonic", str(int(seconds)), "--boottime", str(int(seconds))]


def resources(pid: int) -> dict[str, int]:
    """What a process holds: resident bytes of its own (`memory`), with its share of all that it has mapped (`pss`),
    `descriptors`, `threads`, and `arenas`: how many files of shared memory it has mapped."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    pss = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return {
        "memory": int(status["RssAnon"].split()[0]) * 1024,
        "pss": int(pss.split()[1]) * 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "arenas": len({line.split()[4] for line in maps if "memfd:" in line}),
    }
