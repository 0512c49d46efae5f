"""The state of codecs: saved, loaded, moved to another plan, and refused. A whole job in one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fusion_rt import codecs, wire
from fusion_rt.codecs.error_feedback import FeedbackBucketCodec
from fusion_rt.local import array_codec
from fusion_rt.local.saved_state import State
from fusiond.buckets.codec_state import only_common, steps_of
from fusiond.buckets.plans import Plans
from fusiond.core.errors import RequestError
from fusiond.engine.keeper import Left
from tests.for_each import for_each
from tests.fusiond.simulation import Node, SimulatedJob

CODEC = "topk(density=0.1, minimum=0, value='fp32')"
TENSORS = (wire.TensorSpec("a", "float32", (20, 10)), wire.TensorSpec("b", "float32", (300,)))
PROPOSAL = wire.Proposal("opt", 0, 0, wire.Reduction("sum", codec=CODEC), TENSORS)


class Training:
    def __init__(self, job: SimulatedJob, proposal: wire.Proposal = PROPOSAL) -> None:
        self.job, self.plan = job, job.plan(proposal)
        self.memory = job.add_plan_memory(self.plan)

    def step(self, clock: int, rescale: tuple[float, ...] = ()) -> bytes:
        """Takes a step; returns the result of rank 0."""
        for rank in self.job.ranks:
            for bucket in self.plan.buckets:
                choose = np.random.default_rng([rank, bucket.index, clock])
                elements = self.memory[rank][bucket.offset : bucket.offset + 4 * bucket.numel].view(np.float32)
                elements[:] = choose.standard_normal(bucket.numel)
                message = wire.Ready(10**6 + 100 * clock + bucket.index, self.plan.id, bucket.index, clock, rescale)
                self.job.engine(rank).ready(rank, message)
        self.job.settle()
        return self.memory[0].tobytes()


def save(job: SimulatedJob, rank: int, common: bool = False) -> State:
    job._handles += 1
    handle = job._handles
    job.engine(rank).codecs.save_state(rank, wire.SaveState(handle, 0, "opt", common))
    job.settle()
    return array_codec.read(job.result(rank, handle, "uint8").copy())


def load(job: SimulatedJob, rank: int, state: State, common: bool = False) -> str:
    """The error, if there is one."""
    data = np.zeros(array_codec.nbytes_of(state), np.uint8)
    array_codec.write(state, data)
    job._handles += 1
    message = wire.LoadState(job._handles, 0, "opt", wire.Place(1, 0), len(data), common)
    job.engine(rank).codecs.load_state(rank, message, data)
    job.settle()
    answer, _ = job.answer(rank, job._handles)
    return answer.message if isinstance(answer, wire.Failed) else ""


@pytest.mark.parametrize("planned", [True, False])
def test_a_state_that_is_given_back_goes_on_bit_by_bit(planned: bool) -> None:
    job = SimulatedJob([1, 1])
    training = Training(job)
    for clock in range(3):
        training.step(clock)
    states = [save(job, rank) for rank in job.ranks]
    assert [steps_of(state) for state in states] == [3, 3]
    expected = [training.step(clock) for clock in range(3, 6)]
    other = SimulatedJob([1, 1])
    again = Training(other) if planned else None
    assert [load(other, rank, states[rank]) for rank in other.ranks] == ["", ""]
    assert {key: value.tobytes() for key, value in save(other, 0).items()} == {
        key: value.tobytes() for key, value in states[0].items()
    }
    again = again or Training(other)
    assert [again.step(clock) for clock in range(3, 6)] == expected


LARGE = tuple(wire.TensorSpec(f"w{i}", "float32", (300, 200)) for i in range(3))


@pytest.fixture
def opened_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who has opened the codecs of plans, or had the arrays of a state copied: "loop" or "thread", call by call."""
    seen, inside = list[str](), list[None]()
    run_jobs, open_plan, load = Node.run_jobs, Plans.open, FeedbackBucketCodec.load_state_dict

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append("thread" if inside else "loop")
            return method(*arguments, **options)

        return call

    def within(job: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            inside.append(None)
            try:
                job()
            finally:
                inside.pop()

        return run

    monkeypatch.setattr(Node, "run_jobs", lambda self, jobs, then: run_jobs(self, [within(job) for job in jobs], then))
    monkeypatch.setattr(Plans, "open", noted(open_plan))
    monkeypatch.setattr(FeedbackBucketCodec, "load_state_dict", noted(load))
    return seen


@pytest.mark.parametrize("codec", [codec for codec in sorted(codecs.CODECS) if codecs.parse(codec).stateful])
def test_memory_for_every_parameter_is_written_beside_the_event_loop(codec: str, opened_by: list[str]) -> None:
    """A loop that did it would send no heartbeats for seconds, with a billion parameters."""
    left: list[Left] = [{}, {}]
    job = SimulatedJob([1, 1], left=left)
    proposal = replace(PROPOSAL, reduction=wire.Reduction(codec=codec), tensors=LARGE)
    Training(job, proposal).step(0)
    before = save(job, 0)
    Training(job, replace(proposal, clock=1, tensors=LARGE[::-1]))
    moved = save(job, 0)
    assert load(job, 0, moved) == ""
    for node in job.nodes:
        node.engine.fail_job("the formation is over")
        node.engine.keeper.remember()
    again = SimulatedJob([1, 1], left=left)
    Training(again, replace(proposal, tensors=LARGE))
    after = save(again, 0)
    kinds = [key for key in before if "residual/" in key or "velocity/" in key]
    assert len(kinds) >= len(LARGE)
    off = 1e-5 if codec == "demo" else 0  # which transforms what it remembers there and back
    for key in kinds:
        kind, name = key.split(":")[1].split("/")
        for state in (moved, after):
            (found,) = [value for other, value in state.items() if other.endswith(f"{kind}/{name}")]
            np.testing.assert_allclose(found, before[key], rtol=0, atol=off)
    assert set(opened_by) == {"thread"}
    assert left == [{}, {}]


def test_a_state_that_is_loaded_while_a_plan_is_opened_is_not_lost() -> None:
    job = SimulatedJob([1, 1])
    proposal = replace(PROPOSAL, tensors=LARGE)
    Training(job, proposal).step(0)
    wanted = save(job, 0)
    (active,) = job.nodes[0].engine._plans
    other = SimulatedJob([1, 1])
    keeper = other.nodes[0].engine.keeper
    opening = keeper.opening(active.plan)
    assert opening is not None
    opening()
    errors: list[BaseException | None] = []
    keeper.load((0, "opt"), wanted, False, errors.append)
    other.settle()
    assert errors == [None]
    keeper.install(active.plan)
    found = keeper.state_of_codecs((0, "opt"))
    assert found.keys() == wanted.keys()
    assert all((found[key] == wanted[key]).all() for key in wanted)


def test_a_new_plan_has_the_residuals_of_the_old_one() -> None:
    job = SimulatedJob([1, 1])
    Training(job).step(0)
    before = save(job, 1)
    job.plan(replace(PROPOSAL, clock=1, tensors=TENSORS[::-1]))
    after = save(job, 1)
    for name in ("a", "b"):
        (old,) = [value for key, value in before.items() if key.endswith(f":residual/{name}")]
        (new,) = [value for key, value in after.items() if key.endswith(f":residual/{name}")]
        assert old.any()
        np.testing.assert_array_equal(old, new)
    assert steps_of(after) == 1


def test_the_common_part_brings_a_node_into_step() -> None:
    job = SimulatedJob([1, 1])
    training = Training(job)
    training.step(0)
    common = save(job, 0, common=True)
    assert common.keys() == only_common(save(job, 0)).keys()
    before = save(job, 1)
    assert load(job, 1, common, common=True) == ""  # it is in that step already
    assert {key: value.tobytes() for key, value in save(job, 1).items()} == {
        key: value.tobytes() for key, value in before.items()
    }
    other = SimulatedJob([1, 1])
    again = Training(other)
    assert load(other, 0, save(job, 0)) == load(other, 1, save(job, 0), common=True) == ""
    assert not any(value.any() for key, value in save(other, 1).items() if ":residual/" in key)
    again.step(1)


def test_a_residual_is_multiplied_once_by_what_the_lowest_rank_says() -> None:
    job = SimulatedJob([2, 1])
    training = Training(job)
    (bucket,) = training.plan.buckets[:1]
    training.step(0)
    before = save(job, 0)
    for rank in job.ranks:
        training.memory[rank][:] = 0
        factors = tuple(0.25 if rank == 0 else 9.0 for _ in bucket.tensors)
        job.engine(rank).ready(rank, wire.Ready(5 * 10**6, training.plan.id, 0, 1, factors))
    job.settle()
    after = save(job, 0)
    for key in [key for key in before if key.startswith("0:residual/")]:
        rest = after[key] != 0
        assert rest.any()
        ratio = after[key][rest] / before[key][rest]
        assert (ratio == 0.25).mean() > 0.8  # owners also keep what they cut


BAD = {
    "unknown tensor": ({"0:residual/z": np.zeros(3, np.float32)}, "has the tensor 'z', which is not in the plan"),
    "size": ({"0:residual/a": np.zeros(3, np.float32)}, "'a' has 3 elements in the saved state, and 200 here"),
    "type": ({"0:residual/a": np.zeros(200, np.float64)}, "'residual/a' is float64 in the saved state"),
    "key": ({"nonsense": np.zeros(3, np.float32)}, "'nonsense' cannot be in a saved state"),
    "steps": ({"0:step": np.zeros(2, np.int64)}, "other than one number of steps"),
}


@for_each("what", BAD)
def test_a_state_that_does_not_fit_is_refused(what: str) -> None:
    state, why = BAD[what]
    job = SimulatedJob([1, 1])
    Training(job).step(0)
    before = {key: value.tobytes() for key, value in save(job, 0).items()}
    assert why in load(job, 0, state)
    assert {key: value.tobytes() for key, value in save(job, 0).items()} == before


def test_a_state_for_another_model_is_told_when_the_plan_comes() -> None:
    job = SimulatedJob([1, 1])
    assert load(job, 0, {"0:residual/z": np.zeros(3, np.float32)}) == ""
    Training(job).step(0)
    assert any("it starts without: the saved state has the tensor 'z'" in text for text in job.warnings)


def test_a_state_is_left_alone_while_it_is_at_work() -> None:
    job = SimulatedJob([1, 1])
    training = Training(job)
    job.ready(0, training.plan, 0, 0)
    while job.engine(0).operations.under_way and not any(
        operation.exchange for operation in job.engine(0).operations.under_way.values()
    ):
        assert job.step()
    assert "between step() and the next backward()" in load(job, 0, {})


@for_each("factors", [(1.0,) * 9, (-1.0, 1.0), (float("inf"), 1.0), (float("nan"), 1.0), (0.0, 0.0)])
def test_factors_that_make_no_sense_are_refused(factors: tuple[float, ...]) -> None:
    job = SimulatedJob([1, 1], fusion_threshold=1 << 20)
    plan = Training(job).plan
    with pytest.raises(RequestError, match="rescales the residual of bucket 0 of plan 1, which has 2 tensors"):
        job.engine(0).ready(0, wire.Ready(1, plan.id, 0, 0, factors))


def test_a_job_of_one_node_remembers_nothing() -> None:
    job = SimulatedJob([2])
    Training(job).step(0)
    assert save(job, 0) == {}
    assert list(job.engine(0)._plans.compression()) == ["total"]
