"""The distributed optimizer whose steps are taken elsewhere: gradients go to shards, and parameters come back.

The script's optimizer only says how: its class, its arguments, and its learning rates, which go along with each
gradient. Its own state stays empty, and is with the shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from fusion_rt import algorithms, wire
from fusion_rt.client import Terms
from fusion_rt.torch import carried, ops
from fusion_rt.torch.buckets import DenseBucket
from fusion_rt.torch.carried import Carried
from fusion_rt.torch.exchange import GradientExchange
from fusion_rt.torch.memory import Memory, Place
from fusion_rt.torch.slots import Slot, memory_order
from fusion_rt.torch.wrapping import Wrapped


class WeightSlot(Slot):
    """A parameter whose gradient is posted, and which is what comes back."""

    __slots__ = ()

    def flat(self) -> carried.Array:
        """The parameter's values as they lie in a bucket."""
        value = self.parameter.detach()
        flat = value.permute(memory_order(value)).contiguous().view(-1).cpu()
        return (flat if flat.dtype in (torch.float32, torch.float64) else flat.float()).numpy()

    def spec(self) -> wire.TensorSpec:
        found = super().spec()
        return wire.TensorSpec(found.name, found.dtype, found.shape, found.together, 0, self._exchange.group_of(self))

    def assign(self, reduced: torch.Tensor) -> None:
        assert isinstance(self.bucket, DenseBucket)
        value = self.parameter.detach()
        reduced = reduced.to_dense() if reduced.is_sparse else reduced
        if self.bucket.added:
            value.add_(reduced)
        else:
            value.copy_(reduced)

    def _is_direct(self) -> bool:
        return False

    def _buffer(self) -> torch.Tensor:
        return torch.empty_like(self.parameter)


class ShardMemory(Memory):
    """Of shards: what has been carried waits for a plan, which says where the homes are."""

    homes = True
    _arriving: tuple[Carried, Carried, bool] | None = None  # from another membership epoch, until there is a plan

    def settle(self, common: Carried, mine: Carried, loads: bool) -> None:
        if algorithms.parse(self._manner.reduction.algorithm).place is algorithms.Place.SHARD:
            self._arriving = common, mine, loads
        else:
            super().settle(common, mine, loads)

    def _still_carried(self) -> Carried | None:
        if self._arriving is None:
            return None
        common, mine, loads = self._arriving
        return replace(mine, homes=common.homes, rates=common.rates) if loads else mine

    def planned(self, place: Place, plan: wire.Plan, slots: Mapping[str, Slot]) -> None:
        """Gives homes and senders what was carried, before anything comes to them, and before the homes' seed."""
        if self._arriving is None:
            return
        assert self._feedback is not None
        common, mine, loads = self._arriving
        here, state = place.here, dict[str, Any]()
        self._feedback.resume(common.rates)
        sizes = self.sizes()
        owed = {name: value for name, value in mine.residuals.items() if sizes.get(name) == value.size}
        values = {name: slot.flat() for name, slot in slots.items() if isinstance(slot, WeightSlot)} if loads else {}
        ranks = len(here.client.process_sets[plan.process_set].ranks)
        for bucket, home in zip(plan.buckets, plan.homes, strict=True):
            if home != here.client.welcome.node:
                state |= carried.sender_state(bucket, here.rank, owed, mine.velocities)
                owed = {name: value for name, value in owed.items() if name not in {t.name for t in bucket.tensors}}
            elif loads:
                state |= carried.home_state(bucket, ranks, common.homes, values)
        self._owed = owed
        if state:
            with here.allocating:
                here.client.load_state(plan.process_set, place.group, state)
        self._arriving = None
        ops.barrier(process_set=place.ranks)


