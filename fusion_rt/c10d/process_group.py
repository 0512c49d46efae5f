"""The process group that c10d calls: its names, time-out, store and end; every operation checked, and submitted.

Ranks in the arguments are positions in the group. Members are in the daemon's order (ascending ranks of the job) in
what is submitted, which may be another order than the group's.

c10d calls some operations by names that changed with its versions: both of each pair are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fusion_rt import wire
from fusion_rt.c10d import membership
from fusion_rt.c10d.arguments import Members, check_alike, checked_tag, combination, only, only_list, pairs, some
from fusion_rt.c10d.failing import CollectiveError
from fusion_rt.c10d.inner import InnerGroup, LaneWork
from fusion_rt.c10d.membership import JoinedGroup
from fusion_rt.c10d.monitored import MonitoredBarriers
from fusion_rt.c10d.submission import (
    AwaitedMessage,
    Collective,
    OwnMessages,
    SentMessage,
    Submission,
    moved_as,
    signature_for,
)
from fusion_rt.c10d.work import FusionWork
from fusion_rt.torch.core.runtime import Runtime, is_initialized, runtime
from fusion_rt.torch.core.tensors import Memory, dtype_name

_NO_TIMEOUT = timedelta(0)
Gather = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Fills each of the outputs, with one row for each member, by the members' tensors, and returns when that is done."""
_BACKEND = "fusion"
_Base: Any = dist.ProcessGroup  # whose overloads torch's stubs give for its own callers


