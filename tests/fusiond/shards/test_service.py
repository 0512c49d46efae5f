"""Homes: what travels to and from them, what is refused, plans and ranks that come and go, time, and their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, WireError
from fusiond.core.contribution import Contribution
from fusiond.core.errors import RequestError
from fusiond.shards import ParameterService
from fusiond.shards.hosted_home import HostedHome
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array, SimulatedJob

DIM, RATE = 60, 0.1
START = np.random.default_rng(1).standard_normal(DIM)
ADAM = wire.OptimizerSpec("Adam", ("{}",))


def gradient(rank: int, step: int, dim: int = DIM) -> Array:
    return np.random.default_rng([rank, step]).standard_normal(dim)


def homes_of(workers: Workers, node: int) -> ParameterService:
    return workers.job.nodes[node].engine.homes


def boxes_of(workers: Workers, node: int) -> list[HostedHome]:
    return list(homes_of(workers, node)._server)


def box_at(workers: Workers, node: int) -> HostedHome:
    """The first home on a node."""
    return boxes_of(workers, node)[0]


def piece_for(workers: Workers, node: int, kind: str = "post") -> wire.Piece:
    """A whole post of the other node's first rank to the first shard on a node of a job of two."""
    hosted = box_at(workers, node)
    rank = workers.job.topology.ranks[1 - node][0]
    plan = workers.plan.id
    return wire.Piece(0, plan, hosted.bucket.index, kind, -1, rank, 0, 0, hosted.nbytes, rates=(RATE,))  # type: ignore[arg-type]


def payload_for(workers: Workers, node: int, value: float = 1.0) -> memoryview:
    return memoryview(np.full(box_at(workers, node).home.elements, value).tobytes())


