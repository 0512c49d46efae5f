"""Local steps over torch's data parallelism: local SGD, DiLoCo and their like, whose ranks exchange parameters after
every so many steps of the script's optimizer, and no gradients.

The replicas depend on the model. Without DDP, or with one over all of them, they are single ranks, and DDP is
told to leave gradients as they are. Where DDP reduces gradients within a host, or FSDP2 shards the model there, the
ranks of a host are one replica, and each exchanges with those that have the same place on other hosts: what a rank has
of the parameters, be it all or a shard, is what it exchanges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fusion_rt import algorithms
from fusion_rt.c10d.hooks.sets import process_set_of
from fusion_rt.torch.core.compressors import Compression
from fusion_rt.torch.optimizer import DistributedOptimizer
from fusion_rt.torch.sync.broadcasting import broadcast_parameters
from fusion_rt.torch.sync.parameters import shard_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


def local_steps(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    algorithm: algorithms.Algorithm | str,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    codec: Any = Compression.none,
) -> Any:
    """Makes an optimizer take local steps, and exchange parameters by an algorithm: `local_steps(optimizer, model,
    "diloco(steps=100)")`. To be called on all ranks of the job; the parameters become those of the first replica.

    Args:
        optimizer: the script's; use the result in its place from now on.
        model: whose parameters it trains: a plain one, in DDP, or sharded by `fully_shard` over one dimension.
        algorithm: one of `fusion_rt.algorithms` whose ranks take local steps, or its text.
        replicas: the ranks that have a replica, or the same shard of one, each: a group, or a mesh of one dimension;
            None stands for all ranks.
        codec: of the exchanged values; see `hvd.DistributedOptimizer`.

    Returns:
        The optimizer, as `hvd.DistributedOptimizer` makes it. Its `state_dict` has the number of steps, and the outer
        optimizer where there is one; `own_state` and `load_own_state` are for these alone.

    Raises:
        ValueError: something of that cannot be used, or not together.
    """
    spec = algorithms.parse(str(algorithm))
    if spec.signal is algorithms.Signal.GRADIENT:
        raise ValueError(
            f"{spec} exchanges gradients, which DDP and FSDP2 do already; use local_sgd or diloco, or for DDP's "
            "gradients a codec (fusion_rt.c10d.compress)"
        )
    group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    members = set(dist.get_process_group_ranks(group))
    _check_shards(model, members)
    ddp = model if isinstance(model, DistributedDataParallel) else None
    named = list((model if ddp is None else ddp.module).named_parameters())
    reduces = ddp is not None and _reduces_over(ddp, members)
    process_set = process_set_of(group)
    wrapped = DistributedOptimizer(
        optimizer, named, compression=codec, process_set=process_set, algorithm=spec, overlap="none"
    )
    if ddp is not None and reduces:
        ddp.register_comm_hook(None, keep_gradients)
    if len(members) > 1:
        shards = [(name, shard_of(parameter).detach()) for name, parameter in named]
        broadcast_parameters([pair for pair in shards if pair[1].numel()], min(members), process_set)
    return wrapped


def _reduces_over(ddp: DistributedDataParallel, replicas: set[int]) -> bool:
    """Tells whether DDP reduces gradients over replicas. Raises `ValueError` if these are only a part of its ranks, or
    the other way round."""
    common = replicas.intersection(reduced := dist.get_process_group_ranks(ddp.process_group))
    if len(common) > 1 and (common != replicas or common != set(reduced)):
        raise ValueError(
            f"DDP reduces gradients over ranks {sorted(reduced)}, and ranks {sorted(replicas)} are to be replicas that "
            "take local steps; DDP's process_group and replicas have to be the same ranks, or to have only this rank "
            "in common"
        )
    return len(common) > 1


def keep_gradients(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leaves a bucket's gradients as they are: a communication hook for DDP."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


keep_gradients.__annotations__ = {}  # DDP compares them with classes, and here they are texts


def _check_shards(model: torch.nn.Module, replicas: set[int]) -> None:
    """Raises `ValueError` if a parameter is sharded over, or has its gradient reduced over, several of the replicas."""
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and len(replicas.intersection(mesh.mesh.flatten().tolist())) > 1:
            raise ValueError(
                f"the parameter {name!r} is on a mesh that has several of the ranks {sorted(replicas)}, which are to "
                "be replicas that take local steps; shard over the other ranks alone, as in fully_shard(module, "
                'mesh=mesh["shard"]), and give mesh["replicate"] here'
            )
