"""Plans of a whole job: proposed, agreed upon, used step by step, replaced, and refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.codecs.base import BucketCodec, Layout
from fusion_rt.codecs.topk import TopK
from fusion_rt.kernels import cpu
from fusion_rt.kernels.machine_code import KernelError
from fusion_rt.kernels.team import ALONE, Team
from fusiond.core.errors import RequestError
from tests.for_each import for_each
from tests.fusiond.simulation import GARBAGE, Array, Node, SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
LAYOUTS = [[1], [3], [1, 1], [2, 1, 3]]
layouts = for_each("layout", LAYOUTS)
TENSORS = tuple(wire.TensorSpec(f"w{i}", "float32", shape) for i, shape in enumerate([(5,), (300, 2), (2000,), (7, 3)]))
PROPOSAL = wire.Proposal("opt", 0, 0, wire.Reduction(), TENSORS)


class Training:
    """A plan, the memory of every rank, and the gradients that it is filled with."""

    def __init__(self, job: SimulatedJob, proposal: wire.Proposal = PROPOSAL) -> None:
        self.job = job
        self.plan = job.plan(proposal)
        self.memory = job.add_plan_memory(self.plan)

    def gradient(self, rank: int, bucket: wire.Bucket, clock: int) -> Array:
        choose = np.random.default_rng([rank, bucket.index, clock])
        return choose.integers(-9, 10, bucket.numel).astype(np.float32)

    def elements(self, rank: int, bucket: wire.Bucket) -> Array:
        return self.memory[rank][bucket.offset : bucket.offset + 4 * bucket.numel].view(np.float32)

    def step(self, clock: int, order: dict[int, list[int]] | None = None) -> None:
        """Every rank fills its buckets, in any order, and applies each as soon as it is done."""
        results: dict[tuple[int, int], Array] = {}
        handles: dict[tuple[int, int], int] = {}
        for rank in self.job.ranks:
            for index in (order or {}).get(rank, range(len(self.plan.buckets))):

                def fill(rank: int = rank, index: int = index) -> None:
                    bucket = self.plan.buckets[index]
                    self.elements(rank, bucket)[:] = self.gradient(rank, bucket, clock)
                    handles[self.job.ready(rank, self.plan, index, clock), rank] = index

                self.job.later(rank, fill)
        while self.job.step():
            for (handle, rank), index in list(handles.items()):
                if self.job.is_answered(rank, handle):
                    message, _ = self.job.answer(rank, handle)
                    assert isinstance(message, wire.Done), message
                    elements = self.elements(rank, self.plan.buckets[index])
                    results[rank, index] = elements.copy()
                    elements.view(np.uint8)[:] = GARBAGE  # the next gradient may be written at once
                    del handles[handle, rank]
        assert not handles
        for (_, index), result in results.items():
            bucket = self.plan.buckets[index]
            parts = [self.gradient(r, bucket, clock) for r in self.job.ranks]
            np.testing.assert_allclose(result, np.mean(parts, axis=0), rtol=1e-6, atol=1e-6)
        assert len(results) == self.job.size * len(self.plan.buckets)
        for index in range(len(self.plan.buckets)):
            assert len({results[rank, index].tobytes() for rank in self.job.ranks}) == 1


@pytest.mark.parametrize(
    ("layout", "algorithm"), [([2], "choco(topology='ring')"), ([1, 1], "choco(topology='ring')"), ([1, 1], "ssp")]
)
def test_kernels_of_a_codec_are_compiled_beside_the_event_loop(
    layout: list[int], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that compiles sends no heartbeats for seconds."""
    prepared: list[str] = []
    open_topk = TopK.open

    def checked(self: TopK, layout: Layout, team: Team = ALONE) -> BucketCodec:
        assert layout.elements == 1 or prepared, "a bucket's codec is opened before its kernels are there"
        return open_topk(self, layout, team)

    monkeypatch.setattr(TopK, "open", checked)
    job = SimulatedJob(layout)
    reduction = wire.Reduction(codec="topk(density=0.1)", algorithm=algorithm, op="average")
    for rank in job.ranks:
        job.propose(rank, replace(PROPOSAL, reduction=reduction))
    assert not any(any(node.engine._plans) for node in job.nodes), "what `propose` does, the event loop does"
    prepared.append("topk")  # by the jobs that are deferred
    job.settle()
    assert all(any(node.engine._plans) for node in job.nodes)


