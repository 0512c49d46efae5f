"""The traces that a command is about, and the output of its findings."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_rt.settings import Settings
from fusion_trace.read.choice import EVERY_STEP, ChoiceError, StepRange

if TYPE_CHECKING:
    from fusion_trace.read.job import JobTrace

_M_MMAP_THRESHOLD = -3  # a parameter of mallopt(3), as in glibc's malloc.h
_LARGEST_ON_HEAP = 1 << 20  # bytes

app = typer.Typer(
    help="Shows what a fusion_rt job does, or would do; without a command, the summary of the newest job.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

_WHAT = "A job's id, or directories or files with its rings; by default the newest job of this host."
What = Annotated[list[str] | None, typer.Argument(metavar="TRACE", help=_WHAT, show_default=False)]
StepsOption = Annotated[
    str,
    typer.Option("--steps", metavar="A:B", help="Only the steps from A up to, but without, B; either may be left out."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Everything, as one JSON document.")]


def load(what: list[str] | None, chosen: StepRange = EVERY_STEP) -> JobTrace:
    """Reads the trace that is meant; see `job.load`. Its problems begin with the dead, and the unknowns."""
    from fusion_trace.read import job

    _expect_much()
    return with_failures(job.load(what or [], Settings.from_env().trace_root(), chosen))


def _expect_much() -> None:
    """Prepares this process for a large job.

    There are many objects without cycles, and looking through them took half of the time. Arrays that are not needed
    any more go back to the kernel: malloc keeps those of up to 32 MiB once it has seen some, in a heap full of holes,
    which was 37 MB of a report's 303. Smaller ones stay: memory that is new costs page faults, a second of a report's
    six with a limit of 256 KiB.
    """
    gc.set_threshold(1_000_000)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)


def with_failures(trace: JobTrace) -> JobTrace:
    """Returns a trace with the dead, and the unknowns, before its other problems."""
    from fusion_trace.analyse import endings, gaps

    died = endings.sentences(trace, endings.find(trace))
    return replace(trace, problems=(*died, *gaps.sentences(trace, gaps.unseen(trace)), *trace.problems))


def load_two(before: str, after: str, chosen: StepRange, chosen_after: StepRange) -> tuple[JobTrace, JobTrace]:
    """Reads two traces: those that are named, the newest for the second one, and for the first the one before it.

    Raises:
        ChoiceError: there are no two jobs.
    """
    from fusion_trace.read import job

    _expect_much()
    root = Settings.from_env().trace_root()
    newest = [] if after else job.by_age(root)
    if not after and len(newest) < (1 if before else 2):
        raise ChoiceError(f"a comparison needs two jobs, and in {root} there are traces of {len(newest)}: name two")
    first = job.load([before or newest[1]], root, chosen)
    second = job.load([after or newest[0]], root, chosen_after)
    return with_failures(first), with_failures(second)


def show(as_json: bool, document: Callable[[], object], page: Callable[[], None]) -> None:
    """Prints a document or a page."""
    if as_json:
        typer.echo(json.dumps(document(), indent=2))
    else:
        page()
