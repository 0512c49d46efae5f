"""A distributed optimizer in a `TorchState`: its own state, and the memory of codecs and homes on its node.

The first rank of each node keeps that at each commit (`carried.py`). In the next membership epoch nodes have other
numbers, and homes other places, so `deal` brings together what those have who are still there:

- each residual is loaded on the node of the worker that kept it, or, where several were kept on nodes that are one now,
  sent along with the next gradients of the others;
- the memory of homes goes to the nodes that have them in the new plan. Of parameters whose home is gone, it is
  that of the home's mirror (`mirrors.py`), which is as old as the commit; if that is gone, too, their optimizer's state
  begins anew.

Residuals of nodes that died are gone with them. Before nodes leave in good order, `hand_over` adds up all nodes'
residuals, and the first worker of the next epoch gets the sum.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fusion_rt.algorithms import AlgorithmError
from fusion_rt.core.errors import MixingError
from fusion_rt.settings import Settings
from fusion_rt.torch.core.process_sets import global_process_set
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.elastic import mirrors
from fusion_rt.torch.elastic.commits import Saver
from fusion_rt.torch.ops.objects import allgather_object, broadcast_object
from fusion_rt.torch.ops.reduce import allreduce
from fusion_rt.torch.ops.signatures import Adasum, Sum
from fusion_rt.torch.sync import carried
from fusion_rt.torch.sync.broadcasting import Item, OptimizerState, load_exactly
from fusion_rt.torch.sync.carried import Arrays, CarriedState
from fusion_rt.torch.sync.checkpoint import Checkpoint
from fusion_rt.torch.sync.wrapped import Wrapped

_OWN = "own"  # the state of replicas besides the script's optimizer


class DistributedHandler(Saver):
    """Saves, restores and syncs a distributed optimizer.

    Args:
        value: the optimizer.
    """

    _saves = ("_saved", "_kept", "_mirrored")

    def __init__(self, value: Wrapped) -> None:
        self.value = value
        self._pending: CarriedState | None = None  # restored or handed over, and not dealt yet
        self._mirrored: dict[str, Arrays] = {}  # of another node's homes, as of the last commit
        self._mirrors = Settings.from_env().mirror_shards != "off"
        self.save()

    def save(self) -> None:
        """Saves the present state. Results under way are taken first, which may change the parameters."""
        self.drain()
        self._saved: dict[str, Any] = {"plain": copy.deepcopy(self.value.plain_state_dict())}
        self._saved[_OWN] = copy.deepcopy(self.value.own_state())
        self._kept = self._checkpoint.carry() if self._pending is None else self._pending
        if self._checkpoint.is_arriving:  # a worker of each node has kept all that there is just now
            self._mirrored = {}

    def mirror(self) -> None:
        """Has another node keep the saved state of this node's homes. An operation on all ranks.

        Raises:
            HorovodInternalError: a rank is gone.
        """
        if self._mirrors and self._checkpoint.has_shards and mirrors.are_possible():
            kept = None if self._checkpoint.is_arriving else self._kept
            self._mirrored = mirrors.exchange({} if kept is None else kept.homes)

    @property
    def carries(self) -> bool:
        """Tells whether nodes remember something of their own at a commit; the same on all ranks."""
        return self._checkpoint.carries

    @property
    def is_alike(self) -> bool:
        """Tells whether all ranks have the same between two steps: they have all-reduced the gradients of each. With
        `Adasum` each takes its own step first, and has momenta of its own."""
        options = self.value._sync.options
        is_global = options.process_set is global_process_set
        return is_global and options.algorithm.sums_gradients and self.value.op != Adasum

    def forget(self) -> None:
        """Forgets the kept state: it is of another commit than that from which all go on."""
        self._pending, self._mirrored = None, {}

    def restore(self) -> None:
        """Restores the saved state; codecs and homes go back in `deal`."""
        # A copy, because an optimizer goes on working on the very tensors that it is given.
        load_exactly(self.value, copy.deepcopy(self._saved["plain"]))
        self.value.load_own_state(copy.deepcopy(self._saved[_OWN]))
        self._pending = self._kept

    def prepare(self) -> None:
        """Makes the parameters of replicas, before they are given to all, the mean of those of ranks that have taken
        steps. An operation on all ranks."""
        if self.value._schedule.local:
            _average(self.value)

    def items(self, name: str) -> list[Item]:
        """Returns what all ranks are to have from one of them. `name`: of tensors."""
        items: list[Item] = [OptimizerState(self.value, name)]
        if self.value._schedule.local:
            items.append(Item(self.value.own_state, self.value.load_own_state))
        return items

    def hand_over(self, leaving: bool) -> None:
        """Saves the state of codecs and homes before all leave a membership epoch in good order.

        Args:
            leaving: some nodes will not be in the next; the same on all ranks, and an operation on all of them, if so.

        Raises:
            HorovodInternalError: a rank is gone.
        """
        self.value._schedule.discard()
        self.drain()
        mine = self._checkpoint.carry() if self._pending is None else self._pending
        if leaving and self._checkpoint.carries:
            mine = _summed(self._checkpoint, mine)
        self._pending = mine

    def deal(self) -> None:
        """Loads, in a new membership epoch, the saved state of codecs and homes. An operation on all ranks.

        Raises:
            HorovodInternalError: a rank is gone, or a daemon cannot use it.
        """
        checkpoint = self._checkpoint
        if not checkpoint.carries:
            return
        mine, self._pending = self._pending, None
        node = runtime().client.welcome.node
        told = allgather_object((node, mine is not None, mine is not None and mine.total is not None))
        holders = [rank for rank, (_, holds, _) in enumerate(told) if holds]
        if not holders:
            checkpoint.forget()
            return
        root, handed = holders[0], told[holders[0]][2]
        common: CarriedState = broadcast_object(None if mine is None else _common(mine), root)
        if not handed:
            homes = carried.united(allgather_object({} if mine is None else mine.homes))
            if self._mirrors and checkpoint.has_shards:
                homes = mirrors.fill(homes, self._mirrored)
            common = replace(common, homes=homes)
        own = CarriedState() if mine is None else mine
        if handed:
            residuals, velocities = own.total if own.total is not None and runtime().rank == root else ({}, {})
            own = CarriedState(residuals, velocities)
        here = [rank for rank, (other, _, _) in enumerate(told) if other == node]
        loader = next((rank for rank in here if rank in holders), here[0])
        loads = runtime().rank == loader
        # Common state is kept by the loader of each node, until it is where it belongs.
        common = common if loads else replace(common, homes={})
        checkpoint.settle(common, replace(own, homes={}, total=None, meant=common.meant), loads)

    def why_unfit(self) -> str:
        """Returns why as many ranks as there are cannot use this optimizer; empty if they can. One of a process set
        belongs to the ranks of one membership."""
        options = self.value._sync.options
        try:
            if options.process_set is global_process_set:
                options.check(runtime().size)
        except (AlgorithmError, MixingError) as error:
            return str(error)
        return ""

    @property
    def _checkpoint(self) -> Checkpoint:
        return self.value._sync.checkpoint

    def drain(self) -> None:
        """Waits for results under way, and takes them, which may change the parameters."""
        self.value._schedule.drain()


def _common(mine: CarriedState) -> CarriedState:
    """Returns the common start of all nodes; of velocities it has the names only."""
    named = {name: np.zeros(0, np.float32) for name in mine.velocities}
    homes = {} if mine.total is None else mine.homes
    return CarriedState(common=mine.common, buckets=mine.buckets, velocities=named, homes=homes, meant=mine.meant)


def _summed(checkpoint: Checkpoint, mine: CarriedState | None) -> CarriedState:
    """Returns this worker's state, with the sums over all workers."""
    kept = mine or CarriedState()
    has = allgather_object((bool(kept.residuals), bool(kept.velocities)))
    sizes = checkpoint.sizes()
    total = tuple(
        _sum(arrays, sizes) if any(flags[kind] for flags in has) else {}
        for kind, arrays in enumerate((kept.residuals, kept.velocities))
    )
    first = next((rank for rank, flags in enumerate(allgather_object(mine is not None)) if flags), 0)
    shared: CarriedState = broadcast_object(_common(replace(kept, total=None)), first)
    homes = carried.united(allgather_object(kept.homes))
    return replace(
        kept, common=shared.common, buckets=shared.buckets, meant=shared.meant, homes=homes, total=(total[0], total[1])
    )


def _sum(memory: Arrays, sizes: dict[str, int]) -> Arrays:
    """Returns the sums over all ranks, where each has some of the tensors."""
    names = sorted(sizes)
    parts = [torch.from_numpy(memory[n]) if n in memory else torch.zeros(sizes[n]) for n in names]
    summed = allreduce(torch.cat(parts), name="elastic.hand_over", op=Sum)
    pieces = torch.split(summed, [sizes[name] for name in names])
    return {name: piece.numpy() for name, piece in zip(names, pieces, strict=True)}


def _average(optimizer: Wrapped) -> None:
    """Replaces the parameters by the mean of those of all ranks that have taken steps, if any has."""
    counts = float((optimizer.own_state() or {"taken": 0})["taken"] > 0)
    total = float(allreduce(torch.tensor(counts), name="elastic.average", op=Sum))
    if not total:
        return
    for slot in optimizer._sync.slots:
        value = slot.parameter.detach()
        value.copy_(allreduce(value * counts, name=f"elastic.average.{slot.name}", op=Sum) / total)
