"""Compares the figures with the limits in `limits.json`, which may only fall."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.house.figures import figures
from tests.house.steady_step import steady_step

_FILE = Path(__file__).with_name("limits.json")


def measured() -> dict[str, float]:
    """Returns all figures, by names that say what is counted: of the source, and of a step, which differ a little from
    run to run, because a busy machine takes other ways now and then."""
    way = {f"{what} that run in a synchronous step": number for what, number in steady_step("allreduce").items()}
    return {**figures(), **way}


def limits() -> dict[str, float]:
    """Returns the limits, by the names of the figures."""
    found: dict[str, float] = json.loads(_FILE.read_text())
    return found


def above(found: Mapping[str, float], allowed: Mapping[str, float]) -> list[str]:
    """Returns a sentence for each figure that is above its limit, or has none."""
    return [
        f"{name}: {number:g}, and the limit is {allowed[name]:g}" if name in allowed else f"{name} has no limit"
        for name, number in found.items()
        if number > allowed.get(name, -1)
    ]


def lowered(found: Mapping[str, float], allowed: Mapping[str, float]) -> dict[str, float]:
    """Returns the limits as they are to be from now on: those of the figures, where they are lower, or new."""
    return {name: min(number, allowed.get(name, number)) for name, number in found.items()}


def write(allowed: Mapping[str, float]) -> None:
    """Writes the limits."""
    _FILE.write_text(json.dumps(allowed, indent=2) + "\n")
