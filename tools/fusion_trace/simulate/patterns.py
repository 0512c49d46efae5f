"""The messages of each exchange, without running one: which node sends what to whom.

They are the same, message by message, as those of the daemon's own exchanges (a test compares them), so that what
`scaling` predicts for thousands of nodes is about what these would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fusiond.collectives.cost import CostModel

_FOLD, _UNFOLD = 0, 255


class Sent(NamedTuple):
    """A chunk. `hop` and `part` are those of `wire.Chunk`."""

    source: int
    target: int
    part: int
    start: int
    hop: int
    nbytes: int


def pieces(nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Start and length of the pieces of a payload whose length its receiver does not know (`collectives.pieces`)."""
    return [(start, min(chunk_bytes, nbytes - start)) for start in range(0, nbytes + 1, chunk_bytes)]


def segments(elements: int, nodes: int) -> list[int]:
    """Bounds of a ring's segments."""
    return [elements * i // nodes for i in range(nodes + 1)]


def ring(nodes: int, elements: int, chunk_bytes: int, ratio: float = 1.0) -> Iterator[Sent]:
    """Of float32: segment s starts at node s, and goes round twice but for two nodes."""
    bounds, step = segments(elements, nodes), max(1, chunk_bytes // 4)
    for hop in range(2 * nodes - 2):
        for node in range(nodes):
            part = (node - hop) % nodes
            length = bounds[part + 1] - bounds[part]
            for start in range(0, length, step):
                yield Sent(node, (node + 1) % nodes, part, start, hop, round(4 * min(step, length - start) * ratio))


def doubling_rounds(nodes: int) -> list[list[tuple[int, int, int]]]:
    """Rounds of (source, target, hop)."""
    power = nodes.bit_length() - 1
    pairs = 1 << power
    folded = nodes - pairs
    rounds = [[(node + pairs, node, _FOLD) for node in range(folded)]] if folded else []
    for hop in range(1, power + 1):
        rounds.append([(node, node ^ 1 << hop - 1, hop) for node in range(pairs)])
    if folded:
        rounds.append([(node, node + pairs, _UNFOLD) for node in range(folded)])
    return rounds


def doubling(nodes: int, elements: int, ratio: float = 1.0) -> Iterator[Sent]:
    for one in doubling_rounds(nodes):
        for source, target, hop in one:
            yield Sent(source, target, 0, 0, hop, round(4 * elements * ratio))


def all_to_all(nodes: int, nbytes: Sequence[int], part: int, chunk_bytes: int, by_source: bool) -> Iterator[Sent]:
    """Every node sends each other one a payload, of a length that its receiver, or its source, decides."""
    for source in range(nodes):
        for distance in range(1, nodes):
            target = (source + distance) % nodes
            for start, length in pieces(nbytes[source if by_source else target], chunk_bytes):
                yield Sent(source, target, part, start, 0, length)


def prefers_doubling(cost: CostModel, nbytes: int, nodes: int, chunk_bytes: int) -> bool:
    """As `AllReduce` decides."""
    return cost.prefers_doubling(nbytes, nodes, chunk_bytes)