class GroupIdentity(_Base):  # type: ignore[misc]
    """All of a process group that is not an operation.

    Args:
        opened: it, as the daemon knows it.
        name: c10d's.
        timeout: of operations that are given none.
    """

    def __init__(self, opened: JoinedGroup, name: str, timeout: timedelta) -> None:
        super().__init__(opened.rank, opened.size)
        self._opened = opened
        self._inner = InnerGroup(opened, timeout.total_seconds())
        self._position = opened.rank
        self._recorded = opened.recorder.open_group(name, opened.ranks)
        self._store: Any = opened.store
        self.set_timeout(timeout)

    supports_splitting = False
    supports_coalescing = False

    def rank(self) -> int:
        """Returns this worker's position in the group."""
        return self._position

    def size(self) -> int:
        """Returns the number of members."""
        return self._opened.size

    getRank = rank
    getSize = size

    def is_of(self, here: Runtime) -> bool:
        """Tells whether the group belongs to a membership."""
        return self._opened.here is here

    def name(self) -> str:
        """Returns the name of the backend."""
        return "fusion"

    getBackendName = name
    _get_backend_name = name

    @property
    def group_name(self) -> str:
        """c10d's name of the group."""
        return self._recorded.name

    def getGroupName(self) -> str:
        """Returns c10d's name of the group."""
        return self._recorded.name

    def _set_group_name(self, name: str) -> None:
        self._recorded.name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        """Name that the script gave the group."""
        return self._recorded.description

    def getGroupDesc(self) -> str:
        """Returns the script's name of the group."""
        return self._recorded.description

    def _set_group_desc(self, description: str) -> None:
        self._recorded.description = description

    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        # While torch 2.15 makes a group it attaches a recorder in C++ if there are any, and none fits one in Python.
        if self not in dist.distributed_c10d._world.pg_names:
            return []
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> GroupIdentity:
        """Returns this group, which is its own backend on every device."""
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Returns whether `allocate_tensor` has other memory than torch: FSDP2 asks, if it is told to."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a tensor of so many elements in the arena, which the daemon reads and writes where they lie."""
        if not size or not self.supports_tensor_alloc(device):
            return torch.empty(size, dtype=dtype, device=device)
        return Memory(self._opened.here, size * dtype.itemsize, small=False).tensor(dtype, (size,))

    def get_group_store(self) -> Any:
        """Returns the store in which the members met."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time-out of operations that are given none."""
        self._seconds = self._recorded.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the daemon counts the operations of a group."""

    def shutdown(self) -> None:
        """Ends the group; its operations under way fail."""
        self._recorded.close()
        self._inner.close()
        self._opened.close()

    def abort(self) -> None:
        """Ends the group at once; its operations under way fail. A flight record is written, where one is wanted."""
        self._inner.close(aborts=True)
        self._opened.abort()
        self._recorded.close()

    def __repr__(self) -> str:
        return f"FusionProcessGroup(name={self.group_name!r}, rank={self._position}, size={self._opened.size})"


def replace_by_sum(tensor: torch.Tensor, members: int, gather: Gather) -> None:
    """Replaces a sparse tensor by the sum of all members' tensors, which is coalesced.

    All members' indices and values are gathered, with places for as many as the member with most has, after their
    numbers: sums of indices that differ from member to member cannot be formed on the way.

    Args:
        tensor: in the layout `torch.sparse_coo`.
        members: how many members take part.
        gather: called twice, by all members.

    Raises:
        ValueError: the tensor has another layout.
    """
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"allreduce: sparse tensors need the layout torch.sparse_coo, not {tensor.layout}")
    with torch.no_grad():
        mine = tensor.detach().coalesce()
        counts = torch.empty(members, dtype=torch.int64)
        gather([counts], [torch.tensor([mine._nnz()])])
        found = [int(count) for count in counts]
        most, own = max(found), mine._nnz()
        indices = mine.indices().new_zeros((most, mine.sparse_dim()))
        indices[:own] = mine.indices().t()
        values = mine.values().new_zeros((most, *mine.values().shape[1:]))
        values[:own] = mine.values()
        all_indices = indices.new_empty((members, *indices.shape))
        all_values = values.new_empty((members, *values.shape))
        if most:
            gather([all_indices, all_values], [indices, values])
        total = torch.sparse_coo_tensor(
            torch.cat([each[:count] for each, count in zip(all_indices, found, strict=True)]).t(),
            torch.cat([each[:count] for each, count in zip(all_values, found, strict=True)]),
            tensor.shape,
            check_invariants=True,  # a member's tensor may be larger
        )
        tensor.copy_(total.coalesce())  # a detached one would have indices of its own


def create(options: Any, backend_options: Any) -> FusionProcessGroup:
    """Makes the process group that `init_process_group` or `new_group` asks for; on its members alone.

    Args:
        options: c10d's: `store`, `group_rank`, `group_size`, `timeout`, `group_id`, `global_ranks_in_group` (empty for
            the group of all).
        backend_options: unused; there are none.

    Raises:
        FusionError: not all members came in time, or this worker has another place in the job than the script says.
    """
    opened = membership.open_group(
        options.store,
        options.group_id,
        options.group_rank,
        options.group_size,
        tuple(options.global_ranks_in_group),
        options.timeout,
    )
    return FusionProcessGroup(opened, options.group_id, options.timeout)


class FusionProcessGroup(GroupIdentity):
    """A process group whose operations run in the node's daemon.

    Args:
        opened: it, as the daemon knows it.
        name: c10d's.
        timeout: of operations that are given none.
    """

    def __init__(self, opened: membership.JoinedGroup, name: str, timeout: timedelta) -> None:
        super().__init__(opened, name, timeout)
        self._id = opened.id
        self._ranks = opened.ranks  # of the job, by position in the group
        self._members = Members(opened.ranks)
        self._own = OwnMessages()
        self._monitored = MonitoredBarriers(opened)

    # --- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Replaces the tensor on every member by the elementwise combination of all members' tensors."""
        tensor = only(tensors, "allreduce", "tensor")
        reduction, seconds = self._combination(opts, op, timeout)
        if tensor.layout != torch.strided:
            return self._reduce_sparse(tensor, reduction, opts if hasattr(opts, "timeout") else None)
        return self._reduce_all("all_reduce", [tensor], reduction, seconds)

    def allreduce_coalesced(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Replaces each tensor as `allreduce` does; tensors of one type travel together."""
        tensors = some(tensors, "allreduce_coalesced", "tensor list")
        reduction, seconds = self._combination(opts, op, timeout)
        return self._reduce_all("all_reduce_coalesced", tensors, reduction, seconds)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, root: int = 0
    ) -> dist.Work:
        """Replaces the tensor on the root by the combination of all members' tensors."""
        tensor = only(tensors, "reduce", "tensor")
        opts, root = self._members.root(opts, root, "reduce")
        reduction, seconds = self._combination(opts, op, timeout)
        if (work := self._inner.reduce(tensor, root, reduction, seconds)) is not None:
            return work
        outputs = [tensor] if root == self._position else []
        part = self._reduction("reduce", [tensor], outputs, reduction, seconds, root=self._ranks[root])
        return self._work("reduce", [part], [tensor])

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> FusionWork:
        """Combines the members' lists of tensors; each member gets the combination of the tensors at its position."""
        output = only(outputs, "reduce_scatter", "output tensor")
        given = inputs if isinstance(inputs[0], torch.Tensor) else only_list(inputs, "reduce_scatter", "input")
        self._members.check_count(given, "reduce_scatter", "input")
        reduction, seconds = self._combination(opts, op, timeout)
        counts = tuple(tensor.numel() for tensor in self._members.in_order(given))
        uneven = counts if len(set(counts)) > 1 else ()
        part = self._reduction("reducescatter", self._members.in_order(given), [output], reduction, seconds, uneven)
        return self._work("reduce_scatter", [part], [output], given)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Combines the members' tensors; each member gets the part of the combination at its position."""
        reduction, seconds = self._combination(opts, None, None)
        self._members.check_whole(input, output, "reduce_scatter", "input", "output")
        if (work := self._inner.reduce_scatter(output, input, reduction, seconds)) is not None:
            return work
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> FusionWork:
        """Does `reduce_scatter_single` on each pair of tensors."""
        reduction, seconds = self._combination(opts, None, None)
        parts = []
        for output, given in zip(outputs, inputs, strict=True):
            self._members.check_whole(given, output, "reduce_scatter", "input", "output")
            parts.append(self._reduction("reducescatter", self._members.by_member(given), [output], reduction, seconds))
        return self._work("reduce_scatter", parts, list(outputs), inputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- moves from one member to all, or all to one ------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int = 0) -> dist.Work:
        """Replaces the tensor on every member by the root's."""
        tensor = only(tensors, "broadcast", "tensor")
        opts, root = self._members.root(opts, root, "broadcast")
        if (work := self._inner.broadcast(tensor, root, self._limit(opts, timeout))) is not None:
            return work
        dtype, itemsize = moved_as([tensor])
        signature = signature_for("broadcast", self._id, dtype, tensor.nbytes // itemsize, root=self._ranks[root])
        given, taken = ([tensor], []) if root == self._position else (None, [tensor])
        part = Collective(self._opened.here, signature, given, taken, seconds=self._limit(opts, timeout))
        return self._work("broadcast", [part], [tensor])

    # --- from each to each --------------------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Gives every member its part of each member's tensor; parts are rows (all equal where no sizes are given)."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        takes = self._members.rows(output, output_split_sizes, "output")
        gives = self._members.rows(input, input_split_sizes, "input")
        if (work := self._inner.all_to_all(output, input, takes, gives, self._limit(opts, timeout))) is not None:
            return work
        dtype, itemsize = moved_as([input, output])
        row = input.nbytes // input.shape[0] if input.numel() else output.nbytes // max(output.shape[0], 1)
        each = row // itemsize
        part = self._dealt(
            dtype,
            [rows * each for rows in self._members.in_order(gives)],
            self._members.by_member(input, gives),
            [rows * each for rows in self._members.in_order(takes)],
            self._members.by_member(output, takes),
            self._limit(opts, timeout),
        )
        return self._work("all_to_all", [part], [output], [input])

    def alltoall(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> FusionWork:
        """Gives every member the tensor at its position in each member's list."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        self._members.check_count(outputs, "alltoall", "output")
        self._members.check_count(inputs, "alltoall", "input")
        part = self._exchanged(inputs, outputs, self._limit(opts, timeout))
        return self._work("all_to_all", [part], list(outputs), inputs)

    alltoall_base = all_to_all_single

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int = 0
    ) -> FusionWork:
        """Gives the root the tensors of all members."""
        given = only(inputs, "gather", "input tensor")
        opts, root = self._members.root(opts, root, "gather")
        nothing = given.new_empty(0)
        inputs = [given if position == root else nothing for position in range(self._members.count)]
        taken: Sequence[torch.Tensor] = [nothing] * self._members.count
        if root == self._position:
            lists = [outputs] if outputs and isinstance(outputs[0], torch.Tensor) else outputs
            taken = only_list(lists, "gather", "output")
            self._members.check_count(taken, "gather", "output")
            check_alike([given, *taken], "gather")
        elif outputs and outputs[0] is not None and len(outputs[0]):
            raise ValueError("gather: requires empty output on non-root")
        part = self._exchanged(inputs, taken, self._limit(opts, timeout))
        return self._work("gather", [part], list(outputs or ()), [given])

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int = 0
    ) -> FusionWork:
        """Gives every member the tensor at its position in the root's list."""
        taken = only(outputs, "scatter", "output tensor")
        opts, root = self._members.root(opts, root, "scatter")
        nothing = taken.new_empty(0)
        outputs = [taken if position == root else nothing for position in range(self._members.count)]
        given: Sequence[torch.Tensor] = [nothing] * self._members.count
        if root == self._position:
            lists = [inputs] if inputs and isinstance(inputs[0], torch.Tensor) else inputs
            given = only_list(lists, "scatter", "input")
            self._members.check_count(given, "scatter", "input")
            check_alike([taken, *given], "scatter")
        elif inputs and inputs[0] is not None and len(inputs[0]):
            raise ValueError("scatter: requires empty input on non-root")
        return self._work("scatter", [self._exchanged(given, outputs, self._limit(opts, timeout))], [taken])

    # --- all-gather ---------------------------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> FusionWork:
        """Gives every member the tensors of all members."""
        given = only(inputs, "allgather", "input tensor")
        lists = [outputs] if isinstance(outputs[0], torch.Tensor) else outputs
        taken = only_list(lists, "allgather", "output")
        self._members.check_count(taken, "allgather", "output")
        taken = self._members.in_order(taken)
        part = self._gathered([given], taken, self._limit(opts, timeout), [tensor.nbytes for tensor in taken])
        return self._work("all_gather", [part], lists, [given])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gives every member the tensors of all members, one after the other in one tensor."""
        self._members.check_whole(output, input, "allgather", "output", "input")
        if (work := self._inner.all_gather(output, input, self._limit(opts, None))) is not None:
            return work
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> FusionWork:
        """Does `all_gather_single` on each pair of tensors."""
        seconds = self._limit(opts, None)
        parts = []
        for output, given in zip(outputs, inputs, strict=True):
            self._members.check_whole(output, given, "allgather", "output", "input")
            parts.append(self._gathered([given], self._members.by_member(output), seconds))
        return self._work("all_gather", parts, list(outputs), inputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> FusionWork:
        """Gives every member the lists of tensors of all members, which travel together."""
        given = some(inputs, "allgather_coalesced", "input tensor list")
        self._members.check_count(outputs, "allgather_coalesced", "output")
        for member in outputs:
            if len(member) != len(given):
                raise ValueError(
                    f"allgather_coalesced: invalid output lists: one has {len(member)} tensors for {len(given)} inputs"
                )
        taken = [tensor for member in self._members.in_order(outputs) for tensor in member]
        part = self._gathered(given, taken, self._limit(opts, None))
        return self._work("all_gather_coalesced", [part], list(outputs), given)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # --- from one member to another -----------------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> FusionWork:
        """Sends a tensor to a member, which has to receive it with the same tag; also to this one itself."""
        tensor = only(tensors, "send", "tensor")
        rank = self._members.peer(dstRank, "destination")
        if rank == self._position:
            part = self._own.send(tag, tensor)
        else:
            part = SentMessage(self._opened.here, self._id, self._ranks[rank], checked_tag(tag), tensor, self._seconds)
        recorded = self._recorded.record_message("send", part, tensor, self._position, rank)
        return FusionWork(self._opened.completer, "send", [part], [tensor], recorded=recorded)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> FusionWork:
        """Receives a member's messages with the same tag, in the order of sending."""
        tensor = only(tensors, "recv", "tensor")
        rank = self._members.peer(srcRank, "source")
        if rank == self._position:
            part = self._own.receive(tag, tensor)
        else:
            part = self._awaited(self._ranks[rank], tag, tensor)
        recorded = self._recorded.record_message("recv", part, tensor, rank, self._position)
        return FusionWork(self._opened.completer, "recv", [part], [tensor], lambda: rank, recorded=recorded)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> FusionWork:
        """Receives a message of any other member with the same tag, whichever comes first."""
        tensor = only(tensors, "recv", "tensor")
        part = self._awaited(None, tag, tensor)
        recorded = self._recorded.record_message("recv", part, tensor, None, self._position)
        return FusionWork(
            self._opened.completer,
            "recvAnySource",
            [part],
            [tensor],
            lambda: self._ranks.index(part.sizes[0]),
            recorded=recorded,
        )

    def _awaited(self, rank: int | None, tag: int, tensor: torch.Tensor) -> Submission:
        return AwaitedMessage(self._opened.here, self._id, rank, checked_tag(tag), tensor, self._seconds)

    # --- synchronisation ----------------------------------------------------------------------------------------------

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Returns when all members have come to it.

        Args:
            timeout: how long to wait for the others; None: as long as for any operation.
            wait_all_ranks: the error names all members that are missing, and not only the first of them.

        Raises:
            CollectiveError: not all have come in time; on the first member, the text names the missing.
        """
        recorded = self._recorded.record("barrier", (), (), ())
        try:
            self._monitored.meet(self._seconds if timeout is None else timeout.total_seconds(), wait_all_ranks)
        except CollectiveError:
            if recorded is not None:
                recorded.end(failed=True)
            raise
        if recorded is not None:
            recorded.end(failed=False)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> FusionWork:
        """Ends when all members have come to it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        part = Collective(
            self._opened.here,
            wire.Signature("barrier", process_set=self._id),
            None,
            (),
            seconds=self._limit(opts, timeout),
        )
        return self._work("barrier", [part], [])

    # --- shared parts -------------------------------------------------------------------------------------------------

    def _work(
        self,
        title: str,
        parts: Sequence[Submission],
        results: list[Any],
        given: Sequence[torch.Tensor] | None = None,
        made: type[FusionWork] = FusionWork,
    ) -> FusionWork:
        recorded = self._recorded.record(title, parts, results if given is None else given, results)
        return made(self._opened.completer, title, parts, results, given=given, recorded=recorded)

    def _limit(self, opts: Any, timeout: timedelta | None) -> float:
        """Returns the seconds that an operation has."""
        given = timeout if opts is None else opts.timeout
        return given.total_seconds() if given is not None and given > _NO_TIMEOUT else self._seconds

    def _combination(self, opts: Any, op: Any, timeout: timedelta | None) -> tuple[tuple[wire.Op, float], float]:
        """Returns how elements are combined, with the factor before, and the seconds that the operation has."""
        if opts is not None and not hasattr(opts, "reduceOp"):  # the overload with an op in its place
            opts, op = None, opts
        chosen = opts.reduceOp if opts is not None else dist.ReduceOp.SUM if op is None else op
        return combination(chosen), self._limit(opts, timeout)

    def _reduce_all(
        self, title: str, tensors: list[torch.Tensor], reduction: tuple[wire.Op, float], seconds: float
    ) -> dist.Work:
        if len(tensors) == 1:
            if (work := self._inner.allreduce(tensors[0], reduction, seconds)) is not None:
                return work
            if (lane_part := self._inner.start(tensors[0], reduction, seconds)) is not None:
                return self._work(title, [lane_part], tensors, made=LaneWork)
            return self._work(title, [self._reduction("allreduce", tensors, tensors, reduction, seconds)], tensors)
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        parts = [self._reduction("allreduce", same, same, reduction, seconds) for same in by_type.values()]
        return self._work(title, parts, tensors)

    def _reduce_sparse(self, tensor: torch.Tensor, reduction: tuple[wire.Op, float], opts: Any) -> FusionWork:
        """Returns when it has been done: all members' numbers of indices have to be known for the second half."""
        if reduction != ("sum", 1.0):
            raise ValueError("allreduce: sparse tensors can only be summed; use ReduceOp.SUM")

        def gather(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
            self.all_gather_single_coalesced(outputs, inputs, opts).wait()

        replace_by_sum(tensor, self._members.count, gather)
        return self._work("all_reduce", [], [tensor])

    def _reduction(
        self,
        kind: wire.Kind,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        reduction: tuple[wire.Op, float],
        seconds: float,
        receives: tuple[int, ...] = (),
        root: int = 0,
    ) -> Submission:
        op, factor = reduction
        if inputs[0].is_complex():
            inputs, outputs = [pairs(tensor, op) for tensor in inputs], [pairs(tensor, op) for tensor in outputs]
        dtype = inputs[0].dtype
        count = inputs[0].numel() if len(inputs) == 1 else sum(tensor.numel() for tensor in inputs)
        signature = signature_for(kind, self._id, dtype_name(dtype), count, op, factor, root)
        return Collective(
            self._opened.here,
            signature,
            inputs,
            outputs,
            in_place=kind != "reducescatter",
            receives=receives,
            seconds=seconds,
        )

    def _gathered(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        seconds: float,
        counts: Sequence[int] = (),
    ) -> Submission:
        """Submits an allgather whose results are in the daemon's order; `counts`: bytes of each, if they differ."""
        dtype, itemsize = moved_as([*inputs, *outputs])
        count = sum(tensor.nbytes for tensor in inputs) // itemsize
        uneven = tuple(nbytes // itemsize for nbytes in counts) if len(set(counts)) > 1 else ()
        signature = signature_for("allgather", self._id, dtype, count)
        return Collective(self._opened.here, signature, inputs, outputs, receives=uneven, seconds=seconds)

    def _exchanged(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], seconds: float) -> Submission:
        """Submits an alltoall of a tensor for each member, by position, and one from each."""
        dtype, itemsize = moved_as([*inputs, *outputs])
        inputs, outputs = self._members.in_order(inputs), self._members.in_order(outputs)
        splits = [tensor.nbytes // itemsize for tensor in inputs]
        receives = [tensor.nbytes // itemsize for tensor in outputs]
        return self._dealt(dtype, splits, inputs, receives, outputs, seconds)

    def _dealt(
        self,
        dtype: str,
        splits: Sequence[int],
        inputs: Sequence[torch.Tensor],
        receives: Sequence[int],
        outputs: Sequence[torch.Tensor],
        seconds: float,
    ) -> Submission:
        """Submits an alltoall of so many elements for and from each member, in the daemon's order."""
        signature = signature_for("alltoall", self._id, dtype, sum(splits))
        return Collective(
            self._opened.here,
            signature,
            inputs,
            outputs,
            splits=tuple(splits),
            receives=tuple(receives),
            seconds=seconds,
        )


def renew_process_group(**options: Any) -> bool:
    """Makes the default process group, in place of the one of an earlier membership of an elastic job if there is one:

        if renew_process_group():
            ddp = DistributedDataParallel(model)

    It does nothing where the group is of the present membership. Call it on all ranks at the same place, at the begin
    of the function of `hvd.elastic.run` or of each step of `hvd.elastic.Manager`. In a job whose ranks do not change,
    the first call makes the group.

    Args:
        options: of `torch.distributed.init_process_group`, such as `timeout`.

    Returns:
        Whether it made one. What was made of the group before, such as other groups, meshes and DDP modules, has to be
        made anew then.

    Raises:
        ValueError: the default group is of another backend.
        CollectiveError: a rank is gone; `elastic.run` and `Manager` handle that.
        FusionError: as `init_process_group`.
    """
    if dist.is_initialized():
        group: Any = dist.group.WORLD
        if not isinstance(group, FusionProcessGroup):
            raise ValueError(
                f"the default process group is of the backend {dist.get_backend()}, which knows nothing of memberships "
                f"of elastic jobs: use init_process_group({_BACKEND!r}), or destroy it before"
            )
        if is_initialized() and group.is_of(runtime()):
            return False
        dist.destroy_process_group()
    dist.init_process_group(_BACKEND, **options)
    return True
