"""A recorded job as the model of a step has it (`fusion_rt.choice.step_model`).

* A worker's program: in each of its steps, the time between recorded events, in which it computed, the buckets that it
  handed over, and those that it waited for. The waits themselves are left out, since the model is about them.
* A bucket's bytes, and how many of them travelled.
* The rate and latency of links, from when chunks were sent and had come.
* The processor time of daemons, and by how many times work takes longer because other processes want the processors.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fusion_rt.choice.step_model import Action, Compute, HandOver, Network, Wait
from fusion_rt.core.cost import CostModel
from fusion_rt.core.errors import FusionError
from fusion_rt.tracing.format import Kind
from fusion_trace.analyse.link_figures import LEAST_CHUNK, link_speed
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.chunks import ChunkColumns
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import KERNELS, Operations, Step, bounds_of, operations, steps_of
from fusion_trace.read.rows import NEVER, Ints
from fusion_trace.read.span_columns import covered_by_group, pair_columns, union_of

S = 1e9  # ns
MOST_STEPS = 60  # that the model walks through
MOST_ACTIONS = 50_000  # of all ranks together, that it walks through
LEAST_EXCHANGES = 4  # that are kept, if there are so many and they are rare
_ASSUMED = 10e9 / 8  # bytes a second of a link that has carried nothing large
_WRAPS = 1 << 32  # us


class NotRecorded(FusionError):
    """The trace lacks records that a prediction needs."""


class Gradient(NamedTuple):
    """A gradient is complete."""

    name: str


Event: TypeAlias = Action | Gradient


@dataclass(frozen=True)
class Tensor:
    """A tensor of a plan, with the bucket that it is in."""

    name: str
    nbytes: int
    bucket: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Tensors that are exchanged together. `travels`: bytes of it that are sent of its `nbytes`."""

    name: str
    nbytes: int
    travels: float


@dataclass(frozen=True)
class Steps:
    """Steps of a job, as its ranks took them.

    Attributes:
        numbers: of the steps that the programs have, in order.
        every: seconds of each step that was chosen, in order, the mean over ranks.
        programs: by rank, of each of `numbers`.
        seconds: mean time of `numbers`, over ranks, but for the first one, in which nothing is under way yet.
        waited: for how long of these seconds a step was kept waiting.
    """

    numbers: tuple[int, ...]
    every: tuple[float, ...]
    programs: tuple[tuple[tuple[Event, ...], ...], ...]
    seconds: float
    waited: float


@dataclass(frozen=True)
class Work:
    """The work of a daemon in a step (s).

    Attributes:
        used: processor time; None: not recorded.
        coding: time in which kernels encoded and decoded.
        stretched: how many times as long work takes as it would if there were always a processor.
    """

    used: float | None
    coding: float
    stretched: float


@dataclass(frozen=True)
class Recorded:
    """A recorded job.

    Attributes:
        buckets: that were submitted; tensors: of the plan, in its order, empty where it was not recorded.
        network: nodes and links.
        rate_known: large chunks said how fast links are.
        sent: payload bytes of a node in a step.
        problems: sentences about assumptions.
    """

    steps: Steps
    buckets: tuple[Bucket, ...]
    tensors: tuple[Tensor, ...]
    network: Network
    rate_known: bool
    work: Work
    sent: float
    problems: tuple[str, ...]


def understand(trace: JobTrace, chosen: StepRange = EVERY_STEP, most_actions: int = MOST_ACTIONS) -> Recorded:
    """Returns everything that a prediction needs.

    Args:
        most_actions: of all ranks together, that the model walks through for one prediction.

    Raises:
        NotRecorded: there are no whole steps of all ranks, or nothing was handed over in them.
    """
    steps = {rank: {s.number: s for s in steps_of(w) if s.number in chosen} for rank, w in trace.workers.items()}
    numbers = _common(steps)
    every = tuple(statistics.fmean(steps[rank][number].ns for rank in steps) / S for number in numbers)
    problems = []
    rare = _exchanging(trace, steps, numbers)
    if sum(rare) == 1:
        problems.append("one of these steps exchanges data, and how often that is cannot be told")
    numbers = tuple(numbers[place] for place in representative(every, _most_steps(trace, most_actions), rare))
    chosen_steps = {rank: [its[number] for number in numbers] for rank, its in sorted(steps.items())}
    operations_of = operations(trace)
    kept = _handed_over_in(operations_of, chosen_steps)
    nodes = sorted({trace.node_of[rank] for rank in trace.workers})
    titles = _titles(trace, operations_of, kept)
    chunks = operations_of.chunks.kept(kept[operations_of.chunks.of])
    buckets = _buckets(operations_of, titles, chunks, len(nodes))
    index = {bucket.name: number for number, bucket in enumerate(buckets)}
    programs = _programs(trace, operations_of, chosen_steps, titles, index)
    if not any(isinstance(event, HandOver) for program in programs for step in program for event in step):
        raise NotRecorded("no worker has handed anything to its daemon in these steps")
    later = slice(1 if len(numbers) > 1 else 0, None)
    timed = [step.ns / S for its in chosen_steps.values() for step in its[later]]
    waited = [each for rank, its in chosen_steps.items() for each in _waited(trace.workers[rank], its)[later]]
    network, unknown = _network(trace, operations_of, chunks, nodes)
    if unknown:
        problems.append(f"{unknown} sent and received nothing large: how fast links are cannot be told")
    sent = float(chunks.nbytes[chunks.sent != NEVER].sum()) / len(numbers) / len(nodes)
    return Recorded(
        steps=Steps(numbers, every, programs, statistics.fmean(timed), statistics.fmean(waited)),
        buckets=buckets,
        tensors=_tensors(trace, index),
        network=network,
        rate_known=not unknown,
        work=_work(trace, operations_of, kept, chosen_steps, nodes),
        sent=sent,
        problems=tuple(problems),
    )


