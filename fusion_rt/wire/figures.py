"""What a node's daemon tells of what it does right now: to other daemons, which tell `fusiond top` and its kin."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from fusion_rt.wire.basics import MAX_RANKS, Count, Line, Rank

MAX_LOCAL = 1024  # workers of a node that are told of
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Versions: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class RankFigures(msgspec.Struct, array_like=True):
    """A worker's.

    Attributes:
        steps: how often it was ready in the first bucket of a plan.
        parts: how often it was ready in any bucket.
        late_seconds: how much later its parts came than the first sign of their buckets, all together.
    """

    rank: Rank
    steps: Count
    parts: Count
    late_seconds: Seconds


class LinkFigures(msgspec.Struct, array_like=True):
    """Of the connections to another node; `waiting_bytes`: sent there and not acknowledged; `lost`: it is given up."""

    node: Rank
    sent_bytes: Count
    received_bytes: Count
    waiting_bytes: Count
    reconnections: Count
    lost: bool


class FiguresRequest(msgspec.Struct, tag="figures?", array_like=True):
    """What does your node do? Answered with `Figures`."""

    serial: Count


class Figures(msgspec.Struct, tag="figures", array_like=True):
    """What the sender's node does; counters count from the start of its daemon, or of its membership epoch.

    Attributes:
        state: `starting`, `running` or `failed`; failure: why.
        uptime_seconds, cpu_seconds, memory_bytes: of the daemon.
        operations, bytes: completed here, and their bytes in the workers' memory; under_way: not completed.
        dense_bytes, packed_bytes: what would have been sent without compression, and what was.
        staleness_count, staleness_mean: of contributions of its workers to homes, in versions.
    """

    serial: Count
    pid: Count
    state: Line
    failure: Line
    uptime_seconds: Seconds
    cpu_seconds: Seconds
    memory_bytes: Count
    operations: Count
    bytes: Count
    under_way: Count
    dense_bytes: Count
    packed_bytes: Count
    staleness_count: Count
    staleness_mean: Versions
    ranks: Annotated[tuple[RankFigures, ...], msgspec.Meta(max_length=MAX_LOCAL)] = ()
    links: Annotated[tuple[LinkFigures, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
