"""The curves of a report: how long a step would take on other links, as `fusion-trace whatif` predicts it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fusion_rt.choice.codec_costs import measured
from fusion_rt.core.errors import FusionError
from fusion_trace.analyse.recorded_steps import understand
from fusion_trace.analyse.whatif import FRAMED, Change, Figure, Measure, Model
from fusion_trace.read.choice import StepRange
from fusion_trace.read.job import JobTrace

RATES = (1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2.5e10)  # bits a second, as links are sold
MOST_ACTIONS = 10_000  # of all ranks, for each of some hundred walks
ONE_HOST = "all ranks are on one host, so that nothing depends on links"
CHANGES = (
    ("as recorded", Change()),
    ("without stragglers", Change(without_straggler=True)),
    ("fp16", Change(codec="fp16")),
    ("topk, density 0.01", Change(codec="topk(density=0.01)")),
)


@dataclass(frozen=True)
class Curve:
    """A step at each of `RATES`, seconds."""

    title: str
    steps: tuple[Figure, ...]


@dataclass(frozen=True)
class Curves:
    """What-if curves.

    Attributes:
        curves: none where `why_not` says why there are none.
        rate: of the recorded links, bits of Ethernet frames a second.
        faster: a rate about ten times as high (0: there is none in `RATES`), and `told`: the step with it.
        step: the recorded time of the steps, seconds; None without curves.
        error: by which share the model's walk through them is too long.
        steps: the first and the last that the model walks through.
        problems: assumptions.
    """

    curves: tuple[Curve, ...] = ()
    why_not: str = ""
    rate: float = 0.0
    faster: float = 0.0
    told: Figure | None = None
    step: Figure | None = None
    error: float = 0.0
    steps: tuple[int, int] = (0, 0)
    problems: tuple[str, ...] = ()


def sweep(trace: JobTrace, chosen: StepRange, measure: Measure = measured) -> Curves:
    """Predicts the chosen steps at each rate, each with a few changes.

    Args:
        measure: measures a codec, as `Model` has it.
    """
    if len(trace.hosts) < 2:
        return Curves(why_not=ONE_HOST)
    try:
        recorded = understand(trace, chosen, MOST_ACTIONS)
        model = Model(recorded, measure)
        curves = tuple(_curve(model, title, change) for title, change in CHANGES)
    except FusionError as error:
        return Curves(why_not=str(error))
    rate = 8 * FRAMED / recorded.network.cost.seconds_per_byte
    faster = min(RATES, key=lambda each: abs(math.log(each / rate / 10)))
    near = 3 < faster / rate < 30
    return Curves(
        curves=curves,
        rate=rate,
        faster=faster if near else 0.0,
        told=curves[0].steps[RATES.index(faster)] if near else None,
        step=model.answer(Change()).recorded.step,
        error=model.error,
        steps=(recorded.steps.numbers[0], recorded.steps.numbers[-1]),
        problems=recorded.problems,
    )


def _curve(model: Model, title: str, change: Change) -> Curve:
    return Curve(title, tuple(model.answer(replace(change, rate=rate)).changed.step for rate in RATES))
