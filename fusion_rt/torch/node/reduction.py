"""Reduction of one plan's gradients within a node, on their devices: its steps, its memory, and its failures.

When a bucket is full it is copied into a tensor of its own on the device, its *staging*, and combined with those of the
other ranks of the node. Then each rank has a *part* of the sum (reduce-scatter), which goes to its arena by its own
link; or, where a worker selects from all of it on its GPU, the first rank, the *leader*, has the whole. Every rank says
`ready`, also one without anything of the node's (`wire.ELSEWHERE`), so that the daemon knows of all of them as ever:
which rank is late, lost, or has another model. The daemon puts the parts together: to it, and to its codecs, a
node contributes whole buckets.

Each rank gets its part of the result by its own arena, and the parts are gathered on the devices (all-gather), once all
exchanges of the step have ended well. That needs an order in which all ranks want results: where there is none, because
updates are applied when they are needed, each gets all of the result by its own arena.

Where a reduction fails, whoever notices says so in the ledger, at which all look while they wait. Then nobody submits
anything for the node, so that the daemon fails the bucket on all ranks of the job at once; and from the next step on it
reduces what would have been reduced here. Where results cannot be gathered, other nodes have them already: then the job
is over for this rank.

Buckets are sent in the order of the plan, since all ranks have to start reductions in the same order.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusion_rt import algorithms, wire
from fusion_rt.codecs import averages
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.host import bootstrap
from fusion_rt.settings import Settings
from fusion_rt.torch.core import device
from fusion_rt.torch.core.device import Copying
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.core.tensors import DTYPE_NAMES
from fusion_rt.torch.node.ledger import REFUSED, NodeLedger

if TYPE_CHECKING:
    from fusion_rt.torch.node.groups import Backend, Group, UnderWay

_POLL = 1e-4  # seconds between two looks at another rank's progress
_WATCH = 0.01  # seconds between two looks at whether it will
_LINGER = 10.0  # seconds that ranks may take to gather this one's part
_COMBINED = {"average": "sum", "sum": "sum", "min": "min", "max": "max", "product": "product"}
_NEUTRAL = {"sum": 0.0, "min": float("inf"), "max": -float("inf"), "product": 1.0}


@dataclass(frozen=True)
class NodeWay:
    """The way of a node's contribution to its daemon, and of the result back; all ranks of the node have the same.

    Attributes:
        parts: each rank submits its part; else the leader submits all.
        gathers: each rank gets its part of the result, and they are gathered; else each gets all of it.
    """

    parts: bool
    gathers: bool

    def __str__(self) -> str:
        return "parts, gathered" if self.gathers else "parts" if self.parts else "leader"


_TOGETHER = NodeWay(parts=False, gathers=True)


@dataclass
class BucketStaging:
    """A bucket's elements on their device.

    Attributes:
        dtype: the bucket's.
        values: 1-D; float32 for halves, so that sums of several are rounded once. As many as make equal parts.
        places: of the bucket's tensors, in their shapes.
        part: this rank's of the sum; all of it for a leader.
        result, result_part: memory of results, likewise, in the bucket's dtype; of the sums where that is the same.
        result_places: of the bucket's tensors, in their shapes.
        gaps: the rest of `values`, in which a result may have left something.
    """

    dtype: torch.dtype
    values: torch.Tensor
    places: list[torch.Tensor]
    part: torch.Tensor
    result: torch.Tensor
    result_part: torch.Tensor
    result_places: list[torch.Tensor]
    gaps: list[torch.Tensor]


def stage(
    flat: torch.Tensor, views: Sequence[torch.Tensor], like: torch.Tensor, ranks: int = 1, way: NodeWay = _TOGETHER
) -> BucketStaging:
    """Makes the staging of a bucket, whose place in the arena is `flat` (1-D).

    Args:
        views: of its tensors, in `flat`.
        like: on the device of its gradients.
        ranks: how many combine it; 1: it is only put together.
        way: in which.
    """
    half = ranks > 1 and flat.dtype in (torch.float16, torch.bfloat16)
    exact = like.new_empty(0, dtype=torch.float32 if half else flat.dtype)
    length = -(-flat.numel() // ranks)  # of a part
    elements = length * ranks if way.parts else flat.numel()
    values = device.layer.empty([elements], exact).zero_()  # there may be padding between tensors
    offsets = [(view.data_ptr() - flat.data_ptr()) // flat.element_size() for view in views]

    def places(whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.as_strided(v.shape, v.stride(), offset) for v, offset in zip(views, offsets, strict=True)]

    part = device.layer.empty([length], exact) if way.parts else values
    result, result_part, gaps = values, part, []
    if way.gathers and half:
        rounded = like.new_empty(0, dtype=flat.dtype)
        result, result_part = device.layer.empty([elements], rounded), device.layer.empty([length], rounded)
    elif way.gathers:
        gaps = _gaps(values, [(offset, view.numel()) for view, offset in zip(views, offsets, strict=True)])
    return BucketStaging(flat.dtype, values, places(values), part, result, result_part, places(result), gaps)


def _gaps(whole: torch.Tensor, places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Returns the gaps of a 1-D tensor between places (first element, length) in it, and behind them."""
    gaps, end = [], 0
    for first, length in [*sorted(places), (whole.numel(), 0)]:
        if first > end:
            gaps.append(whole[end:first])
        end = first + length
    return gaps


