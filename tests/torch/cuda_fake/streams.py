"""A made-up GPU's queues: streams, events and registered memory, run late and in an order that a seed chooses.

What is queued on a stream runs in its order, and after the events that the stream waits for. That is all that CUDA
promises, so that is all that holds here: between any two calls each stream may have come as far as it likes, and in
half of the schedules nothing runs before somebody waits for it.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Marker:
    """A place in a stream's queue, which the stream has come to or not."""

    stream: FakeStream
    reached: bool = False


@dataclass(frozen=True)
class Transfer:
    """A copy that is queued, between the device and registered memory of the host: `nbytes` from `address`."""

    address: int
    nbytes: int


class FakeStream:
    """Stands for `torch.cuda.Stream`."""

    gpus: Gpus  # of this process, while they are installed

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.index = self.gpus.index_of(device)
        self.device = torch.device("cuda", self.index)
        self.queue: deque[Callable[[], object] | Marker] = deque()  # a marker of another stream: waits for it
        self.cuda_stream = self
        self.gpus.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        with self.gpus.lock:
            self.gpus.tick()
            if event.marker is not None and event.marker.stream is not self:
                self.queue.append(event.marker)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.record_event().query()

    def mark(self) -> Marker:
        """Queues a marker of this stream's own."""
        marker = Marker(self)
        self.queue.append(marker)
        return marker

    @property
    def is_blocked(self) -> bool:
        """True if there is nothing that it could do now."""
        head = self.queue[0] if self.queue else None
        return head is None or (isinstance(head, Marker) and head.stream is not self and not head.reached)

    def step(self) -> None:
        """Does the next thing in the queue."""
        head = self.queue.popleft()
        if not isinstance(head, Marker):
            head()
        elif head.stream is self:
            head.reached = True


class FakeEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.marker: Marker | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        gpus = FakeStream.gpus
        stream = stream or gpus.current_stream()
        with gpus.lock:
            gpus.tick()
            self.marker, self.device = stream.mark(), stream.device

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or FakeStream.gpus.current_stream()).wait_event(self)

    def query(self) -> bool:
        FakeStream.gpus.tick(asked=True)
        return self.marker is None or self.marker.reached

    def synchronize(self) -> None:
        if self.marker is not None:
            FakeStream.gpus.run_until(self.marker)


class FakeGraph:
    """Stands for `torch.cuda.CUDAGraph`.

    Attributes:
        works, transfers: queued, and announced, by each replay.
    """

    def __init__(self) -> None:
        self.works: list[Callable[[], object]] = []
        self.transfers: list[Transfer] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        FakeStream.gpus.captured = self

    def capture_end(self) -> None:
        FakeStream.gpus.captured = None

    def replay(self) -> None:
        gpus = FakeStream.gpus
        gpus.graphs += 1
        gpus.transfers.extend(self.transfers)
        for work in self.works:
            gpus.queue(work)


class _Current(threading.local):
    """What is current in a thread: first the default streams, of the first device."""

    def __init__(self, streams: list[FakeStream]) -> None:
        self.device, self.streams = 0, list(streams)


class Gpus:
    """The devices of a process.

    Args:
        seed: of the schedule.
        count: of devices.

    Attributes:
        streams: all of them.
        registered: lengths in bytes of what has been registered, by address.
        calls: calls that registered or unregistered memory: name, address, the device that was current.
        code: the answer to those that register; 0: it was done.
        transfers: copies that are queued.
        copied: how many copies between host and device there have been.
        allocated: bytes of the devices' memory that tensors have.
        faults: sentences about what CUDA forbids, and was done.
        captured: takes what is queued, in the place of a stream.
        graphs: how many have been replayed.
    """

    def __init__(self, seed: int, count: int = 1) -> None:
        self.count = count
        self.streams: list[FakeStream] = []
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.code = 0
        self.transfers: list[Transfer] = []
        self.copied = self.allocated = 0
        self.faults: list[str] = []
        self.captured: FakeGraph | None = None
        self.graphs = 0
        self.lock = threading.RLock()  # held by the thread that queues something, or has something run
        self._choose = random.Random(seed)
        self._haste = self._choose.choice((0.0, 0.0, 0.2, 0.8))  # how often something runs that nobody waits for
        FakeStream.gpus = self
        self._now = _Current([FakeStream(index) for index in range(count)])

    # --- what is current ----------------------------------------------------------------------------------------------

    def index_of(self, device: Any) -> int:
        """Returns the number of a device, given in any way that torch takes."""
        if device is None or isinstance(device, int):
            return self._now.device if device is None else device
        index = torch.device(device).index
        return self._now.device if index is None else index

    def current_stream(self, device: Any = None) -> FakeStream:
        return self._now.streams[self.index_of(device)]

    def current_device(self) -> int:
        return self._now.device

    def set_stream(self, stream: FakeStream) -> None:
        """Makes a stream the current one of its device, for good: as autograd does from node to node."""
        self._now.device, self._now.streams[stream.index] = stream.index, stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self._now.device, list(self._now.streams)
        self.set_stream(stream)
        try:
            yield
        finally:
            self._now.device, self._now.streams = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._now.device = self._now.device, self.index_of(device)
        try:
            yield
        finally:
            self._now.device = before

    # --- what runs, and when ------------------------------------------------------------------------------------------

    def queue(self, work: Callable[[], object]) -> None:
        """Queues work on the current stream."""
        if self.captured is not None:
            self.captured.works.append(work)
            return
        with self.lock:
            self.tick()
            self.current_stream().queue.append(work)

    def announce(self, transfer: Transfer) -> None:
        """Notes a copy that is about to be queued."""
        (self.transfers if self.captured is None else self.captured.transfers).append(transfer)

    def tick(self, asked: bool = False) -> None:
        """Lets time go by. `asked`: somebody may ask again and again, so something has to happen then and now."""
        with self.lock:
            asked = asked and self._choose.random() < 0.5
            while asked or self._choose.random() < self._haste:
                asked = False
                if not self._step(self.streams):
                    return

    def run_until(self, marker: Marker) -> None:
        """Runs what it takes to reach a marker, and little else."""
        with self.lock:
            self.tick()
            while not marker.reached:
                needed = marker.stream
                while needed.is_blocked:
                    assert needed.queue, "a stream waits for what has never been queued"
                    needed = needed.queue[0].stream  # type: ignore[union-attr]
                needed.step()

    def finish(self) -> None:
        """Runs all that is queued."""
        with self.lock:
            while self._step(self.streams):
                pass

    def _step(self, streams: list[FakeStream]) -> bool:
        able = [stream for stream in streams if not stream.is_blocked]
        if able:
            self._choose.choice(able).step()
        return bool(able)

    # --- memory of the host -------------------------------------------------------------------------------------------

    def is_registered(self, address: int, nbytes: int) -> bool:
        """Tells whether the devices can copy from and to a part of the host's memory by themselves."""
        return any(begin <= address and address + nbytes <= begin + length for begin, length in self.registered.items())

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("cudaHostRegister", address, self._now.device))
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("cudaHostUnregister", address, self._now.device))
        nbytes = self.registered.pop(address)
        under_way = [copy for copy in self.transfers if address <= copy.address < address + nbytes]
        if under_way:
            self.faults.append(f"memory of the host was unregistered under {len(under_way)} copies")
            self.transfers = [copy for copy in self.transfers if copy not in under_way]
        return 0
