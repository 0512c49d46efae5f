"""Plans with a tuning: agreed upon, obeyed on all nodes, and without a change of any bit where none is due."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusiond.collectives.doubling import Doubling
from fusiond.collectives.halving import Halving
from fusiond.collectives.ring import Ring
from fusiond.control.planning import make_plan
from fusiond.operations import operation as running
from fusiond.operations import starter, thread_work
from fusiond.transport.flow_control import FlowPort
from tests.for_each import for_each
from tests.fusiond.simulation import Array, SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
TENSORS = tuple(wire.TensorSpec(f"w{i}", "float32", shape) for i, shape in enumerate([(5,), (300, 2), (2000,), (7, 3)]))
PROPOSAL = wire.Proposal("opt", 0, 0, wire.Reduction(), TENSORS)


class Seen:
    """The ports and exchanges that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks: list[int] = []
        self.windows: list[int] = []
        self.threads: list[int] = []
        self.kinds: set[type] = set()
        seen = self

        class Port(FlowPort):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                seen.chunks.append(arguments[4])
                seen.windows.append(arguments[5])

        def note(kind: type[Ring] | type[Halving] | type[Doubling]) -> None:
            jobs = kind.jobs

            def noted(self: Any, threads: int) -> Any:
                seen.kinds.add(kind)
                seen.threads.append(threads)
                return jobs(self, threads)

            monkeypatch.setattr(kind, "jobs", noted)

        monkeypatch.setattr(starter, "FlowPort", Port)
        monkeypatch.setattr(running, "INLINE_WORK", 0)
        monkeypatch.setattr(thread_work, "INLINE_WORK", 0)
        note(Ring)
        note(Doubling)
        note(Halving)


def reduced(job: SimulatedJob, tuning: wire.Tuning | None, clock: int = 0) -> list[Array]:
    """All tensors of each rank, one after the other, after a step by a plan with this tuning."""
    plan = job.plan(replace(PROPOSAL, tuning=tuning, clock=clock))
    memory = job.add_plan_memory(plan)
    for rank in job.ranks:
        for bucket in plan.buckets:
            elements = memory[rank][bucket.offset : bucket.offset + 4 * bucket.numel].view(np.float32)
            elements[:] = 0
            for tensor in bucket.tensors:
                values = np.random.default_rng([rank, int(tensor.name[1:])]).standard_normal(tensor.numel)
                elements[tensor.start : tensor.start + tensor.numel] = values
            job.ready(rank, plan, bucket.index, 0)
    job.settle()
    found = []
    for rank in job.ranks:
        places = {tensor.name: (bucket, tensor) for bucket in plan.buckets for tensor in bucket.tensors}
        parts = []
        for name in sorted(places):
            bucket, tensor = places[name]
            start = bucket.offset + 4 * tensor.start
            parts.append(memory[rank][start : start + 4 * tensor.numel].view(np.float32).copy())
        found.append(np.concatenate(parts))
    assert all(np.array_equal(found[0], other) for other in found)
    return found


def test_a_plan_has_the_buckets_and_the_codec_of_its_tuning() -> None:
    tuned = replace(PROPOSAL, tuning=wire.Tuning(threshold=4000, codec="fp16"))
    plan = make_plan(1, tuned, 10**6)
    assert len(plan.buckets) == len(make_plan(1, PROPOSAL, 4000).buckets) > 1
    assert plan.reduction == wire.Reduction(codec="fp16")
    assert plan.tuning == tuned.tuning
    untuned = make_plan(1, replace(PROPOSAL, tuning=wire.Tuning()), 10**6)
    assert (untuned.buckets, untuned.reduction) == (make_plan(1, PROPOSAL, 10**6).buckets, PROPOSAL.reduction)
    assert len(make_plan(1, replace(PROPOSAL, tuning=wire.Tuning(threshold=0)), 10**6).buckets) == len(TENSORS)


def test_what_the_lowest_rank_asks_for_holds_for_all() -> None:
    job = SimulatedJob([1, 2])
    wishes = [wire.Tuning(threshold=0, steps=7), wire.Tuning(threshold=10**6), None]
    plan = job.plan(lambda rank: replace(PROPOSAL, tuning=wishes[rank]))
    assert plan.tuning == wishes[0]
    assert len(plan.buckets) == len(TENSORS)


def test_it_is_obeyed_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    job = SimulatedJob([1, 1, 1], chunk_bytes=16384)
    tuning = wire.Tuning(threshold=10**6, chunk_bytes=4096, window_bytes=8192, threads=3, exchange="ring")
    reduced(job, tuning)
    assert set(seen.chunks) == {4096}
    assert set(seen.windows) == {8192}
    assert set(seen.threads) == {3}
    assert seen.kinds == {Ring}
    reduced(job, wire.Tuning(threshold=10**6, exchange="doubling"), 1)
    assert seen.kinds == {Ring, Doubling}
    reduced(job, wire.Tuning(threshold=10**6, exchange="halving"), 2)
    assert seen.kinds == {Ring, Doubling, Halving}


def test_no_message_is_longer_than_the_settings_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    reduced(SimulatedJob([1, 1], chunk_bytes=8192), wire.Tuning(chunk_bytes=1 << 20))
    assert set(seen.chunks) == {8192}


