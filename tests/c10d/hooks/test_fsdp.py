"""FSDP2 with buffers in shared memory, and with a codec between replicas, on two nodes of two ranks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fusion_rt.torch as hvd
from fusion_rt.c10d import ReplicatedShards, compress, fully_shard_in_arena, local_steps
from fusion_rt.c10d.hooks.fsdp import AllGatherInArena
from fusion_rt.torch.core import basics
from tests.c10d import script
from tests.c10d.script import (
    SCALES,
    START,
    TOPK,
    ErrorFeedback,
    backward,
    loss_of,
    make_model,
    process_group,
    train_scaled,
)
from tests.harness import Job, on_ranks


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((2, 2), {**START, "FUSION_SPARSE_ROUTE": "gather"}) as running:
        yield running


def sharded(mesh: DeviceMesh) -> torch.nn.Module:
    """The model, of which the first layer is a unit of its own."""
    model = make_model()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def train(model: torch.nn.Module, steps: Iterable[int]) -> list[list[torch.Tensor]]:
    """Returns the whole parameters after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after = []
    for step in steps:
        optimizer.zero_grad()
        backward(loss_of(model, step))
        optimizer.step()
        after.append([whole(parameter).clone() for parameter in model.parameters()])
    return after


def whole(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@on_ranks
def test_buffers_in_the_arena_change_no_result() -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (4,))
        expected = train(sharded(mesh), range(4))
        seen: list[bool] = []

        class Watched(AllGatherInArena):
            def __call__(self, output_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
                arena = basics.runtime().client.arena
                seen.append(arena.locate(output_tensor.data_ptr(), output_tensor.nbytes) is not None)
                return super().__call__(output_tensor, *args, **options)

        model = fully_shard_in_arena(sharded(mesh))
        model.set_custom_all_gather(Watched())  # type: ignore[operator]
        assert_equal(train(model, range(4)), expected)
        assert seen
        assert all(seen)


@on_ranks
def test_memory_that_fsdp2_asks_the_group_for_is_in_the_arena() -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (4,))
        expected = train(sharded(mesh), range(4))
        model = sharded(mesh)
        if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
            pytest.skip("this torch does not ask a group for memory")
        for module in (model[0], model):  # type: ignore[index]
            module.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
        group, arena = mesh.get_group(), basics.runtime().client.arena
        seen: list[bool] = []
        allocate = type(group).allocate_tensor

        def watched(*args: Any, **options: Any) -> torch.Tensor:
            tensor: torch.Tensor = allocate(*args, **options)
            seen.append(arena.locate(tensor.data_ptr(), tensor.nbytes) is not None)
            return tensor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(group), "allocate_tensor", watched)
            assert_equal(train(model, range(4)), expected)
        assert seen
        assert all(seen)
        assert not group.supports_tensor_alloc(torch.device("cuda"))


@on_ranks
def test_ddp_of_a_part_of_the_ranks_has_a_codec_of_its_own() -> None:
    with process_group():
        first = hvd.rank() % 2
        ddp = DistributedDataParallel(make_model(), process_group=mesh_of_all()["replicate"].get_group())
        compress(ddp, TOPK)
        simulated = ErrorFeedback(make_model(), (first, first + 2))
        for step, after in enumerate(script.train(ddp, range(4))):
            simulated.step(partial(loss_of, simulated.model, step))
            assert after == script.bits(simulated.model), step


@on_ranks
def test_dense_between_replicas_is_hsdp() -> None:
    with process_group():
        mesh = mesh_of_all()
        expected = train(sharded(mesh), range(4))
        model = sharded(mesh["shard"])
        replicated = ReplicatedShards(model, "dense", mesh["replicate"])
        found = train(model, range(4))
        torch.testing.assert_close(found, expected)
        assert replicated.statistics().plans == 1


@on_ranks
def test_topk_between_replicas_is_error_feedback_by_shard() -> None:
    with process_group():
        mesh = mesh_of_all()
        model = sharded(mesh["shard"])
        ReplicatedShards(model, TOPK, mesh["replicate"].get_group())
        simulated, left = make_model(), dict[tuple[int, int, str], Any]()
        for step, after in enumerate(train(model, range(5))):
            simulate(simulated, left, step)
            torch.testing.assert_close(after, [parameter.detach() for parameter in simulated.parameters()])


