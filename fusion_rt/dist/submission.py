"""Tensors turned into an operation of the daemon: the one place that decides how their elements get there and back.

Small data travels inside messages, all other through the arena. What comes back is in its tensors when the operation
has ended, whoever waits for it or nobody: the thread that reads the daemon's answer puts it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from fusion_rt import wire
from fusion_rt.client import Operation
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.core.tensors import DTYPE_NAMES, Memory, contents, copy_in, fill, over, received


@lru_cache(maxsize=4096)
def signature_for(
    kind: wire.Kind, group: int, dtype: str, count: int, op: wire.Op = "sum", prescale: float = 1.0, root: int = 0
) -> wire.Signature:
    """Makes the signature of an operation on `count` elements in a group; `root` is a rank of the job."""
    return wire.Signature(kind, dtype, (count,), op, prescale, 1.0, root, group)


def moved_as(tensors: Sequence[torch.Tensor]) -> tuple[str, int]:
    """Returns the element type under which tensors travel that are only moved, and its size in bytes: their own, or
    bytes where the daemon does not know it or they differ."""
    dtype = tensors[0].dtype
    name = DTYPE_NAMES.get(dtype)
    if name is None or any(tensor.dtype != dtype for tensor in tensors[1:]):
        return "uint8", 1
    return name, dtype.itemsize


class Submission:
    """An operation that has been submitted to the daemon.

    Args:
        here: this worker's membership.
        signature: of the operation; its shape is the number of elements that this rank gives.
        inputs: tensors whose elements, one after the other, this rank gives.
        outputs: tensors that get the elements of the result, one after the other.
        splits: for an alltoall, elements for each member.
        receives: for an alltoall and an allgather, elements that come from each member.
        nbytes: of all that this rank gives; more than its inputs have where the memory is only for the result.
        seconds: until the daemon gives it up; 0: never.

    Attributes:
        done: whether it has ended, and the result is where it belongs.
        error: why it failed; None if it has not.
        watcher: called when it has ended.
    """

    __slots__ = ("_memory", "_outputs", "done", "error", "operation", "watcher")

    def __init__(
        self,
        here: Runtime,
        signature: wire.Signature,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        nbytes: int,
        splits: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
        seconds: float = 0.0,
    ) -> None:
        self._outputs = outputs
        self._memory: Memory | None = None
        self.done = False
        self.error: str | None = None
        self.watcher: Callable[[], None] | None = None
        client = here.client
        if nbytes <= wire.MAX_INLINE:
            inline = contents(inputs[0]) if len(inputs) == 1 else b"".join(map(contents, inputs))
            inline = inline or bytes(nbytes)
            self.operation = client.submit(None, signature, inline=inline, splits=splits, release=self._ended)
            return
        host = all(map(device.layer.is_host, (*inputs, *outputs)))
        self._memory = memory = Memory(here, nbytes, on_device=not host)
        if inputs:
            copy_in(_over(memory.view, inputs), inputs)
        self.operation = client.submit(None, signature, place=memory.place, splits=splits, release=self._ended)

    def _ended(self, operation: Operation) -> None:
        self.error = operation.error
        if self.error is None:
            try:
                self._deliver(operation)
            except Exception as error:
                self.error = f"the result of {operation.name} could not be put into its tensors: {error}"
        self._memory = None
        self._outputs = ()
        self.done = True
        if self.watcher is not None:
            self.watcher()

    def _deliver(self, operation: Operation) -> None:
        outputs = self._outputs
        if not outputs:
            return
        data = operation.inline
        if data is not None and len(outputs) == 1:
            fill(outputs[0], data)
            return
        if data is not None or self._memory is None or operation.output is not None:
            view = received(operation)
        else:
            view = self._memory.view
        copy_in(outputs, _over(view, outputs))


def _over(buffer: memoryview, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors like these over a buffer, one after the other."""
    places, offset = [], 0
    for tensor in tensors:
        places.append(over(buffer, tensor.dtype, tensor.shape, offset))
        offset += tensor.nbytes
    return places
