"""The elastic sampler: what each rank gets of an epoch, and of what is left of one."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from fusion_rt.torch.elastic import ElasticSampler, sampler

DATA = list(range(100, 123))  # 23 samples
MakeSamplers = Callable[..., list[ElasticSampler]]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> MakeSamplers:
    """Makes the samplers of so many ranks, in this process; with `state`, they are brought to it."""

    def make(ranks: int, state: dict[str, int] | None = None, **options: Any) -> list[ElasticSampler]:
        made = []
        monkeypatch.setattr(sampler, "size", lambda: ranks)
        for rank in range(ranks):
            monkeypatch.setattr(sampler, "rank", lambda rank=rank: rank)
            made.append(ElasticSampler(DATA, **options))
            if state is not None:
                made[-1].load_state_dict(state)
        return made

    return make


def test_every_sample_is_dealt_and_all_ranks_get_as_many(on_ranks: MakeSamplers) -> None:
    for ranks in (1, 2, 4, 40):
        dealt = [list(each) for each in on_ranks(ranks)]
        assert {len(each) for each in dealt} == {-(-len(DATA) // ranks)}
        assert {index for each in dealt for index in each} == set(range(len(DATA)))


def test_samples_are_dealt_as_by_torch(on_ranks: MakeSamplers) -> None:
    for rank, each in enumerate(on_ranks(4, shuffle=False)):
        assert list(each) == list(DistributedSampler(DATA, 4, rank, shuffle=False))  # type: ignore[arg-type]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else(on_ranks: MakeSamplers) -> None:
    (one,), (same,), (other,) = on_ranks(1), on_ranks(1), on_ranks(1, seed=1)
    first = list(one)
    assert first == list(same) != list(other)
    one.set_epoch(1)
    assert list(one) != first
    one.set_epoch(0)
    assert list(one) == first


def test_what_is_done_of_an_epoch_is_not_dealt_again_to_other_ranks(on_ranks: MakeSamplers) -> None:
    before = on_ranks(2, seed=3)
    done = [each.get_indices(batch, 3) for each in before for batch in (0, 1)]
    assert done[0] == before[0].indices[:3]
    for each in before:
        each.record_batch(0, 3)
        each.record_batch(1, 3)
        assert len(each) == 12  # until it is dealt anew
        assert each.processed_num == 12
    assert before[0].processed_indices == before[1].processed_indices == {index for batch in done for index in batch}

    after = on_ranks(4, before[0].state_dict(), seed=3)
    assert {len(each) for each in after} == {3}
    rest = {index for each in after for index in each}
    assert rest == set(range(len(DATA))) - before[0].processed_indices


def test_when_all_is_done_nothing_is_dealt(on_ranks: MakeSamplers) -> None:
    (each,) = on_ranks(1)
    each.record_indices(list(each))
    each.reset()
    assert list(each) == []
    each.record_batch(0, 1000)
    each.reset()
    assert len(each) == 0
    each.set_epoch(1)
    assert len(each) == len(DATA)


class Membership(NamedTuple):
    """What happens until the next reset: so many ranks do so many batches, of which the last ones are lost again."""

    ranks: int
    batches: int
    lost: int


@given(
    samples=st.integers(0, 60),
    batch_size=st.integers(1, 4),
    memberships=st.lists(st.builds(Membership, st.integers(1, 6), st.integers(0, 5), st.integers(0, 2)), max_size=6),
    last=st.integers(1, 6),
)
def test_however_ranks_come_and_go_each_sample_counts_once(
    samples: int, batch_size: int, memberships: list[Membership], last: int
) -> None:
    """Ranks come and go in the middle of an epoch; after errors, work since the last commit is lost. What counts in the
    end is each sample once, but for those that are repeated so that all ranks get as many of the last few."""
    counted: list[int] = []
    state = {"epoch": 0, "processed_num": 0}
    with pytest.MonkeyPatch.context() as patch:
        for ranks, batches, lost in [*memberships, Membership(last, samples + 1, 0)]:
            patch.setattr(sampler, "size", lambda ranks=ranks: ranks)
            dealt = []
            for rank in range(ranks):
                patch.setattr(sampler, "rank", lambda rank=rank: rank)
                dealt.append(ElasticSampler(range(samples), seed=1))
                dealt[-1].load_state_dict(state)
            assert len({len(each) for each in dealt}) == 1
            wanted = -(-len(dealt[0]) // batch_size)
            kept = max(min(batches, wanted) - lost, 0)
            for batch in range(kept):
                counted += [index for each in dealt for index in each.get_indices(batch, batch_size)]
                for each in dealt:
                    each.record_batch(batch, len(each.get_indices(batch, batch_size)))
            assert len({each.processed_num for each in dealt}) == 1
            state = dealt[0].state_dict()
            if kept == wanted:
                break
    assert set(counted) == set(range(samples))
    repeated = len(counted) - samples
    assert 0 <= repeated < max(len(dealt), 1)
    assert state["processed_num"] == samples


class Loss(NamedTuple):
    """After so many more batches, one rank is lost; loaders have fetched so many batches ahead, by rank."""

    batches: int
    lost: int
    ahead: tuple[int, ...]


@given(
    samples=st.integers(0, 80),
    batch=st.integers(1, 4),
    ranks=st.integers(2, 5),
    losses=st.lists(
        st.builds(Loss, st.integers(0, 6), st.integers(0, 4), st.tuples(*[st.integers(0, 4)] * 5)),
        min_size=1,
        max_size=3,
    ),
)
def test_whoever_stays_in_its_loop_when_ranks_are_lost_gets_what_they_had_not_done(
    samples: int, batch: int, ranks: int, losses: list[Loss]
) -> None:
    """Loaders of several ranks fetch ahead; ranks are lost one by one, each in the middle of a step that is dropped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "size", lambda: ranks)
        alive = []
        for rank in range(ranks):
            patch.setattr(sampler, "rank", lambda rank=rank: rank)
            alive.append(Loop(ElasticSampler(range(samples), seed=1), batch))
        dropped: list[int] = []
        done: list[int] = []
        late: set[int] = set()
        for loss in [*losses[: ranks - 1], None]:
            for _ in range(samples + 1 if loss is None else loss.batches):
                steps = [loop.step() for loop in alive]
                assert len({bool(step) for step in steps}) == 1  # nobody waits for somebody who has no batch left
                done += [index for step in steps for index in step]
            if loss is None:
                break
            for loop, ahead in zip(alive, loss.ahead, strict=False):
                loop.fetch(ahead)
            underway = [loop.begin() for loop in alive]  # all have begun a step, which is dropped
            alive.pop(loss.lost % len(alive))
            underway.pop(loss.lost % (len(alive) + 1))
            dropped += [index for each in underway for index in each]
            patch.setattr(sampler, "size", lambda: len(alive))
            standings = [loop.sampler.standing() for loop in alive]
            for rank, loop in enumerate(alive):
                patch.setattr(sampler, "rank", lambda rank=rank: rank)
                assert loop.sampler.follow(standings)
            for loop in alive:
                loop.end()
            assert len({(loop.sampler.processed_num, tuple(loop.sampler._order())) for loop in alive}) == 1
            late = set(alive[0].sampler.state_dict()["late"])
        assert {*done, *dropped, *late} == set(range(samples))
        assert not late.intersection(done)
        if late:
            still = copy.deepcopy(alive[-1].sampler)
            assert still.deal_late()
            assert set(still.remaining_indices) == late
            alive[0].sampler.set_epoch(1)
            assert late < set(alive[0].sampler.state_dict()["order"])


