"""Several tensors of one dtype, packed into one flat tensor that a single operation works on.

A disagreement about any of them is noticed as with single tensors, since the signature has all their shapes. Results
are tensors of their own over the memory in which the operation left them.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence

import torch

from fusion_rt import wire
from fusion_rt.client import Operation
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.core.tensors import Memory, copy_in, copy_out, nbytes_of, on_device_of, over, received
from fusion_rt.torch.ops.handles import Group, Part
from fusion_rt.torch.ops.signatures import How, as_real, listed, signature_of, tensor_name

_COUNT = 8  # bytes of a number of rows


def fuse(
    kind: wire.Kind,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    op: wire.Op,
    make: Callable[[str | None, list[torch.Tensor]], Part],
    in_place: bool = False,
) -> Group[Part]:
    """Starts one operation for all tensors of each dtype.

    Args:
        kind, op: of the operation.
        name: a common base name.
        make: starts the operation of this name on these tensors; its result is a sequence of as many.
        in_place: whether results replace the tensors.

    Raises:
        ValueError: there are no tensors, or some that this operation cannot take; nothing has been submitted then.
    """
    tensors = listed(tensors, kind)
    places: dict[torch.dtype, list[int]] = {}
    real = [as_real(tensor, kind, op) for tensor in tensors]
    for place, tensor in enumerate(real):
        nbytes_of(tensor)
        signature_of(kind, tensor.dtype, tensor.shape, op)
        places.setdefault(tensor.dtype, []).append(place)
    base = tensor_name(f"grouped_{kind}", name)
    parts = []
    for number, chosen in enumerate(places.values(), 1):
        own_name = f"{base}.{number}" if base and number > 1 else base
        parts.append((make(own_name, [real[place] for place in chosen]), chosen))
    return Group(parts, tensors, in_place)


def _memory(here: Runtime, tensors: Sequence[torch.Tensor], nbytes: int) -> Memory:
    return Memory(here, nbytes, tensors=tensors)


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors)


class FusedReduction:
    """An all-reduce of several tensors as one."""

    __slots__ = ("_in_place", "_memory", "_starts", "_tensors", "operation")

    def __init__(
        self,
        here: Runtime,
        name: str | None,
        tensors: Sequence[torch.Tensor],
        how: How,
        process_set: int,
        in_place: bool,
    ) -> None:
        dtype = tensors[0].dtype
        numels = [tensor.numel() for tensor in tensors]
        signature = signature_of(
            "allreduce", dtype, (sum(numels),), how.op, how.prescale, how.postscale, 0, process_set, how.codec,
            _shapes(tensors),
        )  # fmt: skip
        self._tensors = tensors
        self._in_place = in_place
        self._starts = [start * dtype.itemsize for start in itertools.accumulate(numels[:-1], initial=0)]
        self._memory = _memory(here, tensors, sum(numels) * dtype.itemsize)
        copy_in(self._over(self._memory.view), tensors)
        self.operation = self._memory.submit(here, name, signature)
        if in_place:
            self.operation.lent = self._memory.nbytes

    @property
    def operations(self) -> Sequence[Operation]:
        return (self.operation,)

    def result(self, here: Runtime) -> Sequence[torch.Tensor]:
        """Waits, and returns the results: the tensors themselves if in place, else new ones."""
        operation = here.client.wait(self.operation)
        reduced = self._over(self._memory.view if self._memory.place is not None else received(operation))
        if self._in_place:
            copy_out(self._tensors, reduced)
            return self._tensors
        return [on_device_of(tensor, result) for tensor, result in zip(self._tensors, reduced, strict=True)]

    def _over(self, buffer: memoryview) -> list[torch.Tensor]:
        return [over(buffer, t.dtype, t.shape, start) for t, start in zip(self._tensors, self._starts, strict=True)]


class FusedGather:
    """An all-gather of several tensors as one; the data of each rank begins with its tensors' numbers of rows.

    Attributes:
        rows: for each tensor, the number of rows of each member of the process set; empty before there is a result.
    """

    __slots__ = ("_tensors", "operation", "rows")

    def __init__(self, here: Runtime, name: str | None, tensors: Sequence[torch.Tensor], process_set: int) -> None:
        dtype = tensors[0].dtype
        head = _COUNT * len(tensors)
        nbytes = head + sum(tensor.nbytes for tensor in tensors)
        signature = signature_of(
            "allgather", dtype, (nbytes // dtype.itemsize,), process_set=process_set,
            parts=tuple((0, *tensor.shape[1:]) for tensor in tensors),
        )  # fmt: skip
        self.rows: list[list[int]] = [[] for _ in tensors]
        self._tensors = tensors
        memory = _memory(here, tensors, nbytes)
        struct.pack_into(f"<{len(tensors)}q", memory.view, 0, *[len(tensor) for tensor in tensors])
        starts = itertools.accumulate((tensor.nbytes for tensor in tensors[:-1]), initial=head)
        copy_in([memory.tensor(dtype, t.shape, at) for t, at in zip(tensors, starts, strict=True)], tensors)
        self.operation = memory.lend(here, name, signature)

    @property
    def operations(self) -> Sequence[Operation]:
        return (self.operation,)

    def result(self, here: Runtime) -> Sequence[torch.Tensor]:
        """Waits, and returns the gathered tensors."""
        operation = here.client.wait(self.operation)
        buffer, tensors = received(operation), self._tensors
        pieces: list[list[torch.Tensor]] = [[] for _ in tensors]
        start = 0
        for size in operation.sizes:
            counts = struct.unpack_from(f"<{len(tensors)}q", buffer, start)
            at = start + _COUNT * len(tensors)
            for tensor, count, rows, own_pieces in zip(tensors, counts, self.rows, pieces, strict=True):
                own_pieces.append(over(buffer, tensor.dtype, (count, *tensor.shape[1:]), at))
                rows.append(count)
                at += own_pieces[-1].nbytes
            start += size * tensors[0].dtype.itemsize
        return [on_device_of(tensor, torch.cat(piece)) for tensor, piece in zip(tensors, pieces, strict=True)]


def shares(rows: int, members: int) -> list[tuple[int, int]]:
    """Deals `rows` rows out to members: first row and number of rows of each; the first members get the remainder."""
    each, more = divmod(rows, members)
    counts = [each + (member < more) for member in range(members)]
    return list(zip(itertools.accumulate(counts, initial=0), counts, strict=False))


class FusedScatter:
    """A reduce-scatter of several tensors as one: the first member's rows of each tensor, then the second's, and so on.

    The members' parts have to be equally long for that, so that shorter ones are padded with zeros.
    """

    __slots__ = ("_position", "_shares", "_tensors", "operation")

    def __init__(
        self,
        here: Runtime,
        name: str | None,
        tensors: Sequence[torch.Tensor],
        how: How,
        process_set: int,
        members: int,
        position: int,
    ) -> None:
        dtype = tensors[0].dtype
        self._tensors = tensors
        self._position = position
        self._shares = [shares(len(tensor), members) for tensor in tensors]
        row_nbytes = [math.prod(tensor.shape[1:]) * dtype.itemsize for tensor in tensors]
        longest = sum(share[0][1] * width for share, width in zip(self._shares, row_nbytes, strict=True))
        signature = signature_of(
            "reducescatter", dtype, (members * longest // dtype.itemsize,), how.op, how.prescale, how.postscale, 0,
            process_set, how.codec, _shapes(tensors),
        )  # fmt: skip
        memory = _memory(here, tensors, members * longest)
        places, sources = [], []
        for member in range(members):
            at = member * longest
            for tensor, share in zip(tensors, self._shares, strict=True):
                source = tensor.detach().narrow(0, *share[member])
                place = memory.tensor(dtype, source.shape, at)
                places.append(place)
                sources.append(source)
                at += place.nbytes
            memory.view[at : (member + 1) * longest] = bytes((member + 1) * longest - at)
        copy_in(places, sources)
        self.operation = memory.lend(here, name, signature)

    @property
    def operations(self) -> Sequence[Operation]:
        return (self.operation,)

    def result(self, here: Runtime) -> Sequence[torch.Tensor]:
        """Waits, and returns this member's rows of each tensor."""
        buffer = received(here.client.wait(self.operation))
        results, at = [], 0
        for tensor, share in zip(self._tensors, self._shares, strict=True):
            result = over(buffer, tensor.dtype, (share[self._position][1], *tensor.shape[1:]), at)
            at += result.nbytes
            results.append(on_device_of(tensor, result))
        return results
