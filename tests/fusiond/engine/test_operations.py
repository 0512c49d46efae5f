"""Operations of a whole job, in any order of events: results against numpy, and what they cost in messages.

The simulated workers overwrite their memory as soon as they are told that an operation is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.codecs.half import Fp16
from fusion_rt.core.dtypes import DType
from fusion_rt.core.topology import ProcessSet
from fusion_rt.kernels import cpu
from fusiond.operations import operation as running
from fusiond.operations import thread_work
from tests.for_each import for_each
from tests.fusiond.simulation import Array, Node, SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
LAYOUTS = [[1], [3], [1, 1], [2, 1, 3], [1, 1, 1, 1, 1]]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
sizes = for_each("count", [0, 1, 5, 3000, 20_001])
SEEDS = range(4)
every_seed = for_each("seed", SEEDS)


def floats(job: SimulatedJob, shape: tuple[int, ...] = (5,), seed: int = 0) -> list[Array]:
    """Small whole numbers, so that sums are exact: for each rank."""
    choose = np.random.default_rng(seed)
    return [choose.integers(-9, 10, shape).astype(np.float32) for _ in job.ranks]


def allreduce(values: Array, op: str = "sum", codec: str = "dense") -> wire.Signature:
    return wire.Signature("allreduce", "float32", values.shape, op, codec=codec)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads work also on what the tests have, within a node as between nodes."""
    monkeypatch.setattr(running, "PLAIN_WORK", thread_work.INLINE_WORK)


# --- all-reduce -------------------------------------------------------------------------------------------------------


