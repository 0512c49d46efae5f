"""Gradients combined in the node before its daemon has them, on two nodes with two ranks each: by gloo, which needs no
GPU. `test_cuda_node.py` does some of it with NCCL, where there are several."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt import wire
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.node import groups
from tests.harness import Job, on_ranks
from tests.torch.sync.test_gradients import FakeLayer as LateLayer
from tests.torch.sync.test_gradients import (  # noqa: F401
    not_compared,
    test_a_rank_that_joins_before_its_first_step_gets_the_plan,
    test_an_optimizer_over_a_part_of_the_ranks,
    test_gradients_on_a_device_go_through_the_arena,
    test_ranks_without_data_join,
    test_sparse_gradients_are_reduced,
    test_two_optimizers_whose_models_take_turns,
)
from tests.torch.test_optimizer import (  # noqa: F401
    test_buckets_are_sent_while_backward_runs,
    test_several_backward_passes_make_one_step,
    test_unused_parameters_contribute_zeros,
)
from tests.torch.training import (
    assert_equal_on_all_ranks,
    assert_same,
    in_arena,
    loss_of,
    make_model,
    my_batch,
    train,
    train_reference,
)

GLOO = {"FUSION_NODE_REDUCTION": "gloo", "HOROVOD_FUSION_THRESHOLD": "4KiB", "HOROVOD_START_TIMEOUT": "120"}


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((2, 2), GLOO) as running:
        yield running


@contextlib.contextmanager
def setting(way: str) -> Iterator[None]:
    """What plans that are made inside are reduced by."""
    before = os.environ["FUSION_NODE_REDUCTION"]
    os.environ["FUSION_NODE_REDUCTION"] = way
    try:
        yield
    finally:
        os.environ["FUSION_NODE_REDUCTION"] = before


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def in_node(optimizer: Any) -> bool:
    """Whether the last step's gradients were combined in the node."""
    node = optimizer._sync.plan.node
    return node is not None and bool(node.reduces)


def is_first() -> bool:
    return hvd.local_rank() == 0


# --- the same results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["none", "forward"])
@on_ranks
def test_training_is_that_of_one_process(overlap: str) -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), overlap=overlap)
    used = []
    for step in range(4):
        train(model, optimizer, [step])
        used.append(in_node(optimizer))
    assert used == [False, True, True, True], "it begins in the step after the one in which the plan was made"
    train_reference(reference, sgd(reference.parameters()), range(4))
    if overlap != "none":
        hvd.synchronize_parameters()
    assert_same(model, reference)


def reduced(
    way: str,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    where: str = "cpu",
    factor: float = 1.0,
    **options: Any,
) -> tuple[list[Any], Any]:
    """The gradients of each step, which are made of small whole numbers, and the optimizer."""
    with setting(way):
        torch.manual_seed(0)
        shapes = [(40, 30), (30,), (50, 2, 7), ()]
        parameters = [torch.nn.Parameter(torch.randn(shape).to(where, dtype)) for shape in shapes]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)
        choose = torch.Generator().manual_seed(hvd.rank())
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            losses = []
            for parameter in parameters[: len(parameters) - (step + hvd.rank()) % 2]:  # the last may have none
                values = torch.randint(-9, 10, parameter.shape, generator=choose)
                losses.append((parameter * values.to(where, dtype) * factor).sum())
            torch.autograd.backward(losses)
            found.append([parameter.grad.clone() for parameter in parameters])
        assert in_node(optimizer) == (way != "daemon" and hvd.local_size() > 1)
        return found, optimizer


MANNERS: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": hvd.Sum},
    "min": {"op": hvd.Min},
    "max": {"op": hvd.Max},
    "product": {"op": hvd.Product},
    "predivided": {"gradient_predivide_factor": 4.0},
    "fp16": {"compression": hvd.Compression.fp16},
    "a script's compressor": {"compression": type("Half", (hvd.Compression.none,), {})},
    "float16": {"dtype": torch.float16},
    "float16, large": {"dtype": torch.float16, "factor": 6000.0},
    "bfloat16": {"dtype": torch.bfloat16, "op": hvd.Sum},
    "float64": {"dtype": torch.float64},
    "topk": {"compression": "topk(density=0.05, minimum=100)", "steps": 6},
    "topk, float16, large": {"compression": "topk(density=1.0, minimum=9)", "dtype": torch.float16, "factor": 6000.0},
    "onebit": {"compression": "onebit(minimum=100)", "steps": 6},
    "powersgd": {"compression": "powersgd(minimum=100)", "steps": 6},
}


