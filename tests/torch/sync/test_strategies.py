"""What single parts of the synchroniser decide, without a job: who leads after a join, what is exchanged together after
a backward pass, in which group a shard is, which order of buckets outlives a membership, and by what residuals are
multiplied."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion_rt import wire
from fusion_rt.torch.sync import active_plan, backward, parameters
from fusion_rt.torch.sync.parameters import Named, TrainedShards
from fusion_rt.torch.sync.scales.conversion import Units
from fusion_rt.torch.sync.slots import Slot, slots_of
from fusion_rt.torch.sync.step_schedule import Schedule
from fusiond.control.planning import make_plan
from tests.for_each import for_each


def test_whoever_leads_after_a_join_leads_on_as_long_as_it_has_missed_nothing() -> None:
    """`leader` is what optimizers go on from, so that it has to be the same on all ranks, and one that was not behind
    in the exchanges before either."""
    schedule = object.__new__(Schedule)  # this is all that it is about
    schedule.note_missed({0: 3, 1: 3}, mine=0)
    assert (schedule.leader, schedule.behind) == (None, False)
    schedule.note_missed({0: 2, 1: 3, 2: 3}, mine=0)
    assert (schedule.leader, schedule.behind) == (1, True)
    schedule.note_missed({0: 5, 1: 5, 2: 4}, mine=0)
    assert (schedule.leader, schedule.behind) == (1, True), "rank 0 has missed one before"
    schedule.note_missed({0: 5, 1: 4, 2: 5}, mine=0)
    assert schedule.leader == 0
    schedule.settled()
    assert (schedule.leader, schedule.behind) == (None, False)


class Participant:
    """An optimizer whose gradients a backward pass has computed."""

    eager = False

    def __init__(self, serial: int, delays: bool, log: list[str]) -> None:
        self.serial, self.delays, self._log = serial, delays, log

    def backward_returns(self) -> None:
        self._log.append(f"{self.serial} returns")


@pytest.mark.parametrize("delays", [False, True])
def test_gradients_of_several_optimizers_are_one_exchange_unless_one_is_applied_later(
    delays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss it is left out, or not, for all of them. One whose update is applied later has an exchange of its
    own, which `step()` begins."""
    log: list[str] = []

    def run(parts: Sequence[Any], exchange: Callable[[], object]) -> None:
        log.append("exchange of " + ", ".join(str(part.serial) for part in parts))
        exchange()

    monkeypatch.setattr(backward.exchanges, "run", run)
    due: list[Any] = [Participant(2, delays, log), Participant(1, False, log)]
    backward._return_all(due)
    assert log == [*([] if delays else ["exchange of 1, 2"]), "1 returns", "2 returns"]


def test_a_shard_of_a_parameter_is_in_the_group_of_that_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "takes_part", lambda process_set: True)
    whole = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
    shards = [torch.zeros(2) for _ in whole]
    for parameter, shard in zip(whole, shards, strict=True):
        parameter._local_tensor = shard  # type: ignore[attr-defined]  # as a `DTensor` has it
    optimizer = torch.optim.SGD([{"params": whole[:1]}, {"params": whole[1:]}], lr=0.1)
    optimizer._parameter_names = {}  # type: ignore[attr-defined]
    trained = TrainedShards(weakref.ref(optimizer), {}, None)  # type: ignore[arg-type]
    assert parameters.are_shards(optimizer)
    assert [trained.group_of(shard) for shard in shards] == [0, 1, 1]
    assert not parameters.are_shards(torch.optim.SGD(shards, lr=0.1))


def test_gradients_of_another_membership_are_wanted_in_the_order_of_the_last_plan() -> None:
    """Unless it is not known, or some gradients are sparse, which are looked at again."""
    tensors = tuple(wire.TensorSpec(name, "float32", (30,)) for name in "cab")
    plan = make_plan(1, wire.Proposal("optimizer.1", 0, 0, wire.Reduction(), tensors), 128, {0: 1.0})
    assert len(plan.buckets) > 1
    assert active_plan._order_of(plan) == ("c", "a", "b")
    assert active_plan._order_of(None) == ()
    sparse = make_plan(
        1, wire.Proposal("optimizer.1", 0, 0, wire.Reduction(),
                         (*tensors, wire.TensorSpec("d", "float32", (9, 3), sparse=1))), 128, {0: 1.0},
    )  # fmt: skip
    assert active_plan._order_of(sparse) == ()


def test_the_residual_of_a_parameter_whose_rate_is_0_stays_what_it_is() -> None:
    """Its neighbour's is multiplied by old / new."""

    class Rates:
        def __init__(self) -> None:
            self.now = {"falls": 0.1, "waits": 0.1}

        def group_rates(self) -> list[float]:
            return list(self.now.values())

        def rates(self) -> dict[str, float]:
            return self.now

    trained = Rates()
    units = Units(trained, wire.Reduction(), SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    slots = [SimpleNamespace(name=name) for name in trained.now]
    units.begin()
    assert units.factors(slots) == ()
    trained.now = {"falls": 0.05, "waits": 0.0}
    units.begin()
    assert units.factors(slots) == (2.0, 1.0)
    assert units.factors(slots) == (), "daemons are told once"


@for_each(("before", "after"), [("", ""), ("parameter", ""), ("", "parameter"), ("node", ""), ("", "node node")])
def test_a_gradient_arrives_once_in_each_pass_after_all_hooks_unless_its_own_was_taken_off(
    before: str, after: str
) -> None:
    parameter, order = torch.nn.Parameter(torch.zeros(2)), []
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node

    def hook(kinds: str) -> None:
        for kind in kinds.split():
            register = node.register_hook if kind == "node" else parameter.register_post_accumulate_grad_hook
            register(lambda *_: order.append("script"))

    owner: Any = SimpleNamespace(hears=True, hears_before=False, arrived=lambda slot: order.append("arrived"))
    hook(before)
    slot = Slot(owner, Named("weight", parameter, 0))
    hook(after)
    expected = ["script"] * len((before + " " + after).split()) + ["arrived"]
    for _ in range(3):
        order.clear()
        parameter.sum().backward()
        assert order == expected
    slot.forget()
    order.clear()
    parameter.sum().backward()
    assert order == expected[:-1]


def test_a_gradient_of_another_dtype_arrives_in_the_first_pass_that_has_it() -> None:
    parameter, arrived = torch.nn.Parameter(torch.zeros(2)), []
    owner: Any = SimpleNamespace(
        hears=True, hears_before=True, arriving=lambda slot, gradients: None,
        arrived=lambda slot: arrived.append(slot.parameter.grad.dtype),
    )  # fmt: skip
    slot = Slot(owner, Named("weight", parameter, 0))
    parameter.sum().backward()
    parameter.grad, parameter.data = None, parameter.data.double()
    for _ in range(2):
        parameter.sum().backward()
    assert arrived == [torch.float32, torch.float64, torch.float64]
    assert slot in slots_of(parameter)
