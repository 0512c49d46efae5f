"""Makes a recorded job into a simulated one: what its workers did, what its messages cost, and what its links are like.

* A worker's program: in each of its steps, what it computed between the events that were recorded, what it submitted,
  and what it waited for; the waits themselves are left out, since they are what the simulation is about.
* Links: see `links`.
* Costs: the time of kernels for each chunk, as a part for the chunk and one for each byte; the way to the daemon and
  back. What was not recorded is taken from `Costs`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fusion_rt.core.errors import FusionError
from fusion_rt.tracing.format import NOBODY, Kind
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.chunks import Chunk
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operation_index import Ints
from fusion_trace.read.operations import Operation, Operations, Step, bounds_of, operations, steps_of
from fusion_trace.read.span_columns import pair_columns, union_of
from fusion_trace.simulate.links import links_of
from fusion_trace.simulate.model import Bucket, CodecCosts, Costs, Link
from fusion_trace.simulate.programs import Compute, Event, Gradient, Submit, Wait
from fusion_trace.simulate.sharing import Machines, machines_of, used_in, without_waits

S = 1e9  # ns
MOST_STEPS = 60  # that are replayed: the simulator handles every message of each
LEAST_EXCHANGES = 4  # that are replayed, if there are so many and they are rare
_UNDISTURBED = 0.1  # quantile of what takes a little longer than without waiting for a processor
_MOST_OPERATIONS = 20_000  # of a job, in which links are looked for where the chosen steps sent nothing large


class NotRecorded(FusionError):
    """The trace lacks what a simulation needs."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a plan, with the bucket that it is in."""

    name: str
    nbytes: int
    bucket: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Recorded:
    """The simulated counterpart of a recorded job.

    Attributes:
        nodes: those that have workers; workers: on each of them.
        numbers: of the steps that are replayed, in order; all ranks have them.
        every: seconds of each step that was chosen, in order, the mean over ranks.
        programs: by rank, of each of these steps.
        measured: by rank, what each of these steps took (s); `waited`: for how long it was kept waiting (s).
        names, buckets: what was submitted.
        tensors: of the plan, in its order; empty where it was not recorded.
        links: by node.
        bursty: by node, the same links if they let bursts pass; None if nothing speaks for that.
        assumed: hosts of whose links no rate is known.
        costs: of the daemons.
        codec: a text that stands for what buckets were encoded with; its costs are in `costs`.
        chunk_bytes: the largest payload.
        sent: payload bytes of all nodes in a step.
        machines: whose processors the job's processes share; then programs and costs are without waiting for one. None:
            each has one, or it is not known.
        problems: sentences.
    """

    nodes: int
    workers: int
    numbers: tuple[int, ...]
    every: tuple[float, ...]
    programs: tuple[tuple[tuple[Event, ...], ...], ...]
    measured: tuple[tuple[float, ...], ...]
    waited: tuple[tuple[float, ...], ...]
    names: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    tensors: tuple[Tensor, ...]
    links: tuple[Link, ...]
    bursty: tuple[Link, ...] | None
    assumed: tuple[str, ...]
    costs: Costs
    codec: str
    chunk_bytes: int
    sent: float
    machines: Machines | None
    problems: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """Mean time of the steps that are replayed, over ranks (s); but for the first, in whose replay nothing is under
        way yet."""
        return statistics.fmean(seconds for rank in self.measured for seconds in rank[len(rank) > 1 :])

    @property
    def whole_seconds(self) -> float:
        """Mean time of all steps that were chosen, over ranks (s)."""
        return statistics.fmean(self.every)

    @property
    def waited_seconds(self) -> float:
        """Mean time for which a step was kept waiting, as `step_seconds`."""
        return statistics.fmean(seconds for rank in self.waited for seconds in rank[len(rank) > 1 :])