@pytest.mark.parametrize("manner", MANNERS)
@on_ranks
def test_gradients_and_residuals_are_those_of_the_daemons_way(manner: str) -> None:
    (found, optimizer), (expected, other) = (reduced(way, **MANNERS[manner]) for way in ("gloo", "daemon"))
    exact = manner != "powersgd"  # whose factors are inexact, and so depend on the order of sums
    for mine, others in zip(found, expected, strict=True):
        for a, b in zip(mine, others, strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a, b, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4)
    everybodys = hvd.allgather_object([gradient.view(-1).view(torch.uint8).tolist() for gradient in found[-1]])
    assert all(one == everybodys[0] for one in everybodys), "ranks differ"
    states = [one.state_dict().get("fusion_rt", {}).get("state", {}) for one in (optimizer, other)]
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        if ":residual/" in key and exact:
            assert torch.equal(states[0][key], states[1][key]), key


@on_ranks
def test_the_sum_of_a_nodes_halves_is_in_range_where_there_is_no_other_node() -> None:
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    values = torch.full((2000,), 60000.0, dtype=torch.float16)
    for text in ("dense", "topk(density=1.0, minimum=9)"):
        parameter = torch.nn.Parameter(torch.zeros_like(values))
        inner = torch.optim.SGD([parameter], lr=0.0)
        optimizer = hvd.DistributedOptimizer(inner, compression=text, process_set=sets[hvd.cross_rank()])
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * values).sum().backward()  # type: ignore[no-untyped-call]
            assert torch.equal(parameter.grad, values)
        assert in_node(optimizer)
    for each in sets:
        hvd.remove_process_set(each)


@on_ranks
def test_a_checkpoint_restores_what_the_node_had_not_sent() -> None:
    _, optimizer = reduced("gloo", compression="topk(density=0.05, minimum=100)")
    saved = optimizer.state_dict()
    residuals = [value for key, value in saved["fusion_rt"]["state"].items() if ":residual/" in key]
    assert any(value.any() for value in residuals)
    _, other = reduced("gloo", compression="topk(density=0.05, minimum=100)", steps=2)
    other.load_state_dict(saved)
    restored = other.state_dict()["fusion_rt"]["state"]
    assert all(torch.equal(value, restored[key]) for key, value in saved["fusion_rt"]["state"].items())


TOPK = "topk(density=0.05, minimum=100)"


def residuals_of(state_dict: Any) -> dict[str, torch.Tensor]:
    state = state_dict["fusion_rt"]["state"]
    return {key.partition(":")[2]: value for key, value in state.items() if ":residual/" in key}


def save() -> Any:
    _, optimizer = reduced("gloo", compression=TOPK)
    return optimizer.state_dict()


def load(states: list[Any], way: str) -> None:
    """Goes on from the state of this rank's node, which may have had another number of ranks."""
    with setting(way):
        _, optimizer = reduced(way, compression=TOPK, steps=2)
        node = runtime().client.welcome.node
        optimizer.load_state_dict(states[node])
        restored, expected = residuals_of(optimizer.state_dict()), residuals_of(states[node])
        assert restored.keys() == expected.keys()
        assert any(value.any() for value in expected.values())
        assert all(torch.equal(value, expected[key]) for key, value in restored.items())


def test_a_checkpoint_is_loaded_by_nodes_with_other_numbers_of_ranks(job: Job) -> None:
    states = job.run(save)
    of_nodes = [states[0], states[2]]
    job.run(load, of_nodes, "daemon")
    with Job((3, 1), GLOO) as another:
        another.run(load, of_nodes, "gloo")


# --- how it is done ---------------------------------------------------------------------------------------------------


class CountingLayer(LateLayer):
    """Counts the elements that are copied to the arena, and from it."""

    there = back = 0

    def start(self, to: Any, source: Any) -> Any:
        self.there += sum(tensor.numel() for tensor in to if in_arena(tensor))
        self.back += sum(tensor.numel() for tensor in source if in_arena(tensor))
        return super().start(to, source)


@pytest.mark.parametrize("overlap", ["none", "forward"])
@on_ranks
def test_each_rank_of_a_node_copies_its_part_from_its_device_and_back(overlap: str) -> None:
    model, reference = make_model(), make_model()
    previous, device.layer = device.layer, CountingLayer()
    try:
        optimizer = not_compared(sgd(model.parameters()), overlap=overlap)
        train(model, optimizer, range(1))
        hvd.synchronize_parameters()
        device.layer.there = device.layer.back = 0
        train(model, optimizer, range(1, 4))
        hvd.synchronize_parameters()
        assert in_node(optimizer)
        buckets = [len(bucket.flat) for bucket in optimizer._sync.plan.buckets]
        parts = [wire.part_of_node(elements, hvd.local_rank(), 2) for elements in buckets]
        mine = 3 * sum(high - low for low, high in parts)
        assert device.layer.there == mine
        whole = 3 * sum(parameter.numel() for parameter in model.parameters())
        assert device.layer.back == (mine if overlap == "none" else whole), "there is no order without a step's end"
    finally:
        device.layer = previous
    train_reference(reference, sgd(reference.parameters()), range(4))
    assert_same(model, reference)


