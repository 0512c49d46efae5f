"""Process sets of the groups of `torch.distributed`, for exchanges that are planned."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from fusion_rt.local import elastic
from fusion_rt.torch.core.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
)
from fusion_rt.torch.core.runtime import is_initialized, runtime
from fusion_rt.torch.ops.objects import allgather_object


def process_set_of(group: dist.ProcessGroup | None) -> ProcessSet:
    """Returns the process set of a group's ranks. To be called on all ranks of the job, each with a group that it is
    in, unless that is the default group.

    Args:
        group: None stands for the default group.

    Raises:
        ValueError: this worker is in no job, or in an elastic one, or its rank there is not that in the default group.
        HorovodInternalError: the ranks do not agree; on all of them.
    """
    check_job()
    members = sorted(dist.get_process_group_ranks(group))
    return global_process_set if len(members) == runtime().size else _registered(members)


def check_fixed() -> None:
    """Raises `ValueError` in an elastic job."""
    if elastic.agent() is not None:
        raise ValueError(
            "hooks with a codec and local steps of torch's data parallelism (fusion_rt.c10d) do not go with an elastic "
            "job of fusionrun: their residuals and outer optimizers belong to the ranks of one membership. Use DDP "
            "without them, or hvd.DistributedOptimizer(compression=..., algorithm=...) with hvd.elastic.TorchState, "
            "which carries its own along (docs/torch-distributed.md)"
        )


def check_job() -> None:
    """Raises `ValueError` unless the default group is this worker's job, and its ranks do not change."""
    check_fixed()
    if not dist.is_initialized() or not is_initialized():
        raise ValueError(
            'this needs a process group and a job of fusion_rt: call init_process_group("fusion") before, or '
            "init_process_group of another backend and hvd.init()"
        )
    here = runtime()
    if (dist.get_rank(), dist.get_world_size()) != (here.rank, here.size):
        raise ValueError(
            f"this worker is rank {here.rank} of {here.size} in the job of fusion_rt, and rank {dist.get_rank()} of "
            f"{dist.get_world_size()} in the default process group; both have to be numbered alike"
        )


def _registered(members: Sequence[int]) -> ProcessSet:
    """Registers the sets of all ranks, which they learn from each other, and returns this rank's."""
    wanted = dict.fromkeys(map(tuple, allgather_object(list(members))))
    known = {tuple(ranks): number for number, ranks in get_process_set_ids_and_ranks().items()}
    found: dict[tuple[int, ...], ProcessSet] = {}
    for ranks in wanted:
        process_set = found[ranks] = ProcessSet(ranks)
        if ranks in known:
            process_set.process_set_id = known[ranks]
        else:
            add_process_set(process_set)
    return found[tuple(members)]
