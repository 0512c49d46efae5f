"""The curves of a report: how long a step would take on other links, as `fusion-trace whatif` predicts it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from fusion_rt.core.errors import FusionError
from fusion_trace.read.choice import StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.simulate.calibration import ONE_NODE, Calibrated, Figure
from fusion_trace.simulate.changes import Change
from fusion_trace.simulate.model import FRAMED, CodecCosts
from fusion_trace.simulate.recorded import understand

BANDWIDTHS = (1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2.5e10)  # bits a second, as links are sold
MANY_NODES = 8
MOST_NODES = 32  # a replay simulates every message, and there are hundreds of replays
CHANGES = (
    ("as recorded", Change()),
    ("without stragglers", Change(no_straggler=True)),
    ("fp16", Change(codec="fp16")),
    ("topk, density 0.01", Change(codec="topk(density=0.01)")),
)


@dataclass(frozen=True)
class Curve:
    """A step at each of `BANDWIDTHS`, seconds. None: it is not predicted; `refused` says why, "" where it is."""

    title: str
    steps: tuple[Figure | None, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Curves:
    """What-if curves.

    Attributes:
        curves: none where `why_not` says why there are none.
        bandwidth: of the recorded links, bits a second of Ethernet frames, the mean.
        faster: a bandwidth about ten times as high (0: there is none in `BANDWIDTHS`), and `told`: the step with it.
        step: what the replayed steps took, seconds; None without curves.
        error: by which share the best replay is too long; `models`: how many replay about as well.
        steps: the first and the last that were replayed.
        codec: with which it was recorded.
        problems: what had to be assumed.
    """

    curves: tuple[Curve, ...] = ()
    why_not: str = ""
    bandwidth: float = 0.0
    faster: float = 0.0
    told: Figure | None = None
    step: Figure | None = None
    error: float = 0.0
    models: int = 0
    steps: tuple[int, int] = (0, 0)
    codec: str = ""
    problems: tuple[str, ...] = ()


def replayed_steps(nodes: int) -> int:
    """Returns how many steps are replayed for each point."""
    return 6 if nodes <= MANY_NODES else 3


def sweep(trace: JobTrace, middle: StepRange, measure: Callable[[str], CodecCosts] | None = None) -> Curves:
    """Predicts some steps at each bandwidth, each with a few changes.

    Args:
        middle: the steps; see `replayed_steps`.
        measure: what a codec costs that the job did not use; by default it is measured here.
    """
    if len(trace.hosts) < 2:
        return Curves(why_not=ONE_NODE)
    if len(trace.hosts) > MOST_NODES:
        return Curves(
            why_not=f"a replay of {len(trace.hosts)} nodes takes too long for curves (at most {MOST_NODES}); "
            "`fusion-trace whatif` replays one change"
        )
    try:
        recorded = understand(trace, middle)
        job = Calibrated(recorded, measure)
    except FusionError as error:
        return Curves(why_not=str(error))
    found = job.answer(Change())
    if found.refused:
        return Curves(why_not=found.refused)
    changes = [(title, change) for title, change in CHANGES if not (change.codec and recorded.codec != "dense")]
    curves = tuple(_curve(job, title, change) for title, change in changes)
    bandwidth = fmean(link.bandwidth for link in job.models[0].recorded.links) * 8 * FRAMED
    faster = min(BANDWIDTHS, key=lambda each: abs(math.log(each / bandwidth / 10)))
    near = 3 < faster / bandwidth < 30
    return Curves(
        curves=curves,
        bandwidth=bandwidth,
        faster=faster if near else 0.0,
        told=curves[0].steps[BANDWIDTHS.index(faster)] if near else None,
        step=found.recorded.step,
        error=found.error,
        models=len(found.models),
        steps=(recorded.numbers[0], recorded.numbers[-1]),
        codec=recorded.codec,
        problems=recorded.problems,
    )


def _curve(job: Calibrated, title: str, change: Change) -> Curve:
    points = [_point(job, replace(change, bandwidth=rate)) for rate in BANDWIDTHS]
    return Curve(title, tuple(step for step, _ in points), tuple(refused for _, refused in points))


def _point(job: Calibrated, change: Change) -> tuple[Figure | None, str]:
    try:
        told = job.answer(change)
    except FusionError as error:
        return None, str(error)
    return (None, told.refused) if told.changed is None else (told.changed.step, "")
