"""The labs on this machine, their owners, and their removal, by the owner or after the owner's death.

A lab is a number: `nl7br` is the namespace with lab 7's bridge, `nl7h0`, `nl7h1`, … are its hosts in 10.77.7.0/24.
The file /run/netlab/7 names the owner by process id and start time, so that a recycled id is not taken for the owner.
A file lock held by the owner would need no such comparison, but a forked child inherits it and would keep a dead lab
alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.iproute import NetlabError, command
from benchmarks.netlab.processes import kill_processes

STATE_DIR = Path("/run/netlab")
NAMESPACES = Path("/run/netns")  # where `ip netns` keeps its names
NETNS_ETC = Path("/etc/netns")  # `ip netns exec NAME` binds the files of NETNS_ETC/NAME over those of /etc
MAX_LABS = 256  # the third byte of the address


@dataclass(frozen=True)
class LabRecord:
    """One lab on this machine.

    Attributes:
        lab: its number.
        owner: process id of the owner, None when there is no record of it.
        alive: whether that process still runs.
        hosts: names of its hosts, in order.
    """

    lab: int
    owner: int | None
    alive: bool
    hosts: tuple[str, ...]


def host_name(lab: int, index: int) -> str:
    return f"nl{lab}h{index}"


def bridge_name(lab: int) -> str:
    return f"nl{lab}br"


def claim() -> int:
    """Removes the labs of dead owners, then takes the lowest free number for this process.

    Raises:
        NetlabError: every number is taken.
    """
    with _exclusive():
        records = _records()
        # Namespaces without a record may be somebody else's: only an explicit `clean` removes those.
        dead = {record.lab for record in records if not record.alive and record.owner is not None}
        for each in sorted(dead):
            destroy(each)
        taken = {record.lab for record in records} - dead
        lab = next((number for number in range(MAX_LABS) if number not in taken), None)
        if lab is None:
            raise NetlabError(f"all {MAX_LABS} labs are in use: `python -m benchmarks.netlab list` shows by whom.")
        owner = json.dumps({"pid": os.getpid(), "started": _start_ticks(os.getpid())})
        draft = STATE_DIR / f"{lab}.draft"
        draft.write_text(owner, encoding="utf-8")
        draft.rename(STATE_DIR / str(lab))
    return lab


def records() -> list[LabRecord]:
    """Returns the labs on this machine, by number."""
    with _exclusive():
        return _records()


def clean(everything: bool = False) -> list[LabRecord]:
    """Removes the labs whose owner is dead, or all of them, and returns those it removed."""
    with _exclusive():
        doomed = [record for record in _records() if everything or not record.alive]
        for record in doomed:
            destroy(record.lab)
    return doomed


def destroy(lab: int, children: Sequence[int] = ()) -> None:
    """Kills the processes in the lab's namespaces and removes these. They may be gone already, or in part.

    Args:
        lab: its number.
        children: process ids to kill as well: `ip netns exec` may not have entered its namespace yet.

    Raises:
        NetlabError: something could not be removed. The rest has been, and the record is kept for the next try.
    """
    names = _namespaces(lab)
    kill_processes([NAMESPACES / name for name in names], children)
    problems = []
    for name in names:
        try:
            if (NAMESPACES / name).exists():
                command("ip", "netns", "del", name)
        except NetlabError as error:
            problems.append(str(error))
        if (NETNS_ETC / name).exists():
            shutil.rmtree(NETNS_ETC / name)
    if NETNS_ETC.is_dir() and not any(NETNS_ETC.iterdir()):
        with contextlib.suppress(OSError):  # another lab has just put something there
            NETNS_ETC.rmdir()
    if problems:
        raise NetlabError(f"lab {lab} could not be removed: {'; '.join(problems)}")
    (STATE_DIR / str(lab)).unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    """Lets one process at a time look for dead labs and take numbers; otherwise a slow one could remove a new lab."""
    STATE_DIR.mkdir(mode=0o700, exist_ok=True)
    with (STATE_DIR / "lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _records() -> list[LabRecord]:
    numbers = {int(path.name) for path in STATE_DIR.iterdir() if path.name.isdigit()}
    numbers |= {int(match[1]) for name in _listed(NAMESPACES) if (match := re.fullmatch(r"nl(\d+)(?:h\d+|br)", name))}
    found = []
    for lab in sorted(numbers):
        try:
            record = json.loads((STATE_DIR / str(lab)).read_text(encoding="utf-8"))
            owner, alive = record["pid"], _start_ticks(record["pid"]) == record["started"]
        except FileNotFoundError:  # namespaces without a record: the record was removed by hand
            owner, alive = None, False
        hosts = [name for name in _namespaces(lab) if not name.endswith("br")]
        found.append(LabRecord(lab, owner, alive, tuple(sorted(hosts, key=lambda name: int(name.split("h")[1])))))
    return found


def _namespaces(lab: int) -> list[str]:
    """Returns the names of the lab's namespaces, also of those with only their files under /etc/netns left."""
    names = {*_listed(NAMESPACES), *_listed(NETNS_ETC)}
    return sorted(name for name in names if re.fullmatch(rf"nl{lab}(h\d+|br)", name))


def _listed(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _start_ticks(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot (proc(5), stat, field 22); None if dead or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
