"""The parts of every collective: the `Exchange` interface, its `Port` to other nodes, the `Reducer`, and local jobs.

An exchange runs one operation on one node. The engine runs its `jobs` (the node's local part: workers reduced through
shared memory), calls `start`, and then `receive` for every chunk a peer sends; the exchange acts through its port and
ends by calling `port.finish()`. It neither blocks nor knows sockets, so tests run a whole job of nodes in one thread.

Nodes are named by their *position* among the nodes of the process set, 0 to N - 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fusion_rt import wire
from fusion_rt.codecs.base import BucketCodec, Layout
from fusion_rt.codecs.dense import Dense
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.core.errors import FusionError
from fusion_rt.kernels import cpu, ordinary
from fusion_rt.kernels.ordinary import Operand, are_here
from fusiond.core.result import Result

Array: TypeAlias = npt.NDArray[Any]
Job: TypeAlias = Callable[[], None]

_TINY = 64  # elements up to which numpy beats the call of a kernel
_NATIVE = ("float32", "float64")
_INT64, _FLOAT64 = DTYPES["int64"], DTYPES["float64"]
BITWISE = ("band", "bor", "bxor")  # ops, for integers and bool


class ExchangeError(FusionError):
    """A peer sent a chunk that this operation cannot contain; the operation fails on all ranks."""


class Port(Protocol):
    """The way out of an exchange. Payloads given to `send` stay unchanged until the exchange has finished."""

    position: int
    nodes: int
    chunk_bytes: int

    def send(self, position: int, part: int, start: int, hop: int, payload: memoryview | bytes) -> None:
        """Sends one chunk to a peer, as soon as its credit allows."""

    def work(self, nbytes: int, job: Job, then: Callable[[], None]) -> None:
        """Runs a job that touches so many bytes, and then `then`: both at once if they are few; else the job on a
        thread, so that the event loop goes on meanwhile. The exchange receives nothing before `then` has returned.
        An exception of the job fails the operation."""

    def beside(self, job: Job, then: Callable[[], None]) -> None:
        """Does the work of a received chunk, with which `receive` ends: both at once; or, of a long chunk where
        `Exchange.lanes`, the job on a thread, while the exchange receives further chunks, and `then` later in the event
        loop. The chunk has been consumed when `then` has returned. An exception fails the operation."""

    def finish(self) -> None:
        """All chunks have been received; called once. The engine delivers when its payloads have been consumed."""


class Exchange(ABC):
    """One operation on one node.

    Attributes:
        local_nbytes: bytes that `jobs` touch; the engine runs small ones at once instead of in the kernel pool.
        lends: it sends borrowed memory, so that it is over only when peers have consumed that.
            Where all payloads are `bytes`, which never change, that need not be waited for, and no peer has to tell.
        lanes: the work of chunks may be done by threads (`Port.beside`), several at a time.
        results: for each local member, in rank order, when results do not lie where the inputs lay; else empty.
    """

    local_nbytes: int = 0
    lends: bool = True
    lanes: bool = False

    def __init__(self, port: Port) -> None:
        self.port = port
        self.results: list[Result] = []

    def jobs(self, threads: int) -> Sequence[Job]:
        """The local part, as at most `threads` jobs that may run side by side, before `start`."""
        del threads
        return ()

    @abstractmethod
    def start(self) -> None:
        """Sends the chunks that can be sent; in a process set on one node, finishes."""

    def abandon(self) -> None:  # noqa: B027 - most have nothing to give back
        """The operation has failed, and no job of it runs: a codec gets back the part taken from its residual."""

    @abstractmethod
    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        """Takes a chunk from the peer at `position`. It has been consumed when this returns, or as `Port.beside` says.

        Raises:
            ExchangeError: the chunk is not part of this operation, came before, or has the wrong size.
        """


@dataclass(frozen=True)
class Reducer:
    """A way to combine elements. `divisor` is the number of ranks when they are averaged, else 1. `headroom` is by what
    `prescale` is too small, and `postscale` too large, so that a node's sum is in range (`codecs.averages`).

    A sum of integers wraps around, as torch's does. An average of integers is that of their sum in int64, truncated
    toward zero; so partial results of narrower integers are int64 (`partial`).
    """

    op: str
    dtype: DType
    prescale: float = 1.0
    postscale: float = 1.0
    divisor: int = 1
    headroom: float = 1.0

    @cached_property
    def widens(self) -> bool:
        """True if partial results are wider than elements."""
        return self.divisor != 1 and not self.dtype.is_floating and self.dtype.itemsize < _INT64.itemsize

    @cached_property
    def conversions(self) -> tuple[tuple[DType, DType], ...]:
        """The conversions that kernels make, as (from, to)."""
        if self.op != "adasum" or not self.dtype.is_half:
            return ()
        return (self.dtype, _FLOAT64), (_FLOAT64, self.dtype)

    @cached_property
    def is_plain(self) -> bool:
        """True if elements are combined as fast as memory is read."""
        return self.op != "adasum" and not self.widens

    @cached_property
    def partial(self) -> DType:
        """The element type of partial results."""
        return _INT64 if self.widens else self.dtype

    def whole(self, sources: Sequence[Operand], outputs: Sequence[Operand]) -> None:
        """Does everything at once, for a process set on one node: prescales, combines, postscales."""
        self._reduce_anywhere(sources, outputs, self.prescale, self.postscale, self.divisor)

    def local(self, sources: Sequence[Operand], target: Array) -> None:
        """Computes this node's contribution: prescaled and combined, not postscaled."""
        self._reduce_anywhere(sources, (target,), self.prescale, 1.0, 1)

    def combine(self, first: Array, second: Array, target: Array) -> None:
        """Combines two partial results."""
        self._reduce((first, second), (target,), 1.0, 1.0, 1)

    def final(self, parts: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Combines the last partial results and applies the postscale and the divisor."""
        self._reduce(parts, outputs, 1.0, self.postscale, self.divisor)

    def nothing(self, elements: int) -> Array:
        """Returns elements that change no result when they are combined (before scaling), as they are stored."""
        dtype = self.dtype
        if self.op == "band":
            return ~np.zeros(elements, dtype.storage)
        if self.op in ("min", "max") and dtype.name != "bool":
            largest = self.op == "min"
            if dtype.is_half:
                infinity = 0x7C00 if dtype.name == "float16" else 0x7F80
                return np.full(elements, infinity if largest else infinity | 0x8000, dtype.storage)
            if dtype.is_floating:
                return np.full(elements, np.inf if largest else -np.inf, dtype.storage)
            limits = np.iinfo(dtype.storage)
            return np.full(elements, limits.max if largest else limits.min, dtype.storage)
        if self.op == "product" and dtype.is_half:
            return np.full(elements, 0x3C00 if dtype.name == "float16" else 0x3F80, dtype.storage)
        return np.full(elements, self.op in ("product", "min"), dtype.storage)

    def needs_kernel(self, elements: int) -> bool:
        """Returns whether a kernel has to be compiled, the first time on a host, to reduce so many elements."""
        if self.op in BITWISE:
            return False
        plain = self.op == "sum" and self.dtype.name in _NATIVE and self.prescale == self.postscale == 1
        return elements > _TINY or not plain

    def _reduce_anywhere(
        self, sources: Sequence[Operand], outputs: Sequence[Operand], prescale: float, postscale: float, divisor: int
    ) -> None:
        if are_here(sources) and are_here(outputs):
            self._reduce(sources, outputs, prescale, postscale, divisor)
        else:
            how = {"prescale": prescale, "postscale": postscale}
            ordinary.reduce(self.op, self.dtype, sources, outputs, **how, divisor=divisor)

    def _reduce(
        self, sources: Sequence[Array], outputs: Sequence[Array], prescale: float, postscale: float, divisor: int
    ) -> None:
        op, dtype = self.op, self.dtype
        if self.widens:
            cpu.reduce_widened(op, sources, outputs, prescale, postscale, divisor)
        elif len(sources[0]) > _TINY or op != "sum" or dtype.name not in _NATIVE or (prescale, postscale) != (1, 1):
            cpu.reduce(op, dtype, sources, outputs, prescale=prescale, postscale=postscale, divisor=divisor)
        else:
            self._add_few(sources, outputs, divisor)

    @staticmethod
    def _add_few(sources: Sequence[Array], outputs: Sequence[Array], divisor: int) -> None:
        # A loss or a metric: the same bits as the kernel's, for a third of the cost of its call (3 against 10 µs).
        total = sources[0] if len(sources) == 1 else sources[0] + sources[1]
        for source in sources[2:]:
            total = total + source
        if divisor != 1:
            total = total / divisor  # anew, because an output may be the source
        for output in outputs:
            output[:] = total


def local_jobs(reducer: Reducer, sources: Sequence[Operand], target: Array, threads: int) -> Sequence[Job]:
    """Returns jobs that leave this node's contribution in `target`; none when it is there already."""
    if len(sources) == 1 and sources[0] is target and reducer.prescale == 1.0:
        return ()
    if threads == 1:
        return [lambda: reducer.local(sources, target)]
    return split_jobs(
        lambda low, high: reducer.local([source[low:high] for source in sources], target[low:high]),
        len(target),
        threads,
        reducer.dtype.itemsize,
    )


def split_jobs(work: Callable[[int, int], None], length: int, threads: int, itemsize: int) -> list[Job]:
    """Returns jobs that call `work(low, high)` for ranges that together are all of `length` elements."""

    def job(low: int, high: int) -> Job:
        return lambda: work(low, high)

    return [job(low, high) for low, high in cpu.split(length, threads, itemsize)]


def shared_jobs(pieces: Sequence[tuple[Callable[[int, int], None], int, int]], threads: int) -> list[Job]:
    """Returns at most `threads` jobs, each of which does a part of every piece of work.

    Args:
        pieces: functions to be called with ranges, the length that these add up to, and the bytes of an element.
    """
    shares: list[list[Job]] = [[] for _ in range(threads)]
    for work, length, itemsize in pieces:
        for share, job in zip(shares, split_jobs(work, length, threads, itemsize), strict=False):
            share.append(job)

    def all_of(share: Sequence[Job]) -> Job:
        def do() -> None:
            for job in share:
                job()

        return do

    return [all_of(share) for share in shares if share]


def of_partials(reducer: Reducer, codec: BucketCodec) -> BucketCodec:
    """Returns the codec of partial results, given that of elements."""
    return Dense().open(Layout(reducer.partial, codec.layout.elements)) if reducer.widens else codec


@dataclass
class Once:
    """Notes which chunks have come, so that each is reduced exactly once.

    Attributes:
        expected: how many there are; `taken`: of them, those whose work is done.
        seen: those that have come.
    """

    expected: int
    taken: int = 0
    seen: set[tuple[int, int, int, int]] = field(default_factory=set)

    def note(self, chunk: wire.Chunk, position: int = 0) -> None:
        """Notes a chunk that has come, and whose work is done; as `came`."""
        self.came(chunk, position)
        self.taken += 1

    def came(self, chunk: wire.Chunk, position: int = 0) -> None:
        """Notes a chunk that has come; `position` tells senders of the same part apart, where there are several.

        Raises:
            ExchangeError: this chunk has come before.
        """
        identity = (chunk.part, chunk.start, chunk.hop, position)
        if identity in self.seen:
            raise ExchangeError(f"chunk {identity} of {chunk.key.name!r} came twice")
        self.seen.add(identity)

    @property
    def complete(self) -> bool:
        return self.taken == self.expected


def spoil(outputs: Sequence[Array], layout: Layout) -> None:
    """Makes all elements (floating) of tensors NaN: the result of a step that a gradient which was not finite has
    spoiled. Padding becomes zero, as in every result, for these may be where the next gradients are."""
    half = {"float16": 0x7E00, "bfloat16": 0x7FC0}
    for output in outputs:
        output[:] = 0
        for span in layout.spans:
            output[span.start : span.end] = half.get(layout.dtype.name, np.nan)


def raw(array: Array) -> memoryview:
    """Returns the bytes of a contiguous array, without a copy."""
    return array.view(np.uint8).data


def chunk_starts(length: int, step: int) -> range:
    """Returns the first elements of the chunks of a part of `length` elements; none for an empty part."""
    return range(0, length, step)
