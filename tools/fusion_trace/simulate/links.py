"""Finds out what links are like, from when chunks were sent and when they had come.

Chunks that followed each other without a gap say how many bytes a second pass; those that found the link empty, what
else a chunk takes. Many links have a shaper (`tc`, and those of clouds): what comes after a pause passes at once, up to
so many bytes, and only then the rate holds (a token bucket). A job whose steps send no more than such a burst seems to
have links that are several times as fast as they are. So there are two answers, and replays tell which one is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fusion_trace.read.chunks import Chunk
from fusion_trace.read.operation_index import Ints
from fusion_trace.simulate.model import Link

S = 1e9  # ns
_ROUNDS = 8
LEAST_CHUNK = 16 * 1024  # bytes; of smaller ones the time says nothing about the bandwidth
_MOST_CHUNKS = 2000  # that a burst is looked for in
_RATES = np.geomspace(0.04, 1.2, 32)  # of what they seem to be: bursts make links seem faster
_BURSTS = np.geomspace(16e3, 8e6, 20)  # bytes
_FINER = (np.geomspace(0.75, 1.33, 11), np.geomspace(0.95, 1.05, 11))  # of the best of these
_BETTER = 0.8  # of the error without bursts: links are taken for bursty only if they explain so much more
_MUCH_BETTER = 0.5  # of the error of a rate for each link: 0.24 to 0.37 behind equal shapers, else 0.65 and more
_Times = NDArray[np.float64]


def links_of(
    chunks: Iterable[Chunk], nodes: Sequence[int], others: Callable[[], Iterable[Chunk]]
) -> tuple[tuple[Link, ...], tuple[Link, ...] | None, tuple[int, ...]]:
    """Returns the link of each node; the same links if they let bursts pass, where something speaks for that; and the
    nodes of whose links no rate is known.

    A node's link is the faster of what it sends and what it receives, since the slower one is some other node's doing.

    Args:
        others: returns more chunks, which are looked at if these say nothing of a node's link.
    """
    directions = _directions(chunks, nodes)
    if len(nodes) > 1 and not all(any(_is_large(side) for side in sides) for sides in directions):
        directions = _directions(others(), nodes)
    found, assumed = [], []
    for node, sides in zip(nodes, directions, strict=True):
        known = [speed for side in sides if (speed := link_speed(*side)) is not None]
        if not known:
            assumed.append(node)
        bandwidth, latency = max((s[0] for s in known), default=10e9 / 8), min((s[1] for s in known), default=50e-6)
        found.append(Link(bandwidth, latency, idle_latency=min(latency, _least(sides, bandwidth))))
    bursty = [with_bursts(link, sides) for link, sides in zip(found, directions, strict=True)]
    if not any(bursty):
        return tuple(found), None, tuple(assumed)
    return tuple(found), tuple(better or link for better, link in zip(bursty, found, strict=True)), tuple(assumed)


_Direction = tuple[Ints, Ints, Ints]
"""When chunks were sent and had come (ns), and their bytes; in the order in which they were sent."""


def _directions(chunks: Iterable[Chunk], nodes: Sequence[int]) -> list[tuple[_Direction, _Direction]]:
    """Returns what each node sent, and what it received."""
    flown = [c for c in chunks if c.sent is not None and c.received is not None]
    flown.sort(key=lambda chunk: chunk.sent or 0)

    def direction(its: Sequence[Chunk]) -> _Direction:
        sent, came, nbytes = (
            np.array([getattr(c, of) for c in its], np.int64) for of in ("sent", "received", "nbytes")
        )
        return sent, came, nbytes

    return [
        (direction([c for c in flown if c.source == node]), direction([c for c in flown if c.target == node]))
        for node in nodes
    ]


def _least(sides: Iterable[_Direction], bandwidth: float) -> float:
    """Returns the latency (s) of the chunk that had the least: others may have waited in a queue."""
    took = [(came - sent) / S - nbytes / bandwidth for sent, came, nbytes in sides if len(sent)]
    return max(float(np.concatenate(took).min()), 0.0) if took else np.inf


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
    """Returns what the best rate leaves (s), if nothing passes at once."""
    rates = link.bandwidth * _RATES
    return float(_wrong(known, rates, np.zeros(len(rates)), link.latency).min())


def _token_bucket(known: Sequence[_Side], link: Link) -> tuple[float, Link]:
    """Returns what the best bucket leaves (s), and the link with it."""
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
