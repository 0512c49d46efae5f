"""What all commands that read traces take: which trace, and which of its steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_rt.errors import FusionError

if TYPE_CHECKING:
    from fusion_trace.read.job import JobTrace

What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TRACE",
        help="A job's id, or directories or files with its rings; by default the newest job of this host.",
        show_default=False,
    ),
]
StepsOption = Annotated[
    str,
    typer.Option("--steps", metavar="A:B", help="Only the steps from A up to, but without, B; either may be left out."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Everything, as one JSON document.")]


class ChoiceError(FusionError, ValueError):
    """What was asked for cannot be meant, or is not there."""


@dataclass(frozen=True)
class StepRange:
    """Numbers of steps. `None` on either side: no limit."""

    first: int | None = None
    stop: int | None = None

    def __contains__(self, number: int) -> bool:
        return (self.first is None or number >= self.first) and (self.stop is None or number < self.stop)


EVERY_STEP = StepRange()


def parse_steps(text: str) -> StepRange:
    """`A:B`, as in Python; `A` alone is that step.

    Raises:
        ChoiceError: it is something else, or no step is in it.
    """
    match = re.fullmatch(r"\s*([0-9]{0,18})\s*(:?)\s*([0-9]{0,18})\s*", text, re.ASCII)
    if match is None or (text.strip() and not match[2] and match[3]):
        raise ChoiceError(f"--steps {text!r} is not a range of steps such as 10:20, 10: or :20")
    first = int(match[1]) if match[1] else None
    stop = int(match[3]) if match[3] else None
    if first is not None and not match[2]:
        stop = first + 1
    if first is not None and stop is not None and stop <= first:
        raise ChoiceError(f"--steps {text!r} has no step in it")
    return StepRange(first, stop)


def chosen(what: list[str] | None) -> JobTrace:
    """The trace that is meant; see `job.load`."""
    from fusion_rt.settings import Settings
    from fusion_trace.read.job import load  # numpy is imported only where a trace is read

    return load(what or [], Settings.from_env().trace_root())
