"""The few calls that depend on where a tensor lies: in this process's memory (the *host*'s), or on a GPU.

Tensors of a GPU are communicated through the arena. Its pages are pinned for that, so that the GPU copies from and to
them by itself. Submitted tensors are copied on a stream of their own, beside the backward pass that goes on meanwhile,
and the submitter waits until that has been done. Results are copied on the current stream, without a wait, since
the script's use of them comes later on that stream.

All of it is in one object, `layer`, which a test replaces on machines without a GPU.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fusion_rt.host.arena import Segment
from fusion_rt.torch.core.sides import Side


class Copying:
    """Copies that have been started.

    Args:
        events: one on each stream, after the last copy there.
        tensors: kept alive until the copies have been made: what another stream than that of its memory reads or
            writes, and the host's memory. What is copied to on the current stream is not: whoever frees it orders that.

    Attributes:
        events: as above.
    """

    def __init__(self, events: Sequence[torch.cuda.Event] = (), tensors: Sequence[torch.Tensor] = ()) -> None:
        self.events = events
        self._tensors = tensors

    def done(self) -> bool:
        """Tells whether they have been made."""
        return all(event.query() for event in self.events)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Returns when they have been made."""
        for event in self.events:
            event.synchronize()

    def linger(self, seconds: float) -> None:
        """Waits until they may have been made, or for a while. Any thread may call it: it changes nothing."""
        for event in self.events:  # not `wait`, which may end something
            event.synchronize()
        if not self.events:
            time.sleep(seconds)

    def precede(self) -> None:
        """Makes later work of the current streams wait for them."""
        for event in self.events:
            torch.cuda.current_stream(event.device).wait_event(event)

    def touches(self, memory: range) -> bool:
        """Tells whether they read or write addresses of this process's memory."""
        return any(tensor.is_cpu and tensor.data_ptr() in memory for tensor in self._tensors)


