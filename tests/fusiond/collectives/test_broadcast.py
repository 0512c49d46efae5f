"""Broadcast: along a chain or a tree, from any root, whatever the order of delivery."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from fusiond.collectives.base import Exchange, ExchangeError
from fusiond.collectives.broadcast import Broadcast, tree
from tests.for_each import for_each
from tests.fusiond.collectives.group import CHUNK_BYTES, Array, Group, GroupPort

EMPTY = 0xEE  # what is in an output before anything has come


class Copies:
    """A broadcast of `nbytes` from one worker of the root node, and what everybody has then."""

    def __init__(self, nodes: int, root: int, nbytes: int, workers: int = 2, seed: int = 0) -> None:
        self.data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        self.outputs: dict[int, list[Array]] = {}

        def make(port: GroupPort) -> Exchange:
            mine = [np.full(nbytes, EMPTY, np.uint8) for _ in range(workers)]
            source = None
            if port.position == root:
                source = mine[-1]
                source[:] = self.data
            self.outputs[port.position] = mine
            return Broadcast(port, root, source, mine)

        self.group = Group(nodes, make, seed)
        self.group.may_send_last = True

    def run(self) -> Copies:
        self.group.run()
        for mine in self.outputs.values():
            for output in mine:
                np.testing.assert_array_equal(output, self.data)
        return self


@for_each("nodes", range(1, 8))
@for_each("nbytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES, 3333])
def test_everybody_gets_the_bytes_of_any_root(nodes: int, nbytes: int) -> None:
    for root in range(nodes):
        for seed in range(3):
            Copies(nodes, root, nbytes, seed=seed).run()


@for_each("chain", [False, True])
@for_each("nodes", range(1, 20))
def test_a_tree_reaches_every_node_once(nodes: int, chain: bool) -> None:
    for root in range(nodes):
        places = [tree(position, root, nodes, chain) for position in range(nodes)]
        assert places[root][0] == root
        children = [child for _, children in places for child in children]
        assert sorted([root, *children]) == list(range(nodes))
        for position, (_, mine) in enumerate(places):
            assert all(places[child][0] == position for child in mine)


@for_each("nodes", range(2, 20))
def test_a_small_array_takes_log_many_hops_and_a_large_one_leaves_each_node_once(nodes: int) -> None:
    depth = [0] * nodes
    for position in range(1, nodes):
        parent = position
        while parent:
            parent = tree(parent, 0, nodes, chain=False)[0]
            depth[position] += 1
    assert max(depth) <= math.ceil(math.log2(nodes))
    large = Copies(nodes, 0, 4 * CHUNK_BYTES).run()
    assert large.group.sent_bytes == [4 * CHUNK_BYTES] * (nodes - 1) + [0]


@for_each("nbytes", [CHUNK_BYTES, 2 * CHUNK_BYTES, 700])
def test_what_does_not_belong_is_refused_and_changes_nothing(nbytes: int) -> None:
    copies = Copies(3, 0, nbytes, seed=2)
    group, tried = copies.group, 0
    while group.step():
        found = group.to_started_nodes()
        if not found:
            continue
        source, target, chunk, payload = found[-1]
        whole = bytes(payload)
        before = [output.copy() for output in copies.outputs[target]]
        other = ({0, 1, 2} - {source, target}).pop()
        for position, bad, data in [
            (other, chunk, whole),
            (source, replace(chunk, part=1), whole),
            (source, replace(chunk, hop=1), whole),
            (source, replace(chunk, start=chunk.start + 1), whole),
            (source, replace(chunk, start=100 * CHUNK_BYTES), whole),
            (source, replace(chunk, start=100 * CHUNK_BYTES), b""),
            (source, replace(chunk, start=-(-nbytes // CHUNK_BYTES) * CHUNK_BYTES), b""),
            (source, chunk, whole + b"x"),
            (source, chunk, whole[:-1]),
            (source, chunk, b""),
        ]:
            with pytest.raises(ExchangeError):
                group.exchanges[target].receive(position, bad, memoryview(data))
            tried += 1
        np.testing.assert_array_equal(copies.outputs[target], before)
    assert tried
    copies.run()


def test_the_root_takes_nothing_and_nobody_takes_a_chunk_twice() -> None:
    copies = Copies(3, 0, 1000).run()
    for source, target, chunk, payload in list(copies.group.delivered):
        for receiver in (target, 0):
            with pytest.raises(ExchangeError):
                copies.group.exchanges[receiver].receive(source, chunk, memoryview(payload))
    copies.run()
