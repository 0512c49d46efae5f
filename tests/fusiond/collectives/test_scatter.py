"""Reduce-scatter: every member gets its rows of the reduction, whatever the order of delivery."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fusion_rt import codecs, wire
from fusion_rt.codecs import CodecError, Layout
from fusion_rt.core.dtypes import DTYPES
from fusiond.buckets.recipes import reducer_of
from fusiond.collectives.base import Exchange, ExchangeError
from fusiond.collectives.scatter import ReduceScatter, rows_of_members
from tests.for_each import for_each
from tests.fusiond.collectives.group import Array, Group, GroupPort, combined, loaded, small_values, stored

DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")


class Scattered:
    """A reduce-scatter among nodes with these numbers of workers."""

    def __init__(
        self,
        local_sizes: list[int],
        count: int,
        dtype: str = "float32",
        op: str = "sum",
        codec: str = "dense",
        seed: int = 0,
        values: list[Array] | None = None,
        chunk_bytes: int = 256,
    ) -> None:
        members = sum(local_sizes)
        self.homes = [node for node, size in enumerate(local_sizes) for _ in range(size)]
        self.dtype = dtype
        what, divisor = ("sum", members) if op == "average" else (op, 1)
        reducer = reducer_of(wire.Reduction(op, codec=codec), DTYPES[dtype], members, 1)
        self.parts = values or [stored(small_values(count, op, dtype, m), dtype) for m in range(members)]
        self.before = [part.copy() for part in self.parts]
        self.expected = combined(what, dtype, self.parts, divisor)
        self.ranges = rows_of_members(count, members)
        layout = Layout(DTYPES[dtype], count)

        def make(port: GroupPort) -> Exchange:
            local = [m for m, home in enumerate(self.homes) if home == port.position]
            sources = [self.parts[m] for m in local]
            opened = codecs.parse(codec).open(layout)
            return ReduceScatter(port, reducer, opened, sources, [None] * len(local), self.ranges, self.homes, local)

        self.group = Group(len(local_sizes), make, seed, chunk_bytes)
        self.group.may_send_last = True

    def run(self) -> list[Array]:
        """Returns the result of each member."""
        self.group.run()
        np.testing.assert_array_equal(self.parts, self.before)
        by_node = [iter(exchange.results) for exchange in self.group.exchanges]
        results = []
        for home in self.homes:
            result = next(by_node[home])
            results.append(result.array.view(DTYPES[self.dtype].storage).copy())
            if result.segment is not None:
                result.segment.close()
        return results


@for_each("local_sizes", [[1], [3], [1, 1], [2, 1, 3], [1] * 5, [1] * 7])
@for_each("dtype", DTYPE_NAMES)
def test_every_member_gets_its_rows(local_sizes: list[int], dtype: str) -> None:
    members = sum(local_sizes)
    for count in sorted({0, 1, members - 1, members, 97, 1009}):
        for op in ("sum", "min", "max", "product"):
            scattered = Scattered(local_sizes, count, dtype, op, seed=count)
            for (low, high), result in zip(scattered.ranges, scattered.run(), strict=True):
                np.testing.assert_array_equal(result, scattered.expected[low:high])


@for_each("local_sizes", [[1], [3], [1, 1], [2, 1, 3], [1] * 7])
def test_an_average_of_finite_halves_is_finite(local_sizes: list[int]) -> None:
    values = [np.full(97, 60000.0, np.float16).view(np.uint16) for _ in range(sum(local_sizes))]
    found = np.concatenate(Scattered(local_sizes, 97, "float16", "average", values=values).run())
    np.testing.assert_allclose(loaded(found, "float16"), 60000.0, rtol=len(local_sizes) * 2.0**-11)


@pytest.mark.parametrize("codec", ["dense", "fp16"])
def test_an_average_does_not_depend_on_the_order_of_delivery(codec: str) -> None:
    values = list(np.random.default_rng(0).standard_normal((6, 1009), np.float32))
    runs = [Scattered([2, 1, 3], 1009, op="average", codec=codec, seed=s, values=values).run() for s in range(6)]
    assert len({b"".join(part.tobytes() for part in run) for run in runs}) == 1
    np.testing.assert_allclose(
        np.concatenate(runs[0]), np.mean(values, axis=0), atol=1e-6 if codec == "dense" else 2e-3
    )


def test_large_results_lie_in_segments_of_their_own() -> None:
    scattered = Scattered([1, 1], 9000, chunk_bytes=4096)
    results = scattered.run()
    assert [exchange.results[0].segment is not None for exchange in scattered.group.exchanges] == [True, True]
    np.testing.assert_array_equal(np.concatenate(results), loaded(scattered.expected, "float32"))


@given(rows=st.integers(0, 100), members=st.integers(1, 12))
def test_rows_are_divided_as_equally_as_possible(rows: int, members: int) -> None:
    ranges = rows_of_members(rows, members)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == rows
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    lengths = [high - low for low, high in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_what_does_not_belong_is_refused() -> None:
    scattered = Scattered([1, 1, 1], 1000)
    group, tried = scattered.group, 0
    while group.step():
        found = group.to_started_nodes()
        if not found:
            continue
        source, target, chunk, payload = found[-1]
        whole = bytes(payload)
        for bad, data, error in [
            (replace(chunk, part=source), whole, ExchangeError),
            (replace(chunk, part=3), whole, ExchangeError),
            (replace(chunk, hop=1), whole, ExchangeError),
            (replace(chunk, start=chunk.start + 1), whole, ExchangeError),
            (replace(chunk, start=100 * 64), b"", ExchangeError),
        ]:
            with pytest.raises(error):
                group.exchanges[target].receive(source, bad, memoryview(data))
            tried += 1
    assert tried
    for (low, high), result in zip(scattered.ranges, scattered.run(), strict=True):
        np.testing.assert_array_equal(result, scattered.expected[low:high])


@for_each("change", [lambda data: data[:-1], lambda data: data + b"1234", lambda data: b""])
def test_a_payload_of_the_wrong_size_is_refused(change: object) -> None:
    scattered = Scattered([1, 1], 1000)
    group = scattered.group
    while group._to_start or not group.under_way:
        group.step()
    source, target, chunk, payload = group.under_way[0]
    with pytest.raises(CodecError):
        group.exchanges[target].receive(source, chunk, memoryview(change(bytes(payload))))  # type: ignore[operator]


def test_a_chunk_that_comes_twice_is_refused() -> None:
    scattered = Scattered([1, 2], 1000)
    results = scattered.run()
    for source, target, chunk, payload in list(scattered.group.delivered):
        with pytest.raises(ExchangeError):
            scattered.group.exchanges[target].receive(source, chunk, memoryview(payload))
    for (low, high), result in zip(scattered.ranges, results, strict=True):
        np.testing.assert_array_equal(result, scattered.expected[low:high])


@for_each("nodes", [1, 2, 3])
def test_an_average_of_integers_does_not_overflow(nodes: int) -> None:
    values = [np.full(50, 200 + member, np.uint8) for member in range(nodes + 1)]
    results = Scattered([2] + [1] * (nodes - 1), 50, "uint8", "average", values=values).run()
    mean = sum(200 + member for member in range(nodes + 1)) // (nodes + 1)
    assert {int(value) for result in results for value in result} == {mean}
