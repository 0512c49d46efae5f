"""What a new coordinator is told, what it makes of that, and what is dropped because it is of a view before."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.wire import Loss, OpKey, View
from fusiond.control.handover import PLANS_OF_A_VIEW, inherit, settle_sets
from fusiond.core.participants import Participants
from tests.fusiond.simulation import Array, SimulatedJob

FOUR = Topology(("a", "b", "c", "d"), ((0,), (1,), (2,), ()))
SUM = wire.Signature("allreduce", "float32", (6,))
VALUES: Array = np.arange(6, dtype=np.float32)
NOTHING = wire.Handover(0, 1, 1, {0: (0, 1, 2)})
PROPOSAL = wire.Proposal("opt", 0, 0, wire.Reduction(algorithm="dpsgd"), (wire.TensorSpec("w", "float32", (4,)),))
LOST = View(1, (1, 2, 3), (Loss(0, "node 0 is lost"),))


def left() -> Participants:
    """The process sets as node 1 sees them once node 0 is lost."""
    participants = Participants(FOUR, 1)
    participants.lose({0: "node 0 is lost"})
    return participants


def plan(id: int, homes: tuple[int, ...] = ()) -> wire.Plan:
    return wire.Plan(id, "opt", 0, wire.Reduction(), (), 0, (), homes)


def test_ids_of_plans_are_new_whatever_the_coordinator_before_has_given_unheard() -> None:
    found = inherit({1: NOTHING, 2: replace(NOTHING, last_plan=7)}, left(), 1)
    assert found.next_plan == PLANS_OF_A_VIEW
    late = replace(NOTHING, last_plan=2 * PLANS_OF_A_VIEW + 5)
    assert inherit({1: NOTHING, 2: late}, left(), 2).next_plan == 2 * PLANS_OF_A_VIEW + 6


def test_a_process_set_that_only_some_have_is_removed_and_its_id_is_not_used_again() -> None:
    one = replace(NOTHING, next_set=3, sets={0: (0, 1, 2), 1: (1, 2), 2: (0, 1)})
    other = replace(NOTHING, next_set=2, sets={0: (0, 1, 2), 1: (1, 2)})
    without_workers = replace(NOTHING, next_set=1, sets={0: (0, 1, 2)})
    assert settle_sets({1: one, 2: other, 3: without_workers}, left()) == (3, (0, 1))


def test_a_plan_that_one_has_heard_of_is_told_to_the_others_and_to_its_homes() -> None:
    made = wire.MadePlan(4, plan(5, (3,)), {1: PROPOSAL})
    older = wire.MadePlan(3, plan(2), {2: PROPOSAL})
    found = inherit({1: replace(NOTHING, plans=(made,)), 2: replace(NOTHING, plans=(older,)), 3: NOTHING}, left(), 1)
    verdict = wire.PlanVerdict(0, "opt", 4, made.plan)
    assert found.news == [(2, verdict), (3, verdict)]
    assert found.plans == {(0, "opt"): made}


def test_what_has_failed_on_one_node_fails_on_those_that_have_not_heard() -> None:
    failed = wire.OpFailed(OpKey(0, 0, "x", 3), "why")
    refused = wire.PlanVerdict(0, "opt", 1, None, "why not")
    found = inherit({1: replace(NOTHING, failed=(failed, refused)), 2: NOTHING, 3: NOTHING}, left(), 1)
    assert found.news == [(2, failed), (2, refused)]


def test_what_is_open_is_asked_again_in_the_name_of_who_asked() -> None:
    key = OpKey(0, 0, "x", 0)
    asked = wire.Request(key, {1: SUM}, {})
    found = inherit(
        {
            1: replace(NOTHING, requests=(asked,), approved=(SUM,)),
            2: replace(NOTHING, mismatches=(wire.Mismatch(key),)),
        },
        left(),
        1,
    )
    assert found.open == [(1, asked), (2, wire.Mismatch(key))]
    assert found.approved == {(0, wire.digest(SUM))}


def test_from_the_beginning_of_a_view_the_coordinator_is_not_listened_to_until_all_is_settled() -> None:
    job = SimulatedJob([1, 1, 1])
    engine = job.nodes[2].engine
    handle = job.propose(2, PROPOSAL)
    engine.view_begins(View(1, (0, 2), (Loss(1, "node 1 is lost"),)), 0)
    verdict = wire.PlanVerdict(0, "opt", 0, replace(plan(1), reduction=PROPOSAL.reduction))
    engine.peer_message(0, verdict)  # it was sent in the view before
    assert not job.is_answered(2, handle)
    assert engine.statistics()["coordination"] == {"node": 0, "settling": True, "dropped": 1}
    engine.peer_message(0, wire.Settled(0, 7, 1, (0,)))  # of another view
    engine.peer_message(0, verdict)
    assert not job.is_answered(2, handle)
    engine.peer_message(0, wire.Settled(0, 1, 1, (0,)))
    engine.peer_message(0, verdict)
    assert job.is_answered(2, handle)
    engine.peer_message(1, wire.PlanVerdict(0, "opt", 9, plan(9)))  # not the coordinator
    assert engine.statistics()["coordination"] == {"node": 0, "settling": False, "dropped": 3}


def test_who_is_in_the_next_view_already_waits_for_the_coordinator_to_get_there() -> None:
    job = SimulatedJob([1, 1, 1])
    view = View(1, (0, 1), (Loss(2, "node 2 is lost"),))
    job.nodes[1].engine.view_begins(view, 0)
    signature = wire.Signature("barrier")
    handles = {1: job.submit(1, "b", signature)}
    while job.step():  # the coordinator gets the handover and the request, and is in the view before
        pass
    handles[0] = job.submit(0, "b", signature)
    job.nodes[0].engine.view_begins(view, 0)
    job.settle()
    assert "was under way when rank 2 (host host2) was lost" in job.error(0, handles[0])  # it began before
    assert job.error(1, handles[1]) == job.error(0, handles[0])
    handles = {rank: job.submit(rank, "c", signature) for rank in (0, 1)}
    job.settle()
    assert all(isinstance(job.answer(rank, handle)[0], wire.Done) for rank, handle in handles.items())


def test_a_request_of_the_next_view_is_not_forgotten_with_the_view_before() -> None:
    job = SimulatedJob([1, 1, 1])
    view = View(1, (0, 1), (Loss(2, "node 2 is lost"),))
    signature = wire.Signature("add_process_set", ranks=(0, 1))
    job.nodes[1].engine.view_begins(view, 0)
    handles = {1: job.submit(1, "process sets", signature)}
    while job.step():
        pass
    job.nodes[0].engine.view_begins(view, 0)
    handles[0] = job.submit(0, "process sets", signature)
    job.settle()
    assert {job.answer(rank, handle)[0].sizes for rank, handle in handles.items()} == {(1,)}  # type: ignore[union-attr]


def test_a_handover_of_another_membership_epoch_is_not_taken() -> None:
    job = SimulatedJob([1, 1])
    engine = job.nodes[0].engine
    engine.view_begins(View(1, (0, 1), (Loss(1, "rank 1 died", 1),)), 0)
    engine.peer_message(1, replace(NOTHING, epoch=1, sets={0: (0, 1)}))
    assert engine.coordinator is None
    engine.peer_message(1, replace(NOTHING, sets={0: (0, 1)}))
    assert engine.coordinator is not None
