"""Predictions that are calibrated by replay: how far a figure may be off, and which ones a recording cannot tell.

A recording is replayed by several models: as its costs were found, with all costs of daemons 2, 4 and 8 times as high
(of many of them a recording says nothing, where they are hidden behind a link or behind computing), with links 10 %
faster and slower, with links that carry urgent buckets first, and with links that let bursts pass, where something
speaks for that. Those that replay what was recorded nearly as well as
the best of them are as good as each other, whatever they say of something else: the interval of a prediction holds what
all of them say. Each is corrected by the error of its replay, once as a factor and once as a sum, since nobody knows
which. To that comes by how much steps scatter.

Nothing is predicted where the best replay is far off, or where models that replay equally well disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import NormalDist

import msgspec
import numpy as np

from fusion_trace.simulate import measuring
from fusion_trace.simulate.changes import Change, Prediction, on_links, replay
from fusion_trace.simulate.model import CodecCosts, Costs
from fusion_trace.simulate.recorded import Recorded
from fusion_trace.simulate.sharing import slowed

MOST_WRONG = 0.15  # of the best replay
NEARLY = 0.05  # more than the best replay's error
LEAST = 0.03  # of what was recorded, or of a longer figure: replays of which everything is known are as far off
WIDEST = 0.15  # half of what models say, of its middle; beyond that they disagree
VAGUE = 0.3  # half of an interval, of its middle; beyond that a prediction is of no use
QUEUED = 1e-3  # s of latency, beyond that of an idle link, that may be a queue
MORE = 1.1  # times as many bytes as were recorded need a rate
ONE_NODE = "all ranks are on one node, so that nothing depends on links"
_SCALED = ("send", "receive", "control", "io_send", "io_receive", "local", "job", "reduce", "copy", "apply")
_OF_CODECS = ("contribute", "pack", "unpack", "add", "conclude", "write")
Measure = Callable[[str], CodecCosts]


@dataclass(frozen=True)
class Model:
    """A way to replay a recording. `what`: how it differs from what was found; `scale`: of costs, also of codecs that
    the job did not use; `replayed`: its replay of the recording, and `error`: by which share that is too long."""

    what: str
    recorded: Recorded
    scale: float
    replayed: Prediction
    error: float


@dataclass(frozen=True)
class Figure:
    """A figure with the interval in which it is, if what was recorded tells it; s, or bytes."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Half of the interval, as a part of its middle."""
        middle = (self.low + self.high) / 2
        return (self.high - self.low) / 2 / middle if middle else 0.0


@dataclass(frozen=True)
class Estimate:
    """The figures of a step: how long it takes and how long it is kept waiting (s), and bytes that a node sends."""

    step: Figure
    exposed: Figure
    sent: Figure


@dataclass(frozen=True)
class Answer:
    """A recorded job, its replay, and a prediction.

    Attributes:
        recorded: of all steps that were chosen; the interval is that of the mean of so many steps.
        replayed: by the best model, uncorrected; its interval is that of all models that are kept.
        error: share by which the best replay is too long.
        models: those that are kept, the best first.
        changed: None if nothing was asked, or if `refused` says why nothing, or not this, can be predicted.
    """

    recorded: Estimate
    replayed: Estimate
    error: float
    models: tuple[Model, ...]
    changed: Estimate | None = None
    refused: str = ""


