"""The peers of fusion_rt, measured in the same processes and the same run: DistributedDataParallel on gloo, plain and
with its hooks that compress, and Horovod where it can be imported.

torch.distributed's default group has to be there before any of them is made.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from benchmarks.common.launch import MEETING

DDP, FP16, POWERSGD = "DDP", "DDP, fp16 hook", "DDP, PowerSGD hook"
HOROVOD = "Horovod"


def ddp(name: str, model: Any) -> Any:
    """Wraps a model in DistributedDataParallel, with the hook of the peer `name`."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    cap = 1000 if name == POWERSGD else None  # over gloo its hook works with one bucket only
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    if name == FP16:
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if name == POWERSGD:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return parallel


def horovod_there() -> bool:
    """Returns whether Horovod is installed; only its import shows whether it was built for this torch."""
    return importlib.util.find_spec("horovod") is not None


def horovod() -> Any:
    """Returns `horovod.torch`, initialised with the ranks of fusion_rt, or None where it cannot be imported.

    Rank 0 gives each worker its place and runs the rendezvous server, as Horovod's own launcher would. All ranks have
    to call this.
    """
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    ours = _import_horovod()
    there: list[Any] = [None] * hvd.size()
    dist.all_gather_object(there, ours is not None)
    if not all(there):
        return None
    places: list[Any] = [None] * hvd.size()
    dist.all_gather_object(places, (hvd.rank(), hvd.local_rank(), hvd.cross_rank()))
    meeting: list[Any] = [_serve(places) if hvd.rank() == 0 else None]
    dist.broadcast_object_list(meeting)
    os.environ.update(
        HOROVOD_HOSTNAME=f"host{hvd.cross_rank()}",
        HOROVOD_RANK=str(hvd.rank()),
        HOROVOD_SIZE=str(hvd.size()),
        HOROVOD_LOCAL_RANK=str(hvd.local_rank()),
        HOROVOD_LOCAL_SIZE=str(hvd.local_size()),
        HOROVOD_CROSS_RANK=str(hvd.cross_rank()),
        HOROVOD_CROSS_SIZE=str(hvd.cross_size()),
        HOROVOD_GLOO_RENDEZVOUS_ADDR=os.environ[MEETING],
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(meeting[0]),
        HOROVOD_GLOO_IFACE="lo" if hvd.cross_size() == 1 else "eth0",
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
    )
    ours.init()
    return ours


def _import_horovod() -> Any:
    if not horovod_there():
        return None
    try:
        import horovod.torch as found
    except ImportError as error:
        print(f"Horovod is left out: {error}", file=sys.stderr)
        return None
    return found if hasattr(found, "init") else None  # without PyTorch, it is a module with nothing in it


def _serve(places: list[tuple[int, int, int]]) -> int:
    """Starts Horovod's rendezvous server; returns its port."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    locals_of = {node: sum(1 for place in places if place[2] == node) for _, _, node in places}
    sharing = {local: sum(1 for place in places if place[1] == local) for _, local, _ in places}
    slots = [
        SlotInfo(
            hostname=f"host{node}", rank=rank, local_rank=local, cross_rank=node,
            size=len(places), local_size=locals_of[node], cross_size=sharing[local],
        )
        for rank, local, node in places
    ]  # fmt: skip
    server = RendezvousServer()
    port: int = server.start()
    server.init(slots)
    return port
