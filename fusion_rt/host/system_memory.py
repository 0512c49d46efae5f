"""The memory that this host has left, and that this process has freed without returning it to the system."""

from __future__ import annotations

import ctypes
from operator import itemgetter
from pathlib import Path

from fusion_rt.core.errors import FusionError

_LIMITS = {  # files with the limit and the use, and the prefix of names in memory.stat, by version
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
_RECLAIMABLE = ("inactive_file", "active_file")  # pages that the kernel takes back; MemAvailable counts them, too
_NO_LIMIT = 1 << 62  # bytes; the first version writes a number for that


def return_freed_memory() -> None:
    """Returns freed memory to the system, where the C library keeps it and can be told to: glibc.

    For pieces of up to 32 MiB it raises its threshold with each one that is freed, and then keeps the next ones. After
    a hundred tensors of up to 4 MB had been freed, a process still held 200 MB of them. This took 16 ms to return
    them, and .02 ms where there was nothing to return. It is for moments after which much less is needed than before.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Returns the bytes of memory that this process can still get, and the control group whose limit decides; empty if
    none does. Swap counts for the whole machine.

    Args:
        root: of the file system.

    Raises:
        FusionError: the kernel does not tell.
    """
    found = [(_of_machine(root), ""), *_of_groups(root)]
    return min(found, key=itemgetter(0))


def _of_machine(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    found = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    if "MemAvailable" not in found:
        raise FusionError("/proc/meminfo has no line MemAvailable; Linux 3.14 or later is needed")
    return found["MemAvailable"] + found.get("SwapFree", 0)


def _of_groups(root: Path) -> list[tuple[int, str]]:
    """Returns the bytes that each control group with a limit leaves, and its name."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # a kernel without them
    found = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _LIMITS:
                place = root / "sys/fs/cgroup" / controller
                # In a container the name may be that outside of it, and the own group is at the top.
                for group in [place / name.lstrip("/"), *(place / name.lstrip("/")).parents]:
                    if group == place.parent:
                        break
                    if (left := _left(group, *_LIMITS[controller])) is not None:
                        found.append((left, f"/{group.relative_to(root)}"))
    return found


def _left(group: Path, limit: str, used: str, prefix: str) -> int | None:
    """Returns the bytes that a control group leaves; None if it has no limit."""
    try:
        most = (group / limit).read_text(encoding="ascii").strip()
        if most == "max" or int(most) >= _NO_LIMIT:
            return None
        taken = int((group / used).read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return None  # no such group, or no such file in it: the one at the root has none
    return max(0, int(most) - taken + sum(int(statistics.get(prefix + name, 0)) for name in _RECLAIMABLE))
