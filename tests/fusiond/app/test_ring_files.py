"""The rings of all nodes, told and read over the daemons' connections, and nothing else of their hosts."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusion_rt.core.topology import Topology
from fusiond.app.ring_files import RingFiles

TOPOLOGY = Topology(("a", "b"), ((0, 1), (2,)))


class Place:
    """One node's way to the other one."""

    def __init__(self, pair: Pair, node: int) -> None:
        self._pair, self._node = pair, node

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        if node not in self._pair.silent:
            decoded = wire.decode_peer_message(wire.encode(message))
            self._pair.nodes[node].handlers()[type(decoded)](self._node, decoded)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._pair.late.append(callback)


class Pair:
    """Two nodes whose messages are encoded, decoded and delivered at once; `silent` ones get none."""

    def __init__(self, directory: Path) -> None:
        self.silent: set[int] = set()
        self.late: list[Callable[[], None]] = []
        self.directories = [directory / str(node) for node in range(2)]
        for path in self.directories:
            path.mkdir()
        self.nodes = [self._make(node) for node in range(2)]

    def _make(self, node: int) -> RingFiles:
        return RingFiles(str(self.directories[node]), TOPOLOGY, node, Place(self, node))

    def told(self, ask: Callable[[Callable[[dict[str, Any]], None]], None]) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        ask(answers.append)
        while not answers and self.late:
            self.late.pop(0)()
        (answer,) = answers
        return answer

    def piece(self, node: int, name: str, offset: int = 0, nbytes: int = 100) -> dict[str, Any]:
        return self.told(lambda then: self.nodes[0].read(wire.JobRingRequest(node, name, offset, nbytes), then))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_the_rings_of_all_nodes_are_told(pair: Pair) -> None:
    (pair.directories[0] / "node-0.ring").write_bytes(b"1234")
    (pair.directories[0] / "rank-1.ring").write_bytes(b"12")
    (pair.directories[1] / "rank-2.ring").write_bytes(b"")
    told = pair.told(lambda then: pair.nodes[0].tell(frozenset(), then))
    assert told == {
        "nodes": [
            {
                "node": 0,
                "host": "a",
                "rings": [{"name": "node-0.ring", "nbytes": 4}, {"name": "rank-1.ring", "nbytes": 2}],
            },
            {"node": 1, "host": "b", "rings": [{"name": "rank-2.ring", "nbytes": 0}]},
        ]
    }


def test_a_node_that_does_not_answer_or_is_gone_is_told_as_such(pair: Pair) -> None:
    pair.silent.add(1)
    told = pair.told(lambda then: pair.nodes[0].tell(frozenset(), then))
    assert [entry["rings"] for entry in told["nodes"]] == [[], None]
    assert pair.piece(1, "rank-2.ring") == {"data": "", "why_not": "node 1 (host b) does not answer"}
    told = pair.told(lambda then: pair.nodes[0].tell(frozenset({1}), then))
    assert told["nodes"][1]["rings"] is None


def test_pieces_of_a_ring_of_another_node(pair: Pair) -> None:
    data = os.urandom(1000)
    (pair.directories[1] / "node-1.ring").write_bytes(data)
    for offset, nbytes in ((0, 10), (990, 100), (1000, 5), (5000, 5)):
        told = pair.piece(1, "node-1.ring", offset, nbytes)
        assert base64.b64decode(told["data"]) == data[offset : offset + nbytes]
        assert told["why_not"] == ""


@pytest.mark.parametrize(
    "name", ["rank-0.ring", "node-0.ring", "../1/rank-2.ring", "/etc/passwd", "secret", "rank-2.ring.1.new", ""]
)
def test_what_is_no_ring_of_that_node_is_not_read(pair: Pair, name: str) -> None:
    for path in (*pair.directories, pair.directories[0].parent):
        (path / "secret").write_text("x")
        (path / "rank-0.ring").write_text("of another job's node in the same directory")
    told = pair.piece(1, name)
    assert told == {"data": "", "why_not": "node 1 has no such ring"}


def test_links_directories_and_pipes_are_not_read(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (pair.directories[1] / "rank-2.ring").symlink_to(tmp_path / "secret")
    os.mkfifo(pair.directories[1] / "node-1.ring")
    assert "it cannot be read" in pair.piece(1, "rank-2.ring")["why_not"]
    assert pair.piece(1, "node-1.ring") == {"data": "", "why_not": "it is no file"}
    told = pair.told(lambda then: pair.nodes[0].tell(frozenset(), then))
    assert told["nodes"][1]["rings"] == []
    (pair.directories[1] / "rank-2.ring").unlink()
    assert pair.piece(1, "rank-2.ring")["why_not"] == "it cannot be read: No such file or directory"


def test_pieces_are_bounded() -> None:
    for nbytes in (0, -1, wire.MAX_RING_PIECE + 1):
        for message in (wire.RingPieceRequest(1, "rank-0.ring", 0, nbytes), wire.RingPieceRequest(1, "x", -1, 5)):
            with pytest.raises(WireError):
                wire.decode_peer_message(wire.encode(message))
        with pytest.raises(WireError):
            wire.decode_worker_message(wire.encode(wire.JobRingRequest(0, "rank-0.ring", 0, nbytes)))
    with pytest.raises(WireError):
        wire.decode_peer_message(wire.encode(wire.RingPiece(1, bytes(wire.MAX_RING_PIECE + 1))))


def test_the_longest_piece_fits_into_an_answer(pair: Pair) -> None:
    (pair.directories[1] / "rank-2.ring").write_bytes(bytes(wire.MAX_RING_PIECE))
    told = pair.piece(1, "rank-2.ring", 0, wire.MAX_RING_PIECE)
    assert len(base64.b64decode(told["data"])) == wire.MAX_RING_PIECE
    assert len(str(told)) < wire.MAX_TEXT


def test_there_is_no_such_node_and_answers_to_nothing_are_dropped(pair: Pair) -> None:
    assert pair.piece(7, "rank-2.ring")["why_not"] == "there is no node 7 in this job"
    pair.nodes[0].handlers()[wire.RingPiece](1, wire.RingPiece(99, b"x"))
    assert wire.WaitingRequest not in pair.nodes[0].handlers()