def _common(steps: Mapping[int, Mapping[int, Step]]) -> tuple[int, ...]:
    """Returns the numbers of the steps that all ranks have whole."""
    if not steps or not all(steps.values()):
        missing = sorted(rank for rank, found in steps.items() if not found)
        whose = f"rank {missing[0]} has" if missing else "there are"
        raise NotRecorded(f"{whose} no whole training steps in this trace, so that there is nothing to predict from")
    numbers = tuple(sorted(set.intersection(*(set(found) for found in steps.values()))))
    if not numbers:
        raise NotRecorded("no step is whole on all ranks in this trace")
    return numbers


def _most_steps(trace: JobTrace, actions: int) -> int:
    """Returns how many steps have about so many actions."""
    workers = trace.workers.values()
    of_step = sum(len(worker.of(*_KINDS)) / max(1, len(worker.of(Kind.STEP_END))) for worker in workers)
    return max(LEAST_EXCHANGES, min(MOST_STEPS, round(actions / max(1.0, of_step))))


def representative(lengths: Sequence[float], most: int, exchanging: Sequence[bool] = ()) -> tuple[int, ...]:
    """Returns places of steps that stand for all, in order.

    Args:
        exchanging: of each step, whether it is one of few in which data is exchanged. There are as many of these among
            the chosen ones as among all, which are then more than `most` where they are rare.

    Steps are sorted by length and cut into as many groups of the same size; of each the step is taken that is nearest
    to its mean. So the chosen ones have the median, the mean and the spikes of all, wherever in the job they are: where
    steps drift, or every n-th is long, those in the middle, or at even distances, have not.
    """
    values = np.array(lengths)
    rare = np.flatnonzero(exchanging)
    quiet = np.setdiff1d(np.arange(len(values)), rare)
    some = min(len(rare), max(round(most * len(rare) / len(values)), LEAST_EXCHANGES)) if len(rare) else 0
    others = round(some * len(quiet) / len(rare)) if some else min(most, len(values))
    groups = [*np.array_split(_by_length(values, rare), some or 1), *np.array_split(_by_length(values, quiet), others)]
    return tuple(sorted(int(g[np.argmin(np.abs(values[g] - values[g].mean()))]) for g in groups if len(g)))


def _by_length(values: NDArray[np.float64], places: Ints) -> Ints:
    return places[np.argsort(values[places], kind="stable")]


def _exchanging(trace: JobTrace, steps: Mapping[int, Mapping[int, Step]], numbers: Sequence[int]) -> tuple[bool, ...]:
    """Says of each step whether ranks hand over data in it, where that is in less than half of the steps."""
    handed = np.zeros(len(numbers))
    for rank, its in steps.items():
        records = trace.workers[rank].of(Kind.SUBMITTED)
        place = np.searchsorted(np.array([its[number].end for number in numbers]), records["time"])
        begin = np.array([its[number].begin for number in numbers])
        inside = (place < len(numbers)) & (records["time"] >= begin[np.minimum(place, len(numbers) - 1)])
        np.add.at(handed, place[inside], records["value"][inside])
    found = handed > 0.1 * handed.max()
    return tuple(found.tolist()) if 2 * found.sum() < len(found) else ()


def _handed_over_in(every: Operations, steps: Mapping[int, Sequence[Step]]) -> NDArray[np.bool_]:
    """Says of each operation, by its number, whether some rank submitted it in one of the steps."""
    found = np.zeros(len(every), bool)
    for rank, time in every.submitted().items():
        begin, end = bounds_of(steps[rank])
        place = np.searchsorted(begin, time, "right") - 1
        found |= (place >= 0) & (time < end[np.maximum(place, 0)])
    return found


