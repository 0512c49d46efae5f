"""Rates per second from two looks at a job's figures. No I/O.

The figures are a document as `figures.document` makes it; from one look alone there are no rates, and they are None.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Document = Mapping[str, Any]
_LATE = 0.05  # of a step's time
_WAITING = 64 << 10  # bytes that are sent and not acknowledged, below which a link is not told to be slow
_FAR_MORE = 4  # times the usual figure of other links


def usual_of_others(values: Sequence[float], together: int = 1) -> list[float | None]:
    """Returns, for each value, the usual value of the others: their lower median; None where there is no other.

    The lower of two in the middle, so that of an even number the faster ones are the measure: half of all may be slow.

    Args:
        together: how many may be slow for one reason, as all links of a host are: even if these are most of all, one
            of the rest is the measure.
    """
    ordered = sorted(range(len(values)), key=lambda place: (values[place], place))
    middle = max(0, min((len(values) - 2) // 2, len(values) - 1 - together))
    usual: list[float | None] = [None] * len(values)
    if len(values) > 1:
        for order, place in enumerate(ordered):
            usual[place] = values[ordered[middle if order > middle else middle + 1]]
    return usual


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
        straggles: that is more than the usual value of the others by over a twentieth of a step, and its host's links
            are not why.
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
    """Rates of a job. `seconds`: between the two looks; `stragglers`: ranks, the latest first; `slow_networks`: nodes
    on whose links data waits."""

    job: str
    seconds: float
    nodes: tuple[NodeRates, ...]
    ranks: tuple[RankRates, ...]
    links: tuple[LinkRates, ...]
    stragglers: tuple[int, ...]
    slow_networks: tuple[int, ...] = ()


def compare(before: Document | None, after: Document) -> Rates:
    """Returns the changes between two looks at one job; `before`: None at the first look."""
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
    slow = _slow_networks(before, links)
    behind = {node.host for node in nodes if node.node in slow}
    ranks = _judge(sorted(ranks, key=lambda rank: rank.rank), behind)
    late = sorted((rank for rank in ranks if rank.straggles), key=lambda rank: -(rank.late_ms or 0.0))
    stragglers = tuple(rank.rank for rank in late)
    return Rates(after["job"], seconds, tuple(nodes), tuple(ranks), tuple(links), stragglers, slow)


def _judge(ranks: Sequence[RankRates], behind: Collection[str]) -> list[RankRates]:
    """Marks the ranks that straggle: later than usual among the others, and not because of their host's links, whose
    results come late and whose next parts therefore do."""
    known = [rank for rank in ranks if rank.late_ms is not None]
    usual = usual_of_others([rank.late_ms or 0.0 for rank in known])
    of_others = {rank.rank: value for rank, value in zip(known, usual, strict=True) if value is not None}

    def straggles(rank: RankRates) -> bool:
        if rank.late_ms is None or not rank.steps_per_second or rank.rank not in of_others or rank.host in behind:
            return False
        return (rank.late_ms - of_others[rank.rank]) / 1000 * rank.steps_per_second > _LATE

    return [replace(rank, straggles=straggles(rank)) for rank in ranks]


def _slow_networks(before: Document | None, links: Sequence[LinkRates]) -> tuple[int, ...]:
    """Returns the nodes all of whose links had far more under way than usual at both looks: data waits there."""
    if before is None:
        return ()
    earlier = {
        (node["node"], link["node"]): link["waiting_bytes"]
        for node in before["nodes"]
        if node["answered"]
        for link in node["links"]
    }
    carrying = [link for link in links if link.nbytes]
    nodes = sorted({node for link in carrying for node in (link.source, link.target)})
    waiting = [float(min(link.waiting, earlier.get((link.source, link.target), 0))) for link in carrying]
    together = max((sum(node in (link.source, link.target) for link in carrying) for node in nodes), default=1)
    usual = usual_of_others(waiting, together)
    full = {
        (link.source, link.target): value is not None and here >= max(_WAITING, _FAR_MORE * value)
        for link, here, value in zip(carrying, waiting, usual, strict=True)
    }
    found = [node for node in nodes if len(nodes) > 2 and all(slow for link, slow in full.items() if node in link)]
    return tuple(found) if len(found) == 1 else ()


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
