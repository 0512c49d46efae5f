"""Description of the machine of a benchmark, for comparing results, without anything that identifies it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
BUSY = 0.5  # load average per core from which other programs are likely to disturb a measurement


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine and what is installed on it.

    Attributes:
        cpu: its model, as the kernel names it.
        cores: logical ones that this process may use.
        memory_gb: in all.
        kernel, python, torch: versions.
        load: the load average over one minute when the measurement began.
        commit: of this repository, `+` behind it where something was changed and not committed; empty where there is
            no git.
    """

    cpu: str
    cores: int
    memory_gb: int
    kernel: str
    python: str
    torch: str
    load: float
    commit: str = ""

    def same(self, other: Machine) -> bool:
        """Returns whether absolute times of both can be compared: same processor, as many cores, as much memory."""
        return (self.cpu, self.cores, self.memory_gb) == (other.cpu, other.cores, other.memory_gb)

    def sentence(self) -> str:
        """Describes the machine in a sentence without a full stop, for titles and documents."""
        busy = f"; load {self.load:g} before" if self.busy else ""
        return (
            f"{self.cores} cores of {self.cpu}, {self.memory_gb} GB, Linux {self.kernel}, Python {self.python}, "
            f"torch {self.torch}{busy}"
        )

    @property
    def busy(self) -> bool:
        """True if other programs used the cores, too."""
        return self.load > BUSY * self.cores


def describe() -> Machine:
    """Describes this machine, with its present load."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        load=round(os.getloadavg()[0], 1),
        commit=_commit(),
    )


def _cpu() -> str:
    """Returns the model in /proc/cpuinfo, or the architecture where there is none."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str:
    try:
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        # Files that benchmarks write do not change what is measured.
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed.strip() else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
