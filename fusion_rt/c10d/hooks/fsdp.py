"""FSDP2 (`fully_shard`): its buffers in shared memory, and shards of gradients averaged over replicas by a codec.

FSDP2 asks an object for the memory that it gathers parameters into and reduces gradients from. Memory of the arena
needs no copy: the daemon reads and writes it where it lies.

Where a model is sharded within hosts, and hosts are replicas of each other, FSDP2 hands the shards of a module's
gradients to a hook once they are reduced within the host. What is left to do is the mean over hosts, which is what a
codec is for. A shard of a parameter is a tensor of the plan, so residuals belong to it; it is exchanged with the others
of its module, and FSDP2 waits for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusion_rt.c10d.hooks.exchanged import ExchangedGradients
from fusion_rt.c10d.hooks.sets import check_job, process_set_of
from fusion_rt.torch.core.process_sets import takes_part
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.core.tensors import Memory
from fusion_rt.torch.sync.handed import HandedOver, HandedSlot, stand_in
from fusion_rt.torch.sync.parameters import Named

# --- buffers in shared memory -----------------------------------------------------------------------------------------


class InArena:
    """Memory for FSDP2's collectives that lies in the arena, as far as they are of this process's memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a tensor with undefined contents, whose memory goes back to the arena with it."""
        nbytes = math.prod(size) * dtype.itemsize
        if device.type != "cpu" or not nbytes:
            return torch.empty(*size, dtype=dtype, device=device)
        return Memory(runtime(), nbytes, small=False).tensor(dtype, size)


class AllGatherInArena(InArena):
    """An all-gather of FSDP2 whose memory lies in the arena."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers; see `torch.distributed.all_gather_into_tensor`."""
        work: dist.Work | None = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        return work


class ReduceScatterInArena(InArena):
    """A reduce-scatter of FSDP2 whose memory lies in the arena."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces; see `torch.distributed.reduce_scatter_tensor`."""
        work: dist.Work | None = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        return work


def fully_shard_in_arena(model: torch.nn.Module) -> torch.nn.Module:
    """Has FSDP2 communicate a model through the arena from now on. To be called after `fully_shard`.

    Args:
        model: with modules that `fully_shard` was applied to.

    Returns:
        The model.

    Raises:
        ValueError: there is no such module, or this worker is in no job.
    """
    check_job()
    for module in _sharded(model):
        module.set_custom_all_gather(AllGatherInArena())
        module.set_custom_reduce_scatter(ReduceScatterInArena())
    return model


# --- replicas ---------------------------------------------------------------------------------------------------------


class ReplicatedShards(ExchangedGradients):
    """Shards of the gradients of one model, which are averaged over its replicas by a codec.

    Args:
        model: sharded by `fully_shard` over a mesh of one dimension.
        codec: a codec's text, such as "topk(density=0.01)", or a compressor of fusion_rt.torch.
        replicas: the ranks that have the same shard: a group, or a mesh of one dimension. All ranks of the job have to
            make this at the same place, each with its own.
        optimizer: steps with the gradients. If it is given, residuals are rescaled when its learning rates change.

    Raises:
        ValueError: something of that cannot be used, or not together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        codec: Any,
        replicas: dist.ProcessGroup | DeviceMesh,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
        super().__init__(codec, process_set_of(group), optimizer)
        self._slots: dict[int, list[HandedSlot]] = {}  # by index of the group of parameters, in their order there
        self._groups = [group for module in _sharded(model) for group in module._get_fsdp_state()._fsdp_param_groups]
        members = set(dist.get_process_group_ranks(group))
        for each in self._groups:
            _check_mesh(each, members)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        if takes_part(self.process_set):
            for index, each in enumerate(self._groups):
                each._all_reduce_hook = partial(self.average, index)

    def average(self, index: int, gradients: torch.Tensor) -> None:
        """Replaces the shards of gradients (1-D) of a group of parameters by their means over all replicas.

        Raises:
            ValueError: a parameter of the group has no gradient, or had none in the first step.
            HorovodInternalError: the exchange failed, on all ranks.
        """
        exchange = self.exchange or self._learn()
        slots = self._slots.get(index, [])
        sizes = [slot.parameter.numel() for slot in slots]
        if sum(sizes) < gradients.numel():
            raise ValueError(
                "parameters of a module that fully_shard was applied to were unfrozen, and the codec between replicas "
                "does not know them: make a new ReplicatedShards whenever you have unfrozen some"
            )
        if sum(sizes) > gradients.numel():
            names = ", ".join(slot.name for slot in slots[:3])
            raise ValueError(
                f"some parameters of a module that fully_shard was applied to have no gradient in this step (it has "
                f"{names}, ...), and the codec between replicas needs all: call set_reduce_scatter_unused_params(True) "
                "on it, or freeze them"
            )
        exchange.exchange(list(zip(slots, torch.split(gradients, sizes), strict=True)))

    def _learn(self) -> HandedOver:
        """Learns, when FSDP2 has decided about dtypes, which shards there are; those of the last module come first."""
        named: list[Named] = []
        parameters: list[torch.Tensor] = []
        indices: list[int] = []
        for index, group in reversed(list(enumerate(self._groups))):
            for each in group.fsdp_params:
                if each.sharded_param.requires_grad:
                    named.append(Named(self._names[id(each.sharded_param)], _shard(each), index + 1))
                    parameters.append(each.sharded_param)
                    indices.append(index)
        exchange, slots = self._begin(named, parameters)
        for index, slot in zip(indices, slots, strict=True):
            self._slots.setdefault(index, []).append(slot)
        return exchange


def _sharded(model: torch.nn.Module) -> list[Any]:
    """Returns the modules that `fully_shard` was applied to. Raises `ValueError` if there are none."""
    found = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    if not found:
        raise ValueError("this model has no module with torch.distributed.fsdp.fully_shard; apply that first")
    return found


def _check_mesh(group: Any, replicas: set[int]) -> None:
    """Raises `ValueError` unless a group of parameters is sharded, and over other ranks than its replicas are on."""
    mesh = group.mesh_info.mesh
    if mesh.ndim != 1:
        raise ValueError(
            "fully_shard over a mesh of two dimensions averages over replicas itself, without a codec; give it the one "
            'dimension to shard over, as in fully_shard(module, mesh=mesh["shard"]), and the other one here'
        )
    if len(replicas.intersection(mesh.mesh.flatten().tolist())) > 1:
        raise ValueError(
            "fully_shard shards over several of the ranks that are to be replicas of each other; replicas are ranks "
            "that have the same shard"
        )


def _shard(parameter: Any) -> torch.Tensor:
    """Makes a stand-in for a shard as FSDP2 reduces it: with its padding."""
    dtype = parameter.reduce_dtype or parameter.param_dtype or parameter.orig_dtype
    like = torch.empty(parameter.padded_sharded_param_size, device="meta")
    return stand_in(like, dtype, parameter.sharded_param.device)
