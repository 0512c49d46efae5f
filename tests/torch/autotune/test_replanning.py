"""When plans are replaced: ranks in one thread, which agree as the coordinator lets them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fusion_rt import wire
from fusion_rt.choice.codec_costs import ALLREDUCE
from fusion_rt.core.topology import ProcessSet, Topology
from fusion_rt.torch.autotune.director import Circumstances, Director, Sample, Step
from fusion_rt.torch.autotune.replanning import Replanning
from tests.for_each import for_each
from tests.torch.autotune.fakes import TENSORS

TOPOLOGY = Topology(("a", "b"), ((0, 1), (2,)))


class Script(Director):
    """Plans that last so many steps, the last one for ever."""

    def __init__(self, where: Circumstances, lasts: list[int]) -> None:
        self.where = where
        self.lasts = list(lasts)
        self.asked = 0
        self.steps: list[Step] = []

    def next(self, algorithm: str = ALLREDUCE) -> wire.Tuning:
        del algorithm
        self.asked += 1
        return wire.Tuning(steps=self.lasts.pop(0) if self.lasts else 0, why=str(self.asked))

    def stepped(self, step: Step) -> None:
        self.steps.append(step)


class Rank:
    """One rank: what its exchange does with a `Replanning`."""

    def __init__(self, job: Job, rank: int, lasts: list[int]) -> None:
        self.job, self.rank = job, rank
        self.director: Script | None = None
        self.plan: wire.Plan | None = None
        self.here: Any = None
        self.replanning = Replanning(lambda where: self.make(where, lasts), lambda: job.now)
        self.enter()

    def enter(self) -> None:
        client = SimpleNamespace(
            joins=0,
            topology=TOPOLOGY,
            process_sets={0: ProcessSet(0, tuple(range(TOPOLOGY.size)))},
            welcome=SimpleNamespace(ring=None, latency=1e-3, seconds_per_byte=1e-8, fusion_threshold=64),
        )
        self.here, self.plan = SimpleNamespace(rank=self.rank, client=client), None

    def make(self, where: Circumstances, lasts: list[int]) -> Script:
        self.director = Script(where, lasts)
        return self.director

    def propose(self) -> wire.Proposal | None:
        """None if the plan in force will do."""
        if self.plan is not None and not self.replanning.due(self.here):
            return None
        clock = 0 if self.plan is None else self.plan.id
        self.plan = None
        return self.replanning.proposal(self.here, wire.Proposal("opt", 0, clock, wire.Reduction(), TENSORS))

    def take(self, plan: wire.Plan) -> None:
        self.plan = plan
        self.replanning.planned(plan)


class Job:
    """Ranks that step together, and a clock that goes on by a second a step."""

    def __init__(self, lasts: list[int]) -> None:
        self.now = 0.0
        self.ranks = [Rank(self, rank, lasts) for rank in range(TOPOLOGY.size)]
        self.plans: list[wire.Plan] = []

    def step(self, away: tuple[int, ...] = ()) -> None:
        """All ranks that are not away take a step; those that propose have to be all, with one clock."""
        there = [rank for rank in self.ranks if rank.rank not in away]
        proposals = {rank.rank: proposal for rank in there if (proposal := rank.propose()) is not None}
        assert len(proposals) in (0, len(there)), "some propose, and others do not"
        if proposals:
            assert len({proposal.clock for proposal in proposals.values()}) == 1
            first = proposals[min(proposals)]
            self.plans.append(wire.Plan(len(self.plans) + 1, "opt", 0, first.reduction, (), 0, tuning=first.tuning))
            for rank in there:
                rank.take(self.plans[-1])
        for rank in there:
            rank.replanning.sent()
        self.now += 1.0
        for rank in there:
            rank.replanning.stepped(0.25 * self.now, all_here=True)

    def join(self) -> None:
        for rank in self.ranks:
            rank.here.client.joins += 1


def test_all_ranks_propose_when_a_plan_has_had_its_steps() -> None:
    job = Job([3, 2])
    for _ in range(10):
        job.step()
    assert [plan.tuning.why for plan in job.plans if plan.tuning] == ["1", "2", "3"]


def test_only_the_lowest_rank_decides_and_is_told_where() -> None:
    job = Job([2])
    job.step()
    director = job.ranks[0].director
    assert director is not None
    assert (director.where.slots, director.where.seconds_per_byte) == ((2, 1), 1e-8)
    assert director.where.tensors == TENSORS
    assert [rank.director for rank in job.ranks[1:]] == [None, None]


def test_steps_are_timed_from_end_to_end() -> None:
    job = Job([4])
    for _ in range(4):
        job.step()
    assert job.ranks[0].director is not None
    assert job.ranks[0].director.steps[1:] == [Step(1.0, 0.25, 1.0)] * 3


@for_each("away", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_after_a_join_all_propose_by_a_number_that_all_know(away: tuple[int, ...]) -> None:
    job = Job([3] * 10)
    for _ in range(2):
        job.step()
    for _ in range(5):
        job.step(away)
    job.join()
    before = len(job.plans)
    job.step()
    assert len(job.plans) == before + 1
    for _ in range(12):
        job.step()
    assert all(rank.plan is job.plans[-1] for rank in job.ranks)


def test_joins_with_nothing_between_them_do_no_harm() -> None:
    job = Job([3] * 10)
    job.step(away=(0,))
    job.join()
    job.join()
    for _ in range(5):
        job.step()
    assert all(rank.plan is job.plans[-1] for rank in job.ranks)


def test_a_proposal_after_a_join_says_that_all_propose() -> None:
    job = Job([5])
    job.step()
    job.join()
    proposals = [rank.propose() for rank in job.ranks]
    assert all(proposal is not None and proposal.anew for proposal in proposals)


def test_another_membership_begins_from_the_start() -> None:
    job = Job([3])
    for _ in range(2):
        job.step()
    first = job.ranks[0].director
    for rank in job.ranks:
        rank.enter()
    job.step()
    assert job.ranks[0].director is not first


def test_a_sample_has_the_last_steps_of_a_plan() -> None:
    sample = Sample(3, unmeasured=2)
    assert sample.steps == 5
    for seconds in (9.0, 9.0, 1.0, 2.0):
        sample.add(Step(seconds, 0.5, 0.0))
        assert not sample.is_complete
    sample.add(Step(30.0, 0.5, 0.0))
    assert sample.is_complete
    assert (sample.median, sample.computing) == (Step(2.0, 0.5, 0.0), 1.5)
