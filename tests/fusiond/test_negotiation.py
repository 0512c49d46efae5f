"""The coordinator by itself: whom it asks, whom it tells, and in what words."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.settings import Settings
from fusion_rt.topology import GLOBAL_SET, Topology
from fusiond.negotiation import Coordinator, Outgoing, describe, explain
from fusiond.participants import Participants

TOPOLOGY = Topology(("a", "b"), ((0, 1), (2,)))
EVERYONE = (0, 1, 2)
SUM = wire.Signature("allreduce", "float32", (4, 2))
GATHER = wire.Signature("allgather", "float32", (4, 2))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(clock: Clock, participants: Participants, warnings: list[str]) -> Coordinator:
    settings = Settings(fusion_threshold=1024, operation_timeout=30.0, stall_warning_time=20.0)
    return Coordinator(participants, settings, clock, warnings.append)


@pytest.fixture
def participants() -> Participants:
    participants = Participants(TOPOLOGY, 0)
    participants.add((0, 1))
    return participants


@pytest.fixture
def warnings() -> list[str]:
    return []


def key(name: str = "x", process_set: int = GLOBAL_SET) -> wire.OpKey:
    return wire.OpKey(process_set, 0, name, 0)


def request(node: int, signature: wire.Signature = SUM, name: str = "x", **splits: Any) -> wire.Request:
    return wire.Request(key(name), dict.fromkeys(TOPOLOGY.ranks[node], signature), splits.get("splits", {}))


# --- operations -------------------------------------------------------------------------------------------------------


def test_an_operation_starts_when_every_node_has_asked(coordinator: Coordinator) -> None:
    assert coordinator.request(1, request(1)) == []
    verdict = wire.Verdict(key(), (4, 4, 4), ((), (), ()))
    assert coordinator.request(0, request(0)) == [(0, verdict), (1, verdict)]
    assert coordinator.statistics() == {"pending": 0, "approved": 1, "plans": 0}


def test_what_was_approved_before_may_start_at_once(coordinator: Coordinator) -> None:
    coordinator.request(0, request(0))
    coordinator.request(1, request(1))
    assert coordinator.request(1, request(1, name="y")) == [(1, wire.Verdict(key("y")))]
    assert coordinator.statistics()["pending"] == 0


def test_gathers_are_asked_about_every_time_since_their_rows_differ(coordinator: Coordinator) -> None:
    for name in "xy":
        assert coordinator.request(0, request(0, GATHER, name)) == []
        longer = replace(GATHER, shape=(9, 2))
        verdict = wire.Verdict(key(name), (4, 4, 9), ((), (), ()))
        assert coordinator.request(1, request(1, longer, name)) == [(0, verdict), (1, verdict)]


def test_splits_are_collected_by_rank(coordinator: Coordinator) -> None:
    exchange = replace(GATHER, kind="alltoall")
    coordinator.request(1, request(1, exchange, splits={2: (4, 0, 0)}))
    out = coordinator.request(0, request(0, exchange, splits={1: (1, 1, 2), 0: (0, 0, 4)}))
    assert [message.splits for _, message in out] == [((0, 0, 4), (1, 1, 2), (4, 0, 0))] * 2  # type: ignore[union-attr]


def test_an_operation_waits_no_longer_once_its_signature_is_approved(coordinator: Coordinator) -> None:
    """The other nodes do not ask any more, and might wait for this one's data."""
    assert coordinator.request(1, request(1, name="x")) == []
    assert coordinator.request(1, request(1, name="y")) == []
    out = coordinator.request(0, request(0, name="x"))
    assert (1, wire.Verdict(key("y"))) in out
    assert coordinator.statistics()["pending"] == 0


def test_only_the_nodes_of_a_process_set_are_asked_and_told(coordinator: Coordinator) -> None:
    ask = wire.Request(key("x", 1), {0: SUM, 1: SUM}, {})
    assert coordinator.request(0, ask) == [(0, wire.Verdict(key("x", 1), (4, 4), ((), ())))]


def test_nodes_that_ask_about_different_things_are_all_inquired(coordinator: Coordinator) -> None:
    coordinator.request(0, request(0))
    other = replace(SUM, dtype="int32")
    assert coordinator.request(1, request(1, other)) == [(0, wire.Inquiry(key())), (1, wire.Inquiry(key()))]
    assert coordinator.mismatch(wire.Mismatch(key())) == []  # under way already
    assert coordinator.report(0, wire.Report(key(), {0: SUM, 1: SUM})) == []
    out = coordinator.report(1, wire.Report(key(), {2: other}))
    error = (
        "the ranks do not agree about tensor 'x': ranks 0-1 (host a): allreduce sum float32 [4, 2]; rank 2 (host b): "
        "allreduce sum int32 [4, 2]. Every rank has to submit the same operation"
    )
    assert out == [(node, wire.OpFailed(key(), error)) for node in (0, 1)]
    assert coordinator.statistics() == {"pending": 0, "approved": 0, "plans": 0}


