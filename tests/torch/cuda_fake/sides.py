"""Selection on the made-up GPU: the worker's own `CudaSide`, `TorchLayer` and `SideSelector`, with plain functions in
the place of kernels. These run when their turn comes on the stream on which they were launched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fusion_rt.kernels.cuda import selection, side
from fusion_rt.kernels.selection import Range
from tests.torch.cuda_fake.streams import FakeStream
from tests.torch.sync.test_gpu_selection import HostSelector


@dataclass
class FakeFound:
    """Stands for `selection.Found`."""

    groups: Sequence[Sequence[Range]]
    rooms: Sequence[int]
    stream: FakeStream


class _Devices:
    """Stands for `numba.cuda.gpus`."""

    def __getitem__(self, index: int) -> Any:
        return FakeStream.gpus.device(index)


def _take_largest(
    memory: selection.Memory, found: FakeFound, ks: Sequence[int], out: Any, thresholds: None, surveys: bool,
    stream: FakeStream,
) -> None:  # fmt: skip
    """Stands for `selection.take_largest`."""
    given = memory.gradient
    assert given is not None
    velocity = None if memory.velocity is None else memory.velocity.inner
    arguments = (
        (memory.residual.inner, velocity), found.groups, out.inner.numpy(), found.rooms, memory.momentum,
        memory.nesterov,
    )  # fmt: skip

    def run() -> None:
        HostSelector(*arguments).start(given.inner, list(ks))

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
        mock.patch.object(selection, "take_largest", _take_largest),
    ):
        yield
