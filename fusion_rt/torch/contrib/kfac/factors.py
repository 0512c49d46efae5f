"""Exchange of Kronecker factors, from the hook that sees a batch to running averages that all ranks share.

Factors are symmetric, so only upper triangles travel. Those of several layers make a bucket, in an order that is the
same on all ranks and roughly that of the backward pass. In the first update it is only counted how often each layer
runs; from then on a bucket is sent within the backward pass, when all its layers have run that often, and at the latest
in `flush`. Results are waited for in `settle`, when somebody needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_rt.torch.contrib.kfac.layers import Layer
from fusion_rt.torch.core.process_sets import ProcessSet, takes_part
from fusion_rt.torch.core.runtime import Runtime, is_initialized, runtime
from fusion_rt.torch.ops.handles import synchronize
from fusion_rt.torch.ops.reduce import grouped_allreduce_async
from fusion_rt.torch.ops.signatures import Sum

BUCKET_NBYTES = 4 << 20


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the upper triangle of [n, n], row by row, as [n (n + 1) / 2]."""
    return matrix.masked_select(_triangle(len(matrix), matrix.device))


def unpack(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the symmetric matrix [size, size] of which this is the upper triangle."""
    upper = packed.new_zeros(size, size).masked_scatter_(_triangle(size, packed.device), packed)
    return upper + upper.triu(1).T


def _triangle(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_()


class LayerState:
    """State of one layer's factors.

    Attributes:
        layer: the layer.
        a, g: running averages of its factors; None before the first update.
        updates: how many updates are in them.
        fresh: they have changed since they were decomposed.
        expected_runs: how often it ran in the last update in which it did; 0 if that is not known.
        runs: how often it has run since the last update.
        bucket: the layers that it is sent with.
    """

    bucket: Bucket

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.a: torch.Tensor | None = None
        self.g: torch.Tensor | None = None
        self.updates = 0
        self.fresh = False
        self.expected_runs = 0
        self.runs = 0
        self._sum: tuple[torch.Tensor, torch.Tensor] | None = None
        self._count = 0

    def add(self, factors: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Adds the factors of a batch, if it was not empty."""
        if factors is None:
            return
        self._count += 1
        if self._sum is None:
            self._sum = factors
        else:
            for total, factor in zip(self._sum, factors, strict=True):
                total += factor

    def take(self) -> tuple[list[torch.Tensor], int]:
        """Returns the triangles of A and G, averaged over the batches since the last call, and 1; or zeros and 0."""
        factors, count = self._sum, self._count
        self._sum, self._count = None, 0
        if factors is None:
            sizes = (self.layer.a_size, self.layer.g_size)
            dtype, device = self.layer.dtype, self.layer.weight.device
            return [torch.zeros(size * (size + 1) // 2, dtype=dtype, device=device) for size in sizes], 0
        return [pack(factor).div_(count) for factor in factors], 1

    def blend(self, a: torch.Tensor, g: torch.Tensor, decay: float) -> None:
        """Takes an update into the running averages, which begin as plain averages: with the weight min(1 − 1/k, decay)
        for what was there before the k-th (Martens & Grosse, section 5)."""
        self.updates += 1
        self.fresh = True
        new = unpack(a, self.layer.a_size), unpack(g, self.layer.g_size)
        if self.a is None or self.g is None:
            self.a, self.g = new
            return
        weight = 1 - min(1 - 1 / self.updates, decay)
        self.a.lerp_(new[0], weight)
        self.g.lerp_(new[1], weight)


class Bucket:
    """Layers whose factors are sent together.

    Attributes:
        name: of the operation.
        states: the layers.
        missing: how many of them have not yet run as often as expected.
        sent: it has been sent in this update.
    """

    def __init__(self, name: str, states: Sequence[LayerState]) -> None:
        self.name = name
        self.states = states
        self.missing = len(states)
        self.sent = False
        for state in states:
            state.bucket = self


@dataclass(frozen=True)
class _Sent:
    """A bucket under way; without a handle what is in it is the result already."""

    bucket: Bucket
    tensors: list[torch.Tensor]
    handle: int | None
    here: Runtime | None


class FactorExchange:
    """Averages the factors of layers over the ranks, update after update.

    Every rank sends every bucket once in an update: also if it has nothing to say, because a layer took no part there;
    the average is then over those that have.

    Args:
        states: the layers, in the order of the model.
        name: the beginning of the operations' names.
        process_set: the ranks that take part.

    Attributes:
        updates: how often factors have been sent.
        nbytes: bytes of factors in an update.
        waited_seconds: time spent waiting for the others, in all updates together.
    """

    def __init__(self, states: Sequence[LayerState], name: str, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._buckets = _buckets(states, name)
        self._under_way: list[_Sent] = []
        self._open = False
        self.updates = 0
        self.nbytes = sum(_nbytes(state) for state in states)
        self.waited_seconds = 0.0

    def arrived(
        self, state: LayerState, factors: Callable[[], tuple[torch.Tensor, torch.Tensor] | None], decay: float
    ) -> None:
        """Takes in a layer that has run forward and backward. `factors` makes its contribution; it is not wanted any
        more if the layer has run as often as in its last update and was sent."""
        self._begin(decay)
        state.runs += 1
        if state.bucket.sent:
            return
        state.add(factors())
        if state.runs == state.expected_runs:
            state.bucket.missing -= 1
            if not state.bucket.missing:
                self._send(state.bucket)

    def flush(self, decay: float) -> None:
        """Sends what has not been sent yet, and ends the update."""
        self._begin(decay)
        for bucket in self._buckets:
            if not bucket.sent:
                self._send(bucket)
        self._close()
        self.updates += 1

    def settle(self, decay: float) -> None:
        """Waits for everything that was sent in the last update, and takes it into the running averages; not while an
        update is under way.

        An update with values that are not finite (a loss was scaled up too much, say) is dropped, on all ranks.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        if self._open:
            return
        under_way, self._under_way = self._under_way, []
        started = time.perf_counter()
        results = [(sent, _result(sent)) for sent in under_way]
        self.waited_seconds += time.perf_counter() - started
        if not all(bool(tensor.isfinite().all()) for _, tensors in results for tensor in tensors):
            return
        for sent, tensors in results:
            if tensors:
                for number, count in enumerate(tensors[-1].tolist()):
                    if count:
                        a, g = tensors[2 * number : 2 * number + 2]
                        sent.bucket.states[number].blend(a / count, g / count, decay)

    def drop(self) -> None:
        """Forgets what is under way, and what has been gathered."""
        self._under_way = []
        for bucket in self._buckets:
            for state in bucket.states:
                state.take()
        self._close()

    def _begin(self, decay: float) -> None:
        if not self._open:
            self.settle(decay)
            self._open = True

    def _close(self) -> None:
        self._open = False
        for bucket in self._buckets:
            bucket.missing, bucket.sent = len(bucket.states), False
            for state in bucket.states:
                if state.runs:
                    state.expected_runs, state.runs = state.runs, 0

    def _send(self, bucket: Bucket) -> None:
        tensors: list[torch.Tensor] = []
        counts = []
        for state in bucket.states:
            triangles, count = state.take()
            tensors += triangles
            counts.append(count)
        tensors.append(tensors[0].new_tensor(counts))
        bucket.sent = True
        handle = here = None
        if takes_part(self._process_set):
            here = runtime()
            handle = grouped_allreduce_async(tensors, name=bucket.name, op=Sum, process_set=self._process_set)
        self._under_way.append(_Sent(bucket, tensors, handle, here))


def _result(sent: _Sent) -> Sequence[torch.Tensor]:
    """Waits for a bucket; nothing if it was sent to a job that has ended."""
    if sent.handle is None:
        return sent.tensors
    if not is_initialized() or sent.here is not runtime():
        return []
    reduced: Any = synchronize(sent.handle)
    return reduced or []


def _buckets(states: Sequence[LayerState], name: str) -> list[Bucket]:
    """Puts layers into buckets, from the last to the first, of about `BUCKET_NBYTES` each."""
    groups: list[list[LayerState]] = []
    filled = 0
    for state in reversed(states):
        nbytes = _nbytes(state)
        if not groups or filled + nbytes > BUCKET_NBYTES or not _alike(groups[-1][-1].layer, state.layer):
            groups.append([])
            filled = 0
        groups[-1].append(state)
        filled += nbytes
    return [Bucket(f"{name}.factors.{number}", group) for number, group in enumerate(groups)]


def _alike(one: Layer, other: Layer) -> bool:
    return one.dtype == other.dtype and one.weight.device == other.weight.device


def _nbytes(state: LayerState) -> int:
    sizes = (state.layer.a_size, state.layer.g_size)
    return sum(size * (size + 1) // 2 for size in sizes) * state.layer.dtype.itemsize