def unequal() -> None:
    """Three ranks on one node, one on another, and buckets that cannot be divided equally."""
    for manner in ("average", "bfloat16", "topk"):
        found, expected = (reduced(way, **MANNERS[manner])[0] for way in ("gloo", "daemon"))
        for mine, others in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True)), manner


def test_buckets_that_cannot_be_divided_equally() -> None:
    with Job((3, 1), GLOO) as job:
        job.run(unequal)


@on_ranks
def test_gradients_may_arrive_in_another_order_on_each_rank() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(700)) for _ in range(5)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    for step in range(5):
        optimizer.zero_grad()
        order = np.random.default_rng([step, hvd.rank()]).permutation(len(parameters))
        losses = [(parameters[index] * (hvd.rank() + 10.0 * index + step)).sum() for index in order]
        torch.autograd.backward(losses)
        for index, parameter in enumerate(parameters):
            assert parameter.grad.eq(sum(range(4)) + 4 * (10.0 * index + step)).all()
        assert in_node(optimizer) == (step > 0)
    assert optimizer.statistics().buckets > 1


@on_ranks
def test_gradients_that_are_thrown_away() -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    for step in range(4):
        train(model, optimizer, [step])
        loss_of(model, my_batch(7)).backward()
        optimizer._schedule.discard()
    assert in_node(optimizer)
    train_reference(reference, sgd(reference.parameters()), range(4))
    assert_same(model, reference)


@on_ranks
def test_a_new_plan_uses_the_connection_of_the_one_before() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    train(model, optimizer, range(3))
    group = optimizer._sync.plan.node._group
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    train(model, optimizer, range(3))
    assert optimizer.statistics().plans == 2
    assert in_node(optimizer)
    assert optimizer._sync.plan.node._group is group
    assert_equal_on_all_ranks(model)


@on_ranks
def test_shutting_down_and_coming_back() -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    train(model, optimizer, range(2))
    directory = os.path.join(runtime().client.directory, "ranks")
    assert oct(os.stat(directory).st_mode & 0o777) == "0o700"
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    train(model, optimizer, range(2, 5))
    assert in_node(optimizer)
    train_reference(reference, sgd(reference.parameters()), range(5))
    assert_same(model, reference)
    hvd.barrier()
    left = [name for name in os.listdir(directory) if name.startswith("0-")]
    assert not left, "files of the epoch before"


# --- when it is not done ----------------------------------------------------------------------------------------------


class Unfit(groups.Gloo):
    """A backend that cannot connect on the second rank of a node, or where ranks share a device."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared

    def device_of(self, tensors: list[torch.Tensor]) -> str:
        return "the only one" if self._shared else super().device_of(tensors)

    def connect(self, *args: Any) -> groups.Group:  # type: ignore[override]
        if not is_first():
            raise RuntimeError("no way")
        return groups.GlooGroup(*args)


@pytest.mark.parametrize("shared", [False, True])
@on_ranks
def test_what_cannot_be_done_in_the_node_the_daemon_does(shared: bool) -> None:
    model, reference = make_model(), make_model()
    before, groups.BACKENDS["gloo"] = groups.BACKENDS["gloo"], Unfit(shared)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
            train(model, optimizer, range(3))
            model[0].requires_grad_(False)  # a new plan
            reference[0].requires_grad_(False)
            optimizer.zero_grad()
            train(model, optimizer, range(3, 5))
        finally:
            groups.BACKENDS["gloo"] = before
    assert not in_node(optimizer)
    told = [str(warning.message) for warning in caught if "no way" in str(warning.message)]
    assert len(told) == (not shared and not is_first()), "told once, by the rank that cannot"
    reference[0].requires_grad_(True)
    plain = sgd(reference.parameters())
    train_reference(reference, plain, range(3))
    reference[0].requires_grad_(False)
    plain.zero_grad()
    train_reference(reference, plain, range(3, 5))
    assert_same(model, reference)


@on_ranks
def test_what_it_is_not_for() -> None:
    for way, options, told in (
        ("gloo", {"op": hvd.Adasum}, 0),  # which plans nothing of its own until there is a step
        ("gloo", {"algorithm": "local_sgd(steps=1)"}, 1),
        ("nccl", {}, 1),
        ("auto", {}, 0),
        ("daemon", {}, 0),
    ):
        with setting(way), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = make_model()
            optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
            train(model, optimizer, range(2))
        assert optimizer._sync.plan.node is None, (way, options)
        messages = [str(w.message) for w in caught if "FUSION_NODE_REDUCTION is" in str(w.message)]
        assert len(messages) >= told, (way, options)
        assert all("by the daemon all the same" in text for text in messages)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def break_connections() -> None:
    """Ends all TCP connections of this process, which are those to other ranks of its node."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family == socket.AF_INET and connection.getpeername():  # not a listener: OSError
                connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("rank", [0, 1])