def simulate(model: torch.nn.Module, left: dict[tuple[int, int, str], Any], step: int) -> None:
    """Takes a step in one process. `left`: residuals by replica, shard and parameter."""
    gradients = []
    for rank in range(4):
        model.zero_grad()
        backward(loss_of(model, step, rank))
        gradients.append({name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None})
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // 2)
        means = []
        for shard in range(2):
            sums = np.zeros((rows, *parameter.shape[1:]), np.float32).ravel()
            for replica in range(2):
                given = (gradients[2 * replica][name] + gradients[2 * replica + 1][name]) / 2
                part = np.zeros((rows, *parameter.shape[1:]), np.float32)
                mine = given[shard * rows : (shard + 1) * rows]
                part[: len(mine)] = mine
                sums += sent(left, (replica, shard, name), part.ravel())
            means.append(sums.reshape(rows, *parameter.shape[1:]) / 2)
        with torch.no_grad():
            parameter.sub_(torch.from_numpy(np.concatenate(means)[: parameter.shape[0]]), alpha=0.1)


def sent(left: dict[tuple[int, int, str], Any], key: tuple[int, int, str], given: Any) -> Any:
    if given.size < 100 or key[2].endswith("bias"):
        return given
    total = given + left.get(key, np.zeros_like(given))
    largest = np.argsort(-np.abs(total), kind="stable")[: max(1, round(0.05 * total.size))]
    chosen = np.zeros_like(total)
    chosen[largest] = total[largest]
    left[key] = total - chosen
    return chosen


@pytest.mark.parametrize("text", [TOPK, "int4(minimum=100)", "powersgd(minimum=100)", "demo(minimum=100)"])
@on_ranks
def test_a_loss_scale_that_changes_changes_no_bit(text: str) -> None:
    """Scales are powers of two."""
    with process_group():
        mesh = mesh_of_all()
        plain, scaled, said = (sharded(mesh["shard"]) for _ in range(3))
        kept = [ReplicatedShards(model, text, mesh["replicate"]) for model in (plain, scaled, said)]
        expected = train_scaled(plain, [1.0] * len(SCALES))
        for found in (train_scaled(scaled, SCALES), train_scaled(said, SCALES, kept[2])):
            for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                assert all(map(torch.equal, ours, theirs)), step


@on_ranks
def test_one_overflow_of_a_gradient_scaler_skips_one_step_on_all_ranks() -> None:
    with process_group():
        mesh = mesh_of_all()
        for local in (True, False):
            model = sharded(mesh["shard"])
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            if local:
                optimizer = local_steps(optimizer, model, "local_sgd(steps=2)", mesh["replicate"])
            else:
                ReplicatedShards(model, TOPK, mesh["replicate"])
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            for step in range(6):
                optimizer.zero_grad()
                loss = loss_of(model, step) * (float("inf") if step == 2 and hvd.rank() == 1 else 1.0)
                backward(scaler.scale(loss))
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == (128 if not local or hvd.rank() < 2 else 256)
            after = [whole(parameter) for parameter in model.parameters()]
            assert all(bool(value.isfinite().all()) for value in after)
            assert len(set(hvd.allgather_object(b"".join(value.numpy().tobytes() for value in after)))) == 1


@on_ranks
def test_a_restored_training_goes_on_bit_by_bit() -> None:
    with process_group():
        mesh = mesh_of_all()
        model = sharded(mesh["shard"])
        replicated = ReplicatedShards(model, TOPK, mesh["replicate"])
        train(model, range(3))
        file = io.BytesIO()
        torch.save(replicated.state_dict(), file)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        expected = train(model, range(3, 6))
        file.seek(0)
        state = torch.load(file, weights_only=True)
        for steps in (0, 2):  # into one that is new, and into one that has a plan
            model = sharded(mesh["shard"])
            replicated = ReplicatedShards(model, TOPK, mesh["replicate"])
            train(model, range(10, 10 + steps))
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.copy_(value)
            replicated.load_state_dict(state)
            assert_equal(train(model, range(3, 6)), expected)


@on_ranks
def test_what_makes_no_sense_is_refused_by_a_sentence() -> None:
    with process_group():
        mesh = mesh_of_all()
        with pytest.raises(ValueError, match="apply that first"):
            fully_shard_in_arena(make_model())
        with pytest.raises(ValueError, match=r"two dimensions.*without a codec"):
            ReplicatedShards(sharded(mesh), TOPK, mesh["replicate"])
        with pytest.raises(ValueError, match=r"several of the ranks that are to be replicas"):
            ReplicatedShards(sharded(mesh["shard"]), TOPK, dist.group.WORLD)  # type: ignore[arg-type]


def assert_equal(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for values, others in zip(found, expected, strict=True):
        assert all(torch.equal(value, other) for value, other in zip(values, others, strict=True))
    assert len(set(hvd.allgather_object([value.numpy().tobytes() for value in found[-1]].__repr__()))) == 1
