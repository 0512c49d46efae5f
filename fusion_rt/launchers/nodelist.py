"""Lists of host names as launchers abbreviate them: Slurm's `a[01-03,7],b` and Open MPI's `a[2:1-3,7]` (2: digits)."""

from __future__ import annotations

import re

from fusion_rt.core.errors import FusionError

MAX_HOSTS = 65536
_MAX_NAME = 255  # characters, as in DNS


def expand(text: str) -> tuple[str, ...]:
    """The names in a list, in their order; a name may have several brackets (`rack[1-2]n[01-16]`).

    Raises:
        FusionError: it is not such a list, or a very long one.
    """
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text):
        raise _not_a_list(text)
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names += _expand_entry(entry, text)
        if len(names) > MAX_HOSTS:
            raise _too_long(text)
    return tuple(names)


def _expand_entry(entry: str, text: str) -> list[str]:
    names = [""]
    for part in re.split(r"(\[.*?\])", entry):
        if len(names[0]) + (0 if part.startswith("[") else len(part)) > _MAX_NAME:
            raise _not_a_list(text)
        if part.startswith("["):
            numbers = _numbers(part[1:-1], text)
            if len(names) * len(numbers) > MAX_HOSTS:
                raise _too_long(text)
            names = [name + number for name in names for number in numbers]
        else:
            names = [name + part for name in names]
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    """The numbers in `01-03,7` or `2:1-3,7`, with their leading zeros."""
    width, colon, rest = ranges.rpartition(":")
    found: list[str] = []
    for piece in rest.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", piece)
        if match is None or (colon and not re.fullmatch("[0-9]{1,2}", width)):
            raise _not_a_list(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _not_a_list(text)
        digits = int(width) if colon else len(first)
        if int(last) - int(first) >= MAX_HOSTS:
            raise _too_long(text)
        found += [f"{number:0{digits}d}" for number in range(int(first), int(last) + 1)]
    return found


def _not_a_list(text: str) -> FusionError:
    return FusionError(f"{text[:80]!r} is not a list of hosts such as a[01-03,7],b")


def _too_long(text: str) -> FusionError:
    return FusionError(f"the list of hosts {text[:80]!r} has more than {MAX_HOSTS} names")
