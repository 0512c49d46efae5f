"""Operations under way, and the handles that scripts get for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from fusion_rt.client import Operation
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import Runtime, runtime
from fusion_rt.torch.ops.transfers import as_given


class Pending(Protocol):
    """An operation under way, or several that complete together."""

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations that have been submitted."""

    def result(self, here: Runtime) -> Any:
        """Waits, and returns the result for the script. Raises `HorovodInternalError` if the operation failed."""


Part = TypeVar("Part", bound=Pending)


class Group(Generic[Part]):
    """Operations on parts of one list of tensors, which complete together.

    Args:
        parts: operations whose results are sequences of tensors, each with the indices of these in the list.
        tensors: the list.
        in_place: results replace the tensors.
    """

    def __init__(
        self, parts: Sequence[tuple[Part, Sequence[int]]], tensors: Sequence[torch.Tensor], in_place: bool
    ) -> None:
        self.parts = parts
        self._tensors, self._in_place = tensors, in_place

    @property
    def operations(self) -> Sequence[Operation]:
        return [operation for part, _ in self.parts for operation in part.operations]

    def result(self, here: Runtime) -> tuple[torch.Tensor, ...]:
        """Waits for all operations before any tensor is changed; returns the results in the order of the list."""
        for operation in self.operations:
            here.client.wait(operation)
        placed: dict[int, torch.Tensor] = {}
        for part, places in self.parts:
            placed.update(zip(places, part.result(here), strict=True))
        return tuple(as_given(placed[place], tensor, self._in_place) for place, tensor in enumerate(self._tensors))


class HeldOperation:
    """An operation whose handle the script has.

    Its result is taken when the script asks for it; earlier if memory is short and it has come, since an operation in
    the place of a tensor keeps memory of the arena until then.
    """

    __slots__ = ("_error", "_lock", "_pending", "_result")

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending
        self._result: Any = None
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def has_ended(self, here: Runtime) -> bool:
        """Returns whether there is a result; reads arrived messages."""
        pending = self._pending
        return pending is None or all(here.client.poll(operation) for operation in pending.operations)

    def settle(self, here: Runtime) -> None:
        """Takes the result if it has come and memory goes back to the arena with that."""
        pending = self._pending
        if pending is None or not all(operation.done for operation in pending.operations):
            return
        if any(operation.lent for operation in pending.operations) and self._lock.acquire(blocking=False):
            try:
                self._take(here)
            finally:
                self._lock.release()
            device.layer.wait()  # a script may go on, on another stream

    def result(self, here: Runtime) -> Any:
        """Waits, and returns the result. Raises `HorovodInternalError` if the operation failed."""
        with self._lock:
            self._take(here)
        if self._error is not None:
            raise self._error
        return self._result

    def _take(self, here: Runtime) -> None:
        if self._pending is not None:
            try:
                self._result = self._pending.result(here)
            except Exception as error:  # is raised where the script waits for this operation
                self._error = error.with_traceback(None)  # whose frames would keep the memory
            self._pending = None


def hold(here: Runtime, pending: Pending) -> int:
    """Returns a handle for an operation, by which `poll` and `synchronize` find it."""
    handle = pending.operations[-1].handle
    here.pending[handle] = HeldOperation(pending)
    return handle


def poll(handle: int) -> bool:
    """Returns whether an asynchronous operation has ended, so that `synchronize` will not wait.

    Raises:
        ValueError: the handle belongs to no operation under way.
    """
    here = runtime()
    try:
        held: HeldOperation = here.pending[handle]
    except KeyError:
        raise ValueError(f"handle {handle} was not created, or has been synchronized already") from None
    return held.has_ended(here)


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation.

    Returns:
        The result, as of the operation that waits; None for a handle that has been synchronized before.

    Raises:
        HorovodInternalError: the operation failed, on all ranks.
    """
    here = runtime()
    held: HeldOperation | None = here.pending.pop(handle, None)
    return None if held is None else held.result(here)
