"""The default process group made anew, where the membership of an elastic job has changed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fusion_rt.c10d.process_group import FusionProcessGroup
from fusion_rt.torch.core.runtime import is_initialized, runtime

_BACKEND = "fusion"


def renew_process_group(**options: Any) -> bool:
    """Makes the default process group, in place of the one of an earlier membership of an elastic job if there is one:

        if renew_process_group():
            ddp = DistributedDataParallel(model)

    It does nothing where the group is of the present membership. Call it on all ranks at the same place, at the begin
    of the function of `hvd.elastic.run` or of each step of `hvd.elastic.Manager`. In a job whose ranks do not change,
    the first call makes the group.

    Args:
        options: of `torch.distributed.init_process_group`, such as `timeout`.

    Returns:
        Whether it made one. What was made of the group before, such as other groups, meshes and DDP modules, has to be
        made anew then.

    Raises:
        ValueError: the default group is of another backend.
        CollectiveError: a rank is gone; `elastic.run` and `Manager` handle that.
        FusionError: as `init_process_group`.
    """
    if dist.is_initialized():
        group: Any = dist.group.WORLD
        if not isinstance(group, FusionProcessGroup):
            raise ValueError(
                f"the default process group is of the backend {dist.get_backend()}, which knows nothing of memberships "
                f"of elastic jobs: use init_process_group({_BACKEND!r}), or destroy it before"
            )
        if is_initialized() and group.is_of(runtime()):
            return False
        dist.destroy_process_group()
    dist.init_process_group(_BACKEND, **options)
    return True
