"""Groups: process sets that only their members know, in which nothing is negotiated.

Results are compared with numpy. The simulated workers overwrite their memory as soon as an operation is done.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES
from tests.for_each import for_each
from tests.fusiond.simulation import Array, SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
LAYOUTS = [[1], [3], [1, 1], [2, 1, 3], [1, 1, 1, 1, 1]]
layouts = for_each("layout", LAYOUTS)
every_seed = for_each("seed", range(3))
ways = for_each("way", ["in place", "inline", "into", "inline, into"])


def whole(job: SimulatedJob, seed: int, *shape: int) -> list[Array]:
    """Small whole numbers, so that sums are exact: for each rank."""
    choose = np.random.default_rng(seed)
    return [choose.integers(-9, 10, shape).astype(np.float32) for _ in job.ranks]


class Members:
    """The members of a group, which submit one operation after the other."""

    def __init__(self, job: SimulatedJob, key: str = "group", ranks: tuple[int, ...] = ()) -> None:
        self.job = job
        self.ranks = ranks or tuple(job.ranks)
        self.key = key
        self.id = job.open_group(key, self.ranks)
        self._clocks = dict.fromkeys(self.ranks, 0)

    def submit(self, rank: int, kind: str, values: Array | None, *, way: str = "in place", **how: Any) -> int:
        """Submits a member's next operation; `nbytes`: of its result. Returns the handle."""
        clock = self._clocks[rank]
        self._clocks[rank] += 1
        nbytes, splits, receives = how.pop("nbytes", 0), how.pop("splits", ()), how.pop("receives", ())
        seconds = how.pop("seconds", 0.0)
        shape = () if values is None else values.shape
        dtype = "" if values is None else how.pop("dtype", "float32")
        signature = wire.Signature(kind, dtype, shape, process_set=self.id, **how)  # type: ignore[arg-type]
        return self.job.submit(
            rank, self.key, signature, values, clock, splits, "inline" in way, receives,
            nbytes if "into" in way else None, seconds,
        )  # fmt: skip

    def submit_all(self, kind: str, values: list[Array] | None, **how: Any) -> dict[int, int]:
        """Every member submits its next operation, at some time; returns the handles."""
        handles: dict[int, int] = {}
        sizes = {name: how.pop(name) for name in ("nbytes", "splits", "receives") if isinstance(how.get(name), list)}
        for position, rank in enumerate(self.ranks):

            def submit(rank: int = rank, position: int = position) -> None:
                mine = None if values is None else values[rank]
                own = {name: size[position] for name, size in sizes.items()}
                handles[rank] = self.submit(rank, kind, mine, **how, **own)

            self.job.later(rank, submit)
        return handles

    def results(self, handles: dict[int, int]) -> list[Array]:
        self.job.settle()
        return [self.job.result(rank, handles[rank]) for rank in self.ranks]


def nothing_was_negotiated(job: SimulatedJob) -> None:
    assert [job.messages(kind) for kind in (wire.Request, wire.Verdict, wire.Mismatch)] == [0, 0, 0]
    job.nothing_is_left()


