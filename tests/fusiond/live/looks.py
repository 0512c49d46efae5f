"""Figures of a job of two nodes and three ranks, to be varied."""

from __future__ import annotations

from typing import Any

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusiond.live import figures

TOPOLOGY = Topology(("a", "b"), ((0, 1), (2,)))


def rank(number: int, steps: int = 0, parts: int = 0, late: float = 0.0) -> wire.RankFigures:
    return wire.RankFigures(number, steps, parts, late)


def link(node: int, sent: int = 0, lost: bool = False) -> wire.LinkFigures:
    return wire.LinkFigures(node, sent, 0, 7, 1, lost)


def told(ranks: tuple[wire.RankFigures, ...], links: tuple[wire.LinkFigures, ...], **changed: Any) -> wire.Figures:
    fields: dict[str, Any] = {
        "serial": 1, "pid": 100, "state": "running", "failure": "", "uptime_seconds": 5.0, "cpu_seconds": 1.0,
        "memory_bytes": 2048, "operations": 0, "bytes": 0, "under_way": 0, "dense_bytes": 0, "packed_bytes": 0,
        "staleness_count": 0, "staleness_mean": 0.0, **changed,
    }  # fmt: skip
    return wire.Figures(ranks=ranks, links=links, **fields)


def document(now: float, nodes: dict[int, wire.Figures], job: str = "mine") -> dict[str, Any]:
    return figures.document(job, TOPOLOGY, nodes, now)
