"""One model from many: what to call before the model is evaluated or saved when ranks have copies of their own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusion_rt import algorithms
from fusion_rt.torch import ops
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.sync.broadcasting import broadcast_object
from fusion_rt.torch.sync.own_gradients import OwnGradients
from fusion_rt.torch.sync.replicas import DistributedReplicas

_made: weakref.WeakSet[Any] = weakref.WeakSet()
_ever = False  # has there been an optimizer in it


def register(optimizer: Any) -> Any:
    """Lets `consensus` know of an optimizer. Returns it."""
    global _ever
    _made.add(optimizer)
    _ever = True
    return optimizer


def agree_after_join(last: int) -> None:
    """All ranks have joined, `last` after all others: it alone has taken part in every exchange. So its number of steps
    and its outer optimizer become those of all ranks, which then exchange in the same steps again."""
    if not _ever:  # on no rank, since all make the same optimizers
        return
    here = runtime()
    mine = {o._exchange.name: o for o in _made if isinstance(o, DistributedReplicas) and o._exchange.is_of(here)}
    states = broadcast_object({name: optimizer.own_state() for name, optimizer in mine.items()}, last)
    for name, state in states.items():
        if name in mine:
            mine[name].load_own_state(state)


def consensus(*optimizers: Any, model: torch.nn.Module | None = None) -> None:
    """Makes all ranks' parameters equal, to the bit: the shards' or elastic home's copy where there is one, the mean of
    all ranks' otherwise. To be called on all ranks, at the same place. Does nothing about synchronous optimizers.

    Args:
        optimizers: distributed optimizers; by default all that there are, in the order of their making.
        model: its buffers of floating type (of BatchNorm) are averaged, too.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    chosen = optimizers or sorted(_made, key=lambda optimizer: optimizer._exchange.serial)
    _agree(chosen, model)
    for optimizer in chosen:
        if isinstance(optimizer, OwnGradients):
            optimizer._settled()


def _agree(chosen: Iterable[Any], model: torch.nn.Module | None) -> None:
    """Makes parameters and buffers equal."""
    if runtime().size == 1:
        return
    for optimizer in chosen:
        if isinstance(optimizer, OwnGradients):
            optimizer.drain()
    ops.barrier()  # whatever anybody has posted is where it belongs
    for optimizer in chosen:
        if isinstance(optimizer, OwnGradients):
            optimizer.agree()
    ops.barrier()
    for optimizer in chosen:
        if isinstance(optimizer, DistributedReplicas) and optimizer._spec.place is not algorithms.Place.SHARD:
            _average(slot.parameter.detach() for slot in optimizer._exchange.slots)
    if model is not None:
        average_buffers(model)


def average_buffers(model: torch.nn.Module) -> None:
    """Replaces the model's buffers of floating type, such as BatchNorm's, by their mean over all ranks."""
    _average(buffer for buffer in model.buffers() if buffer.is_floating_point())


@contextmanager
def averaged(*optimizers: Any, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Inside of this, all ranks have the same parameters, as after `consensus`; afterwards each has its own again. For
    evaluation. To be called on all ranks."""
    chosen = optimizers or sorted(_made, key=lambda optimizer: optimizer._exchange.serial)
    for optimizer in chosen:
        if isinstance(optimizer, DistributedReplicas):
            optimizer.drain()
    tensors = [slot.parameter.detach() for optimizer in chosen for slot in optimizer._exchange.slots]
    tensors += [] if model is None else [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    own = [tensor.clone() for tensor in tensors]
    _agree(chosen, model)
    try:
        yield
    finally:
        for tensor, value in zip(tensors, own, strict=True):
            tensor.copy_(value)
        for optimizer in chosen:
            if isinstance(optimizer, OwnGradients):
                optimizer._note_weights()


def consensus_distance(*optimizers: Any) -> float:
    """mean over ranks of |x_i - mean x|^2, over all parameters. To be called on all ranks.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    chosen = optimizers or sorted(_made, key=lambda optimizer: optimizer._exchange.serial)
    own = [slot.parameter.detach() for optimizer in chosen for slot in optimizer._exchange.slots]
    means = ops.grouped_allreduce(own, op=ops.Average) if own else []
    squared = sum((float(((a - b).double() ** 2).sum()) for a, b in zip(own, means, strict=True)), 0.0)
    return float(ops.allreduce(torch.tensor(squared, dtype=torch.float64), op=ops.Average))


def staleness() -> dict[str, Any]:
    """How stale contributions to homes have been, as measured by this rank's node: for its workers, `version_lag`
    (updates that the home had seen since the worker last heard from it), `clock_gap` (steps ahead of the slowest rank)
    and `age_ms` (how long a contribution waited to be read), each with `count`, `mean`, `max` and `histogram`; for the
    homes here, the number of `updates` and, by rank, of contributions that came `late`. The fourth meter,
    `consensus_distance`, takes all ranks to measure, and so is a function of its own."""
    return runtime().client.staleness()


def _average(tensors: Iterable[torch.Tensor]) -> None:
    """Replaces tensors by their means over all ranks, but those that have joined."""
    found = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in found):
        ops.grouped_allreduce_([tensor for tensor in found if tensor.dtype == dtype], op=ops.Average)
    share = runtime().size / float(ops.allreduce(torch.ones(1), op=ops.Sum))
    if share != 1.0:
        torch._foreach_mul_(found, share)