def understand(trace: JobTrace, chosen: StepRange = EVERY_STEP, defaults: Costs | None = None) -> Recorded:
    """Returns everything that a simulation of the recorded job needs.

    Raises:
        NotRecorded: it has no whole steps of all ranks, or its nodes have different numbers of workers.
    """
    defaults = defaults or Costs()
    steps = {rank: {s.number: s for s in steps_of(w) if s.number in chosen} for rank, w in trace.workers.items()}
    if not steps or not all(steps.values()):
        missing = sorted(rank for rank, found in steps.items() if not found)
        whose = f"rank {missing[0]} has" if missing else "there are"
        raise NotRecorded(f"{whose} no whole training steps in this trace, so that there is nothing to replay")
    numbers = tuple(sorted(set.intersection(*(set(found) for found in steps.values()))))
    problems: list[str] = []
    if not numbers:
        raise NotRecorded("the ranks have no training step in common in this trace")
    chosen_steps = [[its[number] for number in numbers] for its in steps.values()]
    every_step = tuple(statistics.fmean(its[number].ns for its in steps.values()) / S for number in numbers)
    exchanging = _exchanging(trace, steps, numbers)
    if len(numbers) > MOST_STEPS:
        places = representative(every_step, MOST_STEPS, exchanging)
        problems.append(
            f"of {len(numbers)} steps {len(places)} are replayed, which stand for long and short ones alike"
        )
        numbers = tuple(numbers[place] for place in places)
    nodes = sorted(set(trace.node_of.values()))
    sizes = Counter(trace.node_of.values())
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{sizes[node]} on {trace.host_of(node)}" for node in nodes)
        raise NotRecorded(f"nodes have different numbers of workers ({told}), which the simulation has not")
    every = operations(trace)
    found = [op for _, op in every.some(_handed_over_in(every, steps, numbers))]
    titles = _titles(found)
    nbytes: dict[str, int] = {}
    for op in found:
        title = titles.get((op.key.name, op.key.clock), op.key.name)
        nbytes[title] = max(nbytes.get(title, 0), op.nbytes)
    names = tuple(nbytes)
    index = {name: number for number, name in enumerate(names)}
    tensors = _tensors(trace, index)
    buckets = tuple(
        Bucket(max(4, -(-nbytes[name] // 4) * 4), tuple(tensor.shape for tensor in tensors if tensor.bucket == number))
        for number, name in enumerate(names)
    )
    ranks = sorted(trace.workers)
    programs = tuple(
        tuple(_program(trace, trace.workers[rank], steps[rank][number], index, titles) for number in numbers)
        for rank in ranks
    )
    machines = machines_of(trace, nodes, chosen_steps)
    if machines is not None:
        programs = tuple(
            tuple(without_waits(step, *used[number]) for number, step in zip(numbers, program, strict=True))
            for program, used in zip(programs, (used_in(trace.workers[rank]) for rank in ranks), strict=True)
        )
    if not any(isinstance(event, Submit) for program in programs for step in program for event in step):
        raise NotRecorded("no worker has handed anything to its daemon in these steps")
    chunks = [chunk for op in found for chunk in op.chunks]
    links, bursty, unknown = links_of(chunks, nodes, lambda: _all_chunks(every))
    assumed = tuple(trace.host_of(node) for node in unknown)
    if len(nodes) > 1:
        problems += (
            f"{host} has sent and received nothing large: how fast its link is cannot be told, and 10 Gbit/s are "
            "assumed"
            for host in assumed
        )
    costs = _costs(found, trace, defaults, problems, 0.5 if machines is None else _UNDISTURBED)
    sent = float(sum(chunk.nbytes for chunk in chunks if chunk.sent is not None)) / len(numbers)
    handed = sum(op.nbytes for op in found) / len(numbers)
    codec, costs = _codec(found, sent, handed, len(nodes), costs)
    return Recorded(
        nodes=len(nodes),
        workers=sizes[nodes[0]],
        numbers=numbers,
        every=every_step,
        programs=programs,
        measured=tuple(tuple(steps[rank][number].ns / S for number in numbers) for rank in ranks),
        waited=tuple(_waited(trace.workers[rank], [steps[rank][number] for number in numbers]) for rank in ranks),
        names=names,
        buckets=buckets,
        tensors=tensors,
        links=links,
        bursty=bursty,
        assumed=assumed,
        costs=costs,
        codec=codec,
        chunk_bytes=max((chunk.nbytes for chunk in chunks), default=2 << 20),
        sent=sent,
        machines=machines,
        problems=tuple(problems),
    )


def representative(lengths: Sequence[float], most: int, exchanging: Sequence[bool] = ()) -> tuple[int, ...]:
    """Returns places of steps that stand for all, in order.

    Args:
        exchanging: of each step, whether it is one of few in which data is exchanged. There are as many of these among
            the chosen ones as among all, which are then more than `most` where they are rare: others take no messages.

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
    """Says of each step whether ranks hand over data in it, where that is in less than half of the steps.

    Raises:
        NotRecorded: it is in one step, of which nobody can say how often it comes.
    """
    handed = np.zeros(len(numbers))
    for rank, its in steps.items():
        records = trace.workers[rank].of(Kind.SUBMITTED)
        place = np.searchsorted(np.array([its[number].end for number in numbers]), records["time"])
        begin = np.array([its[number].begin for number in numbers])
        inside = (place < len(numbers)) & (records["time"] >= begin[np.minimum(place, len(numbers) - 1)])
        np.add.at(handed, place[inside], records["value"][inside])
    found = handed > 0.1 * handed.max()
    if 2 * found.sum() >= len(found):
        return ()
    if found.sum() < 2:
        raise NotRecorded(
            f"of {len(numbers)} steps one exchanges data: how often that is cannot be told; a longer recording, or "
            "more --steps, would tell"
        )
    return tuple(found.tolist())


def _handed_over_in(
    every: Operations, steps: Mapping[int, Mapping[int, Step]], numbers: Sequence[int]
) -> NDArray[np.bool_]:
    """Says of each operation, by its number in the index, whether some rank submitted it in one of the steps."""
    found = np.zeros(len(every), bool)
    for rank, time in every.index.submitted().items():
        begin = np.array([steps[rank][number].begin for number in numbers])
        end = np.array([steps[rank][number].end for number in numbers])
        place = np.searchsorted(begin, time, "right") - 1
        found |= (place >= 0) & (time < end[np.maximum(place, 0)])
    return found


def _all_chunks(every: Operations) -> list[Chunk]:
    """Returns the chunks of the whole job, such as those of the first parameters, or of as much as can be looked at."""
    chosen = np.zeros(len(every), bool)
    chosen[:_MOST_OPERATIONS] = True
    return [chunk for _, op in every.some(chosen) for chunk in op.chunks]


# --- programs ---------------------------------------------------------------------------------------------------------

_KINDS = (Kind.GRADIENT, Kind.SUBMITTED, Kind.WAIT_BEGIN, Kind.WAIT_END, Kind.DONE, Kind.APPLY_BEGIN)


def _titles(found: Sequence[Operation]) -> dict[tuple[str, int], str]:
    """Returns, by name and clock, what operations are called whose name does not tell their size: all of a process
    group have one."""
    sizes: dict[str, set[int]] = {}
    alone = [op for op in found if not op.key.plan]
    for op in alone:
        sizes.setdefault(op.key.name, set()).add(op.nbytes)
    return {
        (op.key.name, op.key.clock): f"{op.key.name}: {op.nbytes} bytes" for op in alone if len(sizes[op.key.name]) > 1
    }


def _program(
    trace: JobTrace, worker: Process, step: Step, index: Mapping[str, int], titles: Mapping[tuple[str, int], str]
) -> tuple[Event, ...]:
    """Returns what a worker did in a step. Time in which it was kept waiting is left out."""
    events: list[Event] = []
    pending: dict[int, None] = {}  # submitted, and not known to have been waited for
    at, waiting = step.begin, 0
    for kind, time, name in _rows(trace, worker, step, titles):
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
            events.append(Submit(number))
            pending[number] = None
        else:  # what is read or applied has come, also where it had come before anybody waited
            waiting += kind == Kind.WAIT_BEGIN
            events.append(Wait(number))
            pending.pop(number, None)
    if not waiting and step.end > at:
        events.append(Compute((step.end - at) / S))
    return tuple(events)


def _rows(
    trace: JobTrace, worker: Process, step: Step, titles: Mapping[tuple[str, int], str]
) -> Iterable[tuple[int, int, str]]:
    times = worker.records["time"]
    low, high = np.searchsorted(times, [step.begin, step.end], "right")
    records = worker.records[low:high]
    records = records[np.isin(records["kind"], _KINDS)]
    for kind, time, name, clock in zip(*(records[f].tolist() for f in ("kind", "time", "name", "clock")), strict=True):
        yield kind, time, titles.get((trace.names[name], clock), trace.names[name])


def _waited(worker: Process, steps: Sequence[Step]) -> tuple[float, ...]:
    """Returns for how long each step was kept waiting (s)."""
    waits = union_of(*pair_columns(worker, Kind.WAIT_BEGIN, Kind.WAIT_END))
    return tuple((waits.within(*bounds_of(steps)) / S).tolist())


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


# --- costs ------------------------------------------------------------------------------------------------------------


def _costs(found: Sequence[Operation], trace: JobTrace, defaults: Costs, problems: list[str], share: float) -> Costs:
    """Returns the costs as recorded; what a link carries has ZeroMQ's work in it.

    Args:
        share: the quantile of what was recorded of each.
    """
    there = [
        (part.ready[rank] - worker.submitted) / S
        for op in found
        for rank, worker in op.workers.items()
        if (part := op.daemons.get(trace.node_of[rank])) and worker.submitted is not None and rank in part.ready
    ]
    back = [
        (worker.done - part.answered[rank]) / S
        for op in found
        for rank, worker in op.workers.items()
        if (part := op.daemons.get(trace.node_of[rank])) and worker.done is not None and rank in part.answered
    ]
    local = float(np.quantile(there, share) + np.quantile(back, share)) if there and back else defaults.local
    receive, byte = _chunk_costs(trace, share)
    if receive is None:
        problems.append("no kernels were recorded: their costs are assumed")
        return replace(defaults, local=max(local, 0.0), io_send=0.0, io_receive=0.0)
    return replace(
        defaults, local=max(local, 0.0), receive=receive, reduce=byte, copy=byte, io_send=0.0, io_receive=0.0
    )


def _chunk_costs(trace: JobTrace, share: float) -> tuple[float | None, float]:
    """Returns the seconds for a chunk, and for each of its bytes, that daemons take for what has come."""
    sizes, times = [], []
    for daemon in trace.daemons.values():
        records = daemon.of(Kind.REDUCE_BEGIN, Kind.REDUCE_END)
        of_peers = records[records["peer"] != NOBODY]
        records = of_peers if len(of_peers) else records  # what is done for chunks, if it can be told
        records = records[np.lexsort((records["clock"], records["name"]))]
        begins, ends = records[:-1], records[1:]
        follows = (begins["kind"] == Kind.REDUCE_BEGIN) & (ends["kind"] == Kind.REDUCE_END)
        follows &= (begins["name"] == ends["name"]) & (begins["clock"] == ends["clock"])
        sizes.append(begins["value"][follows])
        times.append((ends["time"] - begins["time"])[follows] / S)
    nbytes, took = (np.concatenate(each or [np.zeros(0)]) for each in (sizes, times))
    if not len(nbytes):
        return None, 0.0
    medians = {int(each): float(np.quantile(took[nbytes == each], share)) for each in (nbytes.min(), nbytes.max())}
    largest, smallest = max(medians), min(medians)
    if largest < 2 * smallest + 1024:  # all of one size
        return medians[largest] / 2, medians[largest] / 2 / max(largest, 1)
    byte = max((medians[largest] - medians[smallest]) / (largest - smallest), 0.0)
    return max(medians[largest] - byte * largest, 0.0), byte


def _codec(found: Sequence[Operation], sent: float, nbytes: float, nodes: int, costs: Costs) -> tuple[str, Costs]:
    """Returns what buckets were encoded with, from how much was sent of them, and what that took."""
    whole = 2 * (nodes - 1) * nbytes
    share = sent / whole if whole else 1.0
    if nodes == 1 or share > 0.8:
        return "dense", costs
    seconds = [span.ns / S for op in found for part in op.daemons.values() for span in part.kernels["encode"]]
    runs = sum(len(op.daemons) for op in found)
    per_step = sum(op.nbytes * len(op.daemons) for op in found)
    contribute = sum(seconds) / per_step if seconds and runs else 0.0
    if 0.45 < share < 0.55:  # nobody selects half of all elements
        return "fp16", replace(costs, codecs={**costs.codecs, "fp16": CodecCosts(0.5, contribute=contribute)})
    text = f"topk(density={min(max(share, 1e-4), 1.0):.4g}, minimum=0)"  # what small tensors take is in the share
    # What daemons did with chunks was the codec's work, most of it with a few of them, and not a sum of dense values.
    came = sum(chunk.nbytes for op in found for chunk in op.chunks if chunk.received is not None)
    work = sum(span.ns / S for op in found for part in op.daemons.values() for span in part.kernels["reduce"])
    coding = CodecCosts(share, contribute=contribute, unpack=work / came if came else 0.0)
    defaults = Costs()
    return text, replace(costs, reduce=defaults.reduce, copy=defaults.copy, codecs={**costs.codecs, text: coding})
