"""Sets torchrun's variables in a worker that another launcher has started.

`init_process_group` looks for a worker's place, and for the store where all meet, in variables that only torchrun sets.
Under `fusionrun`, `mpirun` and `srun` the workers join their job first, and rank 0 serves the store, on a free port of
its host's loopback. The daemon of each other host has a port that leads there. In an elastic job each membership has a
store of its own, and variables of its own.

The launcher does not set them: it would have to know a free port of another host, and Accelerate, Transformers and
Lightning would take scripts that call `hvd.init()` for scripts of torchrun.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import fusion_rt.torch as hvd
from fusion_rt.c10d.failing import CollectiveError, explained, heed
from fusion_rt.c10d.membership import check_place, forget_name
from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.launchers import environment
from fusion_rt.torch.core.runtime import runtime

_LOOPBACK = "127.0.0.1"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_store: TCPStore | None = None  # on rank 0: process groups come and go
_set: Mapping[str, str] = {}  # the variables that were set
_client: Client | None = None  # of the membership for which it was


def set_variables() -> None:
    """Sets torchrun's variables in this process, unless torchrun has. Joins the job to do so (`hvd.init()`).

    To be called by all workers, before anything that looks at the variables. A second call changes nothing.

    Raises:
        FusionError: the job could not be joined (as `hvd.init()`), or it is elastic, and this worker has not come to
            its training function.
        HorovodInternalError: the job has failed, or its membership in an elastic job.
    """
    global _set, _client
    if not _needed():
        return
    check_place()
    hvd.init()
    _client = client = runtime().client
    port = _serve() if hvd.rank() == 0 else 0
    if hvd.rank() == 0:
        client.relay_port(client.welcome.node, port)
    node, port = hvd.broadcast_object((client.welcome.node, port), name="fusion_rt.integrations.store")
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), _LOOPBACK, client.relay_port(node, port))
    _set = dict(zip(_NAMES, map(str, place), strict=True))
    os.environ.update(_set)
    os.environ["GROUP_RANK"] = str(client.welcome.node)
    # All of them, rank 0 too, are clients of a store that is served already, as that of torchrun's agent is.
    os.environ["TORCHELASTIC_RUN_ID"] = client.job
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def _needed() -> bool:
    """Tells whether the variables are missing, or of another membership of an elastic job, or may be those of a
    torchrun that has started this launcher."""
    if are_ours() and _client is not None and _client.is_elastic:
        return not hvd.is_initialized() or runtime().client is not _client
    if _store is not None or os.environ.get("TORCHELASTIC_RUN_ID", "") == _job():
        return False
    return bool(environment.detect().socket) or not all(os.environ.get(name) for name in _NAMES)


def are_ours() -> bool:
    """Tells whether the variables are those that `set_variables` has set."""
    return bool(_set) and all(os.environ.get(name) == value for name, value in _set.items())


def meet(by_variables: Iterator[Any]) -> Any:
    """Sets the variables if they are missing, and returns the first item of torch's generator: a store, this
    worker's rank, and the number of ranks.

    Raises:
        FusionError: as `set_variables`; or the job is elastic, and the group is to be of another backend.
        CollectiveError: the job has failed, or its membership in an elastic job.
        Exceptions of the generator.
    """
    try:
        set_variables()
        if not hvd.is_initialized():
            return next(by_variables)
        if runtime().client.is_elastic:
            _check_backend()
        return heed(runtime().client, lambda: next(by_variables))
    except BaseException as error:
        forget_name()
        if isinstance(error, HorovodInternalError) and not isinstance(error, CollectiveError):
            raise CollectiveError(explained(runtime().client.channel, str(error))) from None
        raise


def _check_backend() -> None:
    """Raises `FusionError` if `init_process_group` is to make a group of another backend. torch does not tell it."""
    code = inspect.unwrap(dist.init_process_group).__code__
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not code:
        frame = frame.f_back
    backend = str(frame.f_locals.get("backend", "fusion")) if frame.f_code is code else "fusion"
    if backend != "fusion":
        raise FusionError(
            f"a process group of the backend {backend} knows nothing of memberships, and this job of fusionrun is "
            'elastic: its ranks would wait for those that are lost. Use init_process_group("fusion"), or start the job '
            "without --min-np and --host-discovery-script"
        )


def _job() -> str | None:
    return runtime().client.job if hvd.is_initialized() else None


def _serve() -> int:
    """Serves a store on loopback, and returns its port: it asks for no key, and torch's own listens everywhere."""
    global _store
    bound = socket.create_server((_LOOPBACK, 0))
    try:
        port: int = bound.getsockname()[1]
        _store = TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.fileno())
    except BaseException:
        bound.close()
        raise
    bound.detach()  # it is the store's
    return port