def test_what_is_repeated_when_ranks_are_lost_is_not_repeated_again_when_others_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank is lost, one comes, and the epoch ends: fewer samples than there are ranks were repeated, and not as many
    again for each change."""
    repeated = []
    for samples in range(60, 120):
        monkeypatch.setattr(sampler, "size", lambda: 6)
        alive = []
        for rank in range(6):
            monkeypatch.setattr(sampler, "rank", lambda rank=rank: rank)
            alive.append(Loop(ElasticSampler(range(samples), seed=1), 4))
        done = Counter(index for loop in alive for index in loop.step())
        for loop in alive:
            loop.begin()
        alive.pop()
        monkeypatch.setattr(sampler, "size", lambda: 5)
        standings = [loop.sampler.standing() for loop in alive]
        for rank, loop in enumerate(alive):
            monkeypatch.setattr(sampler, "rank", lambda rank=rank: rank)
            assert loop.sampler.follow(standings)
            loop.again()
        done.update(index for loop in alive for index in loop.step())
        monkeypatch.setattr(sampler, "size", lambda: 6)
        state, alive = alive[0].sampler.state_dict(), []
        for rank in range(6):
            monkeypatch.setattr(sampler, "rank", lambda rank=rank: rank)
            each = ElasticSampler(range(samples), seed=1)
            each.load_state_dict(state)
            alive.append(Loop(each, 4))
        while step := [index for loop in alive for index in loop.step()]:
            done.update(step)
        assert set(done) == set(range(samples))
        repeated.append(done.total() - samples)
    assert max(repeated) == 5


class Loop:
    """One rank's training loop, whose loader fetches ahead as `DataLoader` does with workers."""

    def __init__(self, sampler: ElasticSampler, batch: int) -> None:
        self.sampler = sampler
        self._batch = batch
        self._iterator = iter(sampler)
        self._queue: list[list[int]] = []
        self._underway: list[int] = []

    def fetch(self, batches: int) -> None:
        while len(self._queue) < batches and (fetched := list(islice(self._iterator, self._batch))):
            self._queue.append(fetched)

    def begin(self) -> list[int]:
        self.fetch(1)
        self._underway = self._queue.pop(0) if self._queue else []
        return self._underway

    def again(self) -> None:
        """Puts the batch that was under way back, as `Manager` does."""
        if self._underway:
            self._queue.insert(0, self._underway)

    def end(self) -> None:
        if self._underway:
            self.sampler.record_batch(0, len(self._underway))

    def step(self) -> list[int]:
        self.begin()
        self.end()
        return self._underway


def test_it_serves_a_data_loader(on_ranks: MakeSamplers) -> None:
    (each,) = on_ranks(1)
    loader = DataLoader(DATA, batch_size=5, sampler=each)  # type: ignore[arg-type]
    assert sorted(int(sample) for batch in loader for sample in batch) == DATA


def test_it_needs_a_job() -> None:
    with pytest.raises(ValueError, match="initialized"):
        ElasticSampler(DATA)