class ShardExchange(GradientExchange):
    """Gradients out, parameters in.

    Attributes:
        samples: how many samples the next gradients come from.
    """

    memory_type = ShardMemory
    samples = 1
    _seeding = False

    def _make_plan(self) -> None:
        super()._make_plan()
        here = self._runtime
        members = here.client.process_sets[self._process_set(here)].ranks
        if here.rank == members[0]:
            self._seed()

    def _seed(self) -> None:
        """The homes begin with this rank's parameters. The others have the same, as scripts see to."""
        buckets = [bucket for bucket in self._buckets or [] if isinstance(bucket, DenseBucket)]
        self._seeding = True
        try:
            for bucket in buckets:
                for slot in bucket.slots:
                    assert slot.view is not None
                    slot.view.copy_(slot.parameter.detach())
                bucket.submit()
            for bucket in buckets:
                bucket.abandon()
                bucket.rewind()
        finally:
            self._seeding = False

    def pull(self) -> None:
        """Takes what the homes have, and gives them nothing. All that was posted has to have been answered."""
        if self._buckets is None:
            return
        samples, self.samples = self.samples, 0
        buckets = [bucket for bucket in self._buckets if isinstance(bucket, DenseBucket)]
        try:
            for bucket in buckets:
                bucket.submit()
            for bucket in buckets:
                bucket.receive()
                bucket.rewind()
        finally:
            self.samples = samples

    def _terms(self, slots: Sequence[Slot]) -> Terms:
        if self._seeding:
            return Terms(seed=True)
        rates = tuple(self._trained.group_rates())
        return Terms(super()._terms(slots).rescale, rates, self.samples)


class DistributedShards(Wrapped):
    """What is put in front of the script's optimizer class when shards take its steps."""

    _exchange: ShardExchange

    @property
    def samples(self) -> int:
        """How many samples this rank's next gradients come from, for algorithms that weigh them."""
        return self._exchange.samples

    @samples.setter
    def samples(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"gradients come from at least one sample, not {count}")
        self._exchange.samples = count

    def synchronize(self) -> NoReturn:
        """Raises `RuntimeError`: gradients are on their way to the shards, and come back as parameters only."""
        raise RuntimeError(
            "with this algorithm gradients go to shards, and only parameters come back: there are no gradients to "
            "synchronize, and none to clip; use algorithm='allreduce' for that"
        )

    skip_synchronize = synchronize

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Posts the gradients that have not been posted yet, and waits for the parameters.

        Raises:
            HorovodInternalError: it failed.
        """
        self._exchange.steps.begin()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._exchange.synchronize()
        self._script_optimizer._opt_called = True  # type: ignore[attr-defined]
        self._exchange.steps.end()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already

    def drain(self) -> None:
        """Nothing is under way after a step."""

    def agree(self) -> None:
        """Takes the parameters that the shards have. To be called on all ranks, between two barriers."""
        self._exchange.pull()


def optimizer_spec(optimizer: torch.optim.Optimizer) -> wire.OptimizerSpec:
    """The optimizer for a shard.

    Raises:
        ValueError: a shard cannot have it.
    """
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        raise ValueError(
            f"with this algorithm shards take the steps, by an optimizer of torch.optim, which {kind.__module__}."
            f"{kind.__name__} is not; use one of these, or another algorithm"
        )
    if len(optimizer.param_groups) > wire.MAX_GROUPS:
        raise ValueError(f"the optimizer has {len(optimizer.param_groups)} parameter groups, and shards can have "
                         f"{wire.MAX_GROUPS}")  # fmt: skip
    groups = []
    for group in optimizer.param_groups:
        arguments = {
            name: value
            for name, value in group.items()
            if name not in ("params", "lr", "initial_lr", "param_names", "fused", "foreach") and value is not None
        }
        try:
            groups.append(json.dumps(arguments))
        except TypeError as error:
            raise ValueError(
                f"a shard cannot have the optimizer {kind.__name__} with these arguments: {error}"
            ) from None
    return wire.OptimizerSpec(kind.__name__, tuple(groups))
