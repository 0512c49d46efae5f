"""Plans, their buckets and tensors, and the proposals that they are made from."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fusion_rt.wire.basics import MAX_GROUPS, Count, Name, Op, Rank, Shape, Text

TunedBytes = Annotated[int, msgspec.Meta(ge=4096, lt=2**30 + 1)]
TunedThreads = Annotated[int, msgspec.Meta(ge=1, lt=257)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
Route = Literal["auto", "ring", "halving", "doubling"]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A named tensor that is to be part of a plan.

    Attributes:
        together: tensors of one dtype with the same number here share a bucket with nothing else; 0: no wish.
        sparse: how many of its dimensions are sparse on this rank; 0: it is dense, or there is none yet.
        group: index of the optimizer's parameter group that it is in.
    """

    name: Name
    dtype: Name
    shape: Shape
    together: Count = 0
    sparse: Count = 0
    group: Count = 0


class PlannedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's place in a bucket: elements [start, start + numel), its shape there, and its parameter group."""

    name: Name
    start: Count
    numel: Count
    shape: Shape = ()
    group: Count = 0


class Bucket(msgspec.Struct, frozen=True):
    """Tensors fused into one contiguous fusion buffer of `numel` elements, `offset` bytes into the plan's segment."""

    index: Count
    dtype: Name
    numel: Count
    offset: Count
    tensors: tuple[PlannedTensor, ...]


class OptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer of `torch.optim`, for a home that applies gradients.

    Attributes:
        name: of its class.
        groups: arguments of each parameter group, as JSON, without the learning rate, which comes with each gradient.
    """

    name: Name
    groups: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class Reduction(msgspec.Struct, frozen=True):
    """The combination of the buckets of a plan.

    Attributes:
        op: combines the elements of different ranks.
        prescale, postscale: factors before and after it.
        codec, algorithm: their specs.
        optimizer: of the homes, if these apply gradients.
        packages: those of the codec and the algorithm, with versions, unless these are built in.
        survives: shards outlive their formation, and their nodes by mirrors of each update.
    """

    op: Op = "average"
    prescale: float = 1.0
    postscale: float = 1.0
    codec: Name = "dense"
    algorithm: Name = "allreduce"
    optimizer: OptimizerSpec | None = None
    packages: tuple[Name, ...] = ()
    survives: bool = False

    def weight(self, ranks: int) -> float:
        """Returns how much of one rank's prescaled contribution the result has, if so many ranks take part."""
        return self.postscale / ranks if self.op == "average" else self.postscale


class Tuning(msgspec.Struct, frozen=True):
    """Overrides of the daemons' settings for the buckets of one plan, whose ranks combine their posts and all get
    the same.

    A field that is None leaves the setting as it is.

    Attributes:
        threshold: bytes of the largest bucket.
        chunk_bytes, window_bytes: largest payload of a message, at most that of the settings, and bytes that may be
            under way to a peer for one bucket.
        threads: number of a daemon's threads that reduce a bucket.
        exchange: the all-reduce of dense values between nodes.
        codec: replaces the reduction's; empty: it does not.
        late: workers apply updates one step late, if they can do so at all; None: as they were asked.
        steps: number of steps after which all ranks propose again; 0: never.
        why: the reason for the choice, for people.
        then: the algorithm by which all ranks go on after these steps; empty: the same.
    """

    threshold: Count | None = None
    chunk_bytes: TunedBytes | None = None
    window_bytes: TunedBytes | None = None
    threads: TunedThreads | None = None
    exchange: Route | None = None
    codec: Name = ""
    late: bool | None = None
    steps: Count = 0
    why: Reason = ""
    then: Name = ""


class Plan(msgspec.Struct, frozen=True):
    """The agreed, ordered list of buckets of one group of tensors; `id` grows with every plan of a job.

    Attributes:
        reduction: with the codec of `tuning`, if that has one.
        sparse: tensors that are sparse on some rank, and so are in no bucket on any.
        homes: the node of each bucket's home, if buckets have one home each.
    """

    id: Annotated[int, msgspec.Meta(ge=1)]
    group: Name
    process_set: Count
    reduction: Reduction
    buckets: tuple[Bucket, ...]
    nbytes: Count
    sparse: tuple[TensorSpec, ...] = ()
    homes: tuple[Rank, ...] = ()
    tuning: Tuning | None = None


class Proposal(msgspec.Struct, frozen=True):
    """One rank's request for a plan.

    Attributes:
        tensors: in the order in which their gradients arrived on this rank.
        tuning: counts on the lowest rank that proposes.
        anew: all ranks propose, so that a plan which others have made without this rank will not do.
        identity: of the optimizer, by its parameters; the same on all ranks, and another one for each of this rank's.
    """

    group: Name
    process_set: Count
    clock: Count
    reduction: Reduction
    tensors: tuple[TensorSpec, ...]
    tuning: Tuning | None = None
    anew: bool = False
    identity: Name = ""
