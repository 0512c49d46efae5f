"""Groups that combine tensors of a node's ranks: NCCL on their GPUs; gloo in the host's memory, for tests without GPUs.

A group is a process group of torch that is made directly: torch.distributed's default group, and the groups that a
script has, are not touched. Its ranks find each other by a file; gloo's listen on the loopback interface only.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fusion_rt.torch.core import device as devices
from fusion_rt.torch.core.device import Copying

_FOREVER = 365 * 24 * 3600.0  # seconds; gloo and NCCL want a number
_LOOPBACK = "127.0.0.1"
_POLL = 1e-3  # seconds
_TRIED = 1024  # elements
_WATCHED_HERE = {  # NCCL's own watchdogs end the process; read when a group is made
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class UnderWay(Protocol):
    """An operation of a group, and the next step on ranks that have its result."""

    def done(self) -> bool:
        """Tells whether it is done with all that follows. Raises `RuntimeError` if it failed."""


class Group(ABC):
    """Ranks of one node, connected."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, op: str, then: Callable[[], Copying] | None) -> UnderWay:
        """Starts combining the ranks' tensors into that of the first rank, as they are when the current stream has come
        as far as now. The contents of the other ranks' tensors afterwards are undefined.

        Args:
            tensor: 1-D, contiguous; as long, and of the same dtype, on all ranks. It must not be written to meanwhile.
            op: "sum", "min", "max" or "product".
            then: called once on the rank with the result, now or later, where it may start copies of it.
        """

    @abstractmethod
    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor, op: str, then: Callable[[], Copying]) -> UnderWay:
        """Starts combining the ranks' tensors into each rank's own part of the result, as `reduce` does.

        Args:
            whole: 1-D, contiguous; as long, and of the same dtype, on all ranks. It must not be written to meanwhile.
            part: becomes the rank's part of it: the first rank's is the first of equal ones.
            op, then: as for `reduce`; all ranks have something that follows.
        """

    @abstractmethod
    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, first: Callable[[], object]) -> UnderWay:
        """Starts putting together the ranks' parts, on each of them. That is not ordered after what the current stream
        has now: what uses these tensors has come before an earlier operation, which may have written `part`.

        Args:
            whole: 1-D, contiguous, which `settle` gives to the current stream afterwards.
            part: this rank's, as long as the others'.
            first: called at once; the copy to `part` that it starts comes before.
        """

    @abstractmethod
    def settle(self, tensor: torch.Tensor) -> None:
        """Prepares the whole tensor of an operation that has ended, or was begun in an earlier step, for the current
        stream: later work there may read it, and write to it."""

    @abstractmethod
    def abort(self) -> None:
        """Ends the group and its reductions, without waiting."""

    def try_out(self, rank: int, size: int, where: torch.device, limit: float) -> None:
        """Tries small operations, so that failures show before gradients depend on them.

        Raises:
            RuntimeError: they did not work, or have taken more than `limit` seconds.
        """
        values = torch.full((_TRIED,), rank + 1.0, device=where)
        whole = torch.full((size * _TRIED,), rank + 1.0, device=where)
        part = torch.zeros_like(values)
        deadline = time.monotonic() + limit
        # Nothing here waits for the device, which would go on waiting where an operation never ends.
        _await(self.reduce(values, "sum", partial(devices.layer.mark, values) if rank == 0 else None), deadline, limit)
        _await(self.reduce_scatter(whole, part, "sum", partial(devices.layer.mark, part)), deadline, limit)
        _await(self.all_gather(whole, part, lambda: None), deadline, limit)
        for tensor in (values, whole):
            self.settle(tensor)
        expected = size * (size + 1) / 2
        for tensor in (values, whole) if rank == 0 else (whole,):
            if not bool(tensor.eq(expected).all()):
                raise RuntimeError(f"it added up the numbers 1 to {size} to {tensor[0].item():g}")


def _await(under_way: UnderWay, deadline: float, limit: float) -> None:
    """Waits for an operation. Raises `RuntimeError` if it fails, or takes too long."""
    while not under_way.done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a reduction has taken more than {limit:g} s")
        time.sleep(_POLL)


def _store(path: str, size: int) -> Any:
    return dist.FileStore(path, size)  # type: ignore[attr-defined]


