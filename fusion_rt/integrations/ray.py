"""A Ray Train job whose function calls `hvd.init()`, as HorovodTrainer's did::

    trainer = FusionTrainer(train, scaling_config=ScalingConfig(num_workers=4))

Ray starts the workers; the first on each node starts the daemon there. A function that calls `torch.distributed` needs
none of this: `TorchTrainer(train, torch_config=TorchConfig(backend="fusion"), ...)`.
"""

from __future__ import annotations

import os
import secrets
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.train
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from fusion_rt.host.ports import listen_in
from fusion_rt.units import PORTS

_LEAVE = 30.0  # seconds that a worker may take to leave its job
_DAEMON = 10.0  # of which it waits for its daemon, which ends when all have left


@dataclass
class FusionConfig(BackendConfig):
    """Has the workers of a Ray Train job find each other in `hvd.init()`.

    Attributes:
        variables: further environment variables of the workers, such as FUSION_COMPRESSION (docs/settings.md).
    """

    variables: dict[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        return _FusionBackend

    @property
    def train_func_context(self) -> type:
        return _Telling

    def to_dict(self) -> dict[str, Any]:
        """Returns the facts that Ray may export about the job: names only, since values may be secret."""
        return {"variables": sorted(self.variables)}


class FusionTrainer(DataParallelTrainer):
    """Runs a function on all workers of a Ray Train job.

    Args:
        train_loop_per_worker: the function; its argument, if it has one, is `train_loop_config`.
        fusion_config: of the workers.
        arguments: as of Ray's `TorchTrainer`: `train_loop_config`, `scaling_config`, `run_config`, `datasets`, …
    """

    def __init__(
        self, train_loop_per_worker: Callable[..., Any], *, fusion_config: FusionConfig | None = None, **arguments: Any
    ) -> None:
        super().__init__(train_loop_per_worker, backend_config=fusion_config or FusionConfig(), **arguments)


class _Telling:
    """A context around the function of a job: the other ranks' operations raise an exception that ends it."""

    def __enter__(self) -> None:
        """Does nothing: the function joins the job."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            _leave("".join(traceback.format_exception(error)))


class _FusionBackend(Backend):
    """Sets the variables of each worker's place before the function runs, and has workers leave their job after it."""

    def on_training_start(self, worker_group: Any, backend_config: FusionConfig) -> None:
        """Gives all workers a place to meet, and a secret that only they know."""
        ports = backend_config.variables.get("FUSION_PORTS", "")
        address, port = worker_group.execute_single(0, _address_and_port, ports)
        common = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"ray-{secrets.token_hex(8)}",  # another job each time that the group is started
            "FUSION_JOB_SECRET": secrets.token_hex(32),
        }
        worker_group.execute(_set_variables, {**common, **backend_config.variables})

    def on_shutdown(self, worker_group: Any, backend_config: FusionConfig) -> None:
        """Has workers leave, which lets the daemons end: one that Ray ends without that would count as lost."""
        ray.wait(worker_group.execute_async(_leave, ""), num_returns=len(worker_group), timeout=_LEAVE)


def _address_and_port(ports: str) -> tuple[str, int]:
    """Returns this worker's address, and a free port; among `ports`, or FUSION_PORTS here, if either names some."""
    address, port = get_address_and_port()
    text = ports or os.environ.get("FUSION_PORTS", "")

    def listen(port: int) -> int:
        with socket.create_server(("", port)) as listener:
            found: int = listener.getsockname()[1]
        return found

    return address, listen_in(PORTS.parse(text, 1.0), listen) if text else port


def _set_variables(common: dict[str, str]) -> None:
    context = ray.train.get_context()
    os.environ.update(common)
    os.environ.update(
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        GROUP_RANK=str(context.get_node_rank()),
    )


def _leave(error: str) -> None:
    from fusion_rt.torch.core import runtime

    daemon = runtime.runtime().daemon if runtime.is_initialized() else None
    runtime.leave(error)
    if daemon is not None and not error:
        daemon.wait(_DAEMON)
