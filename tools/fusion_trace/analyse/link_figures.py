"""Figures of each link between nodes: how much went over it, and how fast."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion_trace.read.chunk_columns import ChunkColumns
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operation_index import NEVER
from fusion_trace.read.span_columns import union_of
from fusion_trace.read.spans import Span
from fusion_trace.simulate.links import link_speed


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


def link_figures(trace: JobTrace, chunks: ChunkColumns, span: Span) -> tuple[LinkFigures, ...]:
    """Returns the figures of each link, by source and target. `span`: of the steps that the chunks are of."""
    links = np.unique(np.stack([chunks.source, chunks.target]), axis=1)
    found = []
    for source, target in links.T.tolist():
        its = chunks.kept((chunks.source == source) & (chunks.target == target))
        flown = its.kept((its.sent != NEVER) & (its.received != NEVER))
        flights = union_of(flown.sent, np.maximum(flown.sent, flown.received))
        speed = link_speed(flown.sent, flown.received, flown.nbytes)
        errors = [trace.offsets[node].error if node in trace.offsets else -1 for node in (source, target)]
        found.append(
            LinkFigures(
                source=source,
                target=target,
                nbytes=int(its.nbytes.sum()),
                chunks=len(its),
                busy=int((flights.end - flights.begin).sum()) / max(1, span.ns),
                bandwidth=None if speed is None else speed[0],
                latency=None if speed is None else speed[1],
                clock_error=-1 if min(errors) < 0 else sum(errors),
            )
        )
    return tuple(found)
