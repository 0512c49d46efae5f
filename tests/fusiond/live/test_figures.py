"""What every node of a job does, asked for by one of them."""

from __future__ import annotations

import json
from collections.abc import Callable

from fusion_rt import wire
from fusiond.live.figures import PATIENCE, Gathering, document, fitting
from tests.fusiond.live.looks import TOPOLOGY, link, rank, told


class Place:
    """One node: its figures, and its way to the other one."""

    def __init__(self, nodes: Nodes, node: int) -> None:
        self._nodes, self._node = nodes, node

    def figures(self, asked: wire.FiguresRequest) -> wire.Figures:
        here = self._nodes.here[self._node]
        return wire.Figures(asked.serial, *(getattr(here, name) for name in wire.Figures.__struct_fields__[1:]))

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        if node not in self._nodes.deaf:
            decoded = wire.decode_peer_message(wire.encode(message))
            self._nodes.nodes[node].handlers()[type(decoded)](self._node, decoded)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._nodes.late.append((seconds, callback))


class Nodes:
    """Two of them, and the messages between them; `here`: their figures."""

    def __init__(self) -> None:
        self.here = {0: told((rank(0, 3), rank(1, 3)), (link(1),)), 1: told((rank(2, 4),), (link(0),))}
        self.late: list[tuple[float, Callable[[], None]]] = []
        self.deaf: set[int] = set()
        self.nodes = {node: self._make(node) for node in self.here}

    def _make(self, node: int) -> Gathering:
        place = Place(self, node)
        return Gathering(TOPOLOGY, node, place, place)

    def ask(self, node: int, without: frozenset[int] = frozenset()) -> list[dict[int, wire.Figures]]:
        answers: list[dict[int, wire.Figures]] = []
        self.nodes[node].ask(without, answers.append)
        return answers


def test_one_node_tells_of_all() -> None:
    nodes = Nodes()
    (answer,) = nodes.ask(1)
    assert {node: [each.steps for each in figures.ranks] for node, figures in answer.items()} == {0: [3, 3], 1: [4]}


def test_a_node_that_does_not_answer_is_told_as_silent() -> None:
    nodes = Nodes()
    nodes.deaf.add(0)
    answers = nodes.ask(1)
    assert answers == []
    ((seconds, finish),) = nodes.late
    assert seconds == PATIENCE
    finish()
    found = document("mine", TOPOLOGY, answers[0], 3.0)
    assert [(node["host"], node["answered"]) for node in found["nodes"]] == [("a", False), ("b", True)]


def test_a_node_that_is_gone_is_not_asked() -> None:
    (answer,) = Nodes().ask(1, frozenset({0}))
    assert set(answer) == {1}


def test_nobody_tells_of_ranks_of_other_nodes() -> None:
    nodes = Nodes()
    nodes.here[0] = told((rank(2, 99),), ())
    assert nodes.ask(1) == []  # it is as if it had not answered


def test_what_is_too_long_for_a_message_leaves_out_what_matters_least() -> None:
    links = tuple(link(node % 2, sent=node) for node in range(400))
    ranks = tuple(rank(number % 2, 1, 1, float(number)) for number in range(200))
    found = document("mine", TOPOLOGY, {0: told(ranks, links), 1: told((rank(2),), ())}, 0.0)
    whole = json.loads(fitting(document("mine", TOPOLOGY, {1: told((rank(2),), ())}, 0.0)))
    assert whole["left_out"] == {"links": 0, "ranks": 0, "nodes": 0}
    text = fitting(found, 10_000)
    told_of = json.loads(text)
    assert len(text) <= 10_000
    assert told_of["left_out"]["links"] + len(told_of["nodes"][0]["links"]) == 400
    kept = [each["late_seconds"] for each in told_of["nodes"][0]["ranks"]]
    assert kept == sorted(range(200), reverse=True)[: len(kept)]