@layouts
@ways
@every_seed
@for_each("count", [0, 1, 5, 3000])
def test_everybody_gets_the_sum(layout: list[int], way: str, count: int, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    if "inline" in way:
        count = min(count, 5)
    handles = []
    for step in range(3):
        values = whole(job, 10 * seed + step, count)
        handles.append((members.submit_all("allreduce", values, way=way, nbytes=4 * count), np.sum(values, axis=0)))
    for some, expected in handles:
        np.testing.assert_array_equal(members.results(some), [expected] * job.size)
    nothing_was_negotiated(job)


@layouts
@ways
@every_seed
def test_a_tensor_goes_from_the_root_to_all(layout: list[int], way: str, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    values = whole(job, seed, 5 if "inline" in way else 3000)
    for root in job.ranks:
        handles = members.submit_all("broadcast", values, way=way, nbytes=values[0].nbytes, root=root)
        np.testing.assert_array_equal(members.results(handles), [values[root]] * job.size)
    nothing_was_negotiated(job)


@layouts
@for_each("into", [False, True])
def test_who_only_receives_a_broadcast_gives_no_tensor(layout: list[int], into: bool) -> None:
    job = SimulatedJob(layout)
    members = Members(job)
    values = whole(job, 0, 20)
    handles = {}
    for rank in job.ranks:
        signature = wire.Signature("broadcast", "float32", (20,), process_set=members.id)
        mine = values[0] if rank == 0 else None
        handles[rank] = job.submit(rank, "group", signature, mine, into=80 if into else None)
    np.testing.assert_array_equal(members.results(handles), [values[0]] * job.size)
    nothing_was_negotiated(job)


@layouts
@ways
@every_seed
@for_each("even", [False, True])
def test_everybody_gets_the_rows_of_all(layout: list[int], way: str, even: bool, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    choose = np.random.default_rng(seed)
    scale = 3 if "inline" in way else 700
    rows = [scale] * job.size if even else [int(n) for n in choose.integers(0, scale, job.size)]
    values = [choose.random((n, 3)).astype(np.float32) for n in rows]
    expected = np.concatenate(values).reshape(-1)
    handles = members.submit_all("allgather", values, way=way, nbytes=expected.nbytes, rows=() if even else tuple(rows))
    np.testing.assert_array_equal(members.results(handles), [expected] * job.size)
    assert {job.answer(rank, handles[rank])[0].sizes for rank in job.ranks} == {tuple(rows)}  # type: ignore[union-attr]
    nothing_was_negotiated(job)


@layouts
@ways
@every_seed
def test_rows_go_to_where_their_split_says(layout: list[int], way: str, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    choose = np.random.default_rng(seed)
    splits = choose.integers(0, 3 if "inline" in way else 300, (job.size, job.size)) * choose.integers(0, 2, job.size)
    values = [choose.random((int(sum(row)), 2)).astype(np.float32) for row in splits]
    parts = [np.split(mine, np.cumsum(row)[:-1]) for mine, row in zip(values, splits, strict=True)]
    expected = [np.concatenate([part[rank] for part in parts]).reshape(-1) for rank in job.ranks]
    handles = members.submit_all(
        "alltoall",
        values,
        way=way,
        nbytes=[result.nbytes for result in expected],
        splits=[tuple(row) for row in splits.tolist()],
        receives=[tuple(column) for column in splits.T.tolist()],
    )
    for result, wanted in zip(members.results(handles), expected, strict=True):
        np.testing.assert_array_equal(result, wanted)
    nothing_was_negotiated(job)


@layouts
@ways
@every_seed
@for_each("even", [False, True])
def test_everybody_gets_its_rows_of_the_sum(layout: list[int], way: str, even: bool, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    choose = np.random.default_rng(seed)
    scale = 3 if "inline" in way else 700
    rows = [scale] * job.size if even else [int(n) for n in choose.integers(0, scale, job.size)]
    values = whole(job, seed, sum(rows), 2)
    expected = np.split(np.sum(values, axis=0), np.cumsum(rows)[:-1])
    handles = members.submit_all(
        "reducescatter", values, way=way, nbytes=[part.nbytes for part in expected], rows=() if even else tuple(rows)
    )
    for result, wanted in zip(members.results(handles), expected, strict=True):
        np.testing.assert_array_equal(result, wanted.reshape(-1))
    nothing_was_negotiated(job)


@layouts
@every_seed
def test_nobody_passes_a_barrier_before_all_have_come(layout: list[int], seed: int) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    handles = {rank: members.submit(rank, "barrier", None, way="inline") for rank in members.ranks[:-1]}
    while job.step():
        pass
    assert not any(job.is_answered(rank, handle) for rank, handle in handles.items())
    last = members.ranks[-1]
    handles[last] = members.submit(last, "barrier", None, way="inline")
    members.results(handles)
    nothing_was_negotiated(job)


@every_seed
def test_groups_overlap_and_do_not_wait_for_each_other(seed: int) -> None:
    job = SimulatedJob([2, 2], seed)
    groups = [Members(job, key, ranks) for key, ranks in [("a", (0, 1, 3)), ("b", (1, 2)), ("c", (0, 1, 2, 3))]]
    waiting = groups[2].submit(0, "allreduce", np.ones(9, np.float32))
    values = whole(job, seed, 40)
    told = [(group, group.submit_all("allreduce", values)) for group in groups[:2] for _ in range(3)]
    for group, handles in told:
        expected = sum(values[rank] for rank in group.ranks)
        np.testing.assert_array_equal(group.results(handles), [expected] * len(group.ranks))
    assert not job.is_answered(0, waiting)


def test_who_is_no_member_knows_nothing_of_a_group() -> None:
    job = SimulatedJob([1, 1, 1])
    members = Members(job, "pair", (1, 2))
    values = whole(job, 0, 5)
    members.results(members.submit_all("allreduce", values))
    assert not any(0 in (source, target) for source, target, _ in job.sent)
    assert members.id not in job.engine(0).participants
    assert members.id == wire.group_id("pair") >= wire.GROUPS
    handle = job.submit(0, "pair", wire.Signature("allreduce", "float32", (5,), process_set=members.id), values[0])
    assert "no rank here has opened" in job.error(0, handle)


def test_two_groups_with_one_id_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = SimulatedJob([2])
    monkeypatch.setattr(wire, "group_id", lambda key: wire.GROUPS + 7)
    job.engine(0).groups.open(0, wire.OpenGroup(1, "a", (0, 1)))
    job.engine(0).groups.open(1, wire.OpenGroup(2, "b", (0, 1)))
    assert isinstance(job.answer(0, 1)[0], wire.Done)
    assert "the keys 'b' and 'a' of two groups have one id" in job.error(1, 2)


@for_each(
    ("rank", "ranks", "why"),
    [
        (0, (0, 1), "rank 0 opened group 'a' a second time"),
        (1, (0, 1, 2), "rank 0 (host host0) opened it of ranks [0, 1]"),
        (2, (0, 1), "and its opener is one of them"),
        (1, (1, 0), "a group has different ranks"),
        (1, (1, 7), "a group has different ranks of 0 to 2"),
        (1, (), "a group has different ranks"),
    ],
)
def test_a_group_that_cannot_be_is_refused(rank: int, ranks: tuple[int, ...], why: str) -> None:
    job = SimulatedJob([3])
    job.engine(0).groups.open(0, wire.OpenGroup(1, "a", (0, 1)))
    job.engine(0).groups.open(rank, wire.OpenGroup(2, "a", ranks))
    assert why in job.error(rank, 2)


@every_seed
def test_closing_a_group_fails_what_is_under_way_in_it(seed: int) -> None:
    job = SimulatedJob([2, 1], seed)
    members = Members(job)
    handles = {rank: members.submit(rank, "allreduce", np.ones(9, np.float32)) for rank in (0, 2)}
    job.close_group("group", 0)
    job.settle()
    for rank, handle in handles.items():
        assert job.error(rank, handle) == (
            "operation 0 of group 'group' was under way when rank 0 (host host0) closed the group"
        )
    late = members.submit(1, "allreduce", np.ones(9, np.float32))
    assert "rank 0 (host host0) closed the group" in job.error(1, late)
    for rank in (1, 2):
        job.close_group("group", rank)
    assert all(members.id not in node.engine.participants for node in job.nodes)
    job.engine(0).groups.open(0, wire.OpenGroup(99, "group", (0, 1, 2)))
    assert "a key is used once" in job.error(0, 99)
    job.nothing_is_left()


@every_seed
def test_data_of_a_group_that_is_closed_here_is_dropped(seed: int) -> None:
    job = SimulatedJob([1, 1], seed)
    members = Members(job)
    job.close_group("group", 1)
    handle = members.submit(0, "allreduce", np.ones(2000, np.float32))
    job.settle()
    assert not job.is_answered(0, handle)
    job.close_group("group", 0)
    job.settle()  # the worker's memory is its own again only once the other node has taken what was sent of it
    assert "closed the group" in job.error(0, handle)


@every_seed
def test_joining_is_no_business_of_a_group(seed: int) -> None:
    job = SimulatedJob([2, 1], seed)
    members = Members(job, "most", (0, 2))
    joined = job.submit(0, "join", wire.Signature("join"))
    values = whole(job, seed, 100)
    handles = members.submit_all("allreduce", values)
    np.testing.assert_array_equal(members.results(handles), [values[0] + values[2]] * 2)
    assert not job.is_answered(0, joined)
    others = [job.submit(rank, "join", wire.Signature("join")) for rank in (1, 2)]
    job.settle()
    assert all(job.is_answered(rank, handle) for rank, handle in zip((0, 1, 2), [joined, *others], strict=True))
    members.results(members.submit_all("barrier", None, way="inline"))
    job.nothing_is_left()


@layouts
@ways
@every_seed
def test_the_root_alone_gets_the_reduction(layout: list[int], way: str, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    values = whole(job, seed, 5 if "inline" in way else 3000)
    for root in job.ranks:
        nbytes = [values[0].nbytes if rank == root else 0 for rank in job.ranks]
        handles = members.submit_all("reduce", values, way=way, nbytes=nbytes, root=root)
        results = members.results(handles)
        np.testing.assert_array_equal(results[root], np.sum(values, axis=0))
        if way != "in place":
            assert [len(result) for rank, result in enumerate(results) if rank != root] == [0] * (job.size - 1)
    nothing_was_negotiated(job)


def test_a_reduction_sends_data_to_the_root_only() -> None:
    job = SimulatedJob([1, 1, 1])
    members = Members(job)
    values = whole(job, 0, 5000)
    members.results(members.submit_all("reduce", values, root=1))
    assert job.payload_bytes == [20_000, 0, 20_000]


@layouts
@for_each("kind", ["allreduce", "reducescatter", "reduce"])
@for_each(("op", "function"), [("band", np.bitwise_and), ("bor", np.bitwise_or), ("bxor", np.bitwise_xor)])
@for_each("dtype", ["int32", "uint8", "bool"])
def test_bits_are_combined(layout: list[int], kind: str, op: str, function: Any, dtype: str) -> None:
    job = SimulatedJob(layout)
    members = Members(job)
    choose = np.random.default_rng(1)
    top = 2 if dtype == "bool" else 250
    values = [choose.integers(0, top, 400 * job.size).astype(DTYPES[dtype].storage) for _ in job.ranks]
    handles = members.submit_all(kind, values, op=op, dtype=dtype)
    job.settle()
    expected = functools.reduce(function, values)
    result = job.result(0, handles[0], dtype)
    np.testing.assert_array_equal(result, expected[:400] if kind == "reducescatter" else expected)


@pytest.mark.parametrize(("dtype", "prescale"), [("float32", 1.0), ("int32", 2.0)])
def test_bits_of_what_is_no_integer_or_scaled_are_refused(dtype: str, prescale: float) -> None:
    job = SimulatedJob([1])
    members = Members(job)
    handle = members.submit(
        0, "allreduce", np.zeros(3, DTYPES[dtype].storage), dtype=dtype, op="band", prescale=prescale
    )
    assert "band is for integers and bool, and they cannot be scaled" in job.error(0, handle)


@for_each("kind", ["join", "add_process_set", "remove_process_set"])
def test_what_concerns_all_ranks_is_refused(kind: str) -> None:
    job = SimulatedJob([1])
    members = Members(job)
    assert "concerns all ranks and cannot be done in process set" in job.error(
        0, members.submit(0, kind, None, way="inline")
    )


def test_a_plan_is_refused() -> None:
    job = SimulatedJob([1])
    members = Members(job)
    handle = job.propose(0, wire.Proposal("g", members.id, 0, wire.Reduction(), ()))
    assert "a plan is negotiated, and in a group nothing is" in job.error(0, handle)


@pytest.mark.parametrize(
    ("signature", "why"),
    [
        (wire.Signature("reduce", "float32", (2,)), "possible in groups only"),
        (wire.Signature("reducescatter", "float32", (2,), rows=(2,)), "possible in groups only"),
    ],
)
def test_outside_groups_there_is_none_of_this(signature: wire.Signature, why: str) -> None:
    job = SimulatedJob([1])
    assert why in job.error(0, job.submit(0, "x", signature, np.ones(2, np.float32)))
    place = job.submit(0, "y", wire.Signature("allreduce", "float32", (2,)), np.ones(2, np.float32), into=8)
    assert "only in a group a result goes where it is wanted" in job.error(0, place)


def test_a_result_that_cannot_be_is_refused_before_there_is_memory_for_it() -> None:
    job = SimulatedJob([1, 1])
    members = Members(job)
    nothing = np.ones((0, 3), np.float32)
    handle = members.submit(0, "alltoall", nothing, splits=(0, 0), receives=(0, 2**47))
    assert "more than the" in job.error(0, handle)
    job.settle()
    signature = wire.Signature("broadcast", "float32", (2**40,), root=1, process_set=members.id)
    handle = job.submit(0, "group", signature, clock=1)
    assert "are received nowhere" in job.error(0, handle)


# --- ranks that do not do the same ------------------------------------------------------------------------------------

ONE = np.ones((4, 3), np.float32)
MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "kind": ({"kind": "allreduce"}, {"kind": "barrier", "values": None, "way": "inline"}, "allreduce sum", "barrier"),
    "kind, of which one receives": ({"kind": "broadcast"}, {"kind": "allreduce"}, "broadcast from root 0", "allreduce"),
    "shape": ({"kind": "allreduce"}, {"kind": "allreduce", "values": ONE[:2]}, "float32 [4, 3]", "float32 [2, 3]"),
    "dtype": (
        {"kind": "allreduce"},
        {"kind": "allreduce", "values": ONE.astype(np.int32), "dtype": "int32"},
        "float32 [4, 3]",
        "int32 [4, 3]",
    ),
    "op": ({"kind": "allreduce"}, {"kind": "allreduce", "op": "max"}, "allreduce sum", "allreduce max"),
    "root": ({"kind": "broadcast", "root": 0}, {"kind": "broadcast", "root": 1}, "from root 0", "from root 1"),
    "root of a reduction": ({"kind": "reduce", "root": 0}, {"kind": "reduce", "root": 1}, "to root 0", "to root 1"),
    "rows": (
        {"kind": "allgather", "rows": (4, 4)},
        {"kind": "allgather", "rows": (3, 4)},
        "in parts of [4, 4] rows",
        "in parts of [3, 4] rows",
    ),
    "equal rows": ({"kind": "allgather"}, {"kind": "allgather", "values": ONE[:2]}, "[4, 3]", "[2, 3]"),
    "rows of a sum": (
        {"kind": "reducescatter", "rows": (4, 0)},
        {"kind": "reducescatter"},
        "in parts of [4, 0] rows",
        "reducescatter sum float32 [4, 3]",
    ),
}


# Of these, a node without data to wait for is done before it could know.
DONE_AT_ONCE = {"kind, of which one receives", "root"}


@for_each(
    ("layout", "case"),
    [([2], case) for case in MISMATCHES] + [([1, 1], case) for case in MISMATCHES if case not in DONE_AT_ONCE],
)
@every_seed
def test_ranks_that_do_not_do_the_same_all_fail_and_the_group_goes_on(layout: list[int], case: str, seed: int) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    handles: list[int] = []
    for rank, how in enumerate(MISMATCHES[case][:2]):
        how = {"values": ONE, **how}
        job.later(rank, lambda rank=rank, how=how: handles.append(members.submit(rank, **how)))  # type: ignore[misc]
    job.settle()
    job.pass_time(70)
    errors = [
        message.message for rank in (0, 1) for message, _ in job.answers[rank] if isinstance(message, wire.Failed)
    ]
    assert len(errors) == 2
    for error in errors:
        assert "do not agree about operation 0 of group 'group'" in error
        assert all(words in error for words in MISMATCHES[case][2:])
    values = whole(job, 0, 50)
    np.testing.assert_array_equal(members.results(members.submit_all("allreduce", values)), [sum(values)] * 2)
    job.nothing_is_left()


@for_each("layout", [[2], [1, 1]])
@every_seed
def test_rows_that_nobody_expects_fail_on_both(layout: list[int], seed: int) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    handles = members.submit_all("alltoall", [ONE, ONE], splits=[(2, 2), (1, 3)], receives=[(2, 2), (2, 3)])
    job.settle()
    late = {rank: handle for rank, handle in handles.items() if len(layout) == 1 or rank == 0}  # 1 has what it expects
    for rank, handle in late.items():
        error = job.error(rank, handle)
        assert (
            "rank 1 sends 1 rows to rank 0, which expects 2" in error or "from rank 1 to rank 0 more or fewer" in error
        )
    members.results(members.submit_all("barrier", None, way="inline"))
    job.nothing_is_left()


@for_each(
    ("how", "why"),
    [
        ({"kind": "alltoall", "splits": (4, 0), "receives": (4,)}, "needs rows from each of 2"),
        ({"kind": "alltoall", "splits": (4, 1), "receives": (4, 0)}, "splits that add up to 4 rows"),
        ({"kind": "allgather", "rows": (3, 4)}, "do not fit its tensor of 4 rows"),
        ({"kind": "reducescatter", "rows": (3, 4)}, "do not fit its tensor of 4 rows"),
        ({"kind": "broadcast", "root": 7}, "the root rank 7 is not in"),
    ],
)
def test_sizes_that_do_not_fit_fail_on_all(how: dict[str, Any], why: str) -> None:
    job = SimulatedJob([1, 1])
    members = Members(job)
    handles = [members.submit(0, values=ONE, **how), members.submit(1, "barrier", None, way="inline")]
    job.settle()
    for rank, handle in enumerate(handles):
        assert why in job.error(rank, handle)
    job.nothing_is_left()


@every_seed
def test_who_is_done_when_others_find_that_they_do_not_agree_learns_it_with_the_next_operation(seed: int) -> None:
    job = SimulatedJob([1, 1], seed)
    members = Members(job)
    done = [members.submit(rank, "broadcast", ONE, root=rank) for rank in (0, 1)]
    job.settle()
    assert all(isinstance(job.answer(rank, handle)[0], wire.Done) for rank, handle in enumerate(done))
    handles = members.submit_all("allreduce", [ONE, ONE])
    job.settle()
    for rank, handle in handles.items():
        assert "the ranks did not agree about operation 0 of group 'group', which was broadcast from" in job.error(
            rank, handle
        )


@every_seed
def test_who_still_waits_fails_when_another_was_done_with_something_else(seed: int) -> None:
    job = SimulatedJob([1, 1], seed)
    members = Members(job)
    done, waiting = members.submit(0, "broadcast", ONE), members.submit(1, "allreduce", ONE)
    job.settle()
    assert isinstance(job.answer(0, done)[0], wire.Done)
    error = job.error(1, waiting)
    assert "do not agree about operation 0" in error
    assert "broadcast from root 0" in error
    assert "allreduce sum" in error


# --- time-outs --------------------------------------------------------------------------------------------------------


@for_each("layout", [[3], [2, 1], [1, 1, 1]])
@for_each("kind", ["allreduce", "barrier", "broadcast", "reduce"])
@every_seed
def test_when_its_time_is_up_an_operation_fails_and_names_who_is_missing(
    layout: list[int], kind: str, seed: int
) -> None:
    job = SimulatedJob(layout, seed)
    members = Members(job)
    values = None if kind == "barrier" else ONE
    way = "inline" if kind == "barrier" else "in place"
    root = 2 if kind == "broadcast" else 1
    handles = {rank: members.submit(rank, kind, values, way=way, root=root, seconds=5.0) for rank in (0, 1)}
    job.settle()
    job.pass_time(4)
    assert not any(job.is_answered(rank, handle) for rank, handle in handles.items() if kind != "reduce" or rank == 1)
    job.pass_time(2)
    late = members.submit(2, kind, values, way=way, root=root)
    job.settle()
    for rank, handle in {**handles, 2: late}.items():
        message, _ = job.answer(rank, handle)
        if kind == "reduce" and rank == 0 and isinstance(message, wire.Done):
            continue  # it had nothing to wait for
        assert isinstance(message, wire.Failed)
        assert "operation 0 of group 'group' waited 5 s for rank 2 (host " in message.message
        assert "which did not submit it" in message.message
        assert "its timeout of 5 s is over" in message.message  # torch's tests look for the word
        assert rank == 2 or message.missing == (2,)
    members.results(members.submit_all("barrier", None, way="inline"))
    job.nothing_is_left()


@every_seed
def test_data_that_is_late_is_dropped(seed: int) -> None:
    job = SimulatedJob([1, 1], seed)
    members = Members(job)
    job.lost.add((1, 0))  # what 1 sends does not arrive
    handles = members.submit_all("allreduce", [ONE, ONE], seconds=5.0)
    job.settle()
    job.pass_time(8)
    for rank, handle in handles.items():
        if rank == 0:
            assert "no progress for 5 s although every rank has submitted it" in job.error(rank, handle)
    job.lost.clear()
    handles = members.submit_all("allreduce", [ONE, ONE])
    np.testing.assert_array_equal(members.results(handles), [2 * ONE.reshape(-1)] * 2)
    job.nothing_is_left()


def test_an_operation_that_ends_in_time_costs_no_question() -> None:
    job = SimulatedJob([1, 1])
    members = Members(job)
    for _ in range(20):
        members.results(members.submit_all("allreduce", [ONE, ONE], seconds=3.0))
    assert len(job.timers) == 2  # one a node
    job.pass_time(10)
    assert job.messages(wire.WaitingRequest) == 0
    assert not job.timers


def test_who_sets_no_time_out_is_warned_and_then_failed_like_any_other() -> None:
    job = SimulatedJob([1, 1])
    members = Members(job)
    handle = members.submit(0, "allreduce", ONE)
    job.pass_time(70)
    assert any("operation 0 of group 'group' waited 6" in warning for warning in job.warnings)
    assert not job.is_answered(0, handle)
    job.pass_time(600)
    assert "for rank 1 (host host1), which did not submit it" in job.error(0, handle)
    assert "its timeout" not in job.error(0, handle)


def test_a_time_out_of_its_own_may_be_longer_than_that_of_all() -> None:
    job = SimulatedJob([1, 1])
    members = Members(job)
    handle = members.submit(0, "allreduce", ONE, seconds=1800.0)
    job.pass_time(1799)
    assert not job.is_answered(0, handle)
    job.pass_time(10)
    assert "waited 1800 s for rank 1" in job.error(0, handle)


# --- losses -----------------------------------------------------------------------------------------------------------


@every_seed
def test_a_rank_that_is_lost_fails_its_groups_and_no_other(seed: int) -> None:
    job = SimulatedJob([1, 1, 1], seed)
    hit, other = Members(job, "hit"), Members(job, "other", (0, 2))
    handles = {rank: hit.submit(rank, "allreduce", ONE) for rank in (0, 2)}
    job.settle()
    for node in (0, 2):
        job.nodes[node].engine.view_begins(wire.View(1, (0, 2), (wire.Loss(1, "it was unplugged"),)), 0)
    job.settle()
    for rank, handle in handles.items():
        assert "under way when rank 1 (host host1) was lost: it was unplugged" in job.error(rank, handle)
    for kind, values, way in [("allreduce", ONE, "in place"), ("barrier", None, "inline")]:
        later = {rank: hit.submit(rank, kind, values, way=way) for rank in (0, 2)}
        job.settle()
        for rank, handle in later.items():
            assert f"{kind} needs all ranks of group 'hit', and rank 1 (host host1) is lost" in job.error(rank, handle)
    np.testing.assert_array_equal(other.results(other.submit_all("allreduce", [ONE] * 3)), [2 * ONE.reshape(-1)] * 2)
