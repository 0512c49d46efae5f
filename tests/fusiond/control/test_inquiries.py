"""The coordinator's inquiries: when all nodes are asked about an operation, what follows, and in what words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.core.topology import GLOBAL_SET, Topology
from fusion_rt.settings import Settings
from fusiond.control.negotiation import Coordinator
from fusiond.control.waiting import Subject, describe, explain
from fusiond.core.participants import Participants
from tests.for_each import for_each
from tests.fusiond.control.kept_questions import KeptQuestions

TOPOLOGY = Topology(("a", "b"), ((0, 1), (2,)))
EVERYONE = (0, 1, 2)
SUM = wire.Signature("allreduce", "float32", (4, 2))
GATHER = wire.Signature("allgather", "float32", (4, 2))


@pytest.fixture
def participants() -> Participants:
    return Participants(TOPOLOGY, 0)


@pytest.fixture
def questions() -> KeptQuestions:
    return KeptQuestions()


@pytest.fixture
def coordinator(participants: Participants, questions: KeptQuestions) -> Coordinator:
    return questions.coordinator(participants, Settings(operation_timeout=30.0, stall_warning_time=20.0))


def key(name: str = "x") -> wire.OpKey:
    return wire.OpKey(GLOBAL_SET, 0, name, 0)


def request(node: int, signature: wire.Signature = SUM, name: str = "x") -> wire.Request:
    return wire.Request(key(name), dict.fromkeys(TOPOLOGY.ranks[node], signature), {})


def test_nodes_that_ask_about_different_things_are_all_inquired(
    coordinator: Coordinator, questions: KeptQuestions
) -> None:
    coordinator.request(0, request(0))
    other = replace(SUM, dtype="int32")
    assert coordinator.request(1, request(1, other)) == []
    assert coordinator.mismatch(wire.Mismatch(key())) == []  # under way already
    assert questions.asked == [(key(), (0, 1))]
    error = (
        "the ranks do not agree about tensor 'x': ranks 0-1 (host a): allreduce sum float32 [4, 2]; rank 2 (host b): "
        "allreduce sum int32 [4, 2]. Every rank has to submit the same operation"
    )
    failed = [(node, wire.OpFailed(key(), error)) for node in (0, 1)]
    assert questions.answer({0: SUM, 1: SUM}, {2: other}) == failed
    assert coordinator.statistics() == {"pending": 0, "approved": 0, "plans": 0}


def test_approval_under_another_name_does_not_hide_a_disagreement(
    coordinator: Coordinator, questions: KeptQuestions
) -> None:
    other = replace(SUM, dtype="int32")
    for name, signature in [("before", SUM), ("also before", other)]:
        for node in (0, 1):
            coordinator.request(node, request(node, signature, name))
    coordinator.mismatch(wire.Mismatch(key()))
    assert coordinator.request(0, request(0)) == []  # waits for the end of the inquiry
    assert len(questions.asked) == 1


def test_an_answer_about_what_has_been_decided_is_ignored(coordinator: Coordinator, questions: KeptQuestions) -> None:
    coordinator.mismatch(wire.Mismatch(key(), 31.0))
    coordinator.forget(key())
    assert questions.answer({0: SUM, 1: SUM}, {}) == []
    assert questions.asked == []


def test_a_look_that_finds_nothing_wrong_changes_nothing(coordinator: Coordinator, questions: KeptQuestions) -> None:
    coordinator.request(0, request(0))
    coordinator.mismatch(wire.Mismatch(key(), 3.0))
    assert questions.answer({0: SUM, 1: SUM}, {}) == []
    assert [type(message) for _, message in coordinator.request(1, request(1))] == [wire.Verdict] * 2


def test_a_node_that_asks_during_a_look_is_not_forgotten(coordinator: Coordinator, questions: KeptQuestions) -> None:
    coordinator.request(0, request(0))
    coordinator.mismatch(wire.Mismatch(key(), 3.0))
    assert coordinator.request(1, request(1)) == []
    out = questions.answer({0: SUM, 1: SUM}, {2: SUM})
    assert [type(message) for _, message in out] == [wire.Verdict] * 2


def test_people_are_warned_once_however_many_nodes_wait(coordinator: Coordinator, questions: KeptQuestions) -> None:
    for waited in (21.0, 22.0):
        coordinator.mismatch(wire.Mismatch(key(), waited))
        assert questions.answer({0: SUM, 1: SUM}, {}) == []
    assert questions.warnings == [
        "tensor 'x' waited 21 s for rank 2 (host b), which did not submit it (submitted by ranks 0-1 (host a))"
    ]


def test_a_look_after_the_timeout_ends_the_operation(coordinator: Coordinator, questions: KeptQuestions) -> None:
    coordinator.mismatch(wire.Mismatch(key(), 31.0))
    assert questions.answer({0: SUM, 1: SUM}, {}) == []
    # It was found out where rank 2 is, which takes time.
    assert questions.asked == [(key(), (0, 1))]
    out = questions.answer({0: SUM, 1: SUM}, {})
    assert [(node, type(message)) for node, message in out] == [(0, wire.OpFailed), (1, wire.OpFailed)]
    assert coordinator.statistics()["pending"] == 0


def test_an_operation_goes_on_when_the_missing_rank_comes_at_the_last_moment(
    coordinator: Coordinator, questions: KeptQuestions
) -> None:
    coordinator.request(0, request(0))
    coordinator.mismatch(wire.Mismatch(key(), 31.0))
    questions.answer({0: SUM, 1: SUM}, {})
    assert coordinator.request(1, request(1)) == []
    out = questions.answer({0: SUM, 1: SUM}, {2: SUM})
    assert [type(message) for _, message in out] == [wire.Verdict] * 2
    assert coordinator.statistics()["pending"] == 0


def test_ranks_that_left_are_no_longer_waited_for(
    coordinator: Coordinator, participants: Participants, questions: KeptQuestions
) -> None:
    participants.departed.add(2)
    coordinator.mismatch(wire.Mismatch(key(), 3.0))
    out = questions.answer({0: SUM, 1: SUM}, {})
    assert "waits for rank 2 (host b), which left the job" in out[0][1].error  # type: ignore[union-attr]


# --- sentences --------------------------------------------------------------------------------------------------------


def why(submitted: dict[int, wire.Signature], departed: set[int] | None = None, waited: float = 0.0) -> str:
    return explain(("operation", key()), submitted, EVERYONE, TOPOLOGY, departed or set(), waited)


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
    found = explain(("operation", wire.OpKey(0, 3, "7", 12)), {}, EVERYONE, TOPOLOGY, {0, 1, 2}, 0.0)
    assert found.startswith("bucket 7 of plan 3 waits for ranks 0-1 (host a), rank 2 (host b)")


def test_a_plan_is_proposed_and_not_submitted() -> None:
    subject: Subject = ("plan", wire.OpKey(0, 0, "opt", 0))
    late = explain(subject, {0: None, 1: None}, EVERYONE, TOPOLOGY, set(), 31.0)
    assert late == (
        "the plan of 'opt' waited 31 s for rank 2 (host b), which did not propose it (proposed by ranks 0-1 (host a))"
    )
    gone = explain(subject, {0: None, 1: None}, EVERYONE, TOPOLOGY, {2}, 3.0)
    assert gone == "the plan of 'opt' waits for rank 2 (host b), which left the job without proposing it"


@for_each(
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