class Calibrated:
    """A recorded job with the models that replay it: they predict any number of changes.

    Args:
        measure: what a codec costs that the job did not use; by default it is measured here, once.

    Attributes:
        models: those that are kept, the best first.
    """

    def __init__(self, recorded: Recorded, measure: Measure | None = None) -> None:
        self.recorded = recorded
        self.models = calibrate(recorded, measure)
        self._costs: Measure = cache(measure or measuring.codec_costs)  # each is measured once

    def answer(self, change: Change) -> Answer:
        """Replays the job with a change, if there is any.

        Raises:
            WhatIfError, AlgorithmError, CodecError: this cannot be.
        """
        recorded, best = self.recorded, self.models[0]
        replayed = _spread([each.replayed for each in self.models], best.replayed)
        alone = recorded.nodes == 1 and change.nodes in (None, 1)
        wrong = abs(best.error) > MOST_WRONG
        refused = _too_wrong(best.error) if wrong else ""
        if alone and (change.bandwidth, change.latency) != (None, None):
            refused = ONE_NODE
        found = Answer(_recorded(recorded), replayed, best.error, self.models, refused=refused)
        if refused or change == Change():
            return found
        tried = (*self.models, *_unknown(best, change))
        raw = self._replays(tried, change)
        corrected = [_corrected(recorded, each, prediction) for each, prediction in zip(tried, raw, strict=True)]
        middle = Prediction(*(sum(getattr(p, name) for p in corrected[0]) / 2 for name in ("step", "exposed", "sent")))
        spread = _spread([p for pair in corrected for p in pair], middle)
        unknown = (
            recorded.assumed or recorded.machines is not None
        )  # a chunk has come when its receiver has a processor
        if unknown and change.bandwidth is None and raw[0].sent > MORE * best.replayed.sent:
            return replace(found, refused=_no_rate(recorded, middle.sent))
        if spread.step.width > WIDEST:
            return replace(found, refused=_not_told(tried, corrected))
        changed = _widened(spread, recorded)
        if changed.step.width > VAGUE:
            return replace(found, refused=_too_vague(changed.step))
        return replace(found, changed=changed)

    def _replays(self, tried: Sequence[Model], change: Change) -> list[Prediction]:
        """Replays each model. Models may differ in nothing but links whose rate the change sets: they are replayed
        once."""
        made: list[tuple[Recorded, float, Prediction]] = []
        found = []
        for model in tried:
            its = on_links(model.recorded, change)
            told = next((told for other, scale, told in made if scale == model.scale and other == its), None)
            if told is None:
                told = replay(its, change, partial(self._scaled_costs, model.scale))
                made.append((its, model.scale, told))
            found.append(told)
        return found

    def _scaled_costs(self, scale: float, codec: str) -> CodecCosts:
        return _scaled_codec(self._costs(codec), scale)


def answer(recorded: Recorded, change: Change, measure: Measure | None = None) -> Answer:
    """Replays a recorded job with one change; see `Calibrated`."""
    return Calibrated(recorded, measure).answer(change)


def calibrate(recorded: Recorded, measure: Measure | None = None) -> tuple[Model, ...]:
    """Returns the models that replay what was recorded nearly as well as the best of them, the best first."""
    if recorded.machines is not None:
        recorded = _with_work(recorded, recorded.machines.daemons, measure)
    models = [_model(recorded, what, its, scale, measure) for what, its, scale in _ways(recorded)]
    models.sort(key=lambda each: abs(each.error))
    return tuple(each for each in models if abs(each.error) <= abs(models[0].error) + NEARLY)


def _unknown(best: Model, change: Change) -> tuple[Model, ...]:
    """Returns what no replay tells: whether latencies were those of a queue, which will be shorter where less is sent;
    of processors that are shared, what else they will have to do, and what a codec costs there that the job did not
    use. (Alone, topk takes a quarter of what it takes among eight processes on two.)
    """
    recorded, found = best.recorded, []
    if change.latency is None and any(link.latency > QUEUED + link.idle_latency for link in recorded.links):
        links = tuple(replace(link, latency=link.idle_latency) for link in recorded.links)
        found.append(replace(best, what="latencies that were queues", recorded=replace(recorded, links=links)))
    if recorded.machines is None:
        return tuple(found)
    found.append(replace(best, what="processors a third busier", recorded=_slowed(recorded, 1.5)))
    if change.codec or change.density is not None:
        found += [replace(best, what=f"the codec's costs x {scale:g}", scale=scale) for scale in (2.0, 4.0, 8.0)]
    return tuple(found)