@on_ranks
def test_a_connection_that_breaks_fails_one_step_everywhere_and_then_the_daemon_reduces(rank: int) -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    train(model, optimizer, range(3))
    assert in_node(optimizer)
    if hvd.rank() == rank:
        break_connections()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever notices first says so
        with pytest.raises(HorovodInternalError, match="could not"):
            train(model, optimizer, [3])
    optimizer.zero_grad()
    train(model, optimizer, range(4, 6))
    assert not in_node(optimizer)
    plain = sgd(reference.parameters())
    train_reference(reference, plain, range(3))
    plain.zero_grad()
    train_reference(reference, plain, range(4, 6))
    assert_same(model, reference)


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("rank", [0, 3])
@on_ranks
def test_a_failed_backward_pass_fails_one_step_everywhere_and_then_the_daemon_reduces(rank: int, overlap: str) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory, say")

    model, reference = make_model(), make_model()
    optimizer: Any = hvd.DistributedOptimizer(sgd(model.parameters()), overlap=overlap)
    train(model, optimizer, range(3))
    assert in_node(optimizer)
    optimizer.zero_grad()
    told = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            loss = loss_of(model, my_batch(3))
            if hvd.rank() == rank:
                hook = model[0].weight.register_hook(fail)
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            told = str(error)
            optimizer.zero_grad()
        if hvd.rank() == rank:
            hook.remove()
        optimizer.synchronize_parameters() if overlap != "none" else None
        told += "".join(str(warning.message) for warning in warned)
    assert (f"rank {rank} " in told and "out of memory, say" in told) or hvd.rank() == rank, told
    train(model, optimizer, range(4, 7))
    hvd.synchronize_parameters()
    plain = sgd(reference.parameters())
    train_reference(reference, plain, range(3))
    plain.zero_grad()
    train_reference(reference, plain, range(4, 7))
    assert_same(model, reference)


def results_cannot_be_gathered(rank: int) -> list[str]:
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(sgd(model.parameters()))
    train(model, optimizer, range(3))
    assert in_node(optimizer)
    if hvd.rank() == rank:
        gather = optimizer._sync.plan.node.gather

        def broken(*given: Any) -> Any:
            break_connections()
            return gather(*given)

        optimizer._sync.plan.node.gather = broken
    told = []
    for _ in range(2):
        try:
            train(model, optimizer, [3])
        except HorovodInternalError as error:
            told.append(str(error))
    hvd.shutdown()
    return told


def test_results_that_cannot_be_gathered_end_the_job_and_no_rank_trains_on_without_them() -> None:
    with Job((2, 2), GLOO) as job:
        told = job.run(results_cannot_be_gathered, 1)
    for rank in (0, 1):
        assert len(told[rank]) == 2, "not only the step: other nodes have its results"
        assert all("could not get results from the other ranks of its node" in text for text in told[rank])
    for rank in (2, 3):
        assert len(told[rank]) <= 1


def train_until(model: torch.nn.Module, optimizer: Any, dies: int) -> str:
    """Takes steps; in the fourth, one rank dies in its backward pass. Returns what the others are told."""
    train(model, optimizer, range(3))
    assert in_node(optimizer)
    if hvd.rank() == dies:
        model[2].weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(HorovodInternalError) as raised:
        train(model, optimizer, range(3, 6))
    with pytest.raises(HorovodInternalError):  # and again
        train(model, optimizer, range(1))
    return str(raised.value)


def a_rank_dies(dies: int) -> str:
    model = make_model()
    return train_until(model, hvd.DistributedOptimizer(sgd(model.parameters())), dies)


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_is_named_to_the_others(dies: int) -> None:
    """The leader waits for the others inside the node; these wait for the daemon."""
    with Job((2,), GLOO) as job:
        job.start(a_rank_dies, dies)
        job.workers[dies].wait(120)
        (told,) = [answer for answer in job.results(ranks=[1 - dies]) if isinstance(answer, str)]
        assert f"rank {dies}" in told


def one_leaves() -> str:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    train(model, optimizer, range(3))
    told = ""
    if hvd.rank() == 0:  # the leader, who has not told the daemon anything of this step
        with pytest.raises(HorovodInternalError) as raised:
            train(model, optimizer, range(3, 4))
        told = str(raised.value)
    hvd.shutdown()
    hvd.init()
    train(model, optimizer, range(3))
    assert in_node(optimizer)
    return told


def test_a_rank_that_leaves_without_a_word_is_named_to_who_waits_for_it() -> None:
    with Job((2,), GLOO) as job:
        assert "rank 1" in job.run(one_leaves)[0]
