"""The all-reduces, with any number of nodes and workers, sizes, ops and dtypes, against numpy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt import codecs, wire
from fusion_rt.codecs import CodecError, Layout
from fusion_rt.core.dtypes import DTYPES
from fusiond.buckets.recipes import reducer_of
from fusiond.collectives.base import Exchange, ExchangeError
from fusiond.collectives.cost import CostModel
from fusiond.collectives.doubling import Doubling
from fusiond.collectives.halving import Halving
from fusiond.collectives.one_node import OneNode
from fusiond.collectives.ring import Ring
from tests.for_each import for_each
from tests.fusiond.collectives.group import Array, Group, GroupPort, Message, combined, loaded, small_values, stored

OPS = ("sum", "average", "min", "max", "product")
DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
IN_CHUNKS = (Ring, Halving)  # of any size; doubling's array is one chunk
NODES = {Ring: range(2, 8), Doubling: range(2, 8), Halving: range(2, 18)}
KINDS = [(kind, n) for kind, counts in NODES.items() for n in counts] + [(OneNode, 1)]
kinds = for_each(("kind", "nodes"), KINDS)
between_nodes = for_each(("kind", "nodes"), KINDS[:-1])


class AllReduce:
    """One all-reduce of `parts` (by node, then by local worker) in place, and what is left in them."""

    def __init__(
        self,
        kind: Callable[..., Exchange],
        parts: list[list[Array]],
        dtype: str = "float32",
        op: str = "sum",
        codec: str = "dense",
        seed: int = 0,
        chunk_bytes: int = 256,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        self.values = [[part.copy() for part in node] for node in parts]
        ranks = sum(len(node) for node in parts)
        reducer = reducer_of(wire.Reduction(op, prescale, postscale, codec), DTYPES[dtype], ranks, 1)
        layout = Layout(DTYPES[dtype], len(parts[0][0]))

        def make(port: GroupPort) -> Exchange:
            mine = self.values[port.position]
            if kind is OneNode:
                return OneNode(port, reducer, mine, mine)
            return kind(port, reducer, codecs.parse(codec).open(layout), mine, mine)

        self.group = Group(len(parts), make, seed, chunk_bytes)
        self.group.may_send_last = True

    def run(self) -> bytes:
        """The result, which is the same on every rank, bit by bit."""
        self.group.run()
        results = {value.tobytes() for node in self.values for value in node}
        assert len(results) == 1
        return results.pop()


def parts_of(nodes: int, count: int, op: str, dtype: str, workers: int = 1, seed: int = 0) -> list[list[Array]]:
    """Different numbers of workers on different nodes, if there are to be several."""
    local = [1 + (node * (workers - 1)) % workers if workers > 1 else 1 for node in range(nodes)]
    ranks = iter(range(100))
    return [
        [stored(small_values(count, op, dtype, 1000 * seed + next(ranks)), dtype) for _ in range(local[node])]
        for node in range(nodes)
    ]


def sizes(nodes: int) -> list[int]:
    """None, fewer elements than nodes, as many, and several chunks of which the last is not full."""
    if nodes > 7:
        return [nodes - 1, 1009]
    return sorted({0, 1, nodes - 1, nodes, 97, 1009})


@kinds
@for_each("dtype", DTYPE_NAMES)
def test_every_size_and_op_gives_what_numpy_gives(kind: Callable[..., Exchange], nodes: int, dtype: str) -> None:
    for count, op in product(sizes(nodes), OPS):
        if dtype == "bool" and op == "average":
            continue
        parts = parts_of(nodes, count, op, dtype, workers=3 if nodes < 8 else 1)
        chunk_bytes = 256 if kind in IN_CHUNKS else 1 << 20
        result = AllReduce(kind, parts, dtype, op, seed=count, chunk_bytes=chunk_bytes).run()
        everyone = [part for node in parts for part in node]
        what, divisor = ("sum", len(everyone)) if op == "average" else (op, 1)
        expected = combined(what, dtype, everyone, divisor)
        found = np.frombuffer(result, DTYPES[dtype].storage)
        if op == "average" and dtype.startswith(("float", "bf")):
            tolerance = {"bfloat16": 2**-7, "float16": 2**-10}.get(dtype, 1e-6)
            of_parts = nodes * 9 * tolerance / 2 if DTYPES[dtype].is_half else 0.0  # which are rounded, and up to 9
            np.testing.assert_allclose(loaded(found, dtype), loaded(expected, dtype), tolerance, of_parts)
        else:
            np.testing.assert_array_equal(found, expected, f"{op} of {count}")


@kinds
@for_each(("dtype", "largest"), [("float16", 60000.0), ("bfloat16", 3.3e38)])
def test_an_average_of_finite_halves_is_finite(
    kind: Callable[..., Exchange], nodes: int, dtype: str, largest: float
) -> None:
    """The same on every route, but for rounding."""
    choose, ranks = np.random.default_rng(nodes), 2 * nodes
    values = largest * choose.uniform(0.5, 1.0, (ranks, 97)) * choose.choice([1, 1, 1, -1], (ranks, 97))
    values[:, 0], values[:, 1] = largest, -largest
    parts = [[stored(values[2 * node + worker], dtype) for worker in range(2)] for node in range(nodes)]
    found = loaded(np.frombuffer(AllReduce(kind, parts, dtype, "average").run(), np.uint16), dtype)
    expected = np.mean([loaded(part, dtype) for node in parts for part in node], axis=0)
    rounding = 2.0**-11 if dtype == "float16" else 2.0**-8
    np.testing.assert_allclose(found, expected, rtol=0, atol=(nodes + 1) * rounding * largest)


@between_nodes
def test_a_codec_is_told_how_many_bytes_an_exchange_has_sent(kind: Callable[..., Exchange], nodes: int) -> None:
    work = AllReduce(kind, parts_of(nodes, 97, "sum", "float32"), codec="fp16", chunk_bytes=1 << 20)
    work.run()
    opened = [exchange._codec for exchange in work.group.exchanges]  # type: ignore[attr-defined]
    assert [codec.statistics()["packed_nbytes"] for codec in opened] == work.group.sent_bytes


@for_each("order", [(0, 2, 1), (0, 2, 1, 3), (3, 1, 0, 2), (4, 0, 2, 5, 1, 3)])
@for_each("codec", ["dense", "fp16"])
def test_a_ring_in_any_order_gives_the_same_sum_and_speaks_to_neighbours_only(order: Sequence[int], codec: str) -> None:
    for count in sizes(len(order)):
        parts = parts_of(len(order), count, "sum", "float32")
        reduction = AllReduce(partial(Ring, order=order), parts, codec=codec, seed=count)
        expected = combined("sum", "float32", [part for node in parts for part in node], 1)
        np.testing.assert_array_equal(np.frombuffer(reduction.run(), np.float32), expected)
        said = {(source, target) for source, target, *_ in reduction.group.delivered}
        assert said <= set(zip(order, (*order[1:], order[0]), strict=True))
        assert bool(said) == (count > 0)


@kinds
@for_each("dtype", ["uint8", "int8", "int16", "int32"])
def test_an_average_of_integers_does_not_overflow_and_is_truncated_toward_zero(
    kind: Callable[..., Exchange], nodes: int, dtype: str
) -> None:
    limits, choose = np.iinfo(dtype), np.random.default_rng(nodes)
    parts = [
        [choose.integers(limits.min, limits.max, 97, dtype, endpoint=True) for _ in range(1 + node % 2)]
        for node in range(nodes)
    ]
    for node in parts:
        for part in node:
            part[:2] = limits.max, limits.min
    everyone = np.array([part for node in parts for part in node], np.int64)
    expected = np.trunc(everyone.sum(axis=0) / len(everyone)).astype(dtype)
    chunk_bytes = 64 if kind in IN_CHUNKS else 1 << 20
    found = AllReduce(kind, parts, dtype, "average", seed=nodes, chunk_bytes=chunk_bytes).run()
    np.testing.assert_array_equal(np.frombuffer(found, dtype), expected)
    wrapped = AllReduce(kind, parts, dtype, "sum", seed=nodes, chunk_bytes=chunk_bytes).run()
    np.testing.assert_array_equal(np.frombuffer(wrapped, dtype), everyone.sum(axis=0).astype(dtype))


@between_nodes
@for_each("codec", ["dense", "fp16", "bf16"])
def test_bits_are_equal_on_all_ranks_whatever_the_order_of_delivery(
    kind: Callable[..., Exchange], nodes: int, codec: str
) -> None:
    choose = np.random.default_rng(nodes)
    workers = [1 + node % 2 for node in range(nodes)]
    parts = [[choose.standard_normal(517, np.float32) for _ in range(workers[node])] for node in range(nodes)]
    chunk_bytes = 256 if kind in IN_CHUNKS else 1 << 20
    results = {
        AllReduce(kind, parts, op="average", codec=codec, seed=s, chunk_bytes=chunk_bytes).run() for s in range(8)
    }
    assert len(results) == 1
    expected = np.mean([part for node in parts for part in node], axis=0, dtype=np.float64)
    tolerance = {"dense": 1e-6, "fp16": 2**-9, "bf16": 2**-6}[codec]
    np.testing.assert_allclose(np.frombuffer(results.pop(), np.float32), expected, atol=tolerance * nodes)


@kinds
def test_parts_are_scaled_before_and_the_result_after(kind: Callable[..., Exchange], nodes: int) -> None:
    parts = parts_of(nodes, 97, "sum", "float32", workers=2)
    chunk_bytes = 256 if kind in IN_CHUNKS else 1 << 20
    result = AllReduce(kind, parts, prescale=0.5, postscale=4.0, chunk_bytes=chunk_bytes).run()
    expected = 4 * sum(0.5 * part for node in parts for part in node)
    np.testing.assert_array_equal(np.frombuffer(result, np.float32), expected)


@for_each("nodes", range(2, 8))
def test_a_ring_moves_the_least_bytes_there_are(nodes: int) -> None:
    count = nodes * 1000
    reduction = AllReduce(Ring, parts_of(nodes, count, "sum", "float32", workers=2))
    reduction.run()
    assert reduction.group.sent_bytes == [2 * 4 * count * (nodes - 1) // nodes] * nodes
    half = AllReduce(Ring, parts_of(nodes, count, "sum", "float32"), codec="fp16")
    half.run()
    assert half.group.sent_bytes == [2 * 2 * count * (nodes - 1) // nodes] * nodes


@for_each("nodes", [*range(2, 18), 33])
def test_halving_moves_the_least_bytes_there_are_in_two_messages_a_round(nodes: int) -> None:
    """Blocks of a round lie next to each other, but for one round at most on the way out and one on the way back."""
    count = nodes * 100
    reduction = AllReduce(Halving, parts_of(nodes, count, "sum", "float32"), chunk_bytes=1 << 20)
    reduction.run()
    assert reduction.group.sent_bytes == [2 * 4 * count * (nodes - 1) // nodes] * nodes
    rounds = (nodes - 1).bit_length()
    assert max(len(targets) for targets in reduction.group.sent_to) <= 4 * rounds
    assert max(len(set(targets)) for targets in reduction.group.sent_to) <= 2 * rounds


class Timed(Group):
    """A group whose messages take time: `link.latency`, after those of the same sender before have left it."""

    def __init__(self, nodes: int, make: Callable[[GroupPort], Exchange], link: CostModel, chunk_bytes: int) -> None:
        super().__init__(nodes, make, chunk_bytes=chunk_bytes)
        self.now = 0.0
        self._link, self._free = link, [0.0] * nodes
        self._arriving: list[tuple[float, int, Message]] = []

    def elapse(self) -> float:
        """Runs it to the end, and returns the seconds."""
        while self._to_start:
            self._start(self._to_start.pop())
        number = 0
        while self.under_way or self._arriving:
            for message in self.under_way:
                left = max(self.now, self._free[message[0]]) + len(message[3]) * self._link.seconds_per_byte
                self._free[message[0]] = left
                heapq.heappush(self._arriving, (left + self._link.latency, number := number + 1, message))
            self.under_way.clear()
            self.now, _, message = heapq.heappop(self._arriving)
            self.exchanges[message[1]].receive(message[0], message[2], memoryview(bytes(message[3])))
        assert [port.finished for port in self.ports] == [1] * self.nodes
        return self.now


def seconds_of(kind: Callable[..., Exchange], nodes: int, nbytes: int, link: CostModel, smaller: int = 1) -> float:
    """The seconds of an all-reduce; arrays and chunks are smaller, and links slower, by a factor."""
    values = [np.ones(nbytes // 4 // smaller, np.float32) for _ in range(nodes)]
    reducer = reducer_of(wire.Reduction("sum"), DTYPES["float32"], nodes, 1)
    layout = Layout(DTYPES["float32"], len(values[0]))

    def make(port: GroupPort) -> Exchange:
        mine = [values[port.position]]
        return kind(port, reducer, codecs.parse("dense").open(layout), mine, mine)

    slower = CostModel(link.latency, link.seconds_per_byte * smaller)
    found = Timed(nodes, make, slower, (1 << 20) // smaller).elapse()
    assert all((value == nodes).all() for value in values)
    return found


def test_halving_of_16_mib_takes_256_hosts_30_ms_and_a_tenth_more_than_the_model_says_at_most() -> None:
    link = CostModel(100e-6, 0.8e-9)  # 10 Gbit/s
    found = seconds_of(Halving, 256, 16 << 20, link, smaller=256)
    assert link.halving(16 << 20, 256) == pytest.approx(found, rel=0.1)
    assert found <= 30e-3
    assert link.ring(16 << 20, 256) > 75e-3


@for_each("nodes", [4, 8, 12])
def test_the_cheapest_way_is_the_soonest(nodes: int) -> None:
    link = CostModel(100e-6, 0.8e-9)
    for nbytes in (4096, 1 << 18, 1 << 20, 1 << 24):
        chosen = link.route(nbytes, nodes, 1 << 20)
        kinds = {"ring": Ring, "halving": Halving} | ({"doubling": Doubling} if nbytes <= 1 << 20 else {})
        found = {way: seconds_of(kind, nodes, nbytes, link, 16) for way, kind in kinds.items()}
        assert found[chosen] <= 1.12 * min(found.values()), (nbytes, found)


@for_each(("nodes", "messages"), [(2, 2), (3, 4), (4, 8), (5, 10), (7, 14), (8, 24)])
def test_doubling_sends_a_message_in_each_round(nodes: int, messages: int) -> None:
    reduction = AllReduce(Doubling, parts_of(nodes, 5, "sum", "float32"))
    reduction.run()
    assert len(reduction.group.delivered) == messages


@given(
    nodes=st.integers(2, 9),
    count=st.integers(0, 300),
    chunk=st.integers(1, 100),
    seed=st.integers(0, 99),
    kind=st.sampled_from([Ring, Doubling, Halving]),
)
def test_any_size_and_chunk(nodes: int, count: int, chunk: int, seed: int, kind: Callable[..., Exchange]) -> None:
    parts = parts_of(nodes, count, "sum", "int32", workers=2, seed=seed)
    chunk_bytes = 4 * chunk if kind in IN_CHUNKS else 1 << 20
    result = AllReduce(kind, parts, "int32", seed=seed, chunk_bytes=chunk_bytes).run()
    expected = combined("sum", "int32", [part for node in parts for part in node])
    np.testing.assert_array_equal(np.frombuffer(result, np.int32), expected)


# --- peers that send what they should not -----------------------------------------------------------------------------


@pytest.fixture(params=[Ring, Doubling, Halving], ids=["Ring", "Doubling", "Halving"])
def kind(request: pytest.FixtureRequest) -> Callable[..., Exchange]:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("nodes", [2, 3, 4, 7])
def test_a_chunk_that_comes_twice_is_refused(kind: Callable[..., Exchange], nodes: int) -> None:
    reduction = AllReduce(
        kind, parts_of(nodes, 300, "sum", "float32"), chunk_bytes=256 if kind in IN_CHUNKS else 1 << 20
    )
    result = reduction.run()
    for source, target, chunk, payload in list(reduction.group.delivered):
        with pytest.raises(ExchangeError):
            reduction.group.exchanges[target].receive(source, chunk, memoryview(payload))
    assert {value.tobytes() for node in reduction.values for value in node} == {result}


@pytest.mark.parametrize("nodes", [2, 3, 4, 7])
def test_every_chunk_comes_twice_at_once(kind: Callable[..., Exchange], nodes: int) -> None:
    reduction = AllReduce(
        kind, parts_of(nodes, 300, "sum", "float32"), chunk_bytes=256 if kind in IN_CHUNKS else 1 << 20
    )
    group, refused = reduction.group, 0
    while group.step():
        if group.delivered:
            source, target, chunk, payload = group.delivered[-1]
            with pytest.raises(ExchangeError):
                group.exchanges[target].receive(source, chunk, memoryview(payload))
            refused += 1
    assert refused
    reduction.run()


def changed_fields(nodes: int) -> list[dict[str, int]]:
    """Fields that are wrong in any chunk."""
    return [
        {"part": nodes},
        {"part": 2**48 - 1},
        {"start": 1},
        {"start": 2**48 - 1},
        {"start": 64 * 1000},
        {"hop": 2 * nodes},
        {"hop": 2**48 - 1},
        {"hop": 254},
    ]


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_a_chunk_that_has_no_place_is_refused_and_changes_nothing(kind: Callable[..., Exchange], nodes: int) -> None:
    from msgspec.structs import replace

    reduction = AllReduce(
        kind, parts_of(nodes, 300, "sum", "float32"), chunk_bytes=256 if kind in IN_CHUNKS else 1 << 20
    )
    group = reduction.group
    tried = 0
    while group.step():
        found = group.to_started_nodes()
        if not found:
            continue
        source, target, chunk, payload = found[-1]
        before = [value.copy() for value in reduction.values[target]]
        wrong = [(source, replace(chunk, **fields), payload) for fields in changed_fields(nodes)]
        hops = [hop for hop in (chunk.hop - 1, chunk.hop + 1) if hop >= 0]
        wrong += [(source, replace(chunk, hop=hop), payload) for hop in hops]
        wrong += [(other, chunk, payload) for other in range(nodes) if other not in (source, target)]
        for position, bad, data in wrong:
            with pytest.raises(ExchangeError):
                group.exchanges[target].receive(position, bad, memoryview(data))
            tried += 1
        np.testing.assert_array_equal(reduction.values[target], before)
    assert tried
    reduction.run()


@pytest.mark.parametrize("codec", ["dense", "fp16"])
@pytest.mark.parametrize("length", [0, 3, 12, 252, 260, 5000])
def test_a_payload_of_the_wrong_size_is_refused(kind: Callable[..., Exchange], codec: str, length: int) -> None:
    guarded = [np.full(300, 7, np.float32) for _ in range(2)]
    parts = [[whole[100:164].copy()] for whole in guarded]
    reduction = AllReduce(kind, parts, codec=codec)
    for position, whole in enumerate(guarded):
        reduction.values[position][0] = whole[100:164]
    group = reduction.group
    while not group.under_way or group._to_start:
        group.step()
    source, target, chunk, _ = group.under_way[0]
    with pytest.raises(CodecError):
        group.exchanges[target].receive(source, chunk, memoryview(bytes(length)))
    for whole in guarded:
        assert (whole[:100] == 7).all()
        assert (whole[164:] == 7).all()
