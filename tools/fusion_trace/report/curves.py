"""The curves of a report: how long a step would take on links of other bandwidths, by the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from fusion_rt.core.errors import FusionError
from fusion_trace.read.choice import StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.simulate.calibration import Figure, Model, answer
from fusion_trace.simulate.changes import Change
from fusion_trace.simulate.changes import replay as simulated
from fusion_trace.simulate.model import FRAMED, CodecCosts
from fusion_trace.simulate.recorded import understand

BANDWIDTHS = (1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2.5e10)  # bits a second, as links are sold
STEPS = 12  # that are replayed for each point
MOST_NODES = 32  # a replay simulates every message, and there are dozens of them
CHANGES = (
    ("as recorded", Change()),
    ("without stragglers", Change(no_straggler=True)),
    ("fp16", Change(codec="fp16")),
    ("topk, density 0.01", Change(codec="topk(density=0.01)")),
)


@dataclass(frozen=True)
class Curve:
    """Seconds of a step at each of `BANDWIDTHS`."""

    title: str
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Curves:
    """What-if curves.

    Attributes:
        curves: none where `why_not` says why there are none.
        bandwidth: of the recorded links, bits a second of Ethernet frames, the mean.
        faster: a bandwidth about ten times as high (0: there is none in `BANDWIDTHS`), and `told`: the step with it.
        step: what the replayed steps took, seconds; `error`: by which share their replay is too long.
        steps: the first and the last that were replayed.
        codec: with which it was recorded.
        problems: what had to be assumed.
    """

    curves: tuple[Curve, ...] = ()
    why_not: str = ""
    bandwidth: float = 0.0
    faster: float = 0.0
    told: Figure | None = None
    step: float = 0.0
    error: float = 0.0
    steps: tuple[int, int] = (0, 0)
    codec: str = ""
    problems: tuple[str, ...] = ()


def sweep(trace: JobTrace, middle: StepRange, measure: Callable[[str], CodecCosts] | None = None) -> Curves:
    """Replays some steps at each bandwidth, each with a few changes.

    Args:
        middle: the steps; see `STEPS`.
        measure: what a codec costs that the job did not use; by default it is measured here.
    """
    if len(trace.hosts) < 2:
        return Curves(why_not="all ranks are on one node, so that nothing depends on links")
    if len(trace.hosts) > MOST_NODES:
        return Curves(
            why_not=f"a replay of {len(trace.hosts)} nodes takes too long for curves (at most {MOST_NODES}); "
            "`fusion-trace whatif` replays one change"
        )
    try:
        recorded = understand(trace, middle)
        found = answer(recorded, Change(), measure)
        best = found.models[0]
        bandwidth = fmean(link.bandwidth for link in best.recorded.links) * 8 * FRAMED
        faster = min(BANDWIDTHS, key=lambda each: abs(math.log(each / bandwidth / 10)))
        if not found.refused:
            found = answer(recorded, Change(bandwidth=faster), measure)
    except FusionError as error:
        return Curves(why_not=str(error))
    known = Curves(
        bandwidth=bandwidth,
        faster=faster if 3 < faster / bandwidth < 30 else 0.0,
        told=found.changed.step if found.changed else None,
        step=recorded.step_seconds,
        error=best.error,
        steps=(recorded.numbers[0], recorded.numbers[-1]),
        codec=recorded.codec,
        problems=recorded.problems,
    )
    if found.refused:
        return replace(known, why_not=found.refused)
    changes = [(title, change) for title, change in CHANGES if not (change.codec and recorded.codec != "dense")]
    try:
        curves = tuple(Curve(title, _seconds(best, change, measure)) for title, change in changes)
    except FusionError as error:
        return replace(known, why_not=str(error))
    return replace(known, curves=curves)


def _seconds(model: Model, change: Change, measure: Callable[[str], CodecCosts] | None) -> tuple[float, ...]:
    return tuple(simulated(model.recorded, replace(change, bandwidth=rate), measure).step for rate in BANDWIDTHS)
