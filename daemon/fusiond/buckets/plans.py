"""The active plans on a node: their buckets' state, and the memory of the local workers in which they lie. No I/O."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import msgspec

from fusion_rt import algorithms as chosen
from fusion_rt import codecs, wire
from fusion_rt.codecs import layout_of
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels.team import ALONE, Team
from fusiond import algorithms
from fusiond.algorithms import Algorithm, HomeAlgorithm
from fusiond.buckets import codec_state
from fusiond.buckets.recipes import reducer_of
from fusiond.buckets.traced_codecs import release_codec
from fusiond.buckets.worker_selection import Selected, selected
from fusiond.collectives.base import Array, Job, Reducer
from fusiond.core.contribution import Contribution
from fusiond.core.errors import RequestError
from fusiond.core.participants import Members

UNTUNED = wire.Tuning()
Group: TypeAlias = tuple[int, str]
"""An optimizer's buckets, from one plan to the next: its process set, and its name."""


@dataclass(frozen=True)
class BucketState:
    """A bucket of an active plan.

    Attributes:
        codec: holds its residual, if it has one, from step to step. It leaves values as they are where the plan's
            buckets have homes.
        decoder: of messages to homes and back. Several threads may use both at the same time there.
        parts: first element and number of elements of each tensor.
    """

    bucket: wire.Bucket
    name: str
    reducer: Reducer
    codec: codecs.BucketCodec
    decoder: codecs.BucketCodec
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlanState:
    """An active plan. `counted`: sums of the statistics of plans that it has replaced, and of its messages to and from
    homes."""

    plan: wire.Plan
    members: Members
    algorithm: Algorithm | HomeAlgorithm[Any]
    buckets: tuple[BucketState, ...]
    counted: Counter[str]
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note_message(self, codec: codecs.BucketCodec, nbytes: int) -> None:
        """A message with the values of a bucket has been encoded by a codec, as so many bytes. Called by any thread."""
        if codec.lossless:
            return
        dense = codec.layout.elements * codec.layout.dtype.itemsize
        with self._counting:
            self.counted.update(
                {
                    "packed_nbytes": nbytes,
                    "dense_nbytes": dense,
                    "elements": codec.numel,
                    "encoded": codec.encoded_elements,
                }
            )

    @property
    def group(self) -> Group:
        """Its group."""
        return self.plan.process_set, self.plan.group

    @cached_property
    def spec(self) -> chosen.Algorithm:
        """The algorithm as it was chosen."""
        return chosen.parse(self.plan.reduction.algorithm)

    @cached_property
    def at_homes(self) -> bool:
        """True if its buckets have homes, to which contributions go."""
        return self.spec.at_homes

    @cached_property
    def tuning(self) -> wire.Tuning:
        """Its tuning, or one that leaves everything to the settings."""
        return self.plan.tuning or UNTUNED

    @cached_property
    def by_name(self) -> dict[str, BucketState]:
        """The buckets by their names in operation keys."""
        return {bucket.name: bucket for bucket in self.buckets}

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """How many parameter groups each bucket needs learning rates for."""
        return tuple(1 + max((tensor.group for tensor in bucket.tensors), default=0) for bucket in self.plan.buckets)

    def wrong_rates(self, bucket: int, rates: Sequence[float]) -> str:
        """Returns why a home cannot take a step at these learning rates; empty if it can."""
        if self.spec.signal is not chosen.Signal.GRADIENT:
            return ""
        if len(rates) < self.groups[bucket]:
            return f"it has {len(rates)} learning rates for at least {self.groups[bucket]} parameter groups"
        if not all(map(math.isfinite, rates)):
            return f"its learning rates {list(rates)} are not all finite"
        return ""

    @cached_property
    def home_algorithm(self) -> HomeAlgorithm[Any]:
        """The algorithm of buckets that have homes."""
        assert isinstance(self.algorithm, HomeAlgorithm)
        return self.algorithm

    @cached_property
    def exchange_algorithm(self) -> Algorithm:
        """The algorithm of buckets that have none."""
        assert isinstance(self.algorithm, Algorithm)
        return self.algorithm

    @property
    def codecs(self) -> list[codecs.BucketCodec]:
        """The codecs of its buckets."""
        return [bucket.codec for bucket in self.buckets]