@pytest.mark.parametrize("layout", [[2], [1, 1]])
def test_kernels_of_a_tuned_codec_are_compiled_where_several_nodes_need_it(
    layout: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    open_topk = TopK.open

    def noted(self: TopK, layout: Layout, team: Team = ALONE) -> BucketCodec:
        opened.append(layout.elements)
        return open_topk(self, layout, team)

    monkeypatch.setattr(TopK, "open", noted)
    job = SimulatedJob(layout)
    for rank in job.ranks:
        job.propose(rank, replace(PROPOSAL, tuning=wire.Tuning(codec="topk(density=0.1)")))
    assert not opened
    job.settle()
    assert all(any(node.engine._plans) for node in job.nodes)
    assert opened.count(1) == (len(layout) if len(layout) > 1 else 0), "to have them compiled, an element is enough"


@pytest.mark.parametrize(("layout", "algorithm"), [([2], "bsp"), ([1, 1], "bsp"), ([1, 1], "adpsgd(topology='ring')")])
def test_kernels_that_homes_reduce_with_are_compiled_beside_the_event_loop(
    layout: list[int], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(cpu, "prepare", lambda dtypes: prepared.extend(dtype.name for dtype in dtypes))
    job = SimulatedJob(layout)
    monkeypatch.setattr(Node, "has_kernels", lambda _, dtype, conversions=(): dtype.name in prepared)
    reduction = wire.Reduction(algorithm=algorithm, op="average")
    for rank in job.ranks:
        job.propose(rank, replace(PROPOSAL, reduction=reduction))
    assert not prepared, "what `propose` does, the event loop does"
    assert not any(any(node.engine._plans) for node in job.nodes)
    job.settle()
    assert set(prepared) == {"float32"}
    assert all(any(node.engine._plans) for node in job.nodes)


@pytest.mark.parametrize(
    ("reduction", "what"),
    [
        (wire.Reduction(algorithm="bsp"), "elements of float32"),
        (wire.Reduction(codec="topk(density=0.1)"), r"the codec topk\(density=0\.1\)"),
    ],
)
def test_a_job_whose_kernels_cannot_be_had_fails_with_a_sentence(
    reduction: wire.Reduction, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KernelError("the compiler ran out of memory")

    monkeypatch.setattr(cpu, "prepare", fails)
    monkeypatch.setattr(TopK, "open", fails)
    monkeypatch.setattr(Node, "has_kernels", lambda *_: False)
    job = SimulatedJob([1, 1])
    for rank in job.ranks:
        job.propose(rank, replace(PROPOSAL, reduction=reduction))
    while job.step():
        pass
    assert not any(any(node.engine._plans) for node in job.nodes)
    for number, node in enumerate(job.nodes):
        assert re.fullmatch(
            f"the daemon of host host{number} cannot use {what}: the compiler ran out of memory", node.failure
        )


@layouts
@for_each("seed", range(6))
def test_buckets_are_averaged_step_by_step(layout: list[int], seed: int) -> None:
    job = SimulatedJob(layout, seed, connections=2)
    training = Training(job)
    assert len(training.plan.buckets) > 1
    choose = np.random.default_rng(seed)
    for clock in range(4):
        training.step(clock, {rank: choose.permutation(len(training.plan.buckets)).tolist() for rank in job.ranks})
    job.nothing_is_left()
    assert job.engine(0).statistics()["completed"] == 4 * len(training.plan.buckets)


def test_a_planned_bucket_costs_no_negotiation() -> None:
    job = SimulatedJob([1, 1])
    training = Training(job)
    before = len([1 for _, _, message in job.sent if not isinstance(message, wire.Credit)])
    for clock in range(3):
        training.step(clock)
    assert len([1 for _, _, message in job.sent if not isinstance(message, wire.Credit)]) == before


@for_each("seed", range(6))
def test_a_node_may_be_a_step_ahead(seed: int) -> None:
    job = SimulatedJob([1, 1, 1], seed)
    training = Training(job)
    bucket = training.plan.buckets[1]
    handles: list[tuple[int, int, int]] = []
    for clock in range(2):
        for rank in (0, 1):  # rank 2 has not even begun
            if clock == 0:
                training.elements(rank, bucket)[:] = training.gradient(rank, bucket, 0)
                handles.append((rank, 0, job.ready(rank, training.plan, 1, 0)))
        job.settle()
    other = training.plan.buckets[0]
    for rank in (0, 1):
        training.elements(rank, other)[:] = training.gradient(rank, other, 1)
        handles.append((rank, 1, job.ready(rank, training.plan, 0, 1)))
    job.settle()
    assert not any(job.is_answered(rank, handle) for rank, _, handle in handles)
    training.elements(2, other)[:] = training.gradient(2, other, 1)
    job.ready(2, training.plan, 0, 1)
    training.elements(2, bucket)[:] = training.gradient(2, bucket, 0)
    job.ready(2, training.plan, 1, 0)
    job.settle()
    for rank in job.ranks:
        for which, clock in [(bucket, 0), (other, 1)]:
            parts = [training.gradient(r, which, clock) for r in job.ranks]
            np.testing.assert_allclose(training.elements(rank, which), np.mean(parts, axis=0), atol=1e-6)


@for_each("seed", range(6))
def test_ranks_may_propose_in_any_order_of_tensors_and_time(seed: int) -> None:
    job = SimulatedJob([2, 1], seed)
    choose = np.random.default_rng(seed)
    orders = [choose.permutation(len(TENSORS)) for _ in job.ranks]
    plan = job.plan(lambda rank: replace(PROPOSAL, tensors=tuple(TENSORS[i] for i in orders[rank])))
    names = [tensor.name for bucket in plan.buckets for tensor in bucket.tensors]
    assert sorted(names) == sorted(tensor.name for tensor in TENSORS)
    lowest = [TENSORS[i].name for i in orders[0]]  # the order of the lowest rank counts
    assert names == lowest


def test_a_sum_with_a_codec_and_scales() -> None:
    job = SimulatedJob([1, 2])
    how = wire.Reduction("sum", prescale=0.5, postscale=2.0, codec="fp16")
    training = Training(job, replace(PROPOSAL, reduction=how))
    bucket = training.plan.buckets[0]
    for rank in job.ranks:
        training.elements(rank, bucket)[:] = rank + 1
        job.ready(rank, training.plan, 0, 0)
    job.settle()
    for rank in job.ranks:
        np.testing.assert_array_equal(training.elements(rank, bucket), 6)


def share(rank: int, job: SimulatedJob, training: Training, shares: dict[int, int], asks_for_part: bool = False) -> int:
    handle, mine = 700 + rank, shares.get(rank, wire.OWN)
    said = wire.Ready(handle, training.plan.id, 0, 0, share=mine, asks_for_part=asks_for_part and mine == wire.PART)
    job.engine(rank).ready(rank, said)
    return handle


@for_each("layout", [[3], [2, 3], [1, 2, 2]])
@for_each("op", ["sum", "average", "product", "min"])
def test_one_rank_submits_what_all_of_its_node_have_contributed(layout: list[int], op: wire.Op) -> None:
    job = SimulatedJob(layout, 1)
    how = wire.Reduction(op, prescale=0.5, postscale=2.0)
    training = Training(job, replace(PROPOSAL, reduction=how))
    bucket = training.plan.buckets[0]
    nodes = [[rank for rank in job.ranks if job.topology.node_of(rank) == node] for node in range(len(layout))]
    combinations: dict[str, Callable[..., Array]] = {"product": np.prod, "min": np.min}
    combine = combinations.get(op, np.sum)
    shares: dict[int, int] = {}
    for ranks in nodes[-1:] if len(nodes) > 2 else nodes:  # nodes need not do alike
        shares |= {rank: wire.ELSEWHERE for rank in ranks} | {ranks[0]: wire.OF_NODE}
    values = {rank: training.gradient(rank, bucket, 0) for rank in job.ranks}
    for ranks in nodes:
        for rank in ranks:
            mine = values[rank]
            if rank in shares:
                own = 0.5 * np.stack([values[one] for one in ranks])
                mine = combine(own, axis=0) if shares[rank] == wire.OF_NODE else np.full_like(mine, np.nan)
            training.elements(rank, bucket)[:] = mine
    handles = {rank: share(rank, job, training, shares) for rank in reversed(job.ranks)}
    job.settle()
    expected = 2.0 * combine(0.5 * np.stack(list(values.values())), axis=0) / (job.size if op == "average" else 1)
    for rank, handle in handles.items():
        assert isinstance(job.answer(rank, handle)[0], wire.Done)
        np.testing.assert_allclose(training.elements(rank, bucket), expected, rtol=1e-6, atol=1e-6)


@for_each("layout", [[3], [2, 3], [1, 2, 2]])
@for_each("length", [1, 2, 7, 100, 60_000])
@for_each("asks_for_part", [False, True])
def test_each_rank_submits_its_part_of_what_its_node_has_contributed(
    layout: list[int], length: int, asks_for_part: bool
) -> None:
    job = SimulatedJob(layout, 1)
    how = wire.Reduction("average", prescale=0.5, codec="topk(density=0.1, minimum=10)")
    proposal = replace(PROPOSAL, reduction=how, tensors=(wire.TensorSpec("t", "float32", (length,)),))
    training = Training(job, proposal)
    bucket = training.plan.buckets[0]
    other = SimulatedJob(layout, 1)  # in which the daemon combines
    expected = Training(other, proposal)
    values = {rank: 2 * training.gradient(rank, bucket, 0) for rank in job.ranks}  # halves are exact
    nodes = [[rank for rank in job.ranks if job.topology.node_of(rank) == node] for node in range(len(layout))]
    shares = {rank: wire.PART for ranks in nodes if len(ranks) > 1 for rank in ranks}
    mine = {}
    for ranks in nodes:
        for position, rank in enumerate(ranks):
            expected.elements(rank, bucket)[:] = values[rank]
            elements = training.elements(rank, bucket)
            elements[:] = np.nan
            mine[rank] = low, high = wire.part_of_node(bucket.numel, position, len(ranks))
            if rank in shares:
                elements[low:high] = 0.5 * sum(values[one][low:high] for one in ranks)
            else:
                elements[:] = values[rank]
    for simulated, one, said in ((job, training, shares), (other, expected, {})):
        handles = {rank: share(rank, simulated, one, said, asks_for_part) for rank in reversed(simulated.ranks)}
        simulated.settle()
        for rank, handle in handles.items():
            assert isinstance(simulated.answer(rank, handle)[0], wire.Done)
    for rank in job.ranks:
        low, high = mine[rank] if asks_for_part and rank in shares else (0, bucket.numel)
        found = training.elements(rank, bucket)
        np.testing.assert_array_equal(found[low:high], expected.elements(rank, bucket)[low:high])
    job.nothing_is_left()


def test_parts_of_a_bucket_are_all_of_it() -> None:
    for elements in (0, 1, 2, 7, 8, 9, 1000):
        for count in (1, 2, 3, 8):
            parts = [wire.part_of_node(elements, position, count) for position in range(count)]
            covered = [element for low, high in parts for element in range(low, high)]
            assert covered == list(range(elements)), (elements, count)


@for_each(
    "shares",
    [
        {0: wire.OF_NODE},
        {1: wire.ELSEWHERE},
        {0: wire.ELSEWHERE, 1: wire.ELSEWHERE},
        {0: wire.OF_NODE, 1: wire.OF_NODE},
        {0: wire.PART},
        {0: wire.PART, 1: wire.ELSEWHERE},
        {0: wire.OF_NODE, 1: wire.PART},
    ],
)
def test_ranks_that_do_not_agree_who_submits_are_told_so(shares: dict[int, int]) -> None:
    job = SimulatedJob([2, 1])
    training = Training(job)
    handles = [share(rank, job, training, shares) for rank in job.ranks]
    job.settle()
    for rank in job.ranks:
        assert "of 2 ranks of a node" in job.error(rank, handles[rank])
    job.nothing_is_left()


def test_adasum_needs_each_ranks_own() -> None:
    job = SimulatedJob([2])
    training = Training(job, replace(PROPOSAL, reduction=wire.Reduction("adasum")))
    with pytest.raises(RequestError, match="needs each rank's own"):
        share(0, job, training, {0: wire.OF_NODE})


def test_two_groups_have_plans_of_their_own() -> None:
    job = SimulatedJob([1, 1])
    first, second = Training(job), Training(job, replace(PROPOSAL, group="other", tensors=TENSORS[:2]))
    assert first.plan.id != second.plan.id
    second.step(0)
    first.step(0)
    assert [plan["group"] for plan in job.engine(0).statistics()["plans"]] == ["opt", "other"]  # type: ignore[attr-defined]


def test_a_new_plan_of_a_group_replaces_the_old_one() -> None:
    job = SimulatedJob([1, 2])
    old = Training(job)
    old.step(0)
    new = Training(job, replace(PROPOSAL, clock=1, tensors=TENSORS[::-1]))
    assert new.plan.id > old.plan.id
    new.step(0)
    for node in job.nodes:
        assert len(node.engine.statistics()["plans"]) == 1  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"bucket 0 of plan {old.plan.id}, which is not active"):
        job.ready(0, old.plan, 0, 1)
    job.nothing_is_left()


def test_what_is_under_way_in_the_old_plan_still_ends() -> None:
    for seed in range(10):
        job = SimulatedJob([1, 1], seed)
        old = Training(job)
        bucket = old.plan.buckets[0]
        for rank in job.ranks:
            old.elements(rank, bucket)[:] = rank
        handles = job.on_all_ranks(
            lambda rank, job=job, plan=old.plan: (  # type: ignore[misc]
                job.ready(rank, plan, 0, 0),
                job.propose(rank, replace(PROPOSAL, clock=1)),
            )[0]
        )
        for rank, handle in enumerate(handles):
            assert isinstance(job.answer(rank, handle)[0], wire.Done)
            np.testing.assert_array_equal(old.elements(rank, bucket), 0.5)
        job.nothing_is_left()


# --- plans that do not come about -------------------------------------------------------------------------------------


@for_each("odd", [0, 1, 4])
def test_differing_proposals_fail_with_one_sentence(odd: int) -> None:
    job = SimulatedJob([2, 1, 3], odd)
    other = replace(PROPOSAL, tensors=(replace(TENSORS[0], shape=(6,)), *TENSORS[1:]))
    handles = job.on_all_ranks(lambda rank: job.propose(rank, other if rank == odd else PROPOSAL))
    errors = {job.error(rank, handle) for rank, handle in enumerate(handles)}
    assert len(errors) == 1
    error = errors.pop()
    assert "tensor 'w0' of 'opt' differs between rank 0 (host host0) and rank" in error
    assert f"rank {odd} (host host{job.topology.node_of(odd)})" in error
    assert job.plan(replace(PROPOSAL, clock=1)).buckets  # the next one may come about


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_proposes_is_named(missing: int) -> None:
    job = SimulatedJob([1, 1, 1], operation_timeout=30.0)
    handles = {rank: job.propose(rank, PROPOSAL) for rank in job.ranks if rank != missing}
    job.settle()
    job.pass_time(29)
    assert not job.answers
    job.pass_time(3)
    sentence = f"the plan of 'opt' waited 31 s for rank {missing} (host host{missing}), which did not propose it"
    for rank, handle in handles.items():
        assert job.error(rank, handle).startswith(sentence)
    job.nothing_is_left()


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_left_cannot_propose(gone: int) -> None:
    job = SimulatedJob([1, 1, 1])
    job.leave(gone)
    handles = {rank: job.propose(rank, PROPOSAL) for rank in job.ranks if rank != gone}
    job.settle()
    job.pass_time(3)
    assert {job.error(rank, handle) for rank, handle in handles.items()} == {
        f"the plan of 'opt' waits for rank {gone} (host host{gone}), which left the job without proposing it"
    }


SENSELESS = {
    "dtype": (replace(PROPOSAL, tensors=(wire.TensorSpec("w", "complex64", (3,)),)), "element type 'complex64'"),
    "algorithm": (replace(PROPOSAL, reduction=wire.Reduction(algorithm="alreduce")), "did you mean 'allreduce'"),
    "codec": (replace(PROPOSAL, reduction=wire.Reduction(codec="zip")), "there is no codec 'zip'"),
    "process set": (replace(PROPOSAL, process_set=4), "there is no process set 4"),
    "size": (
        replace(PROPOSAL, tensors=(wire.TensorSpec("w", "float32", (2**40, 2**40)),)),
        "more than the 70368744177664 that a plan may have",
    ),
    "scale": (
        replace(PROPOSAL, reduction=wire.Reduction(prescale=float("inf"))),
        "the scale factors inf and 1 have to be finite",
    ),
}


@for_each("what", SENSELESS)
def test_a_proposal_that_makes_no_sense_is_refused(what: str) -> None:
    proposal, why = SENSELESS[what]
    job = SimulatedJob([1, 1])
    error = job.error(1, job.propose(1, proposal))
    assert error.startswith("rank 1 cannot plan 'opt': ")
    assert why in error
    job.settle()
    job.nothing_is_left()


def test_memory_for_a_plan_has_to_fit_it() -> None:
    job = SimulatedJob([1, 1])
    plan = job.plan(PROPOSAL)
    engine = job.engine(0)
    with pytest.raises(RequestError, match="rank 0 offers memory for plan 1, which is not its active plan"):
        engine.add_plan_memory(0, plan.id, np.zeros(plan.nbytes - 1, np.uint8))
    with pytest.raises(RequestError, match="rank 1 offers memory for plan 1"):
        engine.add_plan_memory(1, plan.id, np.zeros(plan.nbytes, np.uint8))
    with pytest.raises(RequestError, match="rank 0 offers memory for plan 9"):
        engine.add_plan_memory(0, 9, np.zeros(plan.nbytes, np.uint8))
    engine.add_plan_memory(0, plan.id, np.zeros(plan.nbytes, np.uint8))


def test_being_ready_has_to_make_sense() -> None:
    job = SimulatedJob([2])
    plan = job.plan(PROPOSAL)
    with pytest.raises(RequestError, match="rank 0 is ready in bucket 0 of plan 1, which is not active"):
        job.ready(0, plan, 0, 0)  # without memory
    job.add_plan_memory(plan)
    with pytest.raises(RequestError, match=r"bucket \d+ of plan 1, which is not active"):
        job.ready(0, plan, len(plan.buckets), 0)
    with pytest.raises(RequestError, match="bucket 0 of plan 7, which is not active"):
        job.ready(0, replace(plan, id=7), 0, 0)
    job.ready(0, plan, 0, 0)
    with pytest.raises(RequestError, match="rank 0 is ready twice in bucket 0 of plan 1"):
        job.ready(0, plan, 0, 0)
    job.engine(0).drop_plan_memory(0, plan.id)
    with pytest.raises(RequestError, match="which is not active"):
        job.ready(0, plan, 1, 0)


def test_a_rank_that_is_never_ready_is_named() -> None:
    job = SimulatedJob([1, 2], operation_timeout=30.0)
    plan = job.plan(PROPOSAL)
    job.add_plan_memory(plan)
    handles = {rank: job.ready(rank, plan, 1, 5) for rank in (0, 1)}
    job.pass_time(33)
    handles[2] = job.ready(2, plan, 1, 5)  # too late
    assert {job.error(rank, handle) for rank, handle in handles.items()} == {
        "bucket 1 of plan 1 waited 31 s for rank 2 (host host1), which did not submit it (submitted by rank 0 (host "
        "host0), rank 1 (host host1))"
    }
    job.nothing_is_left()


def test_a_rank_that_left_before_a_bucket_is_named_before_the_limit() -> None:
    job = SimulatedJob([1, 2])
    plan = job.plan(PROPOSAL)
    job.add_plan_memory(plan)
    job.leave(0)
    handles = {rank: job.ready(rank, plan, 0, 0) for rank in (1, 2)}
    job.pass_time(4)
    assert {job.error(rank, handle) for rank, handle in handles.items()} == {
        "bucket 0 of plan 1 waits for rank 0 (host host0), which left the job without submitting it"
    }


def test_a_plan_without_tensors() -> None:
    job = SimulatedJob([1, 1])
    plan = job.plan(replace(PROPOSAL, tensors=()))
    assert plan.buckets == ()
    assert plan.nbytes == 0


def test_chunks_are_as_urgent_as_for_the_worker_that_needs_them_soonest() -> None:
    """Each node says so for itself; an operation outside a plan is waited for already."""
    job = SimulatedJob([2, 2], seed=5)
    training = Training(job)
    for rank in job.ranks:
        training.memory[rank][:] = 0
        job.engine(rank).ready(rank, wire.Ready(900 + rank, training.plan.id, 0, 0, urgency=(7, 4, 2, 3)[rank]))
    job.settle()
    assert job.urgencies == {(0, "0", 4), (1, "0", 2)}
    job.submit_all("loss", wire.Signature("allreduce", "float32", (3,)), [np.ones(3, np.float32)] * 4)
    assert {urgency for _, name, urgency in job.urgencies if name == "loss"} == {0}


@for_each("seed", range(6))
def test_a_rank_that_gives_a_step_up_fails_it_on_all_ranks_and_the_next_one_is_as_ever(seed: int) -> None:
    job = SimulatedJob([2, 1], seed)
    training = Training(job, replace(PROPOSAL, reduction=wire.Reduction("average", codec="topk(density=0.5)")))
    bucket = training.plan.buckets[0]
    for clock in range(2):
        handles = {}
        for rank in np.random.default_rng(seed).permutation(job.size).tolist():
            training.elements(rank, bucket)[:] = 1.0
            if clock == 0 and rank == 1:
                handles[rank] = 901
                job.engine(rank).ready(rank, wire.Ready(901, training.plan.id, 0, 0, gives_up="its pass raised X"))
            else:
                handles[rank] = job.ready(rank, training.plan, 0, clock)
        job.settle()
        answers = [job.answer(rank, handle)[0] for rank, handle in handles.items()]
        if clock == 0:
            said = {answer.message for answer in answers if isinstance(answer, wire.Failed)}
            assert len(said) == 1
            assert "rank 1" in str(said)
            assert "gave this step up: its pass raised X; all ranks have to skip this batch" in str(said)
        else:
            assert all(isinstance(answer, wire.Done) for answer in answers), answers


def test_a_package_that_a_daemon_lacks_is_named_with_its_node() -> None:
    job = SimulatedJob([1, 1])
    asked = replace(PROPOSAL, reduction=wire.Reduction(packages=("acme-codecs 1.0",)))
    said = job.error(1, job.propose(1, asked))
    assert "rank 1 cannot plan 'opt': on node 1 (host " in said
    assert said.endswith("the package acme-codecs 1.0 is not installed; install the same on every node")


def test_a_node_that_is_told_a_plan_whose_package_it_lacks_ends_the_job_with_its_name() -> None:
    job = SimulatedJob([1, 1])
    plan = replace(job.plan(PROPOSAL), id=2, reduction=wire.Reduction(algorithm="majority", packages=("acme 1.0",)))
    job.nodes[1].engine.peer_message(0, wire.PlanVerdict(0, "opt", 1, plan, ""))
    assert job.nodes[1].failure.startswith("no plan for 'opt': on node 1 (host ")
    assert "the package acme 1.0 is not installed" in job.nodes[1].failure


def test_a_worker_hears_of_an_end_that_comes_while_its_plan_waits_for_the_state_of_homes() -> None:
    tensors = (wire.TensorSpec("w", "float32", (200_000,)),)  # so large that a thread loads it
    proposal = wire.Proposal("opt", 0, 0, wire.Reduction(algorithm="asp"), tensors)
    before = SimulatedJob([2])
    first = before.plan(proposal)
    before.add_plan_memory(first)
    (state,) = before.saved_homes(first)
    job = SimulatedJob([2])
    job.load_homes(0, state)
    handles = [job.propose(rank, proposal) for rank in job.ranks]
    engine = job.nodes[0].engine
    while not job.deferred:
        assert job.step()
    engine.end("rank 9 died")
    job.settle()
    assert [job.error(rank, handle) for rank, handle in enumerate(handles)] == ["rank 9 died"] * 2
