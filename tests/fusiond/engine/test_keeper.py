"""States that wait for a plan, and states that a formation has left, in one keeper: whole jobs in one thread."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusion_rt.local.saved_state import State
from fusiond.engine.keeper import Keeper, Left
from tests.for_each import for_each
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.engine.test_formations import Training
from tests.fusiond.simulation import SimulatedJob

GROUP = (0, "opt")
START = np.linspace(-1, 1, 60)


def keeper_of(job: SimulatedJob, node: int = 0) -> Keeper:
    return job.nodes[node].engine.keeper


def saved(job: SimulatedJob, common: bool = False) -> State:
    found: list[State] = []
    keeper_of(job).save(GROUP, common, lambda error, get: found.append(get()))
    job.settle()
    return found[0]


def test_a_state_of_homes_that_waits_for_a_plan_can_be_saved_again() -> None:
    workers = Workers([1, 1], "asp", START, 0.1, wire.OptimizerSpec("Adam", ("{}",)))
    for rank in (0, 1):
        workers.post(rank, np.cos(START + rank))
        workers.collect(rank)
    state = workers.job.saved_homes(workers.plan)[0]
    job = SimulatedJob([1, 1])
    job.load_homes(0, state)
    found = saved(job)
    assert found.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(found[key], value, key)


def test_codecs_that_begin_anew_leave_homes_that_wait_for_a_plan_as_they_were() -> None:
    job = SimulatedJob([1, 1])
    job.load_homes(0, {"home:0:-1:value": np.ones(3), "0:step": np.array(4)})
    assert saved(job).keys() == {"home:0:-1:value", "0:step"}
    assert saved(job, common=True).keys() == {"0:step"}
    job.load_homes(0, {})
    assert saved(job).keys() == {"home:0:-1:value"}
    job.load_homes(0, {"home:1:-1:value": np.ones(3)})
    assert saved(job).keys() == {"home:1:-1:value"}


def test_a_state_that_waits_for_a_plan_ends_with_its_process_set() -> None:
    job = SimulatedJob([1, 1])
    job.load_homes(0, {"home:0:-1:value": np.ones(3)})
    keeper_of(job).remove_set(1)
    assert saved(job)
    keeper_of(job).remove_set(0)
    assert not saved(job)


@for_each(
    ("key", "why"),
    [
        ("mirror:0:-1:value", "the state of a mirror, of bucket 0"),
        ("9" * 5000 + ":step", "cannot be in a saved state"),
        ("home:0:-2:value", "cannot be in a saved state"),
    ],
)
def test_a_state_that_no_plan_could_have_is_refused_before_there_is_one(key: str, why: str) -> None:
    job = SimulatedJob([1, 1])
    with pytest.raises(WireError, match=why):
        job.load_homes(0, {key: np.ones(3)})
    assert not saved(job)


@pytest.mark.parametrize("common", [True, False])
def test_only_a_whole_state_takes_the_place_of_what_the_formation_before_has_left(common: bool) -> None:
    left: list[Left] = [{}, {}]
    first = Training(left, ["a", "b", "c"], 1)
    first.step()
    before = first.residuals(0)
    first.end()
    assert any(value.any() for value in before.values())
    job = SimulatedJob([1, 1], left=left)
    errors: list[BaseException | None] = []
    keeper_of(job).load((0, "optimizer.1"), {}, common, errors.append)
    assert errors == [None]
    keeper_of(job).install(first.plan)
    found = keeper_of(job).state_of_codecs((0, "optimizer.1"))
    residuals = {key.partition("residual/")[2]: value for key, value in found.items() if "residual/" in key}
    for name, value in before.items():
        np.testing.assert_array_equal(residuals[name], value if common else np.zeros_like(value))
