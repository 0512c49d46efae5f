"""Failures of operations: every rank gets the same sentence, that names ranks, host and tensor, and nobody hangs."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from fusion_rt import wire
from fusiond.core.errors import RequestError
from tests.for_each import for_each
from tests.fusiond.simulation import Array, SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
LAYOUT = [2, 1, 3]
SUM = wire.Signature("allreduce", "float32", (6,))
VALUES: Array = np.arange(6, dtype=np.float32)
LARGE = wire.Signature("allreduce", "float32", (6000,))
LARGE_VALUES: Array = np.ones(6000, np.float32)


def same_error(job: SimulatedJob, handles: dict[int, int]) -> str:
    """The one sentence that these ranks got."""
    errors = {job.error(rank, handle) for rank, handle in handles.items()}
    assert len(errors) == 1, errors
    return errors.pop()


def works(job: SimulatedJob, name: str = "x", clock: int = 1) -> None:
    """The job goes on."""
    handles = job.submit_all(name, SUM, [VALUES] * job.size, clock)
    for rank, handle in enumerate(handles):
        np.testing.assert_array_equal(job.result(rank, handle), job.size * VALUES)
    job.nothing_is_left()


# --- ranks that do not agree ------------------------------------------------------------------------------------------

OTHERS = {
    "shape": (replace(SUM, shape=(2, 3)), "allreduce sum float32 [2, 3]"),
    "length": (replace(SUM, shape=(5,)), "allreduce sum float32 [5]"),
    "dtype": (replace(SUM, dtype="int32"), "allreduce sum int32 [6]"),
    "op": (replace(SUM, op="max"), "allreduce max float32 [6]"),
    "scale": (
        replace(SUM, prescale=0.5),
        "allreduce sum float32 [6] scaled by 0.5 before and 1 after",
    ),
    "codec": (replace(SUM, codec="fp16"), "allreduce sum float32 [6] with fp16"),
    "kind": (replace(SUM, kind="broadcast"), "broadcast from root 0 float32 [6]"),
    "barrier": (wire.Signature("barrier"), "barrier"),
}


def values_for(signature: wire.Signature) -> Array | None:
    return None if signature.kind == "barrier" else VALUES.view(signature.dtype)[: np.prod(signature.shape)]


@for_each("approved", [False, True])
@for_each("odd", [1, 2, 5])
@for_each("difference", OTHERS)
def test_ranks_that_do_not_agree_get_one_sentence(difference: str, odd: int, approved: bool) -> None:
    other, words = OTHERS[difference]
    for seed in range(6):
        job = SimulatedJob(LAYOUT, seed)
        if approved:  # both are known to everybody under other names, so that nobody has to ask
            for name, signature in [("before", SUM), ("also before", other)]:
                values = values_for(signature)
                for rank in job.ranks:
                    job.submit(rank, name, signature, values)
                job.settle()
        handles = job.on_all_ranks(
            lambda rank, job=job: job.submit(
                rank, "x", other if rank == odd else SUM, values_for(other) if rank == odd else VALUES
            )  # type: ignore[misc]
        )
        error = same_error(job, dict(enumerate(handles)))
        assert error.startswith("the ranks do not agree about tensor 'x': ")
        assert f"rank {odd} (host host{job.topology.node_of(odd)}): {words}" in error
        assert "allreduce sum float32 [6]" in error
        assert error.endswith("Every rank has to submit the same operation")
        works(job)


def test_the_roots_of_a_broadcast_differ() -> None:
    job = SimulatedJob([1, 1])
    handles = [
        job.submit(rank, "b", wire.Signature("broadcast", "float32", (6,), root=rank), VALUES) for rank in job.ranks
    ]
    job.settle()
    assert same_error(job, dict(enumerate(handles))) == (
        "the ranks do not agree about tensor 'b': rank 0 (host host0): broadcast from root 0 float32 [6]; rank 1 (host "
        "host1): broadcast from root 1 float32 [6]. Every rank has to submit the same operation"
    )


def test_gathered_tensors_differ_beyond_their_rows() -> None:
    job = SimulatedJob([1, 2])
    shapes = [(2, 3), (1, 6), (1, 6)]
    handles = [
        job.submit(rank, "g", wire.Signature("allgather", "float32", shape), VALUES[: np.prod(shape)])
        for rank, shape in enumerate(shapes)
    ]
    job.settle()
    error = same_error(job, dict(enumerate(handles)))
    assert "rank 0 (host host0): allgather float32 [2, 3]; ranks 1-2 (host host1): allgather float32 [1, 6]" in error


def test_a_rank_that_comes_late_gets_the_sentence_too() -> None:
    job = SimulatedJob([2, 2])
    handles = {0: job.submit(0, "x", SUM, VALUES), 2: job.submit(2, "x", replace(SUM, op="max"), VALUES)}
    job.settle()
    handles[1] = job.submit(1, "x", SUM, VALUES)
    handles[3] = job.submit(3, "x", SUM, VALUES)
    job.settle()
    assert "rank 2 (host host1): allreduce max" in same_error(job, handles)
    works(job)


def test_a_third_local_rank_does_not_start_what_two_do_not_agree_about() -> None:
    for seed in range(10):
        job = SimulatedJob([1, 3], seed)
        job.submit_all("before", SUM, [VALUES] * 4)  # approved, so that node 1 would not ask
        handles = {
            rank: job.submit(rank, "x", replace(SUM, shape=(5,)) if rank == 2 else SUM, VALUES[: 5 if rank == 2 else 6])
            for rank in (1, 2, 3)
        }
        job.settle()
        handles[0] = job.submit(0, "x", SUM, VALUES)
        job.settle()
        assert "rank 2 (host host1): allreduce sum float32 [5]" in same_error(job, handles)


def test_data_of_another_signature_is_not_reduced_wherever_it_stands_among_early_data() -> None:
    for seed in range(20):
        job = SimulatedJob([1, 1, 1], seed)
        other = replace(SUM, dtype="int32")
        job.submit_all("before", SUM, [VALUES] * 3)
        job.submit_all("also before", other, [VALUES.view(np.int32)] * 3)
        handles = {
            1: job.submit(1, "x", other, VALUES.view(np.int32)),
            2: job.submit(2, "x", SUM, VALUES),
        }
        while job._channels and any(queue for key, queue in job._channels.items() if key[2] != "control"):
            job.step()  # node 0 has data of both before its worker comes
        handles[0] = job.submit(0, "x", SUM, VALUES)
        job.settle()
        assert "rank 1 (host host1): allreduce sum int32 [6]" in same_error(job, handles)


# --- requests that make no sense --------------------------------------------------------------------------------------

SENSELESS = {
    "the average of bool": (
        wire.Signature("allreduce", "bool", (4,), "average"),
        np.ones(4, np.uint8),
        (),
        "bool elements can be neither averaged nor scaled",
    ),
    "a scaled bool": (
        wire.Signature("reducescatter", "bool", (4,), prescale=2.0),
        np.ones(4, np.uint8),
        (),
        "bool elements can be neither averaged nor scaled",
    ),
    "a scale that is no number": (
        replace(SUM, prescale=float("nan")),
        VALUES,
        (),
        "the scale factors nan and 1 have to be finite",
    ),
    "too few bytes": (SUM, VALUES[:5], (), r"float32 \[6\] takes 24 bytes, but 20 were given"),
    "no bytes": (SUM, None, (), r"float32 \[6\] takes 24 bytes, but 0 were given"),
    "an unknown dtype": (
        replace(SUM, dtype="complex64"),
        VALUES,
        (),
        "element type 'complex64' cannot be communicated",
    ),
    "an unknown codec": (replace(SUM, codec="zip"), VALUES, (), "there is no codec 'zip'"),
    "a scalar in an allgather": (wire.Signature("allgather", "float32"), VALUES[:1], (), "at least one dimension"),
    "a scalar in an alltoall": (wire.Signature("alltoall", "float32"), VALUES[:1], (1,), "at least one dimension"),
    "a scalar in a reducescatter": (
        wire.Signature("reducescatter", "float32"),
        VALUES[:1],
        (),
        "at least one dimension",
    ),
    "a root that is not there": (
        wire.Signature("broadcast", "float32", (6,), root=99),
        VALUES,
        (),
        "root rank 99 is not in process set 0",
    ),
    "too few splits": (
        wire.Signature("alltoall", "float32", (6,)),
        VALUES,
        (3, 3),
        r"alltoall needs 6 splits that add up to 6 rows, not \[3, 3\]",
    ),
    "splits that do not add up": (
        wire.Signature("alltoall", "float32", (6,)),
        VALUES,
        (1, 1, 1, 1, 1, 2),
        "alltoall needs 6 splits that add up to 6 rows",
    ),
}


@for_each("inline", [False, True])
@for_each("what", SENSELESS)
def test_a_request_that_makes_no_sense_fails_on_every_rank(what: str, inline: bool) -> None:
    import re

    signature, values, splits, why = SENSELESS[what]
    for seed in range(4):
        job = SimulatedJob(LAYOUT, seed)
        handles = job.on_all_ranks(
            lambda rank, job=job: (  # type: ignore[misc]
                job.submit(rank, "x", signature, values, splits=splits, inline=inline)
                if rank == 3
                else job.submit(rank, "x", SUM, VALUES)
            )
        )
        error = same_error(job, dict(enumerate(handles)))
        assert re.fullmatch(f"rank 3 submitted tensor 'x' wrongly: .*{why}.*", error)
        works(job)


def test_a_process_set_that_is_not_there_is_refused() -> None:
    job = SimulatedJob([2])
    handle = job.submit(1, "x", replace(SUM, process_set=3), VALUES)
    assert "there is no process set 3" in job.error(1, handle)
    works(job, clock=0)


def test_submitting_twice_under_one_clock_is_an_error_of_that_worker() -> None:
    job = SimulatedJob([2])
    job.submit(0, "x", SUM, VALUES)
    with pytest.raises(RequestError, match="rank 0 submitted tensor 'x' twice"):
        job.submit(0, "x", SUM, VALUES)


# --- ranks that do not come -------------------------------------------------------------------------------------------


@for_each("signature", [SUM, LARGE, wire.Signature("barrier"), replace(SUM, kind="allgather")])
def test_a_rank_that_never_comes_is_named(signature: wire.Signature) -> None:
    values = None if signature.kind == "barrier" else LARGE_VALUES[: np.prod(signature.shape)]
    for missing in (0, 1, 2, 4):
        job = SimulatedJob(LAYOUT, missing, operation_timeout=30.0)
        handles = {rank: job.submit(rank, "x", signature, values) for rank in job.ranks if rank != missing}
        job.settle()
        job.pass_time(29)
        assert not job.answers
        job.pass_time(3)
        handles[missing] = job.submit(missing, "x", signature, values)  # too late
        error = same_error(job, handles)
        host = job.topology.node_of(missing)
        assert f"tensor 'x' waited 31 s for rank {missing} (host host{host}), which did not submit it" in error
        works(job)


def test_only_the_ranks_that_are_missing_are_named() -> None:
    job = SimulatedJob(LAYOUT, operation_timeout=30.0)
    handles = {rank: job.submit(rank, "x", SUM, VALUES) for rank in (0, 3)}
    job.pass_time(32)
    assert same_error(job, handles) == (
        "tensor 'x' waited 31 s for rank 1 (host host0), rank 2 (host host1), ranks 4-5 (host host2), which did not "
        "submit it (submitted by rank 0 (host host0), rank 3 (host host2))"
    )


def test_data_that_never_arrives_ends_in_a_sentence() -> None:
    job = SimulatedJob([1, 1], operation_timeout=30.0)
    job.lost.add((0, 1))
    handles = dict(enumerate(job.submit_all("x", LARGE, [LARGE_VALUES] * 2)))
    job.pass_time(35)
    assert "tensor 'x' made no progress for 31 s although every rank has submitted it" in same_error(job, handles)


def test_progress_is_no_reason_to_give_up() -> None:
    job = SimulatedJob([1, 1], operation_timeout=30.0, chunk_bytes=4096, window_bytes=8192)
    handles = [job.submit(rank, "x", LARGE, LARGE_VALUES) for rank in job.ranks]
    while job.step():
        job.now += 2  # each message takes two seconds
        for node in job.nodes:
            node.engine.tick()
    for rank, handle in enumerate(handles):
        np.testing.assert_array_equal(job.result(rank, handle), 2 * LARGE_VALUES)
    assert job.now > 30


# --- ranks that have left ---------------------------------------------------------------------------------------------


@for_each("gone", [1, 2, 5])
def test_a_rank_that_has_left_is_named_before_the_limit(gone: int) -> None:
    job = SimulatedJob(LAYOUT)
    job.leave(gone)
    handles = {rank: job.submit(rank, "x", SUM, VALUES) for rank in job.ranks if rank != gone}
    job.pass_time(5)
    host = job.topology.node_of(gone)
    assert same_error(job, handles) == (
        f"tensor 'x' waits for rank {gone} (host host{host}), which left the job without submitting it"
    )


def test_a_rank_that_submitted_before_it_left_is_no_reason_to_give_up() -> None:
    job = SimulatedJob([1, 1, 1], operation_timeout=30.0)
    handles = {rank: job.submit(rank, "x", SUM, VALUES) for rank in (0, 2)}
    job.settle()
    job.leave(2)
    job.pass_time(10)
    assert not job.is_answered(0, handles[0])  # rank 1 has not left, and may take its time
    handles[1] = job.submit(1, "x", SUM, VALUES)
    job.settle()
    np.testing.assert_array_equal(job.result(0, handles[0]), 3 * VALUES)


def test_a_rank_that_leaves_later_is_named_after_a_look_that_found_nothing_wrong() -> None:
    job = SimulatedJob([1, 1, 1], operation_timeout=100.0)
    handles = {rank: job.submit(rank, "x", SUM, VALUES) for rank in (0, 2)}
    job.settle()
    job.leave(2)
    job.pass_time(10)
    job.leave(1)
    job.pass_time(20)
    assert "rank 1 (host host1), which left the job without submitting it" in job.error(0, handles[0])


def test_a_rank_that_was_done_before_it_left_is_no_reason_to_give_up() -> None:
    """Its node has finished the operation, and another one has not: its data is still on its way."""
    job = SimulatedJob([1, 1], operation_timeout=100.0)
    small = job.submit_all("before", SUM, [VALUES] * 2)
    assert small
    handles = [job.submit(rank, "x", SUM, VALUES) for rank in job.ranks]
    held = {}
    while not job.is_answered(1, handles[1]):
        for key in list(job._channels):
            if key[:2] == (1, 0) and key[2] != "control":
                held[key] = job._channels.pop(key)  # a slow link
        job.step()
    assert held
    job.leave(1)
    job.pass_time(10)
    assert not job.is_answered(0, handles[0])
    job._channels.update(held)
    job.settle()
    np.testing.assert_array_equal(job.result(0, handles[0]), 2 * VALUES)


# --- peers that send nonsense -----------------------------------------------------------------------------------------


def key(name: str = "x") -> wire.OpKey:
    return wire.OpKey(0, 0, name, 0)


def test_a_chunk_that_has_no_place_fails_the_operation_on_every_rank() -> None:
    job = SimulatedJob([1, 1, 1])
    job.submit_all("before", SUM, [VALUES] * 3)
    handles = {0: job.submit(0, "x", SUM, VALUES)}
    chunk = wire.Chunk(key(), wire.digest(SUM), 0, 0, 77)
    job.nodes[0].engine.peer_message(1, chunk, memoryview(bytes(24)))
    handles.update({rank: job.submit(rank, "x", SUM, VALUES) for rank in (1, 2)})
    job.settle()
    error = same_error(job, handles)
    assert error.startswith("tensor 'x' failed on node 0 (host host0): a chunk of 'x' from node 1 ")
    works(job)


def test_a_payload_of_the_wrong_size_fails_the_operation_on_every_rank() -> None:
    job = SimulatedJob([1, 1])
    job.submit_all("before", SUM, [VALUES] * 2)
    handles = {0: job.submit(0, "x", SUM, VALUES)}
    job.nodes[0].engine.peer_message(1, wire.Chunk(key(), wire.digest(SUM), 0, 0, 1), memoryview(bytes(20)))
    handles[1] = job.submit(1, "x", SUM, VALUES)
    job.settle()
    assert "tensor 'x' failed on node 0 (host host0): 6 elements of float32 take 24 bytes" in same_error(job, handles)
    works(job)


STRANGE = {
    "a request for another node's ranks": wire.Request(key(), {0: SUM}, {}),
    "a request for a rank that is not there": wire.Request(key(), {99: SUM}, {}),
    "a request for some of its ranks": wire.Request(key(), {1: SUM}, {}),
    "a request for nobody": wire.Request(key(), {}, {}),
    "a request in a process set that is not there": wire.Request(wire.OpKey(9, 0, "x", 0), {1: SUM, 2: SUM}, {}),
    "a mismatch in a process set that is not there": wire.Mismatch(wire.OpKey(9, 0, "x", 0)),
    "a proposal of another node's rank": wire.PlanRequest(0, wire.Proposal("opt", 0, 0, wire.Reduction(), ())),
    "a proposal of a rank that is not there": wire.PlanRequest(99, wire.Proposal("opt", 0, 0, wire.Reduction(), ())),
    "a proposal in a process set that is not there": wire.PlanRequest(
        1, wire.Proposal("opt", 9, 0, wire.Reduction(), ())
    ),
}


@for_each("message", STRANGE.values())
def test_a_message_that_no_node_of_this_job_would_send_fails_the_job(message: wire.PeerMessage) -> None:
    job = SimulatedJob([1, 2])
    job.nodes[0].engine.peer_message(1, message)
    assert "node 1 (host host1) sent" in job.nodes[0].failure
    assert type(message).__name__ in job.nodes[0].failure
    handle = job.submit(0, "x", SUM, VALUES)
    assert job.error(0, handle) == job.nodes[0].failure


HARMLESS = [
    wire.Verdict(key()),
    wire.Credit(key(), 5),
    wire.OpFailed(wire.OpKey(0, 0, "never heard of", 0), "no"),
    wire.WaitingHere(1, 0, ()),
    wire.PlanVerdict(0, "opt", 0, None, "no"),
]


@for_each("message", HARMLESS)
def test_a_message_about_what_is_over_is_ignored(message: wire.PeerMessage) -> None:
    job = SimulatedJob([1, 2])
    for node in job.nodes:
        node.engine.peer_message(1 - node.node, message)
    works(job, clock=0)


# --- the end of the job -----------------------------------------------------------------------------------------------


def test_a_failed_job_refuses_everything_with_its_reason() -> None:
    job = SimulatedJob([1, 1])
    plan = job.plan(wire.Proposal("opt", 0, 0, wire.Reduction(), (wire.TensorSpec("w", "float32", (4,)),)))
    job.add_plan_memory(plan)
    waiting = job.submit(0, "x", SUM, VALUES)
    for node in job.nodes:
        node.engine.fail_job("rank 9 died")
        node.engine.fail_job("and something else")
    later = job.submit(0, "y", SUM, VALUES)
    proposal = job.propose(0, wire.Proposal("opt", 0, 1, wire.Reduction(), ()))
    ready = job.ready(0, plan, 0, 0)
    job.settle()
    assert not job.is_answered(0, waiting)  # JobFailed tells that worker
    assert {job.error(0, handle) for handle in (later, proposal, ready)} == {"rank 9 died"}
    for node in job.nodes:
        assert node.engine.statistics()["under_way"] == 0


def test_workers_hear_of_a_failed_operation_when_no_job_writes_into_their_memory_any_more() -> None:
    job = SimulatedJob([2, 1])
    size = 200_000
    handles = {rank: job.submit(rank, "x", replace(SUM, shape=(size,)), np.ones(size, np.float32)) for rank in (0, 1)}
    key = wire.OpKey(0, 0, "x", 0)
    engine = job.nodes[0].engine
    handles[2] = job.submit(2, "x", replace(SUM, shape=(size,)), np.ones(size, np.float32))
    deliver_messages(job)
    assert job.deferred, "jobs of the kernel pool"
    engine.peer_message(1, wire.OpFailed(key, "no"))
    engine.peer_message(1, wire.OpFailed(key, "no"))
    assert not any(job.is_answered(rank, handles[rank]) for rank in (0, 1))
    while job.step():
        pass
    assert [job.error(rank, handles[rank]) for rank in (0, 1)] == ["no", "no"]
    assert engine.statistics()["under_way"] == 0


def test_workers_hear_of_a_failed_job_when_no_job_writes_into_their_memory_any_more() -> None:
    job = SimulatedJob([2, 1])
    size = 200_000
    for rank in job.ranks:
        job.submit(rank, "x", replace(SUM, shape=(size,)), np.ones(size, np.float32))
    deliver_messages(job)
    engine, told = job.nodes[0].engine, list[str]()
    engine.fail_job("rank 9 died")
    engine.when_quiet(lambda: told.append("quiet"))
    assert not told
    while job.deferred:
        job.deferred.popleft()()
    assert told == ["quiet"]
    engine.when_quiet(lambda: told.append("still"))
    assert told == ["quiet", "still"]


def deliver_messages(job: SimulatedJob) -> None:
    """All that is under way between nodes arrives, and the kernel pool does nothing."""
    while channels := [key for key, queue in job._channels.items() if queue]:
        job._deliver(channels[0])


def test_what_arrives_after_the_end_is_ignored() -> None:
    job = SimulatedJob([1, 1])
    job.submit(1, "x", SUM, VALUES)
    job.submit(0, "x", SUM, VALUES)
    job.nodes[0].engine.fail_job("rank 9 died")
    while job.step():
        pass
    assert job.answers == {}


def test_memory_that_is_out_fails_the_operation_and_not_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusion_rt.core.errors import ArenaError
    from fusion_rt.host.arena import Segment

    def full(nbytes: int) -> Segment:
        raise ArenaError(f"{nbytes} bytes of shared memory cannot be allocated")

    job = SimulatedJob([1, 2])
    monkeypatch.setattr(Segment, "create", full)
    handles = job.submit_all("g", replace(LARGE, kind="allgather"), [LARGE_VALUES] * 3)
    error = same_error(job, dict(enumerate(handles)))
    assert "tensor 'g' failed on node" in error
    assert "72000 bytes of shared memory cannot be allocated" in error
    works(job)


def test_a_bug_ends_the_job_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusiond.collectives.ring import Ring

    def broken(self: Ring) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Ring, "start", broken)
    job = SimulatedJob([1, 1])
    for rank in job.ranks:
        job.submit(rank, "x", LARGE, LARGE_VALUES)
    while job.step():
        pass
    assert "the daemon of host host0 failed:" in job.nodes[0].failure
    assert "ZeroDivisionError: a bug" in job.nodes[0].failure


@pytest.mark.parametrize(
    ("made", "why"),
    [(3, "use Result.allocate(nbytes, place="), (2, "Broadcast has 2 results for 3 local members")],
)
def test_an_exchange_whose_results_lie_where_no_worker_looks_ends_the_job(
    made: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusiond.collectives.broadcast import Broadcast
    from fusiond.core.result import Result

    def elsewhere(self: Broadcast) -> None:
        self.results = [Result.allocate(LARGE_VALUES.nbytes) for _ in range(made)]
        self.port.finish()

    monkeypatch.setattr(Broadcast, "start", elsewhere)
    job = SimulatedJob([3])
    for rank in job.ranks:
        job.submit(rank, "x", replace(LARGE, kind="broadcast"), LARGE_VALUES)
    while job.step():
        pass
    assert why in job.nodes[0].failure
    assert job.answers == {}


@for_each("kind", ["allreduce", "broadcast", "allgather"])
def test_who_hears_of_a_failure_may_reuse_its_memory_while_others_complete_the_operation(kind: wire.Kind) -> None:
    """A node that fails an operation by its own clock has sent chunks, which lie in its workers' memory until they have
    left; workers here overwrite that as soon as they are told. Whoever gets a result gets the right one."""
    signature = replace(LARGE, kind=kind, op="sum")
    completed = 0
    for seed in range(60):
        job = SimulatedJob([1, 1, 1], seed)
        values = [np.full(6000, rank + 1, np.float32) for rank in job.ranks]
        expected = {"allreduce": np.full(6000, 6), "broadcast": values[0], "allgather": np.concatenate(values)}[kind]
        handles = [job.submit(rank, "x", signature, values[rank]) for rank in job.ranks]
        for _ in range(20 + seed):
            job.step()
        for node in job.nodes[: 1 + seed % 2]:
            node.engine.operations.here(wire.OpKey(0, 0, "x", 0), "time is up")
        while job.step():
            pass
        for rank in job.ranks:
            if job.is_answered(rank, handles[rank]) and isinstance(job.answer(rank, handles[rank])[0], wire.Done):
                np.testing.assert_array_equal(job.result(rank, handles[rank]), expected)
                completed += rank > seed % 2
        assert all(job.is_answered(rank, handles[rank]) for rank in range(1 + seed % 2))
    assert completed, "a rank completes what others have failed"
