"""Operations under way on one tensor: with a result of its shape (`Transfer`), or of rows of all ranks (`Rows`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_rt import wire
from fusion_rt.client import Operation
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.core.tensors import (
    Memory,
    contents,
    copy_in,
    copy_out,
    fill,
    nbytes_of,
    on_device_of,
    over,
    place_of,
    received,
)


class Transfer:
    """An operation that reduces or broadcasts a tensor.

    Args:
        name: of the operation; None: unnamed.
        tensor: the input.
        in_place: whether the result replaces it.
        send: whether its contents are sent (not by a broadcast's receivers).
    """

    __slots__ = ("_in_place", "_staging", "_tensor", "operation")

    def __init__(
        self,
        here: Runtime,
        name: str | None,
        signature: wire.Signature,
        tensor: torch.Tensor,
        in_place: bool,
        send: bool = True,
    ) -> None:
        self._tensor = tensor
        self._in_place = in_place
        self._staging: torch.Tensor | None = None
        nbytes = nbytes_of(tensor)
        if nbytes <= wire.MAX_INLINE:
            self.operation = here.client.submit(name, signature, inline=contents(tensor))
            return
        place = place_of(here, tensor) if in_place else None
        if place is None:
            memory = Memory(here, nbytes, tensors=[tensor])
            self._staging = memory.tensor(tensor.dtype, tensor.shape)
            if send:
                copy_in([self._staging], [tensor])
            place = memory.place
        self.operation = here.client.submit(name, signature, place=place, keeps=tensor)
        if in_place and self._staging is not None:
            self.operation.lent = nbytes

    @property
    def operations(self) -> Sequence[Operation]:
        return (self.operation,)

    def result(self, here: Runtime) -> torch.Tensor:
        """Waits, and returns the result: the tensor itself if in place, else a new one.

        Raises:
            HorovodInternalError: the operation failed, on all ranks.
        """
        data = here.client.wait(self.operation).inline
        tensor, staging = self._tensor, self._staging
        if data is not None:
            result = tensor if self._in_place else device.layer.empty_like(tensor)
            fill(result, data)
            return result
        if staging is None:
            return tensor
        if self._in_place:
            copy_out([tensor], [staging])
            return tensor
        return on_device_of(tensor, staging)


class Complex:
    """An operation on a complex tensor, as pairs of real numbers.

    Args:
        pairs: the operation on the pairs.
        tensor: the input.
        in_place: whether the result replaces it.
    """

    __slots__ = ("_in_place", "_pairs", "_tensor")

    def __init__(self, pairs: Transfer | Rows, tensor: torch.Tensor, in_place: bool = False) -> None:
        self._pairs, self._tensor, self._in_place = pairs, tensor, in_place

    @property
    def operation(self) -> Operation:
        return self._pairs.operation

    @property
    def operations(self) -> Sequence[Operation]:
        return self._pairs.operations

    def result(self, here: Runtime) -> torch.Tensor:
        """Waits, and returns the result. Raises `HorovodInternalError` if the operation failed."""
        return as_given(self._pairs.result(here), self._tensor, self._in_place)


def as_given(result: torch.Tensor, tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Converts the result of an operation on `as_real(tensor)` to that of one on `tensor`."""
    if not tensor.is_complex():
        return result
    made = torch.view_as_complex(result)
    if not in_place:
        return made
    if tensor.is_conj():  # its pairs were a copy
        with torch.no_grad():
            tensor.copy_(made)
    return tensor


class Rows:
    """An operation whose result has rows from all ranks: allgather, alltoall or reducescatter.

    Args:
        name, tensor: as for `Transfer`.
        splits: number of rows for each rank, for an alltoall.
        rows: number of rows of the result, if that is not the sum of the operation's sizes.
    """

    __slots__ = ("_rows", "_tensor", "operation")

    def __init__(
        self,
        here: Runtime,
        name: str | None,
        signature: wire.Signature,
        tensor: torch.Tensor,
        splits: tuple[int, ...] = (),
        rows: int | None = None,
    ) -> None:
        self._tensor = tensor
        self._rows = rows
        nbytes = nbytes_of(tensor)
        if nbytes <= wire.MAX_INLINE:
            self.operation = here.client.submit(name, signature, inline=contents(tensor), splits=splits)
            return
        staging = Memory(here, nbytes, tensors=[tensor])
        copy_in([staging.tensor(tensor.dtype, tensor.shape)], [tensor])
        self.operation = staging.lend(here, name, signature, splits)

    @property
    def operations(self) -> Sequence[Operation]:
        return (self.operation,)

    def result(self, here: Runtime) -> torch.Tensor:
        """Waits, and returns the new tensor. Raises `HorovodInternalError` if the operation failed."""
        operation = here.client.wait(self.operation)
        tensor = self._tensor
        rows = sum(operation.sizes) if self._rows is None else self._rows
        result = over(received(operation), tensor.dtype, (rows, *tensor.shape[1:]))
        return on_device_of(tensor, result)
