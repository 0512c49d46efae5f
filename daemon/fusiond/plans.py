"""The plans in force on a node: their buckets' state, and the memory of the local workers in which they lie. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fusion_rt import codecs, wire
from fusion_rt.dtypes import DTYPES
from fusiond import algorithms
from fusiond.algorithms.base import Algorithm
from fusiond.collectives.base import Array, Reducer
from fusiond.participants import Members
from fusiond.requests import Part, RequestError, reducer_of


@dataclass(frozen=True)
class BucketState:
    """A bucket of a plan in force. `codec` holds its residual, if it has one, from step to step.

    `parts`: first element and number of elements of each tensor.
    """

    bucket: wire.Bucket
    name: str
    reducer: Reducer
    codec: codecs.BucketCodec
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlanState:
    """A plan in force."""

    plan: wire.Plan
    members: Members
    algorithm: Algorithm
    buckets: tuple[BucketState, ...]


class Plans:
    """All plans in force, by id."""

    def __init__(self) -> None:
        self._plans: dict[int, PlanState] = {}
        self._memory: dict[tuple[int, int], Array] = {}  # plan and rank: the plan's segment in that worker's arena

    def __iter__(self) -> Iterator[PlanState]:
        return iter(self._plans.values())

    def install(self, plan: wire.Plan, members: Members) -> None:
        """Puts a plan in force; it replaces the one that its group had. Does nothing when it is in force already."""
        if plan.id in self._plans:
            return
        for old in [s.plan for s in self if (s.plan.process_set, s.plan.group) == (plan.process_set, plan.group)]:
            del self._plans[old.id]
            for rank in members.local:
                self.drop_memory(rank, old.id)
        codec = codecs.parse(plan.reduction.codec)
        self._plans[plan.id] = PlanState(
            plan,
            members,
            algorithms.make(plan.reduction.algorithm),
            tuple(
                BucketState(
                    bucket,
                    str(bucket.index),
                    reducer_of(plan.reduction, DTYPES[bucket.dtype], len(members.set.ranks)),
                    codec.open(codecs.Layout(DTYPES[bucket.dtype], bucket.numel)),
                    tuple((tensor.start, tensor.numel) for tensor in bucket.tensors),
                )
                for bucket in plan.buckets
            ),
        )

    def remove_set(self, process_set: int) -> None:
        """Drops the plans of a process set that has been removed."""
        for state in [s for s in self if s.plan.process_set == process_set]:
            del self._plans[state.plan.id]
            for rank in state.members.local:
                self.drop_memory(rank, state.plan.id)

    def add_memory(self, rank: int, plan: int, memory: Array) -> None:
        """A worker's arena has a segment (its bytes, uint8) for the buckets of a plan. Raises `RequestError`."""
        state = self._plans.get(plan)
        if state is None or len(memory) < state.plan.nbytes or rank not in state.members.local:
            raise RequestError(f"rank {rank} offers memory for plan {plan}, which is not its plan in force")
        self._memory[plan, rank] = memory

    def drop_memory(self, rank: int, plan: int) -> None:
        """The worker has given that segment up."""
        self._memory.pop((plan, rank), None)

    def find(self, plan: int, bucket: str) -> tuple[PlanState, BucketState] | None:
        """A bucket by its name in operation keys; None when there is no such plan in force, or no such bucket."""
        state = self._plans.get(plan)
        if state is None or not bucket.isdecimal() or int(bucket) >= len(state.buckets):
            return None
        return state, state.buckets[int(bucket)]

    def part(self, rank: int, ready: wire.Ready) -> tuple[PlanState, BucketState, Part]:
        """What a worker's `Ready` is about.

        Raises:
            RequestError: there is no such bucket, or the worker gave no memory for it.
        """
        state = self._plans.get(ready.plan)
        memory = self._memory.get((ready.plan, rank))
        if state is None or memory is None or ready.bucket >= len(state.buckets):
            raise RequestError(
                f"rank {rank} is ready in bucket {ready.bucket} of plan {ready.plan}, which is not in force"
            )
        found = state.buckets[ready.bucket]
        storage = found.reducer.dtype.storage
        offset = found.bucket.offset
        values = memory[offset : offset + found.bucket.numel * storage.itemsize].view(storage)
        return state, found, Part(ready.handle, values, values)

    def statistics(self) -> list[Mapping[str, object]]:
        """Id, group, number of buckets and bytes of each."""
        return [
            {"id": s.plan.id, "group": s.plan.group, "buckets": len(s.buckets), "nbytes": s.plan.nbytes} for s in self
        ]
