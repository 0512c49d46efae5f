"""Predicts the time and traffic of a step, of so many nodes, with any algorithm and codec.

Up to `SIMULATED` nodes (with homes: `SIMULATED_HOMES`) message by message; beyond, all-reduces and gossip by `scaling`
and `gossiping`. Shards of more nodes: what the busiest home's network card, event loop or pool needs for all
contributions of a step. Where nobody waits for all, a step takes that, but at least as long as among fewer nodes (the
usual bound of a closed queueing network); where all are waited for, they first come in and then go out, and a step
takes by so much longer than among fewer nodes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fusion_rt import algorithms as chosen
from fusion_trace.simulate.ghost_codecs import wire_nbytes
from fusion_trace.simulate.gossiping import Mixing
from fusion_trace.simulate.homes import graph
from fusion_trace.simulate.model import Bucket, Cluster, Costs, Link, equal
from fusion_trace.simulate.programs import Action, Compute, Submit, Wait
from fusion_trace.simulate.scaling import Exchanging
from fusion_trace.simulate.simulation import Job, place
from fusion_trace.simulate.stages import Times

SIMULATED, SIMULATED_HOMES = 16, 32
_STEPS = 3
_TENSORS = 50
_THRESHOLD = 64 << 20
_FORWARD = 1 / 3  # of a step's computing


@dataclass(frozen=True)
class Case:
    """What is asked.

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


class Predictor:
    """Predicts steps of nodes with such links and costs. Simulates nothing twice."""

    def __init__(self, link: Link, costs: Costs) -> None:
        self._link, self._costs = link, costs
        self._known: dict[Case, _Found] = {}

    def __call__(self, case: Case) -> dict[str, Any] | None:
        """Seconds of a step, for how long it is kept waiting, bytes and messages that a node sends in it, and how that
        was found out; None if so many nodes cannot do this."""
        spec = chosen.parse(case.algorithm)
        try:
            spec.check(min(case.nodes, 1024))
        except chosen.AlgorithmError:
            return None
        every = spec if spec.period == 1 else replace(spec, steps=1)  # type: ignore[call-arg]
        one = replace(case, algorithm=str(every))  # one exchange in each step
        if case.nodes <= _simulated_up_to(every):
            found = self._simulated(one, every)
        elif spec.place is chosen.Place.NOWHERE or isinstance(spec, chosen.DPSGD | chosen.SGP | chosen.Choco):
            found = _at_once(one, self._cluster(one), every)
        else:
            found = self._bound(one, every)
        seconds, sent, messages, how = found
        waited = max(seconds - case.compute, 0.0) / spec.period
        return {"seconds": case.compute + waited, "waited": waited, "sent": sent / spec.period,
                "messages": messages / spec.period, "how": how}  # fmt: skip

    def _cluster(self, case: Case) -> Cluster:
        return equal(case.nodes, self._link, costs=self._costs)

    def _simulated(self, case: Case, spec: chosen.Algorithm) -> _Found:
        if case not in self._known:
            self._known[case] = _simulated(case, self._cluster(case), spec)
        return self._known[case]

    def _bound(self, case: Case, spec: chosen.Algorithm) -> _Found:
        few = replace(case, nodes=_simulated_up_to(spec))
        seconds, sent, messages, _ = self._simulated(few, spec)
        if spec.place is chosen.Place.REPLICA:  # a rank has as many neighbours, however many ranks there are
            return seconds, sent, messages, f"as {few.nodes} nodes"
        cluster = self._cluster(case)
        busiest, homes = _busiest(case, cluster, spec)
        if spec.synchronous or isinstance(spec, chosen.Partial) or getattr(spec, "synchronous_home", False):
            seconds += 2 * max(busiest - _busiest(few, cluster, spec)[0], 0.0)
        own = sum(wire_nbytes(case.codec, bucket, cluster.costs) for bucket in buckets_of(case, spec))
        return max(seconds, busiest), own + homes, messages, f"as {few.nodes} nodes, and the busiest home"


def _simulated_up_to(spec: chosen.Algorithm) -> int:
    return SIMULATED if spec.place is chosen.Place.NOWHERE else SIMULATED_HOMES


