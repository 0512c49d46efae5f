"""Python objects, from one rank to all or from all to all.

Objects travel pickled, between the workers of one job only: the daemon, and whoever could reach it over a
network, never unpickles anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from cloudpickle import dumps as _dumps  # type: ignore[import-untyped]  # also takes lambdas, and classes of __main__

from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.ops.broadcast import broadcast_, broadcast_async_
from fusion_rt.torch.ops.gather import gather
from fusion_rt.torch.ops.handles import synchronize

_LENGTH = 8  # bytes that say how long an object is
_FIRST = 4096  # bytes of its first message: of most objects it is the only one


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcasts the object of rank `root_rank`.

    Args:
        obj: anything that can be pickled; only the root's counts.
        root_rank: whose object is broadcast.
        name: pairs the ranks' operations.
        process_set: the ranks that take part.

    Returns:
        On the root the object itself, elsewhere a copy.

    Raises:
        ValueError: there is no such root.
        HorovodInternalError: it failed, on all ranks.
    """
    is_root = runtime().rank == root_rank
    data = _dumps(obj) if is_root else b""
    first = torch.zeros(_FIRST, dtype=torch.uint8)
    if is_root:
        head = len(data).to_bytes(_LENGTH, "little") + data[: _FIRST - _LENGTH]
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    broadcast_(first, root_rank, name, process_set)
    came = first.numpy().tobytes()
    length = int.from_bytes(came[:_LENGTH], "little")
    begin = came[_LENGTH : _LENGTH + length]
    if length > len(begin):
        rest = torch.empty(length - len(begin), dtype=torch.uint8)
        if is_root:
            rest = torch.frombuffer(bytearray(data[len(begin) :]), dtype=torch.uint8)
        broadcast_(rest, root_rank, f"{name}.rest" if name else None, process_set)
        begin += b"" if is_root else rest.numpy().tobytes()
    return obj if is_root else pickle.loads(begin)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Gathers the objects of all ranks, in the order of ranks.

    Args:
        obj: anything that can be pickled.
        name: pairs the ranks' operations.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    here = runtime()
    gathering = gather(here, torch.frombuffer(bytearray(_dumps(obj)), dtype=torch.uint8), name, process_set)
    gathered = gathering.result(here)
    parts = torch.split(gathered, list(gathering.operation.sizes))
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def broadcast_all(pairs: Iterable[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    """Replaces tensors, with their names, by those of one rank."""
    handles = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in pairs]
    for handle in handles:
        synchronize(handle)