def train(workers: Workers, steps: range, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """All ranks post gradients and take their answers, one after the other where nobody has to wait."""
    for step in steps:
        for rank in order:
            workers.post(rank, gradient(rank, step, len(workers.x[rank])).astype(workers.x[rank].dtype))
        for rank in order:
            workers.collect(rank)


# --- messages ---------------------------------------------------------------------------------------------------------


@for_each("seed", range(3))
def test_a_parcel_may_come_in_many_pieces_and_in_any_order(seed: int) -> None:
    whole = Workers([2, 2], "bsp", START, RATE)
    cut = Workers([2, 2], "bsp", START, RATE, job=SimulatedJob([2, 2], seed, chunk_bytes=64, connections=3))
    for workers in (whole, cut):
        train(workers, range(3))
    assert (whole.home() == cut.home()).all()
    assert not any(homes_of(cut, node)._reassembly.incomplete for node in (0, 1))


def test_pieces_that_come_before_their_plan_wait_for_it() -> None:
    job = SimulatedJob([1, 1])
    like = Workers([1, 1], "asp", START, RATE)
    piece, payload = piece_for(like, 0), payload_for(like, 0)
    job.nodes[0].engine.homes.peer(1, piece, payload)
    workers = Workers([1, 1], "asp", START, RATE, job=job)
    assert box_at(workers, 0).home.version == 1


def test_an_early_piece_that_makes_no_sense_is_its_senders_fault() -> None:
    job = SimulatedJob([1, 1])
    like = Workers([1, 1], "asp", START, RATE)
    job.nodes[0].engine.homes.peer(1, replace(piece_for(like, 0), rank=0), payload_for(like, 0))
    with pytest.raises(AssertionError):
        Workers([1, 1], "asp", START, RATE, job=job)
    assert "rank 1 (host host1) sent before the plan 1 was there makes no sense" in job.nodes[0].failure


def test_no_more_than_so_many_pieces_may_be_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusiond.shards.reassembly._MAX_EARLY", 3)
    workers = Workers([1, 1], "asp", START, RATE)
    early = replace(piece_for(workers, 0), plan=99)
    for _ in range(3):
        homes_of(workers, 0).peer(1, early, memoryview(b""))
    with pytest.raises(WireError, match="more than 3 pieces"):
        homes_of(workers, 0).peer(1, early, memoryview(b""))


def test_what_is_of_another_epoch_or_of_an_old_plan_is_not_looked_at() -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    for other in ({"epoch": 1}, {"plan": 0}):
        homes_of(workers, 0).peer(1, replace(piece_for(workers, 0), **other), memoryview(b"?"))
    assert box_at(workers, 0).home.version == 0


@for_each(
    ("changes", "why"),
    [
        ({"bucket": 9}, "no post of rank 1 for bucket 9 can come from it"),
        ({"rank": 0}, "no post of rank 0"),
        ({"rank": 7}, "no post of rank 7"),
        ({"home": 0}, "no post of rank 1"),
        ({"kind": "mix"}, "no mix of rank 1"),
        ({"kind": "mean"}, "no mean of rank 1"),
        ({"kind": "answer"}, "no answer of rank 1"),
        ({"kind": "refused"}, "no refused of rank 1"),
        ({"nbytes": 1 << 40}, "has 1099511627776 bytes, and"),
        ({"kind": "seed", "nbytes": 8}, "has 8 bytes instead of"),
        ({"rates": ()}, "it has 0 learning rates for at least 1 parameter groups"),
        ({"rates": (float("nan"),)}, "are not all finite"),
        ({"weight": float("nan")}, "has the weight nan"),
        ({"weight": 0.0}, "has the weight 0.0"),
        ({"weight": float("inf")}, "has the weight inf"),
        ({"start": 1}, "do not fit the others"),
        ({"nbytes": 4}, "do not fit the others"),
    ],
)
def test_a_piece_that_no_node_would_send_is_refused(changes: dict[str, object], why: str) -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    with pytest.raises(WireError, match=why):
        homes_of(workers, 0).peer(1, replace(piece_for(workers, 0), **changes), payload_for(workers, 0))
    assert box_at(workers, 0).home.version == 0


@for_each(
    ("changes", "why"),
    [
        ({"terms": None}, "by which no home answers"),
        ({"terms": wire.AnswerTerms(added=False, coded=True)}, "by which no home answers"),
        ({"rank": 1}, "no answer of rank 1"),
        ({"kind": "refused", "nbytes": 1 << 20}, "and 65536 is the most"),
    ],
)
def test_an_answer_that_no_home_would_give_is_refused(changes: dict[str, object], why: str) -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    bucket = workers.plan.homes.index(1)
    answer = wire.Piece(
        0, workers.plan.id, bucket, "answer", -1, 0, 0, 1, 8, terms=wire.AnswerTerms(staleness=wire.Staleness())
    )
    with pytest.raises(WireError, match=why):
        homes_of(workers, 0).peer(1, replace(answer, **changes), memoryview(bytes(8)))


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    bucket = workers.plan.homes.index(1)
    nbytes = workers.plan.buckets[bucket].numel * 8
    answer = wire.Piece(
        0, workers.plan.id, bucket, "answer", -1, 0, 5, 1, nbytes, terms=wire.AnswerTerms(staleness=wire.Staleness())
    )
    workers.post(0, gradient(0, 0), settle=False)
    before = workers.memory[0].copy()
    homes_of(workers, 0).peer(1, answer, memoryview(bytes(nbytes)))  # of a clock that it has not posted
    assert (workers.memory[0] == before).all()
    workers.job.settle()
    workers.collect(0)


def test_too_many_incomplete_parcels_are_refused() -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    piece = piece_for(workers, 0)
    for clock in range(8):
        homes_of(workers, 0).peer(1, replace(piece, clock=clock), memoryview(b"x"))
    with pytest.raises(WireError, match=r"too many messages of rank 1 and bucket . are incomplete"):
        homes_of(workers, 0).peer(1, replace(piece, clock=8), memoryview(b"x"))


def test_too_many_parcels_that_wait_for_a_seed_are_refused() -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    box_at(workers, 0).home.value = None
    piece, payload = piece_for(workers, 0), payload_for(workers, 0)
    for clock in range(64 + 2 * 16 + 1):
        homes_of(workers, 0).peer(1, replace(piece, clock=clock), payload)
    with pytest.raises(WireError, match="too many messages wait"):
        homes_of(workers, 0).peer(1, replace(piece, clock=1000), payload)


def test_many_small_parcels_that_have_waited_for_a_seed_are_taken_in() -> None:
    workers = Workers([1, 60], "asp", START, RATE)
    hosted = box_at(workers, 0)
    value, hosted.home.value = hosted.home.value, None
    piece, payload = piece_for(workers, 0), payload_for(workers, 0)
    for clock in range(900):
        homes_of(workers, 0).peer(1, replace(piece, clock=clock), payload)
    assert value is not None
    homes_of(workers, 0).peer(1, piece_for(workers, 0, "seed"), memoryview(value.tobytes()))
    workers.job.settle()
    assert hosted.home.version == 900


def test_contributions_of_too_many_clocks_fail_the_job() -> None:
    workers = Workers([1, 1], "bsp", START, RATE)
    piece, payload = piece_for(workers, 0), payload_for(workers, 0)
    for clock in range(2, 200):
        homes_of(workers, 0).peer(1, replace(piece, clock=clock * 1000), payload)
    assert "clocks wait at the home of bucket" in workers.job.nodes[0].failure


def test_a_payload_that_is_no_parcel_of_its_codec_fails_the_job_with_a_sentence() -> None:
    workers = Workers([1, 1], "asp", START.astype(np.float32), RATE, codec="fp16")
    piece = replace(piece_for(workers, 0), nbytes=3)
    homes_of(workers, 0).peer(1, piece, memoryview(b"abc"))
    assert "but a peer sent 3" in workers.job.nodes[0].failure


def test_a_second_seed_changes_nothing() -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    before = workers.home()
    homes_of(workers, 0).peer(1, piece_for(workers, 0, "seed"), payload_for(workers, 0, 7.0))
    workers.job.settle()
    assert (workers.home() == before).all()


def test_a_contribution_waits_for_the_seed() -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    hosted = box_at(workers, 0)
    value, hosted.home.value = hosted.home.value, None
    homes_of(workers, 0).peer(1, piece_for(workers, 0), payload_for(workers, 0))
    assert hosted.home.version == 0
    assert value is not None
    homes_of(workers, 0).peer(1, piece_for(workers, 0, "seed"), memoryview(value.tobytes()))
    workers.job.settle()
    assert hosted.home.version == 1
    np.testing.assert_allclose(hosted.home.value, value - RATE)


def test_a_worker_that_posts_without_its_learning_rates_is_wrong() -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    with pytest.raises(RequestError, match="rank 0 posts to bucket 0 of plan 1, and it has 0 learning rates"):
        workers.job.engine(0).ready(0, wire.Ready(99, workers.plan.id, 0, 0))


def test_a_mean_that_nobody_asked_for_is_not_taken() -> None:
    workers = Workers([1, 1], "adpsgd(topology='ring')", START, RATE)
    hosted = box_at(workers, 1)
    for rank in (0, 1):
        workers.post(rank, START)
        workers.collect(rank)
    mean = Contribution(0, np.full(hosted.home.elements, 9.0), kind="mean", clock=17)
    before = hosted.home.value
    assert before is not None
    before = before.copy()
    assert list(hosted.algorithm.received(hosted.home, mean)) == []
    assert (hosted.home.value == before).all()


# --- plans come and go ------------------------------------------------------------------------------------------------


@for_each("seed", range(5))
@pytest.mark.parametrize("algorithm", ["asp", "bsp", "dpsgd(topology='ring')"])
def test_a_plan_is_replaced_while_threads_are_at_its_homes(algorithm: str, seed: int) -> None:
    start = np.zeros(100_000, np.float32)  # so large that threads do the work
    workers = Workers([2, 2], algorithm, start, RATE, seed=seed)
    for rank in (0, 1, 2):
        workers.post(rank, start, settle=False)
    for _ in range(seed * 3):
        workers.job.step()
    Workers([2, 2], algorithm, start, RATE, job=workers.job)
    workers.job.settle()
    for rank in (0, 1, 2):
        for handle in workers._handles[rank]:
            message, _ = workers.job.answer(rank, handle)
            assert isinstance(message, wire.Done) or "when the plan of 'opt' was replaced" in message.message  # type: ignore[union-attr]
    assert all(hosted.plan.plan.id != workers.plan.id for node in (0, 1) for hosted in boxes_of(workers, node))
    workers.job.nothing_is_left()


def test_a_plan_that_is_told_again_keeps_its_homes() -> None:
    workers = Workers([1, 1], "asp", START, RATE)
    train(workers, range(2), (0, 1))
    before = workers.home()
    for node in workers.job.nodes:
        node.engine.homes.install(node.engine.homes._plans[workers.plan.id])
    assert (workers.home() == before).all()


def test_a_process_set_is_removed_while_workers_wait() -> None:
    workers = Workers([2, 2], "bsp", START, RATE)
    workers.post(0, START)
    for node in range(2):
        homes_of(workers, node).remove_set(0)
    assert "rank 0 was waiting for the home of bucket 0 of 'opt' when process set 0 was removed" in workers.job.error(
        0, workers._handles[0][0]
    )
    assert not boxes_of(workers, 0)
    assert homes_of(workers, 0).idle


def test_when_an_epoch_ends_whoever_waits_is_told() -> None:
    workers = Workers([2, 2], "bsp", START, RATE)
    workers.post(0, START)
    homes_of(workers, 0).end("ranks 2-3 left the job")
    assert workers.job.error(0, workers._handles[0][0]) == "ranks 2-3 left the job"


def test_after_a_failure_nothing_is_done_any_more() -> None:
    workers = Workers([1, 1], "asp", np.zeros(100_000), RATE)
    workers.post(0, np.zeros(100_000), settle=False)
    for node in range(2):
        homes_of(workers, node).fail("the job has failed")
    workers.job.settle()
    assert not any(workers.job.is_answered(0, handle) for handle in workers._handles[0])
    homes_of(workers, 0).gone([1])
    assert not workers.job.timers


# --- ranks come and go ------------------------------------------------------------------------------------------------


def test_ranks_that_have_joined_at_different_clocks_go_on_together() -> None:
    for algorithm in ("bsp", "dpsgd(topology='ring')"):
        workers = Workers([2, 2], algorithm, START, RATE)
        train(workers, range(2))
        for rank in range(4):
            for node in range(2):
                homes_of(workers, node).gone([rank])
        for bucket in range(2):  # rank 0 has posted once more
            homes_of(workers, 0)._clients[workers.plan.id, bucket, 0].clock += 1
        for node in range(2):
            homes_of(workers, node).returned(range(4))
        train(workers, range(2, 4))
    assert not any(hosted.home.slots for node in range(2) for hosted in boxes_of(workers, node))


def test_what_needs_all_ranks_is_refused_from_then_on_when_one_has_left() -> None:
    workers = Workers([2, 2], "bsp", START, RATE)
    workers.job.leave(3)
    workers.post(0, START)
    assert "a rank has left" in workers.job.error(0, workers._handles[0][0])


def test_a_rank_that_leaves_after_it_has_contributed_holds_up_nobody() -> None:
    workers = Workers([2, 2], "easgd(steps=1, synchronous_home=True)", START, RATE)
    for rank in (0, 3):
        workers.post(rank, START)
    workers.job.leave(3)
    workers.job.settle()
    assert workers.waits(0)
    for rank in (1, 2):
        workers.post(rank, START)
    assert not any(workers.waits(rank) for rank in (0, 1, 2))


def test_what_comes_late_from_a_rank_that_was_taken_for_gone_does_not_stay() -> None:
    workers = Workers([1, 1], "dpsgd(topology='ring')", START, RATE)
    homes_of(workers, 0).gone([1])
    for step in range(3):
        workers.post(0, START + step)
        workers.collect(0)
    workers.post(1, START)
    assert not any(hosted.home.slots for hosted in boxes_of(workers, 0))


# --- time -------------------------------------------------------------------------------------------------------------


def stalled(algorithm: str, *posting: int) -> Workers:
    job = SimulatedJob([2, 2], stall_warning_time=5, operation_timeout=20)
    workers = Workers([2, 2], algorithm, START, RATE, job=job)
    for rank in posting:
        workers.post(rank, START)
    job.pass_time(10)
    return workers


def test_a_stall_is_warned_of_once_and_ends_with_a_sentence_that_names_who_is_missing() -> None:
    workers = stalled("bsp", 0, 1, 2)
    here = [text for text in workers.job.warnings if "it waits for rank 3 (host host1)" in text]
    away = [text for text in workers.job.warnings if "which is on rank" in text or "which is on ranks" in text]
    assert here
    assert away
    assert len(workers.job.warnings) == 6  # three ranks, two buckets
    assert any(text.startswith("rank 0 has waited 6 s for the home of bucket 0 of 'opt'") for text in here)
    workers.job.pass_time(15)
    assert "it waits for rank 3 (host host1)" in workers.job.error(0, workers._handles[0][workers.plan.homes.index(0)])
    workers.job.nothing_is_left()


def test_a_stall_of_gossip_names_the_neighbours_that_are_missing() -> None:
    workers = stalled("dpsgd(topology='ring')", 0, 1)
    texts = " ".join(workers.job.warnings)
    assert "rank 0 has waited 6 s for the home of bucket 0 of 'opt'; it waits for rank 3 (host host1)" in texts
    assert "rank 1 has waited 6 s for the home of bucket 0 of 'opt'; it waits for rank 2 (host host1)" in texts


def test_a_stall_without_a_seed_says_whose_it_is() -> None:
    workers = Workers([2, 2], "asp", START, RATE, job=SimulatedJob([2, 2], stall_warning_time=5))
    for node in range(2):
        for hosted in boxes_of(workers, node):
            hosted.home.value = None
    workers.post(1, START)
    workers.job.pass_time(10)
    assert any("it has nothing to begin with, which has to come from rank 0" in text for text in workers.job.warnings)


@pytest.mark.parametrize("seeded", [True, False])
def test_what_has_been_given_up_lets_go_of_the_arena_and_stays_given_up(seeded: bool) -> None:
    workers = Workers([2, 2], "bsp", START, RATE, job=SimulatedJob([2, 2], operation_timeout=20))
    for hosted in boxes_of(workers, 0):
        hosted.home.value = hosted.home.value if seeded else None
    workers.post(0, START)
    workers.job.pass_time(25)
    assert not workers.waits(0)
    for hosted in boxes_of(workers, 0):
        kept = [part.values for slot in hosted.home.slots.values() for part in slot.values()]
        assert not any(np.shares_memory(values, workers.memory[0]) for values in kept)
        assert not hosted.waiting
    first = workers.job.error(0, workers._handles[0][0])
    workers.post(0, START)
    assert workers.job.error(0, workers._handles[0][0]) == first


@pytest.mark.parametrize(
    ("algorithm", "whose"), [("bsp", ""), ("dpsgd(topology='ring')", " with rank 0")], ids=["shards", "replicas"]
)
def test_whoever_asks_is_told_what_waits_at_which_home(algorithm: str, whose: str) -> None:
    workers = Workers([1, 1, 1], algorithm, START, RATE)
    workers.post(0, gradient(0, 0))
    told = homes_of(workers, 0).waits.under_way()
    place = f"bucket 0 of 'opt' at its home{whose}"
    assert [(each.submitted, each.awaits) for each in told if each.what == place] == [((0,), ()), ((), (1, 2))]


# --- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_count_contributions_and_how_stale_they_were() -> None:
    workers = Workers([2, 2], "asp", START, RATE)
    train(workers, range(3))
    told = [homes_of(workers, node).statistics() for node in range(2)]
    assert sum(t["homes"] for t in told) == 2  # type: ignore[misc]
    assert sum(t["updates"] for t in told) == 2 * 12  # type: ignore[misc]
    lags = [t["version_lag"] for t in told]
    assert [lag["count"] for lag in lags] == [12, 12]  # type: ignore[index]
    assert max(lag["max"] for lag in lags) == 3  # type: ignore[index]
    assert {lag for each in lags for lag in each["histogram"]} == {"0", "1", "2", "3"}  # type: ignore[index]


def test_asking_for_what_a_home_has_is_no_contribution() -> None:
    workers = Workers([2, 2], "asp", START, RATE)
    train(workers, range(2))
    before = homes_of(workers, 0).statistics()
    workers.post(0, START, kind="ask")
    workers.collect(0)
    assert (workers.x[0] == workers.home()).all()
    assert homes_of(workers, 0).statistics() == before


def test_asking_for_what_a_home_has_sends_nothing_and_leaves_the_residual_alone() -> None:
    start = START.astype(np.float32)
    workers = Workers([2, 2], "asp", start, RATE, codec="topk(density=0.2, minimum=0)")
    train(workers, range(2))
    residuals = {key: value for of in saved(workers) for key, value in of.items() if "residual" in key}
    for rank in range(4):
        workers.post(rank, start + 5, kind="ask")
        workers.collect(rank)
    again = {key: value for of in saved(workers) for key, value in of.items() if "residual" in key}
    assert residuals
    assert residuals.keys() == again.keys()
    assert all((again[key] == residuals[key]).all() for key in residuals)


def test_at_a_replica_nobody_is_ahead() -> None:
    workers = Workers([2, 2], "dpsgd(topology='ring')", START, RATE)
    train(workers, range(4))
    gaps = [homes_of(workers, node).statistics()["clock_gap"] for node in range(2)]
    assert [gap["max"] for gap in gaps] == [0, 0]  # type: ignore[index]


# --- state ------------------------------------------------------------------------------------------------------------

State = Mapping[str, Array]


def saved(workers: Workers) -> list[dict[str, Array]]:
    return workers.job.saved_homes(workers.plan)


def equal(first: list[dict[str, Array]], second: list[dict[str, Array]]) -> None:
    for mine, other in zip(first, second, strict=True):
        assert mine.keys() == other.keys()
        for key in mine:
            np.testing.assert_array_equal(mine[key], other[key], key)


ROUNDS = [
    ("asp", "dense", ADAM),
    ("bsp", "topk(density=0.2, minimum=0)", ADAM),
    ("partial(backup=1)", "int8(minimum=0)", wire.OptimizerSpec("SGD", ('{"momentum": 0.9}',))),
    ("softsync(contributions=3)", "dense", None),
    ("collaborative(samples=3)", "dense", None),
    ("dc_asgd(adaptive=True)", "fp16", None),
    ("easgd(steps=1)", "bf16", None),
    ("sgp(topology='one-peer-exponential')", "dense", None),
    ("choco", "topk(density=0.2, minimum=0)", None),
    ("adpsgd(topology='ring')", "dense", None),
]


@for_each("early", [False, True])
@pytest.mark.parametrize(("algorithm", "codec", "optimizer"), ROUNDS, ids=[row[0] for row in ROUNDS])
def test_another_job_goes_on_from_a_state(
    algorithm: str, codec: str, optimizer: wire.OptimizerSpec | None, early: bool
) -> None:
    optimizer = optimizer or wire.OptimizerSpec("SGD", ("{}",))
    start = START.astype(np.float32)
    first = Workers([2, 2], algorithm, start, RATE, optimizer, codec)
    train(first, range(5))
    state = saved(first)
    job = SimulatedJob([2, 2])

    def load() -> None:
        for node, of in enumerate(state):
            job.load_homes(node, of)

    if early:
        load()
    second = Workers([2, 2], algorithm, np.zeros_like(start), RATE, optimizer, codec, job=job)
    if not early:
        load()
    job.settle()
    equal(saved(second), state)
    assert any(np.any(value) for of in state for value in of.values())
    second.x = [x.copy() for x in first.x]
    for rank in job.ranks if first.plan.homes else ():
        second.say(rank)
    for workers in (first, second):
        train(workers, range(5, 9))
    assert all((x == y).all() for x, y in zip(first.x, second.x, strict=True))
    if first.plan.homes:
        assert (first.home() == second.home()).all()


def test_a_state_has_residuals_the_optimizer_and_what_the_algorithm_remembers() -> None:
    start = START.astype(np.float32)
    workers = Workers([2, 2], "dc_asgd", start, RATE, ADAM, "topk(density=0.2, minimum=0)")
    train(workers, range(3))
    keys = {key.split(":", 3)[3] for of in saved(workers) for key in of}
    assert {"counts", "codec/residual/w0", "codec/step", "value", "version", "done", "aux/w_bak/3"} <= keys
    assert {"optimizer/0/exp_avg", "optimizer/0/exp_avg_sq", "optimizer/0/step"} <= keys


@for_each(
    ("change", "why"),
    [
        (lambda s: {"nonsense": s["home:0:-1:value"]}, "'nonsense' cannot be in a saved state"),
        (lambda s: {"home:x:-1:value": s["home:0:-1:value"]}, "cannot be in a saved state"),
        (lambda s: {f"home:{'9' * 5000}:-1:value": s["home:0:-1:value"]}, "cannot be in a saved state"),
        (lambda s: {"mirror:0:-1:value": s["home:0:-1:value"]}, "the state of a mirror, of bucket 0,"),
        (lambda s: {"home:7:-1:value": s["home:0:-1:value"]}, "of another job: it has the home of bucket 7"),
        (lambda s: {"sender:0:3:counts": np.zeros(2, np.int64)}, "of another job: it has the sender of bucket 0"),
        (lambda s: {**s, "home:0:-1:value": np.zeros(3)}, "elements, and 3 were saved"),
        (lambda s: {**s, "home:0:-1:version": np.array([-1])}, r"has the counts \[-1\]"),
        (lambda s: {**s, "home:0:-1:done": np.array([1])}, "does not have the 2 counts"),
        (lambda s: {k: v for k, v in s.items() if "version" not in k}, "does not have the 1 counts"),
        (lambda s: {**s, "home:0:-1:other": np.zeros(1)}, "'other' of the home of bucket 0 cannot be"),
        (lambda s: {**s, "home:0:-1:codec/step": np.ones(1)}, "has the codec 'codec' of bucket 0, which has none"),
        (lambda s: {**s, "home:0:-1:answers/9/whole/step": np.ones(1)}, "has the codec 'answers/9/whole' of bucket 0"),
        (lambda s: {**s, "home:0:-1:answers/1/whole/step": np.ones(1)}, "which the codec [a-z0-9]+ does not have"),
        (lambda s: {**s, "home:0:-1:aux/x": np.array(["x"])}, "cannot be in a saved state"),
        (lambda s: {**s, "sender:0:0:counts": np.zeros(2)}, "does not have the 2 counts"),
        (lambda s: {**s, "sender:0:0:codec/odd": np.zeros(2)}, "which the codec [a-z0-9]+ does not have"),
    ],
)
def test_a_state_that_is_damaged_changes_nothing(change: object, why: str) -> None:
    workers = Workers([2, 0], "asp", START, RATE)
    train(workers, range(2), (0, 1))
    before = saved(workers)
    with pytest.raises(FusionError, match=why):
        workers.job.load_homes(0, change(before[0]))  # type: ignore[operator]
    equal(saved(workers), before)


def test_a_rank_that_loads_after_another_one_has_gone_on_takes_that_back() -> None:
    first = Workers([2, 0], "asp", START, RATE)
    train(first, range(2), (0, 1))
    state = saved(first)[0]
    second = Workers([2, 0], "asp", START, RATE)
    second.job.load_homes(0, state)  # by rank 0, which goes on at once
    second.post(0, START + 1)
    assert not np.array_equal(second.home(), first.home())
    second.job.load_homes(0, state)  # by rank 1
    assert np.array_equal(second.home(), first.home())


def test_a_state_of_another_job_that_was_loaded_before_the_plan_is_warned_of() -> None:
    job = SimulatedJob([1, 1])
    job.load_homes(0, {"home:9:-1:value": np.zeros(1)})
    workers = Workers([1, 1], "asp", START, RATE, job=job)
    assert any("its homes start without: the saved state is of another job" in text for text in job.warnings)
    assert (workers.home() == START).all()


def test_a_state_of_another_optimizer_fails_the_job_with_a_sentence() -> None:
    first = Workers([1, 1], "asp", START, RATE, ADAM)
    train(first, range(2), (0, 1))
    second = Workers([1, 1], "asp", START, RATE)
    second.job.nodes[0].engine.keeper.load((0, "opt"), saved(first)[0], False, lambda error: None)
    for _ in range(100):
        second.job.step()
    assert "of another optimizer than this job's" in second.job.nodes[0].failure


def test_a_state_is_saved_when_threads_have_finished_and_before_more_is_taken_in() -> None:
    start = np.zeros(100_000, np.float32)
    workers = Workers([2, 0], "hogwild", start, RATE)
    workers.post(0, start + 1, settle=False)
    versions = []
    homes = homes_of(workers, 0)
    homes.when_quiet(workers.plan.id, lambda: versions.append([hosted.home.version for hosted in boxes_of(workers, 0)]))
    workers.post(1, start + 1, settle=False)
    assert not versions
    workers.job.settle()
    assert versions == [[1, 1]]
    assert [hosted.home.version for hosted in boxes_of(workers, 0)] == [2, 2]


@pytest.mark.parametrize(("algorithm", "copies"), [("bsp", 1), ("partial(backup=0)", 1), ("asp", 3)])
def test_ranks_that_are_told_the_same_share_a_copy_of_it(algorithm: str, copies: int) -> None:
    start = np.zeros(1000, np.float32)
    workers = Workers([1, 3], algorithm, start, RATE)
    answers: dict[int, list[object]] = {}
    for node in workers.job.nodes:

        def send(to: int, piece: wire.Piece, payload: memoryview, *, through: Any = node.send_piece) -> None:
            if piece.kind == "answer" and len(payload):
                answers.setdefault(piece.bucket, []).append(payload.obj)
            through(to, piece, payload)

        node.send_piece = send  # type: ignore[assignment, method-assign]
    for rank in workers.job.ranks:
        workers.post(rank, start + rank)
    workers.job.settle()
    at_first = [bucket for bucket, home in enumerate(workers.plan.homes) if home == 0]
    assert at_first
    for bucket in at_first:
        assert len(answers[bucket]) == 3
        assert len({id(copy) for copy in answers[bucket]}) == copies


@for_each("seed", range(6))
@for_each("copies", [1, 2])
@pytest.mark.parametrize("algorithm", ["hogwild", "asp"])
def test_nothing_is_taken_in_while_homes_are_copied(algorithm: str, copies: int, seed: int) -> None:
    start = np.zeros(100_000, np.float32)
    workers = Workers([2, 0], algorithm, start, RATE, seed=seed)
    found: dict[str, Array] = {}
    answers: list[object] = []
    homes = homes_of(workers, 0)
    workers.post(0, start + 1, settle=False)
    for _ in range(copies):  # the second waits for the first
        homes.save(workers.plan.id, found, answers.append)
    workers.post(1, start + 1, settle=False)
    workers.job.settle()
    assert answers == [None] * copies
    assert [found[key].tolist() for key in found if key.endswith(":version")] == [[1], [1]]
    values = [found[key] for key in found if key.endswith(":value")]
    assert sum(map(len, values)) >= len(start)
    first = 33_333  # elements of each bucket's first tensor; padding follows it
    assert all((value[:first] == np.float32(-RATE)).all() for value in values)
    assert [hosted.home.version for hosted in boxes_of(workers, 0)] == [2, 2]


TOPK = "topk(density=0.2, minimum=0)"


def test_a_load_that_is_under_way_when_the_formation_ends_leaves_no_trace() -> None:
    start = START.astype(np.float32)
    first, second = (Workers([1, 1], "asp", start, RATE, ADAM, TOPK) for _ in range(2))
    train(first, range(3), (0, 1))
    state, before = saved(first)[0], saved(second)[0]
    answers: list[object] = []
    homes, boxes, job = homes_of(second, 0), boxes_of(second, 0), second.job
    clients = [(client, client.clock, client.codec) for client in homes._clients]
    job.nodes[0].engine.keeper.load((0, "opt"), state, False, answers.append)
    assert job.deferred, "the thread is at work"
    job.nodes[0].engine.fail_job("over")
    while job.step():
        pass
    assert answers == []
    assert all((client.clock, client.codec) == (clock, codec) for client, clock, codec in clients)
    for hosted in boxes:
        assert hosted.home.value is not None
        assert hosted.home.value.tolist() == before[f"home:{hosted.bucket.index}:-1:value"].tolist()
        assert (hosted.home.version, hosted.encoders, hosted.closed) == (0, {}, False)


@for_each("seed", range(6))
def test_nothing_is_taken_in_while_a_state_is_loaded(seed: int) -> None:
    start = START.astype(np.float32)
    first = Workers([1, 1], "asp", start, RATE, codec=TOPK)
    second = Workers([1, 1], "asp", start, RATE, codec=TOPK, job=SimulatedJob([1, 1], seed))
    train(first, range(3), (0, 1))
    answers: list[object] = []
    second.job.nodes[0].engine.keeper.load((0, "opt"), saved(first)[0], False, answers.append)
    second.post(1, gradient(1, 9).astype(np.float32), settle=False)
    second.job.settle()
    assert answers == [None]
    for hosted in boxes_of(second, 0):
        assert hosted.home.version == 7, "six of before, and one after that"


@for_each("seed", range(6))
def test_workers_hear_of_a_plan_when_its_homes_have_the_state_that_was_kept_for_it(seed: int) -> None:
    first = Workers([1, 1], "asp", START.astype(np.float32), RATE, codec=TOPK)
    train(first, range(3), (0, 1))
    job = SimulatedJob([1, 1], seed)
    for node, state in enumerate(saved(first)):
        job.load_homes(node, state)
    tensors = tuple(wire.TensorSpec(f"w{i}", "float32", (20,), together=min(i, 1)) for i in range(3))
    proposal = wire.Proposal("opt", 0, 0, first.plan.reduction, tensors)
    handles = [job.propose(rank, proposal) for rank in job.ranks]
    while job.step():
        for rank in job.ranks:
            if job.is_answered(rank, handles[rank]):
                assert [client.clock for client in job.engine(rank).homes._clients] == [3, 3]
    assert all(job.is_answered(rank, handles[rank]) for rank in job.ranks)


@pytest.mark.parametrize("algorithm", ["dpsgd(topology='ring')", "bsp", "ssp(staleness=2)"])
def test_a_plan_without_tensors_hinders_nothing(algorithm: str) -> None:
    """Of an optimizer whose parameters are all frozen, or elsewhere."""
    job = SimulatedJob([1, 1])
    job.plan(wire.Proposal("frozen", 0, 0, wire.Reduction("average", algorithm=algorithm), ()))
    values = [np.ones(3, np.float32)] * 2
    handles = job.submit_all("x", wire.Signature("allreduce", "float32", (3,)), values)
    np.testing.assert_array_equal(job.result(1, handles[1]), [2, 2, 2])
