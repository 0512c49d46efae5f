"""Tests of FSDP2, HSDP, tensor parallelism, DTensor and checkpoints, on torch's harnesses.

Torch installs the harnesses of these suites (models, comparisons, a converter that tries all layouts), but not the
tests. These do what torch's do, on the CPU.
"""

from __future__ import annotations

import copy
import itertools
import operator
import os
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing import assert_close
from torch.testing._internal.common_fsdp import MLPStack, check_sharded_parity
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    ModelArgs,
    Transformer,
    with_comms,
)
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir

STEPS = 3
TP = 2  # ranks of a tensor parallel group
_DIM = 18  # divisible by 2 and 3, and by 4 not


_in_two_dimensions = unittest.skipUnless(int(os.environ["WORLD_SIZE"]) % (2 * TP) == 0, "two dimensions need 4 ranks")


class Sharded(DTensorTestBase):  # type: ignore[misc]
    """Tests with one device mesh over all ranks, or two dimensions of them where there are 4."""

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    @with_comms
    def test_fully_shard_trains_as_one_process(self) -> None:
        self._train_sharded(lambda model: self._shard(model, self.build_device_mesh()))

    @with_comms
    def test_fully_shard_without_reshard_after_forward(self) -> None:
        self._train_sharded(lambda model: self._shard(model, self.build_device_mesh(), reshard_after_forward=False))

    @with_comms
    def test_fully_shard_reduces_in_bfloat16(self) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        self._train_sharded(lambda model: self._shard(model, self.build_device_mesh(), mp_policy=policy), rough=0.05)

    @_in_two_dimensions
    @with_comms
    def test_hybrid_shard_trains_as_one_process(self) -> None:
        self._train_sharded(lambda model: self._shard(model, self._mesh_of_two("replicate", "shard")))

    @_in_two_dimensions
    @with_comms
    def test_fully_shard_around_tensor_parallel_trains_as_one_process(self) -> None:
        mesh = self._mesh_of_two("data", "tensor")
        torch.manual_seed(0)
        whole = MLPStack(_DIM)
        split = copy.deepcopy(whole).parallelize(mesh["tensor"], mesh["data"], False)
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (whole, split)]
        generator = torch.Generator().manual_seed(1 + mesh["data"].get_local_rank())
        for _ in range(STEPS):
            batch = torch.randn(4, 6, _DIM, generator=generator)
            losses = [model(batch).sum() for model in (whole, split)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                if optimizer is optimizers[0]:
                    self._average_gradients(whole, mesh["data"].get_group())
                optimizer.step()
                optimizer.zero_grad()
            assert_close(*map(_whole, losses))

    @with_comms
    def test_tensor_parallel_transformer_trains_as_one_process(self) -> None:
        for sequences in (False, True):
            arguments = ModelArgs(n_heads=12, dim=24, vocab_size=24, max_seq_len=12, dropout_p=0.0)
            torch.manual_seed(0)
            whole = Transformer(arguments)
            split = Transformer.parallelize(
                copy.deepcopy(whole), self.build_device_mesh(), sequences, local_output_for_attn=True
            )
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, split)]
            for _ in range(STEPS):
                tokens = torch.randint(0, 24, (2, 12))
                losses = [model(tokens).pow(2).mean() for model in (whole, split)]
                for loss, optimizer in zip(losses, optimizers, strict=True):
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert_close(*map(_whole, losses))

    @with_comms
    def test_operators_are_right_in_all_layouts(self) -> None:
        torch.manual_seed(0)
        mesh = self.build_device_mesh()
        one, other = torch.randn(12, 12), torch.randn(12, 12)
        unary: list[Callable[[Any], Any]] = [torch.exp, torch.sum, torch.softmax, torch.argmax, torch.cumsum]
        for operation in (torch.add, torch.mul, torch.sub, torch.matmul, torch.eq):
            self._test_op(mesh, operation, one, other)
        for operation in unary:
            dimension = () if operation in (torch.exp, torch.sum) else (1,)
            self._test_op(mesh, operation, one, *dimension)

    @with_comms
    def test_layouts_change_into_each_other_forth_and_back(self) -> None:
        mesh = self.build_device_mesh()
        layouts = (Replicate(), Shard(0), Shard(1))
        for dtype, shape in itertools.product(
            (torch.float32, torch.bfloat16, torch.complex64), ((self.world_size * 2, 4), (5, self.world_size + 1))
        ):
            torch.manual_seed(0)
            whole = torch.randn(shape).to(dtype)
            for source, target in itertools.product(layouts, layouts):
                started = distribute_tensor(whole, mesh, [source]).requires_grad_()
                changed = started.redistribute(mesh, [target])
                assert_close(changed.full_tensor(), whole, atol=1e-2, rtol=1e-2)
                changed.to_local().abs().sum().backward()
                assert started.grad is not None

    @with_comms
    def test_partial_sums_are_summed(self) -> None:
        mesh = self.build_device_mesh()
        mine = torch.arange(12.0).reshape(3, 4) * (self.rank + 1)
        expected = torch.arange(12.0).reshape(3, 4) * sum(range(1, self.world_size + 1))
        for target in (Replicate(), Shard(0), Shard(1)):
            summed = DTensor.from_local(mine, mesh, [Partial()]).redistribute(mesh, [target])
            assert_close(summed.full_tensor(), expected)
        for name, found in (("max", operator.itemgetter(-1)), ("min", operator.itemgetter(0))):
            reduced = DTensor.from_local(mine, mesh, [Partial(name)]).full_tensor()
            assert_close(reduced, torch.arange(12.0).reshape(3, 4) * found(range(1, self.world_size + 1)))

    @with_comms
    def test_functional_collectives_are_compiled(self) -> None:
        group = dist.group.WORLD

        def program(mine: torch.Tensor) -> torch.Tensor:
            summed = functional.all_reduce(mine, "sum", group)
            gathered = functional.all_gather_tensor(summed * 2, 0, group)
            scattered = functional.reduce_scatter_tensor(gathered + 1, "sum", 0, group)
            return functional.all_to_all_single(scattered, None, None, group) + mine

        mine = torch.full((self.world_size * 2, 3), self.rank + 1.0)
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        total = self.world_size * (self.world_size + 1) / 2
        assert_close(compiled(mine), (2 * total + 1) * self.world_size + mine)
        assert_close(compiled(mine), program(mine))

    @with_comms
    @with_temp_dir  # type: ignore[misc]
    def test_checkpoint_is_loaded_in_another_layout(self) -> None:
        mesh = self.build_device_mesh()
        model, optimizer = self._trained(mesh)
        saved, saved_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": saved, "optimizer": saved_optimizer}, checkpoint_id=self.temp_dir)
        whole = _model()
        expected = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        loaded = {name: torch.zeros_like(value) for name, value in whole.state_dict().items()}
        dcp.load({"model": loaded}, checkpoint_id=self.temp_dir)
        if self.rank == 0:
            assert_close(loaded, expected)
        columns = {name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(value.dim() - 1)])
                   for name, value in whole.state_dict().items()}  # fmt: skip
        dcp.load({"model": columns}, checkpoint_id=self.temp_dir)
        for name, value in columns.items():
            assert_close(value.full_tensor(), loaded[name])

    @with_comms
    @with_temp_dir  # type: ignore[misc]
    def test_checkpoint_restores_model_and_optimizer(self) -> None:
        model, optimizer = self._trained(self.build_device_mesh())
        saved, saved_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": saved, "optimizer": saved_optimizer}, checkpoint_id=self.temp_dir)
        other = self._shard(_model(seed=5), self.build_device_mesh())
        other_optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
        found, found_optimizer = get_state_dict(other, other_optimizer)
        dcp.load({"model": found, "optimizer": found_optimizer}, checkpoint_id=self.temp_dir)
        set_state_dict(other, other_optimizer, model_state_dict=found, optim_state_dict=found_optimizer)
        self._compare(model, optimizer, other, other_optimizer)

    @with_comms
    @with_temp_dir  # type: ignore[misc]
    def test_checkpoint_is_saved_beside_training(self) -> None:
        model, _ = self._trained(self.build_device_mesh())
        saved = get_model_state_dict(model)
        expected = {name: value.full_tensor().clone() for name, value in saved.items()}
        saving = dcp.async_save({"model": saved}, checkpoint_id=self.temp_dir, process_group=dist.new_group())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        saving.result()
        loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load({"model": loaded}, checkpoint_id=self.temp_dir)
        assert_close(loaded, expected)

    @with_comms
    def test_state_dict_is_gathered_and_spread_again(self) -> None:
        model, _ = self._trained(self.build_device_mesh())
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        assert bool(whole) == (self.rank == 0)
        other = self._shard(_model(seed=5), self.build_device_mesh())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, whole, options=options)
        for mine, restored in zip(model.parameters(), other.parameters(), strict=True):
            assert_close(mine.to_local(), restored.to_local())

    def _compare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        other: nn.Module,
        other_optimizer: torch.optim.Optimizer,
    ) -> None:
        """Trains two sharded models for a step, and compares them."""
        losses = []
        batch = torch.randn(4, _DIM, generator=torch.Generator().manual_seed(self.rank))
        for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
            one(batch).sum().backward()
            its_optimizer.step()
            losses.append(one(batch).sum())
        assert_close(*losses)
        for mine, restored in zip(model.parameters(), other.parameters(), strict=True):
            assert_close(mine.to_local(), restored.to_local())

    def _train_sharded(self, shard: Callable[[nn.Module], nn.Module], rough: float = 0.0) -> None:
        """Trains a model, and its copy sharded, on different batches on each rank; compares all there is."""
        whole = _model()
        sharded = shard(copy.deepcopy(whole))
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (whole, sharded)]
        generator = torch.Generator().manual_seed(1 + self.rank)
        for _ in range(STEPS):
            batch = torch.randn(4, _DIM, generator=generator)
            losses = [model(batch).sum() for model in (whole, sharded)]
            for loss in losses:
                loss.backward()
            self._average_gradients(whole, None)
            assert_close(*losses, atol=rough * abs(losses[0].item()) + 1e-5, rtol=rough)
            if not rough:
                check_sharded_parity(self, whole, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def _average_gradients(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)

    def _trained(self, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self._shard(_model(), mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1 + self.rank)
        for _ in range(STEPS):
            model(torch.randn(4, _DIM, generator=generator)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def _shard(self, model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
        for layer in model.children():
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    def _mesh_of_two(self, *names: str) -> DeviceMesh:
        return init_device_mesh("cpu", (self.world_size // TP, TP), mesh_dim_names=names)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLPStack(_DIM)
