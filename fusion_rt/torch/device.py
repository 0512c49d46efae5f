"""The few calls that depend on where a tensor lies: in this process's memory (the *host*'s), or on a GPU.

Tensors of a GPU are communicated through the arena. Its pages are pinned for that, so that the GPU copies from and to
them by itself, on the current stream. Whoever submits waits until the copy has been made; whoever gets a result does
not, since what the script does with it comes later on that stream.

All of it is in one object, `layer`, which a test replaces on machines without a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fusion_rt.arena import Segment


class Copying:
    """Copies that have been started.

    Args:
        events: one on each stream, after the last copy there.
        tensors: what has to stay until the copies have been made.
    """

    def __init__(self, events: Sequence[torch.cuda.Event] = (), tensors: Sequence[torch.Tensor] = ()) -> None:
        self._events = events
        self._tensors = tensors

    def done(self) -> bool:
        """Whether they have been made."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Returns when they have been made."""
        for event in self._events:
            event.synchronize()


class Layer:
    """What is done about tensors that do not lie in this process's memory."""

    def __init__(self) -> None:
        self._warned = False

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in this process's memory."""
        return tensor.is_cpu

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A new tensor on the device of another, and of its dtype."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor as another one is, with its order of dimensions in memory."""
        return torch.empty_like(tensor, requires_grad=False)

    def pin(self, segment: Segment) -> None:
        """Makes a segment's pages known to the GPU, until it is closed. Where that fails, copies are only slower."""
        if segment.on_close is not None or not torch.cuda.is_available():
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = segment.address
        code = int(runtime.cudaHostRegister(address, segment.nbytes, 0))
        if code == 0:
            segment.on_close = lambda: runtime.cudaHostUnregister(address)
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"CUDA could not pin {segment.nbytes} bytes of shared memory (error {code}), so that tensors of a GPU "
                "are copied more slowly; is the limit of locked memory low (ulimit -l)?",
                stacklevel=2,
            )

    def copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Copying:
        """Starts copying tensors, between host and devices either way, on the current stream of each device."""
        devices = set()
        for destination, tensor in zip(to, source, strict=True):
            device = destination.device if tensor.is_cpu else tensor.device
            destination.copy_(tensor, non_blocking=device.type == "cuda")
            devices.add(device)
        events = []
        for device in devices:
            if device.type == "cuda":
                events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                events[-1].record(torch.cuda.current_stream(device))
        return Copying(events, [*to, *source])


layer = Layer()