@dataclass(frozen=True)
class PlanMemory:
    """A plan's segment in the arena of a worker.

    Attributes:
        position: the worker's in the plan's process set.
        segment: all of it (uint8).
        values: the elements of each bucket.
    """

    position: int
    segment: Array
    values: tuple[Array, ...]


class Plans:
    """All active plans, by id.

    Args:
        team: the threads that a bucket's codec may use.
        keeps_before: the last step may be dropped, also after it was complete; in an elastic job.
    """

    def __init__(self, team: Team = ALONE, keeps_before: bool = False) -> None:
        self._team = team
        self._keeps_before = keeps_before
        self._plans: dict[int, PlanState] = {}
        self._squares: dict[int, float] = {}  # of all residuals of a plan, when they were measured last
        self._memory: dict[tuple[int, int], PlanMemory] = {}  # by plan and rank

    def __iter__(self) -> Iterator[PlanState]:
        return iter(self._plans.values())

    def __contains__(self, plan: int) -> bool:
        return plan in self._plans

    def has_memory(self, plan: wire.Plan, members: Members) -> bool:
        """Returns whether codecs of a plan remember something from step to step."""
        return any(codec.stateful for codec in self._codecs_of(plan, members))

    def put(self, state: PlanState) -> None:
        """A plan becomes active, which was opened. It replaces the one that its group had, if that has another id."""
        old = self.of_group(state.group)
        if old is not None:
            self._drop(old)
        self._plans[state.plan.id] = state

    def open(self, plan: wire.Plan, members: Members, before: PlanState | None) -> PlanState:
        """Opens the codecs of a plan that is not active yet; on a thread, since they have memory for each element.

        Args:
            before: the group's active plan, whose statistics go on; None if there is none.
        """
        counted: Counter[str] = Counter() if before is None else _sums(before)
        chosen_codec, of_messages = self._codecs_of(plan, members)
        buckets = tuple(
            BucketState(
                bucket,
                str(bucket.index),
                reducer_of(plan.reduction, DTYPES[bucket.dtype], len(members.set.ranks), len(members.local)),
                codec_state.open_bucket(chosen_codec, layout_of(bucket), len(members.nodes), self._team),
                codecs.open_bucket(of_messages.without_memory(), layout_of(bucket)),
                tuple((tensor.start, tensor.numel) for tensor in bucket.tensors),
            )
            for bucket in plan.buckets
        )
        for bucket in buckets:
            bucket.codec.keeps_before = self._keeps_before
        algorithm = algorithms.make(plan.reduction.algorithm, len(members.set.ranks))
        return PlanState(plan, members, algorithm, buckets, counted)

    def _codecs_of(self, plan: wire.Plan, members: Members) -> tuple[codecs.Codec, codecs.Codec]:
        """Returns the codecs of a plan's buckets, and of messages to homes and back, if they have homes."""
        codec, dense = codecs.parse(plan.reduction.codec), codecs.parse("dense")
        if chosen.parse(plan.reduction.algorithm).at_homes:
            return dense, codec
        return codec if len(members.nodes) > 1 else dense, dense

    def _drop(self, state: PlanState) -> None:
        """Forgets an active plan, and frees the memory of its codecs."""
        del self._plans[state.plan.id]
        for rank in state.members.local:
            self.drop_memory(rank, state.plan.id)
        for codec in state.codecs:
            release_codec(codec)

    def why_not_without(self, nodes: Collection[int], ranks: Collection[int]) -> str:
        """Returns why the plans here cannot go on without these nodes and ranks; empty if they can."""
        for state in self:
            if state.spec.synchronous and not set(ranks).isdisjoint(state.members.set.ranks):
                return f"{state.spec} needs every rank"
        plans = [state.plan for state in self if state.plan.homes]
        homes = [f"{b.index} of {p.group!r}" for p in plans for b in p.buckets if p.homes[b.index] in nodes]
        return f"it has the homes of buckets {', '.join(homes)}" if homes else ""

    def remove_set(self, process_set: int) -> None:
        """Drops the plans of a process set that has been removed."""
        for state in [s for s in self if s.plan.process_set == process_set]:
            self._drop(state)

    def of_group(self, group: Group) -> PlanState | None:
        """Returns the active plan of a group; None if there is none."""
        return next((state for state in self if state.group == group), None)

    def get(self, plan: int) -> PlanState:
        """Returns an active plan, by its id."""
        return self._plans[plan]

    def add_memory(self, rank: int, plan: int, memory: Array) -> None:
        """A worker's arena has a segment (its bytes, uint8) for the buckets of a plan. Raises `RequestError`."""
        state = self._plans.get(plan)
        if state is None or len(memory) < state.plan.nbytes or rank not in state.members.local:
            raise RequestError(f"rank {rank} offers memory for plan {plan}, which is not its active plan")
        values = []
        for found in state.buckets:
            storage, offset = found.reducer.dtype.storage, found.bucket.offset
            values.append(memory[offset : offset + found.bucket.numel * storage.itemsize].view(storage))
        self._memory[plan, rank] = PlanMemory(state.members.set.ranks.index(rank), memory, tuple(values))

    def drop_memory(self, rank: int, plan: int) -> None:
        """A worker has dropped that segment."""
        self._memory.pop((plan, rank), None)

    def find(self, key: wire.OpKey) -> tuple[PlanState, BucketState] | None:
        """Returns the bucket that an operation is of; None when there is no such active plan, or no such bucket."""
        state = self._plans.get(key.plan)
        if state is None or state.plan.process_set != key.process_set or key.name not in state.by_name:
            return None
        return state, state.by_name[key.name]

    def part(self, rank: int, ready: wire.Ready) -> tuple[PlanState, BucketState, Contribution]:
        """Returns the plan and the bucket that a worker's `Ready` names, and the contribution that it describes.

        Raises:
            RequestError: there is no such bucket, or the worker gave no memory for it, or `rescale`, `loss_scale` or
                `tray` makes no sense.
        """
        try:
            state, memory = self._plans[ready.plan], self._memory[ready.plan, rank]
            found = state.buckets[ready.bucket]
        except LookupError:
            what = f"bucket {ready.bucket} of plan {ready.plan}"
            raise RequestError(f"rank {rank} is ready in {what}, which is not active") from None
        if ready.rescale or ready.share != wire.OWN or ready.loss_scale != 1.0:
            own_only = state.at_homes or found.reducer.op == "adasum"
            _check_terms(rank, ready, len(found.parts), own_only)
        values = memory.values[ready.bucket]
        part = Contribution(
            memory.position,
            values,
            ready.handle,
            values,
            ready.kind,
            ready.clock,
            rates=ready.rates,
            samples=ready.samples,
            rescale=ready.rescale,
            urgency=ready.urgency,
            share=ready.share,
            passes=ready.passes,
            gives_up=ready.gives_up,
            asks_for_part=ready.asks_for_part,
            loss_scale=ready.loss_scale,
        )
        if ready.tray:
            part.selected = _selected(rank, ready, state, found, memory.segment)
        return state, found, part

    def statistics(self) -> list[Mapping[str, object]]:
        """Returns id, group, number of buckets, bytes and codec of each plan; and its `tuning`, with the reasons."""
        return [
            {
                "id": s.plan.id,
                "group": s.plan.group,
                "buckets": len(s.buckets),
                "nbytes": s.plan.nbytes,
                "codec": s.plan.reduction.codec,
                "tuning": None if s.plan.tuning is None else msgspec.to_builtins(s.plan.tuning),
            }
            for s in self
        ]

    def measure(self) -> Job:
        """Returns a job that measures the residuals for `compression`: it reads all of them. Steps may be taken
        meanwhile; then a norm is that of some buckets before a step, and of some after it."""
        states = list(self)

        def measure() -> None:
            self._squares = {
                state.plan.id: math.fsum(codec.residual_norm() ** 2 for codec in state.codecs) for state in states
            }

        return measure

    def compression(self) -> dict[str, dict[str, float]]:
        """Returns the savings and costs of compression on this node, by group and in "total": `bytes_dense` that would
        have been sent to other nodes, `bytes_packed` that were, the share `saved`; how many `elements` there were, and
        how many of them a codec has `encoded`; how many were `asked` for, and `selected`; the `seconds` it took; and
        the L2 norm of the residuals, `residual_norm`, as of the last `measure`."""
        groups = {}
        for state in self:
            if state.counted or any(codec.statistics() for codec in state.codecs):
                where = f" of process set {state.plan.process_set}" if state.plan.process_set else ""
                sums = groups[state.plan.group + where] = _sums(state)
                sums["squared_norm"] = self._squares.get(state.plan.id, 0.0)  # type: ignore[assignment]
        total: Counter[str] = Counter()
        for sums in groups.values():
            total.update(sums)
        return {name: _told(sums) for name, sums in {**groups, "total": total}.items()}

    def traffic(self) -> tuple[int, int]:
        """Returns the bytes that would have been sent to other nodes without compression, and those that were."""
        sums: Counter[str] = Counter()
        for state in self:
            sums.update(state.counted)
            for codec in state.codecs:
                sums.update(codec.statistics())
        return int(sums["dense_nbytes"]), int(sums["packed_nbytes"])