class NodeReduction:
    """Reduction of one plan's gradients within this node.

    Args:
        here: this worker's membership.
        plan: the plan.
        ranks: those of this node that take part in it.
        backend: its name, and the maker of groups.
        where: the device of its gradients, and a key that tells it from the other ranks' devices.
        before: the reduction of the plan before, whose connection is used again.
        way: of contributions and results.

    Attributes:
        reduces: this step's buckets are reduced so.
        is_leader: this rank submits the node's buckets, if one does.
        way: as above.
    """

    def __init__(
        self,
        here: Runtime,
        plan: wire.Plan,
        ranks: Sequence[int],
        backend: tuple[str, Backend],
        where: tuple[torch.device, str],
        before: NodeReduction | None,
        way: NodeWay,
    ) -> None:
        self.reduces = False
        self.way = way
        self.is_leader = here.rank == ranks[0]
        self._here, self._plan, self._ranks = here, plan, ranks
        self._kind, self._backend = backend
        self._op = _COMBINED[plan.reduction.op]
        self._settings = Settings.from_env()
        self._group: Group | None = None if before is None else before._group
        self._refused: bool = before is not None and before._refused
        self._device = where[0]
        self._offer = REFUSED if self._refused else f"{self._kind}, {way}:{where[1]}"
        self._directory = os.path.join(here.client.directory, bootstrap.RANKS_DIRECTORY)
        bootstrap.make_private_directory(self._directory)
        self._store = os.path.join(
            self._directory, f"{here.client.welcome.epoch}-{plan.process_set}-{plan.group.replace(os.sep, '-')}-store"
        )
        self._joins = -1
        self._watched = 0.0  # when failures were looked for last
        self._ledger = self._enrol()
        here.in_node.add(self)

    # --- which steps --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a step: sets `reduces`. Once a reduction in the node has failed, the daemon reduces instead.

        Raises:
            HorovodInternalError: the job has failed.
        """
        if self._here.client.joins != self._joins:
            self._ledger.close()
            self._ledger = self._enrol()
        if self.watch():
            self._abort()
            self._refused, self._offer = True, REFUSED
        self.reduces = self._ledger.decide(self._step()) and self._is_connected()

    def withdraw(self) -> bool:
        """Withdraws this worker, which is about to join. Returns whether it has to take part in a step before, which
        others of its node have begun; in that one, it `reduces`.

        Raises:
            HorovodInternalError: as for `begin`.
        """
        state = self._ledger.withdraw()
        clocks = [self._here.client.channel.clocks.next(self._plan.id, bucket.index) for bucket in self._plan.buckets]
        if not any(state.includes(clock) for clock in clocks):
            return False
        self.reduces = self._is_connected()
        return self.reduces

    def give_up(self, why: str) -> None:
        """Tells the node's other ranks, since a reduction has failed or this rank leaves, and aborts the group."""
        self._ledger.give_up(why)
        self._abort()

    def close(self, connected: bool = False) -> None:
        """Ends this plan's part, and the connection, unless another plan has it (`connected`)."""
        if connected:
            self._group = None
        else:
            self._await_others()
            with suppress(FileNotFoundError):
                os.unlink(self._store)
        self._ledger.close()
        self._abort()
        self._here.in_node.discard(self)

    def leave(self) -> None:
        """Ends its part because this worker leaves the job."""
        self._await_others()
        self.give_up(f"rank {self._here.rank} has left the job")
        self.close()

    # --- a bucket -----------------------------------------------------------------------------------------------------

    def staging(
        self, before: BucketStaging | None, flat: torch.Tensor, views: Sequence[torch.Tensor], like: torch.Tensor
    ) -> BucketStaging:
        """Returns the memory for this rank's elements of a bucket, whose place in the arena is `flat` (1-D).

        Args:
            before: that of the step before, which is used again; None: there was none.
            views: of its tensors, in `flat`.
            like: on the device of its gradients.
        """
        if before is None:
            return stage(flat, views, like, len(self._ranks), self.way)
        if self._group is not None:
            self._group.settle(before.values)
            if before.gaps:
                torch._foreach_zero_(before.gaps)
        return before

    def headroom(self, dtype: DType) -> float:
        """Returns the divisor of the node's sum; see `codecs.averages`."""
        return averages.headroom(self._plan.reduction, dtype, len(self._ranks))

    def fill_with_nothing(self, staging: BucketStaging) -> None:
        """Fills the staging with the neutral value, which changes no result."""
        value = _NEUTRAL[self._op]
        if not staging.values.is_floating_point() and self._op in ("min", "max"):
            limits = torch.iinfo(staging.values.dtype)
            value = limits.max if self._op == "min" else limits.min
        staging.values.fill_(value)

    def reduce(self, staging: BucketStaging, follow: Callable[[torch.Tensor], Copying]) -> Combining:
        """Starts combining the staged gradients of all ranks of the node.

        Args:
            follow: starts to bring this rank's part of the sum to the arena, or selects from it.

        Returns: the work to be done before the bucket is submitted.
        """
        combining = Combining(self)
        if self._group is None:  # this step had been begun when a reduction failed
            combining.why = self._ledger.read().broken
            return combining
        ranks = len(self._here.client.process_sets[self._plan.process_set].ranks)
        how, dtype = self._plan.reduction, DTYPES[DTYPE_NAMES[staging.dtype]]
        prescale = averages.scaling(how, dtype, ranks)[0] / self.headroom(dtype)
        if prescale != 1.0:  # before the sum: its purpose is that the sum be in range
            staging.values.mul_(prescale)

        def then() -> Copying:
            return follow(staging.part)

        group, values = self._group, staging.values
        try:
            if self.way.parts:
                combining.under_way = group.reduce_scatter(values, staging.part, self._op, then)
            else:
                combining.under_way = group.reduce(values, self._op, then if self.is_leader else None)
        except RuntimeError as error:
            combining.fail(error)
        return combining

    def share(self) -> int:
        """Returns the part of the node's contribution in this rank's arena; see `wire.Ready`."""
        if self.way.parts:
            return wire.PART
        return wire.OF_NODE if self.is_leader else wire.ELSEWHERE

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns that of a bucket in the arena (1-D) which this rank submits."""
        if not self.way.parts:
            return flat
        low, high = wire.part_of_node(flat.numel(), self._ranks.index(self._here.rank), len(self._ranks))
        return flat[low:high]

    def gather(self, staging: BucketStaging, flat: torch.Tensor) -> NodeGathering:
        """Starts putting together the node's parts of the result of a bucket, in its place in the arena.

        Raises:
            HorovodInternalError: it cannot be; then the job is over for this rank.
        """
        mine = self.mine(flat)

        def first() -> None:
            device.layer.copy([staging.result_part[: len(mine)]], [mine])

        if self._group is None:
            raise self.cannot_gather(self._ledger.read().broken)
        whole, part = staging.result.view(torch.uint8), staging.result_part.view(torch.uint8)  # whatever the dtype
        try:
            return NodeGathering(self, staging, self._group.all_gather(whole, part, first))
        except RuntimeError as error:
            raise self.cannot_gather(error) from error

    def settle(self, staging: BucketStaging) -> None:
        """Lets later work of the current stream read the gathered values."""
        if self._group is not None:
            self._group.settle(staging.result)

    def cannot_gather(self, why: object) -> HorovodInternalError:
        """Ends the job for this rank, which will not get a result that other nodes may have. Returns the exception to
        raise."""
        told = (
            f"rank {self._here.rank} could not get results from the other ranks of its node by {self._kind}, while "
            f"other nodes may have them: {why}"
        )
        self.give_up(told)
        self._here.client.channel.fail(told, daemon_goes_on=True)
        return HorovodInternalError(self._here.client.channel.failure or told)

    def note_gathered(self) -> None:
        """Notes that this rank has the results of a step, and needs the other ranks no longer for that."""
        self._ledger.gather()

    def await_done(self, done: Callable[[], bool]) -> None:
        """Waits for an operation of the node's ranks, sleeping. Raises `TimeoutError` if it takes too long."""
        began, pause = time.monotonic(), _POLL / 2
        while not done():
            if time.monotonic() - began > self._settings.operation_timeout:
                raise TimeoutError(f"it has taken {self._settings.operation_timeout:g} s")
            time.sleep(pause)
            pause = min(1.25 * pause, 10 * _POLL)

    def watch(self, seldom: bool = False) -> str:
        """Checks for failures while all ranks of the node are waited for. Returns the reason; empty if there is none.

        Args:
            seldom: not if it was done a moment ago.

        Raises:
            HorovodInternalError: the job has failed.
        """
        if seldom:
            now = time.monotonic()
            if now - self._watched < _WATCH:
                return ""
            self._watched = now
        channel = self._here.client.channel
        channel.read_available()
        if channel.failure is not None:
            self.give_up(channel.failure)
            raise HorovodInternalError(channel.failure)
        return self._ledger.read().broken

    def failed(self, error: Exception) -> None:
        """Tells the other ranks of the node that a reduction has failed here."""
        who = f"rank {self._here.rank}"
        why = f"{who} could not reduce gradients with the other ranks of its node by {self._kind}: {error}"
        if not self._ledger.read().broken:
            warnings.warn(f"{why}; this step fails, and from the next one on the daemon reduces them", stacklevel=2)
        self.give_up(why)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _step(self) -> int:
        return self._here.client.channel.clocks.next(self._plan.id, 0)

    def _enrol(self) -> NodeLedger:
        self._joins = self._here.client.joins
        name = f"{self._here.client.welcome.epoch}-{self._plan.id}-{self._joins}"
        ledger = NodeLedger(os.path.join(self._directory, name), len(self._ranks), self._ranks.index(self._here.rank))
        ledger.enrol(self._offer, self._step())
        return ledger

    def _await_others(self) -> None:
        """Waits for ranks that still gather results from this one, which is about to end the connection."""
        deadline = time.monotonic() + _LINGER
        while self._group is not None and self._ledger.is_awaited() and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _is_connected(self) -> bool:
        """Connects to the other ranks, if it never was. Returns whether it is or was connected; see `_connect`."""
        return self._group is not None or bool(self._ledger.read().broken) or self._connect()

    def _connect(self) -> bool:
        """Connects to the other ranks of the node, which do so in the same step. Returns whether all of them have.

        Raises:
            HorovodInternalError: the job has failed meanwhile.
        """
        here = self._here
        found: list[Group] = []
        errors: list[Exception] = []

        def connect() -> None:
            try:
                position = self._ranks.index(here.rank)
                found.append(self._backend.connect(self._store, position, len(self._ranks), self._device, start, limit))
            except Exception as error:  # told below
                errors.append(error)

        start, limit = self._settings.start_timeout, self._settings.operation_timeout
        deadline = time.monotonic() + start
        thread = threading.Thread(target=connect, name="fusion_rt-node", daemon=True)
        thread.start()
        said = False
        while (all_here := self._ledger.read().outcome()) is None:
            self.watch()
            if found and not said:
                self._ledger.connect()
                said = True
            elif errors or time.monotonic() > deadline:
                if self._ledger.refuse():
                    continue
                why = errors[0] if errors else f"the others did not come within {start:g} s"
                warnings.warn(
                    f"rank {here.rank} could not connect to the other ranks of its node by {self._kind}: {why}; their "
                    f"gradients are reduced by the daemon",
                    stacklevel=2,
                )
            else:
                time.sleep(10 * _POLL)
        if all_here:
            self._group = found[0]
        else:
            self._refused = True
            if found:
                found[0].abort()
        return all_here

    def _abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def reduction_in_node(
    here: Runtime, plan: wire.Plan, parameters: list[torch.Tensor], before: NodeReduction | None, way: NodeWay
) -> NodeReduction | None:
    """Makes the reduction of a plan's gradients within this worker's node; None if the daemon combines them.

    Args:
        parameters: of all of the plan's buckets.
        before: the reduction of the plan that this one replaces; it is over now.
        way: of contributions and results.
    """
    made = None
    if (found := _suitable(here, plan, parameters)) is not None:
        ranks, backend, where = found
        made = NodeReduction(here, plan, ranks, backend, where, before, way)
    if before is not None:
        before.close(made is not None)
    return made


