"""Functions that make one model of the ranks' own copies, to be called before it is evaluated or saved; and the part of
optimizers in a `join`, before a rank waits for the others and when all have come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set, takes_part
from fusion_rt.torch.core.runtime import Runtime, after_join, before_join, runtime
from fusion_rt.torch.core.tensors import dtype_name
from fusion_rt.torch.ops.broadcast import barrier, broadcast_async_
from fusion_rt.torch.ops.handles import synchronize
from fusion_rt.torch.ops.objects import allgather_object, broadcast_object
from fusion_rt.torch.ops.reduce import allreduce, grouped_allreduce, grouped_allreduce_
from fusion_rt.torch.ops.signatures import Average, Sum, id_of
from fusion_rt.torch.sync.at_step.at_step import AtStep
from fusion_rt.torch.sync.at_step.local_steps import LocalSteps
from fusion_rt.torch.sync.in_node import stand_in
from fusion_rt.torch.sync.step_schedule import Schedule, everyone
from fusion_rt.torch.sync.synchroniser import Synchroniser

_POLL = 1e-3  # seconds


def take_part_before_join(here: Runtime) -> None:
    """Contributes neutral values, before this worker joins, to the steps that other ranks of its node have begun and
    cannot take without it (`node.ledger`); to all at once, since others may take them in any order.

    Raises:
        HorovodInternalError: one of them failed, on all ranks.
    """
    standing = []
    for schedule in everyone():
        sync = schedule.sync
        if not sync.is_of(here) or sync.plan.node is None:
            continue
        schedule.finish()
        if sync.plan.node.withdraw():
            standing.append(sync)
            for bucket in sync.plan.buckets:
                if not bucket.sparse and not bucket.sent:
                    with sync.poster.alone:
                        stand_in(bucket)
                    sync.poster.add(bucket)
    gathering = []
    while standing:
        for sync in list(standing):
            if sync.poster.failure is not None:
                raise sync.poster.failure
            if sync.plan.node is not None:
                sync.plan.node.watch()
            buckets = [bucket for bucket in sync.plan.buckets if not bucket.sparse]
            if not sync.poster and all(bucket.has_answer() for bucket in buckets):
                for bucket in buckets:
                    bucket.await_result()
                sync.gather(buckets)
                gathering.append(sync)
                standing.remove(sync)
        time.sleep(_POLL)
    for sync in gathering:
        for bucket in sync.plan.buckets:
            if bucket.stage is not None:
                bucket.stage.await_gathered(bucket)
        sync.gathered()
        sync.end_step()


def agree_after_join(last: int) -> None:
    """Gives all ranks, which have joined, the number of steps and the outer optimizer of `last`, which joined after all
    others and alone has taken part in every exchange. All then exchange in the same steps again.

    Ranks tell each other of their optimizers in one operation, by name: one that a script has dropped may be there on
    some ranks until Python looks for garbage.
    """
    here = runtime()
    for schedule in everyone():
        if _is_alike(schedule):
            schedule.finish()
    told = allgather_object({each.sync.name: (each.sync.exchanges, each.local) for each in everyone()})
    for schedule in everyone():
        if _is_alike(schedule):
            _note_missed(schedule, here, told)
        schedule.sync.count_anew()
        schedule.joined()
    if not any(local for optimizers in told for _, local in optimizers.values()):
        return
    local = [each for each in everyone() if isinstance(each, LocalSteps) and each.local and each.sync.is_of(here)]
    states = broadcast_object({schedule.sync.name: schedule.own_state() for schedule in local}, last)
    for schedule in local:
        if schedule.sync.name in states:
            schedule.rejoin(states[schedule.sync.name])


def _is_alike(schedule: Schedule) -> bool:
    """Returns whether the ranks of an optimizer are alike after each exchange."""
    algorithm, ranks = schedule.sync.options.algorithm, schedule.sync.options.process_set
    return schedule.hears and algorithm.synchronous and not algorithm.at_homes and takes_part(ranks)


def _note_missed(schedule: Schedule, here: Runtime, told: Sequence[Mapping[str, tuple[int, bool]]]) -> None:
    """Has an optimizer note which of its ranks have missed some exchanges; `told`: by each rank, of its optimizers."""
    sync = schedule.sync
    ranks = here.client.process_sets[id_of(here, sync.options.process_set, "allgather")].ranks
    if all(sync.name in told[rank] for rank in ranks):
        schedule.note_missed({rank: told[rank][sync.name][0] for rank in ranks}, here.rank)


before_join.append(take_part_before_join)
after_join.append(agree_after_join)


def consensus(*optimizers: Any, model: torch.nn.Module | None = None) -> None:
    """Makes all ranks' parameters equal, to the bit: the shards' or elastic home's copy where there is one, the mean of
    all ranks' otherwise. Call it on all ranks, at the same place.

    After a `join`, ranks that have missed exchanges of a synchronous algorithm do not count. Where gradients are
    all-reduced, all ranks then get the parameters of one that has missed none; else these do not change.

    Args:
        optimizers: distributed optimizers; by default all that there are, in the order of their making.
        model: its buffers of floating type (of BatchNorm) are averaged, too.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    chosen = _chosen(optimizers)
    _agree(chosen, model)
    for schedule in chosen:
        schedule.settled()