def _sums(state: PlanState) -> Counter[str]:
    """Returns the statistics of all buckets and messages, and of the plans before this one."""
    sums = Counter(state.counted)
    for codec in state.codecs:
        sums.update(codec.statistics())
    return sums


def _told(sums: Counter[str]) -> dict[str, float]:
    dense, packed = sums["dense_nbytes"], sums["packed_nbytes"]
    return {
        "bytes_dense": dense,
        "bytes_packed": packed,
        "saved": 1 - packed / dense if dense else 0.0,
        "elements": sums["elements"],
        "encoded": sums["encoded"],
        "asked": sums["asked"],
        "selected": sums["selected"],
        "seconds": float(sums["seconds"]),
        "residual_norm": math.sqrt(sums["squared_norm"]),
    }


def _selected(rank: int, ready: wire.Ready, state: PlanState, found: BucketState, segment: Array) -> Selected:
    """Returns a worker's own selection. Raises `RequestError` where it cannot have done so."""
    whose = f"bucket {ready.bucket} of plan {ready.plan} on rank {rank}"
    if len(state.members.local) > 1 and ready.share != wire.OF_NODE:
        raise RequestError(f"{whose} was selected by its worker, which is not the only one of its node")
    return selected(whose, found.codec, segment, ready.tray, state.plan.nbytes)


def _check_terms(rank: int, ready: wire.Ready, tensors: int, own_only: bool) -> None:
    """Raises `RequestError` where the terms of a contribution make no sense for its bucket.

    Args:
        rank: the worker's.
        tensors: how many the bucket has.
        own_only: each rank has to submit its own contribution.
    """
    factors, what = ready.rescale, f"bucket {ready.bucket} of plan {ready.plan}"
    if factors and not (len(factors) == tensors and all(0 < factor < math.inf for factor in factors)):
        raise RequestError(
            f"rank {rank} rescales the residual of {what}, which has {tensors} tensors, by {list(factors)}"
        )
    if not 0 < ready.loss_scale < math.inf:
        raise RequestError(
            f"rank {rank} gives {what} the loss scale {ready.loss_scale:g}, which has to be above 0 and finite"
        )
    if own_only and ready.share != wire.OWN:
        raise RequestError(f"rank {rank} shares a contribution with its node in {what}, which needs each rank's own")
