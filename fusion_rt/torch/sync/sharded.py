"""The distributed optimizer whose steps are taken elsewhere: gradients go to shards, and parameters come back.

The script's optimizer only says how: its class, its arguments, and its learning rates, which go along with each
gradient. Its own state stays empty, and is with the shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from fusion_rt import algorithms, wire
from fusion_rt.client import Terms
from fusion_rt.errors import HorovodInternalError
from fusion_rt.torch import ops
from fusion_rt.torch.core.runtime import Runtime, runtime
from fusion_rt.torch.sync import carried
from fusion_rt.torch.sync.broadcasting import allgather_object
from fusion_rt.torch.sync.buckets import DenseBucket
from fusion_rt.torch.sync.carried import Carried
from fusion_rt.torch.sync.manner import Manner
from fusion_rt.torch.sync.memory import Memory, Place
from fusion_rt.torch.sync.own_gradients import OwnGradients, Weights, not_finite
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.slots import Slot, memory_order
from fusion_rt.torch.sync.synchroniser import GradientExchange
from fusion_rt.trace_format import Kind

_GRADIENT = int(Kind.GRADIENT)


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
        if self.bucket.added:
            value.add_(reduced)
        else:
            value.copy_(reduced)

    def arrived(self, parameter: torch.Tensor) -> None:
        """A gradient is only recorded: it is posted by `step()`, as the script has left it by then."""
        steps = self._exchange.steps
        steps.first_gradient()
        steps.trace.record(_GRADIENT, self.name, self.nbytes, steps.number)

    def outgoing(self) -> torch.Tensor | None:
        value = self.value()
        return value.to_dense() if value is not None and value.is_sparse else value

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

    def move(self) -> None:
        """Has homes, and what their workers have not sent, go on in the next plan, of other buckets. An operation on
        all ranks, when nothing is under way."""
        place = self._exchange.place()
        assert place is not None
        assert self._feedback is not None
        ops.barrier(process_set=place.ranks)  # nobody posts to these homes any more
        loads = place.here.rank == place.nodes()[place.here.client.welcome.node][0]
        mine = self.carry() or Carried()
        homes = carried.united(allgather_object(mine.homes, process_set=place.ranks))
        self._arriving = Carried(homes=homes, rates=dict(self._feedback.rates)), replace(mine, homes={}), loads

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
    """What slots have is posted, and what they get comes back: from the homes of shards, from replicas' homes, or from
    all ranks that take part.

    Attributes:
        spec: the algorithm.
        samples: how many samples the next gradients come from.
        under_way: something has been posted and not been collected.
        weights: parameters as they were left by the last step; noted where the algorithm has others elsewhere.
        share: by what the last mean is multiplied to be that over those ranks which have contributed, and not joined.
    """

    memory_type = ShardMemory
    samples = 1

    def __init__(self, manner: Manner, passes: int, trained: Trained) -> None:
        self.spec = algorithms.parse(manner.reduction.algorithm)
        self.under_way = False
        self.weights = Weights()
        self.share = 1.0
        self._said = Terms()  # with each bucket
        self._arguments: list[dict[str, Any]] = []  # of the optimizer's groups, as shards have them
        self._contributors: int | None = None  # the handle of the sum of ones of all ranks that post
        super().__init__(manner, passes, trained)

    def post(self, samples: int | None = None) -> None:
        """Posts what slots have; nothing, as a contribution that only counts, with `samples=0`.

        Raises:
            HorovodInternalError: it failed.
        """
        began = time.perf_counter()
        self.begin()
        self.idle = True  # nothing of a step is done before its `step()`
        if self._buckets is None:
            self._make_plan()
        gradients = self.spec.signal is algorithms.Signal.GRADIENT
        rates = tuple(self._trained.group_rates()) if gradients else ()
        self._submit_all(Terms(rates=rates, samples=self.samples if samples is None else samples))
        if self.spec.place is algorithms.Place.NOWHERE and self._buckets:
            name, whose = f"{self._group}.contributors", self._manner.process_set
            self._contributors = ops.allreduce_async(torch.ones(1), name=name, op=ops.Sum, process_set=whose)
        self.under_way = True
        self._last_waited = time.perf_counter() - began

    def collect(self) -> None:
        """Waits for the answers to what is under way, and has slots take them.

        Raises:
            HorovodInternalError: it failed.
        """
        if not self.under_way:
            return
        began = time.perf_counter()
        self.under_way = False
        try:
            self.share = self._share_of_mean()
            for bucket in self.dense:
                bucket.receive()
            self._steps += 1
        finally:
            self._end_step()
        self._last_waited += time.perf_counter() - began
        self._waited += self._last_waited

    def pull(self) -> None:
        """Takes what the homes have, and gives them nothing. All that was posted has to have been answered."""
        self._submit_all(Terms(kind="ask"))
        for bucket in self.dense:
            bucket.receive()
            bucket.rewind()

    def reseed(self) -> None:
        """Has the homes go on with the parameters of the first rank; what is under way is forgotten. To be called on
        all ranks."""
        self.discard()
        if self.spec.place is algorithms.Place.SHARD:
            ops.barrier(self._manner.process_set)  # nobody posts any more
            if self._is_first():
                self._give_parameters("reseed")
            ops.barrier(self._manner.process_set)

    def discard(self) -> None:
        """Forgets what is under way, and its answer."""
        if not self.under_way:
            return
        self.under_way = False
        with contextlib.suppress(HorovodInternalError):  # whatever becomes of it: nobody is interested any more
            self._share_of_mean()
        for bucket in self.dense:
            with contextlib.suppress(HorovodInternalError):
                bucket.abandon()
        self._end_step()

    def follow(self) -> None:
        """Has slots for the parameters that are trained now, before the step that changes them is taken. Where that are
        others than before it is an operation on all ranks."""
        if list(map(id, self._trained.tensors())) == list(self._slots):
            return
        if self.is_of(runtime()):
            self.collect()
            if isinstance(self.memory, ShardMemory) and self.spec.place is algorithms.Place.SHARD:
                self.memory.move()
        self._give_up_plan(runtime())
        self._watch(self._trained.named())

    @property
    def name(self) -> str:
        """The same on all ranks, and no other exchange's."""
        return self._group

    @property
    def keeps_weights(self) -> bool:
        """Whether the algorithm has parameters elsewhere, to which those of the script are compared or changed."""
        return self.spec.place is algorithms.Place.SHARD or self.spec.signal is algorithms.Signal.DELTA

    def check_arguments(self) -> None:
        """Raises `ValueError` if the script has changed what the shards know since there has been a plan."""
        optimizer = self._trained.optimizer()
        if self.is_of(runtime()) and _arguments_of(optimizer)[: len(self._arguments)] != self._arguments:
            raise ValueError(
                f"an argument of the optimizer other than its learning rate has changed, and with {self.spec} the "
                "shards have what it was when the buckets were planned; leave it (as with cycle_momentum=False of "
                "schedulers), or take an algorithm whose ranks take their own steps"
            )

    def _submit_all(self, terms: Terms) -> None:
        self._said = terms
        for bucket in self.dense:
            if terms.kind == "post" and terms.samples:
                self._send(bucket)
            else:
                bucket.submit()
                bucket.sent = True
        while self.copying:
            self.copying.popleft().post(wait=True)

    def _terms(self, slots: Sequence[Slot]) -> Terms:
        # A residual of gradients is rescaled when the rate changes; one of parameters or their changes is not.
        if self._said.kind == "post" and self.spec.signal is algorithms.Signal.GRADIENT:
            return self._said._replace(rescale=super()._terms(slots).rescale)
        return self._said

    def _share_of_mean(self) -> float:
        """See `share`."""
        if self._contributors is None:
            return 1.0
        handle, self._contributors = self._contributors, None
        return (self._manner.process_set.size() or 1) / float(ops.synchronize(handle))

    def _give_up_plan(self, here: Runtime) -> None:
        self.under_way, self._contributors = False, None
        self.weights.forget()
        super()._give_up_plan(here)

    def _make_plan(self) -> None:
        if self.spec.signal is algorithms.Signal.GRADIENT:
            optimizer = optimizer_spec(self._trained.optimizer())
            self._arguments = _arguments_of(self._trained.optimizer())
            reduction = msgspec.structs.replace(self._manner.reduction, optimizer=optimizer)
            self._manner = dataclasses.replace(self._manner, reduction=reduction)
        super()._make_plan()
        if self.spec.place is algorithms.Place.SHARD and self._is_first():
            self._give_parameters("seed")  # the others have the same, as scripts see to

    def _is_first(self) -> bool:
        here = self._runtime
        return here.rank == here.client.process_sets[self._process_set(here)].ranks[0]

    def _give_parameters(self, kind: wire.PostKind) -> None:
        for bucket in self.dense:
            for slot in bucket.slots:
                assert slot.view is not None
                slot.view.copy_(slot.parameter.detach())
        self._submit_all(Terms(kind=kind))
        for bucket in self.dense:
            bucket.abandon()
            bucket.rewind()