def test_approval_under_another_name_does_not_hide_a_disagreement(coordinator: Coordinator) -> None:
    other = replace(SUM, dtype="int32")
    for name, signature in [("before", SUM), ("also before", other)]:
        for node in (0, 1):
            coordinator.request(node, request(node, signature, name))
    coordinator.mismatch(wire.Mismatch(key()))
    assert coordinator.request(0, request(0)) == []  # waits for the end of the inquiry


def test_a_report_that_nobody_waits_for_is_ignored(coordinator: Coordinator) -> None:
    assert coordinator.report(0, wire.Report(key(), {0: SUM})) == []
    coordinator.request(0, request(0))
    assert coordinator.report(0, wire.Report(key(), {0: SUM})) == []


def test_a_look_that_finds_nothing_wrong_changes_nothing(coordinator: Coordinator) -> None:
    coordinator.request(0, request(0))
    coordinator.mismatch(wire.Mismatch(key(), 3.0))
    coordinator.report(0, wire.Report(key(), {0: SUM, 1: SUM}))
    assert coordinator.report(1, wire.Report(key(), {})) == []
    assert [type(message) for _, message in coordinator.request(1, request(1))] == [wire.Verdict] * 2


def test_a_node_that_asks_during_a_look_is_not_forgotten(coordinator: Coordinator) -> None:
    coordinator.request(0, request(0))
    coordinator.mismatch(wire.Mismatch(key(), 3.0))
    coordinator.report(0, wire.Report(key(), {0: SUM, 1: SUM}))
    assert coordinator.request(1, request(1)) == []
    out = coordinator.report(1, wire.Report(key(), {2: SUM}))
    assert [type(message) for _, message in out] == [wire.Verdict] * 2


def test_a_look_after_the_timeout_ends_the_operation(coordinator: Coordinator) -> None:
    coordinator.mismatch(wire.Mismatch(key(), 31.0))
    coordinator.report(0, wire.Report(key(), {0: SUM, 1: SUM}))
    # It was found out where rank 2 is, which takes time.
    again: Outgoing = [(0, wire.Inquiry(key())), (1, wire.Inquiry(key()))]
    assert coordinator.report(1, wire.Report(key(), {})) == again
    coordinator.report(0, wire.Report(key(), {0: SUM, 1: SUM}))
    out = coordinator.report(1, wire.Report(key(), {}))
    assert [(node, type(message)) for node, message in out] == [(0, wire.OpFailed), (1, wire.OpFailed)]
    assert coordinator.statistics()["pending"] == 0


def test_an_operation_goes_on_when_the_missing_rank_comes_at_the_last_moment(coordinator: Coordinator) -> None:
    coordinator.request(0, request(0))
    coordinator.mismatch(wire.Mismatch(key(), 31.0))
    coordinator.report(0, wire.Report(key(), {0: SUM, 1: SUM}))
    coordinator.report(1, wire.Report(key(), {}))
    assert coordinator.request(1, request(1)) == []
    coordinator.report(0, wire.Report(key(), {0: SUM, 1: SUM}))
    out = coordinator.report(1, wire.Report(key(), {2: SUM}))
    assert [type(message) for _, message in out] == [wire.Verdict] * 2
    assert coordinator.statistics()["pending"] == 0


def test_ranks_that_left_are_no_longer_waited_for(coordinator: Coordinator, participants: Participants) -> None:
    participants.departed.add(2)
    coordinator.mismatch(wire.Mismatch(key(), 3.0))
    coordinator.report(0, wire.Report(key(), {0: SUM, 1: SUM}))
    out = coordinator.report(1, wire.Report(key(), {}))
    assert "waits for rank 2 (host b), which left the job" in out[0][1].error  # type: ignore[union-attr]


# --- plans ------------------------------------------------------------------------------------------------------------

PROPOSAL = wire.Proposal("opt", 0, 0, wire.Reduction(), (wire.TensorSpec("w", "float32", (4,)),))


def test_a_plan_is_made_when_every_rank_has_proposed(coordinator: Coordinator) -> None:
    for rank in (2, 0):
        assert coordinator.plan_request(wire.PlanRequest(rank, PROPOSAL)) == []
    assert not coordinator.idle
    out = coordinator.plan_request(wire.PlanRequest(1, PROPOSAL))
    assert [node for node, _ in out] == [0, 1]
    verdict = out[0][1]
    assert isinstance(verdict, wire.PlanVerdict)
    assert verdict.plan is not None
    assert verdict.plan.id == 1
    assert coordinator.idle
    assert coordinator.statistics() == {"pending": 0, "approved": 0, "plans": 1}


