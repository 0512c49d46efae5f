"""Selection beside training: on a stream of its own, from torch tensors without a copy, into memory of the host that
the daemon reads.

A worker makes one `SideSelector` for each bucket, once, with an `out` in memory that it shares with its daemon:

    layer = TorchLayer(torch, torch.cuda.current_device())
    selector = SideSelector(layer, bucket.numel(), [[(0, bucket.numel())]], out, momentum=0.9)

For each step, as soon as the backward pass has queued the filling of the bucket (in the hook of its last gradient):

    selector.start(bucket, [k])  # returns at once; the backward pass goes on beside it
    selector.after()           # the bucket may be filled again, by what is queued on the current stream from now on
    ...
    (taken,) = selector.finish()  # waits; `taken.indices` and `taken.values` are in `out`, ready for the daemon to send

`selector.ready()` tells without waiting whether it is done, so that one thread can watch many buckets. A checkpoint
takes `selector.residual` and `selector.velocity` between `finish` and the next `start`; to restore, copy into them.

The selection runs in the worker. That the daemon runs it, on buffers which it opens through CUDA IPC, is not built: it
would have to work on torch's memory, and return memory that torch counts as lent, without torch.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion_rt.kernels.cuda import selection
from fusion_rt.kernels.cuda.selection import DeviceArray, Found, Memory, Range, Taken
from fusion_rt.kernels.cuda.shim import cuda

Tensor = Any  # fusion_rt.kernels does not import torch
_FORESIGHT = 8  # steps after one whose threshold was not near that are prepared for that
_ALIKE = 2  # steps in a row that have to have queued the same; kernels are compiled, and plans told, in the first


class TorchLayer:
    """The device as a `SideSelector` needs it: the calls of torch and of `numba.cuda` that the simulator does not have.

    The tests without a GPU check, with substitutes, which calls it makes and in which order.

    Args:
        torch: the module.
        index: of the device.

    Attributes:
        stream: the side stream, as the kernels take it.
    """

    def __init__(self, torch: Any, index: int) -> None:
        self._torch, self._index = torch, index
        self._device = torch.device("cuda", index)
        self._side = torch.cuda.Stream(self._device)
        self._reached = torch.cuda.Event()  # used again and again: making one takes longer than waiting for it
        self._find: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._streams: dict[int, Any] = {}  # by their addresses: torch takes longer to make one than to launch a kernel
        with self.active():
            self.stream = cuda.external_stream(self._side.cuda_stream)

    def active(self) -> AbstractContextManager[Any]:
        """While it lasts, arrays and launches of this thread belong to this device."""
        context: AbstractContextManager[Any] = cuda.gpus[self._index]
        return context

    def beside(self) -> AbstractContextManager[Any]:
        """While it lasts, this thread's work on tensors is queued on the side stream."""
        context: AbstractContextManager[Any] = self._torch.cuda.stream(self._side)
        return context

    def wrap(self, tensor: Tensor) -> DeviceArray:
        """A tensor as kernels take it; the same memory."""
        if tensor.device != self._device or not tensor.is_contiguous():
            raise ValueError(f"kernels work on contiguous tensors on {self._device}, not on one on {tensor.device}")
        return cuda.as_cuda_array(tensor.detach().view(-1), sync=False)

    def zeros(self, n: int, dtype: str) -> Tensor:
        """A new tensor on the device, filled with zeros by the side stream."""
        with self.beside():
            return self._torch.zeros(n, dtype=getattr(self._torch, dtype), device=self._device)

    def pin(self, array: npt.NDArray[Any]) -> Tensor:
        """Memory of the host, as a tensor that the device can copy to by itself; the same memory."""
        with self._torch.cuda.device(self._device):  # or CUDA would make a context on another one
            self._check(self._torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0), "pin")
        return self._torch.from_numpy(array)

    def unpin(self, pinned: Tensor) -> None:
        """Undoes `pin`."""
        with self._torch.cuda.device(self._device):
            self._check(self._torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr()), "unpin")

    def follow(self) -> None:
        """Makes later work of the side stream wait for the work queued on the current stream."""
        self._reached.record(self._current())
        self._side.wait_event(self._reached)

    def lead(self, event: Any) -> None:
        """Makes later work of the current stream wait for an event."""
        self._current().wait_event(event)

    def copy(self, source: Tensor, pinned: Tensor) -> None:
        """Queues a copy on the side stream."""
        with self.beside():
            pinned.copy_(source, non_blocking=True)

    def mark(self, event: Any = None) -> Any:
        """An event after the work queued on the side stream, which has `synchronize()` and `query()`; an earlier
        one of these, which is used again, or a new one."""
        if event is None:
            event = self._torch.cuda.Event(blocking=True)  # who waits for it sleeps
        event.record(self._side)
        return event

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that queues all that `work` would queue on the side stream, by one call. Nothing is queued
        now."""
        graph = self._torch.cuda.CUDAGraph()

        change = self._torch.cuda.set_stream

        def replay() -> None:
            before = self._current()
            change(self._side)  # `beside` does no more, and takes longer than the launch
            try:
                graph.replay()
            finally:
                change(before)

        with self.beside(), _without_garbage_collection():
            graph.capture_begin(capture_error_mode="thread_local")  # other threads go on with what no capture allows
            try:
                work()
            finally:
                graph.capture_end()
        return replay

    def _current(self) -> Any:
        """Returns the stream on which this thread queues its work now."""
        if self._find is None:
            return self._torch.cuda.current_stream(self._device)
        address = self._find(self._index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = self._torch.cuda.current_stream(self._device)
        return stream

    def _check(self, code: Any, what: str) -> None:
        if int(code) != 0:
            raise RuntimeError(f"CUDA could not {what} memory of the host (error {int(code)}); see `ulimit -l`")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A context for a capture, which would fail if memory of the device were freed in it: of an earlier plan, say."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class SideSelector:
    """Selects from groups of elements of one array on a GPU, step by step; the residual stays there.

    Args:
        layer: the device.
        elements: of the array.
        groups: ranges of the elements that are compared with each other, ascending.
        out: int32, contiguous: where results go, group after group, `selection.words(room)` of them for each. It is
            pinned until `close`, page by page, so it should share no page with another's; memory shared with the daemon
            will do.
        rooms: up to how many elements of each group may be selected; default: of the only group, what `out` can have.
        momentum, nesterov: of `selection.Memory`; without momentum there is no velocity.
        found: buffers for the groups; default: new ones. One can serve several selectors of one layer.
        memory: residual and velocity; default: new ones, of zeros. Selectors of other ranges may have the same.

    Attributes:
        residual, velocity: tensors.
    """

    def __init__(
        self, layer: TorchLayer, elements: int, groups: Sequence[Sequence[Range]], out: npt.NDArray[np.int32],
        rooms: Sequence[int] = (), momentum: float = 0.0, nesterov: bool = False, found: Found | None = None,
        memory: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        if out.dtype != np.int32 or not out.flags.c_contiguous:
            raise ValueError(f"results go into a contiguous array of int32, not of {out.dtype}")
        rooms = tuple(rooms) or ((len(out) - selection.HEADER) // 2,)
        if len(out) != sum(map(selection.words, rooms)):
            raise ValueError(f"results of up to {list(rooms)} elements do not have {len(out)} words")
        self._layer, self._words, self._rooms = layer, out, rooms
        self._event: Any = None  # at the end of the step under way; None: none is
        self._mark: Any = None  # that of the last step
        self._given: Tensor = None  # torch may not give its memory to another while the kernels still read it
        self._ks: Sequence[int] = rooms
        self._wrapped: tuple[int, DeviceArray] = (0, None)  # the address of the last gradient, and the array
        self._expected = [0] * len(rooms)  # as the device has it
        self._digits = 0  # steps for which thresholds that are not near will be found at once
        self._last: Hashable = None  # what the last step has queued, and how many before it have queued the same
        self._alike = 0
        self._captures = True
        self._captured: tuple[Hashable, Callable[[], None]] = (None, lambda: None)
        with layer.active():
            if memory is None:
                memory = layer.zeros(elements, "float32"), layer.zeros(elements, "float32") if momentum else None
            self.residual, self.velocity = memory
            self._out = layer.zeros(len(out), "int32")
            velocity = None if self.velocity is None else layer.wrap(self.velocity)
            self._memory = Memory(layer.wrap(self.residual), None, velocity, momentum, nesterov)
            self._device_out = layer.wrap(self._out)
            self._found = found or Found(groups, rooms, stream=layer.stream)
            self._offsets = [0, *accumulate(map(selection.words, rooms))]
            self._pinned = layer.pin(out)

    def start(self, gradient: Tensor, ks: Sequence[int], factor: float = 1.0, at_once: bool = False) -> None:
        """Queues a step: adds gradient * factor and takes exactly the k largest elements of each group out of the
        residual. That takes as many launches for any number of groups.

        Args:
            gradient: float32, on the device, as long as the residual.
            ks: how many of each group.
            at_once: all of it is done on the device before work that is queued next, which may change the residual.
                Otherwise a step whose threshold is far from the expected one is finished by `finish`.
        """
        if self._event is not None:
            raise RuntimeError("a selection is still under way; finish it before the next")
        for k, room in zip(ks, self._rooms, strict=True):
            if not 1 <= k <= room:
                raise ValueError(f"there is room for 1 to {room} elements, not for {k}")
        if gradient.numel() != self.residual.numel() or "float32" not in str(gradient.dtype):
            raise ValueError(
                f"the gradient has to be {self.residual.numel()} float32, not {gradient.numel()} {gradient.dtype}"
            )
        layer, memory = self._layer, self._memory
        address = gradient.data_ptr()
        if address != self._wrapped[0]:  # wrapping takes longer than a launch
            with layer.active():
                self._wrapped = address, layer.wrap(gradient)
        memory.gradient, memory.factor = self._wrapped[1], factor
        layer.follow()
        surveys, digits = 0 in self._expected, at_once or self._digits > 0
        self._digits = max(0, self._digits - 1)
        self._ks = ks
        self._queue((address, tuple(ks), surveys, digits, factor), partial(self._select, ks, surveys, digits))
        self._event = self._mark = layer.mark(self._mark)
        self._given = gradient

    def _queue(self, what: Hashable, work: Callable[[], None]) -> None:
        """Queues a step's work: by one call, where the steps before have queued the same. Each launch of a kernel costs
        the host time for itself and for each of its arrays, and there are seven or eight."""
        if what == self._captured[0]:
            self._captured[1]()
            return
        self._alike = self._alike + 1 if what == self._last else 0
        self._last = what
        with self._layer.active():
            if self._alike < _ALIKE or not self._captures:
                work()
                return
            try:
                self._captured = what, self._layer.capture(work)
            except Exception as error:
                self._captures = False
                warnings.warn(
                    f"selection on the GPU is launched kernel by kernel, since CUDA makes no graph of it: {error}",
                    stacklevel=2,
                )
                work()
                return
        self._captured[1]()

    def _select(self, ks: Sequence[int], surveys: bool, digits: bool) -> None:
        selection.take_largest(
            self._memory, self._found, ks, self._device_out, None, surveys, digits, self._layer.stream
        )
        self._copy(ks)

    def _select_rest(self) -> None:
        """Selects from the groups from which nothing has been taken yet, and waits for it."""
        self._digits = _FORESIGHT
        with self._layer.active():
            selection.take_open(self._memory.residual, self._found, self._device_out, self._layer.stream)
            self._copy(self._ks)
            self._layer.mark().synchronize()

    def _copy(self, ks: Sequence[int]) -> None:
        """Queues the copy of the results to the host: of all of it at once, unless there is room for more, as there is
        while a codec warms up. Then of each group indices, and values."""
        if tuple(ks) == self._rooms:
            self._layer.copy(self._out, self._pinned)
            return
        for first, room, k in zip(self._offsets, self._rooms, ks, strict=False):
            values = first + selection.HEADER + room
            for part in (slice(first, first + selection.HEADER + k), slice(values, values + k)):
                self._layer.copy(self._out[part], self._pinned[part])

    def after(self) -> None:
        """Lets later work of the current stream change the gradient."""
        self._layer.lead(self._begun())

    def ready(self) -> bool:
        """Says whether `finish` would not have to wait."""
        return bool(self._begun().query())

    def finish(self) -> list[Taken]:
        """Waits for the started selection. Returns the result of each group, whose arrays are views of `out`, until the
        next step."""
        self._begun().synchronize()
        self._event = self._given = None
        taken = self._taken()
        if any(one.open for one in taken):
            self._select_rest()
            taken = self._taken()
        self._expected = [one.expected for one in taken]
        return taken

    def _taken(self) -> list[Taken]:
        return [Taken(self._words[first:end]) for first, end in pairwise(self._offsets)]

    def close(self) -> None:
        """Waits for the started selection, and releases `out`."""
        if self._event is not None:
            self.finish()
        self._layer.unpin(self._pinned)

    def _begun(self) -> Any:
        if self._event is None:
            raise RuntimeError("no selection is under way; start one first")
        return self._event