def _chosen(optimizers: Sequence[Any]) -> list[Schedule]:
    """Returns the schedules of these optimizers; without any, of all whose ranks have, or may have, different
    parameters."""
    chosen = [optimizer._schedule for optimizer in optimizers]
    return chosen or [schedule for schedule in everyone() if schedule.own_gradients or schedule.leader is not None]


def _agree(chosen: Iterable[Schedule], model: torch.nn.Module | None) -> None:
    """Makes parameters and buffers equal."""
    if runtime().size == 1:
        return
    for schedule in chosen:
        schedule.finish()
        schedule.drain()
    barrier()  # all posts are where they belong
    for schedule in chosen:
        if isinstance(schedule, AtStep):
            schedule.agree()
    barrier()
    for schedule in chosen:
        sync = schedule.sync
        if isinstance(schedule, LocalSteps) and schedule.local and not sync.options.algorithm.at_shards:
            parameters = [slot.parameter.detach() for slot in sync.slots]
            counts, weights = not schedule.behind, schedule.weights()
            _average(parameters, sync.options.process_set, counts=counts, weights=weights)
        elif not schedule.local and schedule.leader is not None:
            _copy_from(schedule.leader, sync)
    if model is not None:
        average_buffers(model)


def _copy_from(root: int, sync: Synchroniser) -> None:
    """Replaces the parameters of an optimizer by those of a rank."""
    handles = [
        broadcast_async_(slot.parameter.detach(), root, f"{sync.name}.consensus.{slot.name}", sync.options.process_set)
        for slot in sync.slots
    ]
    for handle in handles:
        synchronize(handle)


def average_buffers(model: torch.nn.Module) -> None:
    """Replaces the model's buffers of floating type, such as BatchNorm's, by their mean over all ranks. Call it on all
    ranks, at the same place."""
    _average((buffer for buffer in model.buffers() if buffer.is_floating_point()), name="average_buffers")


@contextmanager
def averaged(*optimizers: Any, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Context for evaluation, in which all ranks have the same parameters, as after `consensus`; afterwards each has
    its own again. Use it on all ranks."""
    chosen = _chosen(optimizers)
    for schedule in chosen:
        schedule.finish()
        if schedule.local:
            schedule.drain()
    tensors = [slot.parameter.detach() for schedule in chosen for slot in schedule.sync.slots]
    tensors += [] if model is None else [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    own = [tensor.clone() for tensor in tensors]
    _agree(chosen, model)
    try:
        yield
    finally:
        for tensor, value in zip(tensors, own, strict=True):
            tensor.copy_(value)
        for schedule in chosen:
            schedule.note_weights()


def consensus_distance(*optimizers: Any) -> float:
    """Returns the mean over ranks of |x_i - mean x|^2, over all parameters. Call it on all ranks.

    Args:
        optimizers: distributed optimizers; by default all that there are.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    chosen = [optimizer._schedule for optimizer in optimizers] or [each for each in everyone() if each.hears]
    squared = 0.0
    for schedule in chosen:
        schedule.finish()
        sync = schedule.sync
        if takes_part(sync.options.process_set):
            own = [slot.parameter.detach() for slot in sync.slots]
            means = grouped_allreduce(own, op=Average, process_set=sync.options.process_set) if own else []
            squared += sum(float(((a - b).double() ** 2).sum()) for a, b in zip(own, means, strict=True))
    return float(allreduce(torch.tensor(squared, dtype=torch.float64), op=Average))


def staleness() -> dict[str, Any]:
    """Returns the staleness of contributions to homes, as measured by this rank's node: for its workers, `version_lag`
    (updates that the home had seen since the worker last heard from it), `clock_gap` (steps ahead of the slowest rank)
    and `age_ms` (how long a contribution waited to be read), each with `count`, `mean`, `max` and `histogram`; for the
    homes here, the number of `updates` and, by rank, of contributions that came `late`. The fourth measure,
    `consensus_distance`, needs all ranks, and so is a function of its own."""
    return runtime().client.staleness()


def _average(
    tensors: Iterable[torch.Tensor],
    ranks: ProcessSet = global_process_set,
    name: str = "average of parameters",
    counts: bool = True,
    weights: Sequence[float] = (),
) -> None:
    """Replaces tensors by their means over the ranks that have them, but those that have joined.

    Args:
        name: of the work, in warnings and traces.
        counts: this rank's are a part of the means.
        weights: how much this rank counts in each mean; by default all ranks count alike.
    """
    if not takes_part(ranks):
        return
    found = list(tensors)
    if not counts:
        torch._foreach_zero_(found)
    if weights:
        torch._foreach_mul_(found, list(weights))
        mine = torch.tensor(weights, dtype=torch.float64)
        means = allreduce(mine, name=f"{name}: weights", op=Average, process_set=ranks)
    for dtype in dict.fromkeys(tensor.dtype for tensor in found):
        alike = [tensor for tensor in found if tensor.dtype == dtype]
        grouped_allreduce_(alike, name=f"{name}, {dtype_name(dtype)}", op=Average, process_set=ranks)
    taking_part = allreduce(torch.full([1], float(counts)), name=f"{name}: ranks", op=Sum, process_set=ranks)
    share = (ranks.size() or 1) / float(taking_part)
    if share != 1.0:
        torch._foreach_mul_(found, share)
    if weights:
        torch._foreach_div_(found, (means * share).tolist())
