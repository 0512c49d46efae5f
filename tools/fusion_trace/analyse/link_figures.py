"""Figures of each link between nodes: how much went over it, and how fast."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion_trace.read.chunk_columns import ChunkColumns
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operation_index import NEVER
from fusion_trace.read.span_columns import Span, union_of
from fusion_trace.simulate.links import LEAST_CHUNK, link_speed, with_bursts
from fusion_trace.simulate.model import Link

_MOST_CHUNKS = 500  # of a node and direction, in which bursts are looked for


@dataclass(frozen=True)
class LinkFigures:
    """One direction of a link, in the chosen steps.

    Attributes:
        source, target: nodes.
        nbytes, chunks: of payload.
        busy: share of the time of these steps in which something was between its ends.
        bandwidth: payload bytes a second while chunks follow each other; latency: of the rest, seconds. None: no chunk
            that is large enough to tell was seen at both ends. between: the least and the most that the bandwidth may
            be: clocks are not known well, and what seems fast may be a burst that passes at once after a pause.
        clock_error: by how much its times may be wrong, ns; -1: not known.
    """

    source: int
    target: int
    nbytes: int
    chunks: int
    busy: float
    bandwidth: float | None
    between: tuple[float, float] | None
    latency: float | None
    clock_error: int


def link_figures(trace: JobTrace, chunks: ChunkColumns, span: Span) -> tuple[LinkFigures, ...]:
    """Returns the figures of each link, by source and target. `span`: of the steps that the chunks are of."""
    links = np.unique(np.stack([chunks.source, chunks.target]), axis=1)
    flown = chunks.kept((chunks.sent != NEVER) & (chunks.received != NEVER))
    flown = flown.kept(np.argsort(flown.sent, kind="stable"))
    shaped = {node: rate for node in np.unique(links).tolist() if (rate := _shaped(flown, node)) is not None}
    found = []
    for source, target in links.T.tolist():
        its = chunks.kept((chunks.source == source) & (chunks.target == target))
        seen = flown.kept((flown.source == source) & (flown.target == target))
        flights = union_of(seen.sent, np.maximum(seen.sent, seen.received))
        speed = link_speed(seen.sent, seen.received, seen.nbytes)
        errors = [trace.offsets[node].error if node in trace.offsets else -1 for node in (source, target)]
        error = -1 if min(errors) < 0 else sum(errors)
        between = None
        if speed is not None:
            doubt = _doubt(seen, error)
            least = min(speed[0], *(shaped.get(node, speed[0]) for node in (source, target)))
            between = least / (1 + doubt), speed[0] / (1 - doubt)
        found.append(
            LinkFigures(
                source=source,
                target=target,
                nbytes=int(its.nbytes.sum()),
                chunks=len(its),
                busy=int((flights.end - flights.begin).sum()) / max(1, span.ns),
                bandwidth=None if speed is None else speed[0],
                between=between,
                latency=None if speed is None else speed[1],
                clock_error=error,
            )
        )
    return tuple(found)


def _shaped(flown: ChunkColumns, node: int) -> float | None:
    """Returns the bytes a second of a node's link, if it seems to let bursts pass that are faster than it."""
    sides = []
    for end in (flown.source, flown.target):
        its = flown.kept(np.flatnonzero(end == node)[-_MOST_CHUNKS:])
        sides.append((its.sent, its.received, its.nbytes))
    known = [speed for side in sides if (speed := link_speed(*side)) is not None]
    if not known:
        return None
    link = Link(max(speed[0] for speed in known), min(speed[1] for speed in known))
    bursty = with_bursts(link, sides)
    return None if bursty is None else bursty.bandwidth


def _doubt(seen: ChunkColumns, error: int) -> float:
    """Returns by which share the time of a link's chunks may be wrong. `error`: of its clocks, ns; -1: not known."""
    large = seen.kept(seen.nbytes >= LEAST_CHUNK)
    followed = large.alone() > large.sent
    if error <= 0 or 2 * large.nbytes[followed].sum() >= large.nbytes.sum():
        return 0.0  # the receiver's clock alone says how long most took after those before them
    return min(error / max(float(np.median(large.received - large.sent)), 1.0), 0.99)
