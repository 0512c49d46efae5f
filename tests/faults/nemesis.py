"""Faults of real processes and of the hosts of a lab. Lasting ones are context managers that undo them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from benchmarks.netlab import Netlab

TIMEOUT_S = 60.0


class Process(Protocol):
    """A process that can be stopped, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def poll(self) -> int | None: ...


def kill(process: Process) -> float:
    """Sends SIGKILL without waiting for the end. Returns the time by the monotonic clock."""
    began = time.monotonic()
    process.send_signal(signal.SIGKILL)
    return began


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    """Stops the process within the block (SIGSTOP)."""
    process.send_signal(signal.SIGSTOP)
    wait_for_state(process.pid, "T")
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)


def wait_for_state(pid: int, state: str) -> None:
    """Waits until a process is in a state of proc(5): a stop takes a moment."""
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline, f"process {pid} does not come to state {state}"
        time.sleep(0.005)


def hang(fifo: Path, seconds: float) -> None:
    """Makes the `hangable` daemon that reads this FIFO hold its GIL for `seconds`, from now on."""
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
    """Takes the link of a host down within the block."""
    lab.set_link(host, up=False)
    try:
        yield
    finally:
        lab.set_link(host, up=True)


@contextmanager
def slow_link(lab: Netlab, host: int, rate: str) -> Iterator[None]:
    """Limits the link of a host to this rate within the block."""
    lab.set_rate(host, rate)
    try:
        yield
    finally:
        lab.set_rate(host, None)


def in_another_time(seconds: float) -> list[str]:
    """Returns the prefix of a command whose monotonic clock is to be ahead of this machine's; needs root."""
    return ["unshare", "--time", "--monotonic", str(int(seconds)), "--boottime", str(int(seconds))]


def resources(pid: int) -> dict[str, int]:
    """Returns the resources of a process.

    They are its own resident bytes (`memory`), those of shared memory (`shared`), its own with its share of all mapped
    memory (`pss`), `descriptors`, `threads`, and `arenas`, the number of mapped files of shared memory.
    """
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    pss = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return {
        "memory": int(status["RssAnon"].split()[0]) * 1024,
        "shared": int(status["RssShmem"].split()[0]) * 1024,
        "pss": int(pss.split()[1]) * 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "arenas": len({line.split()[4] for line in maps if "memfd:" in line}),
    }