def test_what_is_larger_than_a_message_does_not_double(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    reduced(SimulatedJob([1, 1], chunk_bytes=4096), wire.Tuning(threshold=10**6, exchange="doubling"))
    assert seen.kinds == {Ring}


@for_each("layout", [[1, 1], [1, 1, 1], [2, 1, 1, 1]])
def test_chunks_window_and_threads_change_no_bit(layout: list[int]) -> None:
    """docs/autotune.md says so, and what does: buckets and the kind of all-reduce, from three nodes on."""
    job = SimulatedJob(layout, chunk_bytes=16384)
    plain = reduced(job, wire.Tuning(threshold=4000))[0]
    for clock, tuning in enumerate(
        (
            wire.Tuning(threshold=4000, chunk_bytes=4096),
            wire.Tuning(threshold=4000, window_bytes=4096),
            wire.Tuning(threshold=4000, threads=5),
            wire.Tuning(threshold=4000, chunk_bytes=16384, window_bytes=1 << 20, threads=1),
        ),
        1,
    ):
        assert np.array_equal(reduced(job, tuning, clock)[0], plain)


def test_between_two_nodes_nothing_changes_any_bit() -> None:
    job = SimulatedJob([2, 1], chunk_bytes=16384)
    plain = reduced(job, None)[0]
    for clock, (threshold, route) in enumerate([(0, "ring"), (10**6, "ring"), (10**6, "doubling"), (0, "doubling")], 1):
        found = reduced(job, wire.Tuning(threshold=threshold, exchange=route), clock)[0]  # type: ignore[arg-type]
        assert np.array_equal(found, plain)


def test_among_more_the_order_of_additions_depends_on_buckets_and_kind() -> None:
    job = SimulatedJob([1, 1, 1, 1], chunk_bytes=16384)
    plain = reduced(job, wire.Tuning(threshold=4000, exchange="ring"))[0]
    for clock, tuning in enumerate(
        (wire.Tuning(threshold=10**6, exchange="ring"), wire.Tuning(threshold=4000, exchange="doubling")), 1
    ):
        found = reduced(job, tuning, clock)[0]
        assert not np.array_equal(found, plain)
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)


def test_a_codec_that_only_the_lowest_rank_knows_of_is_used_by_all() -> None:
    job = SimulatedJob([1, 1, 1])
    exact = reduced(job, None)[0]
    found = reduced(job, wire.Tuning(codec="fp16"), 1)[0]
    assert 0 < np.abs(found - exact).max() < 1e-2
    assert [plan["codec"] for plan in job.engine(2).statistics()["plans"]] == ["fp16"]  # type: ignore[attr-defined]


@for_each(
    ("reduction", "tuning", "sentence"),
    [
        (wire.Reduction(algorithm="asp"), wire.Tuning(), "asp with average cannot be tuned"),
        (wire.Reduction("adasum"), wire.Tuning(), "with adasum cannot be tuned"),
        (wire.Reduction("max"), wire.Tuning(codec="topk"), "the codec topk sends parts of sums"),
        (wire.Reduction(), wire.Tuning(codec="no such"), "no such"),
    ],
)
def test_what_cannot_be_tuned_is_refused(reduction: wire.Reduction, tuning: wire.Tuning, sentence: str) -> None:
    job = SimulatedJob([1])
    handle = job.propose(0, replace(PROPOSAL, reduction=reduction, tuning=tuning))
    job.settle()
    assert sentence in job.error(0, handle)


@for_each(
    "values",
    [
        {"chunk_bytes": 0}, {"chunk_bytes": 4095}, {"chunk_bytes": 2**30 + 1}, {"window_bytes": 1}, {"threads": 0},
        {"threads": 257}, {"threshold": -1}, {"exchange": "tree"}, {"steps": -1}, {"steps": 2**48},
        {"codec": "x" * (wire.MAX_NAME + 1)}, {"why": "x" * 4097},
    ],
)  # fmt: skip
def test_a_tuning_that_makes_no_sense_is_no_message(values: dict[str, Any]) -> None:
    message = wire.Propose(1, replace(PROPOSAL, tuning=wire.Tuning(**values)))
    with pytest.raises(WireError):
        wire.decode_worker_message(wire.encode(message))


def test_after_a_join_all_propose_even_where_others_have_made_a_plan() -> None:
    """A rank that has not taken part in the active plan gets that one; with `anew` it waits for the others."""
    job = SimulatedJob([1, 1])
    job.plan(PROPOSAL)
    made = job.plan(replace(PROPOSAL, clock=1))
    handles = {1: job.propose(1, replace(PROPOSAL, clock=1 << 47, anew=True))}
    job.settle()
    assert not job.is_answered(1, handles[1])
    handles[0] = job.propose(0, replace(PROPOSAL, clock=1 << 47, anew=True))
    job.settle()
    for rank in job.ranks:
        message, _ = job.answer(rank, handles[rank])
        assert isinstance(message, wire.Planned)
        assert message.plan.id > made.id


def test_status_shows_what_was_tuned_and_why() -> None:
    job = SimulatedJob([1, 1])
    job.plan(replace(PROPOSAL, tuning=wire.Tuning(threads=4, why="because")))
    told: Any = job.engine(1).statistics()["plans"]
    assert told[0]["tuning"]["threads"] == 4
    assert told[0]["tuning"]["why"] == "because"