class DistributedShards(OwnGradients):
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Posts the gradients as the script has left them, and waits for the parameters.

        If a gradient of this rank is not finite, it contributes nothing to this step, and takes the parameters; that is
        warned of, unless a `GradScaler` knows it.

        Raises:
            HorovodInternalError: it failed.
            ValueError: the script has set a parameter, or an argument of the optimizer that the shards have, since the
                last step.
        """
        exchange = self._exchange
        exchange.steps.begin()
        exchange.follow()
        self._check_weights()
        exchange.check_arguments()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        overflowed = self._overflowed()
        if not overflowed and (name := not_finite(exchange.slots)):
            overflowed = True
            warnings.warn(
                f"the gradient of {name!r} is not finite on this rank, which therefore contributes nothing to this "
                f"step of {exchange.spec}",
                stacklevel=2,
            )
        exchange.post(samples=0 if overflowed else None)
        exchange.collect()
        self._note_weights()
        self._script_optimizer._opt_called = True  # type: ignore[attr-defined]
        exchange.steps.end()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already

    def drain(self) -> None:
        """Nothing is under way after a step. Raises `ValueError` if the script has set a parameter since."""
        self._check_weights()

    def agree(self) -> None:
        """Takes the parameters that the shards have. To be called on all ranks, between two barriers."""
        self._exchange.pull()


def optimizer_spec(optimizer: torch.optim.Optimizer) -> wire.OptimizerSpec:
    """The optimizer for a shard.

    Raises:
        ValueError: a shard cannot have it.
    """
    kind: type[torch.optim.Optimizer] = getattr(optimizer, "_script_class", type(optimizer))
    if getattr(torch.optim, kind.__name__, None) is not kind:
        raise ValueError(
            f"with this algorithm shards take the steps, by an optimizer of torch.optim, which {kind.__module__}."
            f"{kind.__name__} is not; use one of these, or another algorithm"
        )
    if len(optimizer.param_groups) > wire.MAX_GROUPS:
        raise ValueError(f"the optimizer has {len(optimizer.param_groups)} parameter groups, and shards can have "
                         f"{wire.MAX_GROUPS}")  # fmt: skip
    groups = []
    for arguments in _arguments_of(optimizer):
        try:
            groups.append(json.dumps(arguments))
        except TypeError as error:
            raise ValueError(
                f"a shard cannot have the optimizer {kind.__name__} with these arguments: {error}"
            ) from None
    return wire.OptimizerSpec(kind.__name__, tuple(groups))


def _arguments_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a shard has to know of each parameter group; the learning rate comes with each gradient."""
    known = optimizer.defaults.keys() - {"lr", "fused", "foreach"}
    groups = optimizer.__dict__["param_groups"]
    return [{name: group[name] for name in group if name in known and group[name] is not None} for group in groups]
