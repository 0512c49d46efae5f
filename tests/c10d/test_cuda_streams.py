"""CUDA tensors through the host, on a made-up GPU whose streams run as late, and in any order, as CUDA allows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusion_rt.c10d.completion import Completer
from fusion_rt.c10d.work import FusionWork
from tests.harness import Job
from tests.torch.cuda_fake.streams import FakeStream
from tests.torch.cuda_fake.tensors import fake_cuda, on_gpu, value_of

pytestmark = pytest.mark.multiprocess

SCHEDULES = range(8)
LENGTHS = (40, 9000)  # inside messages, and through the arena


def _in_group(store: str, body: Callable[..., Any]) -> None:
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    dist.init_process_group("fusion", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        for seed in SCHEDULES:
            for length in LENGTHS:
                with fake_cuda(seed):
                    body(rank, size, length)
    finally:
        dist.destroy_process_group()


def _results(rank: int, size: int, length: int) -> None:
    """Inputs are computed on the current stream, and results are read there."""
    gpus, own = FakeStream.gpus, torch.arange(length).float()
    total = sum(range(1, size + 1))
    with gpus.stream(FakeStream()):
        given = on_gpu(own) * (rank + 1)
        dist.all_reduce(given)
        assert torch.equal(value_of(given * 1), total * own)
        given = on_gpu(own) * (rank + 1)
        gathered = on_gpu(torch.zeros(size * length))
        dist.all_gather_into_tensor(gathered, given)
        assert torch.equal(value_of(gathered * 1), torch.cat([own * (other + 1) for other in range(size)]))
        scattered = on_gpu(torch.zeros(length))
        dist.reduce_scatter_tensor(scattered, gathered)
        assert torch.equal(value_of(scattered * 1), own * (rank + 1) * size)
        if rank == 0:
            dist.send(given + 1, 1)
        elif rank == 1:
            dist.recv(given, 0)
            assert torch.equal(value_of(given * 1), own + 1)


def _reads_before(rank: int, size: int, length: int) -> None:
    """What was queued before an operation reads its tensor as it was, on whichever stream the result comes back."""
    gpus, own = FakeStream.gpus, torch.arange(length).float()
    with gpus.stream(FakeStream()):
        tensor = on_gpu(own + rank)
        before = tensor * 1
        under_way = dist.broadcast(tensor, 0, async_op=True)
    assert under_way is not None
    under_way.wait()
    assert torch.equal(value_of(before), own + rank)
    assert torch.equal(value_of(tensor), own)


def test_results_are_those_of_what_was_queued(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _results)


def test_results_come_after_what_was_queued_before(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _reads_before)


def _to_itself(rank: int, size: int, length: int) -> None:
    """A worker's message to itself, sent on one stream and received on another, in either order."""
    gpus, own = FakeStream.gpus, torch.arange(length).float()
    streams = FakeStream(), FakeStream()
    for first, second in ((dist.isend, dist.irecv), (dist.irecv, dist.isend)):
        given, taken = on_gpu(own), on_gpu(own)
        with gpus.stream(streams[0]):
            given.mul_(3)
        with gpus.stream(streams[1]):
            before = taken * 1
        works = []
        for stream, start in zip(streams if first is dist.isend else reversed(streams), (first, second), strict=True):
            with gpus.stream(stream):
                works.append(start(given if start is dist.isend else taken, rank))
        for each in works:
            assert each is not None
            each.wait()
        assert torch.equal(value_of(taken), 3 * own)
        assert torch.equal(value_of(before), own)


def test_messages_to_itself_are_in_the_order_of_both_streams(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _to_itself)


def test_a_future_is_told_on_which_devices_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch refuses them, and DDP could not use such a future."""
    made, told = torch.futures.Future.__init__, []

    def make(future: Any, *, devices: Any = None) -> None:
        told.append(devices)
        made(future)

    monkeypatch.setattr(torch.futures.Future, "__init__", make)
    completer: Any = Completer(None)  # type: ignore[arg-type]
    with fake_cuda(0, count=2):
        there = on_gpu(torch.zeros(3), 1)
        for results in ([there], [torch.zeros(3)], [[on_gpu(torch.zeros(3)), torch.zeros(3)], there]):
            FusionWork(completer, "all_reduce", [], results).get_future()
    gpus = torch.device("cuda", 0), torch.device("cuda", 1)
    assert told == [[gpus[1]], [], [*gpus]]