class Layer:
    """Operations on tensors that may lie on a device instead of in this process's memory.

    It keeps what is copied alive until that has been done, whoever has started it, and pinned memory pinned.
    """

    def __init__(self) -> None:
        self._under_way: deque[Copying] = deque()
        self._keeping = threading.RLock()  # released objects may have finalizers that come back
        self._warned = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # on which is copied to the host
        self._landing: dict[torch.device, torch.cuda.Stream] = {}  # on which results come that no stream waits for
        self._sides: dict[torch.device, Side | None] = {}

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor lies in this process's memory."""
        return tensor.is_cpu

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Makes a tensor on the device of another, and of its dtype."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a tensor like another one, with its order of dimensions in memory."""
        return torch.empty_like(tensor, requires_grad=False)

    def pin(self, segment: Segment, tensors: Iterable[torch.Tensor]) -> None:
        """Makes a segment's pages known to the GPU of these tensors, until it is closed. Where that fails, copies are
        only slower."""
        # As that device: on another one, CUDA would make a context there, of some hundred MiB, for each rank.
        where = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if where is None or segment.on_close is not None:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = segment.address
        with torch.cuda.device(where):
            code = int(runtime.cudaHostRegister(address, segment.nbytes, 0))
        if code == 0:

            def unpin() -> None:
                self.wait(range(address, address + segment.nbytes))
                with torch.cuda.device(where):
                    runtime.cudaHostUnregister(address)

            segment.on_close = unpin
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"CUDA could not pin {segment.nbytes} bytes of shared memory (error {code}), so that tensors of a GPU "
                "are copied more slowly; is the limit of locked memory low (ulimit -l)?",
                stacklevel=2,
            )

    def copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Copying:
        """Starts copying tensors, between host and devices either way, as they are when the current stream has come as
        far as now. What is copied to the host must not be written to before that has been done."""
        copying = self.start(to, source)
        self.keep(copying)
        return copying

    def keep(self, copying: Copying) -> None:
        """Keeps the tensors of copies until they have been made."""
        self.sweep()
        if not copying.done():
            with self._keeping:
                self._under_way.append(copying)

    def mark(self, *tensors: torch.Tensor, using: Sequence[torch.Tensor] = ()) -> Copying:
        """Returns an event that is over when the current streams of these tensors' devices have come as far as now.

        Args:
            using: tensors that this work uses, to be kept alive until then.
        """
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        return Copying([_event_on(torch.cuda.current_stream(device)) for device in devices], using)

    @contextmanager
    def after(self, before: Copying, streams: dict[torch.device, torch.cuda.Stream] | None = None) -> Iterator[None]:
        """A context in which work is queued on streams beside the current ones, after all that `before` stands for.

        Args:
            streams: by device, made when there is none; None: those for results.
        """
        streams = self._landing if streams is None else streams
        with ExitStack() as stack:
            for event in before.events:
                stream = streams.get(event.device)
                if stream is None:
                    stream = streams[event.device] = torch.cuda.Stream(event.device)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def sweep(self) -> None:
        """Lets go of copied tensors."""
        if self._under_way:
            with self._keeping:
                while self._under_way and self._under_way[0].done():
                    self._under_way.popleft()

    def wait(self, memory: range | None = None) -> None:
        """Returns when all copies have been made, or those from and to addresses of this process's memory."""
        with self._keeping:
            concerned = [c for c in self._under_way if memory is None or c.touches(memory)]
        for copying in concerned:
            copying.wait()

    def start(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Copying:
        """Copies as `copy` does, but leaves it to the caller to keep the tensors."""
        streams: dict[torch.device, torch.cuda.Stream] = {}
        used: list[torch.Tensor] = []
        for destination, tensor in zip(to, source, strict=True):
            device = destination.device if tensor.is_cpu else tensor.device
            if device.type != "cuda":
                destination.copy_(tensor)
            elif tensor.is_cpu:
                streams.setdefault(device, torch.cuda.current_stream(device))
                destination.copy_(tensor, non_blocking=True)
                used.append(tensor)
            else:
                stream = streams.get(device)
                if stream is None:
                    stream = streams[device] = self._beside(device)
                with torch.cuda.stream(stream):
                    destination.copy_(tensor, non_blocking=True)
                used += destination, tensor
        return Copying([_event_on(stream) for stream in streams.values()], used)

    def stream_of(self, tensor: torch.Tensor) -> torch.cuda.Stream | None:
        """Returns the stream on which work on a tensor's device is queued now; None for one of the host."""
        return torch.cuda.current_stream(tensor.device) if tensor.device.type == "cuda" else None

    def follow(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """Makes later work of the current stream of each device wait for the work on these streams."""
        for stream in set(streams):
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)

    def side(self, tensor: torch.Tensor) -> Side | None:
        """Returns the side that selects on a tensor's device; None, with a warning, where there is none."""
        where = tensor.device
        if where not in self._sides:
            self._sides[where] = self._find_side(where)
        return self._sides[where]

    def _find_side(self, where: torch.device) -> Side | None:
        if where.type != "cuda":
            return None
        try:
            from fusion_rt.torch.core.cuda_side import CudaSide  # numba.cuda takes long to import, and may not be there

            return CudaSide(where.index)
        except (ImportError, RuntimeError) as error:
            warnings.warn(
                f"gradients on {where} are copied to the host as a whole, since FUSION_GPU_SELECTION needs "
                f"fusion_rt[cuda12] or [cuda13]: {error}",
                stacklevel=2,
            )
            return None

    def _beside(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the stream for copies to the host, which continues when the current one has come as far as now."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Returns an event after the present work of a stream. A wait for it sleeps, where CUDA's own would spin."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def as_here() -> Callable[[], None]:
    """Returns a context that gives another thread the current device of this one. Threads begin with the first device,
    and when a thread goes back to that from the stream of another one, CUDA makes a context on it, of some hundred
    MiB."""
    where = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def set_it() -> None:
        if where is not None:
            torch.cuda.set_device(where)

    return set_it


layer = Layer()