def _with_work(recorded: Recorded, used: float, measure: Measure | None) -> Recorded:
    """Returns the recording with costs that add up to the processor time that a daemon has used in a step (s).

    What kernels and the event loop do not account for is ZeroMQ's and the kernel's work with each byte.
    """
    worked = replay(recorded, Change(), measure).worked
    if worked > used:
        return replace(recorded, costs=scaled(recorded.costs, used / worked))
    if not recorded.sent:
        return recorded
    byte = (used - worked) / (2 * recorded.sent / recorded.nodes)
    return replace(recorded, costs=msgspec.structs.replace(recorded.costs, io_send=byte, io_receive=byte))


def _slowed(recorded: Recorded, factor: float) -> Recorded:
    """Returns the recording on processors that give each so much less, since they are busy with something else, too."""
    programs = tuple(tuple(slowed(step, factor) for step in program) for program in recorded.programs)
    return replace(recorded, programs=programs, costs=scaled(recorded.costs, factor))


_Way = tuple[str, Recorded, float]
"""A model: its words, the recording with its changes, and the factor of the costs of codecs."""


def _ways(recorded: Recorded) -> list[_Way]:
    ways = []
    for its in (recorded, *_with_bursts(recorded)):
        which = (
            ""
            if its is recorded
            else f"links that let bursts of {max(link.burst for link in its.links) / 1e3:.0f} kB pass"
        )
        ways += _with_links((which, its, 1.0))
        if its.machines is not None:
            for factor, words in ((1.33, "a quarter"), (2.0, "half")):
                words = f"processors for {words} busy with something else"
                ways += _with_links((_and(which, words), _slowed(its, factor), factor))
    return ways


def _with_bursts(recorded: Recorded) -> list[Recorded]:
    return [
        replace(recorded, links=tuple(replace(link, burst=link.burst * factor) for link in recorded.bursty))
        for factor in (1.0, 2.0, 0.5)
        if recorded.bursty is not None
    ]


def _with_links(way: _Way) -> list[_Way]:
    which, recorded, its_scale = way
    ways = [("", recorded, 1.0)]
    for scale in (2.0, 4.0, 8.0) if recorded.machines is None else (0.7, 1.4):  # then their work is known
        ways.append((f"daemons' costs x {scale:g}", replace(recorded, costs=scaled(recorded.costs, scale)), scale))
    if recorded.nodes > 1:
        speeds = [(1.1, "links 10 % faster"), (1 / 1.1, "links 10 % slower")]
        if recorded.machines is not None:  # a chunk has come when its receiver has a processor
            speeds += [(2.0, "links twice as fast"), (4.0, "links four times as fast")]
        for factor, words in speeds:
            links = tuple(replace(link, bandwidth=link.bandwidth * factor) for link in recorded.links)
            ways.append((words, replace(recorded, links=links), 1.0))
        links = tuple(replace(link, discipline="priority") for link in recorded.links)
        ways.append(("urgent buckets first", replace(recorded, links=links), 1.0))
    return [(_and(which, words) or "as found", its, scale * its_scale) for words, its, scale in ways]


def _and(*words: str) -> str:
    return " and ".join(filter(None, words))


def scaled(costs: Costs, scale: float) -> Costs:
    """Returns all costs so many times as high."""
    codecs = {text: _scaled_codec(its, scale) for text, its in costs.codecs.items()}
    return msgspec.structs.replace(costs, codecs=codecs, **{name: getattr(costs, name) * scale for name in _SCALED})


def _scaled_codec(costs: CodecCosts, scale: float) -> CodecCosts:
    return msgspec.structs.replace(costs, **{name: getattr(costs, name) * scale for name in _OF_CODECS})


def _model(recorded: Recorded, what: str, its: Recorded, scale: float, measure: Measure | None) -> Model:
    replayed = replay(its, Change(), measure)
    return Model(what, its, scale, replayed, replayed.step / recorded.step_seconds - 1)


