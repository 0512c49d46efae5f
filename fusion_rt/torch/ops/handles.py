"""Operations under way, and the handles that scripts get for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from fusion_rt.client import Operation
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


def hold(here: Runtime, pending: Pending) -> int:
    """Returns a handle for an operation, by which `poll` and `synchronize` find it."""
    handle = pending.operations[-1].handle
    here.pending[handle] = pending
    return handle


def poll(handle: int) -> bool:
    """Returns whether an asynchronous operation has ended, so that `synchronize` will not wait.

    Raises:
        ValueError: the handle belongs to no operation under way.
    """
    here = runtime()
    try:
        held: Pending = here.pending[handle]
    except KeyError:
        raise ValueError(f"handle {handle} was not created, or has been synchronized already") from None
    return all(here.client.poll(operation) for operation in held.operations)


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation.

    Returns:
        The result, as of the operation that waits; None for a handle that has been synchronized before.

    Raises:
        HorovodInternalError: the operation failed, on all ranks.
    """
    here = runtime()
    held: Pending | None = here.pending.pop(handle, None)
    return None if held is None else held.result(here)
