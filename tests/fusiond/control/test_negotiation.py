"""The coordinator by itself: whom it asks, whom it tells, and in what words."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.core.topology import GLOBAL_SET, Topology
from fusion_rt.settings import Settings
from fusiond.control.negotiation import Coordinator
from fusiond.core.participants import Participants
from tests.fusiond.control.kept_questions import KeptQuestions

TOPOLOGY = Topology(("a", "b"), ((0, 1), (2,)))
SUM = wire.Signature("allreduce", "float32", (4, 2))
GATHER = wire.Signature("allgather", "float32", (4, 2))


@pytest.fixture
def questions() -> KeptQuestions:
    return KeptQuestions()


@pytest.fixture
def coordinator(participants: Participants, questions: KeptQuestions) -> Coordinator:
    settings = Settings(fusion_threshold=1024, operation_timeout=30.0, stall_warning_time=20.0)
    return questions.coordinator(participants, settings)


@pytest.fixture
def participants() -> Participants:
    participants = Participants(TOPOLOGY, 0)
    participants.add((0, 1))
    return participants


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


# --- plans ------------------------------------------------------------------------------------------------------------

PROPOSAL = wire.Proposal("opt", 0, 0, wire.Reduction(), (wire.TensorSpec("w", "float32", (4,)),))


def test_no_plan_is_made_that_needs_a_package_which_the_coordinator_lacks(coordinator: Coordinator) -> None:
    asked = replace(PROPOSAL, reduction=wire.Reduction(algorithm="majority", packages=("acme 1.0",)))
    error = (
        "no plan for 'opt': on the node that decides for all the package acme 1.0 is not installed; install the same "
        "on every node"
    )
    out = coordinator.plan_request(wire.PlanRequest(2, asked))
    assert out == [(node, wire.PlanVerdict(0, "opt", 0, None, error)) for node in (0, 1)]


def test_a_plan_is_made_when_every_rank_has_proposed(coordinator: Coordinator) -> None:
    for rank in (2, 0):
        assert coordinator.plan_request(wire.PlanRequest(rank, PROPOSAL)) == []
    assert coordinator.statistics()["pending"] == 1
    out = coordinator.plan_request(wire.PlanRequest(1, PROPOSAL))
    assert [node for node, _ in out] == [0, 1]
    verdict = out[0][1]
    assert isinstance(verdict, wire.PlanVerdict)
    assert verdict.plan is not None
    assert verdict.plan.id == 1
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


def test_a_proposal_ends_when_its_time_is_up(coordinator: Coordinator, questions: KeptQuestions) -> None:
    late = wire.Mismatch(wire.OpKey(0, 0, "opt", 0), 31.0, "plan")
    assert coordinator.mismatch(late) == []  # there is no such proposal any more
    coordinator.plan_request(wire.PlanRequest(0, PROPOSAL))
    assert coordinator.mismatch(late) == []
    assert questions.answer({0: None}, {}, kind="plan") == []  # it is found out where the others are
    error = (
        "the plan of 'opt' waited 31 s for rank 1 (host a), rank 2 (host b), which did not propose it "
        "(proposed by rank 0 (host a))"
    )
    verdicts = [(node, wire.PlanVerdict(0, "opt", 0, None, error)) for node in (0, 1)]
    assert questions.answer({0: None}, {}, kind="plan") == verdicts
    assert coordinator.statistics()["pending"] == 0
    assert questions.asked == []


# --- homes ------------------------------------------------------------------------------------------------------------


def planned(coordinator: Coordinator, algorithm: str) -> wire.Plan:
    tensors = tuple(wire.TensorSpec(f"w{i}", "float32", (50,)) for i in range(32))
    optimizer = wire.OptimizerSpec("SGD", ("{}",))
    proposal = wire.Proposal("opt", 0, 0, wire.Reduction(algorithm=algorithm, optimizer=optimizer), tensors)
    for rank in range(TOPOLOGY.size):
        out = coordinator.plan_request(wire.PlanRequest(rank, proposal))
    verdict = out[-1][1]
    assert isinstance(verdict, wire.PlanVerdict)
    assert verdict.plan is not None
    return verdict.plan


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