@layouts
@for_each(
    ("count", "inline"), [(0, False), (1, False), (5, False), (3000, False), (20_001, False), (0, True), (5, True)]
)
@every_seed
def test_everybody_gets_the_sum(layout: list[int], count: int, inline: bool, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    values = floats(job, (count,), seed)
    for clock in range(3):  # negotiated, and then not
        handles = job.submit_all("x", allreduce(values[0]), values, clock, inline)
        results = [job.result(rank, handle) for rank, handle in enumerate(handles)]
        np.testing.assert_array_equal(results, [np.sum(values, axis=0)] * job.size)
    job.nothing_is_left()


@pytest.mark.parametrize(
    ("layout", "dtype", "op", "elements", "woken"),
    [
        ([2], "float32", "sum", 1 << 17, 0),
        ([2], "float32", "sum", 1 << 18, 1),
        ([2, 1], "float32", "sum", 1 << 17, 1),
        ([2], "int8", "sum", 1 << 19, 0),
        ([2], "int8", "average", 1 << 16, 0),
        ([2], "int8", "average", 1 << 19, 1),
        ([2], "int64", "average", 1 << 16, 0),
        ([2], "float16", "adasum", 1 << 15, 0),
        ([2], "float16", "adasum", 1 << 18, 1),
    ],
)
def test_a_thread_is_woken_for_much_work_or_for_what_other_nodes_wait_for(
    layout: list[int], dtype: str, op: str, elements: int, woken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PLAIN_WORK", thread_work.PLAIN_WORK)
    runs: list[int] = []
    run = Node.run_jobs

    def counted(self: Node, jobs: Sequence[Callable[[], None]], then: Callable[[BaseException | None], None]) -> None:
        runs.append(len(jobs))
        run(self, jobs, then)

    monkeypatch.setattr(Node, "run_jobs", counted)
    job = SimulatedJob(layout)
    values = [each.astype(dtype) for each in floats(job, (elements,))]
    if op == "adasum":  # of equal ones it is what each is
        values = [values[0]] * job.size
    whole = np.sum(values, axis=0) if op == "sum" else np.trunc(np.mean(values, axis=0))
    handles = job.submit_all("x", wire.Signature("allreduce", dtype, (elements,), op), values, 0, False)  # type: ignore[arg-type]
    results = [job.result(rank, handle, dtype).view(dtype) for rank, handle in enumerate(handles)]
    np.testing.assert_array_equal(results, [whole.astype(dtype)] * job.size)
    assert bool(runs) == woken


@pytest.mark.parametrize("inline", [thread_work.INLINE_WORK, 0])
@pytest.mark.parametrize("kind", ["allreduce", "reducescatter"])
@pytest.mark.parametrize("op", ["sum", "max"])
@layouts
def test_kernels_are_compiled_beside_the_event_loop_and_by_nobody_else(
    layout: list[int], op: str, kind: str, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that compiles sends no heartbeats for seconds."""
    for module in (running, thread_work):
        monkeypatch.setattr(module, "INLINE_WORK", inline)
        monkeypatch.setattr(module, "PLAIN_WORK", inline)
    prepared: list[str] = []
    reduce = cpu.reduce

    def checked(op: str, dtype: DType, *arguments: Any, **how: Any) -> None:
        assert dtype.name in prepared
        reduce(op, dtype, *arguments, **how)

    monkeypatch.setattr(cpu, "reduce", checked)
    monkeypatch.setattr(cpu, "prepare", lambda dtypes, _: prepared.extend(dtype.name for dtype in dtypes))
    job = SimulatedJob(layout)
    job.has_kernels = False
    values = floats(job, (100 * job.size,))
    signature = wire.Signature(kind, "float32", values[0].shape, op)  # type: ignore[arg-type]
    handles = [job.submit(rank, "x", signature, values[rank]) for rank in job.ranks]
    assert not prepared, "what `submit` does, the event loop does"
    job.settle()
    expected = np.sum(values, axis=0) if op == "sum" else np.max(values, axis=0)
    for rank, handle in enumerate(handles):
        mine = expected if kind == "allreduce" else np.split(expected, job.size)[rank]
        np.testing.assert_array_equal(job.result(rank, handle), mine)
    assert set(prepared) == {"float32"}
    job.nothing_is_left()


@pytest.mark.parametrize(
    ("dtype", "op", "kernel"), [("float16", "adasum", "float64 to float16"), ("int8", "average", "int64")]
)
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_what_other_kernels_need_is_compiled_beside_the_event_loop_too(
    layout: list[int], dtype: str, op: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    on_thread: list[bool] = []
    reduce, convert, run = cpu.reduce, cpu.convert, Node.run_jobs

    def run_jobs(self: Node, jobs: Sequence[Callable[[], None]], then: Callable[[BaseException | None], None]) -> None:
        run(self, [partial(on_thread.append, True), *jobs, on_thread.pop], then)

    def prepare(dtypes: Sequence[DType], conversions: Sequence[tuple[DType, DType]] = ()) -> None:
        assert on_thread
        prepared.extend(each.name for each in dtypes)
        prepared.extend(f"{source.name} to {target.name}" for source, target in conversions)

    def checked(op: str, dtype: DType, *arguments: Any, **how: Any) -> None:
        assert dtype.name in prepared
        reduce(op, dtype, *arguments, **how)

    def checked_convert(source: Array, of: DType, target: Array, to: DType) -> None:
        assert f"{of.name} to {to.name}" in prepared
        convert(source, of, target, to)

    monkeypatch.setattr(Node, "run_jobs", run_jobs)
    monkeypatch.setattr(
        Node, "has_kernels", lambda _, dtype, conversions=(): dtype.name == "float16" and not conversions
    )
    monkeypatch.setattr(cpu, "prepare", prepare)
    monkeypatch.setattr(cpu, "reduce", checked)
    monkeypatch.setattr(cpu, "convert", checked_convert)
    job = SimulatedJob(layout)
    values = [np.full(100, 6, dtype)] * job.size
    signature = wire.Signature("allreduce", dtype, (100,), op)  # type: ignore[arg-type]
    handles = [job.submit(rank, "x", signature, values[rank]) for rank in job.ranks]
    job.settle()
    for rank, handle in enumerate(handles):
        np.testing.assert_array_equal(job.result(rank, handle, dtype).view(dtype), values[0])
    assert kernel in prepared
    job.nothing_is_left()


@pytest.mark.parametrize("kind", ["allreduce", "reducescatter"])
def test_one_node_needs_no_kernels_of_a_codec(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody prepares them, so the event loop would compile them."""
    monkeypatch.setattr(Fp16, "open", lambda *_: pytest.fail("the codec is opened"))
    job = SimulatedJob([2])
    values = floats(job, (100,))
    handles = job.submit_all("x", wire.Signature(kind, "float32", (100,), "sum", codec="fp16"), values)  # type: ignore[arg-type]
    job.settle()
    expected = values[0] + values[1]
    for rank, handle in enumerate(handles):
        mine = expected if kind == "allreduce" else np.split(expected, 2)[rank]
        np.testing.assert_array_equal(job.result(rank, handle), mine)


@every_seed
def test_some_ranks_of_a_node_may_send_their_tensor_in_the_message(seed: int) -> None:
    job = SimulatedJob([2, 3], seed)
    values = floats(job)
    handles = job.on_all_ranks(
        lambda rank: job.submit(rank, "x", allreduce(values[0]), values[rank], inline=rank % 2 == 0)
    )
    for rank, handle in enumerate(handles):
        np.testing.assert_array_equal(job.result(rank, handle), np.sum(values, axis=0))


@layouts
def test_ranks_in_any_order_on_the_nodes(layout: list[int]) -> None:
    size = sum(layout)
    shuffled = iter(np.random.default_rng(1).permutation(size).tolist())
    ranks = [tuple(next(shuffled) for _ in range(n)) for n in layout]
    job = SimulatedJob(layout, ranks=ranks)
    values = floats(job, (7,))
    handles = job.submit_all("x", allreduce(values[0]), values)
    np.testing.assert_array_equal(job.result(0, handles[0]), np.sum(values, axis=0))
    gathered = job.submit_all("g", wire.Signature("allgather", "float32", (7,)), values)
    for rank, handle in enumerate(gathered):
        np.testing.assert_array_equal(job.result(rank, handle), np.concatenate(values))
    scattered = job.submit_all("s", wire.Signature("reducescatter", "float32", (7,)), values)
    parts = [job.result(rank, handle) for rank, handle in enumerate(scattered)]
    np.testing.assert_array_equal(np.concatenate(parts), np.sum(values, axis=0))


@for_each("codec", ["dense", "fp16"])
@for_each("count", [100, 20_001])
def test_bits_are_equal_on_all_ranks_whatever_the_order_of_events(codec: str, count: int) -> None:
    values = list(np.random.default_rng(5).standard_normal((6, count), np.float32))
    found = set()
    for seed in range(6):
        job = SimulatedJob([2, 1, 3], seed, connections=2)
        handles = job.submit_all("x", allreduce(values[0], "average", codec), values)
        found.update(job.result(rank, handle).tobytes() for rank, handle in enumerate(handles))
    assert len(found) == 1
    result = np.frombuffer(found.pop(), np.float32)
    np.testing.assert_allclose(result, np.mean(values, axis=0), atol=1e-6 if codec == "dense" else 5e-3)


@pytest.mark.parametrize("layout", [[2, 1, 3], [1, 1]], ids=str)
def test_an_approved_allreduce_asks_nobody(layout: list[int]) -> None:
    job = SimulatedJob(layout)
    values = floats(job)
    signature = allreduce(values[0])
    job.submit_all("x", signature, values)
    asked, told = job.messages(wire.Request), job.messages(wire.Verdict)
    assert asked == len(layout) - 1
    assert told == len(layout) - 1
    for clock in range(1, 5):
        job.submit_all("x", signature, values, clock)
    job.submit_all("of another name, but alike", signature, values)
    assert (job.messages(wire.Request), job.messages(wire.Verdict)) == (asked, told)
    job.submit_all("y", allreduce(values[0], "max"), values)
    assert job.messages(wire.Request) == 2 * asked


def test_one_node_asks_nobody_at_all() -> None:
    job = SimulatedJob([4])
    values = floats(job)
    for name in "xyz":
        job.submit_all(name, allreduce(values[0]), values)
    assert job.sent == []


def test_data_that_comes_before_the_workers_waits_for_them() -> None:
    job = SimulatedJob([1, 1, 1])
    values = floats(job, (3000,))
    signature = allreduce(values[0])
    job.submit_all("x", signature, values)
    first = job.submit(0, "y", signature, values[0])
    second = job.submit(1, "y", signature, values[1])
    job.settle()
    assert not job.is_answered(0, first)
    third = job.submit(2, "y", signature, values[2])
    job.settle()
    for rank, handle in enumerate([first, second, third]):
        np.testing.assert_array_equal(job.result(rank, handle), np.sum(values, axis=0))
    job.nothing_is_left()


@for_each("seed", range(8))
def test_many_operations_under_way_at_once(seed: int) -> None:
    job = SimulatedJob([2, 1, 2], seed, connections=2)
    names = [f"t{i}" for i in range(6)]
    values = {name: floats(job, (1 + 700 * i,), i) for i, name in enumerate(names)}
    handles: dict[tuple[int, str, int], int] = {}
    choose = np.random.default_rng(seed)
    for clock in range(3):
        for rank in job.ranks:
            for index in choose.permutation(len(names)):

                def action(rank: int = rank, name: str = names[index], clock: int = clock) -> None:
                    mine = values[name][rank] + clock
                    handles[rank, name, clock] = job.submit(rank, name, allreduce(mine), mine, clock)

                job.later(rank, action)
    job.settle()
    for (rank, name, clock), handle in handles.items():
        np.testing.assert_array_equal(job.result(rank, handle), np.sum(values[name], axis=0) + job.size * clock)
    job.nothing_is_left()


@for_each("layout", [[1, 1, 1], [2, 1, 3], [1] * 5])
def test_operations_that_are_alike_can_be_negotiated_at_the_same_time(layout: list[int]) -> None:
    """Once the first is approved, some nodes do not ask any more about the others, which some have asked about."""
    for seed in range(30):
        job = SimulatedJob(layout, seed)
        values = floats(job)
        for rank, name in product(job.ranks, "abc"):
            job.later(rank, partial(job.submit, rank, name, allreduce(values[0]), values[rank]))
        job.settle()
        assert [len(job.answers[rank]) for rank in job.ranks] == [3] * job.size
        assert all(isinstance(message, wire.Done) for answers in job.answers.values() for message, _ in answers)
        job.nothing_is_left()


def test_more_operations_than_peers_may_be_ahead_by(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusiond.engine import exchanges

    monkeypatch.setattr(exchanges, "_MAX_EARLY", 10)
    job = SimulatedJob([1, 1])
    values = floats(job)
    signature = allreduce(values[0])
    job.submit_all("x", signature, values)
    ours = [job.submit(0, f"t{i}", signature, values[0]) for i in range(30)]  # all of them wait here for node 1
    theirs = [job.submit(1, f"t{i}", signature, values[1]) for i in reversed(range(30))]
    late = job.submit(1, "late", signature, values[1])
    job.settle()
    handle = job.submit(0, "late", signature, values[0])
    job.settle()
    for rank, handles in enumerate([[*ours, handle], [*theirs, late]]):
        for each in handles:
            np.testing.assert_array_equal(job.result(rank, each), np.sum(values, axis=0))


def test_a_peer_that_is_ahead_by_too_many_operations_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusiond.engine import exchanges

    monkeypatch.setattr(exchanges, "_MAX_EARLY", 10)
    job = SimulatedJob([1, 1])
    values = floats(job)
    signature = allreduce(values[0])
    job.submit_all("x", signature, values)
    for i in range(11):
        job.submit(1, f"t{i}", signature, values[1])
    while job.step():
        pass
    assert "node 1 (host host1) sent data of" in job.nodes[0].failure
    assert "too many operations under way" in job.nodes[0].failure


# --- the other collectives --------------------------------------------------------------------------------------------


@layouts
@sizes
def test_a_broadcast_from_every_root(layout: list[int], count: int) -> None:
    for seed in SEEDS:
        job = SimulatedJob(layout, seed)
        for root in job.ranks:
            values = floats(job, (count,), root)
            signature = wire.Signature("broadcast", "float32", (count,), root=root)
            inline = count <= 5 and seed % 2 == 0
            handles = job.submit_all("b", signature, values, root, inline)
            for rank, handle in enumerate(handles):
                np.testing.assert_array_equal(job.result(rank, handle), values[root])
        job.nothing_is_left()


@layouts
@for_each("width", [0, 3, 900])
@every_seed
def test_an_allgather_of_different_numbers_of_rows(layout: list[int], width: int, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    rows = [(rank + seed) % 3 for rank in job.ranks]
    values = [np.full((rows[rank], width), rank + 1, np.float32) for rank in job.ranks]
    handles = job.on_all_ranks(
        lambda rank: job.submit(rank, "g", wire.Signature("allgather", "float32", values[rank].shape), values[rank])
    )
    for rank, handle in enumerate(handles):
        message, _ = job.answer(rank, handle)
        assert isinstance(message, wire.Done)
        assert message.sizes == tuple(rows)
        np.testing.assert_array_equal(job.result(rank, handle), np.concatenate(values).reshape(-1))
    job.nothing_is_left()


@layouts
@for_each("width", [1, 700])
@every_seed
def test_an_alltoall_of_any_splits(layout: list[int], width: int, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    splits = np.random.default_rng(seed).integers(0, 4, (job.size, job.size))
    values = [
        np.concatenate([np.full((splits[i][j], width), 100 * i + j, np.float32) for j in job.ranks]) for i in job.ranks
    ]

    def submit(rank: int) -> int:
        signature = wire.Signature("alltoall", "float32", values[rank].shape)
        return job.submit(rank, "a", signature, values[rank], splits=tuple(splits[rank].tolist()))

    handles = job.on_all_ranks(submit)
    for rank, handle in enumerate(handles):
        message, _ = job.answer(rank, handle)
        assert isinstance(message, wire.Done)
        assert message.sizes == tuple(splits[:, rank].tolist())
        expected = np.concatenate([np.full(splits[i][rank] * width, 100 * i + rank, np.float32) for i in job.ranks])
        np.testing.assert_array_equal(job.result(rank, handle), expected)
    job.nothing_is_left()


@for_each("ranks", [[(1, 0)], [(2, 0, 1)], [(3, 0), (2, 1)]])
def test_workers_of_a_node_may_have_their_ranks_in_any_order(ranks: list[tuple[int, ...]]) -> None:
    """As they have when one was lost, and another has come in its slot with the last rank."""
    job = SimulatedJob([len(each) for each in ranks], ranks=ranks)
    values = [np.full((rank + 1, 2), rank, np.float32) for rank in job.ranks]
    gathered = job.on_all_ranks(
        lambda rank: job.submit(rank, "g", wire.Signature("allgather", "float32", values[rank].shape), values[rank])
    )
    splits = [[1 + rank + other for other in job.ranks] for rank in job.ranks]
    sent = [np.repeat(np.float32([10 * i + j for j in job.ranks]), splits[i])[:, None] for i in job.ranks]
    exchanged = job.on_all_ranks(
        lambda rank: job.submit(
            rank, "a", wire.Signature("alltoall", "float32", sent[rank].shape), sent[rank], splits=tuple(splits[rank])
        )
    )
    for rank in job.ranks:
        np.testing.assert_array_equal(job.result(rank, gathered[rank]), np.concatenate(values).reshape(-1))
        expected = np.concatenate([np.full(splits[i][rank], 10 * i + rank, np.float32) for i in job.ranks])
        np.testing.assert_array_equal(job.result(rank, exchanged[rank]), expected)
    job.nothing_is_left()


@every_seed
def test_an_alltoall_of_many_small_blocks_comes_to_an_end(seed: int) -> None:
    """More blocks than the window has chunks, none of them borrowed, so that the last credit never comes."""
    job = SimulatedJob([5, 5], seed)
    values = [np.arange(10, dtype=np.float32) + 10 * rank for rank in job.ranks]
    signature = wire.Signature("alltoall", "float32", (10,))
    handles = job.on_all_ranks(
        lambda rank: job.submit(rank, "a", signature, values[rank], splits=(1,) * 10, inline=True)
    )
    for rank, handle in enumerate(handles):
        np.testing.assert_array_equal(job.result(rank, handle), np.arange(10) * 10 + rank)
    job.nothing_is_left()


@layouts
@for_each("shape", [(1, 3), (7, 2), (600, 9)])
def test_a_reducescatter(layout: list[int], shape: tuple[int, int]) -> None:
    for seed in SEEDS:
        job = SimulatedJob(layout, seed)
        values = floats(job, shape, seed)
        for clock in range(2):
            handles = job.submit_all("r", wire.Signature("reducescatter", "float32", shape), values, clock)
            expected = np.array_split(np.sum(values, axis=0), job.size)
            for rank, handle in enumerate(handles):
                np.testing.assert_array_equal(job.result(rank, handle), expected[rank].reshape(-1))
        job.nothing_is_left()


@layouts
def test_a_barrier_waits_for_everybody(layout: list[int]) -> None:
    for seed in SEEDS:
        job = SimulatedJob(layout, seed)
        for clock in range(3):
            handles = [job.submit(rank, "b", wire.Signature("barrier"), None, clock) for rank in job.ranks[:-1]]
            job.settle()
            assert not any(job.is_answered(rank, handle) for rank, handle in enumerate(handles))
            handles.append(job.submit(job.size - 1, "b", wire.Signature("barrier"), None, clock))
            job.settle()
            assert [job.result(rank, handle).size for rank, handle in enumerate(handles)] == [0] * job.size
        job.nothing_is_left()


@for_each("dtype", ["float64", "float16", "bfloat16", "int64", "int8", "bool"])
def test_every_dtype_travels(dtype: str) -> None:
    from fusion_rt.core.dtypes import DTYPES

    job = SimulatedJob([2, 1, 3])
    storage = DTYPES[dtype].storage
    ones = {"float16": 0x3C00, "bfloat16": 0x3F80}.get(dtype, 1)
    values = [np.full(9, ones, storage) for _ in job.ranks]
    handles = job.submit_all("m", wire.Signature("allreduce", dtype, (9,), "max"), values)
    gathered = job.submit_all("g", wire.Signature("allgather", dtype, (9,)), values)
    for rank in job.ranks:
        assert (job.result(rank, handles[rank], dtype) == ones).all()
        assert (job.result(rank, gathered[rank], dtype) == ones).all()


# --- memory -----------------------------------------------------------------------------------------------------------


@for_each("kind", ["allreduce", "broadcast", "allgather", "reducescatter"])
@for_each("seed", range(10))
def test_memory_is_not_read_after_its_worker_was_told(kind: str, seed: int) -> None:
    """Two nodes are told at different times; whoever is told first overwrites what the other may still need."""
    job = SimulatedJob([1, 2, 1, 1], seed, chunk_bytes=4096, window_bytes=8192, connections=3)
    values = floats(job, (60, 100), seed)
    handles = job.submit_all(
        "x", wire.Signature(kind, "float32", (60, 100), root=1 if kind == "broadcast" else 0), values
    )  # type: ignore[arg-type]
    expected = {
        "allreduce": [np.sum(values, axis=0)] * job.size,
        "broadcast": [values[1]] * job.size,
        "allgather": [np.concatenate(values)] * job.size,
        "reducescatter": np.array_split(np.sum(values, axis=0), job.size),
    }[kind]
    for rank, handle in enumerate(handles):
        np.testing.assert_array_equal(job.result(rank, handle), np.asarray(expected[rank]).reshape(-1))
    job.nothing_is_left()


def test_what_is_under_way_to_a_slow_node_is_bounded() -> None:
    job = SimulatedJob([1, 1], chunk_bytes=4096, window_bytes=4 * 4096)
    values = floats(job, (100_000,))
    signature = wire.Signature("broadcast", "float32", (100_000,))
    handles = [job.submit(rank, "x", signature, values[rank]) for rank in job.ranks]
    most = 0
    while job.step():
        waiting = sum(len(queue) for (_, _, channel), queue in job._channels.items() if channel != "control")
        most = max(most, waiting)
    assert 0 < most <= 4
    np.testing.assert_array_equal(job.result(1, handles[1]), values[0])


# --- process sets -----------------------------------------------------------------------------------------------------


@for_each("members", [(1, 3, 5), (0, 1), (2,), (3, 4, 5)])
def test_a_process_set_keeps_to_itself(members: tuple[int, ...]) -> None:
    for seed in SEEDS:
        job = SimulatedJob([2, 1, 3], seed, process_sets=[ProcessSet(1, members)])
        values = floats(job, (3000,), seed)
        signature = wire.Signature("allreduce", "float32", (3000,), "average", process_set=1)
        for clock in range(2):
            handles = {rank: job.submit(rank, "x", signature, values[rank], clock) for rank in members}
            job.settle()
            expected = np.mean([values[rank] for rank in members], axis=0)
            for rank, handle in handles.items():
                np.testing.assert_allclose(job.result(rank, handle), expected, rtol=1e-6)
        gather = wire.Signature("allgather", "float32", (3000,), process_set=1)
        handles = {rank: job.submit(rank, "g", gather, values[rank]) for rank in members}
        job.settle()
        for rank, handle in handles.items():
            np.testing.assert_array_equal(job.result(rank, handle), np.concatenate([values[r] for r in members]))
        assert set(job.answers) <= set(members)
