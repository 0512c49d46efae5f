"""The backend "fusion" of `torch.distributed`: `init_process_group("fusion")` joins a job of fusion_rt.

torch finds `register` by an entry point whenever it is imported, so that a script needs no import of this package; that
has to cost nothing, and all else is imported by the first process group. (torch 2.4 knows no such entry points: there a
script imports `fusion_rt.c10d`, which registers too.)

`process_group.py` is the group that c10d calls; `membership.py` joins and leaves the job; `submission.py` turns tensors
into operations of the daemon, and `inner.py` leaves those of GPUs on one node to NCCL; `work.py` has operations under
way, `completion.py` their futures and waits for these; `failing.py` has their error; `flight_record.py` keeps the last
operations for torch's analyser.

`hooks/` is for gradients of DDP and FSDP2, and for local steps over both. `variables.py` is for launchers that do not
set torchrun's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

if TYPE_CHECKING:
    from fusion_rt.c10d.hooks.ddp import DDPGradients, compress, ddp_hook
    from fusion_rt.c10d.hooks.fsdp import ReplicatedShards, fully_shard_in_arena
    from fusion_rt.c10d.hooks.outer import local_steps
    from fusion_rt.c10d.membership import dump_flight_record
    from fusion_rt.c10d.process_group import renew_process_group

__all__ = [
    "DDPGradients",
    "ReplicatedShards",
    "compress",
    "ddp_hook",
    "dump_flight_record",
    "fully_shard_in_arena",
    "local_steps",
    "register",
    "renew_process_group",
]

BACKEND = "fusion"
DEVICES = ["cpu", "cuda"]
_FOR_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MODULES = {
    "DDPGradients": "hooks.ddp",
    "ReplicatedShards": "hooks.fsdp",
    "compress": "hooks.ddp",
    "ddp_hook": "hooks.ddp",
    "dump_flight_record": "membership",
    "fully_shard_in_arena": "hooks.fsdp",
    "local_steps": "hooks.outer",
    "renew_process_group": "process_group",
}


def register() -> None:
    """Makes the backend known to torch, unless it is already, or this torch was built without `torch.distributed`."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=DEVICES)
        _meet_without_variables()


def _meet_without_variables() -> None:
    """Has `init_process_group` find the others under launchers, too, that do not set the variables for `env://`.

    torch has no place for this: a handler can only be registered for another scheme, which scripts would have to name.
    So it is put around torch's own, which sees no difference where it would not have failed.
    """
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    by_variables = handlers.get("env")
    if by_variables is None:
        return

    def by_variables_or_launcher(url: str, *args: Any, **options: Any) -> Iterator[Any]:
        found = by_variables(url, *args, **options)
        if _is_launchers(url):
            from fusion_rt.c10d.variables import meet

            yield meet(found)
        yield from found

    handlers["env"] = by_variables_or_launcher


def _is_launchers(url: str) -> bool:
    """Tells whether this worker's launcher has to be asked for torchrun's variables: torch lacks one for this URL, or
    they came from there before."""
    given = {name.upper() for name in parse_qs(urlparse(url).query)}
    if all(os.environ.get(name) or name in given for name in _FOR_TORCH):
        variables = sys.modules.get(f"{__name__}.variables")
        return variables is not None and variables.are_ours()
    from fusion_rt.launchers import environment

    return not environment.detect().is_alone


def _create(options: Any, backend_options: Any) -> Any:
    from fusion_rt.c10d.process_group import create

    return create(options, backend_options)


def __getattr__(name: str) -> Any:
    """Imports names when scripts use them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


register()