# --- programs ---------------------------------------------------------------------------------------------------------

_KINDS = (Kind.GRADIENT, Kind.SUBMITTED, Kind.WAIT_BEGIN, Kind.WAIT_END, Kind.DONE, Kind.APPLY_BEGIN)


def _titles(trace: JobTrace, every: Operations, kept: NDArray[np.bool_]) -> dict[int, str]:
    """Returns the bucket that each operation is called, by number: its name, and its size where operations of one name
    have several, as those of a process group have."""
    numbers = np.flatnonzero(kept).tolist()
    sizes: dict[int, set[int]] = {}
    for number in numbers:
        if not every.plan[number]:
            sizes.setdefault(int(every.name[number]), set()).add(int(every.nbytes[number]))
    found = {}
    for number in numbers:
        name = int(every.name[number])
        several = not every.plan[number] and len(sizes[name]) > 1
        found[number] = trace.names[name] + (f": {every.nbytes[number]} bytes" if several else "")
    return found


def _buckets(every: Operations, titles: Mapping[int, str], chunks: ChunkColumns, nodes: int) -> tuple[Bucket, ...]:
    """Returns the buckets, in order of their first hand-over."""
    sent = np.bincount(chunks.of[chunks.sent != NEVER], chunks.nbytes[chunks.sent != NEVER], len(every))
    of: dict[str, list[int]] = {}
    for number in every.order.tolist():
        if number in titles:
            of.setdefault(titles[number], []).append(number)
    whole = 2 * (nodes - 1)  # times as much is sent by all nodes as travels
    return tuple(
        Bucket(name, int(every.nbytes[its].max()), float(sent[its].sum()) / len(its) / whole if whole else 0.0)
        for name, its in of.items()
    )


def _programs(
    trace: JobTrace,
    every: Operations,
    steps: Mapping[int, Sequence[Step]],
    titles: Mapping[int, str],
    index: Mapping[str, int],
) -> tuple[tuple[tuple[Event, ...], ...], ...]:
    """Returns the activities of each rank in each step, of as many steps as there is room for."""
    named = {
        (int(every.name[number]), int(every.clock[number])): title
        for number, title in titles.items()
        if not every.plan[number]
    }
    return tuple(
        tuple(_program(_rows(trace, trace.workers[rank], step, named), step, index) for step in its)
        for rank, its in steps.items()
    )


def _program(rows: Iterable[tuple[int, int, str]], step: Step, index: Mapping[str, int]) -> tuple[Event, ...]:
    """Returns the activities of a worker in a step. Time in which it was kept waiting is left out."""
    events: list[Event] = []
    at, waiting = step.begin, 0
    for kind, time, name in rows:
        number = index.get(name)
        if kind == Kind.WAIT_END:
            if waiting:
                waiting -= 1
                at = time if not waiting else at
            continue
        if not waiting and time > at:
            events.append(Compute((time - at) / S))
            at = time
        if kind == Kind.GRADIENT:
            events.append(Gradient(name))
        elif number is None:
            waiting += kind == Kind.WAIT_BEGIN
        elif kind == Kind.SUBMITTED:
            events.append(HandOver(number))
        else:  # data that is read or applied has come, also where it had come before any wait
            waiting += kind == Kind.WAIT_BEGIN
            events.append(Wait(number))
    if not waiting and step.end > at:
        events.append(Compute((step.end - at) / S))
    return tuple(events)


def _rows(
    trace: JobTrace, worker: Process, step: Step, titles: Mapping[tuple[int, int], str]
) -> Iterable[tuple[int, int, str]]:
    times = worker.records["time"]
    low, high = np.searchsorted(times, [step.begin, step.end], "right")
    records = worker.records[low:high]
    records = records[np.isin(records["kind"], _KINDS)]
    for kind, time, name, clock in zip(*(records[f].tolist() for f in ("kind", "time", "name", "clock")), strict=True):
        yield kind, time, titles.get((name, clock), trace.names[name])


def _waited(worker: Process, steps: Sequence[Step]) -> list[float]:
    """Returns for how long each step was kept waiting (s)."""
    waits = union_of(*pair_columns(worker, Kind.WAIT_BEGIN, Kind.WAIT_END))
    found: list[float] = (waits.within(*bounds_of(steps)) / S).tolist()
    return found


def _tensors(trace: JobTrace, index: Mapping[str, int]) -> tuple[Tensor, ...]:
    """Returns the tensors of the latest plan, as one daemon has it."""
    for daemon in trace.daemons.values():
        records = daemon.of(Kind.MEMBER)
        if len(records):
            latest = records[records["plan"] == records["plan"][-1]]
            found = (
                Tensor(trace.names[name], nbytes, index.get(f"bucket {extra}", -1), _shape(trace.names[about], nbytes))
                for name, nbytes, extra, about in zip(
                    *(latest[f].tolist() for f in ("name", "value", "extra", "clock")), strict=True
                )
            )
            return tuple(dict.fromkeys(found))  # a plan is recorded anew from time to time
    return ()


