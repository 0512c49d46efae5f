"""The model of a step, by which `--auto`, `--advise`, `fusion-trace whatif`, its report and `benchmarks.scale` predict.

No I/O. A rank's program says when it computes, hands a bucket to its daemon, and waits for one. A bucket is ready when
the last rank has handed it over. It then takes the time of the daemon's work, after the work for the buckets before it;
then the link, for latency and bytes, after the buckets before it; and latencies, for which nothing else has to wait
(`Pipeline`). So a step is as long as its busiest part, and what cannot overlap with it.

The costs of an all-reduce are those of `core.cost` (Thakur et al., 2005). At shards, a home gets the contributions of
all other nodes' ranks and answers each of them; in a mixing graph, a rank sends to its neighbours.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fusion_rt import wire
from fusion_rt.algorithms import Algorithm, Place
from fusion_rt.codecs.base import Exchange
from fusion_rt.core.cost import CostModel


class Compute(NamedTuple):
    """The rank computes for so many seconds."""

    seconds: float


class HandOver(NamedTuple):
    """The rank hands its part of a bucket over; with `if_answered` only if the last one has come back."""

    bucket: int
    if_answered: bool = False


class Wait(NamedTuple):
    """The rank waits for the bucket that it handed over last."""

    bucket: int


Action: TypeAlias = Compute | HandOver | Wait
Program: TypeAlias = Sequence[Sequence[Action]]
"""The actions of a rank in each of its steps."""


class BucketCost(NamedTuple):
    """The cost of one bucket.

    Attributes:
        work: seconds of a daemon.
        link: seconds for which a node's link is busy.
        after: seconds of latencies, in which work and link are free for the next bucket.
        sent: bytes that a node sends.
    """

    work: float
    link: float
    after: float
    sent: float


@dataclass(frozen=True)
class Network:
    """The nodes of a job and their links.

    Attributes:
        nodes: that take part; ranks: on the node with most.
        cost: of a message over the slowest link.
        largest_chunk: bytes of the largest message.
        ring: the cost of a message where nodes are visited in a measured order that avoids the slowest link; None: that
            link is in every ring.
    """

    nodes: int
    ranks: int
    cost: CostModel
    largest_chunk: int
    ring: CostModel | None = None


class Pipeline:
    """A node's daemon and link, which carry one bucket after the other."""

    def __init__(self) -> None:
        self._worked = self._carried = 0.0  # when the daemon, and the link, are free

    def carry(self, ready: float, cost: BucketCost) -> float:
        """Returns when a bucket that is ready at some time is back."""
        self._worked = max(self._worked, ready) + cost.work
        self._carried = max(self._carried, self._worked) + cost.link
        return self._carried + cost.after


def in_turn(ready: Iterable[float], costs: Sequence[BucketCost]) -> float:
    """Returns when the last of some buckets is back, at least 0."""
    pipeline = Pipeline()
    return max((pipeline.carry(*each) for each in zip(ready, costs, strict=True)), default=0.0)


@dataclass(frozen=True)
class Parcel:
    """The exchanged part of a bucket.

    Attributes:
        nbytes: of the bucket; travels: bytes of it, encoded.
        exchange: how nodes add up the codec's payloads.
        route: the all-reduce between nodes, of buckets that are added up in chunks.
    """

    nbytes: float
    travels: float
    exchange: Exchange = "chunks"
    route: wire.Route = "auto"


def exchange_cost(network: Network, algorithm: Algorithm, parcel: Parcel, buckets: int) -> BucketCost:
    """Returns the cost of a bucket, one of so many, without the daemon's work."""
    if network.nodes == 1:
        return BucketCost(0.0, 0.0, 0.0, 0.0)
    travels, rate = parcel.travels, network.cost.seconds_per_byte
    if algorithm.place is Place.SHARD:  # each bucket has one home, and homes are busy at the same time
        sent = 2 * network.ranks * (network.nodes - 1) * travels
        home = sent / min(network.nodes, buckets)
        return BucketCost(0.0, home * rate, 2 * network.cost.latency, sent / network.nodes)
    if algorithm.place is Place.REPLICA:
        sent = network.ranks * algorithm.receivers(network.nodes * network.ranks) * travels
        return BucketCost(0.0, sent * rate, network.cost.latency, sent)
    sent = 2 * (network.nodes - 1) / network.nodes * travels
    if parcel.exchange == "owners":  # to the owners of ranges, and from there
        return BucketCost(0.0, sent * rate, 2 * network.cost.latency, sent)
    rounds = 2 if parcel.exchange == "factors" else 1  # of sums, one after the other
    nbytes = travels / rounds if parcel.exchange == "factors" else parcel.nbytes
    link, after = _all_reduce(network, nbytes, travels / rounds, parcel.route)
    return BucketCost(0.0, rounds * link, rounds * after, sent)


def _all_reduce(network: Network, nbytes: float, travels: float, route: wire.Route) -> tuple[float, float]:
    """Returns for how long an all-reduce keeps links busy, and how long it is under way besides."""
    nodes, cost = network.nodes, network.cost
    chunk = cost.chunk_bytes(network.largest_chunk)
    way = cost.route(int(nbytes), nodes, chunk) if route == "auto" else route
    if way == "doubling" and nbytes <= network.largest_chunk:
        latencies = cost.doubling(0, nodes)
        return cost.doubling(int(travels), nodes) - latencies, latencies
    if way == "halving":
        latencies = cost.halving(0, nodes)
        return cost.halving(int(travels), nodes) - latencies, latencies
    cost = network.ring or cost
    latencies = cost.ring(0, nodes)
    # The last of several chunks passes through all nodes alone, twice; in half of the hops others are still under way.
    last = (nodes - 1) * min(chunk, max(travels / nodes - chunk, 0.0)) * cost.seconds_per_byte
    return cost.ring(int(travels), nodes) - latencies, latencies + last


