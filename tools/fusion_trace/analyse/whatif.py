"""`fusion-trace whatif` predicts a step of a recorded job with another link, codec, algorithm or number of hosts.

The model (`fusion_rt.choice.step_model`) first walks through the recorded steps, with so much work of daemons that they
take as long as they did. Where the link hides that work, many values do, and the processor time that daemons have used
says which one. Then the model walks through the steps with the change.

Every figure has a range. Each doubt moves the prediction by itself, and the range is the root of the sum of squares of
all of them; `Answer.doubts` has each.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from fusion_rt import algorithms, codecs
from fusion_rt.algorithms import Signal
from fusion_rt.choice.codec_costs import Encoded, measured
from fusion_rt.choice.step_model import (
    Compute,
    HandOver,
    Network,
    Parcel,
    Program,
    Wait,
    around_steps,
    exchange_cost,
    walk,
)
from fusion_rt.codecs.base import Codec, Layout, Span
from fusion_rt.core.cost import CostModel
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import FusionError
from fusion_trace.analyse.recorded_steps import Bucket, Event, Gradient, Recorded, Tensor

FRAMED = 1514 / 1448
"""Bytes on an Ethernet link for each byte of payload, at an MTU of 1500 and with TCP timestamps."""

MOST_HOSTS = 4096
LEAST = 0.1  # of a prediction, that the model is off where nothing else is in doubt
_NEARLY = 0.03  # of the recorded step: walks that are off by no more are as good as each other
_NEARLY_USED = 0.05  # the same of walks in which daemons work for as long as their processor time says
_HIDDEN = 0.8  # of the recorded step: from there on links hide daemons' work
_EASED = 0.5  # of daemons' work that links hid is left where links are idle: slow ones bring messages in pieces
_CROWDED, _MOST_CROWDED = 0.04, 0.2  # of work, for each time that it waits as long as it lasts; and at most
_USED = 1.3  # times that daemons' work may be more, or less, than their processor time says
_IN_JOB = 1.25  # times as long a codec works in a daemon as alone: its parts wait for each other
_CODEC = 1.25  # times that a codec's work may be more, or less, than where it was measured
_RATE = 2.0  # times that a link may be faster, or slower, of which no rate is known
_FOUND_RATE = 1.1  # the same of one whose rate was found
_LATENCY = 0.4  # of latencies that were asked for
_OTHER_ALGORITHM = 0.1  # of a prediction, for an algorithm that was not recorded
_BYTE = 1e-9  # seconds of a daemon for each byte that is sent or received, where there are more than were recorded
_MOVED = 0.25  # of the work of bytes that come or go
_OF_BYTES = 0.7  # of a daemon's work, without its codec's, is that of bytes
_MOST_ELEMENTS = 1 << 22  # of buckets that a codec is measured with
_HALVINGS = 14
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
Measure = Callable[[Codec, Layout], Encoded]


class WhatIfError(FusionError, ValueError):
    """A change cannot be meant."""


@dataclass(frozen=True)
class Change:
    """A difference from the recorded job. `None`, or empty: as recorded.

    Attributes:
        rate: of every link, bits of Ethernet frames a second, as links are sold.
        latency: of every link, one way (s).
        density: of topk; 1 stands for no compression.
        codec: its text, for others.
        fusion_threshold: bytes.
        hosts: their number; their ranks work as the recorded ones did.
        algorithm: its text.
        without_straggler: every rank computes as long as the median rank.
    """

    rate: float | None = None
    latency: float | None = None
    density: float | None = None
    codec: str = ""
    fusion_threshold: int | None = None
    hosts: int | None = None
    algorithm: str = ""
    without_straggler: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure with the range in which it is expected; s, or bytes."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Half of the range, as a part of its value."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


@dataclass(frozen=True)
class Estimate:
    """The figures of a step: how long it takes and how long it is kept waiting (s), and bytes that a node sends."""

    step: Figure
    exposed: Figure
    sent: Figure


@dataclass(frozen=True)
class Doubt:
    """A reason why a step may take longer or shorter, and by how much (s)."""

    reason: str
    seconds: float


@dataclass(frozen=True)
class Answer:
    """A recorded job, and a prediction.

    Attributes:
        recorded: of all steps that were chosen; the range is that of the mean of so many steps.
        error: share by which the model's own walk through the recorded steps is too long.
        changed: the prediction.
        doubts: those that make its range, the largest first.
    """

    recorded: Estimate
    error: float
    changed: Estimate
    doubts: tuple[Doubt, ...]


def parse_rate(text: str) -> float:
    """Reads bits a second: "100mbit", "2.5gbit", "1e9bit". A number alone is refused: "5" is never meant as 5 bit/s.

    Raises:
        WhatIfError: it is something else.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmg]?)(?:bit(?:/s)?|bps)", text.strip().lower())
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:
        raise WhatIfError(f"--rate {text!r} is not a rate with its unit, such as 5mbit, 100mbit or 2.5gbit")
    return value


