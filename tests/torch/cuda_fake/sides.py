"""Selection on the made-up GPU: the worker's own `CudaSide`, `TorchLayer` and `SideSelector`, with plain functions in
the place of kernels. These run when their turn comes on the stream on which they were launched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fusion_rt.kernels.cuda import selection, side
from fusion_rt.kernels.cuda._words import OPEN
from fusion_rt.kernels.selection import Range
from tests.torch.cuda_fake.streams import FakeStream
from tests.torch.sync.test_gpu_selection import HostSelector


@dataclass
class FakeFound:
    """Stands for `selection.Found`."""

    groups: Sequence[Sequence[Range]]
    rooms: Sequence[int]
    stream: FakeStream
    steps: int = 0
    rest: Callable[[], None] | None = None  # what a step has left open


class _Devices:
    """Stands for `numba.cuda.gpus`."""

    def __getitem__(self, index: int) -> Any:
        return FakeStream.gpus.device(index)


def _take_largest(
    memory: selection.Memory, found: FakeFound, ks: Sequence[int], out: Any, thresholds: None, surveys: bool,
    digits: bool, stream: FakeStream,
) -> None:  # fmt: skip
    """Stands for `selection.take_largest`; leaves the second step open if it may."""
    given = memory.gradient
    assert given is not None
    velocity = None if memory.velocity is None else memory.velocity.inner
    arguments = (
        (memory.residual.inner, velocity), found.groups, out.inner.numpy(), found.rooms, memory.momentum,
        memory.nesterov,
    )  # fmt: skip

    def run() -> None:
        found.steps += 1
        if digits or found.steps != 2:
            HostSelector(*arguments).start(given.inner, list(ks))
            return
        added, words = given.inner.clone(), out.inner.numpy()  # the gradient may change from now on
        found.rest = lambda: HostSelector(*arguments).start(added, list(ks))
        words[list(accumulate(map(selection.words, found.rooms), initial=0))[:-1]] = OPEN

    with FakeStream.gpus.stream(stream):
        FakeStream.gpus.queue(run)


def _take_open(residual: Any, found: FakeFound, out: Any, stream: FakeStream) -> None:
    """Stands for `selection.take_open`."""

    def run() -> None:
        assert found.rest is not None
        found.rest()

    with FakeStream.gpus.stream(stream):
        FakeStream.gpus.queue(run)


@contextlib.contextmanager
def selecting() -> Iterator[None]:
    """A context in which the made-up GPU selects."""
    numba = SimpleNamespace(
        external_stream=lambda stream: stream, gpus=_Devices(), as_cuda_array=lambda tensor, sync: tensor
    )
    with (
        mock.patch.object(side, "cuda", numba),
        mock.patch.object(side, "Found", FakeFound),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", None, create=True),  # a real one, in some builds
        mock.patch.object(selection, "take_largest", _take_largest),
        mock.patch.object(selection, "take_open", _take_open),
    ):
        yield
