"""The backend "fusion" of `torch.distributed`: `init_process_group("fusion")` joins a job of fusion_rt.

torch finds `register` by an entry point whenever it is imported, so that a script needs no import of this package; that
has to cost nothing, and all else is imported by the first process group. (torch 2.4 knows no such entry points: there a
script imports `fusion_rt.dist`, which registers too.)

`process_group.py` is what c10d sees; `membership.py` joins and leaves the job; `submission.py` turns tensors into
operations of the daemon; `work.py` has operations under way, and `completion.py` their futures; `flight_record.py`
has the last ones for torch's analyser, and `flight_dumps.py` writes them to files.

`ddp.py` and `fsdp.py` have hooks for gradients of DDP and FSDP2, which share `exchanged.py`; `outer.py` has local steps
over both; `sets.py` has the process sets of groups.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_rt.dist.ddp import DDPGradients, compress, ddp_hook
    from fusion_rt.dist.fsdp import ReplicatedShards, fully_shard_in_arena
    from fusion_rt.dist.membership import dump_flight_record
    from fusion_rt.dist.outer import local_steps

__all__ = [
    "DDPGradients",
    "ReplicatedShards",
    "compress",
    "ddp_hook",
    "dump_flight_record",
    "fully_shard_in_arena",
    "local_steps",
    "register",
]

BACKEND = "fusion"
DEVICES = ["cpu", "cuda"]
_MODULES = {
    "DDPGradients": "ddp",
    "ReplicatedShards": "fsdp",
    "compress": "ddp",
    "ddp_hook": "ddp",
    "dump_flight_record": "membership",
    "fully_shard_in_arena": "fsdp",
    "local_steps": "outer",
}


def register() -> None:
    """Makes the backend known to torch, unless it is already, or this torch was built without `torch.distributed`."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, backend_options: Any) -> Any:
    from fusion_rt.dist.process_group import create

    return create(options, backend_options)


def __getattr__(name: str) -> Any:
    """Imports what scripts use by name when they do."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


register()