def _suitable(
    here: Runtime, plan: wire.Plan, parameters: list[torch.Tensor]
) -> tuple[Sequence[int], tuple[str, Backend], tuple[torch.device, str]] | None:
    """Returns the plan's ranks on this node, backend and device, if they can combine as far as this rank knows."""
    wanted = Settings.from_env().node_reduction
    ranks = here.client.process_sets[plan.process_set].local(here.client.topology, here.client.welcome.node)
    if wanted == "daemon" or len(ranks) < 2 or not plan.buckets:
        return None
    kind = "nccl" if wanted == "auto" else wanted
    what = ""
    if not algorithms.parse(plan.reduction.algorithm).sums_gradients or plan.reduction.op not in _COMBINED:
        what = f"{plan.reduction.algorithm} with {plan.reduction.op} needs each rank's own gradients"
    elif kind == "nccl" and not all(parameter.is_cuda for parameter in parameters):
        what = "not all of its parameters are on a GPU"
    else:
        from fusion_rt.torch.node.groups import BACKENDS  # late: it needs torch.distributed

        backend = BACKENDS[kind]
        if own := backend.device_of(parameters):
            return ranks, (kind, backend), (parameters[0].device, own)
        what = f"torch has no {kind} here, or its parameters are not on one device that is for {kind}"
    if wanted != "auto":
        warnings.warn(
            f"FUSION_NODE_REDUCTION is {wanted}, and the gradients of {plan.group!r} are reduced by the daemon all the "
            f"same: {what}",
            stacklevel=2,
        )
    return None


