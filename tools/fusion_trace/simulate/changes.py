"""Replays a recorded job, as it was and with something else."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from fusion_rt import algorithms as chosen
from fusion_rt import codecs
from fusion_rt.core.errors import FusionError
from fusion_trace.simulate import measuring
from fusion_trace.simulate.daemons import SimulationError
from fusion_trace.simulate.model import FRAMED, Bucket, Cluster, CodecCosts, Costs, Link
from fusion_trace.simulate.programs import Action, Compute, Event, Gradient, Submit, Wait, around_steps
from fusion_trace.simulate.recorded import Recorded, Tensor
from fusion_trace.simulate.sharing import Machines
from fusion_trace.simulate.simulation import Job, Outcome

MOST_NODES = 256  # of a replay, in which every message is simulated
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


class WhatIfError(FusionError, ValueError):
    """A change cannot be simulated."""


@dataclass(frozen=True)
class Change:
    """A difference from what was recorded. `None`, or empty: as recorded.

    Attributes:
        bandwidth: of every link, bits of Ethernet frames a second, as links are sold.
        latency: of every link, one way (s).
        density: of topk; 1 stands for no compression.
        codec: its text, for others.
        fusion_threshold: bytes.
        nodes: how many; they do what the recorded ones did, in turn.
        algorithm: its text.
        no_straggler: every rank computes as long as the median rank.
    """

    bandwidth: float | None = None
    latency: float | None = None
    density: float | None = None
    codec: str = ""
    fusion_threshold: int | None = None
    nodes: int | None = None
    algorithm: str = ""
    no_straggler: bool = False


@dataclass(frozen=True)
class Prediction:
    """A predicted step: how long it takes, for how much of that the script is kept waiting (s), the bytes that a
    node sends, and the processor time of its daemon (s)."""

    step: float
    exposed: float
    sent: float
    worked: float = 0.0


def parse_bandwidth(text: str) -> float:
    """Reads bits a second: "100mbit", "2.5gbit", "1e9bit". A number alone is refused: nobody means 5 bit/s by "5".

    Raises:
        WhatIfError: it is something else.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmg]?)(?:bit(?:/s)?|bps)", text.strip().lower())
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:
        raise WhatIfError(f"--bandwidth {text!r} is not a rate with its unit, such as 5mbit, 100mbit or 2.5gbit")
    return value


def replay(recorded: Recorded, change: Change, measure: Callable[[str], CodecCosts] | None = None) -> Prediction:
    """Simulates the recorded job with a change.

    Args:
        measure: what a codec costs that the job did not use; by default it is measured here.

    Raises:
        WhatIfError, AlgorithmError, CodecError: this cannot be.
    """
    nodes = recorded.nodes if change.nodes is None else change.nodes
    if not 1 <= nodes <= MOST_NODES:
        raise WhatIfError(
            f"--nodes {nodes} cannot be replayed: 1 to {MOST_NODES} can; see `python -m benchmarks.scale`"
        )
    programs, buckets = recorded.programs, recorded.buckets
    if change.no_straggler:
        programs = _without_stragglers(programs)
    if change.fusion_threshold is not None:
        programs, buckets = _fused(recorded, programs, change.fusion_threshold)
    plain = [[_plain(step) for step in program] for program in programs]
    ranks = nodes * recorded.workers
    codec, costs = _codec(recorded, change, measure or measuring.codec_costs)
    algorithm = change.algorithm or "allreduce"
    spec = chosen.parse(algorithm)
    spec.check(ranks)
    alike = _alike(plain)
    shifted = [_taken_in_turn(plain, rank, alike) for rank in range(ranks)]
    adapted = [_for_algorithm(program, len(buckets), spec) for program in shifted]
    its = on_links(recorded, change).links
    links = tuple(its[node % recorded.nodes] for node in range(nodes))
    machines, processors = _machines(recorded.machines, nodes)
    cluster = Cluster(
        links, recorded.workers, costs, max(recorded.chunk_bytes, 4096), machines=machines, processors=processors
    )
    try:
        outcome = Job(cluster, adapted, buckets, algorithm, codec).run()
    except SimulationError as error:
        raise WhatIfError(f"the recording cannot be replayed so: {error}") from None
    return _prediction(outcome, len(recorded.numbers), nodes)


def _prediction(outcome: Outcome, steps: int, nodes: int) -> Prediction:
    skip = 1 if steps > 1 else 0  # in the first, nothing is under way yet
    sent = sum(traffic.sent for traffic in outcome.traffic) / nodes / steps
    return Prediction(
        outcome.step_seconds(skip), outcome.waited_seconds(skip), sent, sum(outcome.worked) / nodes / steps
    )