# --- the model of a recorded job --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubts:
    """Factors of values that are not known well; 1 where they are as found.

    Attributes:
        work: of daemons' work; codec: of a codec's; link: of the seconds that a byte takes; latency: of latencies;
            moved: of the work that comes or goes with bytes.
    """

    work: float = 1.0
    codec: float = 1.0
    link: float = 1.0
    latency: float = 1.0
    moved: float = 1.0


@dataclass(frozen=True)
class Walked:
    """A walk through steps: seconds of a step, those that it was kept waiting, and bytes that a node sends in it."""

    step: float
    exposed: float
    sent: float


class Model:
    """The model of a recorded job: predicts any number of changes.

    Args:
        measure: measures a codec on a bucket; by default it is run here.

    Attributes:
        error: share by which the walk through the recorded steps is too long.
    """

    def __init__(self, recorded: Recorded, measure: Measure = measured) -> None:
        self.recorded = recorded
        self._measure = measure
        self._encoded: dict[tuple[str, tuple[Bucket, ...]], list[Encoded]] = {}
        self._slower = 1.0  # links than they were found: else steps would not be as short as they were
        self._hidden = False  # links hide daemons' work
        self._low, self._work, self._high = self._fit()
        self.error = self._walk(Change(), Doubts()).step / recorded.steps.seconds - 1

    def answer(self, change: Change) -> Answer:
        """Predicts the steps with a change.

        Raises:
            WhatIfError, AlgorithmError, CodecError: this cannot be.
        """
        _check(change)
        recorded = self.recorded
        was, told = self._walk(Change(), Doubts()), self._walk(change, Doubts())
        step, apart = self._corrected(was, told)
        doubts = [
            Doubt("the model's own error", LEAST * step),
            Doubt("steps differ", _scatter(recorded) * min(step, recorded.steps.seconds)),
            Doubt("the walk through the recorded steps is off", apart),
        ]
        for reason, factors in self._in_doubt(change):
            others = [self._corrected(was, self._walk(change, each))[0] for each in factors]
            doubts.append(Doubt(reason, max(abs(other - step) for other in others)))
        if change.algorithm:
            doubts.append(Doubt("another algorithm was recorded", _OTHER_ALGORITHM * step))
        doubts = sorted((each for each in doubts if each.seconds > 0), key=lambda each: -each.seconds)
        half = math.sqrt(sum(each.seconds**2 for each in doubts))
        exposed = max(told.exposed + (step - told.step), 0.0)
        changed = Estimate(
            Figure(step, max(step - half, 0.0), step + half),
            Figure(exposed, max(exposed - half, 0.0), exposed + half),
            Figure(told.sent, told.sent * (1 - _NEARLY), told.sent * (1 + _NEARLY)),
        )
        return Answer(_as_recorded(recorded), self.error, changed, tuple(doubts))

    def _corrected(self, was: Walked, told: Walked) -> tuple[float, float]:
        """Returns a step as if the error of the recorded steps' walk were half a factor and half a sum, and how far
        these are apart. It is of all steps that were chosen, of which those that are walked through are some."""
        steps = self.recorded.steps
        of_all = statistics.fmean(steps.every) / steps.seconds
        by_factor = told.step * steps.seconds / was.step
        by_sum = max(told.step + steps.seconds - was.step, 0.0)
        return (by_factor + by_sum) / 2 * of_all, abs(by_factor - by_sum) / 2 * of_all

    def _in_doubt(self, change: Change) -> list[tuple[str, tuple[Doubts, ...]]]:
        """Returns the values that may be otherwise than found, with their factors."""
        found: list[tuple[str, tuple[Doubts, ...]]] = []
        if self._work > 0:
            factors = tuple(Doubts(work=each / self._work) for each in (self._low, self._high))
            found.append(("links hide how long daemons work", factors))
        crowded = min(_CROWDED * (self.recorded.work.stretched - 1), _MOST_CROWDED)
        if crowded > 0:
            factors = tuple(Doubts(work=each, codec=each) for each in (1 - crowded, 1 + crowded))
            found.append(("processors are shared, and may have more or less to do", factors))
        found.append(("daemons' work with bytes that come or go", (Doubts(moved=1 - _MOVED), Doubts(moved=1 + _MOVED))))
        if change.codec or change.density is not None:
            found.append(("the codec was measured alone", (Doubts(codec=1 / _CODEC), Doubts(codec=_CODEC))))
        if change.latency is not None:
            found.append(("how far latencies overlap", (Doubts(latency=1 - _LATENCY), Doubts(latency=1 + _LATENCY))))
        if self.recorded.network.nodes > 1 and change.rate is None:
            factor = _FOUND_RATE if self.recorded.rate_known else _RATE
            reason = "the rate of links" + ("" if self.recorded.rate_known else " is not known: give it with --rate")
            found.append((reason, (Doubts(link=1 / factor), Doubts(link=factor))))
        return found

    # --- fitting ------------------------------------------------------------------------------------------------------

    def _fit(self) -> tuple[float, float, float]:
        """Returns daemons' work in a step (s): the least, the likeliest and the most with which steps are as long as
        they were."""
        seconds = self.recorded.steps.seconds
        self._low = self._work = self._high = 0.0
        if self._step(0.0) > seconds * (1 + _NEARLY):
            self._slower = _largest(lambda slower: self._with(slower) <= seconds, 1.0)
        self._hidden = self._step(0.0) >= _HIDDEN * seconds
        work = self.recorded.work
        nearly = _NEARLY if work.used is None else _NEARLY_USED
        low = _largest(lambda work: self._step(work) <= seconds * (1 - nearly), seconds)
        high = _largest(lambda work: self._step(work) <= seconds * (1 + nearly), seconds)
        if work.used is None:
            return low, _largest(lambda work: self._step(work) <= seconds, seconds), high
        likely = min(work.used * work.stretched, high)
        return likely / _USED, likely, min(high, likely * _USED)

    def _step(self, work: float) -> float:
        self._work = work
        return self._walk(Change(), Doubts()).step

    def _with(self, slower: float) -> float:
        self._slower = slower
        return self._step(0.0)

    # --- walking ------------------------------------------------------------------------------------------------------

    def _walk(self, change: Change, doubts: Doubts) -> Walked:
        recorded = self.recorded
        buckets, programs = _buckets_and_programs(recorded, change)
        algorithm = algorithms.parse(change.algorithm or "allreduce")
        network = self._network(change, doubts)
        algorithm.check(network.nodes * network.ranks)
        codec = _codec(change)
        encoded = None if codec is None else self._encode(codec, buckets)
        if algorithm.signal is not Signal.GRADIENT:
            programs = [around_steps(map(_computed, program), len(buckets), algorithm) for program in programs]
        costs = [
            exchange_cost(network, algorithm, _parcel(bucket, encoded[number] if encoded else None), len(buckets))
            for number, bucket in enumerate(buckets)
        ]
        often = _often(programs, len(buckets))
        sent = sum(cost.sent * times for cost, times in zip(costs, often, strict=True))
        moving = self._moving_seconds(sent, network, doubts)
        seconds = self._daemon_seconds(buckets, often, moving, encoded, doubts)
        costs = [cost._replace(work=work) for cost, work in zip(costs, seconds, strict=True)]
        found = walk(programs, costs, together=algorithm.lockstep and algorithm.waits_for_answers)
        first = 1 if len(recorded.steps.numbers) > 1 else 0
        ends = [(its[-1] - (its[0] if first else 0.0)) / (len(its) - first) for its in found.ends]
        waited = [statistics.fmean(its[first:]) for its in found.waited]
        return Walked(statistics.fmean(ends), statistics.fmean(waited), sent)

    def _network(self, change: Change, doubts: Doubts) -> Network:
        network, cost = self.recorded.network, self.recorded.network.cost
        byte = cost.seconds_per_byte * self._slower if change.rate is None else 8 * FRAMED / change.rate
        latency = cost.latency * self._slower if change.latency is None else change.latency
        nodes = network.nodes if change.hosts is None else change.hosts
        return replace(network, nodes=nodes, cost=CostModel(latency * doubts.latency, byte * doubts.link))

    def _moving_seconds(self, sent: float, network: Network, doubts: Doubts) -> float:
        """Returns the seconds that a daemon works in a step, but for its codec, where a node sends so many bytes."""
        recorded = self.recorded
        work = self._work * doubts.work
        moving = work - min(recorded.work.coding, work)
        on_link = recorded.sent * recorded.network.cost.seconds_per_byte * self._slower
        if self._hidden and sent * network.cost.seconds_per_byte < on_link / 2:
            moving *= _EASED
        if sent < recorded.sent:
            return moving * (1 - _OF_BYTES * doubts.moved * (1 - sent / recorded.sent))
        return moving + 2 * _BYTE * doubts.moved * recorded.work.stretched * (sent - recorded.sent)

    def _daemon_seconds(
        self,
        buckets: Sequence[Bucket],
        often: Sequence[float],
        moving: float,
        encoded: Sequence[Encoded] | None,
        doubts: Doubts,
    ) -> list[float]:
        """Returns the seconds that a daemon works for each bucket.

        Args:
            often: how often a step has each bucket.
            moving: seconds of a step without the codec.
        """
        work = self.recorded.work
        whole = sum(bucket.nbytes * times for bucket, times in zip(buckets, often, strict=True)) or 1.0
        count = sum(often) or 1.0
        shares = [(bucket.nbytes / whole + 1 / count) / 2 for bucket in buckets]
        if encoded is None:
            coding = min(work.coding, self._work) * doubts.codec
            return [(moving + coding) * share for share in shares]
        codec = _IN_JOB * doubts.codec * work.stretched
        return [moving * share + each.seconds * codec for share, each in zip(shares, encoded, strict=True)]

    def _encode(self, codec: Codec, buckets: tuple[Bucket, ...]) -> list[Encoded]:
        """Returns what a codec makes of each bucket, and how long that takes; of buckets beyond `_MOST_ELEMENTS`, as of
        the largest one before that."""
        key = str(codec), buckets
        if key not in self._encoded:
            shapes = _shapes(self.recorded.tensors, buckets)
            known: dict[tuple[int, tuple[tuple[int, ...], ...]], Encoded] = {}
            left = _MOST_ELEMENTS
            for bucket, its in sorted(zip(buckets, shapes, strict=True), key=lambda each: each[0].nbytes):
                elements = max(bucket.nbytes // 4, 1)
                if (elements, its) in known or (known and elements > left):
                    continue
                known[elements, its] = self._measured(codec, elements, its)
                left -= elements
            self._encoded[key] = [
                known.get((max(bucket.nbytes // 4, 1), its)) or _scaled(known, bucket)
                for bucket, its in zip(buckets, shapes, strict=True)
            ]
        return self._encoded[key]

    def _measured(self, codec: Codec, elements: int, shapes: Sequence[tuple[int, ...]]) -> Encoded:
        part = min(elements, _MOST_ELEMENTS)
        if part < elements:
            shapes = ()
        spans, at = [], 0
        for number, shape in enumerate(shapes):
            spans.append(Span(f"tensor{number}", at, math.prod(shape), shape))
            at = spans[-1].end
        found = self._measure(codec, Layout(DTYPES["float32"], part, tuple(spans)))
        return replace(found, nbytes=found.nbytes * elements / part, seconds=found.seconds * elements / part)


def answer(recorded: Recorded, change: Change, measure: Measure = measured) -> Answer:
    """Predicts a recorded job with one change; see `Model`."""
    return Model(recorded, measure).answer(change)


def _largest(fits: Callable[[float], bool], most: float) -> float:
    """Returns the largest value up to `most` that fits, as all smaller ones then do; 0 if none does."""
    if fits(most):
        return most
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check(change: Change) -> None:
    if change.hosts is not None and not 1 <= change.hosts <= MOST_HOSTS:
        raise WhatIfError(f"--hosts {change.hosts} is not from 1 to {MOST_HOSTS}")
    if change.density is not None and change.codec:
        raise WhatIfError("--density and --codec are both about the codec: give one of them")
    if change.density is not None and not 0 < change.density <= 1:
        raise WhatIfError(f"--density {change.density} is not above 0 and at most 1")


def _codec(change: Change) -> Codec | None:
    """Returns the codec that is asked for; None: as recorded."""
    if change.density is not None:
        return codecs.parse("dense" if change.density == 1 else f"topk(density={change.density:g})")
    return codecs.parse(change.codec) if change.codec else None


def _parcel(bucket: Bucket, encoded: Encoded | None) -> Parcel:
    if encoded:
        return Parcel(bucket.nbytes, encoded.nbytes, encoded.exchange)
    return Parcel(bucket.nbytes, bucket.travels or bucket.nbytes)


def _scaled(known: dict[tuple[int, tuple[tuple[int, ...], ...]], Encoded], bucket: Bucket) -> Encoded:
    (elements, _), found = max(known.items(), key=lambda each: each[0][0])
    more = bucket.nbytes / 4 / elements
    return replace(found, nbytes=found.nbytes * more, seconds=found.seconds * more)


def _shapes(tensors: Sequence[Tensor], buckets: Sequence[Bucket]) -> list[tuple[tuple[int, ...], ...]]:
    """Returns the shapes of the tensors of each bucket; none where they do not fit into it."""
    found = []
    for number, bucket in enumerate(buckets):
        its = tuple(tensor.shape for tensor in tensors if tensor.bucket == number)
        found.append(its if sum(map(math.prod, its)) <= bucket.nbytes // 4 else ())
    return found


# --- programs ---------------------------------------------------------------------------------------------------------


def _buckets_and_programs(recorded: Recorded, change: Change) -> tuple[tuple[Bucket, ...], list[Program]]:
    programs: Sequence[Sequence[Sequence[Event]]] = recorded.steps.programs
    buckets = recorded.buckets
    if change.without_straggler:
        programs = _without_stragglers(programs)
    if change.fusion_threshold is not None:
        programs, buckets = _fused(recorded, programs, change.fusion_threshold)
    return buckets, [[[e for e in step if not isinstance(e, Gradient)] for step in program] for program in programs]


def _computed(step: Sequence[Event]) -> float:
    return sum(event.seconds for event in step if isinstance(event, Compute))


def _often(programs: Sequence[Program], buckets: int) -> list[float]:
    """Returns how often a step has each bucket, in the mean."""
    counts = [0.0] * buckets
    for program in programs[:1]:
        for step in program:
            for action in step:
                if isinstance(action, HandOver):
                    counts[action.bucket] += 1 / len(program)
    return counts


def _without_stragglers(programs: Sequence[Sequence[Sequence[Event]]]) -> list[list[list[Event]]]:
    """Makes all ranks compute as long as the median rank in each step, each of them stretched or shortened evenly."""
    found: list[list[list[Event]]] = [[] for _ in programs]
    for steps in zip(*programs, strict=True):
        computed = [_computed(step) for step in steps]
        middle = statistics.median(computed)
        for mine, step, seconds in zip(found, steps, computed, strict=True):
            factor = middle / seconds if seconds else 1.0
            mine.append([Compute(e.seconds * factor) if isinstance(e, Compute) else e for e in step])
    return found


def _fused(
    recorded: Recorded, programs: Sequence[Sequence[Sequence[Event]]], threshold: int
) -> tuple[list[list[list[Event]]], tuple[Bucket, ...]]:
    """Puts the same gradients into other buckets: each is submitted when its last gradient is complete, and waited for
    where the bucket was that had its last tensor."""
    tensors = [tensor for tensor in recorded.tensors if tensor.bucket >= 0]
    if not tensors:
        raise WhatIfError("--fusion-threshold: the trace has no plan (it may have been overwritten)")
    groups = _groups(tensors, threshold)
    others = [number for number in range(len(recorded.buckets)) if number not in {t.bucket for t in tensors}]
    number_of = {old: new for new, old in enumerate(others, len(groups))}
    buckets = [_bucket_of(recorded, group) for group in groups] + [recorded.buckets[old] for old in others]
    of = {tensor.name: index for index, group in enumerate(groups) for tensor in group}
    after: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        after.setdefault(group[-1].bucket, []).append(index)
    sizes = [len(group) for group in groups]
    moved = [[_refused(step, sizes, of, number_of, after) for step in program] for program in programs]
    return moved, tuple(buckets)


def _groups(tensors: Sequence[Tensor], threshold: int) -> list[list[Tensor]]:
    """Fuses tensors of one dtype as planning does."""
    groups: list[list[Tensor]] = []
    filled = 0
    for tensor in tensors:
        if groups and filled + tensor.nbytes <= threshold:
            groups[-1].append(tensor)
            filled += tensor.nbytes
        else:
            groups.append([tensor])
            filled = tensor.nbytes
    return groups


def _bucket_of(recorded: Recorded, group: Sequence[Tensor]) -> Bucket:
    nbytes, travels = sum(tensor.nbytes for tensor in group), 0.0
    for tensor in group:
        old = recorded.buckets[tensor.bucket]
        travels += tensor.nbytes * old.travels / max(old.nbytes, 1)
    return Bucket("", nbytes, travels)


def _refused(
    step: Sequence[Event],
    sizes: Sequence[int],
    of: dict[str, int],
    number_of: dict[int, int],
    after: dict[int, list[int]],
) -> list[Event]:
    missing = [*sizes]
    events: list[Event] = []
    for event in step:
        if isinstance(event, Gradient) and event.name in of:
            index = of[event.name]
            missing[index] -= 1
            if not missing[index]:
                events.append(HandOver(index))
        elif isinstance(event, HandOver | Wait) and event.bucket in number_of:
            events.append(event._replace(bucket=number_of[event.bucket]))
        elif isinstance(event, Wait):
            late = [index for index in after.get(event.bucket, []) if missing[index] > 0]
            for index in late:  # a parameter without gradient: its bucket leaves when it is wanted
                missing[index] = 0
                events.append(HandOver(index))
            events.extend(Wait(index) for index in after.get(event.bucket, []))
        elif not isinstance(event, HandOver):
            events.append(event)
    return events


# --- the record -------------------------------------------------------------------------------------------------------


def _as_recorded(recorded: Recorded) -> Estimate:
    share, steps = _scatter(recorded), recorded.steps
    step, exposed = statistics.fmean(steps.every), steps.waited
    return Estimate(
        Figure(step, step * (1 - share), step * (1 + share)),
        Figure(exposed, exposed * (1 - share), exposed * (1 + share)),
        Figure(recorded.sent, recorded.sent, recorded.sent),
    )


def _scatter(recorded: Recorded) -> float:
    """Returns half of the 95 % interval of the mean step, as a part of it; blocks of steps that follow each other count
    as one."""
    steps = np.array(recorded.steps.every)
    if len(steps) < 4:
        return 0.0
    blocks = np.array_split(steps, min(len(steps), max(4, round(math.sqrt(len(steps))))))
    means = np.array([block.mean() for block in blocks])
    error = float(means.std(ddof=1)) / math.sqrt(len(means))
    wider = 1 + 2.5 / len(means)  # as Student's t has it
    return NormalDist().inv_cdf(0.975) * wider * error / float(steps.mean())
