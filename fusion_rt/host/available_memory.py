"""Memory that programs of this host can still have: as the kernel estimates it, within the limits of control groups.

In a container /proc/meminfo is that of the whole machine, and the kernel kills a process that goes beyond the limit of
its group. All groups above the own one limit it, too.
"""

from __future__ import annotations

from pathlib import Path

from fusion_rt.core.errors import FusionError

_LIMITS = {  # files with the limit, what is used, and the names of what can be taken back of that, by version
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available(root: Path = Path("/")) -> tuple[int, str]:
    """Returns the bytes, and the control group whose limit decides; empty if none does.

    Args:
        root: of the file system.

    Raises:
        FusionError: the kernel does not tell.
    """
    found = [(_of_machine(root), ""), *_of_groups(root)]
    return min(found, key=lambda each: each[0])


def _of_machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise FusionError("/proc/meminfo has no line MemAvailable; Linux 3.14 or later is needed")


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


def _left(group: Path, limit: str, used: str, inactive: str) -> int | None:
    """Returns the bytes that a control group leaves; None if it has no limit."""
    try:
        most = (group / limit).read_text(encoding="ascii").strip()
        if most == "max":
            return None
        taken = int((group / used).read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return None  # no such group, or no such file in it: the one at the root has none
    return max(0, int(most) - taken + int(statistics.get(inactive, 0)))
