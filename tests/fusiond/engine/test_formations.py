"""What codecs remember goes from the engine of one formation to that of the next: whole jobs in one thread, one after
the other, of which the first ones end in the middle of a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fusion_rt import wire
from fusiond.engine.keeper import Left
from tests.for_each import for_each
from tests.fusiond.simulation import SimulatedJob

Array = npt.NDArray[np.float32]
SIZES = {"a": 300, "b": 500, "c": 700, "d": 900}
TOPK = 'topk(density=0.05, minimum=100, value="fp32")'
MOMENTUM = 'topk(density=0.05, minimum=100, value="fp32", momentum=0.9)'


def proposal(tensors: list[str], codec: str = TOPK) -> wire.Proposal:
    specs = tuple(wire.TensorSpec(name, "float32", (SIZES[name],)) for name in tensors)
    return wire.Proposal("optimizer.1", 0, 0, wire.Reduction(codec=codec), specs)


class Training:
    """A job with a plan, and the steps of its workers, one a node.

    Attributes:
        given: by rank, the gradients of the last step, by tensor.
    """

    def __init__(self, left: list[Left], tensors: list[str], seed: int, codec: str = TOPK) -> None:
        nodes = len(left)
        self.job = SimulatedJob([1] * nodes, seed, left=left, fusion_threshold=3000)
        self.plan = self.job.plan(proposal(tensors, codec))
        assert len(self.plan.buckets) > 1
        self._memory = self.job.add_plan_memory(self.plan)
        self._choose = np.random.default_rng(seed)
        self._clock = 0
        self.given: list[dict[str, Array]] = []

    def post(self, buckets: dict[int, list[int]]) -> list[tuple[int, int]]:
        """Posts some buckets of a step on some ranks; returns ranks and handles."""
        self.given = [
            {
                t.name: self._choose.standard_normal(t.numel).astype(np.float32)
                for b in self.plan.buckets
                for t in b.tensors
            }
            for _ in self.job.ranks
        ]
        handles = []
        for rank, wanted in buckets.items():
            for index in wanted:
                bucket = self.plan.buckets[index]
                there = self._memory[rank][bucket.offset :].view(np.float32)
                for tensor in bucket.tensors:
                    there[tensor.start : tensor.start + tensor.numel] = self.given[rank][tensor.name]
                handles.append((rank, self.job.ready(rank, self.plan, index, self._clock)))
        self._clock += 1
        return handles

    def step(self) -> None:
        """Takes a step."""
        everything = list(range(len(self.plan.buckets)))
        handles = self.post({rank: everything for rank in self.job.ranks})
        self.job.settle()
        assert all(self.job.is_answered(*handle) for handle in handles)

    def residuals(self, rank: int) -> dict[str, Array]:
        """Returns what has not been sent on a node, by tensor."""
        state = self.job.nodes[rank].engine.keeper.state_of_codecs((0, "optimizer.1"))
        return {key.partition("residual/")[2]: value for key, value in state.items() if "residual/" in key}

    def end(self) -> None:
        """Ends the formation on all nodes, as it is."""
        for node in self.job.nodes:
            node.engine.fail_job("it is over")
        while self.job.deferred:
            self.job.deferred.popleft()()
        for node in self.job.nodes:
            node.engine.when_quiet(node.engine.keeper.remember)


@for_each("codec", [TOPK, MOMENTUM, "int8(minimum=100)"])
@for_each("seed", range(6))
def test_residuals_of_survivors_go_on_tensor_by_tensor_as_they_were_before_a_step_that_is_dropped(
    seed: int, codec: str
) -> None:
    left: list[Left] = [{}, {}, {}]
    first = Training(left, ["a", "b", "c", "d"], seed, codec)
    for _ in range(3):
        first.step()
    before = [first.residuals(rank) for rank in first.job.ranks]
    # Of the step that is dropped one bucket is complete, and others are under way, wherever they are.
    complete = first.post({rank: [0] for rank in first.job.ranks})
    first.job.settle()
    assert all(first.job.is_answered(*handle) for handle in complete)
    first._clock -= 1
    first.post({0: [1], 1: [1], 2: []})
    for _ in range(seed):
        first.job.step()
    first.end()

    survivors = [left[0], left[2]]
    second = Training(survivors, ["d", "c", "b", "a"], seed + 100, codec)  # other buckets, other places
    for rank, old in enumerate((0, 2)):
        for name, values in second.residuals(rank).items():
            np.testing.assert_array_equal(values, before[old][name])  # bit by bit
    second.step()  # both are at the same step, in the same ranges


def test_what_a_node_that_is_alone_cannot_send_waits_until_others_are_there_again() -> None:
    left: list[Left] = [{}, {}]
    first = Training(left, ["a", "b", "c"], 1)
    first.step()
    kept = first.residuals(0)
    first.end()
    alone = Training([left[0]], ["a", "b", "c"], 2)
    alone.step()
    alone.end()
    left[1].clear()  # a newcomer
    third = Training(left, ["a", "b", "c"], 3)
    for name, values in third.residuals(0).items():
        np.testing.assert_array_equal(values, kept[name])
    assert not any(values.any() for values in third.residuals(1).values())


def test_a_state_that_a_worker_loads_takes_the_place_of_what_was_remembered() -> None:
    left: list[Left] = [{}, {}]
    first = Training(left, ["a", "b", "c"], 1)
    first.step()
    first.end()
    second = SimulatedJob([1, 1], left=left)
    for node in second.nodes:
        node.engine.keeper.load((0, "optimizer.1"), {}, False, lambda error: None)
    assert left == [{}, {}]
    third = Training(left, ["a", "b", "c"], 2)
    assert not any(values.any() for rank in (0, 1) for values in third.residuals(rank).values())
    third.step()
