"""Groups on a node's GPUs, by an NCCL that is made up, on a made-up GPU."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusion_rt.torch.node.groups import GlooGroup, Group, NcclGroup
from tests.torch.cuda_fake.nccl import FakeWork
from tests.torch.cuda_fake.streams import FakeStream, Marker
from tests.torch.cuda_fake.tensors import fake_cuda, on_gpu, value_of

SCHEDULES = range(8)
GPU = torch.device("cuda", 0)


class FakeNccl:
    """Reduces on a stream of its own, which waits for the current one; or never ends.

    Attributes:
        seen: the environment in which groups were made.
    """

    hangs = False
    seen: dict[str, str] = {}  # noqa: RUF012
    aborted = 0
    store: Any

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        FakeNccl.seen = dict(os.environ)
        FakeNccl.store = store
        self._stream = FakeStream()

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        gpus = FakeStream.gpus
        self._stream.wait_stream(gpus.current_stream())
        if self.hangs:
            return FakeWork(gpus, Marker(self._stream))
        with gpus.stream(self._stream):
            tensors[0].mul_(1.0)  # of one rank
        return FakeWork(gpus, self._stream.mark())

    def _reduce_scatter_base(self, part: torch.Tensor, whole: torch.Tensor, options: Any) -> FakeWork:
        return self._copied(part, whole)

    def _allgather_base(self, whole: torch.Tensor, part: torch.Tensor, options: Any) -> FakeWork:
        return self._copied(whole, part)

    def _copied(self, to: torch.Tensor, source: torch.Tensor) -> FakeWork:
        gpus = FakeStream.gpus
        self._stream.wait_stream(gpus.current_stream())
        with gpus.stream(self._stream):
            to.copy_(source)  # of one rank
        return FakeWork(gpus, self._stream.mark())

    def abort(self) -> None:
        FakeNccl.aborted += 1


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "aborted", 0)


def test_the_trial_adds_up_what_the_ranks_have(tmp_path: Path) -> None:
    for seed in SCHEDULES:
        with fake_cuda(seed):
            group = NcclGroup(str(tmp_path / str(seed)), 0, 1, GPU, 30.0, 30.0)
            values = on_gpu(torch.ones(5)) + 1
            group.reduce(values, "sum", None)
            group.settle(values)
            values.add_(1)
            assert value_of(values).eq(3).all(), seed
    assert not FakeNccl.aborted


def test_a_trial_that_never_ends_is_given_up_and_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNccl, "hangs", True)
    store = dist.FileStore(str(tmp_path / "store"), 2)  # type: ignore[attr-defined]
    for rank in (0, 1):
        store.set(f"here/{1 - rank}", "")
        with fake_cuda(0), pytest.raises(RuntimeError, match=r"a reduction has taken more than 0\.05 s"):
            NcclGroup(str(tmp_path / "store"), rank, 2, GPU, 0.05, 30.0)
    assert FakeNccl.aborted == 2


@pytest.mark.parametrize("kind", [NcclGroup, GlooGroup])
def test_nothing_is_connected_before_all_ranks_have_come(
    kind: type[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for those that do not come in calls that nobody can end."""
    monkeypatch.setattr(FakeNccl, "__init__", lambda *arguments: pytest.fail("it was made"))
    where = GPU if kind is NcclGroup else torch.device("cpu")
    with fake_cuda(0), pytest.raises(RuntimeError, match=r"position 1 of 2 did not come within 0\.05 s"):
        kind(str(tmp_path / "store"), 0, 2, where, 0.05, 30.0)  # type: ignore[call-arg]


def test_nobody_waits_long_for_the_file_that_another_rank_has_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch, whoever asks a store whose file is gone waits for it: NCCL's threads do, while the process ends."""
    for hangs in (False, True):
        monkeypatch.setattr(FakeNccl, "hangs", hangs)
        with fake_cuda(0), suppress(RuntimeError):
            NcclGroup(str(tmp_path / "store"), 0, 1, GPU, 0.05, 30.0)
        assert FakeNccl.store.timeout == timedelta(seconds=1)


def test_nccl_does_not_end_the_process_and_the_script_keeps_its_network(tmp_path: Path) -> None:
    before = dict(os.environ)
    with fake_cuda(0):
        NcclGroup(str(tmp_path / "store"), 0, 1, GPU, 30.0, 30.0)
    for watchdog in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
        assert FakeNccl.seen[f"TORCH_NCCL_{watchdog}"] == "0"
    assert FakeNccl.seen.get("NCCL_SOCKET_IFNAME") == before.get("NCCL_SOCKET_IFNAME")
    assert dict(os.environ) == before
