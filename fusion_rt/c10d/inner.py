"""Inner groups: the GPUs of a node combine tensors by NCCL, and only data between nodes passes the host.

Where all members of a group are on one node, its collectives on CUDA tensors are NCCL's, in place. Where they are on
several nodes, equally many on each, an all-reduce is a reduce-scatter within the node, an all-reduce of each member's
part between the nodes by the daemons, and an all-gather within. All else goes through the host, and so do messages,
which begin without the other members: connecting needs all of them.

Members find out together, at their first operation on such tensors, whether it can be; so all decide alike. For tests
without GPUs, gloo and tensors of the host take the place of NCCL and its own.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from fusion_rt import wire
from fusion_rt.c10d.failing import CollectiveError
from fusion_rt.c10d.membership import JoinedGroup
from fusion_rt.c10d.submission import Collective, Submission, signature_for
from fusion_rt.c10d.work import FusionWork, LazyFuture, devices_of
from fusion_rt.launchers.entries import name_ranks
from fusion_rt.settings import Settings
from fusion_rt.torch.core import device
from fusion_rt.torch.core.tensors import dtype_name
from fusion_rt.torch.node.groups import BACKENDS, Backend, all_gather, end_group, reduce_scatter

_LOOK = 1.0  # seconds between two looks at whether the job has failed
_DEVICES = {"nccl": "cuda", "gloo": "cpu"}
_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8}
"""Types that both know; others go through the host."""
_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PRODUCT", "average": "AVG"}

Reduction = tuple[wire.Op, float]


class InnerGroup:
    """The inner group of a process group, which is connected when it is first asked for.

    Args:
        opened: the group.
        seconds: for operations that have no limit of their own, and for the other members to come to them.
    """

    def __init__(self, opened: JoinedGroup, seconds: float) -> None:
        wanted = Settings.from_env().node_reduction
        self._kind = "nccl" if wanted == "auto" else wanted
        self._wanted, self._opened, self._seconds = wanted, opened, seconds
        # Kind of device; empty: it is not for any. NCCL does not notice a lost rank, without which elastic jobs go on.
        self._on = _DEVICES.get(self._kind, "") if opened.size > 1 and not opened.here.client.is_elastic else ""
        self._connecting = threading.Lock()
        self._whole: Any = None  # torch's group of all members, where they are on one node
        self._lane: Lane | None = None  # where they are on several

    # --- operations of members on one node; None: they are not for it -------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, reduction: Reduction, seconds: float) -> dist.Work | None:
        if not self._on or not self._combines(tensor, reduction) or not self._is_whole(seconds, tensor):
            return None
        options = _options(c10d.AllreduceOptions(), seconds, reduceOp=_op(reduction))
        work: dist.Work = self._whole.allreduce([tensor], options)
        return work

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction, seconds: float) -> dist.Work | None:
        if not self._on or not self._combines(tensor, reduction) or not self._is_whole(seconds, tensor):
            return None
        options = _options(c10d.ReduceOptions(), seconds, reduceOp=_op(reduction), rootRank=root)
        work: dist.Work = self._whole.reduce([tensor], options)
        return work

    def broadcast(self, tensor: torch.Tensor, root: int, seconds: float) -> dist.Work | None:
        if not self._on or not self._is_whole(seconds, tensor):
            return None
        work: dist.Work = self._whole.broadcast([tensor], _options(c10d.BroadcastOptions(), seconds, rootRank=root))
        return work

    def all_gather(self, output: torch.Tensor, given: torch.Tensor, seconds: float) -> dist.Work | None:
        if not self._on or not self._is_whole(seconds, output, given):
            return None
        work: dist.Work = all_gather(self._whole, output, given, seconds)
        return work

    def reduce_scatter(
        self, output: torch.Tensor, given: torch.Tensor, reduction: Reduction, seconds: float
    ) -> dist.Work | None:
        if not self._on or not self._combines(given, reduction) or not self._is_whole(seconds, output, given):
            return None
        work: dist.Work = reduce_scatter(self._whole, given, output, _OPS[reduction[0]], seconds)
        return work

    def all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, takes: Sequence[int], gives: Sequence[int], seconds: float
    ) -> dist.Work | None:
        if not self._on or not self._is_whole(seconds, output, given):
            return None
        options = _options(c10d.AllToAllOptions(), seconds)
        work: dist.Work = self._whole.alltoall_base(output, given, list(takes), list(gives), options)
        return work

    # --- and of members on several ------------------------------------------------------------------------------------

    def start(self, tensor: torch.Tensor, reduction: Reduction, seconds: float) -> LanePart | None:
        """Starts an all-reduce in the nodes and between them; None: it is not for it."""
        if not self._on or not self._combines(tensor, reduction) or not self._is_connected(seconds, tensor):
            return None
        return None if self._lane is None else self._lane.start(tensor, reduction[0], seconds)

    def close(self, aborts: bool = False) -> None:
        """Ends it; operations under way in it fail if it `aborts`."""
        self._on = ""
        whole, self._whole, lane, self._lane = self._whole, None, self._lane, None
        if whole is not None:
            end_group(whole, aborts)
        if lane is not None:
            lane.close(aborts)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _combines(self, tensor: torch.Tensor, reduction: Reduction) -> bool:
        op, factor = reduction
        if op == "average" and (self._kind == "gloo" or not tensor.is_floating_point()):
            return False
        return op in _OPS and factor == 1.0

    def _is_whole(self, seconds: float, *tensors: torch.Tensor) -> bool:
        return self._is_connected(seconds, *tensors) and self._whole is not None

    def _is_connected(self, seconds: float, *tensors: torch.Tensor) -> bool:
        """Tells whether it has these tensors. The answer is the same on all members, or an error.

        Raises:
            ValueError: they are not contiguous, which not all members might see.
            CollectiveError: not all members have come to their first operation on such tensors.
        """
        if any(tensor.device.type != self._on or tensor.dtype not in _DTYPES for tensor in tensors):
            return False
        if self._whole is None and self._lane is None:
            with self._connecting:
                if self._on and self._whole is None and self._lane is None:
                    self._connect(tensors, seconds or self._seconds)
        if not self._on:
            return False
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(
                f"tensors on a GPU have to be contiguous where {self._kind} combines them: call contiguous()"
            )
        return True

    def _connect(self, tensors: Sequence[torch.Tensor], seconds: float) -> None:
        opened, backend = self._opened, BACKENDS[self._kind]
        found = self._devices(backend.device_of(list(tensors)), seconds)
        nodes = _by_node(opened)
        why = _hindrance(opened, nodes, found, self._kind)
        if not why and len(nodes) == 1:
            self._whole = self._join("all", range(opened.size), backend, tensors[0].device)
            return
        if not why:
            number = next(number for number, node in enumerate(nodes) if opened.rank in node)
            local = nodes[number].index(opened.rank)
            within = self._join(f"node{number}", nodes[number], backend, tensors[0].device)
            between = opened.open_among(f"inner{local}", [node[local] for node in nodes], timedelta(seconds=seconds))
            self._lane = Lane(within, len(nodes[number]), between, opened.size)
            return
        self._on = ""
        if self._wanted != "auto":
            warnings.warn(
                f"FUSION_NODE_REDUCTION is {self._wanted}, and tensors of this process group go through the host all "
                f"the same: {why}",
                stacklevel=2,
            )

    def _devices(self, own: str, seconds: float) -> list[str]:
        """Returns the members' devices, by position; empty where one has none that is suitable."""
        opened = self._opened
        store = opened.store_for("inner")
        channel = opened.here.client.channel
        store.set(str(opened.rank), own or "-")
        deadline = time.monotonic() + seconds
        for position, rank in enumerate(opened.ranks):
            while not store.check([str(position)]):
                channel.read_available()
                if channel.failure is not None:
                    raise CollectiveError(channel.failure)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CollectiveError(
                        f"rank {rank} did not come to the group's first operation on a GPU within {seconds:g} s; all "
                        "members have to give tensors on a GPU, or none"
                    )
                with suppress(RuntimeError):  # it is not there yet
                    store.wait([str(position)], timedelta(seconds=min(_LOOK, left)))
        return [store.get(str(position)).decode().strip("-") for position in range(opened.size)]

    def _join(self, name: str, positions: Sequence[int], backend: Backend, where: torch.device) -> Any:
        position = list(positions).index(self._opened.rank)
        store = self._opened.store_for(f"inner.{name}")
        return backend.join(store, position, len(positions), where, self._seconds)


