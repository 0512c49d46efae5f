"""Messages of the mesh with a node's live figures, as shown by `fusiond top`, the dashboard and the metrics."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from fusion_rt.wire.basics import MAX_RANKS, Count, Line, Rank

MAX_LOCAL = 1024  # workers of a node with figures
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Versions: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class RankFigures(msgspec.Struct, array_like=True):
    """Counters of one worker.

    Attributes:
        steps: how often it was ready in the first bucket of a plan.
        parts: how often it was ready in any bucket.
        late_seconds: how much later its parts came than the first sign of their buckets, summed over all parts.
    """

    rank: Rank
    steps: Count
    parts: Count
    late_seconds: Seconds


class LinkFigures(msgspec.Struct, array_like=True):
    """Counters of the connections to another node.

    Attributes:
        waiting_bytes: sent there and not acknowledged.
        lost: the node was declared dead.
    """

    node: Rank
    sent_bytes: Count
    received_bytes: Count
    waiting_bytes: Count
    reconnections: Count
    lost: bool


class FiguresRequest(msgspec.Struct, tag="figures?", array_like=True):
    """Asks for the receiver's `Figures`; `links`, `ranks`: of how many at most."""

    serial: Count
    links: Count
    ranks: Count


class Figures(msgspec.Struct, tag="figures", array_like=True):
    """Live figures of the sender's node; counters start at 0 with its daemon, or with its membership epoch.

    Attributes:
        state: `starting`, `running` or `failed`.
        failure: why it failed, or empty.
        uptime_seconds, cpu_seconds, memory_bytes: of the daemon.
        operations, bytes: operations completed here, and their bytes in the workers' memory.
        under_way: operations that are not completed.
        dense_bytes, packed_bytes: bytes that would have been sent without compression, and that were sent.
        staleness_count, staleness_mean: of contributions of its workers to homes, in versions.
        ranks: those whose parts came latest; `links`: those that are lost, then those that have carried most.
        more_ranks, more_links: how many are left out.
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
    more_ranks: Count = 0
    more_links: Count = 0