def test_every_plan_has_a_new_number(coordinator: Coordinator) -> None:
    numbers = []
    for clock in range(3):
        for rank in range(3):
            out = coordinator.plan_request(wire.PlanRequest(rank, replace(PROPOSAL, clock=clock)))
        verdict = out[0][1]
        assert isinstance(verdict, wire.PlanVerdict)
        assert verdict.plan is not None
        numbers.append(verdict.plan.id)
    assert numbers == [1, 2, 3]


def test_a_proposal_ends_when_its_time_is_up(coordinator: Coordinator, clock: Clock) -> None:
    coordinator.plan_request(wire.PlanRequest(0, PROPOSAL))
    clock.now = 30.0
    assert coordinator.tick() == []
    clock.now = 31.0
    error = "no plan for 'opt': rank 1 (host a), rank 2 (host b) did not propose it within 31 s"
    assert coordinator.tick() == [(node, wire.PlanVerdict(0, "opt", 0, None, error)) for node in (0, 1)]
    assert coordinator.tick() == []
    assert coordinator.idle


# --- sentences --------------------------------------------------------------------------------------------------------


def why(submitted: dict[int, wire.Signature], departed: set[int] | None = None, waited: float = 0.0) -> str:
    return explain(key(), submitted, EVERYONE, TOPOLOGY, departed or set(), waited)


def test_a_disagreement_is_told_before_an_absence() -> None:
    error = why({0: SUM, 1: replace(SUM, op="max")}, {2}, 99.0)
    assert error == (
        "the ranks do not agree about tensor 'x': rank 0 (host a): allreduce sum float32 [4, 2]; rank 1 (host a): "
        "allreduce max float32 [4, 2]. Every rank has to submit the same operation"
    )


def test_an_absence_of_somebody_who_left_is_told_before_that_of_others() -> None:
    assert why({1: SUM}, {2}, 99.0) == (
        "tensor 'x' waits for rank 2 (host b), which left the job without submitting it"
    )


def test_an_absence_is_told_when_time_is_up() -> None:
    assert why({1: SUM}) == ""
    assert why({1: SUM}, waited=31.4) == (
        "tensor 'x' waited 31 s for rank 0 (host a), rank 2 (host b), which did not submit it (submitted by rank 1 "
        "(host a))"
    )


def test_a_standstill_is_told_when_time_is_up() -> None:
    everybody = {0: SUM, 1: SUM, 2: SUM}
    assert why(everybody) == ""
    assert why(everybody, waited=31.4) == "tensor 'x' made no progress for 31 s although every rank has submitted it"


def test_a_bucket_is_named_by_its_plan() -> None:
    found = explain(wire.OpKey(0, 3, "7", 12), {}, EVERYONE, TOPOLOGY, {0, 1, 2}, 0.0)
    assert found.startswith("bucket 7 of plan 3 waits for ranks 0-1 (host a), rank 2 (host b)")


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (SUM, "allreduce sum float32 [4, 2]"),
        (replace(SUM, shape=(), op="average"), "allreduce average float32 []"),
        (replace(SUM, prescale=0.5, postscale=2.0), "allreduce sum float32 [4, 2] scaled by 0.5 before and 2 after"),
        (replace(SUM, codec="fp16"), "allreduce sum float32 [4, 2] with fp16"),
        (wire.Signature("broadcast", "int64", (3,), root=2), "broadcast from root 2 int64 [3]"),
        (wire.Signature("barrier"), "barrier"),
        (GATHER, "allgather float32 [4, 2]"),
    ],
)
def test_signatures_in_words(signature: wire.Signature, words: str) -> None:
    assert describe(signature) == words


# --- homes ------------------------------------------------------------------------------------------------------------


def planned(coordinator: Coordinator, algorithm: str) -> wire.Plan:
    tensors = tuple(wire.TensorSpec(f"w{i}", "float32", (50,)) for i in range(32))
    optimizer = wire.OptimizerSpec("SGD", ("{}",))
    proposal = wire.Proposal("opt", 0, 0, wire.Reduction(algorithm=algorithm, optimizer=optimizer), tensors)
    for rank in range(TOPOLOGY.size):
        out = coordinator.plan_request(wire.PlanRequest(rank, proposal))
    plan = out[-1][1].plan  # type: ignore[union-attr]
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("algorithm", "first"), [("asp", 0.5), ("collaborative", 0.8), ("allreduce", None), ("dpsgd", None)]
)
def test_collaborating_nodes_have_homes_by_what_their_links_carry(
    coordinator: Coordinator, algorithm: str, first: float | None
) -> None:
    coordinator.seconds_per_byte = {1: 4e-8, 2: 1e-8}  # node 0, which coordinates, counts like the fastest
    homes = planned(coordinator, algorithm).homes
    if first is None:
        assert homes == ()
    else:
        assert homes.count(0) / len(homes) == pytest.approx(first, abs=0.08)
