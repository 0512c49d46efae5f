"""Figures of each link between nodes: how much went over it, and how fast, from when chunks were sent and had come.

Chunks that followed each other without a gap say how many bytes a second pass; those that found the link empty, what
else a chunk takes. Many links have a shaper (`tc`, and those of clouds): what comes after a pause passes at once, up to
so many bytes, and only then the rate holds (a token bucket).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fusion_trace.read.chunks import ChunkColumns
from fusion_trace.read.job import JobTrace
from fusion_trace.read.rows import NEVER, Ints
from fusion_trace.read.span_columns import Span, union_of

S = 1e9  # ns
_ROUNDS = 8
LEAST_CHUNK = 16 * 1024  # bytes; of smaller ones the time says nothing about the bandwidth
_MOST_CHUNKS = 2000  # that a burst is looked for in
_RATES = np.geomspace(0.04, 1.2, 32)  # of their apparent rate: bursts make links seem faster
_BURSTS = np.geomspace(16e3, 8e6, 20)  # bytes
_FINER = (np.geomspace(0.75, 1.33, 11), np.geomspace(0.95, 1.05, 11))  # of the best of these
_BETTER = 0.8  # of the error without bursts: links are taken for bursty only if they explain so much more
_MUCH_BETTER = 0.5  # of the error of a rate for each link: 0.24 to 0.37 behind equal shapers, else 0.65 and more
_Times = NDArray[np.float64]
_MOST_OF_NODE = 500  # chunks of a node and direction, in which bursts are looked for


@dataclass(frozen=True)
class Link:
    """A node's connection to all others.

    Attributes:
        bandwidth: bytes of payload a second.
        latency: seconds from a byte's departure to its arrival, one way.
        burst: bytes that pass at once after a pause in which as many could have passed: the size of a token bucket.
    """

    bandwidth: float
    latency: float
    burst: float = 0.0


@dataclass(frozen=True)
class LinkFigures:
    """One direction of a link, in the chosen steps.

    Attributes:
        source, target: nodes.
        nbytes, chunks: of payload.
        busy: share of the time of these steps in which something was between its ends.
        bandwidth: payload bytes a second while chunks follow each other; latency: of the rest, seconds. None: no chunk
            that is large enough to tell was seen at both ends. between: the least and the most that the bandwidth may
            be: clocks are not known well, and a chunk that seems fast may be in a burst that passes at once after a
                pause.
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
        its = flown.kept(np.flatnonzero(end == node)[-_MOST_OF_NODE:])
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


# --- rates ------------------------------------------------------------------------------------------------------------

_Direction = tuple[Ints, Ints, Ints]
"""When chunks were sent and had come (ns), and their bytes; in the order in which they were sent."""


def _is_large(direction: _Direction) -> bool:
    return bool((direction[2] >= LEAST_CHUNK).any())


def link_speed(sent_at: Ints, came_at: Ints, sizes: Ints) -> tuple[float, float] | None:
    """Returns bytes a second, and latency (s), of what passes through one network card in one direction, one after the
    other.

    A chunk is on the link from when it was handed over, or the one before it had come, until it has come itself. What
    of that is latency is found by turns with the bandwidth. Medians over bytes and a low quantile leave out those that
    were held up elsewhere.

    Args:
        sent_at, came_at: of each chunk, ns; sizes: in bytes; of shape (n,).
    """
    order = np.argsort(came_at, kind="stable")
    sent, came, nbytes = sent_at[order] / S, came_at[order] / S, sizes[order].astype(float)
    large = nbytes >= LEAST_CHUNK
    if not large.any():
        return None
    before = np.concatenate([[-np.inf], came[:-1]])
    latency, byte = 0.0, 0.0
    for _ in range(_ROUNDS):
        took = np.maximum(came - np.maximum(sent + latency, before), 1e-9)
        byte = _middle((took / np.maximum(nbytes, 1))[large], nbytes[large])
        latency = max(float(np.quantile(came - sent - nbytes * byte, 0.05)), 0.0)
    return 1 / byte, latency


