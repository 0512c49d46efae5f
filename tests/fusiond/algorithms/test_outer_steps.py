"""Outer steps at homes and between pairs of ranks, against the published rules: decoupled DiLoCo, and NoLoCo."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.core import mixing
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array
from tests.reference import algorithms as published

RANKS, DIM, RATE, PERIOD = 4, 30, 0.05, 3
OUTER_RATE, MOMENTUM = 0.6, 0.4
PROBLEM = published.quadratic(RANKS, DIM, seed=5)
START = np.random.default_rng(2).standard_normal(DIM)
layouts = for_each("layout", [[4], [2, 2], [1, 1, 1, 1]])


def samples(rank: int, step: int) -> int:
    return 1 + rank + (rank * step) % 3


class Learners:
    """Learners in plain numpy, whose homes are the daemon's."""

    def __init__(self, layout: list[int], text: str, codec: str = "dense") -> None:
        self.workers = Workers(layout, text, START, RATE, codec=codec)
        self.mix = self.workers.spec.mixing
        self.starts = [START.copy() for _ in range(RANKS)]
        self.was = [START.copy() for _ in range(RANKS)]  # when it posted
        self.posted = [(0, 0)] * RANKS
        self.steps, self.seen = [0] * RANKS, [0] * RANKS
        self.under_way: set[int] = set()

    def step(self, rank: int) -> None:
        workers = self.workers
        own = workers.x[rank] = workers.x[rank] - RATE * PROBLEM(rank, self.steps[rank], workers.x[rank])
        self.seen[rank] += samples(rank, self.steps[rank])
        self.steps[rank] += 1
        if rank in self.under_way and not workers.waits(rank):
            self.under_way.remove(rank)
            workers.x[rank] = self.starts[rank]
            workers.collect(rank)
            self.starts[rank] = workers.x[rank].copy()
            workers.x[rank] = own + (1 - self.mix) * (self.starts[rank] - self.was[rank])
        if self.steps[rank] % PERIOD == 0 and rank not in self.under_way:
            count, taken = self.seen[rank] - self.posted[rank][0], self.steps[rank] - self.posted[rank][1]
            self.posted[rank], self.was[rank] = (self.seen[rank], self.steps[rank]), workers.x[rank].copy()
            workers.post(rank, self.starts[rank] - workers.x[rank], count * count // taken)
            self.under_way.add(rank)


@layouts
@for_each(("asked", "quorum"), [("", 3), ("quorum=1, ", 1), ("quorum=2, ", 2), ("quorum=4, ", 4)])
@for_each("mix", [0.0, 0.5])
def test_decoupled_diloco_is_the_published_rule_in_any_order(
    layout: list[int], asked: str, quorum: int, mix: float
) -> None:
    """Without a number, more than half of the four ranks are a quorum."""
    order = np.random.default_rng(quorum).choice(RANKS, 150, p=[0.4, 0.3, 0.2, 0.1]).tolist()
    text = f"decoupled(steps={PERIOD}, outer_rate={OUTER_RATE}, outer_momentum={MOMENTUM}, {asked}mix={mix})"
    learners = Learners(layout, text)
    expected = published.decoupled_diloco(
        START, PROBLEM, samples, RANKS, RATE, PERIOD, OUTER_RATE, MOMENTUM, quorum, mix, order
    )
    for rank, after in zip(order, expected.workers, strict=True):
        learners.step(rank)
        np.testing.assert_allclose(np.stack(learners.workers.x), after, rtol=0, atol=1e-12)
    assert len(expected.homes) > 3
    np.testing.assert_allclose(learners.workers.home(), expected.homes[-1], rtol=0, atol=1e-12)


def learners_of_one_step(grace: float) -> Workers:
    text = f"decoupled(steps=1, outer_rate=1.0, outer_momentum=0.0, quorum=2, grace={grace})"
    return Workers([2, 2], text, START, RATE)


def post_all(workers: Workers, *ranks: int) -> None:
    for rank in ranks:
        workers.post(rank, np.full(DIM, 1.0 + rank))


def answered(workers: Workers, *ranks: int) -> bool:
    """Whether all of these have their answer, which they take; or none has."""
    waiting = {workers.waits(rank) for rank in ranks}
    assert len(waiting) == 1
    for rank in ranks:
        if waiting == {False}:
            workers.collect(rank)
    return waiting == {False}


def test_the_grace_window_is_a_share_of_the_usual_time_between_outer_steps() -> None:
    workers = learners_of_one_step(grace=0.5)
    for _ in range(2):  # until there are two to learn from, a quorum is enough
        post_all(workers, 0, 1)
        assert answered(workers, 0, 1)
        workers.job.pass_time(10)
    post_all(workers, 0, 1)
    workers.job.pass_time(4)
    assert workers.waits(0)
    post_all(workers, 2)
    assert workers.waits(2)  # one is still missing
    before = workers.home()
    workers.job.pass_time(2)
    assert answered(workers, 0, 1, 2)
    np.testing.assert_allclose(workers.home(), before - 3 / 4 * np.mean([1, 2, 3]))


def test_the_grace_window_ends_when_all_are_there() -> None:
    workers = learners_of_one_step(grace=0.9)
    for _ in range(2):
        post_all(workers, 0, 1)
        assert answered(workers, 0, 1)
        workers.job.pass_time(10)
    post_all(workers, 0, 1, 2)
    assert workers.waits(0)
    post_all(workers, 3)
    assert answered(workers, 0, 1, 2, 3)


def test_a_learner_that_is_lost_or_waits_elsewhere_is_not_waited_for() -> None:
    workers = Workers([2, 2], "decoupled(steps=1, outer_rate=1.0, outer_momentum=0.0, quorum=4)", START, RATE)
    post_all(workers, 0, 1)
    assert workers.waits(0)
    workers.job.leave(3)
    workers.job.settle()
    assert workers.waits(0)
    workers.job.submit(2, "barrier", wire.Signature("barrier"))
    workers.job.settle()
    assert answered(workers, 0, 1)
    np.testing.assert_allclose(workers.home(), START - 2 / 3 * 1.5)  # two of three


def awaits_answers(workers: Workers, *ranks: int) -> None:
    """These ranks say that they post nothing more before they have been answered."""
    for rank in ranks:
        workers.job.engine(rank).homes.occupied.awaits_answers(rank, workers.plan.id)
    workers.job.settle()


@layouts
def test_learners_that_wait_for_their_answers_get_them_at_once_if_all_others_do_too(layout: list[int]) -> None:
    """So that all of them count in one step, as before a checkpoint."""
    workers = Workers(layout, "decoupled(steps=1, outer_rate=1.0, outer_momentum=0.0, quorum=4)", START, RATE)
    post_all(workers, 0, 1, 2)
    awaits_answers(workers, 0, 1)
    assert all(workers.waits(rank) for rank in (0, 1, 2))
    workers.job.submit(3, "barrier", wire.Signature("barrier"))
    workers.job.settle()
    assert answered(workers, 0, 1, 2)
    np.testing.assert_allclose(workers.home(), START - 3 / 4 * 2)  # three of four


def test_a_learner_that_waits_for_its_answer_gets_it_within_a_second_without_a_quorum() -> None:
    workers = Workers([2, 2], "decoupled(steps=1, outer_rate=1.0, outer_momentum=0.0, quorum=4)", START, RATE)
    post_all(workers, 0, 1)
    workers.job.pass_time(30)
    assert workers.waits(0)  # it may go on
    awaits_answers(workers, 0)
    workers.job.pass_time(1)
    assert answered(workers, 0, 1)
    awaits_answers(workers, 0)  # says nothing: it has nothing under way
    post_all(workers, 0)
    workers.job.pass_time(30)
    assert workers.waits(0)


@pytest.mark.parametrize("codec", ["fp16", "topk(density=0.3, minimum=0)"])
def test_decoupled_diloco_learns_through_codecs(codec: str) -> None:
    learners = Learners([1, 1, 2], f"decoupled(steps={PERIOD}, outer_rate=0.6, outer_momentum=0.2, quorum=2)", codec)
    order = np.random.default_rng(3).choice(RANKS, 900).tolist()
    for rank in order:
        learners.step(rank)
    assert PROBLEM.loss(learners.workers.home()) < 0.01 * PROBLEM.loss(START)


@layouts
def test_noloco_is_the_published_rule(layout: list[int]) -> None:
    """The worker's side is in numpy here; posted is rate * change + consensus * start, and the answer is its change."""
    graph = mixing.parse("random-pairs", RANKS)
    rate, momentum, consensus, rounds = 0.7, 0.5, 1.2, 12

    def partner(rank: int, turn: int) -> int:
        return graph.incoming(rank, turn)[0][0]

    expected = published.noloco(START, PROBLEM, RANKS, RATE, PERIOD, rate, momentum, consensus, partner, rounds)
    workers = Workers(layout, f"noloco(steps={PERIOD})", START, RATE)
    phis, deltas = published.copies(START, RANKS), np.zeros((RANKS, DIM))
    for turn in range(rounds):
        changes: list[Array] = []
        for rank in range(RANKS):
            x = phis[rank].copy()
            for step in range(turn * PERIOD, (turn + 1) * PERIOD):
                x -= RATE * PROBLEM(rank, step, x)
            changes.append(x - phis[rank])
            workers.post(rank, rate * changes[rank] + consensus * phis[rank], settle=False)
        workers.job.settle()
        for rank in range(RANKS):
            workers.x[rank] = np.zeros(DIM)
            workers.collect(rank)
            deltas[rank] = momentum * deltas[rank] + rate * changes[rank] + workers.x[rank]
            phis[rank] += deltas[rank]
        np.testing.assert_allclose(phis, expected.workers[turn], rtol=0, atol=1e-12)


def test_what_a_learner_does_not_wait_for_is_no_stall() -> None:
    workers = Workers([2, 2], "decoupled(steps=1, quorum=4)", START, RATE)
    post_all(workers, 0)
    waits = workers.job.engine(0).homes.waits
    assert workers.waits(0)
    assert waits.contributions() == []
    awaits_answers(workers, 0)
    assert [client.rank for client in waits.contributions()] == [0, 0]
    workers.job.pass_time(2)
    assert answered(workers, 0)
    assert waits.contributions() == []
