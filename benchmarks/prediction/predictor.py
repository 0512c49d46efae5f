"""Predicts the time and traffic of a step, of so many nodes, with any algorithm and codec.

Up to `SIMULATED` nodes (with homes: `SIMULATED_HOMES`) every node is simulated, message by message. Beyond that:

* In an all-reduce all nodes do the same, so that one of them is simulated and stands for all (`exchanges.Alike`); it
  computes as long as the slowest of them, for which all wait. Numbers of nodes are rounded up to a power of two, since
  recursive doubling treats nodes differently in others.
* With homes: as among fewer nodes, and what the busiest home's network card, event loop or pool needs for all
  contributions of a step. Where nobody waits for all, a step takes at least that (the usual bound of a closed queueing
  network); where all are waited for, contributions first come in and answers then go out, and a step takes by twice so
  much longer as the busiest home needs more; where ranks wait for their neighbours, once, since both go on at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion_rt import algorithms as chosen
from fusion_rt.core import mixing
from fusion_trace.simulate.ghost_codecs import wire_nbytes
from fusion_trace.simulate.model import Bucket, Cluster, Costs, Link, equal
from fusion_trace.simulate.programs import Action, Compute, Submit, Wait, around_steps
from fusion_trace.simulate.simulation import Job, place

SIMULATED, SIMULATED_HOMES = 16, 32
_STEPS = 3
_TENSORS = 50
_THRESHOLD = 64 << 20
_FORWARD = 1 / 3  # of a step's computing


@dataclass(frozen=True)
class Case:
    """A step to be predicted.

    Attributes:
        algorithm, codec: their texts.
        compute: seconds a step; `jitter`: its relative deviation between ranks and steps.
        parameters: of the model, in 50 equal matrices.
    """

    algorithm: str
    codec: str
    nodes: int
    compute: float
    jitter: float = 0.02
    parameters: int = 25_600_000


_Found = tuple[float, float, float, str]
_Find = Callable[[Case, chosen.Algorithm], _Found]


class Predictor:
    """Predicts steps of nodes with such links and costs. Simulates nothing twice."""

    def __init__(self, link: Link, costs: Costs) -> None:
        self._link, self._costs = link, costs
        self._known: dict[Case, _Found] = {}

    def __call__(self, case: Case) -> dict[str, Any] | None:
        """Predicts a step.

        Returns:
            Its seconds, for how long it is kept waiting, bytes and messages that a node sends in it, and how that was
            found out; None if so many nodes cannot do this.
        """
        spec = chosen.parse(case.algorithm)
        try:
            spec.check(min(case.nodes, mixing.MAX_RANKS))
        except chosen.AlgorithmError:
            return None
        every = spec if spec.period == 1 else replace(spec, steps=1)  # type: ignore[call-arg]
        one = replace(case, algorithm=str(every))  # one exchange in each step
        most, beyond = SIMULATED_HOMES, self._bound
        if not spec.at_homes:
            most, beyond = SIMULATED, self._one_for_all
        seconds, sent, messages, how = self._found(self._each if case.nodes <= most else beyond, one, every)
        waited = max(seconds - case.compute, 0.0) / spec.period
        return {"seconds": case.compute + waited, "waited": waited, "sent": sent / spec.period,
                "messages": messages / spec.period, "how": how}  # fmt: skip

    def _cluster(self, nodes: int) -> Cluster:
        return equal(nodes, self._link, costs=self._costs)

    def _found(self, find: _Find, case: Case, spec: chosen.Algorithm) -> _Found:
        if case not in self._known:
            self._known[case] = find(case, spec)
        return self._known[case]

    def _each(self, case: Case, spec: chosen.Algorithm) -> _Found:
        buckets = buckets_of(case, spec)
        programs = [program(spec, buckets, computing(case, rank)) for rank in range(case.nodes)]
        outcome = Job(self._cluster(case.nodes), programs, buckets, str(spec), case.codec).run()
        most = max(outcome.traffic, key=lambda traffic: traffic.sent)
        return outcome.step_seconds(), most.sent / _STEPS, most.sent_messages / _STEPS, "simulated"

    def _one_for_all(self, case: Case, spec: chosen.Algorithm) -> _Found:
        nodes = 1 << (case.nodes - 1).bit_length()
        segment = 4 * nodes  # bytes; buckets are cut into segments of equal length
        buckets = [replace(each, nbytes=-(-each.nbytes // segment) * segment) for each in buckets_of(case, spec)]
        slowest = [max(step) for step in zip(*(computing(case, rank) for rank in range(nodes)), strict=True)]
        programs = [program(spec, buckets, slowest)]
        outcome = Job(self._cluster(nodes), programs, buckets, str(spec), case.codec, alike=True).run()
        sent = outcome.traffic[0]
        return outcome.step_seconds(), sent.sent / _STEPS, sent.sent_messages / _STEPS, "one for all"

    def _bound(self, case: Case, spec: chosen.Algorithm) -> _Found:
        few = replace(case, nodes=SIMULATED_HOMES)
        seconds, sent, messages, _ = self._found(self._each, few, spec)
        before, _ = _busiest(few, self._cluster(few.nodes), spec)
        busiest, home_sends = _busiest(case, self._cluster(case.nodes), spec)
        how = f"as {few.nodes} nodes, and the busiest home"
        if spec.place is chosen.Place.REPLICA:
            more = heard(spec, case.nodes) / heard(spec, few.nodes)
            waits = seconds > case.compute * (1 + 3 * case.jitter)
            seconds = seconds + busiest - before if waits else max(seconds, busiest)
            return seconds, sent * more, messages * more, how
        if spec.lockstep:
            seconds += 2 * max(busiest - before, 0.0)
        own = sum(wire_nbytes(case.codec, bucket, self._costs) for bucket in buckets_of(case, spec))
        return max(seconds, busiest), own + home_sends, messages, how


def heard(spec: chosen.Algorithm, nodes: int) -> int:
    """Returns from how many other ranks a home hears in a step, with a rank on each node; the most at any clock."""
    if spec.at_shards:
        return nodes - 1
    topology: str = getattr(spec, "topology")  # noqa: B009  # all gossip has one
    if nodes <= mixing.MAX_RANKS:
        graph = mixing.parse(topology, nodes)
    else:
        graph = mixing.Mixing(topology, nodes, *mixing.GRAPHS[topology](nodes))
    return max(len(graph.incoming(rank, clock)) for rank in range(nodes) for clock in range(graph.period))


def buckets_of(case: Case, spec: chosen.Algorithm) -> list[Bucket]:
    """Returns the buckets of a plan: with shards, small enough that each node has its share."""
    elements = max(case.parameters // _TENSORS, 1)
    rows = max(int(elements**0.5), 1)
    shape = (rows, elements // rows)
    tensor = 4 * rows * (elements // rows)
    threshold = _THRESHOLD
    if spec.at_shards:
        threshold = min(threshold, -(-tensor * _TENSORS // case.nodes))
    together = max(1, threshold // tensor)
    return [
        Bucket(tensor * min(together, _TENSORS - first), (shape,) * min(together, _TENSORS - first))
        for first in range(0, _TENSORS, together)
    ]


def computing(case: Case, rank: int) -> list[float]:
    """Returns the seconds for which a rank computes in each step."""
    dice = random.Random(rank)
    return [case.compute * max(dice.gauss(1.0, case.jitter), 0.1) for _ in range(_STEPS)]


def program(spec: chosen.Algorithm, buckets: Sequence[Bucket], steps: Iterable[float]) -> list[list[Action]]:
    """Returns the program of a rank that computes for so many seconds in each of its steps."""
    if spec.signal is not chosen.Signal.GRADIENT:
        return around_steps(steps, len(buckets), spec)
    found: list[list[Action]] = []
    total = sum(bucket.nbytes for bucket in buckets)
    for compute in steps:
        step: list[Action] = [Compute(compute * _FORWARD)]
        for index, bucket in enumerate(buckets):
            step += [Compute(compute * (1 - _FORWARD) * bucket.nbytes / total), Submit(index)]
        found.append([*step, *(Wait(index) for index in range(len(buckets)))])
    return found


def _busiest(case: Case, cluster: Cluster, spec: chosen.Algorithm) -> tuple[float, float]:
    """Returns what the busiest part of the busiest node's homes has to do for all contributions of a step (s), and the
    bytes that these homes send."""
    buckets, costs = buckets_of(case, spec), cluster.costs
    coding = costs.codec(case.codec)
    work: dict[int, list[float]] = {}
    shards = spec.at_shards
    nodes = place(buckets, case.nodes) if shards else [0] * len(buckets)  # each node has all of its rank's replicas
    for bucket, node in zip(buckets, nodes, strict=True):
        wire = wire_nbytes(case.codec, bucket, costs)
        each = bucket.nbytes * (coding.contribute + costs.apply + 2 * costs.copy) + wire * (coding.pack + coding.unpack)
        row = work.setdefault(node, [0.0] * 4)
        row[0] += wire * max(cluster.links[0].byte, costs.io_send, costs.io_receive)
        row[1] += -(-wire // cluster.chunk_bytes) * (costs.send + costs.receive) + costs.job / 2
        row[2] += each / costs.threads
        row[3] += wire
    others = heard(spec, case.nodes)
    return max(max(row[:3]) for row in work.values()) * others, max(row[3] for row in work.values()) * others