def _corrected(recorded: Recorded, model: Model, told: Prediction) -> tuple[Prediction, Prediction]:
    """Returns a prediction as if the replay's error were a factor, and as if it were a sum. It is of all steps that
    were chosen, of which those that are replayed are some."""
    of_all = recorded.whole_seconds / recorded.step_seconds
    factor = of_all * recorded.step_seconds / model.replayed.step
    more = recorded.step_seconds - model.replayed.step
    kept = recorded.waited_seconds - model.replayed.exposed
    sent = told.sent * (recorded.sent / recorded.nodes / model.replayed.sent if model.replayed.sent else 1.0)
    return (
        Prediction(told.step * factor, told.exposed * factor, sent),
        Prediction(max(told.step + more, 0.0) * of_all, max(told.exposed + kept, 0.0) * of_all, sent),
    )


def _spread(found: Sequence[Prediction], middle: Prediction) -> Estimate:
    def figure(name: str) -> Figure:
        values = [getattr(each, name) for each in (*found, middle)]
        return Figure(getattr(middle, name), min(values), max(values))

    return Estimate(figure("step"), figure("exposed"), figure("sent"))


def _widened(told: Estimate, recorded: Recorded) -> Estimate:
    scatter = _scatter(recorded)
    was = _recorded(recorded)

    def wider(figure: Figure, whole: float) -> Figure:
        more = math.hypot(LEAST * max(figure.value, whole), scatter * figure.value)
        return Figure(figure.value, max(figure.low - more, 0.0), figure.high + more)

    sent = told.sent
    return Estimate(
        wider(told.step, was.step.value),
        wider(told.exposed, was.exposed.value),
        Figure(sent.value, sent.low * (1 - LEAST), sent.high * (1 + LEAST)),
    )


def _recorded(recorded: Recorded) -> Estimate:
    share, sent = _scatter(recorded), recorded.sent / recorded.nodes
    step, exposed = recorded.whole_seconds, recorded.waited_seconds
    return Estimate(
        Figure(step, step * (1 - share), step * (1 + share)),
        Figure(exposed, exposed * (1 - share), exposed * (1 + share)),
        Figure(sent, sent, sent),
    )


def _scatter(recorded: Recorded) -> float:
    """Returns half of the 95 % interval of the mean step, as a part of it; blocks of steps that follow each other count
    as one."""
    steps = np.array(recorded.every)
    if len(steps) < 4:
        return 0.0
    blocks = np.array_split(steps, min(len(steps), max(4, round(math.sqrt(len(steps))))))
    means = np.array([block.mean() for block in blocks])
    error = float(means.std(ddof=1)) / math.sqrt(len(means))
    wider = 1 + 2.5 / len(means)  # as Student's t has it
    return NormalDist().inv_cdf(0.975) * wider * error / float(steps.mean())


def _no_rate(recorded: Recorded, sent: float) -> str:
    if not recorded.assumed:
        return (
            "it would send more, and how fast links are cannot be told from a recording in which daemons waited for "
            "processors, too: say it (--bandwidth)"
        )
    return (
        f"it would send {sent / 1e6:.3g} MB a step, and {recorded.sent / recorded.nodes / 1e6:.3g} MB were recorded, "
        f"too little to tell how fast the {'link' if len(recorded.assumed) == 1 else 'links'} of "
        f"{', '.join(recorded.assumed)} may be: say it (--bandwidth)"
    )


def _too_wrong(error: float) -> str:
    return (
        f"the best replay of the recording is {abs(error):.0%} too {'long' if error > 0 else 'short'}, so the "
        "simulation lacks a part of these steps"
    )


def _too_vague(step: Figure) -> str:
    return (
        f"it would be {step.low * 1e3:.3g} to {step.high * 1e3:.3g} ms: the steps of this recording differ too much, "
        "or are too long beside that; a longer recording, or one of a job that is more alike, would tell"
    )


def _not_told(tried: Sequence[Model], corrected: Sequence[tuple[Prediction, Prediction]]) -> str:
    says = [(told.step, model.what) for model, pair in zip(tried, corrected, strict=True) for told in pair]
    (low, one), (high, other) = min(says), max(says)
    models = f"{one}, or {other}" if one != other else one
    return (
        f"the recording does not decide: models that replay it about as well as each other say {low * 1e3:.3g} to "
        f"{high * 1e3:.3g} ms ({models}); record a job in which the changed part is not hidden behind another"
    )