def _shape(about: str, nbytes: int) -> tuple[int, ...]:
    """Returns the shape in a text such as `float32 [2, 3]`; of the bytes as float32 if it is of something else."""
    shape = tuple(int(size) for size in re.findall(r"\d+", about.partition("[")[2]))
    return shape if shape and 4 * math.prod(shape) == nbytes else (nbytes // 4,)


# --- links and work ---------------------------------------------------------------------------------------------------


def _network(trace: JobTrace, every: Operations, chunks: ChunkColumns, nodes: Sequence[int]) -> tuple[Network, str]:
    """Returns nodes and links, and the hosts of whose links no rate is known."""
    if not all(_speeds(chunks, node) for node in nodes):
        chunks = every.chunks  # of the whole job, such as those of the first parameters
    found = {node: _speeds(chunks, node) for node in nodes}
    unknown = [trace.host_of(node) for node, its in found.items() if not its] if len(nodes) > 1 else []
    known = [its for its in found.values() if its]
    rate = min((max(rate for rate, _ in its) for its in known), default=_ASSUMED)
    latency = statistics.median(min(latency for _, latency in its) for its in known) if known else CostModel().latency
    ranks = max(sum(trace.node_of[rank] == node for rank in trace.workers) for node in nodes)
    largest = int(chunks.nbytes.max(initial=4096))
    return Network(len(nodes), ranks, CostModel(latency, 1 / rate), largest), ", ".join(unknown)


def _speeds(chunks: ChunkColumns, node: int) -> list[tuple[float, float]]:
    """Returns the rates (B/s) at which a node sends and receives, and the latency (s) of the chunk that had
    the least: the others may have waited in a queue."""
    found = []
    for end in (chunks.source, chunks.target):
        its = chunks.kept((end == node) & (chunks.sent != NEVER) & (chunks.received != NEVER))
        its = its.kept(np.argsort(its.sent, kind="stable"))
        speed = link_speed(its.sent, its.received, its.nbytes)
        if speed is not None:
            took = (its.received - its.sent) / S - its.nbytes / speed[0]
            found.append((speed[0], max(float(took[its.nbytes >= LEAST_CHUNK].min()), 0.0)))
    return found


def _work(
    trace: JobTrace,
    every: Operations,
    kept: NDArray[np.bool_],
    steps: Mapping[int, Sequence[Step]],
    nodes: Sequence[int],
) -> Work:
    count = len(next(iter(steps.values())))
    coding = 0.0
    for rows in every.daemons.values():
        for name in ("encode", "decode"):
            of, begin, end = rows.spans(*KERNELS[name])
            its = kept[of]
            coding += float(covered_by_group(of[its], begin[its], end[its])[1].sum()) / S
    used = [_processor_time(trace, node, steps) for node in nodes]
    known = [each for each in used if each is not None]
    return Work(
        used=statistics.fmean(known) if len(known) == len(used) else None,
        coding=coding / len(nodes) / count,
        stretched=_stretched(trace, steps),
    )


def _processor_time(trace: JobTrace, node: int, steps: Mapping[int, Sequence[Step]]) -> float | None:
    """Returns the processor time that a node's daemon used in a step (s), or None if that was not recorded."""
    if node not in trace.daemons:
        return None
    begin, end = min(its[0].begin for its in steps.values()), max(its[-1].end for its in steps.values())
    count = max(its[-1].number - its[0].number + 1 for its in steps.values())
    records = trace.daemons[node].of(Kind.RUN_END)
    records = records[(records["time"] >= begin) & (records["time"] <= end) & (records["value"] > 0)]
    if len(records) < 2 or records["time"][-1] <= records["time"][0]:
        return None
    span = float(records["time"][-1] - records["time"][0]) / (end - begin)
    return max(float(records["value"][-1] - records["value"][0]), 0.0) / S / count / span


def _stretched(trace: JobTrace, steps: Mapping[int, Sequence[Step]]) -> float:
    """Returns by how many times scripts took longer than their processor time, since they waited for a processor."""
    used, waited = 0.0, 0.0
    for rank, its in steps.items():
        ends = trace.workers[rank].of(Kind.STEP_END)
        inside = np.isin(ends["clock"][1:], [step.number for step in its])
        used += float(np.diff(ends["value"])[inside].clip(0).sum()) / S
        waited += float(np.mod(np.diff(ends["extra"].astype(np.int64)), _WRAPS)[inside].sum()) / 1e6
    return 1 + waited / used if used > 0 else 1.0