def _machines(recorded: Machines | None, nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the machines of so many nodes, and their processors: on the same ones, where several nodes shared one, or
    each on its own."""
    if recorded is None:
        return (), ()
    of, processors = recorded.of, recorded.processors
    if len(processors) == len(of):
        return tuple(range(nodes)), tuple(processors[node % len(of)] for node in range(nodes))
    return tuple(of[node % len(of)] for node in range(nodes)), processors


# --- programs ---------------------------------------------------------------------------------------------------------


def _plain(step: Sequence[Event]) -> list[Action]:
    return [event for event in step if not isinstance(event, Gradient)]


def _alike(plain: list[list[list[Action]]]) -> list[list[int]]:
    """Returns the places of steps in which every rank hands over the same, and that may stand for each other.

    Others may not: a tensor that is reduced once, or in every n-th step, would be handed over by some ranks in one step
    and by the others in another, and all would wait forever.
    """
    found: dict[tuple[frozenset[int], ...], list[int]] = {}
    for place in range(len(plain[0])):
        handed = tuple(frozenset(a.bucket for a in program[place] if isinstance(a, Submit)) for program in plain)
        found.setdefault(handed, []).append(place)
    return list(found.values())


def _taken_in_turn(plain: list[list[list[Action]]], rank: int, alike: list[list[int]]) -> list[list[Action]]:
    """Returns the program of a rank: that of the recorded one whose turn it is, each time round with other ones of the
    steps that are alike."""
    program, offset = plain[rank % len(plain)], rank // len(plain)
    found = list(program)
    for places in alike:
        for turn, place in enumerate(places):
            found[place] = program[places[(turn + offset) % len(places)]]
    return found


def _without_stragglers(programs: Sequence[Sequence[Sequence[Event]]]) -> tuple[tuple[tuple[Event, ...], ...], ...]:
    """Makes all ranks compute as long as the median rank in each step, each of them stretched or shortened evenly."""
    found: list[list[tuple[Event, ...]]] = [[] for _ in programs]
    for number in range(len(programs[0])):
        computed = [sum(e.seconds for e in program[number] if isinstance(e, Compute)) for program in programs]
        middle = statistics.median(computed)
        for rank, program in enumerate(programs):
            factor = middle / computed[rank] if computed[rank] else 1.0
            found[rank].append(
                tuple(
                    Compute(e.seconds * factor, e.used * factor) if isinstance(e, Compute) else e
                    for e in program[number]
                )
            )
    return tuple(tuple(steps) for steps in found)


def _fused(
    recorded: Recorded, programs: Sequence[Sequence[Sequence[Event]]], threshold: int
) -> tuple[tuple[tuple[tuple[Event, ...], ...], ...], tuple[Bucket, ...]]:
    """Puts the same gradients into other buckets: each is submitted when its last gradient is complete, and waited for
    where the bucket was that had its last tensor."""
    tensors = [tensor for tensor in recorded.tensors if tensor.bucket >= 0]
    if not tensors:
        raise WhatIfError("--fusion-threshold: the trace has no plan (it may have been overwritten)")
    groups = _groups(tensors, threshold)
    others = [i for i in range(len(recorded.buckets)) if i not in {t.bucket for t in tensors}]
    number_of = {old: new for new, old in enumerate(others, len(groups))}
    buckets = [Bucket(max(4, sum(t.nbytes for t in group) // 4 * 4), tuple(t.shape for t in group)) for group in groups]
    buckets += [recorded.buckets[old] for old in others]
    of = {tensor.name: index for index, group in enumerate(groups) for tensor in group}
    after: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        after.setdefault(group[-1].bucket, []).append(index)
    return tuple(
        tuple(_refused(step, groups, of, number_of, after) for step in program) for program in programs
    ), tuple(buckets)


def _groups(tensors: Sequence[Tensor], threshold: int) -> list[list[Tensor]]:
    """Fuses tensors of one dtype as `fusiond.control.planning` does."""
    groups: list[list[Tensor]] = []
    for tensor in tensors:
        if groups and sum(t.nbytes for t in groups[-1]) + tensor.nbytes <= threshold:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return groups


def _refused(
    step: Sequence[Event],
    groups: Sequence[Sequence[Tensor]],
    of: dict[str, int],
    number_of: dict[int, int],
    after: dict[int, list[int]],
) -> tuple[Event, ...]:
    missing = [len(group) for group in groups]
    events: list[Event] = []
    for event in step:
        if isinstance(event, Gradient) and event.name in of:
            index = of[event.name]
            missing[index] -= 1
            if not missing[index]:
                events.append(Submit(index))
        elif isinstance(event, Submit | Wait) and event.bucket in number_of:
            events.append(type(event)(number_of[event.bucket]))
        elif isinstance(event, Wait):
            late = [index for index in after.get(event.bucket, []) if missing[index] > 0]
            for index in late:  # a parameter without gradient: its bucket leaves when it is wanted
                missing[index] = 0
                events.append(Submit(index))
            events.extend(Wait(index) for index in after.get(event.bucket, []))
        elif not isinstance(event, Submit):
            events.append(event)
    return tuple(events)


def _for_algorithm(program: list[list[Action]], buckets: int, spec: chosen.Algorithm) -> list[list[Action]]:
    """Returns what a worker does with an algorithm, given what it did with all-reduce."""
    if spec.signal is chosen.Signal.GRADIENT:
        return program
    computed = (sum(action.seconds for action in step if isinstance(action, Compute)) for step in program)
    return around_steps(computed, buckets, spec)


# --- links and codecs -------------------------------------------------------------------------------------------------


def on_links(recorded: Recorded, change: Change) -> Recorded:
    """Returns the recording on the links that the change says, if it says any."""
    return replace(recorded, links=tuple(_link(link, change) for link in recorded.links))


def _link(link: Link, change: Change) -> Link:
    bandwidth = link.bandwidth if change.bandwidth is None else change.bandwidth / 8 / FRAMED
    return replace(link, bandwidth=bandwidth, latency=link.latency if change.latency is None else change.latency)


def _codec(recorded: Recorded, change: Change, measure: Callable[[str], CodecCosts]) -> tuple[str, Costs]:
    if change.density is not None and change.codec:
        raise WhatIfError("--density and --codec are both about the codec: give one of them")
    text = change.codec
    if change.density is not None:
        if not 0 < change.density <= 1:
            raise WhatIfError(f"--density {change.density} is not above 0 and at most 1")
        text = "dense" if change.density == 1 else f"topk(density={change.density:g})"
    if not text:
        return recorded.codec, recorded.costs
    codec = codecs.parse(text)
    text = str(codec)
    if codec.lossless:
        return text, recorded.costs
    found = measure(text)
    return text, msgspec.structs.replace(recorded.costs, codecs={**recorded.costs.codecs, text: found})
