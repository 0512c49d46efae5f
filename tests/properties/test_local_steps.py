"""Local steps and outer steps on 4, 6 and 8 ranks: the worker's own rules, and the daemon's exchanges and homes,
beside the references, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fusion_rt import algorithms, codecs, wire
from fusion_rt.core import mixing
from fusion_rt.torch.optimizer import family_of
from fusion_rt.torch.sync.at_step.outer_optimizer import OuterOptimizer, anchor, note_sent
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array, SimulatedJob
from tests.properties.scheduled import LAYOUTS
from tests.reference import algorithms as published

RATE, DIM, PERIOD = 0.05, 60, 4
WORLDS = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
worlds = for_each(("ranks", "layout"), WORLDS[::3] + WORLDS[1::6])


class Learners:
    """Ranks that take local steps of plain SGD, and what an algorithm makes of them: as an optimizer does it.

    Attributes:
        x: each rank's parameters; views of what the rules change.
    """

    def __init__(self, layout: Sequence[int], text: str, start: Array, gradient: published.Gradient):
        job = SimulatedJob(layout, sparse_route="gather")
        self.workers = Workers(layout, text, start, RATE, codec=algorithms.parse(text).codec or "dense", job=job)
        self.spec, self.gradient = algorithms.parse(text), gradient
        family, self.rule = family_of(self.spec, codecs.parse(self.spec.codec or "dense"))
        self.has_outer_optimizer = issubclass(family, OuterOptimizer)
        self.slots: list[Any] = [
            SimpleNamespace(parameter=torch.tensor(start.copy()), start=None, moved=None, posted=None, velocity=None)
            for _ in self.workers.x
        ]
        self.x = [slot.parameter.numpy() for slot in self.slots]
        self.steps, self.sent = [0] * len(self.x), [0] * len(self.x)
        self.under_way: list[list[tuple[int, int]]] = [[] for _ in self.x]  # of each rank: fragment, and step when due
        self._handles: dict[tuple[int, int], list[tuple[wire.Bucket, int]]] = {}

    def buckets(self, piece: int) -> list[wire.Bucket]:
        return [bucket for bucket in self.workers.plan.buckets if bucket.index % self.spec.pieces == piece]

    def step(self, *ranks: int) -> None:
        """These ranks take a local step, and exchange what is due then."""
        for rank in ranks:
            if self.has_outer_optimizer:
                anchor([self.slots[rank]])
            self.x[rank] -= RATE * self.gradient(rank, self.steps[rank], self.x[rank])
            self.steps[rank] += 1
            self.take(rank)
        for rank in ranks:
            for piece in self.spec.due(self.steps[rank]):
                if self.spec.waits_for_answers or not self.under_way[rank]:
                    self.post(rank, piece)
        self.workers.job.settle()
        if not self.spec.overlaps:
            for rank in ranks:
                self.take(rank)

    def post(self, rank: int, piece: int) -> None:
        """Posts what an algorithm does, with the weight of the steps since the last time: a sample each."""
        weight, self.sent[rank] = self.steps[rank] - self.sent[rank], self.steps[rank]
        if self.spec.at_shards:
            note_sent([self.slots[rank]])
        value = self.rule.value(self.slots[rank])
        assert value is not None
        workers, handles = self.workers, []
        for bucket in self.buckets(piece):
            for place, of in workers.places(rank, bucket):
                place[:] = value.numpy()[of]
            handles.append((bucket, workers._ready(rank, bucket.index, workers.clocks[rank], samples=weight)))
        if piece == self.spec.pieces - 1:
            workers.clocks[rank] += 1
        self._handles[rank, piece] = handles
        self.under_way[rank].append((piece, self.steps[rank] + self.spec.lag))

    def take(self, rank: int) -> None:
        """Takes the answers that are due; of an algorithm that waits for none, those that are there."""
        for piece, due in list(self.under_way[rank]):
            handles = self._handles[rank, piece]
            there = all(self.workers.job.is_answered(rank, handle) for _, handle in handles)
            if self.steps[rank] < due or not there:
                assert not there or self.steps[rank] < due or not self.spec.waits_for_answers
                continue
            self.under_way[rank].remove((piece, due))
            for bucket, handle in self._handles.pop((rank, piece)):
                message, _ = self.workers.job.answer(rank, handle)
                assert isinstance(message, wire.Done), message
                for place, of in self.workers.places(rank, bucket):
                    self._apply(rank, of, torch.tensor(place.copy()), message.sizes == (1,))
            if self.spec.at_shards:
                self.slots[rank].moved = self.slots[rank].posted = None

    def _apply(self, rank: int, of: slice, result: torch.Tensor, added: bool) -> None:
        """Has the rule take a tensor's result: a slot of these elements alone."""
        slot = self.slots[rank]
        if slot.velocity is None and self.has_outer_optimizer:
            slot.velocity = torch.zeros_like(slot.parameter)
        names = ("parameter", "start", "moved", "posted", "velocity")
        views = {name: None if getattr(slot, name) is None else getattr(slot, name)[of] for name in names}
        self.rule.take([SimpleNamespace(**views)], [result], added)  # type: ignore[list-item]