def _meet(store: Any, rank: int, size: int, limit: float) -> None:
    """Waits until all ranks have come. NCCL would wait for those that do not come for ever, in calls that nobody can
    end.

    Raises:
        RuntimeError: some have not come within `limit` seconds.
    """
    store.set(f"here/{rank}", "")
    deadline = time.monotonic() + limit
    for other in range(size):
        try:
            store.wait([f"here/{other}"], _delta(deadline - time.monotonic(), least=_POLL))
        except RuntimeError as error:
            raise RuntimeError(f"position {other} of {size} did not come within {limit:g} s") from error


def _leave_store(store: Any) -> None:
    """Shortens the wait for the file, which one rank removes when it leaves: torch would, for five minutes."""
    store.set_timeout(timedelta(seconds=1))


def _options(op: str) -> dist.ReduceOptions:
    options = dist.ReduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, op.upper())
    options.rootRank = 0
    return options


def reduce_scatter(group: Any, whole: torch.Tensor, part: torch.Tensor, op: str, seconds: float = 0.0) -> Any:
    """Starts a reduce-scatter of a process group of torch, of equal parts, and returns its work.

    Args:
        op: a name of torch's `ReduceOp`, in any case.
        seconds: its time-out; 0: the group's.
    """
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, op.upper())
    return group._reduce_scatter_base(part, whole, _limited(options, seconds))


def all_gather(group: Any, whole: torch.Tensor, part: torch.Tensor, seconds: float = 0.0) -> Any:
    """Starts an all-gather of a process group of torch, of equal parts, and returns its work; see `reduce_scatter`."""
    options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]  # torch does not list it
    return group._allgather_base(whole, part, _limited(options, seconds))


def _limited(options: Any, seconds: float) -> Any:
    if seconds:
        options.timeout = timedelta(seconds=seconds)
    return options


def end_group(group: Any, aborts: bool = True) -> None:
    """Ends a process group of torch by the method that this version has.

    Args:
        aborts: without waiting; otherwise operations under way in it may end before.
    """
    aborting, waiting = ("abort", "_abort"), ("shutdown", "_shutdown")
    for name in (*aborting, *waiting) if aborts else (*waiting, *aborting):
        method = getattr(group, name, None)
        if method is not None:
            method()
            return


class _Followed:
    """A reduction without notice of its end: the next step begins with a call of `done`."""

    def __init__(self, work: Any, then: Callable[[], Copying] | None) -> None:
        self._work = work
        self._then = then
        self._copying: Copying | None = None

    def done(self) -> bool:
        if self._copying is None:
            if not self._work.is_completed():
                return False
            self._work.wait()  # raises the error
            self._copying = Copying() if self._then is None else self._then()
        return self._copying.done()


def _gloo(store: Any, rank: int, size: int, device: torch.device, limit: float) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = _delta(limit)
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, device: torch.device, limit: float) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = _delta(limit)
    with torch.cuda.device(device):
        return dist.ProcessGroupNCCL(store, rank, size, options)


class GlooGroup(Group):
    """A group for tensors in the host's memory.

    Args:
        store: path of the file in which the ranks find each other.
        rank, size: this one's position, and how many there are.
        device: of the tensors.
        start, limit: seconds for the others to come, and for a reduction, in which a rank may be late.

    Raises:
        RuntimeError: they did not come.
    """

    def __init__(self, store: str, rank: int, size: int, device: torch.device, start: float, limit: float) -> None:
        file = _store(store, size)
        _meet(file, rank, size, start)
        self._group, self._rank = _gloo(file, rank, size, device, limit), rank
        self.try_out(rank, size, device, start)
        _leave_store(file)

    def reduce(self, tensor: torch.Tensor, op: str, then: Callable[[], Copying] | None) -> UnderWay:
        return _Followed(self._group.reduce([tensor], _options(op)), then)

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor, op: str, then: Callable[[], Copying]) -> UnderWay:
        """Combines all of it everywhere, as torch's reduce-scatter by gloo does, which is never complete by itself."""

        def take() -> Copying:
            part.copy_(whole[self._rank * len(part) :][: len(part)])
            return then()

        options = dist.AllreduceOptions()
        options.reduceOp = _options(op).reduceOp
        return _Followed(self._group.allreduce([whole], options), take)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, first: Callable[[], object]) -> UnderWay:
        first()
        return _Followed(all_gather(self._group, whole, part), None)

    def settle(self, tensor: torch.Tensor) -> None:
        """Does nothing: the operation has ended, since its result was used."""

    def abort(self) -> None:
        end_group(self._group)


