"""Blocks of bytes between nodes: what allgather and alltoall are made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fusion_rt import wire
from fusiond.collectives.base import Exchange, ExchangeError
from fusiond.collectives.blocks import Block, Blocks
from tests.fusiond.collectives.group import CHUNK_BYTES, Group, GroupPort


class Exchanged:
    """Every node has a block for every node; `lengths[i][j]` bytes go from i to j."""

    def __init__(self, lengths: list[list[int]], seed: int = 0) -> None:
        nodes = len(lengths)
        choose = np.random.default_rng(seed)
        self.data = [[choose.integers(0, 256, n, np.uint8) for n in row] for row in lengths]

        def make(port: GroupPort) -> Exchange:
            here = port.position
            into = [sum(lengths[i][here] for i in range(source)) for source in range(nodes)]
            parts = [(i, j) for i in range(nodes) for j in range(nodes) if (i == here) != (j == here)]
            return Blocks(
                port,
                [Block(i * nodes + j, i, j, lengths[i][j]) for i, j in parts],
                {i * nodes + j: self.data[i][j] for i, j in parts if i == here},
                [(sum(row[here] for row in lengths), tuple(row[here] for row in lengths), None)],
                [(0, into[here], self.data[here][here])],
                {i * nodes + j: [(0, into[i])] for i, j in parts if j == here},
            )

        self.group = Group(nodes, make, seed)
        self.group.may_send_last = True

    def run(self) -> Exchanged:
        self.group.run()
        for position, exchange in enumerate(self.group.exchanges):
            (result,) = exchange.results
            expected = np.concatenate([row[position] for row in self.data])
            np.testing.assert_array_equal(result.array[: len(expected)], expected)
            assert len(result.array) == len(expected)
            assert result.sizes == tuple(len(row[position]) for row in self.data)
            assert (result.segment is None) == (len(expected) <= wire.MAX_INLINE)
            if result.segment is not None:
                result.segment.close()
        return self


matrices = st.integers(1, 5).flatmap(
    lambda n: st.lists(
        st.lists(
            st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 1000, 9000]), min_size=n, max_size=n
        ),
        min_size=n,
        max_size=n,
    )
)


@given(lengths=matrices, seed=st.integers(0, 99))
def test_every_block_arrives_where_it_belongs(lengths: list[list[int]], seed: int) -> None:
    exchanged = Exchanged(lengths, seed).run()
    for position, row in enumerate(lengths):  # and nothing is sent that need not be
        assert exchanged.group.sent_bytes[position] == sum(row) - row[position]


def test_nobody_is_everybodys_first_target() -> None:
    exchanged = Exchanged([[100] * 4] * 4).run()
    assert exchanged.group.sent_to == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]


def test_what_does_not_belong_is_refused_and_changes_nothing() -> None:
    exchanged = Exchanged([[5, 2 * CHUNK_BYTES, 300], [7, 5, CHUNK_BYTES], [0, 10, 5]])
    group, tried = exchanged.group, 0
    while group.step():
        found = group.to_started_nodes()
        if not found:
            continue
        source, target, chunk, payload = found[-1]
        whole = bytes(payload)
        length = len(exchanged.data[source][target])
        before = group.exchanges[target].results[0].array.copy()
        other = ({0, 1, 2} - {source, target}).pop()
        for position, bad, data in [
            (other, chunk, whole),
            (source, replace(chunk, part=source * 3 + other), whole),
            (source, replace(chunk, part=9), whole),
            (source, replace(chunk, hop=1), whole),
            (source, replace(chunk, start=chunk.start + 1), whole),
            (source, replace(chunk, start=100 * CHUNK_BYTES), b""),
            (source, replace(chunk, start=-(-length // CHUNK_BYTES) * CHUNK_BYTES), b""),
            (source, chunk, whole + b"x"),
            (source, chunk, whole[:-1]),
        ]:
            with pytest.raises(ExchangeError):
                group.exchanges[target].receive(position, bad, memoryview(data))
            tried += 1
        np.testing.assert_array_equal(group.exchanges[target].results[0].array, before)
    assert tried
    exchanged.run()


def test_a_chunk_that_comes_twice_is_refused() -> None:
    exchanged = Exchanged([[10, 700], [1000, 10]]).run()
    for source, target, chunk, payload in list(exchanged.group.delivered):
        with pytest.raises(ExchangeError):
            exchanged.group.exchanges[target].receive(source, chunk, memoryview(payload))