def start_of(ranks: int) -> Array:
    return np.random.default_rng(ranks).standard_normal(DIM)


def same(found: Sequence[Array], expected: Array, where: str) -> None:
    np.testing.assert_allclose(np.stack(found), expected, rtol=1e-9, atol=1e-11, err_msg=where)


@worlds
def test_local_sgd(ranks: int, layout: list[int]) -> None:
    problem = published.quadratic(ranks, DIM, seed=3)
    learners = Learners(layout, f"local_sgd(steps={PERIOD})", start_of(ranks), problem)
    run = published.local_sgd(start_of(ranks), problem, ranks, RATE, PERIOD, 5 * PERIOD)
    for step, expected in enumerate(run.workers):
        learners.step(*range(ranks))
        same(learners.x, expected, f"{layout}, step {step}")


@worlds
def test_diloco(ranks: int, layout: list[int]) -> None:
    problem = published.quadratic(ranks, DIM, seed=3)
    learners = Learners(layout, f"diloco(steps={PERIOD}, outer_rate=0.6, outer_momentum=0.5)", start_of(ranks), problem)
    run = published.diloco(start_of(ranks), problem, ranks, RATE, PERIOD, 0.6, 0.5, 6)
    for turn, expected in enumerate(run.homes):
        for _ in range(PERIOD):
            learners.step(*range(ranks))
        same(learners.x, np.tile(expected, (ranks, 1)), f"{layout}, round {turn}")