class Combining(Copying):
    """A reduction in the node, and the copy of this rank's part to the arena.

    Attributes:
        why: the reason if it has failed, here or on another rank of the node; else empty.
        under_way: the reduction.
    """

    def __init__(self, node: NodeReduction) -> None:
        super().__init__()
        self.why = ""
        self.under_way: UnderWay
        self._node = node

    def done(self) -> bool:
        """Tells whether it has ended, well or not."""
        if self.why:
            return True
        if self._node._group is None:  # aborted because of another bucket: this ends, too, whatever it has done
            self.why = self._node.watch()
            return bool(self.why)
        try:
            if self.under_way.done():
                return True
        except RuntimeError as error:
            self.fail(error)
            return True
        self.why = self._node.watch(seldom=True)
        return bool(self.why)

    def wait(self) -> None:
        try:
            self._node.await_done(self.done)
        except TimeoutError as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Notes that it has failed here."""
        self._node.failed(error)
        self.why = self._node.watch()


class NodeGathering:
    """Parts of a result on their way from the other ranks of the node.

    Args:
        node: the reduction.
        staging: of the bucket.
        under_way: the operation.
    """

    def __init__(self, node: NodeReduction, staging: BucketStaging, under_way: UnderWay) -> None:
        self._node, self._staging, self._under_way = node, staging, under_way

    def wait(self) -> None:
        """Waits until all parts are in the staging, for the current stream, too.

        Raises:
            HorovodInternalError: a rank is lost, or has given up; then the job is over for this one.
        """
        try:
            self._node.await_done(self._done)
        except HorovodInternalError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self._node.cannot_gather(error) from error
        self._node.settle(self._staging)

    def _done(self) -> bool:
        if self._under_way.done():
            return True
        if why := self._node.watch(seldom=True):
            raise RuntimeError(why)
        return False