class LanePart(Submission):
    """An operation of a lane.

    Attributes:
        ended: set when it has.
    """

    __slots__ = ("ended",)

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def end(self) -> None:
        super().end()
        self.ended.set()


class Lane:
    """All-reduces in the nodes and between them, one after the other, on a thread of their own.

    One after the other, since all members of a node have to queue NCCL's operations in the same order, and what comes
    back from other nodes comes to each of them at another moment.

    Args:
        within: torch's group of this node's members.
        local: number of them.
        between: the group of those members that have this one's position on their nodes.
        size: number of all members.
    """

    def __init__(self, within: Any, local: int, between: JoinedGroup, size: int) -> None:
        self._within, self._local, self._between, self._size = within, local, between, size
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = ThreadPoolExecutor(1, "fusion-inner", device.as_here())

    def start(self, tensor: torch.Tensor, op: wire.Op, seconds: float) -> LanePart:
        """Starts to replace a tensor by the combination of all members', as they are when the current streams have come
        as far as now."""
        part = LanePart()
        self._thread.submit(self._run, part, tensor, op, seconds, device.layer.mark(tensor))
        return part

    def close(self, aborts: bool) -> None:
        if not aborts:
            self._thread.shutdown()
        end_group(self._within, aborts)
        self._between.close()
        self._thread.shutdown()

    def _run(self, part: LanePart, tensor: torch.Tensor, op: wire.Op, seconds: float, before: device.Copying) -> None:
        try:
            with torch.no_grad(), device.layer.after(before, self._streams):
                self._combine(tensor.view(-1), op, seconds)
                device.layer.mark(tensor).wait()
        except Exception as error:  # which whoever waits is told
            part.error = f"all_reduce in the nodes and between them: {error}"
        part.end()

    def _combine(self, flat: torch.Tensor, op: wire.Op, seconds: float) -> None:
        n, local = flat.numel(), self._local
        whole, average = flat, op == "average"
        if n % local:
            whole = flat.new_zeros(-(-n // local) * local)
            whole[:n].copy_(flat)
        mine = whole.new_empty(len(whole) // local)
        combined: wire.Op = "sum" if average else op
        reduce_scatter(self._within, whole, mine, _OPS[combined], seconds).wait()
        self._combine_between(mine, combined, seconds)
        if average:
            mine.div_(self._size)
        all_gather(self._within, whole, mine, seconds).wait()
        if whole is not flat:
            flat.copy_(whole[:n])

    def _combine_between(self, mine: torch.Tensor, op: wire.Op, seconds: float) -> None:
        here, group = self._between.here, self._between.id
        signature = signature_for("allreduce", group, dtype_name(mine.dtype), len(mine), op)
        part = Collective(here, signature, [mine], [mine], in_place=True, seconds=seconds)
        here.client.channel.read_until(part)
        if part.error is not None:
            raise CollectiveError(part.error)


class LaneWork(FusionWork):
    """A work of a lane, whose thread ends it: the channel need not be read."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._let_go()
        seconds = timeout.total_seconds() if timeout else None
        for part in self._parts:
            assert isinstance(part, LanePart)
            if not part.ended.wait(seconds):
                raise self._not_yet(seconds)
        self.settle()
        self._raise()
        return True

    def is_completed(self) -> bool:
        ended = all(part.done for part in self._parts)
        if ended:
            self.settle()
        return ended

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._let_go()
            self._future = LazyFuture(self, devices_of(self._results))
            for part in self._parts:
                part.watcher = self._settle_elsewhere
            self.is_completed()
        return self._future

    def _settle_elsewhere(self) -> None:
        """Functions that a script has hung on the future may wait for further operations of this lane's thread."""
        if self.calls_back:
            threading.Thread(target=self.settle, name="fusion-futures", daemon=True).start()
        else:
            self.settle()


def _by_node(opened: JoinedGroup) -> list[list[int]]:
    """Returns the positions of the members on each node that has some."""
    nodes: dict[int, list[int]] = {}
    topology = opened.here.client.topology
    for position, rank in enumerate(opened.ranks):
        nodes.setdefault(topology.node_of(rank), []).append(position)
    return [nodes[node] for node in sorted(nodes)]


def _hindrance(opened: JoinedGroup, nodes: Sequence[Sequence[int]], found: Sequence[str], kind: str) -> str:
    """Returns why the members cannot have an inner group; empty if they can. The same on all of them."""
    without = [rank for rank, device in zip(opened.ranks, found, strict=True) if not device]
    if without:
        return f"torch has no {kind} for the tensors of {name_ranks(without)}"
    for node in nodes:
        if len({found[position] for position in node}) < len(node):
            return f"some of {name_ranks([opened.ranks[position] for position in node])} share a GPU"
    if len({len(node) for node in nodes}) > 1:
        return f"its nodes have unequal numbers of members, {', '.join(str(len(node)) for node in nodes)}"
    if len(nodes) > 1 and len(nodes[0]) == 1:
        return "each of its members is alone on its node"
    return ""


def _op(reduction: Reduction) -> Any:
    return getattr(dist.ReduceOp, _OPS[reduction[0]])


def _options(options: Any, seconds: float, **values: Any) -> Any:
    if seconds:
        options.timeout = timedelta(seconds=seconds)
    for name, value in values.items():
        setattr(options, name, value)
    return options
