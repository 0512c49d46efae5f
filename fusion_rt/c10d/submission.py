"""Tensors turned into an operation of the daemon: the one place that decides how their elements get there and back.

Small data travels inside messages. Other data is read and written where it lies, if that is one tensor that the daemon
gets at (`tensors.place_of`), and goes through the arena if not. The result is in its tensors when the operation has
ended, whoever waits for it or nobody: the thread that reads the daemon's answer puts it there. On a device, it does so
after work queued before the operation was submitted, whichever stream is that thread's.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch

from fusion_rt import wire
from fusion_rt.c10d.failing import CollectiveError, explained
from fusion_rt.client import Operation
from fusion_rt.client.adoption import Use
from fusion_rt.client.channel import Completion
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.core.tensors import DTYPE_NAMES, Memory, contents, copy_in, fill, over, place_of, received


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
        outputs: tensors that get the elements of the result, one after the other.

    Attributes:
        about: the name, clock and plan under which it is recorded.
        done: whether it has ended, and the result is where it belongs.
        error: why it failed; None if it has not.
        sizes: further numbers of the daemon's answer.
        watcher: called when it has ended.
    """

    __slots__ = ("_given", "_memory", "_outputs", "_queued", "_uses", "about", "done", "error", "sizes", "watcher")

    def __init__(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        self._outputs = outputs
        self._queued: device.Copying | None = None  # pending work of a device on the outputs
        if not all(map(device.layer.is_host, outputs)):
            self._queued = device.layer.mark(*outputs)
        self._given: Memory | None = None
        self._memory: Memory | None = None  # where the result comes
        self._uses: list[Use] = []  # of adopted tensors
        self.about = ("", 0, 0)
        self.done = False
        self.error: str | None = None
        self.sizes: tuple[int, ...] = ()
        self.watcher: Callable[[], None] | None = None

    def end(self) -> None:
        """Ends it."""
        for use in self._uses:
            use.end(self.error is None)
        self._uses = []
        self._given = self._memory = None
        self._outputs = ()
        self.done = True
        if self.watcher is not None:
            self.watcher()

    def _given_up(self, here: Runtime, error: BaseException) -> BaseException:
        """Returns the exception for an error by which it could not be submitted; nothing will end it."""
        for use in self._uses:
            use.end(is_complete=False)
        self._uses = []
        if isinstance(error, HorovodInternalError):
            return CollectiveError(explained(here.client.channel, str(error)))
        return error

    def _place_of(
        self, here: Runtime, tensors: Sequence[torch.Tensor], written: bool
    ) -> tuple[int, int] | wire.Address | None:
        """Returns where the elements of a single tensor lie, if the daemon can take and leave them there."""
        return place_of(here, tensors[0], self._uses, written) if len(tensors) == 1 else None

    def _staged(self, here: Runtime, nbytes: int, inputs: Sequence[torch.Tensor]) -> tuple[int, int] | None:
        """Returns the place in the arena of the operation's data, into which the inputs have been copied."""
        self._memory = memory = Memory(here, nbytes, tensors=(*inputs, *self._outputs))
        if inputs:
            copy_in(_over(memory.view, inputs), inputs)
        return memory.place

    def _lent(self) -> int:
        """Returns the bytes of the arena that it gives back when it ends."""
        return sum(memory.nbytes for memory in (self._given, self._memory) if memory is not None)

    def _ended(self, operation: Operation) -> None:
        self.error = operation.error
        self.sizes = operation.sizes
        if self.error is None and self._outputs:
            try:
                with nullcontext() if self._queued is None else device.layer.after(self._queued):
                    self._deliver(operation)
            except Exception as error:
                self.error = f"the result of {operation.name} could not be put into its tensors: {error}"
        self.end()

    def _deliver(self, operation: Operation) -> None:
        outputs = self._outputs
        data = operation.inline
        if data is not None and len(outputs) == 1:
            fill(outputs[0], data)
            return
        view = received(operation) if data is not None or self._memory is None else self._memory.view
        copy_in(outputs, _over(view, outputs))


class Collective(Submission):
    """An operation of all members of a group.

    Args:
        here: this worker's membership.
        signature: of the operation; its shape is the number of elements that this rank gives.
        inputs: tensors whose elements, one after the other, this rank gives; None: it only receives.
        outputs: as for all submissions.
        in_place: the result has as many elements as this rank gives, and takes their place.
        splits: for an alltoall, elements for each member.
        receives: for an alltoall, elements that come from each member; for an allgather, those of each member's tensor,
            and for a reducescatter, those of each member's result, where they are not equal.
        seconds: until the daemon gives it up; 0: never.
    """

    __slots__ = ()

    def __init__(
        self,
        here: Runtime,
        signature: wire.Signature,
        inputs: Sequence[torch.Tensor] | None,
        outputs: Sequence[torch.Tensor],
        *,
        in_place: bool = False,
        splits: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
        seconds: float = 0.0,
    ) -> None:
        super().__init__(outputs)
        try:
            here.client.check()
            inline = place = into = None
            large = not in_place and _nbytes_of(outputs) > wire.MAX_INLINE
            if large:
                # A member's input must stay until it has been combined, and may not be where a part of the result
                # goes.
                own = signature.kind in ("allgather", "broadcast")
                if own or not _overlap(inputs or (), outputs):
                    into = self._place_of(here, outputs, True)  # first: the input may be a part of it
            if inputs is not None:
                nbytes = _nbytes_of(inputs)
                if nbytes <= wire.MAX_INLINE:
                    inline = contents(inputs[0]) if len(inputs) == 1 else b"".join(map(contents, inputs))
                elif in_place:
                    place = self._place_of(here, inputs, True) if outputs and outputs[0] is inputs[0] else None
                    if place is not None:
                        self._outputs = ()
                else:
                    place = self._place_of(here, inputs, False)
                if inline is None and place is None:
                    place = self._staged(here, nbytes, inputs)
            if into is not None:
                self._outputs = ()
            elif large:
                given = self._memory  # has to stay until the operation has ended
                into = self._staged(here, _nbytes_of(outputs), ())
                self._given = given
            self.about = here.client.submit_in_group(
                signature,
                inline=inline,
                place=place,
                splits=splits,
                receives=receives,
                into=into,
                completion=Completion(seconds, self._ended, (inputs, outputs), self._lent()),
            ).about
        except BaseException as error:
            raise self._given_up(here, error) from None


class SentMessage(Submission):
    """A tensor on its way to another member of a group.

    Args:
        here: this worker's membership.
        group: id of the group.
        rank: whom it is for, in the job.
        tag: of the message.
        tensor: it.
        seconds: until the daemon gives it up; 0: never.
    """

    __slots__ = ()

    def __init__(self, here: Runtime, group: int, rank: int, tag: int, tensor: torch.Tensor, seconds: float) -> None:
        super().__init__()
        nbytes = tensor.nbytes
        inline = place = None
        try:
            here.client.check()
            if nbytes <= wire.MAX_INLINE:
                inline = contents(tensor)
            else:
                place = self._place_of(here, [tensor], False) or self._staged(here, nbytes, [tensor])
            operation = here.client.messages.send_to(
                group,
                rank,
                tag,
                inline=inline,
                place=place,
                nbytes=nbytes,
                completion=Completion(seconds, self._ended, tensor, self._lent()),
            )
        except BaseException as error:
            raise self._given_up(here, error) from None
        self.about = operation.about
        if operation.handle == 0:  # it is away
            self.end()


class AwaitedMessage(Submission):
    """A tensor that another member of a group sends.

    Args:
        here, group, tag, seconds: as for `SentMessage`.
        rank: its sender, in the job; None: any.
        tensor: takes it.
    """

    __slots__ = ("_is_there", "_nbytes")

    def __init__(
        self, here: Runtime, group: int, rank: int | None, tag: int, tensor: torch.Tensor, seconds: float
    ) -> None:
        super().__init__([tensor])
        self._nbytes = nbytes = tensor.nbytes
        try:
            here.client.check()
            place = None if nbytes <= wire.MAX_INLINE else self._place_of(here, [tensor], True)
            self._is_there = place is not None
            if nbytes > wire.MAX_INLINE and place is None:
                place = self._staged(here, nbytes, ())
            self.about = here.client.messages.receive_from(
                *(group, rank, tag, nbytes),
                place=place,
                completion=Completion(seconds, self._ended, tensor, self._lent()),
            ).about
        except BaseException as error:
            raise self._given_up(here, error) from None

    def _deliver(self, operation: Operation) -> None:
        if operation.sizes[1] != self._nbytes:
            raise ValueError(f"rank {operation.sizes[0]} has sent {operation.sizes[1]} bytes, and the tensor has "
                             f"{self._nbytes}")  # fmt: skip
        if not self._is_there:
            super()._deliver(operation)


class _OwnReceive(Submission):
    """A tensor that this worker itself sends."""

    __slots__ = ()

    def take(self, tensor: torch.Tensor, made: device.Copying) -> None:
        """Copies the received message, once it is `made`, and ends it."""
        with device.layer.after(made), nullcontext() if self._queued is None else device.layer.after(self._queued):
            copy_in(self._outputs, [tensor])
        self.end()


class OwnMessages:
    """Messages of a worker to itself, which need no daemon."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: defaultdict[int, deque[tuple[torch.Tensor, device.Copying]]] = defaultdict(deque)
        self._awaited: defaultdict[int, deque[_OwnReceive]] = defaultdict(deque)

    def send(self, tag: int, tensor: torch.Tensor) -> Submission:
        """Takes a copy of a tensor for the receive with this tag."""
        with self._lock:
            if self._awaited[tag]:
                self._awaited[tag].popleft().take(tensor, device.layer.mark(tensor))
            else:
                copied = tensor.detach().clone()
                self._sent[tag].append((copied, device.layer.mark(copied)))
        sent = Submission()
        sent.end()
        return sent

    def receive(self, tag: int, tensor: torch.Tensor) -> Submission:
        """Fills a tensor with the next message of this tag."""
        part = _OwnReceive([tensor])
        with self._lock:
            if self._sent[tag]:
                part.take(*self._sent[tag].popleft())
            else:
                self._awaited[tag].append(part)
        return part


def _overlap(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Tells whether tensors share storage of this process with others."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in filter(device.layer.is_host, ones)}
    return any(tensor.untyped_storage().data_ptr() in storages for tensor in filter(device.layer.is_host, others))


def _nbytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return tensors[0].nbytes if len(tensors) == 1 else sum(tensor.nbytes for tensor in tensors)


def _over(buffer: memoryview, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors like these over a buffer, one after the other."""
    places, offset = [], 0
    for tensor in tensors:
        places.append(over(buffer, tensor.dtype, tensor.shape, offset))
        offset += tensor.nbytes
    return places
