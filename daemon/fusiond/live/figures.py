"""The figures of every node of a job, asked for by one of them. No I/O."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import msgspec

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusiond.core.dispatch import Handlers
from fusiond.core.effects import Correspondence
from fusiond.core.queries import Rounds

_OF_NODE, _OF_LINK, _OF_RANK = 400, 130, 90  # characters of an entry, about
PATIENCE = 2.0  # seconds for an answer: whoever looks on wants to see the others meanwhile


class Figured(Protocol):
    """The daemon of this node, as far as it has figures."""

    def figures(self, asked: wire.FiguresRequest) -> wire.Figures:
        """Returns the present figures of this node, as it was asked."""


class Gathering:
    """One daemon's questions of that kind, and its answers.

    Args:
        topology, node: the places of ranks, and this node.
        here: has this node's figures.
        outside: sends messages to other nodes.
    """

    def __init__(self, topology: Topology, node: int, here: Figured, outside: Correspondence) -> None:
        self._topology = topology
        self._here = here
        self._rounds: Rounds[wire.Figures] = Rounds(node, outside, self.handlers(), PATIENCE)

    def handlers(self) -> Handlers:
        """Returns the handlers of the nodes' questions and answers."""
        return {wire.FiguresRequest: self._asked, wire.Figures: self._answered}

    def ask(self, without: frozenset[int], then: Callable[[dict[int, wire.Figures]], None]) -> None:
        """Asks all nodes but those that are gone; tells their figures, by node."""
        nodes = [node for node in range(len(self._topology.hosts)) if node not in without]
        links, ranks = shares(len(nodes))
        self._rounds.ask(dict.fromkeys(nodes, partial(wire.FiguresRequest, links=links, ranks=ranks)), then)

    def _asked(self, node: int, request: wire.FiguresRequest) -> None:
        self._rounds.send(node, self._here.figures(request))

    def _answered(self, node: int, figures: wire.Figures) -> None:
        local = set(self._topology.ranks[node])
        if all(each.rank in local for each in figures.ranks):
            self._rounds.answered(node, figures.serial, figures)


def shares(nodes: int, most: int = wire.MAX_TEXT) -> tuple[int, int]:
    """Returns of how many links, and ranks, of each of so many nodes there is room in a document of `most` characters:
    one node does not take in the figures of all links of a large job, which are as many as pairs of nodes."""
    room = max(most - _OF_NODE * nodes, 0) // max(nodes, 1)
    return room // 2 // _OF_LINK, room // 2 // _OF_RANK


def document(
    job: str, topology: Topology, told: Mapping[int, wire.Figures], now: float | None = None
) -> dict[str, Any]:
    """The figures of a job as JSON types; `now`: seconds by the monotonic clock of the daemon that was asked."""
    return {
        "job": job,
        "time": time.monotonic() if now is None else now,
        "nodes": [
            {"node": node, "host": host, "answered": node in told, **(_fields(told[node]) if node in told else {})}
            for node, host in enumerate(topology.hosts)
        ],
    }


def fitting(told: dict[str, Any], most: int = wire.MAX_TEXT) -> str:
    """Returns the document as JSON of at most so many characters. Of a longer one, the links that have carried least
    are left out, then ranks, and then nodes that run as they should; `left_out` says how many."""
    told["left_out"] = {
        "links": sum(node.pop("more_links", 0) for node in told["nodes"]),
        "ranks": sum(node.pop("more_ranks", 0) for node in told["nodes"]),
        "nodes": 0,
    }
    text = json.dumps(told)
    for what, weight in (("links", "sent_bytes"), ("ranks", "late_seconds")):
        longest = max((len(node.get(what, ())) for node in told["nodes"]), default=0)
        while len(text) > most and longest:
            longest //= 2
            for node in told["nodes"]:
                entries = sorted(node.get(what, ()), key=lambda entry: -entry[weight])
                told["left_out"][what] += len(entries[longest:])
                if entries:
                    node[what] = entries[:longest]
            text = json.dumps(told)
    while len(text) > most and told["nodes"]:
        ordered = sorted(told["nodes"], key=lambda node: node.get("state") == "running")
        kept = ordered[: len(ordered) * most // len(text) * 9 // 10]
        told["left_out"]["nodes"] += len(ordered) - len(kept)
        told["nodes"] = sorted(kept, key=itemgetter("node"))
        text = json.dumps(told)
    return text


def _fields(figures: wire.Figures) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.structs.asdict(figures)
    del fields["serial"]
    fields["ranks"] = [msgspec.structs.asdict(rank) for rank in figures.ranks]
    fields["links"] = [msgspec.structs.asdict(link) for link in figures.links]
    return fields
