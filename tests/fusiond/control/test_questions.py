"""What nodes ask each other, over a network that may lose a node, and who may answer what."""

from __future__ import annotations

import numpy as np

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.settings import Settings
from fusion_rt.wire import OpKey
from fusiond.control.questions import PATIENCE, Questions
from fusiond.core.participants import Participants
from fusiond.operations.context import Context
from tests.fusiond.simulation import SimulatedJob

X = OpKey(0, 0, "x", 0)
SUM = wire.Signature("barrier")
SUM_OF_FLOATS = wire.Signature("allreduce", "float32", (2,))
VALUES = np.ones(2, np.float32)


def located(rank: int) -> wire.Whereabouts:
    return wire.Whereabouts(rank, 100 + rank, "sleeping (S)")


def job_of(*nodes: int) -> SimulatedJob:
    job = SimulatedJob(nodes)
    job.whereabouts = {rank: located(rank) for rank in job.ranks}
    return job


def questions(job: SimulatedJob, node: int) -> Questions:
    return job.nodes[node].engine._questions


def test_every_node_says_where_its_ranks_are_and_what_is_over() -> None:
    job = job_of(2, 2)
    handles = job.on_all_ranks(lambda rank: job.submit(rank, "x", SUM))
    assert all(job.is_answered(rank, handle) for rank, handle in enumerate(handles))
    answers: list[dict[int, wire.Located]] = []
    questions(job, 1).locate([0, 1, 3], [X, OpKey(0, 0, "y", 0)], answers.append)
    job.settle()
    (found,) = answers
    assert {node: [one.rank for one in answer.found] for node, answer in found.items()} == {0: [0, 1], 1: [3]}
    assert [[one.key for one in found[node].waiting] for node in (0, 1)] == [[X], [X]]
    assert found[1].waiting[0].note == "it is over on host host1 (node 1)"


def test_every_node_says_what_is_under_way() -> None:
    job = job_of(2, 1)
    job.submit(1, "x", SUM)
    job.settle()
    answers: list[dict[int, wire.WaitingHere]] = []
    questions(job, 1).waiting(answers.append)
    job.settle()
    ((waiting,), none) = answers[0][0].waiting, answers[0][1].waiting
    assert (waiting.key, waiting.submitted, waiting.awaits) == (X, (1,), (0, 1, 2))
    assert waiting.what == "tensor 'x' (barrier)"
    assert none == ()


def test_of_one_operation_every_node_says_what_was_submitted_even_when_it_is_over() -> None:
    job = job_of(2, 1)
    job.submit_all("x", SUM_OF_FLOATS, [VALUES] * 3)
    job.submit(0, "x", SUM_OF_FLOATS, VALUES, clock=1)
    job.settle()
    answers: list[dict[int, wire.WaitingHere]] = []
    for clock in (0, 1):
        questions(job, 1).waiting(answers.append, OpKey(0, 0, "x", clock), (0, 1))
    job.settle()
    over, waiting = answers
    assert [over[node].waiting[0].submitted for node in (0, 1)] == [(0, 1), (2,)]
    assert over[0].waiting[0].signatures == (SUM_OF_FLOATS,) * 2
    assert [(one.submitted, one.signatures) for one in waiting[0].waiting] == [((0,), (SUM_OF_FLOATS,))]
    assert waiting[1].waiting == ()


def test_about_one_operation_all_nodes_are_waited_for() -> None:
    job = job_of(1, 1)
    engine = job.nodes[1].engine
    receive, engine.peer_message = engine.peer_message, lambda *_: None  # type: ignore[method-assign]
    answers: list[dict[int, wire.WaitingHere]] = []
    questions(job, 0).waiting(answers.append, X, (0, 1))
    job.settle()
    job.pass_time(10 * PATIENCE)
    assert answers == []
    receive(0, wire.WaitingRequest(1, X))
    job.settle()
    assert [sorted(found) for found in answers] == [[0, 1]]


def test_a_node_that_does_not_answer_is_not_waited_for_longer_than_the_others_patience() -> None:
    job = job_of(1, 1, 1)
    engine = job.nodes[2].engine
    engine.peer_message = lambda *_: None  # type: ignore[method-assign]
    answers: list[dict[int, wire.Located]] = []
    questions(job, 0).locate([0, 1, 2], [], answers.append)
    job.settle()
    assert answers == []
    job.pass_time(PATIENCE)
    assert [sorted(found) for found in answers] == [[0, 1]]
    job.pass_time(PATIENCE)
    assert len(answers) == 1


def test_nobody_is_asked_about_nobody() -> None:
    job = job_of(1, 1)
    answers: list[dict[int, wire.Located]] = []
    questions(job, 0).locate([], [], answers.append)
    assert answers == [{}]
    assert job.sent == []


def test_a_node_is_asked_about_as_many_ranks_as_have_room_in_a_message() -> None:
    job = job_of(wire.MAX_LOCATED + 4)
    answers: list[dict[int, wire.Located]] = []
    questions(job, 0).locate(job.ranks, [], answers.append)
    job.settle()
    assert [one.rank for one in answers[0][0].found] == list(range(wire.MAX_LOCATED))


def test_answers_about_ranks_of_others_and_answers_that_nobody_asked_for_are_ignored() -> None:
    job = job_of(1, 1, 1)
    asking = questions(job, 0)
    answers: list[dict[int, wire.Located]] = []
    asking.locate([1], [], answers.append)
    strays: list[tuple[int, wire.PeerMessage]] = [
        (2, wire.Located(1, (located(2),))),  # was not asked
        (1, wire.Located(1, (located(2),))),  # is not its rank
        (1, wire.Located(99, (located(1),))),  # was not asked this
        (1, wire.WaitingHere(1, 5, (wire.Waiting("operation", X, "x", 1.0, (2,)),))),
    ]
    for node, answer in strays:
        asking.handlers()[type(answer)](node, answer)
        assert answers == []
    job.settle()
    assert answers == [{1: wire.Located(1, (located(1),))}]
    asking.handlers()[wire.Located](1, wire.Located(1, (located(1),)))  # a second time
    assert len(answers) == 1


def test_a_node_says_nothing_of_ranks_that_are_not_its_own() -> None:
    job = job_of(1, 1)
    asked: list[list[int]] = []
    job.nodes[1].locate = lambda ranks, then: asked.append(list(ranks))  # type: ignore[method-assign]
    questions(job, 1).handlers()[wire.Locate](0, wire.Locate(1, (0, 1)))
    assert asked == [[1]]


def test_more_than_has_room_is_counted() -> None:
    job = SimulatedJob([1, 1])
    topology = Topology(("a",), ((0,),))
    context = Context(topology, 0, Settings(), job.nodes[0], Participants(topology, 0))
    many = [wire.Waiting("operation", OpKey(0, 0, str(n), 0), "x", 1.0) for n in range(wire.MAX_WAITING + 3)]
    told: list[dict[int, wire.WaitingHere]] = []

    class Engine:
        def under_way(self, key: OpKey | None) -> list[wire.Waiting]:
            return many

    Questions(context, 1, Engine()).waiting(told.append)
    assert (len(told[0][0].waiting), told[0][0].more) == (wire.MAX_WAITING, 3)