def _middle(values: _Times, weights: _Times) -> float:
    """Returns the median, by weight."""
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    return float(np.interp(0.5, (np.cumsum(weights) - weights / 2) / weights.sum(), values))


# --- bursts -----------------------------------------------------------------------------------------------------------


def with_bursts(link: Link, sides: Sequence[_Direction]) -> Link | None:
    """Returns the link as one that lets bursts pass, or None if that explains little more of when chunks came.

    Both directions together tell it: one in which chunks always find the bucket full does not tell the rate.
    """
    known = [_seconds(side) for side in sides if _is_large(side)]
    error, bursty = _token_bucket(known, link)
    return bursty if error < _BETTER * _without(known, link) else None


def one_shaper(directions: Sequence[_Direction]) -> Link | None:
    """Returns one token bucket that explains when the chunks of several links came, in place of different rates.

    Links behind equal shapers seem to differ if one carries its bytes after pauses and another one at once. None: a
    rate for each of them explains more.
    """
    found = [(side, Link(*speed)) for side in directions if (speed := link_speed(*side)) is not None]
    if len(found) < 2:
        return None
    known = [_seconds(side) for side, _ in found]
    fastest = max((link for _, link in found), key=lambda link: link.bandwidth)
    error, bursty = _token_bucket(known, replace(fastest, latency=min(link.latency for _, link in found)))
    each = sum(_without([side], link) for side, (_, link) in zip(known, found, strict=True))
    return bursty if error < _MUCH_BETTER * each else None


_Side = tuple[_Times, _Times, _Times]


def _seconds(side: _Direction) -> _Side:
    sent, came, nbytes = (column[-_MOST_CHUNKS:] for column in side)
    return (sent - sent[0]) / S, (came - sent[0]) / S, nbytes.astype(float)


def _without(known: Sequence[_Side], link: Link) -> float:
    """Returns the time that the best rate leaves unexplained (s), if nothing passes at once."""
    rates = link.bandwidth * _RATES
    return float(_wrong(known, rates, np.zeros(len(rates)), link.latency).min())


def _token_bucket(known: Sequence[_Side], link: Link) -> tuple[float, Link]:
    """Returns the time that the best bucket leaves unexplained (s), and the link with it."""
    error, rate, burst = np.inf, link.bandwidth, 1.0
    for rates, bursts in ((_RATES, _BURSTS), *((near, near) for near in _FINER)):
        each, other = (axis.ravel() for axis in np.meshgrid(rate * rates, burst * bursts))
        wrong = _wrong(known, each, other, link.latency)
        best = int(wrong.argmin())
        error, rate, burst = float(wrong[best]), float(each[best]), float(other[best])
    return error, replace(link, bandwidth=rate, burst=burst)


def _wrong(known: Sequence[_Side], rates: _Times, bursts: _Times, latency: float) -> _Times:
    """Returns by how much token buckets are wrong of when a byte came (s), in the mean; of shape (buckets,).

    A message has been paid for its bytes' time after the one before, or after the bucket was last full. What is left in
    it is taken from when the one before has come, so that a rate that is a little wrong does not add up. The latency
    is at most `latency`: otherwise the time of what passes after a burst could be taken for it.
    """
    total = np.zeros(len(rates))
    byte, full = 1 / rates, bursts / rates
    for sent, came, nbytes in known:
        late = np.empty((len(sent), len(rates)))
        paid = np.full(len(rates), -np.inf)
        for place, (begin, end, n) in enumerate(zip(sent.tolist(), came.tolist(), nbytes.tolist(), strict=True)):
            paid = np.maximum(paid, begin - full) + n * byte
            late[place] = end - np.maximum(begin, paid)
            paid = np.where(paid > begin, max(end - latency, begin), paid)
        least = np.clip(np.quantile(late, 0.05, axis=0), 0.0, latency)
        total += np.average(np.abs(late - least), axis=0, weights=nbytes)
    return total
