"""Rates per second from two looks at a job's figures. No I/O.

The figures are a document as `figures.document` makes it; from one look alone there are no rates, and they are None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Document = Mapping[str, Any]
_LATE = 0.05  # of a step's time


@dataclass(frozen=True)
class NodeRates:
    """Rates of one node, per second; sizes in bytes.

    Attributes:
        cpu: share of one processor.
        saved: share of bytes that compression has saved since the job began; None where nothing is compressed.
        staleness: the mean, in versions; None where there is none.
    """

    node: int
    host: str
    state: str
    operations: float | None
    nbytes: float | None
    cpu: float | None
    memory: int
    under_way: int
    saved: float | None
    staleness: float | None


@dataclass(frozen=True)
class RankRates:
    """Rates of one rank.

    Attributes:
        late_ms: mean time from the first sign of a bucket to the arrival of this rank's part.
        straggles: that is more than the least late rank's by over a twentieth of a step.
    """

    rank: int
    host: str
    steps: int
    steps_per_second: float | None
    late_ms: float | None
    straggles: bool


@dataclass(frozen=True)
class LinkRates:
    """Rates of a link from one node to another: bytes/s, bytes sent and not acknowledged, number of reconnections."""

    source: int
    target: int
    nbytes: float | None
    waiting: int
    reconnections: int
    lost: bool


@dataclass(frozen=True)
class Rates:
    """Rates of a job. `seconds`: between the two looks; `stragglers`: ranks, the latest first."""

    job: str
    seconds: float
    nodes: tuple[NodeRates, ...]
    ranks: tuple[RankRates, ...]
    links: tuple[LinkRates, ...]
    stragglers: tuple[int, ...]


def compare(before: Document | None, after: Document) -> Rates:
    """Returns what has happened between two looks at one job; `before`: None at the first look."""
    old = {} if before is None else {node["node"]: node for node in before["nodes"] if node["answered"]}
    seconds = 0.0 if before is None else after["time"] - before["time"]
    nodes, ranks, links = [], [], []
    for node in after["nodes"]:
        if not node["answered"]:
            nodes.append(NodeRates(node["node"], node["host"], "silent", None, None, None, 0, 0, None, None))
            continue
        was = old.get(node["node"])
        if was is not None and was["pid"] != node["pid"]:
            was = None  # another daemon has taken its place, whose counters began anew
        nodes.append(_node(was, node, seconds))
        ranks += _ranks(was, node, seconds)
        links += _links(was, node, seconds)
    ranks = _judge(sorted(ranks, key=lambda rank: rank.rank))
    late = sorted((rank for rank in ranks if rank.straggles), key=lambda rank: -(rank.late_ms or 0.0))
    stragglers = tuple(rank.rank for rank in late)
    return Rates(after["job"], seconds, tuple(nodes), tuple(ranks), tuple(links), stragglers)


def _judge(ranks: Sequence[RankRates]) -> list[RankRates]:
    """Marks the ranks that straggle."""
    least = min((rank.late_ms for rank in ranks if rank.late_ms is not None), default=0.0)

    def straggles(rank: RankRates) -> bool:
        if rank.late_ms is None or not rank.steps_per_second:
            return False
        return (rank.late_ms - least) / 1000 * rank.steps_per_second > _LATE

    return [replace(rank, straggles=straggles(rank)) for rank in ranks]


def _node(was: Document | None, node: Document, seconds: float) -> NodeRates:
    return NodeRates(
        node["node"],
        node["host"],
        node["state"],
        _rate(was, node, "operations", seconds),
        _rate(was, node, "bytes", seconds),
        _rate(was, node, "cpu_seconds", seconds),
        node["memory_bytes"],
        node["under_way"],
        1 - node["packed_bytes"] / node["dense_bytes"] if node["dense_bytes"] else None,
        node["staleness_mean"] if node["staleness_count"] else None,
    )


def _ranks(was: Document | None, node: Document, seconds: float) -> list[RankRates]:
    old = {} if was is None else {rank["rank"]: rank for rank in was["ranks"]}
    found = []
    for rank in node["ranks"]:
        before = old.get(rank["rank"])
        speed = _rate(before, rank, "steps", seconds)
        late = None
        if before is not None and rank["parts"] > before["parts"]:
            late = (rank["late_seconds"] - before["late_seconds"]) / (rank["parts"] - before["parts"])
        late_ms = None if late is None else 1000 * late
        found.append(RankRates(rank["rank"], node["host"], rank["steps"], speed, late_ms, straggles=False))
    return found


def _links(was: Document | None, node: Document, seconds: float) -> list[LinkRates]:
    old = {} if was is None else {link["node"]: link for link in was["links"]}
    return [
        LinkRates(
            node["node"],
            link["node"],
            _rate(old.get(link["node"]), link, "sent_bytes", seconds),
            link["waiting_bytes"],
            link["reconnections"],
            link["lost"],
        )
        for link in node["links"]
    ]


def _rate(was: Document | None, now: Document, counter: str, seconds: float) -> float | None:
    """Returns a counter's rate; None where it has begun anew, or there is nothing to compare with."""
    if was is None or seconds <= 0 or now[counter] < was[counter]:
        return None
    return float(now[counter] - was[counter]) / seconds