class NcclGroup(Group):
    """A group for tensors on CUDA devices. Arguments and errors as of `GlooGroup`; `device` is this rank's.

    A reduction runs on a stream of NCCL's, which waits for the current one, and the copies that follow it on one of
    this group's, which waits for NCCL's; the current stream waits for neither, so that the backward pass goes on.

    NCCL would end the process when a reduction fails, or when its monitor believes that it hangs; that is left to
    whoever waits for it. Its sockets are as the script has them: NCCL reads NCCL_SOCKET_IFNAME once, for all groups.
    """

    def __init__(self, store: str, rank: int, size: int, device: torch.device, start: float, limit: float) -> None:
        with torch.cuda.device(device), _environment(_WATCHED_HERE):
            file = _store(store, size)
            _meet(file, rank, size, start)
            self._group = _nccl(file, rank, size, device, limit)
            self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._works: dict[int, Any] = {}  # the latest, by address of the tensor
            try:
                self.try_out(rank, size, device, start)  # connects them
            except BaseException:
                self.abort()  # or the device would wait for a reduction forever, and all work that is queued after it
                raise
            finally:
                _leave_store(file)

    def reduce(self, tensor: torch.Tensor, op: str, then: Callable[[], Copying] | None) -> UnderWay:
        work = self._works[tensor.data_ptr()] = self._group.reduce([tensor], _options(op))
        return _Followed(work, None) if then is None else self._follow(work, then)

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor, op: str, then: Callable[[], Copying]) -> UnderWay:
        work = self._works[whole.data_ptr()] = reduce_scatter(self._group, whole, part, op)
        return self._follow(work, then)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, first: Callable[[], object]) -> UnderWay:
        with torch.cuda.stream(self._beside):  # the current one has nothing of it: this is after the reduce-scatter
            first()
            work = self._works[whole.data_ptr()] = all_gather(self._group, whole, part)
        return _Followed(work, None)

    def _follow(self, work: Any, then: Callable[[], Copying]) -> UnderWay:
        with torch.cuda.stream(self._beside):
            work.wait()  # makes this stream wait, not this thread
            return then()

    def settle(self, tensor: torch.Tensor) -> None:
        work = self._works.pop(tensor.data_ptr(), None)
        if work is not None:
            work.wait()

    def abort(self) -> None:
        end_group(self._group)


def _delta(seconds: float, least: float = 1.0) -> timedelta:
    return timedelta(seconds=min(max(seconds, least), _FOREVER))


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """A context in which environment variables have these values, unless they have others already."""
    unset = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in unset})
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)


class Backend(Protocol):
    """Makes groups for tensors on one kind of device."""

    def device_of(self, tensors: list[torch.Tensor]) -> str:
        """Returns an identity of the tensors' device that other ranks' devices do not have; empty if unsuitable."""

    def connect(self, store: str, rank: int, size: int, device: torch.device, start: float, limit: float) -> Group:
        """See `GlooGroup`."""

    def join(self, store: Any, rank: int, size: int, device: torch.device, limit: float) -> Any:
        """Makes a process group of torch of this kind, watched as the script has it.

        Args:
            store: of torch, in which its members meet, for their use only.
            limit: seconds for an operation.
        """


class Gloo:
    """The backend of tensors in the host's memory; every rank counts as a device of its own."""

    connect = GlooGroup
    join = staticmethod(_gloo)

    def device_of(self, tensors: list[torch.Tensor]) -> str:
        if not dist.is_available() or not dist.is_gloo_available():
            return ""
        return f"process {os.getpid()}" if tensors and all(tensor.device.type == "cpu" for tensor in tensors) else ""


class Nccl:
    """The backend of tensors on one CUDA device."""

    connect = NcclGroup
    join = staticmethod(_nccl)

    def device_of(self, tensors: list[torch.Tensor]) -> str:
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or devices.pop().type != "cuda":
            return ""
        if not dist.is_available() or not dist.is_nccl_available():
            return ""
        properties: Any = torch.cuda.get_device_properties(tensors[0].device)
        unique = getattr(properties, "uuid", None)  # since torch 2.4; None: the device's number has to do
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return f"{unique}" if unique is not None else f"{tensors[0].device.index} of {visible}"


BACKENDS: dict[str, Backend] = {"nccl": Nccl(), "gloo": Gloo()}
"""Backends by their names in the setting."""