@worlds
@for_each(("delay", "mix"), [(0, 0.0), (1, 0.25), (3, 0.5)])
def test_streaming_diloco(ranks: int, layout: list[int], delay: int, mix: float) -> None:
    problem = published.quadratic(ranks, DIM, seed=3)
    text = f"diloco(steps={PERIOD}, outer_rate=0.6, outer_momentum=0.5, fragments=2, delay={delay}, mix={mix})"
    learners = Learners(layout, text, start_of(ranks), problem)
    spans = [[learners.workers.span_of(t.name) for t in b.tensors] for b in learners.workers.plan.buckets]
    fragments = [[n for span in of for n in range(span.start, span.stop)] for of in spans]
    run = published.streaming_diloco(
        start_of(ranks), problem, ranks, RATE, PERIOD, 0.6, 0.5, fragments, [PERIOD // 2, 0], delay, mix, 6 * PERIOD
    )
    for step, expected in enumerate(run.workers):
        learners.step(*range(ranks))
        same(learners.x, expected, f"{layout}, step {step}")


@worlds
def test_noloco(ranks: int, layout: list[int]) -> None:
    problem = published.quadratic(ranks, DIM, seed=3)
    pairs = mixing.parse("random-pairs", ranks)
    text = f"noloco(steps={PERIOD}, outer_rate=0.6, outer_momentum=0.4, consensus=1.1)"
    learners = Learners(layout, text, start_of(ranks), problem)
    run = published.noloco(
        start_of(ranks), problem, ranks, RATE, PERIOD, 0.6, 0.4, 1.1,
        lambda rank, turn: pairs.incoming(rank, turn)[0][0], 8,
    )  # fmt: skip
    for turn, expected in enumerate(run.workers):
        for _ in range(PERIOD):
            learners.step(*range(ranks))
        same(learners.x, expected, f"{layout}, round {turn}")


@worlds
def test_sparseloco(ranks: int, layout: list[int]) -> None:
    """All nodes send to all: each the largest of each tensor, in two bits, whose scale a bucket's share."""
    problem, begun = published.quadratic(ranks, DIM, seed=3), start_of(ranks).astype(np.float32)
    learners = Learners(layout, f"sparseloco(steps={PERIOD}, density=0.2, decay=0.9, outer_rate=0.8)", begun, problem)
    spans = [[learners.workers.span_of(t.name) for t in b.tensors] for b in learners.workers.plan.buckets]

    def send(values: Array) -> Array:
        sent = np.zeros_like(values)
        for of_bucket in spans:
            kept = np.zeros_like(values)
            for span in of_bucket:
                kept[span] = published.largest(round(0.2 * len(values[span])), values[span])
            chosen = np.flatnonzero(kept)
            sent[chosen] = published.two_bits(kept[chosen])
        return sent

    nodes = [tuple(of) for of in learners.workers.job.topology.ranks]
    run = published.sparseloco(begun, problem, nodes, RATE, PERIOD, (0.8, 0.0), 0.9, send, 8)
    for turn, expected in enumerate(run.homes):
        for _ in range(PERIOD):
            learners.step(*range(ranks))
        where = f"{layout}, round {turn}"
        np.testing.assert_allclose(np.stack(learners.x), np.tile(expected, (ranks, 1)), atol=2e-5, err_msg=where)


@worlds
@for_each("mix", [0.0, 0.5])
def test_decoupled_diloco(ranks: int, layout: list[int], mix: float) -> None:
    problem = published.quadratic(ranks, DIM, seed=3)
    quorum = ranks // 2
    text = f"decoupled(steps={PERIOD}, outer_rate=0.6, outer_momentum=0.5, quorum={quorum}, mix={mix})"
    order = np.random.default_rng(ranks).choice(ranks, 30 * ranks, p=np.arange(1, ranks + 1) / sum(range(ranks + 1)))
    run = published.decoupled_diloco(
        start_of(ranks), problem, lambda rank, step: 1, ranks, RATE, PERIOD, 0.6, 0.5, quorum, mix, order.tolist()
    )
    learners = Learners(layout, text, start_of(ranks), problem)
    for entry, (rank, expected) in enumerate(zip(order.tolist(), run.workers, strict=True)):
        learners.step(rank)
        same(learners.x, expected, f"{layout}, entry {entry}")
    assert len(run.homes) > 3


@for_each("quorum", [0, 1, 8])
def test_decoupled_learners_come_to_the_optimum_of_a_steep_quadratic_by_default(quorum: int) -> None:
    """Local steps alone would come within a hundredth of it in a round of five. Learners are not equally fast."""
    begun, choose = start_of(8), np.random.default_rng(quorum)
    learners = Learners([2, 2, 2, 2], f"decoupled(steps=5, quorum={quorum})", begun, lambda _, __, x: 0.6 * x / RATE)
    furthest = 1.0
    for turn in range(125):
        for rank in choose.permutation(8)[: 8 if turn % 2 else 6]:
            learners.step(int(rank))
        furthest = max(furthest, float(np.abs(learners.workers.home()).max() / np.abs(begun).max()))
    assert furthest < 1.1
    assert np.abs(learners.workers.home()).max() < 1e-3 * np.abs(begun).max()


@worlds
def test_each_local_step_of_a_decoupled_learner_counts_once(ranks: int, layout: list[int]) -> None:
    """With a quorum of one and plain outer steps the home moves by the mean of what each learner has moved up to its
    last post, however long its answers take."""
    choose = np.random.default_rng(ranks)
    moved, posted = np.zeros((ranks, DIM)), np.zeros((ranks, DIM))

    def gradient(rank: int, step: int, x: Array) -> Array:
        g = np.random.default_rng((rank, step)).standard_normal(DIM)
        moved[rank] -= RATE * g
        return g

    learners = Learners(
        layout, "decoupled(steps=2, outer_rate=1.0, outer_momentum=0.0, quorum=1)", start_of(ranks), gradient
    )
    post, job = learners.post, learners.workers.job

    def noted(rank: int, piece: int) -> None:
        posted[rank] = moved[rank]
        post(rank, piece)

    learners.post = noted  # type: ignore[method-assign]
    job.settle = lambda: None  # type: ignore[method-assign]  # messages take their time
    for _ in range(40 * ranks):
        learners.step(int(choose.integers(ranks)))
        for _ in range(int(choose.integers(12))):
            job.step()
    while job.step():
        pass
    np.testing.assert_allclose(learners.workers.home(), start_of(ranks) + posted.mean(0), rtol=0, atol=1e-11)
    assert any(learners.under_way)