def buckets_of(case: Case, spec: chosen.Algorithm) -> list[Bucket]:
    """As the plan has them: with shards, small enough that each node has its share."""
    elements = max(case.parameters // _TENSORS, 1)
    rows = max(int(elements**0.5), 1)
    shape = (rows, elements // rows)
    tensor = 4 * rows * (elements // rows)
    threshold = _THRESHOLD
    if spec.place is chosen.Place.SHARD:
        threshold = min(threshold, -(-tensor * _TENSORS // case.nodes))
    together = max(1, threshold // tensor)
    return [
        Bucket(tensor * min(together, _TENSORS - first), (shape,) * min(together, _TENSORS - first))
        for first in range(0, _TENSORS, together)
    ]


def program(
    case: Case, spec: chosen.Algorithm, buckets: Sequence[Bucket], rank: int, steps: int = _STEPS
) -> list[list[Action]]:
    """What a rank does."""
    dice = random.Random(rank)
    found: list[list[Action]] = []
    everything = range(len(buckets))
    for _ in range(steps):
        compute = case.compute * max(dice.gauss(1.0, case.jitter), 0.1)
        if spec.signal is not chosen.Signal.GRADIENT:
            waits = [Wait(bucket) for bucket in everything]
            submits = [Submit(bucket) for bucket in everything]
            found.append([Compute(compute), *waits, *submits, *([] if spec.overlaps else waits)])
            continue
        step: list[Action] = [Compute(compute * _FORWARD)]
        total = sum(bucket.nbytes for bucket in buckets)
        for index, bucket in enumerate(buckets):
            step += [Compute(compute * (1 - _FORWARD) * bucket.nbytes / total), Submit(index)]
        found.append([*step, *(Wait(bucket) for bucket in everything)])
    return found


def _simulated(case: Case, cluster: Cluster, spec: chosen.Algorithm) -> _Found:
    buckets = buckets_of(case, spec)
    programs = [program(case, spec, buckets, rank) for rank in range(case.nodes)]
    outcome = Job(cluster, programs, buckets, str(spec), case.codec).run()
    most = max(outcome.traffic, key=lambda traffic: traffic.sent)
    return outcome.step_seconds(), most.sent / _STEPS, most.sent_messages / _STEPS, "simulated"


def _at_once(case: Case, cluster: Cluster, spec: chosen.Algorithm) -> _Found:
    buckets = buckets_of(case, spec)
    dice = np.random.default_rng(1)
    compute = case.compute * np.maximum(dice.normal(1.0, case.jitter, case.nodes), 0.1)
    engine: Exchanging
    if spec.place is chosen.Place.NOWHERE:
        engine = Exchanging(cluster, case.codec)
    else:
        engine = Mixing(cluster, case.codec, graph(getattr(spec, "topology"), case.nodes), 0)  # noqa: B009
    ended = engine.run(buckets, _submitted(spec, buckets, compute))
    last = np.max(ended, axis=0)
    # With overlap the exchange has all of the next step's computing to hide behind.
    seconds = float(np.mean(np.maximum(compute, last - compute) if spec.overlaps else last))
    stages = engine.stages
    return seconds, float(stages.sent.max()), float(stages.messages.max()), "all at once"


def _submitted(spec: chosen.Algorithm, buckets: Sequence[Bucket], compute: Times) -> list[Times]:
    if spec.signal is not chosen.Signal.GRADIENT:
        return [compute for _ in buckets]
    done = np.cumsum([bucket.nbytes for bucket in buckets]) / sum(bucket.nbytes for bucket in buckets)
    return [compute * (_FORWARD + (1 - _FORWARD) * share) for share in done]


def _busiest(case: Case, cluster: Cluster, spec: chosen.Algorithm) -> tuple[float, float]:
    """What the busiest part of the busiest home has to do for a contribution of everybody (s), and what that home
    sends."""
    buckets, costs = buckets_of(case, spec), cluster.costs
    coding = costs.codec(case.codec)
    work: dict[int, list[float]] = {}
    for bucket, node in zip(buckets, place(buckets, case.nodes), strict=True):
        wire = wire_nbytes(case.codec, bucket, costs)
        each = bucket.nbytes * (coding.contribute + costs.apply + 2 * costs.copy) + wire * (coding.pack + coding.unpack)
        row = work.setdefault(node, [0.0] * 4)
        row[0] += wire * max(cluster.links[0].byte, costs.io_send, costs.io_receive)
        row[1] += -(-wire // cluster.chunk_bytes) * (costs.send + costs.receive) + costs.job / 2
        row[2] += each / costs.threads
        row[3] += wire
    others = case.nodes - 1
    return max(max(row[:3]) for row in work.values()) * others, max(row[3] for row in work.values()) * others
