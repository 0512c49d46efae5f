"""Figures of each link between nodes: how much went over it, and how fast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fusion_trace.read.chunks import Chunk
from fusion_trace.read.job import JobTrace
from fusion_trace.read.spans import Span, total, union
from fusion_trace.simulate.recorded import link_speed


@dataclass(frozen=True)
class LinkFigures:
    """One direction of a link, in the chosen steps.

    Attributes:
        source, target: nodes.
        nbytes, chunks: of payload.
        busy: share of the time of these steps in which something was between its ends.
        bandwidth: payload bytes a second while chunks follow each other; latency: of the rest, seconds. None: no chunk
            that is large enough to tell was seen at both ends.
        clock_error: by how much its times may be wrong, ns; -1: not known.
    """

    source: int
    target: int
    nbytes: int
    chunks: int
    busy: float
    bandwidth: float | None
    latency: float | None
    clock_error: int


def link_figures(trace: JobTrace, chunks: Iterable[Chunk], span: Span) -> tuple[LinkFigures, ...]:
    """Returns the figures of each link, by source and target. `span`: of the steps that the chunks are of."""
    of_link: dict[tuple[int, int], list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        of_link[chunk.source, chunk.target].append(chunk)
    found = []
    for (source, target), its in sorted(of_link.items()):
        flown = [chunk for chunk in its if chunk.sent is not None and chunk.received is not None]
        flights = union(Span(chunk.sent, max(chunk.sent, chunk.received)) for chunk in flown)  # type: ignore[arg-type, type-var]
        speed = link_speed(flown)
        errors = [trace.offsets[node].error if node in trace.offsets else -1 for node in (source, target)]
        found.append(
            LinkFigures(
                source=source,
                target=target,
                nbytes=sum(chunk.nbytes for chunk in its),
                chunks=len(its),
                busy=total(flights) / max(1, span.ns),
                bandwidth=None if speed is None else speed[0],
                latency=None if speed is None else speed[1],
                clock_error=-1 if min(errors) < 0 else sum(errors),
            )
        )
    return tuple(found)