# --- programs ---------------------------------------------------------------------------------------------------------


def around_steps(steps: Iterable[float], buckets: int, algorithm: Algorithm) -> list[list[Action]]:
    """Returns the program of a rank that posts parameters, or changes of them, around its own steps.

    Args:
        steps: seconds for which it computes in each.
        buckets: how many there are.
    """
    found: list[list[Action]] = []
    for number, seconds in enumerate(steps, 1):
        actions: list[Action] = [Compute(seconds)]
        due = _of_fragments(algorithm.due(number), buckets, algorithm)
        if algorithm.lag and number > algorithm.lag and algorithm.waits_for_answers:
            back = _of_fragments(algorithm.due(number - algorithm.lag), buckets, algorithm)
            actions += [Wait(bucket) for bucket in back]
        actions += [HandOver(bucket, if_answered=not algorithm.waits_for_answers) for bucket in due]
        if not algorithm.lag:
            actions += [Wait(bucket) for bucket in due]
        found.append(actions)
    return found


def _of_fragments(fragments: Sequence[int], buckets: int, algorithm: Algorithm) -> list[int]:
    return [bucket for fragment in fragments for bucket in range(fragment, buckets, algorithm.pieces)]


@dataclass(frozen=True)
class Walked:
    """Steps that were walked through.

    Attributes:
        ends: of each rank, when each of its steps ended (s).
        waited: of each rank, for how long each of its steps waited (s).
    """

    ends: tuple[tuple[float, ...], ...]
    waited: tuple[tuple[float, ...], ...]


@dataclass
class _Rank:
    """A rank on its way: `at` is its next action, `counts` how often it has handed each bucket over."""

    actions: Sequence[tuple[int, Action | None]]  # with the step; None: the step ends
    at: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.counts: dict[int, int] = defaultdict(int)
        self.ends: list[float] = []
        self.waited: list[float] = []
        self.waiting = 0.0


def walk(programs: Sequence[Program], costs: Sequence[BucketCost], together: bool) -> Walked:
    """Walks through the programs of all ranks.

    Args:
        costs: of each bucket.
        together: a bucket is ready when all ranks that hand it over have done so; else each rank's part is its own.
    """
    ranks = [_Rank([(n, a) for n, step in enumerate(program) for a in (*step, None)]) for program in programs]
    members: dict[int, set[int]] = defaultdict(set)
    for number, program in enumerate(programs):
        for step in program:
            for action in step:
                if isinstance(action, HandOver):
                    members[action.bucket].add(number if together else -1)
    walk = _Walk(ranks, costs, members, together)
    while walk.go_on():
        pass
    return Walked(tuple(tuple(rank.ends) for rank in ranks), tuple(tuple(rank.waited) for rank in ranks))


class _Walk:
    """Ranks that go on as far as they can, and the buckets that keep them waiting."""

    def __init__(
        self, ranks: Sequence[_Rank], costs: Sequence[BucketCost], members: dict[int, set[int]], together: bool
    ) -> None:
        self._ranks, self._costs, self._members, self._together = ranks, costs, members, together
        self._pipelines = [Pipeline() for _ in (ranks[:1] if together else ranks)]
        self._handed: dict[tuple[int, int], dict[int, float]] = {}  # by bucket and its number: when, by rank
        self._back: dict[tuple[int, int, int], float] = {}  # by rank (0: of all), bucket and number

    def go_on(self) -> bool:
        """Lets each rank go on until it waits; says whether any of them has not come to its end."""
        for number, rank in enumerate(self._ranks):
            while rank.at < len(rank.actions) and self._act(number, rank, rank.actions[rank.at][1]):
                rank.at += 1
        left = [rank for rank in self._ranks if rank.at < len(rank.actions)]
        if not left:
            return False
        ready = [key for key, its in self._handed.items() if len(its) == len(self._members[key[0]])]
        if not ready:  # the recording lacks a part of it
            ready = [min((max(its.values()), key) for key, its in self._handed.items())[1]]
        for time, bucket, number in sorted((max(self._handed.pop(key).values()), *key) for key in ready):
            self._back[0, bucket, number] = self._pipelines[0].carry(time, self._costs[bucket])
        return True

    def _act(self, number: int, rank: _Rank, action: Action | None) -> bool:
        """Does an action of a rank; says whether it could."""
        if action is None:
            rank.ends.append(rank.now)
            rank.waited.append(rank.waiting)
            rank.waiting = 0.0
        elif isinstance(action, Compute):
            rank.now += action.seconds
        elif isinstance(action, HandOver):
            self._submit(number, rank, action)
        else:
            key = (0 if self._together else number, action.bucket, rank.counts[action.bucket])
            if key[2] and key not in self._back:
                return False
            back = self._back.get(key, rank.now)
            rank.waiting += max(back - rank.now, 0.0)
            rank.now = max(back, rank.now)
        return True

    def _submit(self, number: int, rank: _Rank, action: HandOver) -> None:
        bucket = action.bucket
        whose = 0 if self._together else number
        last = whose, bucket, rank.counts[bucket]
        if action.if_answered and last[2] and self._back.get(last, math.inf) > rank.now:
            return
        rank.counts[bucket] += 1
        if self._together:
            self._handed.setdefault((bucket, rank.counts[bucket]), {})[number] = rank.now
        else:
            self._back[number, bucket, rank.counts[bucket]] = self._pipelines[number].carry(
                rank.now, self._costs[bucket]
            )
